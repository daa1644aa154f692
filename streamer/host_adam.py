"""The update of one host shard: which kernel for which dtype, in one launch over runs of like parameters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

import streamer_native as native
from streamer.memory.host import EXP_AVG, EXP_AVG_SQ, HostShard, array
from streamer.memory.layout import ALIGN, Layout, Slice

EXP_AVG_SCALES, EXP_AVG_SQ_SCALES = "exp_avg scales", "exp_avg_sq scales"


@dataclass(frozen=True)
class Run:
    """Neighbouring elements of a shard that are updated alike: ``offset`` in bytes in the weights and
    gradients, ``index`` and ``numel`` in elements in the state."""

    dtype: torch.dtype
    offset: int
    index: int
    numel: int
    hyper: native.Hyper

    @staticmethod
    def of(slice: Slice, hyper: native.Hyper) -> Run:
        """One parameter, padding included."""
        padded = -(-slice.numel // ALIGN) * ALIGN
        return Run(slice.param.dtype, slice.offset, slice.index, padded, hyper)

    def follows(self, other: Run) -> bool:
        """Whether this run begins where ``other`` ends, and is updated like it."""
        return (
            (self.dtype, self.hyper) == (other.dtype, other.hyper)
            and self.index == other.index + other.numel
            and self.offset == other.offset + other.numel * other.dtype.itemsize
        )

    def bytes(self, buffer: torch.Tensor) -> torch.Tensor:
        """This run of a flat uint8 buffer of weights or gradients, in the run's dtype."""
        return buffer[self.offset : self.offset + self.numel * self.dtype.itemsize].view(self.dtype)

    def state(self, buffer: torch.Tensor) -> torch.Tensor:
        """This run of a flat buffer of state."""
        return buffer[self.index : self.index + self.numel]


def merge(runs: Sequence[Run]) -> list[Run]:
    """``runs`` in the order of memory, neighbours that are updated alike made one."""
    merged: list[Run] = []
    for run in sorted(runs, key=lambda run: run.offset):
        if merged and run.follows(merged[-1]):
            last = merged.pop()
            run = Run(run.dtype, last.offset, last.index, last.numel + run.numel, run.hyper)
        merged.append(run)
    return merged


def update_bytes(runs: Sequence[Run], state_dtype: torch.dtype = torch.float32) -> int:
    """Bytes of host memory that an update of ``runs``, with moments of ``state_dtype``, reads and writes."""
    # both moments are read and written (4), the gradient read, the weight read and written (3); beside it
    # the remainder of a split master (4) or a whole fp32 master (8); scales of 8-bit moments do not count
    beside = {torch.float32: 0, torch.bfloat16: 4, torch.float16: 8}
    return sum(
        run.numel * (4 * state_dtype.itemsize + 3 * run.dtype.itemsize + beside[run.dtype]) for run in runs
    )


def num_scales(layout: Layout) -> int:
    """Elements of each buffer of scales that 8-bit moments need for a unit: see `first_scales`."""
    return layout.state_numel // native.QUANTUM + len(layout.trainable)


def first_scales(layout: Layout) -> dict[int, int]:
    """Where the scales of each trainable parameter begin, by its ``index``.

    A parameter has one for every 256 elements begun, counted from its own start, so that they do not
    depend on its neighbours. ``index // 256 + number`` leaves room for all of them without a table:
    floor(a + b) + 1 is never below floor(a) + ceil(b).
    """
    return {
        slice.index: slice.index // native.QUANTUM + number for number, slice in enumerate(layout.trainable)
    }


def update_shard(shard: HostShard, runs: Sequence[Run], grad_scale: float, seed: int = 0) -> None:
    """AdamW on ``runs`` of ``shard``, its gradient multiplied by ``grad_scale`` first.

    The dtype of ``shard.state[EXP_AVG]`` says how the moments are kept: float32; bfloat16, as
    ``state[EXP_AVG_SQ]``; or int8, with uint8 in ``state[EXP_AVG_SQ]`` (of its square root) and float32 in
    ``state[EXP_AVG_SCALES]`` and ``state[EXP_AVG_SQ_SCALES]``. The last two round with random bits that
    follow from ``seed``; give every unit another.

    Raises ValueError for moments below 32 bits of parameters that are not bfloat16.
    """
    # One launch for all runs of a dtype; where units mix dtypes, for those at the same distance between
    # their places in the weights and in the state.
    launches: dict[tuple[torch.dtype, int], list[Run]] = defaultdict(list)
    for run in sorted(runs, key=lambda run: run.index):
        launches[run.dtype, run.offset // run.dtype.itemsize - run.index].append(run)
    for (dtype, _), alike in launches.items():
        first, last = alike[0], alike[-1]
        whole = Run(dtype, first.offset, first.index, last.index + last.numel - first.index, first.hyper)
        _launch(shard, whole, alike, grad_scale, seed)


def _launch(shard: HostShard, whole: Run, runs: Sequence[Run], grad_scale: float, seed: int) -> None:
    """Update ``runs``, in one kernel launch over ``whole``, from the first to the last of them."""
    weight, grad = array(whole.bytes(shard.weight)), array(whole.bytes(shard.gradient))
    state_dtype = shard.state[EXP_AVG].dtype
    exp_avg, exp_avg_sq = (array(whole.state(shard.state[name])) for name in (EXP_AVG, EXP_AVG_SQ))
    moments = exp_avg, exp_avg_sq
    segments = [
        native.Segment(run.index - whole.index, run.index - whole.index + run.numel, run.hyper)
        for run in runs
    ]
    if whole.dtype != torch.bfloat16 and state_dtype != torch.float32:
        raise ValueError(
            f"moments in {state_dtype} need bfloat16 parameters, and this unit has some in {whole.dtype}: "
            "leave state_dtype at float32, or wrap the model with dtype=torch.bfloat16"
        )
    if whole.dtype == torch.float32:
        native.adamw_fp32(weight, grad, *moments, segments, grad_scale=grad_scale)
        return
    if whole.dtype == torch.float16:
        master = array(whole.state(shard.master))
        native.adamw_fp16(weight, master, grad, *moments, segments, grad_scale=grad_scale)
        return
    split = weight, array(whole.state(shard.remainder)), grad, *moments
    if state_dtype == torch.float32:
        native.adamw_split(*split, segments, grad_scale=grad_scale)
    elif state_dtype == torch.bfloat16:
        native.adamw_split_bf16(*split, segments, grad_scale=grad_scale, seed=seed)
    else:
        scales = array(shard.state[EXP_AVG_SCALES]), array(shard.state[EXP_AVG_SQ_SCALES])
        by_parameter = _segments_by_parameter(shard.layout, whole, runs)
        native.adamw_split_int8(*split, *scales, by_parameter, grad_scale=grad_scale, seed=seed)


def _segments_by_parameter(layout: Layout, whole: Run, runs: Sequence[Run]) -> list[native.Segment]:
    """``runs`` cut at the parameters, padding left out: 8-bit blocks belong to one parameter each."""
    firsts = first_scales(layout)
    return [
        native.Segment(
            slice.index - whole.index,
            slice.index - whole.index + slice.numel,
            run.hyper,
            first_scale=firsts[slice.index],
        )
        for run in runs
        for slice in layout.trainable
        if run.index <= slice.index < run.index + run.numel
    ]
