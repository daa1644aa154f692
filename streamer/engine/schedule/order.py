"""Predicts which layers will run next from those that have run. A prediction decides which layers are
prefetched and which are evicted. A wrong one costs a copy, nothing else.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple


class Phase(enum.Enum):
    """The kind of run."""

    FORWARD = "F"  # a forward with a backward to come
    FROZEN = "Z"  # a forward with gradients on, but without a backward
    BACKWARD = "B"
    INFERENCE = "I"  # a forward without gradients

    # Enum.__hash__ is a Python function, slow for a dictionary key in every use
    __hash__ = object.__hash__


class LayerUse(NamedTuple):
    """One use of a unit's weights: a forward or a backward."""

    unit: int
    phase: Phase


class Cycle:
    """Uses that are expected to repeat."""

    def __init__(self, uses: Iterable[LayerUse]) -> None:
        self.uses = tuple(uses)
        #: the units of three cycles
        self.thrice = 3 * tuple(use.unit for use in self.uses)


class Order:
    """The last cycles of uses.

    A cycle of training runs from the first forward after a backward to the end of the next backward,
    inference in between (of a reference model, say) included. A cycle of inference alone, or of frozen
    forwards alone, is over when a unit is used again. The last cycle of training and the last one of
    inference are remembered, and expected to repeat.
    """

    def __init__(self, units: Sequence[int]) -> None:
        forward = [LayerUse(unit, Phase.FORWARD) for unit in units]
        backward = [LayerUse(unit, Phase.BACKWARD) for unit in reversed(units)]
        self._training = Cycle([*forward, *backward])
        self._inference = Cycle(LayerUse(unit, Phase.INFERENCE) for unit in units)
        self._now: list[LayerUse] = []
        self._phases: set[Phase] = set()
        self._longest = 64 * len(units)
        #: the position of the next expected use in the remembered cycle
        self._position = 0

    def advance(self, use: LayerUse) -> bool:
        """Record ``use``, which begins now. Returns whether it was expected next."""
        position = self._position
        begins = self._begins_cycle(use)
        if begins:
            self._remember()
            self._now = []
            self._phases = set()
            self._position = 0
        self._now.append(use)
        self._phases.add(use.phase)
        expected = self._expected().uses
        # units may be skipped: search ahead first, then from the start of the cycle
        ahead = _index(expected, use, self._position)
        found = ahead if ahead is not None else _index(expected, use, 0)
        if found is not None:
            self._position = found + 1
        return not begins and found == position

    def upcoming(self) -> Sequence[int]:
        """The units of the uses to come: the rest of this cycle, then two whole ones, so that the
        next use after each of the nearest uses is among them."""
        cycle = self._expected()
        return cycle.thrice[self._position :]

    def upcoming_uses(self) -> Iterator[LayerUse]:
        """The uses to come: the rest of this cycle, then a whole one."""
        uses = self._expected().uses
        return chain(uses[self._position :], uses)

    def _begins_cycle(self, use: LayerUse) -> bool:
        if not self._now:
            return False
        if len(self._now) >= self._longest:
            # forwards that no backward follows
            return True
        if self._now[-1].phase is Phase.BACKWARD:
            return use.phase is not Phase.BACKWARD
        if self._phases == {use.phase} and use.phase is not Phase.FORWARD:
            return use in self._now
        if use.phase is Phase.INFERENCE:
            return Phase.FORWARD not in self._phases or use in self._now
        return self._phases == {Phase.INFERENCE}

    def _remember(self) -> None:
        if self._phases == {Phase.INFERENCE}:
            self._inference = Cycle(self._now)
        elif self._now[-1].phase is Phase.BACKWARD or self._phases == {Phase.FROZEN}:
            self._training = Cycle(self._now)

    def _expected(self) -> Cycle:
        """The cycle of the kind that is running."""
        is_inference = bool(self._now) and self._now[0].phase is Phase.INFERENCE
        return self._inference if is_inference else self._training


def farthest(candidates: Iterable[int], upcoming: Iterable[int], nbytes: Sequence[int]) -> int | None:
    """The unit among ``candidates`` with the largest distance to its next use, divided by its bytes; None if
    there are no candidates. ``nbytes`` are those of all units."""
    candidates = list(candidates)
    if len(candidates) < 2:
        return next(iter(candidates), None)
    distances: dict[int, int] = {}
    for distance, unit in enumerate(upcoming, start=1):
        if len(distances) == len(candidates):
            break
        if unit in candidates:
            distances.setdefault(unit, distance)
    # of equals the first
    return max(
        candidates, key=lambda unit: distances.get(unit, math.inf) / max(1, nbytes[unit]), default=None
    )


def _index(cycle: Sequence[LayerUse], use: LayerUse, start: int) -> int | None:
    try:
        return cycle.index(use, start)
    except ValueError:
        return None
