"""What is reported of time, on events whose times are made by hand."""

from __future__ import annotations

import json
import math
import weakref
from pathlib import Path

import pytest

from streamer.backends.base import Event, Lane, Span
from streamer.backends.thread import HostEvent
from streamer.backends.virtual import VirtualEvent
from streamer.engine.schedule import op as ops
from streamer.engine.schedule.op import Op
from streamer.engine.schedule.trace import Interval, Record, Trace

COMPUTE, H2D, D2H, HOST = Lane.COMPUTE, Lane.H2D, Lane.D2H, Lane.HOST
NOTHING = dict.fromkeys(Lane, 0)


def ran(trace: Trace, op: Op, ready: float, start: float, end: float, *waits: Event) -> Event:
    event = VirtualEvent(op.lane, Span(ready, start, end))
    trace.add(op, event, waits)
    return event


def chain(begin: float = 0, second: float = 1) -> Trace:
    """COMPUTE waits from 2 to 6 for a copy that waits until 4 for an update."""

    def times(*seconds: int) -> list[float]:
        return [begin + second * each for each in seconds]

    trace = Trace()
    step = ran(trace, ops.step(0, ops.gradient(0), 400), *times(0, 0, 4))
    unshard = ran(trace, ops.unshard(0, 1, 200), *times(1, 4, 6), step)
    ran(trace, ops.forward(0, 1), *times(2, 6, 9), unshard)
    return trace


def test_busy_is_the_time_of_the_work() -> None:
    assert chain().busy_seconds == {**NOTHING, COMPUTE: 3, H2D: 2, HOST: 4}


def test_blame_goes_through_the_chain() -> None:
    trace = chain()
    # not 4 of H2D: for two of the four seconds H2D itself stood still for HOST
    assert trace.exposed_seconds == {**NOTHING, H2D: 2, HOST: 2}
    assert trace.records()[-1] == Record(
        ops.forward(0, 1), Span(2, 6, 9), (Interval(HOST, 2, 4), Interval(H2D, 4, 6))
    )


def test_overlap() -> None:
    trace = chain()
    assert {lane: trace.overlap(lane) for lane in (COMPUTE, H2D, HOST)} == {COMPUTE: 1.0, H2D: 0.0, HOST: 0.5}
    assert math.isnan(trace.overlap(D2H)), "a lane that did nothing has no overlap"


@pytest.mark.parametrize(
    ("copies", "forward", "exposed"),
    [
        ([(H2D, 0, 2)], (5, 5, 6), {}),
        # only the part that COMPUTE has waited
        ([(H2D, 0, 10)], (7, 10, 11), {H2D: 3}),
        # the last of several waits
        ([(H2D, 0, 3), (D2H, 0, 5)], (1, 5, 6), {D2H: 4}),
        # the queue before the op is its lane's
        ([(H2D, 0, 3), (H2D, 3, 5)], (1, 5, 6), {H2D: 4}),
    ],
    ids=["no wait", "a part", "the last", "a queue"],
)
def test_what_is_blamed(
    copies: list[tuple[Lane, int, int]], forward: tuple[int, int, int], exposed: dict[Lane, int]
) -> None:
    trace = Trace()
    op_of = {H2D: ops.unshard(0, 0, 1), D2H: ops.offload_grad(1, 0, ops.gradient(1), 1)}
    waits = [ran(trace, op_of[lane], start, start, end) for lane, start, end in copies]
    ran(trace, ops.forward(0, 0), *forward, *waits)
    assert trace.exposed_seconds == {**NOTHING, **exposed}
    busy = sum(end - start for lane, start, end in copies if lane is H2D)
    assert trace.overlap(H2D) == pytest.approx(1 - exposed.get(H2D, 0) / busy)


def test_unfinished_work_is_counted_when_it_is_done() -> None:
    trace = Trace()
    copy = HostEvent(H2D)
    trace.add(ops.unshard(0, 0, 1), copy, ())
    assert trace.busy_seconds[H2D] == 0
    assert trace.records() == []
    copy.finish(Span(0, 1, 3))
    trace.settle()
    assert trace.busy_seconds[H2D] == 2
    assert [record.span for record in trace.records()] == [Span(0, 1, 3)]


def test_failed_work_is_dropped_and_holds_nothing_up() -> None:
    trace = Trace()
    copy = HostEvent(H2D)
    trace.add(ops.unshard(0, 0, 1), copy, ())
    copy.finish(None, RuntimeError("the copy failed"))
    dropped = weakref.ref(copy)
    del copy
    ran(trace, ops.forward(1, 1), 0, 0, 2)
    assert trace.busy_seconds == {**NOTHING, COMPUTE: 2}
    assert dropped() is None, "it will never have a time"
    assert [str(record.op) for record in trace.records()] == ["1F@1"]


def test_chrome_trace(tmp_path: Path) -> None:
    """In microseconds, from the first op on."""
    path = tmp_path / "trace.json"
    chain(begin=10, second=0.001).save(path)

    def row(number: int, name: str) -> dict[str, object]:
        return {"name": "thread_name", "ph": "M", "pid": 0, "tid": number, "args": {"name": name}}

    def box(name: str, row: int, start: float, duration: float, args: dict[str, object]) -> dict[str, object]:
        return {"name": name, "ph": "X", "pid": 0, "tid": row, "ts": start, "dur": duration, "args": args}

    assert json.loads(path.read_text()) == {
        "displayTimeUnit": "ms",
        "traceEvents": [
            row(0, "COMPUTE"),
            row(1, "H2D"),
            row(2, "D2H"),
            row(3, "HOST"),
            row(4, "DISK_READ"),
            row(5, "DISK_WRITE"),
            row(6, "COLLECTIVE"),
            row(7, "BARRIER"),
            box("0STEP", 3, 0.0, 4000.0, {"bytes": 400, "waited_us": 0.0}),
            box("0UNSHARD@1", 1, 4000.0, 2000.0, {"bytes": 200, "waited_us": 3000.0}),
            box("0F@1", 0, 6000.0, 3000.0, {"bytes": 0, "waited_us": 4000.0}),
            box("wait for HOST", 0, 2000.0, 2000.0, {"exposed": "HOST"}),
            box("wait for H2D", 0, 4000.0, 2000.0, {"exposed": "H2D"}),
        ],
    }
