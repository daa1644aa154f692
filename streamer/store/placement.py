"""Which units keep their optimizer state and their weights in host memory, and which on disk.

[Note: placement]
A step uses every unit's state once, in the order of the next forward. What was used longest ago is thus what
is used next, so that any memory that keeps the most recent ones would always hold the wrong ones. Instead a
fixed set of units stays in memory: those that the next forward asks for first, as many as the budget has room
for. While they are updated the others' state is on its way from disk.

First to go are frozen weights that lie in files anyway, which nobody needs to write; then the optimizer's
state; then other weights. `place` decides that, three times:

- when a model is wrapped, for its weights and what makes masters of them (`place_model`);
- when an optimizer is made, for its moments (`place_moments`);
- when something else needs room later (sums of gradients, saved inputs), for moments that are in memory
  (`make_room`).

The ranks of a machine have one budget, in which each has rings of its own; the first of all ranks decides for
all of them.
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

#: What is short where host memory is too small with all on disk that may be there.
ON_DISK = "the model with what can be on disk there"


@dataclass(frozen=True)
class Placement:
    """The positions of the units that have on disk what makes masters of their weights, and the weights."""

    masters: frozenset[int] = frozenset()
    weights: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Way:
    """A way to place units: ``needed`` bytes of host memory with all on disk of what is ``movable``, by
    position the bytes of each unit, in the order in which they are to stay in memory."""

    needed: int
    movable: Mapping[int, int] = field(default_factory=dict)


def place(ways: Sequence[Way], room: int, remedy: str = REMEDY) -> tuple[int, frozenset[int]]:
    """The first of ``ways`` that ``room`` bytes of host memory are enough for, by its number, and the
    positions of the units whose movable bytes go to disk: those that the rest of the room is too small for.
    [Note: placement]

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
    """What ``planned`` becomes where ``room`` bytes of host memory are all that there is, and the rest is on
    disk: first frozen weights that are ``stored`` in files, by name; then, if something ``may_write``, the
    optimizer's state, and then weights of other layers. ``layouts`` are the units', the root's last, which
    stays in memory but for its state. Moments are counted in fp32, though they may be shorter. ``room`` is
    for all ranks of a machine; what each of them takes is told once.

    Raises MemoryError if there is not even room for the rings that what is on disk passes through.
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
        """Bytes of host memory, but for state, if the weights of the layers ``out`` are on disk."""
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
    """The positions of the units whose state for ``purposes`` goes to disk where ``room`` bytes of host
    memory are left for it, and for the ring that it passes through with other purposes that are ``on_disk``.

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
    """The positions of the units whose ``movable`` bytes, in the order in which they are to stay in memory,
    go to disk so that ``lacking`` bytes more are free, where the ring for what is on disk takes ``ring``
    bytes then and ``ring_now`` now. None if all of them are too few."""
    room = sum(movable.values()) + ring_now - lacking
    return place([Way(ring, movable)], room)[1] if room >= ring else frozenset()


def state_sizes(layouts: Sequence[Layout], purposes: Sequence[Purpose], division: Division) -> dict[int, int]:
    """Bytes on each machine for ``purposes`` of the units of these ``layouts``, the root's is last, by their
    positions, in the order in which the next forward asks for them."""
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
        sum(_padded(len(chunk.bytes(purpose))) for purpose in purposes if purpose.numel(layout))
        for layout in layouts
        for chunk in chunks_of(layout, division=division)
    )
    return RING * max(from_disk, default=0)


def disk_bytes(layouts: Sequence[Layout], purposes: Sequence[Purpose], division: Division) -> int:
    """Bytes on the disk of the first machine, padding included, for ``purposes`` of units of these layouts;
    those of the others differ from it by what is left over where a state is divided."""
    return sum(
        _padded(len(chunk.bytes(purpose)))
        for layout in layouts
        for chunk in chunks_of(layout, division=division, machine=0)
        for purpose in purposes
        if purpose.numel(layout)
    )


def _padded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
