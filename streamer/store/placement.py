"""Which units keep their optimizer state and their weights in host memory, and which on disk.

[Note: placement]
A step uses every unit's state once, in the order of the next forward. So the least recently used
state is always needed next, and a cache of recent state would never hit. Instead, the state of a fixed
set of units stays in memory: those that the next forward runs first, as many as fit into the budget. While
these are updated, the state of the others is read from disk.

Frozen weights that are in files anyway go to disk first: they are never written. The optimizer's state
follows, then other weights. `place` decides three times:

- when a model is wrapped, for its weights and their masters (`place_model`);
- when an optimizer is created, for its moments (`place_moments`);
- when sums of gradients or saved inputs need room later, for moments that are in memory (`make_room`).

The ranks of a machine share one budget, which includes the rings of each. The first rank decides for all.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from streamer.backends.direct_io import ALIGNMENT
from streamer.backends.stored_tensors import Pieces, between_bytes
from streamer.store.layout import Layout
from streamer.store.ledger import REMEDY, Ledger, Tier, nonzero, require
from streamer.store.on_disk import RING, chunks_of
from streamer.store.purposes import (
    FILE_BLOCKS,
    FP32,
    MASTERING,
    MOMENTS,
    WEIGHT_RING,
    WEIGHTS,
    Purpose,
    of_all_ranks,
)
from streamer.store.shares import Division
from streamer.store.weights_on_disk import WEIGHT_BUFFERS, bytes_in_memory, stored_part, weights_edges

#: The subject of the error if host memory is too small although all state that may be on disk is there.
ON_DISK = "the model with what can be on disk there"


@dataclass(frozen=True)
class Placement:
    """The positions of the units with masters on disk, and of those with weights on disk."""

    masters: frozenset[int] = frozenset()
    weights: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Way:
    """A way to place units. ``movable`` has the bytes of each unit that may go to disk, by position; the
    first units stay in memory first. ``needed`` are the bytes of host memory with all of these on disk."""

    needed: int
    movable: Mapping[int, int] = field(default_factory=dict)


def place(ways: Sequence[Way], room: int, remedy: str = REMEDY) -> tuple[int, frozenset[int]]:
    """The number of the first of ``ways`` that fits into ``room`` bytes of host memory, and the positions of
    the units whose movable bytes go to disk, since they do not fit. [Note: placement]

    Raises MemoryError, with ``remedy``, if there is none.
    """
    require(ON_DISK, Tier("host_memory", min(way.needed for way in ways), room, remedy))
    number = next(number for number, way in enumerate(ways) if way.needed <= room)
    left, gone = room - ways[number].needed, set()
    for position, nbytes in ways[number].movable.items():
        if nbytes <= left:
            left -= nbytes
        else:
            gone.add(position)
    return number, frozenset(gone)


def place_model(
    planned: Ledger,
    layouts: Sequence[Layout],
    room: int,
    *,
    stored: Mapping[str, Pieces],
    may_write: bool = True,
    division: Division,
) -> tuple[Ledger, Placement]:
    """``planned`` with at most ``room`` bytes of host memory, for all ranks of a machine. What does not fit
    is on disk: first frozen weights that are ``stored`` in files, by name; then, if state ``may_write`` to
    disk, the optimizer's state; then weights of other layers. ``layouts`` are the units', the root's last; of
    the root only its state may be on disk. Moments are counted in fp32, though they may be shorter.

    Raises MemoryError if the rings for state and weights on disk do not fit.
    """
    ranks = division.ranks
    layers = range(len(layouts) - 1)
    files = {p: part for p in layers if (part := stored_part(layouts[p], stored))}
    moved = {p: WEIGHTS.nbytes(layouts[p]) for p in layers}
    moved |= {p: moved[p] - bytes_in_memory(layouts[p], part) for p, part in files.items()}
    masters = state_sizes(layouts, MASTERING, division)
    of_model = {WEIGHTS.name, *(purpose.name for purpose in MASTERING)}
    others = {name: nbytes for name, nbytes in planned.host.items() if name not in of_model}

    def host_without_state(out: Collection[int]) -> dict[str, int]:
        """Bytes of host memory without state, if the weights of the layers ``out`` are on disk."""
        read = [piece for p in out if p in files for pieces in files[p].values() for piece in pieces]
        return others | {
            WEIGHTS.name: sum(map(WEIGHTS.nbytes, layouts)) - sum(moved[p] for p in out),
            WEIGHT_RING: weight_ring_bytes(layouts[p] for p in out),
            FILE_BLOCKS: between_bytes(read) if read else 0,
        }

    def needed(out: Collection[int], state: int) -> int:
        return sum(of_all_ranks(host_without_state(out), ranks).values()) + state

    state = sum(masters.values()) + sum(division.host_bytes(layouts, MOMENTS[FP32]).values())
    ring = ring_bytes(layouts, [*MASTERING, *MOMENTS[FP32]], division) * ranks
    ways = [
        Way(needed((), state)),
        Way(needed(files, state), {p: moved[p] for p in files}),
        Way(needed(files, ring), masters),
        Way(needed(layers, ring), {p: moved[p] for p in layers if p not in files}),
    ]
    allowed = ways if may_write else ways[:2]
    would_fit = min(way.needed for way in ways) < min(way.needed for way in allowed)
    remedy = f"give disk= a folder for what must be written, or {REMEDY}" if would_fit else REMEDY
    number, gone = place(allowed, room, remedy)
    every = frozenset(p for p, nbytes in masters.items() if nbytes)
    none, in_files = frozenset[int](), frozenset(files)
    placement = [
        Placement(),
        Placement(none, gone),
        Placement(gone, in_files),
        Placement(every, gone | in_files),
    ][number]
    if number == 0:
        return planned, placement
    on_disk = [layouts[p] for p in placement.masters]
    in_memory = [layout for p, layout in enumerate(layouts) if p not in placement.masters]
    host = host_without_state(placement.weights) | division.host_bytes(in_memory, MASTERING)
    written = [layouts[p] for p in placement.weights if p not in files]
    disk = {WEIGHTS.name: sum(weights_on_disk_bytes(layout, ranks) for layout in written)}
    disk |= {purpose.name: disk_bytes(on_disk, [purpose], division) for purpose in MASTERING}
    return Ledger(planned.device, nonzero(host), nonzero(disk)), placement


def place_moments(
    layouts: Sequence[Layout],
    purposes: Sequence[Purpose],
    room: int,
    *,
    on_disk: Sequence[Purpose] = (),
    may_write: bool = True,
    division: Division,
) -> frozenset[int]:
    """The positions of the units whose state for ``purposes`` goes to disk. ``room`` bytes of host memory are
    left for the state and for its ring, which also serves the purposes that are ``on_disk`` already.

    Raises MemoryError if there is too little for the ring.
    """
    sizes = state_sizes(layouts, purposes, division)
    ways = [] if on_disk else [Way(sum(sizes.values()))]
    remedy = REMEDY
    if may_write:
        ways.append(Way(ring_bytes(layouts, [*purposes, *on_disk], division) * division.ranks, sizes))
    else:
        remedy = f"give disk= a folder for what must be written, or {REMEDY}"
    return place(ways, room, remedy)[1]


def make_room(movable: Mapping[int, int], lacking: int, *, ring: int, ring_now: int) -> frozenset[int]:
    """The positions of the units whose ``movable`` bytes go to disk so that ``lacking`` bytes become free;
    the first units stay in memory first. The ring for state on disk has ``ring_now`` bytes now and ``ring``
    bytes then. Empty if all of them are too few."""
    room = sum(movable.values()) + ring_now - lacking
    return place([Way(ring, movable)], room)[1] if room >= ring else frozenset()


def state_sizes(layouts: Sequence[Layout], purposes: Sequence[Purpose], division: Division) -> dict[int, int]:
    """Bytes on each machine for ``purposes`` of units of these ``layouts``, the root's last, by their
    positions, in the order of the next forward."""
    root = len(layouts) - 1
    return {
        position: sum(division.nbytes(purpose, layouts[position]) for purpose in purposes)
        for position in (root, *range(root))
    }


def weight_ring_bytes(layouts: Iterable[Layout]) -> int:
    """Bytes of one rank's ring for weights of layers of these ``layouts``."""
    return WEIGHT_BUFFERS * max((_padded(layout.nbytes) for layout in layouts), default=0)


def weights_on_disk_bytes(layout: Layout, ranks: int = 1) -> int:
    """Bytes of a unit's weights on disk for so many ``ranks``, padding included."""
    edges = weights_edges(layout, ranks)
    return sum(_padded(stop - start // ALIGNMENT * ALIGNMENT) for start, stop in pairwise(edges))


def ring_bytes(layouts: Sequence[Layout], purposes: Sequence[Purpose], division: Division) -> int:
    """Bytes of one rank's ring for chunks of units of these ``layouts``; the same on all ranks."""
    from_disk = (
        sum(_padded(len(chunk.bytes(purpose))) for purpose in purposes if purpose.numel(layout))
        for layout in layouts
        for chunk in chunks_of(layout, division=division)
    )
    return RING * max(from_disk, default=0)


def disk_bytes(layouts: Sequence[Layout], purposes: Sequence[Purpose], division: Division) -> int:
    """Bytes on the disk of the first machine, padding included, for ``purposes`` of units of these layouts.
    If machines divide the state, the others may have slightly less."""
    return sum(
        _padded(len(chunk.bytes(purpose)))
        for layout in layouts
        for chunk in chunks_of(layout, division=division, machine=0)
        for purpose in purposes
        if purpose.numel(layout)
    )


def _padded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
