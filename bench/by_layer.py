"""The ops of training steps by step and by layer, with their sums; raw copies for comparison.

A step begins at the root's forward, the first op of every forward, and has all ops issued until the next one.
Copies of weights are an exception: they belong to the next forward or backward of their unit, since the
previous step issues the first ones of a forward. So all steps in a steady state have the same ops, whatever
they overlapped with.

Figures of one layer are medians, over copies or over steps. Busy and exposed seconds are means per step, so
that those of the rows add up to those of the lanes.
"""

from __future__ import annotations

import itertools
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from bench.common import quartiles
from streamer.backends.base import Backend, Event, Lane
from streamer.backends.cuda import CudaBackend
from streamer.engine.schedule.op import ROOT, Op, OpKind
from streamer.engine.schedule.trace import Record, Trace, intervals

REPEATS = 20
#: Host bytes to go through before coming back to the first: what was copied just now would be in a cache.
HOST_BYTES = 256 << 20

#: What a copy goes into and what it comes from, one pair for each time that it is repeated.
Pairs = list[tuple[torch.Tensor, torch.Tensor]]


class RawCopies:
    """Copies on the idle lanes of ``backend``. Keep it until the backend is closed, which unregisters its
    page-locked memory.

    ``measured`` are, by bytes, the median seconds of a copy in each direction, alone and during the other.
    """

    def __init__(self, backend: Backend) -> None:
        self.measured: dict[int, dict[str, float]] = {}
        self._backend = backend
        self._hosts: list[torch.Tensor] = []

    def seconds(self, lane: Lane, nbytes: int) -> float:
        """Seconds of a copy on ``lane`` (H2D or D2H) alone, measured at the first call.

        That takes up to 512 MiB of host memory, or two such copies, and two on the device.
        """
        if nbytes not in self.measured:
            self.measured[nbytes] = self._measure(nbytes)
        return self.measured[nbytes][f"{lane.value}_seconds"]

    def _measure(self, nbytes: int) -> dict[str, float]:
        pairs = {lane: self._pairs(lane, nbytes) for lane in (Lane.H2D, Lane.D2H)}
        run = _on_streams if isinstance(self._backend, CudaBackend) else _in_lanes
        run(self._backend, pairs, nbytes)  # the first time is slower than all others
        alone = {lane: run(self._backend, {lane: pairs[lane]}, nbytes)[lane] for lane in pairs}
        both = run(self._backend, pairs, nbytes)
        return {
            "h2d_seconds": alone[Lane.H2D],
            "d2h_seconds": alone[Lane.D2H],
            "h2d_beside_d2h_seconds": both[Lane.H2D],
            "d2h_beside_h2d_seconds": both[Lane.D2H],
        }

    def _pairs(self, lane: Lane, nbytes: int) -> Pairs:
        on_device = self._backend.device_buffer(nbytes)
        count = max(1, min(REPEATS, HOST_BYTES // nbytes))
        hosts = [self._backend.host_buffer(nbytes) for _ in range(count)]
        self._hosts += hosts
        for host in hosts:
            host.fill_(1)  # pages that were never written may all be one page of zeros
        in_turn = itertools.islice(itertools.cycle(hosts), REPEATS)
        return [(on_device, host) if lane is Lane.H2D else (host, on_device) for host in in_turn]


def _in_lanes(backend: Backend, pairs: dict[Lane, Pairs], nbytes: int) -> dict[Lane, float]:
    events = {
        lane: [backend.submit(lane, partial(backend.copy, *pair), (), nbytes) for pair in mine]
        for lane, mine in pairs.items()
    }
    seconds: dict[Lane, list[float]] = {lane: [] for lane in pairs}
    for lane, mine in events.items():
        for event in mine:
            event.wait()
            span = event.span()
            assert span is not None, "it has been waited for"
            seconds[lane].append(span.end - span.start)
    return {lane: statistics.median(values) for lane, values in seconds.items()}


def _on_streams(backend: Backend, pairs: dict[Lane, Pairs], nbytes: int) -> dict[Lane, float]:
    streams = {lane: torch.cuda.Stream(backend.device) for lane in pairs}
    marks = {lane: [torch.cuda.Event(enable_timing=True) for _ in range(REPEATS + 1)] for lane in pairs}
    torch.cuda.synchronize(backend.device)
    for lane, stream in streams.items():
        marks[lane][0].record(stream)
    for repeat in range(REPEATS):
        # in turn, so that neither direction is alone for long at the beginning
        for lane, stream in streams.items():
            into, source = pairs[lane][repeat]
            with torch.cuda.stream(stream):
                into.copy_(source, non_blocking=True)
            marks[lane][repeat + 1].record(stream)
    torch.cuda.synchronize(backend.device)
    return {lane: _median_between(marks[lane]) for lane in pairs}


def _median_between(marks: Sequence[torch.cuda.Event]) -> float:
    return statistics.median(begin.elapsed_time(end) / 1e3 for begin, end in itertools.pairwise(marks))


#: What a copy is for. UNUSED is an UNSHARD whose slot was given up before anybody came to it.
FOR_FORWARD, FOR_BACKWARD, GRADIENT, UNUSED = (
    "weights_for_forward",
    "weights_for_backward",
    "gradient",
    "weights_unused",
)
PURPOSES = (FOR_FORWARD, FOR_BACKWARD, GRADIENT, UNUSED)
_VISITS = {OpKind.FORWARD: FOR_FORWARD, OpKind.BACKWARD: FOR_BACKWARD}

#: Seconds that a plain copy of so many bytes takes on a lane (H2D or D2H) alone.
RawSeconds = Callable[[Lane, int], float]


class CompleteTrace(Trace):
    """A trace that keeps all ops, in the order of their issue; their starts may have another order."""

    def __init__(self) -> None:
        super().__init__(keep=sys.maxsize)
        self._issued: list[tuple[Op, Event]] = []

    def add(self, op: Op, event: Event, waits: Sequence[Event]) -> None:
        self._issued.append((op, event))
        super().add(op, event, waits)

    def in_order_of_issue(self) -> list[Record]:
        """Every op; all of them must be done, so call `streamer.synchronize` first."""
        self.settle()
        found = []
        for op, event in self._issued:
            span, blame = event.span(), event.blame
            assert span is not None and blame is not None, "all ops are done"
            # the last interval is the op's own
            found.append(Record(op, span, intervals(blame[:-1]) if op.lane is Lane.COMPUTE else ()))
        return found


@dataclass(frozen=True)
class Placed:
    """An op that has run, its step (-1 before the first) and, for a copy, its purpose."""

    record: Record
    step: int
    purpose: str | None = None

    @property
    def seconds(self) -> float:
        return self.record.span.end - self.record.span.start

    @property
    def begins_step(self) -> bool:
        return self.record.op.kind is OpKind.FORWARD and self.record.op.unit == ROOT


def place(records: Sequence[Record]) -> list[Placed]:
    """All ``records``, in the order of issue, with their steps and purposes."""
    begins = (Placed(record, 0).begins_step for record in records)
    steps = [number - 1 for number in itertools.accumulate(begins, initial=0)][1:]
    placed: list[Placed] = []
    next_visit: dict[int, tuple[int, str]] = {}  # by unit, which is never in two slots
    for record, step in zip(reversed(records), reversed(steps), strict=True):
        op = record.op
        purpose = None
        if op.kind in _VISITS:
            next_visit[op.unit] = step, _VISITS[op.kind]
        elif op.kind is OpKind.UNSHARD:
            step, purpose = next_visit.pop(op.unit, (step, UNUSED))
        elif op.kind is OpKind.OFFLOAD_GRAD:
            purpose = GRADIENT
        placed.append(Placed(record, step, purpose))
    return placed[::-1]


def step_seconds(placed: Iterable[Placed], steps: range) -> list[float]:
    """From the moment that compute got to the beginning of each of ``steps`` to that of the step after it."""
    begin = {one.step: one.record.span.ready for one in placed if one.begins_step}
    return [begin[step + 1] - begin[step] for step in steps]


def rows(placed: Iterable[Placed], steps: range, raw_seconds: RawSeconds) -> dict[str, Any]:
    """Figures of ``"layers"``, of the ``"root"`` unit, and of the ``"caller"``, which waits for gradients."""
    of_row: dict[int | None, list[Placed]] = defaultdict(list)
    for one in placed:
        if one.step in steps:
            op = one.record.op
            of_row[None if op.kind is OpKind.SYNC else op.unit].append(one)
    caller, root = of_row.pop(None, []), of_row.pop(ROOT, [])
    return {
        "layers": [{"unit": unit} | _row(of_row[unit], steps, raw_seconds) for unit in sorted(of_row)],
        "root": _row(root, steps, raw_seconds),
        "caller": _row(caller, steps, raw_seconds),
    }


def _row(mine: Sequence[Placed], steps: range, raw_seconds: RawSeconds) -> dict[str, Any]:
    copies: dict[str | None, list[Placed]] = defaultdict(list)
    for one in mine:
        copies[one.purpose].append(one)
    return {
        **{purpose: _copies(copies[purpose], steps, raw_seconds) for purpose in PURPOSES},
        "forward_seconds": _median_per_step(mine, OpKind.FORWARD, steps),
        "backward_seconds": _median_per_step(mine, OpKind.BACKWARD, steps),
        "busy_seconds": _busy(mine, steps),
        "exposed_seconds": _exposed(mine, steps),
    }


def _copies(copies: Sequence[Placed], steps: range, raw_seconds: RawSeconds) -> dict[str, Any]:
    """Of copies for one purpose; without one there is nothing but the 0."""
    if not copies:
        return {"copies": 0, "copies_per_step": 0.0}
    (nbytes,) = {one.record.op.nbytes for one in copies}
    lane = copies[0].record.op.lane
    seconds = statistics.median(one.seconds for one in copies)
    found = {
        "copies": len(copies),
        "copies_per_step": len(copies) / len(steps),
        "bytes": nbytes,
        "seconds": seconds,
    }
    if not seconds:
        return found
    return found | {"bytes_per_second": nbytes / seconds, "of_raw": raw_seconds(lane, nbytes) / seconds}


def _median_per_step(mine: Iterable[Placed], kind: OpKind, steps: range) -> float | None:
    """The median over steps of the seconds that ops of ``kind`` take in one, None where there are none."""
    by_step = dict.fromkeys(steps, 0.0)
    count = 0
    for one in mine:
        if one.record.op.kind is kind:
            by_step[one.step] += one.seconds
            count += 1
    return statistics.median(by_step.values()) if count else None


def _busy(placed: Iterable[Placed], steps: range) -> dict[str, float]:
    """By lane, seconds per step."""
    seconds: dict[Lane, list[float]] = {lane: [] for lane in Lane}
    for one in placed:
        seconds[one.record.op.lane].append(one.seconds)
    return {lane.value: math.fsum(spent) / len(steps) for lane, spent in seconds.items()}


def _exposed(placed: Iterable[Placed], steps: range) -> dict[str, float]:
    """By the lane that was waited for, seconds per step."""
    seconds: dict[Lane, list[float]] = {lane: [] for lane in Lane}
    for one in placed:
        for interval in one.record.exposed:
            seconds[interval.lane].append(interval.end - interval.start)
    return {lane.value: math.fsum(spent) / len(steps) for lane, spent in seconds.items()}


def totals(placed: Sequence[Placed], steps: range, *, tokens: int, parameters: int) -> dict[str, Any]:
    """Of all ops together. ``tokens`` are those of a step; arithmetic is 6 FLOP per parameter and token."""
    mine = [one for one in placed if one.step in steps]
    seconds = step_seconds(placed, steps)
    mean = math.fsum(seconds) / len(steps)
    median = statistics.median(seconds)
    busy, exposed = _busy(mine, steps), _exposed(mine, steps)
    copied = {
        lane: sum(one.record.op.nbytes for one in mine if one.record.op.lane is lane)
        for lane in (Lane.H2D, Lane.D2H)
    }
    transfer_busy, transfer_exposed = (of["h2d"] + of["d2h"] for of in (busy, exposed))
    return {
        "step_seconds": quartiles(seconds),
        "mean_step_seconds": mean,
        "bytes_per_step": {lane.value: nbytes / len(steps) for lane, nbytes in copied.items()},
        "busy_seconds": busy,
        "exposed_seconds": exposed,
        "overlap": {lane: overlap(busy[lane], exposed[lane]) for lane in ("h2d", "d2h", "host")},
        "other_seconds": mean - busy["compute"] - sum(exposed.values()),
        "exposed_transfer_of_step": transfer_exposed / mean,
        "transfer_overlap": overlap(transfer_busy, transfer_exposed),
        "tokens_per_second": tokens / median,
        "flops_per_second": 6 * parameters * tokens / median,
    }


def overlap(busy: float, exposed: float) -> float:
    """The part of a lane's work that compute did not stand still for; NaN for a lane that did nothing."""
    return 1 - exposed / busy if busy else math.nan
