"""fp32 masters of a wrapped model, and an ordinary optimizer over copies of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

import streamer
from streamer.engine.guard import unguarded
from streamer.engine.handle import require_home, wrapped
from streamer.optim.replay.shadow import same
from tests.reference import language_loss

#: Gives an optimizer over parameters, or parameter groups.
Make = Callable[[Sequence[Any]], Optimizer]

#: The attribute of a parameter of a plain model that holds its fp32 master.
MASTER = "_master"


def master(param: torch.Tensor) -> torch.Tensor:
    """A copy of a parameter's fp32 master."""
    home = require_home(param)
    home.executor.synchronize()
    with unguarded():
        whole = home.executor.across.whole_shard(home.unit, only=home.slice)  # also where machines divide it
        return whole.exact(home.slice).float()


def rounded(held: torch.Tensor) -> torch.Tensor:
    """The bf16 weights of fp32 masters: to the nearest, halves away from zero."""
    return ((held.view(torch.int32) + 0x8000) & -0x10000).view(torch.float32).bfloat16()


def masters(params: Sequence[torch.Tensor]) -> list[nn.Parameter]:
    """fp32 parameters with the values of the masters."""
    return [nn.Parameter(master(param)) for param in params]


def take_gradients(params: Sequence[nn.Parameter], of: Sequence[nn.Parameter], factor: float = 1.0) -> None:
    """Give ``params`` copies of the gradients ``of`` others in fp32, times ``factor``."""
    for param, other in zip(params, of, strict=True):
        param.grad = None if other.grad is None else other.grad.detach().clone().float() * factor


def clipped(model: nn.Module, max_norm: float) -> float:
    """Clip the gradients of a wrapped model. Returns the coefficient, which is in float64."""
    norm = streamer.clip_grad_norm_(model, max_norm)
    factor = wrapped(model).executor.gradients.factor
    assert abs(factor - min(1.0, max_norm / norm.item())) < 1e-4
    return factor


class SGDOnMasters(torch.optim.SGD):
    """SGD on fp32 masters of the parameters of a plain model, which are rounded as those of a wrapped
    one: to the nearest, halves away from zero. A master is a parameter's attribute `MASTER`, or its value."""

    def __init__(self, params: Iterable[nn.Parameter], **options: Any) -> None:
        self._params = [*params]
        masters = [vars(param).get(MASTER, param.detach().float()) for param in self._params]
        super().__init__([nn.Parameter(each) for each in masters], **options)

    @property
    def _masters(self) -> list[nn.Parameter]:
        masters: list[nn.Parameter] = self.param_groups[0]["params"]
        return masters

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        take_gradients(self._masters, self._params)
        super().step()
        for param, held in zip(self._params, self._masters, strict=True):
            param.data.copy_(held if param.dtype == torch.float32 else rounded(held.detach()))

    def zero_grad(self, set_to_none: bool = True) -> None:
        for param in self._params:
            param.grad = None


def with_and_without_decay(params: Sequence[nn.Parameter]) -> list[dict[str, Any]]:
    """Two groups, as in most training scripts: matrices decay, vectors do not."""
    matrices = [param for param in params if param.dim() > 1]
    vectors = [param for param in params if param.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def train_both(
    model: nn.Module,
    params: Sequence[nn.Parameter],
    streamed: Optimizer,
    plain: Optimizer,
    copies: Sequence[nn.Parameter],
    *,
    steps: int,
    first: int = 0,
    clip: Callable[[nn.Module], float] = lambda model: 1.0,
) -> None:
    """Train with the optimizer of a wrapped model, and by ``plain`` the copies, on the same gradients.
    ``clip`` clips those of the model, and returns what it multiplies them by."""
    for step in range(first, first + steps):
        torch.manual_seed(step)
        language_loss(model, step).backward()
        take_gradients(copies, params)  # before they are clipped, for who reads them then has them multiplied
        factor = clip(model)
        for copy in copies:
            if copy.grad is not None:
                copy.grad *= factor
        streamed.step()
        plain.step()
        model.zero_grad()


def assert_same_state(streamed: Optimizer, plain: Optimizer, *, tolerance: float = 0.0) -> None:
    """Masters, state and groups of two optimizers are the same, but for a relative error of ``tolerance``."""
    for group, other in zip(streamed.param_groups, plain.param_groups, strict=True):
        assert {**group, "params": 0} == {**other, "params": 0}
        for param, copy in zip(group["params"], other["params"], strict=True):
            _assert_near(master(param), copy.detach(), tolerance)
            state, there = streamed.state[param], plain.state[copy]
            assert state.keys() == there.keys()
            for name, value in there.items():
                if isinstance(value, torch.Tensor):
                    assert state[name].dtype == value.dtype
                    _assert_near(state[name], value, tolerance)
                else:
                    assert same(state[name], value)


def _assert_near(found: torch.Tensor, wanted: torch.Tensor, tolerance: float) -> None:
    largest = wanted.abs().max().item() if wanted.numel() else 0.0
    torch.testing.assert_close(found, wanted, rtol=0, atol=tolerance * largest)
