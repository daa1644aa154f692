"""Which units keep their optimizer state and their weights in host memory, and which on disk.

[Note: placement]
A step uses every unit's state once, in the order of the next forward. What was used longest ago is thus what
is used next, so that any memory that keeps the most recent ones would always hold the wrong ones. Instead a
fixed set of units stays in memory: those that the next forward asks for first, as many as the budget has room
for. While they are updated the others' state is on its way from disk.

First to go are frozen weights that lie in files anyway, which nobody needs to write; then the optimizer's
state; then other weights. Where something else needs room later (sums of gradients, saved inputs), moments
that are in memory go to disk, those that the next forward asks for last before the others.

The ranks of a machine have one budget, in which each has rings of its own; the first of all ranks decides for
all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from streamer.backends.direct_io import ALIGNMENT
from streamer.memory.layout import Layout
from streamer.memory.on_disk import RING, WEIGHT_BUFFERS, chunks_of, weights_edges
from streamer.memory.purposes import Purpose
from streamer.memory.shares import Division

#: What helps where `wrap` was given too small a budget of host memory.
REMEDY = "raise host_memory, or wrap with update='backward', dtype=torch.bfloat16, or frozen parameters"
#: What is short then.
ON_DISK = "the model with what can be on disk there"


def beyond(sizes: Mapping[int, int], room: int) -> frozenset[int]:
    """The positions of units that are beyond ``room`` bytes of host memory; ``sizes`` are the bytes of each
    unit by its position, in the order in which they are to stay. [Note: placement]"""
    left, found = room, set()
    for position, needed in sizes.items():
        if needed <= left:
            left -= needed
        else:
            found.add(position)
    return frozenset(found)


def state_sizes(layouts: Sequence[Layout], purposes: Sequence[Purpose], division: Division) -> dict[int, int]:
    """Bytes on each machine for ``purposes`` of the units of these ``layouts``, the root's is last, for
    `beyond`."""
    root = len(layouts) - 1
    return {
        position: sum(division.nbytes(purpose, layouts[position]) for purpose in purposes)
        for position in (root, *range(root))
    }


def weight_ring_bytes(layouts: Iterable[Layout]) -> int:
    """Bytes of the ring that weights of layers of these ``layouts`` pass through: of one rank."""
    return WEIGHT_BUFFERS * max((_padded(layout.nbytes) for layout in layouts), default=0)


def weights_on_disk_bytes(layout: Layout, ranks: int = 1) -> int:
    """Bytes of a unit's weights on disk, of so many ``ranks``, padding included."""
    edges = weights_edges(layout, ranks)
    return sum(_padded(stop - start // ALIGNMENT * ALIGNMENT) for start, stop in pairwise(edges))


def ring_bytes(layouts: Sequence[Layout], purposes: Sequence[Purpose], division: Division) -> int:
    """Bytes of a ring that chunks of any of these units pass through: of one rank, as many on all."""
    from_disk = (
        sum(_padded(chunk.nbytes(purpose)) for purpose in purposes if purpose.numel(layout))
        for layout in layouts
        for chunk in chunks_of(layout, division=division)
    )
    return RING * max(from_disk, default=0)


def disk_bytes(layouts: Sequence[Layout], purposes: Sequence[Purpose], division: Division) -> int:
    """Bytes on the disk of the first machine, padding included, for ``purposes`` of units of these layouts;
    those of the others differ from it by what is left over where a state is divided."""
    return sum(
        _padded(chunk.nbytes(purpose))
        for layout in layouts
        for chunk in chunks_of(layout, division=division, machine=0)
        for purpose in purposes
        if purpose.numel(layout)
    )


def _padded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
