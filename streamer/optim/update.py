"""The update of one host shard: which kernel for which dtypes, in one launch over parameters alike."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import cache
from operator import attrgetter
from typing import Any, NamedTuple

import torch

import streamer_native as native
from streamer.memory.host import HostShard, HostStore, array
from streamer.memory.layout import Layout, Param, Slice, Stretch
from streamer.memory.purposes import BF16, FP16, FP32, GRADIENTS, MASTERS, MOMENTS, REMAINDERS, SUMS, Purpose
from streamer.memory.shares import within


class ParamUpdate(NamedTuple):
    """The update of one parameter; ``summed`` if its gradient is the fp32 sum of several."""

    slice: Slice
    hyper: native.Hyper
    summed: bool = False


def update_bytes(updates: Iterable[ParamUpdate], elements: range, state_dtype: torch.dtype = FP32) -> int:
    """Bytes of host memory that ``updates`` of a unit, with moments of ``state_dtype``, read and write where
    only these ``elements`` of its state are updated."""
    return sum(
        max(0, min(slice.index + slice.padded, elements.stop) - max(slice.index, elements.start))
        * _element_bytes(slice.dtype, state_dtype, summed)
        for slice, _, summed in updates
    )


@cache
def _element_bytes(dtype: torch.dtype, state_dtype: torch.dtype, summed: bool) -> int:
    # weight and moments are read and written, as is the remainder of a split master (2 bytes) or a whole fp32
    # master (4) beside them; the gradient is read; scales of 8-bit moments do not count
    beside = {FP32: 0, BF16: 2, FP16: 4}[dtype]
    gradient = FP32.itemsize if summed else dtype.itemsize
    return 2 * (dtype.itemsize + beside + 2 * state_dtype.itemsize) + gradient


def check_state_dtype(param: Param, state_dtype: torch.dtype) -> None:
    """Raise ValueError if a parameter's moments cannot be kept in ``state_dtype``."""
    if param.trainable and param.dtype != BF16 and state_dtype != FP32:
        raise ValueError(
            f"moments in {state_dtype} need bfloat16 parameters, and '{param.name}' is {param.dtype}: leave "
            "state_dtype at torch.float32, or wrap the model with dtype=torch.bfloat16"
        )


def warm_up(layouts: Sequence[Layout], state_dtype: torch.dtype) -> None:
    """Load, or compile, the kernels that models of these layouts may need, on parameters of one element."""
    dtypes = {slice.param.dtype for layout in layouts for slice in layout.trainable}
    small = Layout.of(Param("", (1,), dtype, True) for dtype in dtypes)
    store = HostStore([small], lambda nbytes, *, pinned: torch.zeros(nbytes, dtype=torch.uint8))
    store.add([GRADIENTS, SUMS, *MOMENTS[state_dtype]])
    (shard,) = store.shards
    hyper = native.Hyper(0.0, 0.0, 0.0, 1.0, 0.0, 1)
    for slice in small.slices:
        gradient, total = array(slice.view(shard.gradient)), array(slice.state(shard.sums))
        update_shard(shard, [ParamUpdate(slice, hyper)], state_dtype, 1.0)
        native.sum_squares(gradient)
        native.accumulate(gradient, gradient.copy())
        if slice.param.dtype != FP32:
            native.add(total, gradient, gradient)
            native.accumulate(total, gradient)
            update_shard(shard, [ParamUpdate(slice, hyper, summed=True)], state_dtype, 1.0)


def update_shard(
    shard: HostShard,
    updates: Iterable[ParamUpdate],
    state_dtype: torch.dtype,
    grad_scale: float,
    *,
    seed: int = 0,
    gradient: torch.Tensor | None = None,
) -> None:
    """AdamW on some parameters of ``shard``, with moments as `MOMENTS` says for ``state_dtype``; of a
    `Window`, on what of them is in its chunk.

    The gradient, ``shard``'s or the one given (flat uint8, in the shard's layout), is multiplied by
    ``grad_scale`` first. Moments below fp32 are rounded with random bits that follow from ``seed``; give
    every unit another.
    """
    shard.about_to_change()
    # One launch for all parameters of a dtype; where units mix dtypes, for those at the same distance between
    # their places in the weights and in the state.
    launches: dict[tuple[torch.dtype, int, bool], list[ParamUpdate]] = defaultdict(list)
    for update in sorted(updates, key=_INDEX):
        launches[update.slice.dtype, update.slice.distance, update.summed].append(update)
    for alike in launches.values():
        first, last = alike[0].slice, alike[-1].slice
        whole = Stretch(first.dtype, first.offset, first.index, last.index + last.padded - first.index)
        here = within(whole, shard.range)
        if not here.numel:
            continue
        if alike[0].summed:
            grad = here.state(shard.sums)
        else:
            grad = here.view(shard.gradient if gradient is None else gradient)
        _launch(shard, here, alike, grad, state_dtype, grad_scale, seed, here.index - whole.index)


_INDEX = attrgetter("slice.index")


def all_finite(gradient: torch.Tensor, stretches: Iterable[Stretch]) -> bool:
    """Whether these stretches of a gradient (flat uint8) are finite everywhere."""
    return all(math.isfinite(native.sum_squares(array(stretch.view(gradient)))) for stretch in stretches)


def _launch(
    shard: HostShard,
    here: Stretch,
    updates: Sequence[ParamUpdate],
    gradient: torch.Tensor,
    state_dtype: torch.dtype,
    grad_scale: float,
    seed: int,
    origin: int,
) -> None:
    """Make ``updates`` in one kernel launch, as far as they are ``here``: from element ``origin`` on of a
    launch that makes the whole of them."""

    def state(purpose: Purpose) -> Any:
        begin = here.index - shard.begin(purpose)
        return array(shard[purpose][begin : begin + here.numel])

    weight, grad = array(here.view(shard.weight)), array(gradient)
    exp_avg, exp_avg_sq, *scales = MOMENTS[state_dtype]
    moments = state(exp_avg), state(exp_avg_sq)
    first_scale = shard.begin(scales[0]) if scales else 0
    segments = _segments(here, updates, first_scale, by_parameter=state_dtype != FP32)
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


def _segments(
    here: Stretch, updates: Sequence[ParamUpdate], first_scale: int, *, by_parameter: bool
) -> list[native.Segment]:
    """What a kernel updates ``here``: neighbours with the same hyperparameters as one, padding included. With
    ``by_parameter`` each parameter is one, without padding: 8-bit blocks belong to one parameter, and random
    bits are counted from its beginning, whatever else is updated with it. Arrays of scales begin with block
    ``first_scale`` of the unit."""
    rows: list[list[ParamUpdate]] = []
    last, end = updates[0], -1
    for update in updates:
        if end == update.slice.index and last.hyper == update.hyper and not by_parameter:
            rows[-1].append(update)
        else:
            rows.append([update])
        last, end = update, update.slice.index + update.slice.padded
    segments = []
    for row in rows:
        first, last_slice = row[0].slice, row[-1].slice
        stop = last_slice.index + (last_slice.numel if by_parameter else last_slice.padded)
        start, stop = max(first.index, here.index), min(stop, here.index + here.numel)
        if start < stop:
            scale = first.block + (start - first.index) // native.QUANTUM - first_scale
            segments.append(native.Segment(start - here.index, stop - here.index, row[0].hyper, scale))
    return segments
