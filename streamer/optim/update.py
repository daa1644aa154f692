"""The update of one host shard: which kernel for which dtypes, in one launch over runs of like parameters."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

import streamer_native as native
from streamer.memory.host import HostShard, HostStore, array
from streamer.memory.layout import Layout, Param, Slice, Stretch
from streamer.memory.purposes import BF16, FP16, FP32, GRADIENTS, MOMENTS, SUMS


@dataclass(frozen=True)
class UpdateRange:
    """Neighbouring elements of a shard that are updated alike; ``summed`` if from their fp32 sums."""

    stretch: Stretch
    hyper: native.Hyper
    summed: bool = False

    @staticmethod
    def of(slice: Slice, hyper: native.Hyper, *, summed: bool = False) -> UpdateRange:
        """One parameter, padding included."""
        return UpdateRange(slice.padded, hyper, summed)

    def follows(self, other: UpdateRange) -> bool:
        """Whether this run begins where ``other`` ends, and is updated like it."""
        alike = (self.hyper, self.summed) == (other.hyper, other.summed)
        return alike and self.stretch.follows(other.stretch)


def merge(runs: Sequence[UpdateRange]) -> list[UpdateRange]:
    """``runs`` in the order of memory, neighbours that are updated alike made one."""
    rows: list[list[UpdateRange]] = []
    for run in sorted(runs, key=lambda run: run.stretch.offset):
        if rows and run.follows(rows[-1][-1]):
            rows[-1].append(run)
        else:
            rows.append([run])
    return [
        replace(row[0], stretch=replace(row[0].stretch, numel=sum(run.stretch.numel for run in row)))
        for row in rows
    ]


def update_bytes(runs: Sequence[UpdateRange], state_dtype: torch.dtype = FP32) -> int:
    """Bytes of host memory that an update of ``runs``, with moments of ``state_dtype``, reads and writes."""
    # weight and moments are read and written, as is the remainder of a split master (2 bytes) or a whole fp32
    # master (4) beside them; the gradient is read; scales of 8-bit moments do not count
    beside = {FP32: 0, BF16: 2, FP16: 4}
    total = 0
    for run in runs:
        dtype = run.stretch.dtype
        gradient = FP32.itemsize if run.summed else dtype.itemsize
        held = dtype.itemsize + beside[dtype] + 2 * state_dtype.itemsize
        total += run.stretch.numel * (2 * held + gradient)
    return total


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
        update_shard(shard, [UpdateRange.of(slice, hyper)], state_dtype, 1.0)
        native.sum_squares(gradient)
        native.accumulate(gradient, gradient.copy())
        if slice.param.dtype != FP32:
            native.add(total, gradient, gradient)
            native.accumulate(total, gradient)
            update_shard(shard, [UpdateRange.of(slice, hyper, summed=True)], state_dtype, 1.0)


def update_shard(
    shard: HostShard,
    runs: Sequence[UpdateRange],
    state_dtype: torch.dtype,
    grad_scale: float,
    *,
    seed: int = 0,
    gradient: torch.Tensor | None = None,
) -> None:
    """AdamW on ``runs`` of ``shard``, with moments as `MOMENTS` says for ``state_dtype``.

    The gradient, ``shard``'s or the one given (flat uint8, in the shard's layout), is multiplied by
    ``grad_scale`` first. Moments below fp32 are rounded with random bits that follow from ``seed``; give
    every unit another.
    """
    shard.about_to_change()
    # One launch for all runs of a dtype; where units mix dtypes, for those at the same distance between
    # their places in the weights and in the state.
    launches: dict[tuple[torch.dtype, int, bool], list[UpdateRange]] = defaultdict(list)
    for run in sorted(runs, key=lambda run: run.stretch.index):
        stretch = run.stretch
        distance = stretch.offset // stretch.dtype.itemsize - stretch.index
        launches[stretch.dtype, distance, run.summed].append(run)
    for alike in launches.values():
        first, last = alike[0].stretch, alike[-1].stretch
        whole = replace(first, numel=last.index + last.numel - first.index)
        if alike[0].summed:
            grad = whole.state(shard.sums)
        else:
            grad = whole.view(shard.gradient if gradient is None else gradient)
        _launch(shard, whole, alike, grad, state_dtype, grad_scale, seed)


def all_finite(gradient: torch.Tensor, stretches: Sequence[Stretch]) -> bool:
    """Whether these stretches of a gradient (flat uint8) are finite everywhere."""
    return all(math.isfinite(native.sum_squares(array(stretch.view(gradient)))) for stretch in stretches)


def _launch(
    shard: HostShard,
    whole: Stretch,
    runs: Sequence[UpdateRange],
    gradient: torch.Tensor,
    state_dtype: torch.dtype,
    grad_scale: float,
    seed: int,
) -> None:
    """Update ``runs``, in one kernel launch over ``whole``, from the first to the last of them."""
    weight, grad = array(whole.view(shard.weight)), array(gradient)
    exp_avg, exp_avg_sq, *scales = (shard[purpose] for purpose in MOMENTS[state_dtype])
    moments = array(whole.state(exp_avg)), array(whole.state(exp_avg_sq))
    segments = [
        native.Segment(
            run.stretch.index - whole.index, run.stretch.index - whole.index + run.stretch.numel, run.hyper
        )
        for run in runs
    ]
    if whole.dtype == FP32:
        native.adamw_fp32(weight, grad, *moments, segments, grad_scale=grad_scale)
        return
    if whole.dtype == FP16:
        master = array(whole.state(shard.master))
        native.adamw_fp16(weight, master, grad, *moments, segments, grad_scale=grad_scale)
        return
    split = weight, array(whole.state(shard.remainder)), grad, *moments
    if state_dtype == FP32:
        native.adamw_split(*split, segments, grad_scale=grad_scale)
    elif state_dtype == BF16:
        native.adamw_split_bf16(*split, segments, grad_scale=grad_scale, seed=seed)
    else:
        by_parameter = _segments_by_parameter(shard.layout, whole, runs)
        both = array(scales[0]), array(scales[1])
        native.adamw_split_int8(*split, *both, by_parameter, grad_scale=grad_scale, seed=seed)


def _segments_by_parameter(
    layout: Layout, whole: Stretch, runs: Sequence[UpdateRange]
) -> list[native.Segment]:
    """``runs`` cut at the parameters, padding left out: 8-bit blocks belong to one parameter each."""
    return [
        native.Segment(
            slice.index - whole.index, slice.index - whole.index + slice.numel, run.hyper, slice.block
        )
        for run in runs
        for slice in layout.trainable
        if run.stretch.index <= slice.index < run.stretch.index + run.stretch.numel
    ]
