"""The shares of each unit's optimizer state that ranks update, and the parts that machines hold. A single
process is one rank. Pure arithmetic.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

from streamer.store.layout import Layout, Slice, Stretch
from streamer.store.purposes import DIVIDED, SHARD_ALIGN, Purpose
from streamer_native import BLOCK, QUANTUM


@dataclass(frozen=True)
class Share:
    """Elements ``start`` to ``stop`` of a unit's flat state, the bytes of their gradients and weights, and
    the numbers of their blocks of 256 elements."""

    start: int
    stop: int
    first_byte: int
    stop_byte: int
    first_block: int
    stop_block: int

    @property
    def elements(self) -> range:
        """Of the unit's state."""
        return range(self.start, self.stop)

    @property
    def gradient(self) -> slice:
        """Of the unit's flat gradient, in bytes."""
        return slice(self.first_byte, self.stop_byte)

    def range(self, purpose: Purpose) -> range:
        """The share's range in a unit's flat buffer of optimizer state for ``purpose``."""
        if purpose.part is Slice.blocks:
            return range(self.first_block, self.stop_block)
        return self.elements


def shares_of(layout: Layout, size: int, *, by_parameter: bool = False) -> list[Share]:
    """Cut a unit's state into a share for each of ``size`` ranks, as even as they can be.

    A share starts at a parameter, or a multiple of `BLOCK` elements after one. So an update by shares draws
    the same random bits as an update of the whole, and no 8-bit block is cut. With ``by_parameter`` each
    share has whole parameters.
    """
    whole = Share(0, layout.state_numel, 0, layout.grad_nbytes, 0, layout.state_blocks)
    return parts_of(layout, whole, size, by_parameter=by_parameter)


def parts_of(layout: Layout, share: Share, size: int, *, by_parameter: bool = False) -> list[Share]:
    """Cut a ``share`` of a unit's state, or the whole of it, into ``size`` parts, as `shares_of` does."""
    numel = share.stop - share.start
    wanted = [share.start + numel * part // size for part in range(1, size)]
    cut = partial(_cut_between, share=share) if by_parameter else _cut
    cuts = [cut(layout, element) for element in wanted]
    first = share.start, share.first_byte, share.first_block
    last = share.stop, share.stop_byte, share.stop_block
    return [
        Share(start, stop, first_byte, stop_byte, first_block, stop_block)
        for (start, first_byte, first_block), (stop, stop_byte, stop_block) in pairwise([first, *cuts, last])
    ]


def _cut(layout: Layout, element: int) -> tuple[int, int, int]:
    """The last place at or before ``element`` where a share may start: an element, its byte, its block."""
    begins = [each.index for each in layout.trainable]
    if not begins:
        return 0, 0, 0
    inside = layout.trainable[bisect_right(begins, element) - 1]
    at = (element - inside.index) // BLOCK * BLOCK
    return inside.index + at, inside.offset + at * inside.dtype.itemsize, inside.block + at // QUANTUM


def _cut_between(layout: Layout, element: int, share: Share) -> tuple[int, int, int]:
    """The start of a parameter, or the end of the share, that is nearest to ``element`` in a ``share`` of
    whole parameters."""
    places = [(each.index, each.offset, each.block) for each in layout.trainable]
    places.append((share.stop, share.stop_byte, share.stop_block))
    inside = (place for place in places if share.start <= place[0] <= share.stop)
    return min(inside, key=lambda place: abs(place[0] - element))


@dataclass(frozen=True)
class Owned:
    """One rank's part of a unit: it writes ``share`` on its machine. The machine's ranks update the ``parts``
    of the state; this rank's part is the one at ``rank``. ``is_divided`` if other machines have parts,
    too."""

    share: Share
    parts: tuple[Share, ...]
    rank: int
    is_divided: bool


@dataclass(frozen=True)
class Division:
    """The number of ``ranks`` on each machine that share a state, and of ``machines`` that divide it (with 1,
    each machine has the whole). With ``by_parameter`` each rank has whole parameters."""

    ranks: int = 1
    machines: int = 1
    by_parameter: bool = False

    def shares(self, layout: Layout) -> list[Share]:
        """The share of a unit that each rank of a machine writes there."""
        return shares_of(layout, self.ranks, by_parameter=self.by_parameter)

    def parts(self, layout: Layout) -> list[list[Share]]:
        """By machine, the part of a unit that each of its ranks updates: a part of that rank's share. Ranks
        of the same number on other machines update the other parts."""
        of_ranks = [
            parts_of(layout, share, self.machines, by_parameter=self.by_parameter)
            for share in self.shares(layout)
        ]
        return [list(of_machine) for of_machine in zip(*of_ranks, strict=True)]

    def owned(self, layout: Layout, *, machine: int = 0, rank: int = 0) -> Owned:
        """The part of that ``rank`` of the ``machine``. If each machine has the whole state, machines do not
        differ."""
        is_divided = self.machines > 1
        parts = self.parts(layout)[machine if is_divided else 0]
        return Owned(self.shares(layout)[rank], tuple(parts), rank, is_divided)

    def nbytes(self, purpose: Purpose, layout: Layout) -> int:
        """Bytes of a unit on each machine: those of the largest part, on all."""
        if self.machines == 1 or purpose.name not in DIVIDED:
            return purpose.nbytes(layout)
        if not purpose.numel(layout):
            return 0
        most = max(sum(len(part.range(purpose)) for part in parts) for parts in self.parts(layout))
        return -(-most * purpose.dtype.itemsize // SHARD_ALIGN) * SHARD_ALIGN

    def host_bytes(self, layouts: Sequence[Layout], purposes: Iterable[Purpose]) -> dict[str, int]:
        """Bytes of each machine's host memory by purpose for units of these layouts."""
        return {p.name: sum(self.nbytes(p, layout) for layout in layouts) for p in purposes}


def places_of(parts: Sequence[Share], purpose: Purpose, wanted: range) -> Iterator[tuple[int, int, int]]:
    """The pieces of the ``wanted`` elements (or blocks) of a unit that are in ``parts``, which are stored one
    after the other. For each: its start and stop in the unit, and its start in the stored parts."""
    at = 0
    for part in parts:
        has = part.range(purpose)
        start, stop = max(has.start, wanted.start), min(has.stop, wanted.stop)
        if start < stop:
            yield start, stop, at + start - has.start
        at += len(has)


def within(whole: Stretch, elements: range) -> Stretch:
    """The part of ``whole`` within these elements of the unit's state."""
    start = max(whole.index, elements.start)
    stop = max(start, min(whole.index + whole.numel, elements.stop))
    offset = whole.offset + (start - whole.index) * whole.dtype.itemsize
    return Stretch(whole.dtype, offset, start, stop - start)
