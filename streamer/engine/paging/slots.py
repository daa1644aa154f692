"""The slots: device buffers that are allocated once and used for one unit after another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

Allocate = Callable[[int], torch.Tensor]


class WeightSlots:
    """``count`` device buffers of ``nbytes``, and which unit's weights each of them holds."""

    def __init__(self, count: int, nbytes: int, allocate: Allocate) -> None:
        self.nbytes = nbytes
        self.buffers = [allocate(nbytes) for _ in range(count)]
        self.holder: list[int | None] = [None] * count
        #: how many visits read a slot now, which must keep what it holds
        self.busy: Counter[int] = Counter()
        self._allocate = allocate

    def find(self, unit: int) -> int | None:
        """The slot that holds ``unit``, or None."""
        return self.holder.index(unit) if unit in self.holder else None

    def empty(self) -> int | None:
        """A slot that holds nothing and is not busy, or None."""
        empty = (slot for slot, unit in enumerate(self.holder) if unit is None and slot not in self.busy)
        return next(empty, None)

    def idle(self) -> list[int]:
        """The units in slots that are not busy."""
        return [unit for slot, unit in enumerate(self.holder) if unit is not None and slot not in self.busy]

    def enter(self, slot: int) -> None:
        """A visit begins that reads ``slot``."""
        self.busy[slot] += 1

    def leave(self, slot: int) -> None:
        """A visit that has read ``slot`` ends."""
        self.busy[slot] -= 1
        if not self.busy[slot]:
            del self.busy[slot]

    def add(self) -> None:
        """Allocate one more, whose number is the next."""
        self.buffers.append(self._allocate(self.nbytes))
        self.holder.append(None)

    def drop(self) -> None:
        """Give up the last, which nothing uses any more."""
        self.buffers.pop()
        self.holder.pop()


class GradientSlots:
    """``count`` device buffers of ``nbytes``, used in turn."""

    def __init__(self, count: int, nbytes: int, allocate: Allocate) -> None:
        self.buffers = [allocate(nbytes) for _ in range(count)]
        self._next = 0
        self._taken: set[int] = set()

    @contextmanager
    def taken(self) -> Iterator[int]:
        """The slot whose last use is farthest back, and which nobody else takes inside the block."""
        count = len(self.buffers)
        in_turn = ((self._next + step) % count for step in range(count))
        slot = next(slot for slot in in_turn if slot not in self._taken)
        self._next = (slot + 1) % count
        self._taken.add(slot)
        try:
            yield slot
        finally:
            self._taken.discard(slot)
