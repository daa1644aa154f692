"""One call of a layer: its own forward, on weights from a slot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from streamer.engine.tree import Rebuild, fingerprint, flatten
from streamer.engine.unit import Unit

Tensors = Sequence[torch.Tensor]


@dataclass(frozen=True)
class Call:
    """A layer's plain forward with everything but tensors bound: ``rebuild`` makes its (args, kwargs)."""

    unit: Unit
    forward: Callable[..., Any]
    rebuild: Rebuild

    def run(
        self, weights: torch.Tensor, leaves: Tensors, inputs: Tensors
    ) -> tuple[list[torch.Tensor], Rebuild]:
        """Run it with ``leaves``, which are views of the slot ``weights``, as parameters.

        Returns the tensors of the result and what puts the result together. None of them aliases the
        slot, which will soon hold another layer. Raises ValueError if the layer changes its arguments.
        """
        args, kwargs = self.rebuild(inputs)
        before = fingerprint((args, kwargs))
        try:
            with self.unit.using(leaves):
                result = self.forward(*args, **kwargs)
        except RuntimeError as error:
            # autograd's own refusal, where the graph is built in forward, names no layer
            if "in-place operation" in str(error):
                raise self._changes_its_arguments() from error
            raise
        if fingerprint((args, kwargs)) != before:
            raise self._changes_its_arguments()
        return flatten(without_aliases(result, weights))

    def _changes_its_arguments(self) -> ValueError:
        return ValueError(
            f"layer '{self.unit.name}' changes what it is given (a tensor in place, or a list or a cache "
            "among its arguments), so it cannot run again in backward: let it return the new value"
        )


def without_aliases(result: Any, weights: torch.Tensor) -> Any:
    """``result`` with copies of the tensors in it that are views of the slot ``weights``."""
    outputs, rebuild = flatten(result)
    return rebuild([out.clone() if aliases(out, weights) else out for out in outputs])


def aliases(tensor: torch.Tensor, buffer: torch.Tensor) -> bool:
    """Whether both share one storage (its identity, since all meta tensors have the same address)."""
    return bool(tensor.untyped_storage()._cdata == buffer.untyped_storage()._cdata)
