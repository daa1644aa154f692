"""Parts of all combinations of options: a range of places along each axis."""

from __future__ import annotations

import heapq
import itertools
import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from streamer.plan.choices import Choice, Choices

#: The axes of a `Box`: layers that keep their graphs, weight slots, samples in a micro-batch.
KEPT, SLOTS, SIZES = range(3)


@dataclass(frozen=True)
class Box:
    """A part of ``choices``: along each axis the places from ``low`` to ``high``."""

    choices: Choices
    low: tuple[int, ...]
    high: tuple[int, ...]

    @staticmethod
    def all(choices: Choices) -> Box:
        axes = (choices.activations, choices.num_slots, choices.micro_batch_sizes)
        return Box(choices, (0, 0, 0), tuple(len(axis) - 1 for axis in axes))

    @property
    def smallest(self) -> Choice:
        return self.at(self.low)

    @property
    def fastest(self) -> Choice:
        return self.at(self.high)

    def at(self, place: tuple[int, ...]) -> Choice:
        """The choice at a place along each axis."""
        kept, slots, size = place
        choices = self.choices
        return Choice(choices.activations[kept], choices.num_slots[slots], choices.micro_batch_sizes[size])

    def is_one(self, axis: int) -> bool:
        """Whether there is only one place along ``axis``."""
        return self.low[axis] == self.high[axis]

    def up_to(self, axis: int, place: int) -> Box:
        """What of it is at ``place`` or below."""
        return Box(self.choices, self.low, moved(self.high, axis, place))

    def cut(self, axis: int, place: int) -> tuple[Box, Box]:
        """What is at ``place`` and above, and what is below."""
        upper = Box(self.choices, moved(self.low, axis, place), self.high)
        return upper, self.up_to(axis, place - 1)

    def halves(self) -> tuple[Box, Box]:
        """It, cut in two along its longest axis."""
        axis = max(range(3), key=lambda axis: self.high[axis] - self.low[axis])
        return self.cut(axis, (self.low[axis] + self.high[axis]) // 2 + 1)


class Queue:
    """Boxes, those of which the least is expected first."""

    def __init__(self, boxes: Sequence[Box]) -> None:
        self._order = itertools.count()
        self._heap = [(-math.inf, next(self._order), box) for box in boxes]

    def put(self, least: float, *boxes: Box) -> None:
        """Boxes in which nothing is less than ``least``; of equal ones the first."""
        for box in reversed(boxes):
            heapq.heappush(self._heap, (least, -next(self._order), box))

    def __iter__(self) -> Iterator[tuple[float, Box]]:
        while self._heap:
            known, _, box = heapq.heappop(self._heap)
            yield known, box

    def left(self) -> list[Box]:
        return [box for _, _, box in self._heap]


def moved(place: tuple[int, ...], axis: int, to: int) -> tuple[int, ...]:
    """``place`` with another along ``axis``."""
    return (*place[:axis], to, *place[axis + 1 :])


def first(low: int, last: int, is_true: Callable[[int], bool], *, near_last: bool) -> int:
    """The first place from ``low`` on where ``is_true``, as it is from there on; ``last`` if there is none
    before it. Places near ``low`` are looked at first, or, with ``near_last``, the one before ``last``."""
    if near_last and low < last and not is_true(last - 1):
        return last
    begin = probe = low
    while probe < last and not is_true(probe):
        low, probe = probe + 1, begin + 2 * (probe - begin) + 1
    return bisect_left(range(min(probe, last)), True, lo=low, key=is_true)
