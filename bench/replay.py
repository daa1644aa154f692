"""A step that the executor has issued once, timed anew at the rates of any machine.

What is issued, in which order and with which waits does not depend on rates: so the executor runs once,
without data, at one FLOP and one byte a second, where times are the work itself. On COMPUTE that is the
FLOPs of products; what else takes time there on a machine is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from streamer.backends.base import WORKER_LANES, Event, Lane
from streamer.backends.virtual import VirtualEvent
from streamer.engine.schedule.op import Op
from streamer.engine.schedule.trace import Trace
from streamer.planner.machine import Machine

#: One FLOP or byte a second, and memory for everything.
UNIT = Machine("unit", 1.0, 1.0, 1.0, 1.0, 1 << 60, 1 << 60)


@dataclass(frozen=True)
class Work:
    """An op: FLOPs on COMPUTE, bytes on other lanes. ``before`` are the FLOPs of the caller on COMPUTE from
    the last op there to this one, ``waits`` the numbers of ops that it waits for."""

    op: Op
    amount: float
    before: float
    waits: tuple[int, ...]


class Recording(Trace):
    """A trace, on a backend with the machine `UNIT`, that keeps all work."""

    def __init__(self) -> None:
        super().__init__(keep=0)
        self.work: list[Work] = []
        self._number: dict[int, int] = {}
        self._events: list[Event] = []  # so that their ids stay theirs
        self._computed = 0.0

    def add(self, op: Op, event: Event, waits: Sequence[Event]) -> None:
        super().add(op, event, waits)
        assert isinstance(event, VirtualEvent), "others do not know their span at once"
        span, before = event.span(), 0.0
        if op.lane is Lane.COMPUTE:
            before, self._computed = span.ready - self._computed, span.end
        # what is not known was done before
        numbers = tuple(self._number[id(wait)] for wait in waits if id(wait) in self._number)
        self._number[id(event)] = len(self.work)
        self._events.append(event)
        self.work.append(Work(op, span.end - span.start, before, numbers))


@dataclass(frozen=True)
class Times:
    """A step: seconds from when compute was done with what came before to when it is done with this, the
    FLOPs in it, and by lane how long that works."""

    seconds: float
    flops: float
    busy_seconds: dict[Lane, float]


def replay(work: Sequence[Work], first: int, machine: Machine) -> Times:
    """The times at ``machine``'s rates of the step that begins at number ``first`` of ``work``."""
    rates = {lane: machine.bytes_per_second(lane) for lane in WORKER_LANES}
    rates[Lane.COMPUTE] = machine.flops_per_second
    free = dict.fromkeys(Lane, 0.0)
    busy = dict.fromkeys(Lane, 0.0)
    ends: list[float] = []
    began = flops = 0.0
    for number, one in enumerate(work):
        lane = one.op.lane
        if number == first:
            began = free[Lane.COMPUTE]
        start = max([free[lane] + one.before / rates[lane], *(ends[wait] for wait in one.waits)])
        free[lane] = start + one.amount / rates[lane]
        ends.append(free[lane])
        if number >= first:
            busy[lane] += (one.before + one.amount) / rates[lane]
            flops += one.before + one.amount if lane is Lane.COMPUTE else 0.0
    return Times(free[Lane.COMPUTE] - began, flops, busy)
