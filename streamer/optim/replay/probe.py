"""Find which way of taking a step is exact for an optimizer: a few steps on tiny tensors, compared with plain
steps.

The optimizer's class takes eight steps with the optimizer's options on a few tensors of some elements each,
once as PyTorch takes them and once in each `Way`. A way is exact if parameters, state, groups and attributes
are bitwise equal after every step. Some optimizers treat matrices above a size differently (Adafactor's
factors from 128 rows on), so pieces are tried on larger tensors too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
#: Steps on larger tensors, and the size of their longest dimension.
_LARGE_STEPS, _LARGE = 2, 320


def way_of(optimizer: Optimizer, call: Call) -> Way:
    """The first exact `Way` to take the steps of ``optimizer``; ``call`` is a call of its ``step``.

    Raises CoupledError if none is exact, and any error of the optimizer's ``step`` on such tensors.
    """
    random = torch.get_rng_state()
    try:
        with torch.random.fork_rng(devices=[]):
            plain, with_state = _plainly(optimizer, call)
            draws = not torch.equal(random, torch.get_rng_state())
        reasons = dict[Way, str]()
        for way in Way:
            if draws and way is not Way.WHOLE:
                continue  # another order of parameters would draw other random numbers
            if way is Way.PIECES and hasattr(optimizer, "eval"):
                continue  # that method updates whole parameters
            try:
                different = _difference(plain, optimizer, call, way, with_state=with_state)
                if way is Way.PIECES and not different:
                    large = _Run(optimizer, call, with_state=with_state, is_large=True)
                    large.run_plainly()
                    different = _difference(large, optimizer, call, way, with_state=with_state)
            except Exception as error:  # any error of the optimizer's own code rules this way out
                reasons[way] = str(error).rstrip(".")
                continue
            if not different:
                return way
            reasons[way] = f"{different} differs from a step for all parameters"
        raise CoupledError(reasons.get(Way.PARTS, reasons[Way.WHOLE]))
    finally:
        torch.set_rng_state(random)


def _difference(plain: _Run, optimizer: Optimizer, call: Call, way: Way, *, with_state: bool) -> str:
    """The name of a difference between plain steps and those of this ``way``, empty if there is none."""
    with torch.random.fork_rng(devices=[]):
        tried = _Run(optimizer, call, with_state=with_state, is_large=plain.is_large)
        tried.run(way)
    return plain.differing(tried)


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

    def __init__(self, optimizer: Optimizer, call: Call, *, with_state: bool, is_large: bool = False) -> None:
        """The state is empty at first, or a small copy of the optimizer's if ``with_state``. ``is_large`` is
        for fewer steps on vectors and matrices of up to `_LARGE` rows and columns."""
        self._call, self.is_large = call, is_large
        self._steps = _LARGE_STEPS if is_large else len(_SIZES)
        chosen = _chosen(optimizer, most_dims=2 if is_large else None)
        self._sizes = _small_sizes(chosen, is_large=is_large)
        generator = torch.Generator().manual_seed(0)
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
        for step in range(self._steps):
            self._set_gradients(step)
            self._call.run(self.optimizer)
            self.results.append([param.detach().clone() for param in self.params])

    def run(self, way: Way) -> None:
        stand_ins = {id(param): stand_in_for(param) for param in self.params}
        for number in range(self._steps):
            self._set_gradients(number)
            step = Step(self.optimizer, stand_ins, self._call)
            parts = [_TinyPart(params) for params in _in_parts(self.params)]
            if way.by_part:
                step.foresee()
                take = step.take_in_pieces if way is Way.PIECES else step.take
                for part in parts:
                    take(part)
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

    def pieces(self) -> Iterator[_TinyPiece]:
        """Each parameter in three pieces, a small one as it is."""
        for param in self.params:
            third = -(-param.numel() // 3)
            if third < 2:
                yield _TinyPiece(param, None)
                continue
            for start in range(0, param.numel(), third):
                yield _TinyPiece(param, range(start, min(start + third, param.numel())))

    def store_in_place(self) -> None:
        """These masters are not on disk."""


class _TinyPiece:
    """A piece of a parameter, as a flat vector."""

    def __init__(self, param: nn.Parameter, elements: range | None) -> None:
        self.params, self.elements = [param], elements
        self._place = slice(None) if elements is None else slice(elements.start, elements.stop)
        self._shape = param.shape if elements is None else (len(elements),)
        self._master = torch.empty(0)

    def load(self, stand_ins: StandIns) -> None:
        (param,) = self.params
        assert param.grad is not None
        self._master = param.detach().view(-1)[self._place].clone()
        stand_in = stand_ins[id(param)]
        stand_in.data = self._master.view(self._shape)
        stand_in.grad = param.grad.view(-1)[self._place].clone().view(self._shape)

    def store(self) -> None:
        self.params[0].data.view(-1)[self._place] = self._master
        self._master.fill_(torch.nan)


def _in_parts(params: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Parts of two parameters and of one, alternating."""
    return [
        [param for _, param in part] for _, part in groupby(enumerate(params), lambda each: each[0] * 2 // 3)
    ]


def _chosen(optimizer: Optimizer, most_dims: int | None) -> list[torch.Tensor]:
    """A few parameters of each group and number of dimensions, up to ``most_dims`` unless it is None."""
    chosen = []
    for group in optimizer.param_groups:
        counts = dict[int, int]()
        for param in group["params"]:
            counts[param.dim()] = counts.get(param.dim(), 0) + 1
            if counts[param.dim()] <= _OF_EACH and (most_dims is None or param.dim() <= most_dims):
                chosen.append(param)
    return chosen


def _small_sizes(params: Sequence[torch.Tensor], *, is_large: bool) -> dict[int, int]:
    """A small size for each size of a dimension. Equal sizes stay equal, and longer ones longer, as far as
    the small sizes suffice."""
    sizes = sorted({size for param in params for size in param.shape})
    if is_large:
        return {size: min(size, _LARGE) for size in sizes}
    return {size: min(size, _LONGEST, 3 + 2 * place) for place, size in enumerate(sizes)}
