"""When work on the lanes of a virtual machine begins and ends, from how long it takes alone."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from streamer.backends.base import Event, Lane, Span
from streamer.simulate.machine import Beside, Machine


class VirtualEvent(Event):
    """Work whose time is known as soon as it is submitted, or, of COMPUTE, when the caller has done it."""

    def __init__(self, lane: Lane, span: Span | None = None) -> None:
        self.lane = lane
        self._span = span

    def is_over(self, span: Span) -> None:
        """Its time is known now."""
        self._span = span

    def wait(self) -> None:
        return

    def failed(self) -> bool:
        return False

    def span(self) -> Span:
        assert self._span is not None, "who asks has submitted it"
        return self._span


class Clock:
    """The lanes of a machine: each begins as its queue and its waits allow, and no sooner than the loop has
    issued its work, which runs ahead of a GPU.

    Work beside other lanes takes longer by what each of them adds (``beside``). It is slowed by what was
    submitted before it, not by what comes later.
    """

    def __init__(self, beside: Beside | Machine) -> None:
        pairs = [(lane, other) for lane in Lane for other in Lane if lane is not other]
        self._added = {(lane, other): 1 / beside.kept(lane, other) - 1 for lane, other in pairs}
        self._free_at = dict.fromkeys(Lane, 0.0)
        self._spans: dict[Lane, deque[Span]] = {lane: deque(maxlen=64) for lane in Lane}

    def submit(self, lane: Lane, seconds: float, waits: Sequence[Event], issued: float = 0.0) -> VirtualEvent:
        """Work that takes ``seconds`` alone, after all that is in its lane, after ``waits``, and from
        ``issued`` on."""
        ready = max(self._free_at[lane], issued)
        start = max([ready, *(span.end for event in waits if (span := event.span()) is not None)])
        end = self._end(lane, start, seconds) if any(self._added.values()) else start + seconds
        self._free_at[lane] = end
        span = Span(ready, start, end)
        self._spans[lane].append(span)
        return VirtualEvent(lane, span)

    def compute(self, seconds: float, issued: float = 0.0) -> None:
        """Work of the caller's own on COMPUTE, between two that are submitted."""
        self._free_at[Lane.COMPUTE] = max(self._free_at[Lane.COMPUTE], issued) + seconds

    def now(self) -> float:
        """When COMPUTE is done with what it has been given."""
        return self._free_at[Lane.COMPUTE]

    def _end(self, lane: Lane, start: float, seconds: float) -> float:
        """When work ends that begins at ``start``, beside what the other lanes have been given."""
        spans = [(other, span) for other in Lane if other is not lane for span in self._spans[other]]
        edges = sorted({edge for _, span in spans for edge in (span.start, span.end) if edge > start})
        at = start
        for edge in [*edges, float("inf")]:
            others = [other for other, span in spans if span.start <= at < span.end]
            # seconds that a second's work takes beside the others
            factor = 1 + sum(self._added[lane, other] for other in others)
            if at + seconds * factor <= edge:
                return at + seconds * factor
            seconds -= (edge - at) / factor
            at = edge
        raise AssertionError("the last edge is never passed")
