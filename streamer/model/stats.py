"""The bytes and the times of a wrapped model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

from torch import nn

from streamer.backends.base import Lane
from streamer.engine.handle import wrapped


@dataclass(frozen=True)
class Stats:
    """Bytes by purpose, seconds by lane (``"compute"``, ``"h2d"``, ``"d2h"``, ``"host"``, ``"disk_read"``,
    ``"disk_write"``, ``"collective"``, ``"barrier"``), since `wrap`.

    ``device_bytes_now`` and ``device_bytes_peak`` are the buffers of the wrapped model and the tensors that
    its layers have saved for backward; on a GPU they are all that PyTorch has allocated there.
    ``exposed_seconds`` of a lane are those in which compute waited for it. ``overlap`` is 1 - exposed / busy:
    NaN for an idle lane, below 0 if compute waited longer for work to begin than the work took.
    ``skipped_steps`` are the steps with non-finite gradients.
    A prefetch hit is a use of a layer whose weights were on the device, or being copied there.
    """

    host_bytes: Mapping[str, int]
    disk_bytes: Mapping[str, int]
    device_bytes: Mapping[str, int]
    device_bytes_now: int
    device_bytes_peak: int
    busy_seconds: Mapping[str, float]
    exposed_seconds: Mapping[str, float]
    overlap: Mapping[str, float]
    prefetch_hits: int
    prefetch_misses: int
    skipped_steps: int


def stats(model: nn.Module) -> Stats:
    """Bytes and seconds of a wrapped model; does not wait. Raises ValueError if it is not wrapped."""
    handle = wrapped(model)
    executor = handle.executor
    trace = executor.issuer.trace
    trace.settle()
    now, peak = executor.memory.used()
    return Stats(
        host_bytes=executor.host.bytes(),
        disk_bytes=executor.host.disk_bytes(),
        device_bytes=executor.device_bytes(),
        device_bytes_now=now,
        device_bytes_peak=peak,
        busy_seconds={lane.value: trace.busy_seconds[lane] for lane in Lane},
        exposed_seconds={lane.value: trace.exposed_seconds[lane] for lane in Lane},
        overlap={lane.value: trace.overlap(lane) for lane in Lane},
        prefetch_hits=executor.pager.prefetch_hits,
        prefetch_misses=executor.pager.prefetch_misses,
        # with update="backward", layers left out of a step count as one skipped step, which
        # optimizer.step() adds; until then they are counted here
        skipped_steps=executor.skipped_steps + executor.gradients.early.skipped_since(),
    )


def synchronize(model: nn.Module) -> None:
    """Wait until every copy and update of a wrapped model is done.

    PyTorch code that reads or writes parameters, gradients or optimizer state waits by itself. C++ code with
    a pointer to their memory does not. Raises the error of a failed copy or update, and ValueError if the
    model is not wrapped.
    """
    wrapped(model).executor.synchronize()


def save_trace(model: nn.Module, path: str | PathLike[str]) -> None:
    """Write the last operations as a Chrome trace (JSON), which Perfetto opens, with a row for each lane.

    Waits for all copies and updates. Raises ValueError if the model is not wrapped.
    """
    executor = wrapped(model).executor
    executor.synchronize()
    executor.issuer.trace.save(Path(path))
