"""Which units will be asked for next, learned from what was asked for before.

A prediction decides what is copied early and what is given up. A wrong one costs a copy, nothing else.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple


class Phase(enum.Enum):
    """Why a unit is asked for."""

    FORWARD = "F"  # a forward that a backward will follow
    BACKWARD = "B"
    INFERENCE = "I"  # a forward without gradients


class Visit(NamedTuple):
    """One request for a unit."""

    unit: int
    phase: Phase


Cycle = tuple[Visit, ...]


class Order:
    """Cycles of visits as they were last seen.

    A cycle of training runs from the first forward after a backward to the end of the next backward, a
    cycle of inference over each unit once. Of each kind the last one is remembered, and it is expected
    to come again.
    """

    def __init__(self, units: Sequence[int]) -> None:
        forward = [Visit(unit, Phase.FORWARD) for unit in units]
        backward = [Visit(unit, Phase.BACKWARD) for unit in reversed(units)]
        self._training: Cycle = (*forward, *backward)
        self._inference: Cycle = tuple(Visit(unit, Phase.INFERENCE) for unit in units)
        self._now: list[Visit] = []
        self._longest = 64 * len(units)
        #: where in the remembered cycle the next visit is expected
        self._position = 0

    def visit(self, visit: Visit) -> None:
        """Note that ``visit`` is happening."""
        if self._begins_cycle(visit):
            self._remember()
            self._now = []
            self._position = 0
        self._now.append(visit)
        expected = self._cycle(visit.phase)
        # units may be skipped: look ahead first, then anew from the start of the cycle
        ahead = _index(expected, visit, self._position)
        found = ahead if ahead is not None else _index(expected, visit, 0)
        if found is not None:
            self._position = found + 1

    def upcoming(self) -> Iterator[int]:
        """The units of the visits to come: the rest of this cycle, then one whole cycle more."""
        phase = self._now[-1].phase if self._now else Phase.FORWARD
        cycle = self._cycle(phase)
        for visit in (*cycle[self._position :], *cycle):
            yield visit.unit

    def next_uses(self) -> dict[int, int]:
        """For each unit, after how many visits it is expected next; absent where it is not expected."""
        uses: dict[int, int] = {}
        for distance, unit in enumerate(self.upcoming()):
            uses.setdefault(unit, distance)
        return uses

    def _begins_cycle(self, visit: Visit) -> bool:
        if not self._now:
            return False
        last = self._now[-1].phase
        if len(self._now) >= self._longest:
            # forwards that no backward follows
            return True
        if visit.phase is Phase.INFERENCE:
            return last is not Phase.INFERENCE or visit in self._now
        return last is Phase.INFERENCE or (visit.phase is Phase.FORWARD and last is Phase.BACKWARD)

    def _remember(self) -> None:
        if self._now[-1].phase is Phase.INFERENCE:
            self._inference = tuple(self._now)
        elif self._now[-1].phase is Phase.BACKWARD:
            self._training = tuple(self._now)

    def _cycle(self, phase: Phase) -> Cycle:
        return self._inference if phase is Phase.INFERENCE else self._training


def farthest(candidates: Iterable[int], next_uses: dict[int, int]) -> int | None:
    """Of the units ``candidates``, the one whose next use is farthest away, or None if there are none."""
    never = len(next_uses) + sum(next_uses.values()) + 1
    return max(candidates, key=lambda unit: next_uses.get(unit, never), default=None)


def _index(cycle: Cycle, visit: Visit, start: int) -> int | None:
    try:
        return cycle.index(visit, start)
    except ValueError:
        return None
