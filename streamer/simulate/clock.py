"""When work on the lanes of a virtual machine begins and ends, from how long it takes alone."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from streamer.backends.base import BEHIND, Event, Lane, Span
from streamer.simulate.machine import CPU, Beside, Machine


class VirtualEvent(Event):
    """Work whose time is known without waiting for it: as soon as it is submitted or, where lanes share
    cores, once compute has gone on past it."""

    def __init__(self, lane: Lane, span: Span | None = None) -> None:
        self.lane = lane
        self._span = span

    def wait(self) -> None:
        return

    def failed(self) -> bool:
        return False

    def span(self) -> Span | None:
        return self._span

    def finish(self, span: Span) -> None:
        """Its time is known now."""
        self._span = span


class Clock(Protocol):
    """Times of a machine's lanes."""

    def submit(self, lane: Lane, seconds: float, waits: Sequence[Event]) -> VirtualEvent:
        """Work that takes ``seconds`` alone, after all that is in its lane and after ``waits``."""

    def compute(self, seconds: float) -> float:
        """Work of the caller's own on COMPUTE, between two that are submitted; the seconds that it takes."""

    def now(self) -> float:
        """When COMPUTE is done with what it has been given."""


def clock_of(machine: Machine) -> Clock:
    """The clock that runs as lanes do on that kind of machine."""
    return SharedCores(machine.beside) if machine.kind == CPU else Queues(machine.beside)


class _Slowing:
    """How fast lanes run beside others: what each of the others adds to the time of a piece of work is added
    up."""

    def __init__(self, beside: Beside) -> None:
        pairs = [(lane, other) for lane in Lane for other in Lane if lane is not other]
        self._added = {(lane, other): 1 / beside.kept(lane, other) - 1 for lane, other in pairs}
        self.none = not any(self._added.values())

    def factor(self, lane: Lane, others: Sequence[Lane]) -> float:
        """Seconds that a second's work on ``lane`` takes while ``others`` are at work."""
        return 1 + sum(self._added[lane, other] for other in others if other is not lane)


class Queues:
    """Lanes of a device: the loop runs ahead of them, and each begins as its queue and its waits allow.

    Work that is slowed by other lanes is slowed by what was submitted before it, not by what comes later.
    """

    def __init__(self, beside: Beside) -> None:
        self._free_at = dict.fromkeys(Lane, 0.0)
        self._slowing = _Slowing(beside)
        self._spans: dict[Lane, deque[Span]] = {lane: deque(maxlen=64) for lane in Lane}

    def submit(self, lane: Lane, seconds: float, waits: Sequence[Event]) -> VirtualEvent:
        ready = self._free_at[lane]
        start = max([ready, *(span.end for event in waits if (span := event.span()) is not None)])
        end = start + seconds if self._slowing.none else self._end(lane, start, seconds)
        self._free_at[lane] = end
        span = Span(ready, start, end)
        self._spans[lane].append(span)
        return VirtualEvent(lane, span)

    def compute(self, seconds: float) -> float:
        self._free_at[Lane.COMPUTE] += seconds
        return seconds

    def now(self) -> float:
        return self._free_at[Lane.COMPUTE]

    def _end(self, lane: Lane, start: float, seconds: float) -> float:
        """When work ends that begins at ``start``, beside what the other lanes have been given."""
        spans = [(other, span) for other in Lane if other is not lane for span in self._spans[other]]
        edges = sorted({edge for _, span in spans for edge in (span.start, span.end) if edge > start})
        at = start
        for edge in [*edges, float("inf")]:
            others = [other for other, span in spans if span.start <= at < span.end]
            factor = self._slowing.factor(lane, others)
            if at + seconds * factor <= edge:
                return at + seconds * factor
            seconds -= (edge - at) / factor
            at = edge
        raise AssertionError("the last edge is never passed")


@dataclass
class _Work:
    event: VirtualEvent
    left: float
    waits: Sequence[Event]
    ready: float
    start: float | None = None


class SharedCores:
    """Lanes as threads of a host whose cores also compute: all that is under way slows all else.

    The thread that computes is the one that submits, so time goes on only with compute: what is submitted
    later begins later. Until compute has gone past the end of other work, its span is None.
    """

    def __init__(self, beside: Beside) -> None:
        self._slowing = _Slowing(beside)
        self._now = 0.0
        self._queues: dict[Lane, deque[_Work]] = {lane: deque() for lane in BEHIND}

    def submit(self, lane: Lane, seconds: float, waits: Sequence[Event]) -> VirtualEvent:
        event = VirtualEvent(lane)
        if lane is not Lane.COMPUTE:
            self._queues[lane].append(_Work(event, seconds, waits, self._now))
            return event
        ready = self._now
        self._run(lambda: _done(waits))
        start = self._now
        self.compute(seconds)
        event.finish(Span(ready, start, self._now))
        return event

    def compute(self, seconds: float) -> float:
        start = self._now
        work = _Work(VirtualEvent(Lane.COMPUTE), seconds, (), start)
        self._run(lambda: work.left <= 0, work)
        return self._now - start

    def now(self) -> float:
        return self._now

    def _run(self, finished: Callable[[], bool], computing: _Work | None = None) -> None:
        """Let time go on until ``finished``."""
        while True:
            active = self._active()
            if finished():
                return
            if computing is not None:
                active[Lane.COMPUTE] = computing
            assert active, "nothing is under way that could end a wait"
            factors = {lane: self._slowing.factor(lane, list(active)) for lane in active}
            next_lane = min(active, key=lambda lane: active[lane].left * factors[lane])
            passed = active[next_lane].left * factors[next_lane]
            self._now += passed
            for lane, work in active.items():
                work.left = 0.0 if lane is next_lane else work.left - passed / factors[lane]

    def _active(self) -> dict[Lane, _Work]:
        """What each of the other lanes is at work on, what is done being taken out."""
        active: dict[Lane, _Work] = {}
        settled = False
        while not settled:
            settled = True
            for lane, queue in self._queues.items():
                if not queue or not _done(queue[0].waits):
                    continue
                work = queue[0]
                if work.start is None:
                    work.start = self._now
                active[lane] = work
                if work.left <= 0:
                    work.event.finish(Span(work.ready, work.start, self._now))
                    queue.popleft()
                    del active[lane]
                    if queue:
                        queue[0].ready = max(queue[0].ready, self._now)
                    settled = False
        return active


def _done(events: Sequence[Event]) -> bool:
    return all(event.span() is not None for event in events)
