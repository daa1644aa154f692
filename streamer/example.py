"""A model and a batch for it without values, with which `wrap` plans."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from streamer.engine.tree import Rebuild, flatten
from streamer.optim import AdamW


def skeleton(model: nn.Module) -> nn.Module:
    """A copy of ``model`` on the meta device, whose parameters, buffers and plain tensor attributes have no
    values: none is copied. What is shared is shared in the copy.

    Raises ValueError where a module cannot be copied.
    """
    memo: dict[int, Any] = {}
    for param in model.parameters():
        memo[id(param)] = nn.Parameter(torch.empty_like(param, device="meta"), param.requires_grad)
    held = [value for module in model.modules() for value in vars(module).values()]
    for tensor in (*model.buffers(), *(value for value in held if isinstance(value, torch.Tensor))):
        without = torch.empty_like(tensor, device="meta", requires_grad=tensor.requires_grad)
        memo.setdefault(id(tensor), without)
    try:
        return copy.deepcopy(model, memo)
    except (TypeError, RuntimeError) as error:
        raise ValueError(
            f"'auto' plans a copy of the model, and this {type(model).__name__} cannot be copied "
            f"({_one_line(error)}): give activations, num_slots and micro_batch_size yourself"
        ) from error


@dataclass(frozen=True)
class Batch:
    """What a model is called with in a plan: tensors without values."""

    tensors: list[torch.Tensor]
    rebuild: Rebuild

    @staticmethod
    def like(example: object) -> Batch:
        """Raises ValueError for what is no batch."""
        if isinstance(example, torch.Tensor):
            example = (example,)
        if not isinstance(example, tuple | Mapping):
            raise ValueError(
                "'auto' needs a batch to plan with: give wrap(example=...) a tensor, a tuple of the model's "
                "arguments, or a dict of them by name; only shapes and dtypes are used"
            )
        given = ((), dict(example)) if isinstance(example, Mapping) else (example, {})
        tensors, rebuild = flatten(given)
        if not any(tensor.dim() for tensor in tensors):
            raise ValueError("example: there is no tensor in it whose first dimension could be the batch")
        batch = Batch([torch.empty_like(tensor, device="meta") for tensor in tensors], rebuild)
        if not batch.size:
            raise ValueError("example: its batch is empty: give one as large as those of the steps")
        return batch

    @property
    def size(self) -> int:
        """Samples: the first dimension of its first tensor that has one."""
        return next(tensor.shape[0] for tensor in self.tensors if tensor.dim())

    def check_arguments(self, model: nn.Module) -> None:
        """Raise ValueError unless they are arguments of ``model``'s forward."""
        args, kwargs = self.rebuild(self.tensors)
        try:
            inspect.signature(model.forward).bind(*args, **kwargs)
        except TypeError as error:
            raise ValueError(
                f"example: it is not what {type(model).__name__}.forward takes ({error}): give a tensor, a "
                "tuple of the model's arguments, or a dict of them by name"
            ) from error

    def step(self, model: nn.Module) -> Callable[[], None]:
        """A step of ``model`` on it: forward, backward of its ``loss`` or of the sum of all that it returns,
        and AdamW."""
        args, kwargs = self.rebuild(self.tensors)
        is_trained = any(param.requires_grad for param in model.parameters())
        optimizer = AdamW(model.parameters()) if is_trained else None

        def step() -> None:
            result = model(*args, **kwargs)
            loss = getattr(result, "loss", None)
            found = [loss] if isinstance(loss, torch.Tensor) else flatten(result)[0]
            summed = [tensor.sum() for tensor in found if tensor.requires_grad]
            if optimizer is not None and summed:
                torch.stack([value.float() for value in summed]).sum().backward()
                optimizer.step()
                optimizer.zero_grad()

        return step


def not_planned(error: Exception) -> ValueError:
    """What to raise where a step cannot be run."""
    told = _one_line(error)
    if isinstance(error, NotImplementedError) or "meta" in told:
        return ValueError(
            f"'auto' runs the model without values, which this one needs ({told}): give activations, "
            "num_slots and micro_batch_size yourself"
        )
    return ValueError(f"example: the model cannot run on a batch like it ({told})")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
