"""The update of one host shard: which kernel for which dtype, over as long runs as hyperparameters allow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

import streamer_native as native
from streamer.memory.host import EXP_AVG, EXP_AVG_SQ, HostShard, array
from streamer.memory.layout import ALIGN, Slice


class Hyper(NamedTuple):
    """Hyperparameters of one update; ``step`` counts from 1."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int


@dataclass(frozen=True)
class Run:
    """Neighbouring elements of a shard that are updated alike: ``offset`` in bytes in the weights and
    gradients, ``index`` and ``numel`` in elements in the state."""

    dtype: torch.dtype
    offset: int
    index: int
    numel: int
    hyper: Hyper

    @staticmethod
    def of(slice: Slice, hyper: Hyper) -> Run:
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


def update_bytes(runs: Sequence[Run]) -> int:
    """Bytes of host memory that an update of ``runs`` reads and writes."""
    # both moments are read and written (16), the gradient read, the weight read and written; beside it
    # the remainder of a split master (4) or a whole fp32 master (8)
    beside = {torch.float32: 0, torch.bfloat16: 4, torch.float16: 8}
    return sum(run.numel * (16 + 3 * run.dtype.itemsize + beside[run.dtype]) for run in runs)


def update_shard(shard: HostShard, runs: Sequence[Run], grad_scale: float) -> None:
    """AdamW on ``runs`` of ``shard``, its gradient multiplied by ``grad_scale`` first."""
    for run in runs:
        weight, gradient = run.bytes(shard.weight), run.bytes(shard.gradient)
        moments = [array(run.state(shard.state[name])) for name in (EXP_AVG, EXP_AVG_SQ)]
        hyper = run.hyper._asdict() | {"grad_scale": grad_scale}
        if run.dtype == torch.float32:
            native.adamw_fp32(array(weight), array(gradient), *moments, **hyper)
        elif run.dtype == torch.bfloat16:
            native.adamw_split(
                array(weight), array(run.state(shard.remainder)), array(gradient), *moments, **hyper
            )
        else:
            master = run.state(shard.master)
            native.adamw_fp32(array(master), array(gradient.float()), *moments, **hyper)
            weight.copy_(master)
