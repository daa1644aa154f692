"""Find which way of taking a step is exact for an optimizer: a few steps on tiny tensors, compared with plain
steps.

The optimizer's class takes eight steps with the optimizer's options on a few tensors of some elements each,
once as PyTorch takes them and once in each `Way`. A way is exact if parameters, state, groups and attributes
are bitwise equal after every step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from streamer.optim.replay.shadow import CoupledError, StandIns, Values, same, stand_in_for
from streamer.optim.replay.step import Call, Step, Way

#: Scales of the gradients, by step: they cross the clipping thresholds of optimizers in both directions.
_SIZES = (1e-3, 1e-2, 1.0, 30.0, 0.1, 1e-2, 1e-3, 1.0)
#: Parameters taken from a group for each number of dimensions, and the size of their longest dimension.
_OF_EACH, _LONGEST = 3, 16


def way_of(optimizer: Optimizer, call: Call) -> Way:
    """The first exact `Way` to take the steps of ``optimizer``; ``call`` is a call of its ``step``.

    Raises CoupledError if none is exact, and any error of the optimizer's ``step`` on such tensors.
    """
    random = torch.get_rng_state()
    try:
        with torch.random.fork_rng(devices=[]):
            plain, with_state = _plainly(optimizer, call)
            draws = not torch.equal(random, torch.get_rng_state())
        reasons = []
        for way in Way:
            if draws and way is not Way.WHOLE:
                continue  # another order of parameters would draw other random numbers
            with torch.random.fork_rng(devices=[]):
                tried = _Run(optimizer, call, with_state=with_state)
                try:
                    tried.run(way)
                except Exception as error:  # any error of the optimizer's own code rules this way out
                    reasons.append(str(error).rstrip("."))
                    continue
            if not (different := plain.differing(tried)):
                return way
            reasons.append(f"{different} differs from a step for all parameters")
        raise CoupledError(reasons[0])
    finally:
        torch.set_rng_state(random)


def _plainly(optimizer: Optimizer, call: Call) -> tuple[_Run, bool]:
    """A run of steps as PyTorch takes them, and whether it began with state, which some constructors create
    (Adagrad's). Raises any error of the optimizer."""
    try:
        run = _Run(optimizer, call, with_state=False)
        run.run_plainly()
        return run, False
    except Exception:  # any error of an optimizer's own code
        run = _Run(optimizer, call, with_state=True)
        run.run_plainly()
        return run, True


def ready(shadow: Optimizer) -> Optimizer:
    """Put ``shadow`` in the mode for steps, which schedule-free optimizers have."""
    if hasattr(shadow, "train"):
        shadow.train()
    return shadow


class _Run:
    """Steps on tiny tensors by a shadow of ``optimizer``."""

    def __init__(self, optimizer: Optimizer, call: Call, *, with_state: bool) -> None:
        """The state is empty at first, or a small copy of the optimizer's if ``with_state``."""
        self._call = call
        self._sizes = _small_sizes(optimizer)
        generator = torch.Generator().manual_seed(0)
        chosen = _chosen(optimizer)
        self._params = {id(param): self._small(param, generator) for param in chosen}
        held = optimizer.state
        state = {
            id(param): self._small_state(param, dict.__getitem__(held, param))
            for param in chosen
            if with_state and dict.__contains__(held, param)
        }
        self.optimizer = ready(Values.of(optimizer).shadow(optimizer, self._params, state))
        self.results: list[list[torch.Tensor]] = []

    @property
    def params(self) -> list[nn.Parameter]:
        return [param for group in self.optimizer.param_groups for param in group["params"]]

    def _small(self, param: torch.Tensor, generator: torch.Generator) -> nn.Parameter:
        shape = [self._sizes[size] for size in param.shape]
        return nn.Parameter(torch.randn(shape, generator=generator) * 0.1)

    def _small_state(self, param: torch.Tensor, state: Mapping[str, Any]) -> dict[str, Any]:
        """The state in the shapes of the small parameter; empty if they cannot be derived from its shape."""
        small = dict[str, Any]()
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.numel() > 1:
                if not {*value.shape} <= {*param.shape}:
                    return {}
                value = value[tuple(slice(self._sizes[size]) for size in value.shape)]
            if isinstance(value, torch.Tensor):
                value = value.detach().to(
                    torch.float32 if value.is_floating_point() else value.dtype, copy=True
                )
            small[name] = value
        return small

    def _set_gradients(self, step: int) -> None:
        generator = torch.Generator().manual_seed(step)
        for param in self.params:
            param.grad = torch.randn(param.shape, generator=generator) * _SIZES[step]

    def run_plainly(self) -> None:
        for step in range(len(_SIZES)):
            self._set_gradients(step)
            self._call.run(self.optimizer)
            self.results.append([param.detach().clone() for param in self.params])

    def run(self, way: Way) -> None:
        stand_ins = {id(param): stand_in_for(param) for param in self.params}
        for number in range(len(_SIZES)):
            self._set_gradients(number)
            step = Step(self.optimizer, stand_ins, self._call)
            parts = [_TinyPart(params) for params in _in_parts(self.params)]
            if way is Way.PARTS:
                step.foresee()
                for part in parts:
                    step.take(part)
            else:
                step.take_all(parts, paged=way is Way.PAGED)
            step.apply()
            self.results.append([param.detach().clone() for param in self.params])

    def differing(self, other: _Run) -> str:
        """The name of a difference from another run, empty if there is none."""
        if not same(self.results, other.results):
            return "a parameter"
        if names := Values.of(self.optimizer).differing(Values.of(other.optimizer)):
            return names[0]
        mine, others = ([run.optimizer.state.get(param, {}) for param in run.params] for run in (self, other))
        return "" if same([*map(dict, mine)], [*map(dict, others)]) else "the state"


class _TinyPart:
    """A part whose masters are tensors; the stand-ins' memory holds NaN between steps."""

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        self.params = params
        self._stand_ins: list[nn.Parameter] = []

    def load(self, stand_ins: StandIns) -> None:
        self._stand_ins = [stand_ins[id(param)] for param in self.params]
        for stand_in, param in zip(self._stand_ins, self.params, strict=True):
            assert param.grad is not None
            stand_in.data, stand_in.grad = param.detach().clone(), param.grad.clone()

    def store(self) -> None:
        for stand_in, param in zip(self._stand_ins, self.params, strict=True):
            param.data.copy_(stand_in.detach())
            stand_in.data.fill_(torch.nan)
            assert stand_in.grad is not None
            stand_in.grad.fill_(torch.nan)


def _in_parts(params: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Parts of two parameters and of one, alternating."""
    return [
        [param for _, param in part] for _, part in groupby(enumerate(params), lambda each: each[0] * 2 // 3)
    ]


def _chosen(optimizer: Optimizer) -> list[torch.Tensor]:
    """A few parameters of each group and number of dimensions."""
    chosen = []
    for group in optimizer.param_groups:
        counts = dict[int, int]()
        for param in group["params"]:
            counts[param.dim()] = counts.get(param.dim(), 0) + 1
            if counts[param.dim()] <= _OF_EACH:
                chosen.append(param)
    return chosen


def _small_sizes(optimizer: Optimizer) -> dict[int, int]:
    """A small size for each size of a dimension. Equal sizes stay equal, and longer ones longer, as far as
    the small sizes suffice."""
    params = _chosen(optimizer)
    sizes = sorted({size for param in params for size in param.shape})
    return {size: min(size, _LONGEST, 3 + 2 * place) for place, size in enumerate(sizes)}
