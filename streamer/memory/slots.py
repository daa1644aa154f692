"""The device ring: buffers that are allocated once and used for one unit after another."""

from __future__ import annotations

from collections.abc import Callable

import torch

#: What device memory is for.
WEIGHT_SLOTS, GRAD_SLOTS = "weight slots", "gradient slots"
ROOT_WEIGHTS, ROOT_GRADIENTS, BUFFERS = "root weights", "root gradients", "buffers"

Allocate = Callable[[int], torch.Tensor]


def num_grad_slots(num_slots: int) -> int:
    """Gradient slots beside ``num_slots`` weight slots: one is filled while another leaves."""
    return min(num_slots, 2)


class WeightSlots:
    """``count`` device buffers of ``nbytes``, and which unit's weights each of them holds."""

    def __init__(self, count: int, nbytes: int, allocate: Allocate) -> None:
        self.buffers = [allocate(nbytes) for _ in range(count)]
        self.holder: list[int | None] = [None] * count

    def find(self, unit: int) -> int | None:
        """The slot that holds ``unit``, or None."""
        return self.holder.index(unit) if unit in self.holder else None


class GradientSlots:
    """``count`` device buffers of ``nbytes``, used in turn."""

    def __init__(self, count: int, nbytes: int, allocate: Allocate) -> None:
        self.buffers = [allocate(nbytes) for _ in range(count)]
        self._next = 0

    def take(self) -> int:
        """The slot whose last use is farthest back."""
        slot = self._next
        self._next = (slot + 1) % len(self.buffers)
        return slot
