"""The ops that have run, by lane and time, and how long COMPUTE was idle because of them."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from streamer.backends.base import Event, Lane, Lock, Span
from streamer.engine.schedule.op import Op

#: The number of pending ops at which the finished ones are settled.
SETTLE_EVERY = 64


#: The number of each lane in kept records. These hold only numbers: the garbage collector skips them.
_ROW = {lane: row for row, lane in enumerate(Lane)}
_LANES = tuple(Lane)
#: Intervals in these numbers: row, start and end of each.
Blame = tuple[tuple[int, float, float], ...]


class Interval(NamedTuple):
    """Seconds of work on a lane, or of waiting for it."""

    lane: Lane
    start: float
    end: float


class Record(NamedTuple):
    """One op that has run. For an op on COMPUTE, ``exposed`` are the intervals of its waiting."""

    op: Op
    span: Span
    exposed: tuple[Interval, ...]


def intervals(blame: Blame) -> tuple[Interval, ...]:
    """``blame``, with lanes in place of rows."""
    return tuple(Interval(_LANES[row], start, end) for row, start, end in blame)


class Trace:
    """Totals of all ops that have run, and the last ``keep`` ops one by one.

    [Note: exposed time]
    If COMPUTE waits for a copy that itself waits for an update, the update is the cause. So every op carries
    the intervals from the time when it was next in its lane to its end, each attributed to the lane that was
    at work: its own lane since its start, and before that the lanes of its last wait. COMPUTE's waiting time
    is divided along the intervals of the op that it waited for last.
    """

    def __init__(self, keep: int = 20_000) -> None:
        self._busy_seconds = dict.fromkeys(Lane, 0.0)
        self._exposed_seconds = dict.fromkeys(Lane, 0.0)
        #: any thread may issue ops, and read the trace
        self._lock = Lock()
        self._pending: deque[tuple[Op, Event, Sequence[Event]]] = deque()
        self._settle_at = SETTLE_EVERY
        #: the ops that have run, their spans, and the intervals of their waiting in threes: in separate
        #: lists, since the garbage collector scans tuples that hold an op
        self._ops: deque[Op] = deque(maxlen=keep)
        self._times: deque[tuple[float, ...]] = deque(maxlen=keep)

    def add(self, op: Op, event: Event, waits: Sequence[Event]) -> None:
        """Record that ``op`` was submitted with these waits."""
        with self._lock:
            self._pending.append((op, event, waits))
            # many at once, to delay the thread that issues ops as rarely as possible
            if len(self._pending) >= self._settle_at:
                self._settle()
                self._settle_at = len(self._pending) + SETTLE_EVERY

    def settle(self) -> None:
        """Read the times of finished ops, in the order of their submission."""
        with self._lock:
            self._settle()

    @property
    def busy_seconds(self) -> dict[Lane, float]:
        """Seconds of work on each lane."""
        self.settle()
        return self._busy_seconds

    @property
    def exposed_seconds(self) -> dict[Lane, float]:
        """Seconds that COMPUTE was idle because of each lane. [Note: exposed time]"""
        self.settle()
        return self._exposed_seconds

    def _settle(self) -> None:
        still: deque[tuple[Op, Event, Sequence[Event]]] = deque()
        stuck: set[Lane] = set()
        for op, event, waits in self._pending:
            # a lane runs in order: ops after its first unfinished one are unfinished, too
            span = None if op.lane in stuck else event.span()
            if span is None or (waits and any(wait.blame is None and wait.span() is None for wait in waits)):
                if not event.failed():
                    still.append((op, event, waits))
                    stuck.add(op.lane)
                continue
            self._settle_one(op, event, span, waits)
        self._pending = still

    def records(self) -> list[Record]:
        """The last ops that have run, by their start."""
        with self._lock:
            self._settle()
            found = [
                Record(op, Span(ready, start, end), _in_threes(exposed))
                for op, (ready, start, end, *exposed) in zip(self._ops, self._times, strict=True)
            ]
        return sorted(found, key=lambda record: record.span.start)

    def overlap(self, lane: Lane) -> float:
        """1 - exposed / busy: the part of the lane's work that overlaps with COMPUTE. NaN for a lane without
        work. Below 0 if COMPUTE has waited longer for work to begin than the work took, on a machine with
        other load.
        """
        busy = self.busy_seconds[lane]
        return 1 - self.exposed_seconds[lane] / busy if busy else float("nan")

    def save(self, path: Path) -> None:
        """Write the last ops as a Chrome trace (JSON object format), one row per lane, times in
        microseconds. Opens in Perfetto and in chrome://tracing."""
        records = self.records()
        origin = min((record.span.ready for record in records), default=0.0)
        rows = {lane: row for row, lane in enumerate(Lane)}
        events: list[dict[str, object]] = [
            {"name": "thread_name", "ph": "M", "pid": 0, "tid": row, "args": {"name": lane.name}}
            for lane, row in rows.items()
        ]
        for record in records:
            row = rows[record.op.lane]
            waited = _micro(record.span.start - record.span.ready)
            arguments = {"bytes": record.op.nbytes, "waited_us": waited}
            events.append(_box(str(record.op), row, record.span.start, record.span.end, origin, arguments))
            for wait in record.exposed:
                name = f"wait for {wait.lane.name}"
                events.append(_box(name, row, wait.start, wait.end, origin, {"exposed": wait.lane.name}))
        path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))

    def _settle_one(self, op: Op, event: Event, span: Span, waits: Sequence[Event]) -> None:
        ready, start, end = span
        row = _ROW[op.lane]
        waited = _blamed(ready, start, waits)
        event.blame = (*waited, (row, start, end))
        self._busy_seconds[op.lane] += end - start
        exposed = waited if op.lane is Lane.COMPUTE else ()
        for other, begin, until in exposed:
            self._exposed_seconds[_LANES[other]] += until - begin
        self._ops.append(op)
        self._times.append((ready, start, end, *chain.from_iterable(exposed)))


def _blamed(start: float, end: float, waits: Sequence[Event]) -> Blame:
    """[Note: exposed time] The time from ``start`` to ``end``, divided along the last of ``waits``."""
    if not waits or end <= start:
        return ()
    # of equals the first
    last_end, last = -math.inf, waits[0]
    for event in waits:
        if (span := event.span()) is not None and span.end > last_end:
            last_end, last = span.end, event
    found: list[tuple[int, float, float]] = []
    at, queue = start, _ROW[last.lane]
    for row, begin, until in last.blame or ():
        # the time before the op's own start is attributed by its queue
        for blamed, to in ((queue, begin), (row, until)):
            if (to := min(to, end)) > at:
                found.append((blamed, at, to))
                at = to
    return tuple(found)


def _in_threes(exposed: Sequence[float]) -> tuple[Interval, ...]:
    rows, starts, ends = exposed[::3], exposed[1::3], exposed[2::3]
    return tuple(Interval(_LANES[int(row)], *times) for row, *times in zip(rows, starts, ends, strict=True))


def _micro(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def _box(
    name: str, row: int, start: float, end: float, origin: float, arguments: Mapping[str, object]
) -> dict[str, object]:
    place = {"ph": "X", "pid": 0, "tid": row, "ts": _micro(start - origin), "dur": _micro(end - start)}
    return {"name": name, **place, "args": arguments}
