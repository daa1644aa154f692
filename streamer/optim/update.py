"""The update of one host shard: the kernel for each dtype, in one launch over adjacent parameters."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import compress
from typing import Any, NamedTuple

import numpy as np
import torch

import streamer_native as native
from streamer.store.host import HostStore
from streamer.store.layout import Layout, Param, Slice, Stretch
from streamer.store.purposes import BF16, FP16, FP32, GRADIENTS, MASTERS, MOMENTS, REMAINDERS, SUMS, Purpose
from streamer.store.shard import HostShard, array
from streamer.store.shares import within


class ParamUpdate(NamedTuple):
    """The update of one parameter; ``summed`` if its gradient is an fp32 sum of several."""

    slice: Slice
    hyper: native.Hyper
    summed: bool = False


class Launches:
    """The kernel launches that update parameters of one unit, with moments of ``state_dtype``. They stay the
    same as long as the same parameters have gradients and share hyperparameters.

    ``params`` has, for each parameter, its slice, the index of its hyperparameters, and whether its gradient
    is an fp32 sum of several.
    """

    def __init__(self, params: Iterable[tuple[Slice, int, bool]], state_dtype: torch.dtype) -> None:
        self.state_dtype = state_dtype
        self._params = [*params]
        # One launch for all parameters of a dtype. A unit of mixed dtypes needs one for each distance between
        # a parameter's places in the weights and in the state.
        alike: dict[tuple[torch.dtype, int, bool], list[tuple[Slice, int]]] = defaultdict(list)
        for slice, number, is_summed in sorted(self._params, key=lambda each: each[0].index):
            alike[slice.dtype, slice.distance, is_summed].append((slice, number))
        self.each = [
            _Launch(several, is_summed=is_summed, by_parameter=state_dtype != FP32)
            for (_, _, is_summed), several in alike.items()
        ]
        self._nbytes: dict[range, int] = {}

    def nbytes(self, elements: range) -> int:
        """Bytes of host memory read and written by an update of only these ``elements`` of the unit's
        state."""
        if elements not in self._nbytes:
            self._nbytes[elements] = sum(
                max(0, min(slice.index + slice.padded, elements.stop) - max(slice.index, elements.start))
                * _element_bytes(slice.dtype, self.state_dtype, is_summed)
                for slice, _, is_summed in self._params
            )
        return self._nbytes[elements]

    def only(self, mask: Iterable[bool]) -> Launches:
        """The launches for those parameters for which ``mask`` is True."""
        return Launches(compress(self._params, mask), self.state_dtype)


class _Row(NamedTuple):
    """Elements ``start`` to ``stop`` of a unit's state, with the index of their hyperparameters. Their scales
    start at ``block``."""

    start: int
    stop: int
    number: int
    block: int


class _Launch:
    """One launch, for parameters in the same order in the weights and in the state, each with the index of
    its hyperparameters.

    Neighbours with the same hyperparameters are one row, padding included. With ``by_parameter`` each
    parameter is one row, without padding: an 8-bit block belongs to one parameter, and random bits are
    counted from the parameter's start, independent of the other parameters in the launch.
    """

    def __init__(self, params: Sequence[tuple[Slice, int]], *, is_summed: bool, by_parameter: bool) -> None:
        first, last = params[0][0], params[-1][0]
        self.whole = Stretch(first.dtype, first.offset, first.index, last.index + last.padded - first.index)
        self.is_summed = is_summed
        self._rows: list[_Row] = []
        for slice, number in params:
            stop = slice.index + (slice.numel if by_parameter else slice.padded)
            before = self._rows[-1] if self._rows and not by_parameter else None
            if before is not None and (before.stop, before.number) == (slice.index, number):
                self._rows[-1] = before._replace(stop=stop)
            else:
                self._rows.append(_Row(slice.index, stop, number, slice.block))
        self._within: dict[range, tuple[Stretch, list[_Row]]] = {}

    def within(self, elements: range) -> tuple[Stretch, list[_Row]]:
        """The launch's stretch and rows, restricted to these elements of the unit's state."""
        if elements not in self._within:
            here = within(self.whole, elements)
            rows = []
            for row in self._rows:
                start, stop = max(row.start, here.index), min(row.stop, here.index + here.numel)
                if start < stop:
                    block = row.block + (start - row.start) // native.QUANTUM
                    rows.append(_Row(start, stop, row.number, block))
            self._within[elements] = here, rows
        return self._within[elements]


class UnitUpdate(NamedTuple):
    """An update of parameters of one unit; each refers to one of ``hypers`` by index."""

    launches: Launches
    hypers: Sequence[native.Hyper]

    @staticmethod
    def of(updates: Sequence[ParamUpdate], state_dtype: torch.dtype) -> UnitUpdate:
        """These updates, with moments of ``state_dtype``."""
        hypers = [*dict.fromkeys(update.hyper for update in updates)]
        params = ((slice, hypers.index(hyper), summed) for slice, hyper, summed in updates)
        return UnitUpdate(Launches(params, state_dtype), hypers)


@cache
def _element_bytes(dtype: torch.dtype, state_dtype: torch.dtype, summed: bool) -> int:
    # Weight and moments are read and written, as are the remainder of a split master (2 bytes) and a whole
    # fp32 master (4). The gradient is read. Scales of 8-bit moments do not count.
    master_bytes = {FP32: 0, BF16: 2, FP16: 4}[dtype]
    gradient = FP32.itemsize if summed else dtype.itemsize
    return 2 * (dtype.itemsize + master_bytes + 2 * state_dtype.itemsize) + gradient


def check_state_dtype(param: Param, state_dtype: torch.dtype) -> None:
    """Raise ValueError if a parameter's moments cannot be kept in ``state_dtype``."""
    if param.trainable and param.dtype != BF16 and state_dtype != FP32:
        raise ValueError(
            f"moments in {state_dtype} need bfloat16 parameters, and '{param.name}' is {param.dtype}: leave "
            "state_dtype at torch.float32, or wrap the model with dtype=torch.bfloat16"
        )


def warm_up(layouts: Sequence[Layout], state_dtype: torch.dtype) -> None:
    """Load, or compile, the kernels that models of these layouts may need, on one-element parameters."""
    dtypes = {slice.param.dtype for layout in layouts for slice in layout.trainable}
    small = Layout.of(Param("", (1,), dtype, True) for dtype in dtypes)
    store = HostStore([small], lambda nbytes, *, pinned: torch.zeros(nbytes, dtype=torch.uint8))
    store.add([GRADIENTS, SUMS, *MOMENTS[state_dtype]])
    (shard,) = store.shards
    hyper = native.Hyper(0.0, 0.0, 0.0, 1.0, 0.0, 1)
    for slice in small.slices:
        gradient, total = array(slice.view(shard.gradient)), array(slice.state(shard.sums))
        update_shard(shard, UnitUpdate.of([ParamUpdate(slice, hyper)], state_dtype), 1.0)
        native.sum_squares(gradient)
        native.accumulate(gradient, gradient.copy())
        if slice.param.dtype != FP32:
            native.add(total, gradient, gradient)
            native.accumulate(total, gradient)
            summed = ParamUpdate(slice, hyper, summed=True)
            update_shard(shard, UnitUpdate.of([summed], state_dtype), 1.0)


def update_shard(
    shard: HostShard,
    update: UnitUpdate,
    grad_scale: float,
    *,
    seed: int = 0,
    gradient: torch.Tensor | None = None,
) -> None:
    """AdamW on parameters of ``shard``, with moments as `MOMENTS` defines for the dtype of their state; for a
    `Window`, on the part of them in its chunk.

    The gradient, ``shard``'s or the argument's (flat uint8, in the shard's layout), is multiplied by
    ``grad_scale`` first. Moments below fp32 are rounded with random bits derived from ``seed``, which must
    differ between units.
    """
    shard.about_to_change()
    for launch in update.launches.each:
        here, rows = launch.within(shard.range)
        if not here.numel:
            continue
        if launch.is_summed:
            grad = array(here.state(shard.sums))
        else:
            grad = _array(here, shard.gradient if gradient is None else gradient)
        origin = here.index - launch.whole.index
        _run(shard, here, rows, update, grad, grad_scale, seed, origin)


def all_finite(gradient: torch.Tensor, stretches: Iterable[Stretch]) -> bool:
    """Whether these stretches of a gradient (flat uint8) are finite everywhere."""
    return all(math.isfinite(native.sum_squares(array(stretch.view(gradient)))) for stretch in stretches)


def _array(stretch: Stretch, buffer: torch.Tensor) -> Any:
    """A stretch of a flat uint8 buffer of weights or gradients, in the form that the kernels take."""
    return array(buffer)[stretch.offset : stretch.offset + stretch.nbytes].view(_IN_NUMPY[stretch.dtype])


_IN_NUMPY = {FP32: np.float32, FP16: np.float16, BF16: np.uint16}


def _run(
    shard: HostShard,
    here: Stretch,
    rows: Sequence[_Row],
    update: UnitUpdate,
    grad: Any,
    grad_scale: float,
    seed: int,
    origin: int,
) -> None:
    """Launch a kernel for the ``rows`` of ``update`` on the stretch ``here``, which starts at element
    ``origin`` of the whole launch."""

    def state(purpose: Purpose) -> Any:
        begin = here.index - shard.begin(purpose)
        return array(shard[purpose])[begin : begin + here.numel]

    weight, state_dtype = _array(here, shard.weight), update.launches.state_dtype
    exp_avg, exp_avg_sq, *scales = MOMENTS[state_dtype]
    moments = state(exp_avg), state(exp_avg_sq)
    first_scale = shard.begin(scales[0]) if scales else 0
    segments = [
        native.Segment(start - here.index, stop - here.index, update.hypers[number], block - first_scale)
        for start, stop, number, block in rows
    ]
    if here.dtype == FP32:
        native.adamw_fp32(weight, grad, *moments, segments, grad_scale=grad_scale)
        return
    if here.dtype == FP16:
        native.adamw_fp16(weight, state(MASTERS), grad, *moments, segments, grad_scale=grad_scale)
        return
    split = weight, state(REMAINDERS), grad, *moments
    if state_dtype == FP32:
        native.adamw_split(*split, segments, grad_scale=grad_scale)
    elif state_dtype == BF16:
        native.adamw_split_bf16(*split, segments, grad_scale=grad_scale, seed=seed, origin=origin)
    else:
        both = array(shard[scales[0]]), array(shard[scales[1]])
        native.adamw_split_int8(*split, *both, segments, grad_scale=grad_scale, seed=seed, origin=origin)
