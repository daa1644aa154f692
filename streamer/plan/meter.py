"""What a piece of code costs and holds, measured without data."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from streamer.backends.machine import Machine
from streamer.backends.operations import NOTHING, Cost, Operations
from streamer.plan.tracker import Tracker


@dataclass
class Measured:
    """What a part of a `Meter`'s block has cost, and the most bytes that it held on top of what was there."""

    cost: Cost = NOTHING
    rise: int = 0


class Meter(ExitStack):
    """Counts FLOPs and seconds on ``machine``, and bytes, of what runs in the block."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self._tracker, self._operations = Tracker(), Operations(machine)

    def __enter__(self) -> Meter:
        self.enter_context(self._tracker)
        self.enter_context(self._operations)
        return self

    @property
    def all(self) -> Measured:
        """What the whole block has taken."""
        return Measured(self._operations.cost, self._tracker.peak)

    @property
    def now(self) -> int:
        """Bytes that were made in the block and are still there."""
        return self._tracker.now

    def recall(self, measured: Measured) -> None:
        """Count what was not run, and would have taken this."""
        self._operations.recall(measured.cost)
        self._tracker.rise(measured.rise)

    @contextmanager
    def measuring(self) -> Iterator[Measured]:
        """Measure what runs inside; known when the block has ended."""
        tracker, measured = self._tracker, Measured()
        cost, before, peak = self._operations.cost, tracker.now, tracker.peak
        tracker.peak = before
        yield measured
        measured.cost, measured.rise = self._operations.cost - cost, tracker.peak - before
        tracker.peak = max(peak, tracker.peak)
