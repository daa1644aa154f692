"""Which part of each unit's optimizer state a rank updates. Pure arithmetic."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise

from streamer.memory.layout import Layout, Stretch
from streamer_native import BLOCK


@dataclass(frozen=True)
class Share:
    """Elements ``start`` to ``stop`` of a unit's flat state, and the bytes of their gradients."""

    start: int
    stop: int
    first_byte: int
    stop_byte: int

    @property
    def elements(self) -> range:
        """Of the unit's state."""
        return range(self.start, self.stop)

    @property
    def gradient(self) -> slice:
        """Of the unit's flat gradient, in bytes."""
        return slice(self.first_byte, self.stop_byte)


def shares_of(layout: Layout, size: int) -> list[Share]:
    """Cut a unit's state into a share for each of ``size`` ranks, as even as they can be.

    A share begins where a parameter begins, or a multiple of `BLOCK` elements after that, so that an update
    of shares draws the random bits of an update of the whole, and 8-bit blocks stay whole.
    """
    cuts = [_cut(layout, layout.state_numel * rank // size) for rank in range(1, size)]
    edges = [(0, 0), *cuts, (layout.state_numel, layout.grad_nbytes)]
    return [Share(start, stop, first, last) for (start, first), (stop, last) in pairwise(edges)]


def _cut(layout: Layout, element: int) -> tuple[int, int]:
    """The nearest place at or before ``element`` where a share may begin: an element, and its byte."""
    begins = [each.index for each in layout.trainable]
    if not begins:
        return 0, 0
    inside = layout.trainable[bisect_right(begins, element) - 1]
    at = (element - inside.index) // BLOCK * BLOCK
    return inside.index + at, inside.offset + at * inside.dtype.itemsize


def within(whole: Stretch, elements: range) -> Stretch:
    """What of ``whole`` lies among these elements of the unit's state."""
    start = max(whole.index, elements.start)
    stop = max(start, min(whole.index + whole.numel, elements.stop))
    offset = whole.offset + (start - whole.index) * whole.dtype.itemsize
    return Stretch(whole.dtype, offset, start, stop - start)
