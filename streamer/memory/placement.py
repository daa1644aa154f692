"""Which units keep their optimizer state in host memory, and which on disk.

[Note: placement]
A step uses every unit's state once, in the order of the next forward. What was used longest ago is thus what
is used next, so that any memory that keeps the most recent ones would always hold the wrong ones. Instead a
fixed set of units stays in memory: those that the next forward asks for first, as many as the budget has room
for. While they are updated the others' state is on its way from disk.
"""

from __future__ import annotations

from collections.abc import Sequence

from streamer.backends.direct_io import ALIGNMENT
from streamer.memory.layout import Layout
from streamer.memory.on_disk import RING, WEIGHT_BUFFERS, chunks_of
from streamer.memory.purposes import Purpose

#: What helps where `wrap` was given too small a budget of host memory.
REMEDY = "raise host_memory, or wrap with update='backward', dtype=torch.bfloat16, or frozen parameters"
#: What is short then.
ON_DISK = "the model with what can be on disk there"


def beyond(
    layouts: Sequence[Layout], purposes: Sequence[Purpose], room: int, *, with_root: bool = True
) -> frozenset[int]:
    """The positions of the units, of these ``layouts`` (the root's is last), whose buffers for ``purposes``
    are beyond ``room`` bytes of host memory. [Note: placement] Without ``with_root`` the root's are not
    counted, and stay."""
    left, found = room, set()
    root = len(layouts) - 1
    for position in (*([root] if with_root else ()), *range(root)):
        needed = sum(purpose.nbytes(layouts[position]) for purpose in purposes)
        if needed <= left:
            left -= needed
        else:
            found.add(position)
    return frozenset(found)


def weight_ring_bytes(layouts: Sequence[Layout]) -> int:
    """Bytes of the ring that weights of layers pass through, of all units of these ``layouts`` but the last,
    the root."""
    return WEIGHT_BUFFERS * max(map(weights_on_disk_bytes, layouts[:-1]), default=0)


def weights_on_disk_bytes(layout: Layout) -> int:
    """Bytes of a unit's weights on disk, padding included."""
    return _padded(layout.nbytes)


def ring_bytes(layouts: Sequence[Layout], purposes: Sequence[Purpose]) -> int:
    """Bytes of a ring that chunks of any of these units pass through."""
    from_disk = (
        sum(_padded(chunk.nbytes(purpose)) for purpose in purposes if purpose.numel(layout))
        for layout in layouts
        for chunk in chunks_of(layout)
    )
    return RING * max(from_disk, default=0)


def disk_bytes(layouts: Sequence[Layout], purposes: Sequence[Purpose]) -> int:
    """Bytes on disk for ``purposes`` of units of these layouts, padding included."""
    return sum(
        _padded(chunk.nbytes(purpose))
        for layout in layouts
        for chunk in chunks_of(layout)
        for purpose in purposes
        if purpose.numel(layout)
    )


def _padded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
