"""Bytes by owner: what a wrapped model will take, known before anything is allocated, also as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from streamer.backends.host_memory import RAISE_LOCKED_LIMIT
from streamer.backends.stored_tensors import Pieces, between_bytes
from streamer.engine.paging.gradients import RING
from streamer.engine.paging.unit import Unit, buffer_bytes
from streamer.memory.on_disk import held_beside, stored_part
from streamer.memory.placement import (
    ON_DISK,
    REMEDY,
    beyond,
    disk_bytes,
    ring_bytes,
    state_sizes,
    weight_ring_bytes,
    weights_on_disk_bytes,
)
from streamer.memory.purposes import (
    BF16,
    FILE_BLOCKS,
    FP16,
    FP32,
    GRADIENTS,
    MASTERING,
    MODEL,
    MOMENTS,
    PINNED,
    STAGING,
    WEIGHT_RING,
    WEIGHTS,
    host_bytes,
    of_all_ranks,
)
from streamer.memory.shares import Division
from streamer.memory.slots import (
    AVERAGING,
    BUFFERS,
    GRAD_SLOTS,
    ROOT_GRADIENTS,
    ROOT_WEIGHTS,
    WEIGHT_SLOTS,
    gather_bytes,
    num_grad_slots,
    reduce_bytes,
)
from streamer.memory.verdict import Tier, require
from streamer.planner.room import Room


def byte_table(sections: Mapping[str, Mapping[str, int]]) -> str:
    """A row for each entry below the title of its section: its name, its bytes and, from 128 MiB on, GiB.
    Sections without entries are left out."""
    rows = {title: {f"  {name}": nbytes for name, nbytes in rows.items()} for title, rows in sections.items()}
    entries = {name: nbytes for section in rows.values() for name, nbytes in section.items()}
    width = max(map(len, [*rows, *entries]), default=0)
    digits = max((len(f"{nbytes:,}") for section in rows.values() for nbytes in section.values()), default=0)
    lines = []
    for title, section in rows.items():
        if section:
            lines.append(f"{title:{width}}  {'bytes':>{digits}}")
        for name, nbytes in section.items():
            gib = f"  {nbytes / (1 << 30):10.2f} GiB" if nbytes >= 1 << 27 else ""
            lines.append(f"{name:{width}}  {nbytes:>{digits},}{gib}")
    return "\n".join(lines)


_SLOTS = (WEIGHT_SLOTS, GRAD_SLOTS)


@dataclass(frozen=True)
class Ledger:
    """Bytes by purpose on the device and in host memory."""

    device: Mapping[str, int]
    host: Mapping[str, int]
    disk: Mapping[str, int] = field(default_factory=dict)

    @property
    def beside_slots(self) -> int:
        """Bytes of the device that are for other things than slots."""
        return sum(nbytes for purpose, nbytes in self.device.items() if purpose not in _SLOTS)

    @property
    def pinned_host_bytes(self) -> int:
        """Bytes of the host that are copied to or from the device, and page-locked where that is a GPU."""
        return sum(nbytes for purpose, nbytes in self.host.items() if purpose in PINNED)

    def table(self, *, device: Mapping[str, int] | None = None, host: Mapping[str, int] | None = None) -> str:
        """The bytes by owner and in all, a row each; ``device`` and ``host`` are more rows for each side."""
        sides = {
            "device": (self.device, {}, device or {}),
            "host": (self.host, {"page-locked on a GPU": self.pinned_host_bytes}, host or {}),
            "disk": (self.disk, {}, {}),
        }
        return byte_table(
            {
                side: {**owners, "needed": sum(owners.values()), **_nonzero(parts), **more}
                for side, (owners, parts, more) in sides.items()
                if owners
            }
        )

    def check(self, room: Room, *, device_remedy: str | None = None, frozen: int = 0) -> None:
        """Raise MemoryError, with what the short side needs and has, unless ``room`` has enough of both.
        ``device_remedy`` says what would help the device; ``frozen`` bytes of the host are `frozen_matrices`.
        """
        device, host = sum(self.device.values()), sum(self.host.values())
        given_back = {"given back by the model": room.given_back}
        rows = {"available": room.host - room.given_back, **_nonzero(given_back)}
        tiers = [
            Tier("the device", device, room.tensors, device_remedy or "lower num_slots"),
            room.host_tier(host, device, _quantizing(frozen, host, room.host_room(device)) or _EXACT),
        ]
        if room.host_limit is not None:
            remedy = f"give disk= a folder for the optimizer's state, or {REMEDY}"
            tiers.append(Tier("host_memory", host, room.host_limit, REMEDY if self.disk else remedy))
        if room.lockable is not None:
            rows["may be page-locked"] = room.lockable
            remedy = f"raise the limit with {RAISE_LOCKED_LIMIT}"
            tiers.append(Tier("page-locked host memory", self.pinned_host_bytes, room.lockable, remedy))

        def table() -> str:
            return self.table(device={"available": room.tensors}, host=rows)

        require("the model", *tiers, details=table)


#: What makes host memory suffice, unless weights are frozen and short already.
_EXACT = "use dtype=torch.bfloat16 or freeze parameters"
#: How to quantize, and which share of the bytes of 16-bit weights that saves.
_QUANTIZE = {'"int8"': 0.48, '"nf4"': 0.7}


def frozen_matrices(units: Sequence[Unit]) -> int:
    """Bytes of the frozen matrices of ``units`` in 16 bits a value, which no exact option makes fewer."""
    return sum(
        slice.nbytes
        for unit in units
        for slice in unit.layout.slices
        if not slice.param.trainable and len(slice.param.shape) > 1 and slice.param.dtype in (BF16, FP16)
    )


def _quantizing(frozen: int, needed: int, there: int) -> str | None:
    """The mildest way to quantize that makes ``there`` bytes suffice for ``needed``, of which most are
    ``frozen`` weights."""
    if 2 * frozen < needed:
        return None
    enough = (word for word, share in _QUANTIZE.items() if needed - share * frozen <= there)
    word = next(enough, None)
    return None if word is None else f"quantize the frozen weights (from_pretrained(quantize={word}))"


def ledger(
    units: Sequence[Unit],
    root: Unit,
    *,
    num_slots: int,
    update_in_backward: bool = False,
    averages_in_fp32: bool = False,
    division: Division | None = None,
) -> Ledger:
    """What streaming ``units`` through ``num_slots`` slots takes; an optimizer's state comes on top. Ranks,
    each of which takes all that is on its device, may average gradients in fp32. Where their machines divide
    the state, the host's bytes are those of one machine."""
    division = division or Division()
    layouts = [unit.layout for unit in (*units, root)]
    device = {
        WEIGHT_SLOTS: num_slots * max(unit.layout.nbytes for unit in units),
        GRAD_SLOTS: num_grad_slots(num_slots) * max(unit.layout.grad_nbytes for unit in units),
        ROOT_WEIGHTS: root.layout.nbytes,
        ROOT_GRADIENTS: root.layout.grad_nbytes,
        BUFFERS: buffer_bytes((*units, root)),
        AVERAGING: max(reduce_bytes(layouts) if averages_in_fp32 else 0, gather_bytes(layouts, division)),
    }
    host = division.host_bytes(layouts, MODEL)
    if update_in_backward:
        host |= host_bytes([root.layout], [GRADIENTS])
        host[STAGING] = RING * max(unit.layout.grad_nbytes for unit in units)
    else:
        host |= host_bytes(layouts, [GRADIENTS])
    return Ledger(_nonzero(device), _nonzero(host))


@dataclass(frozen=True)
class OnDisk:
    """The positions of the units that have on disk what makes masters of their weights, and the weights."""

    masters: frozenset[int] = frozenset()
    weights: frozenset[int] = frozenset()


def to_disk(
    planned: Ledger,
    units: Sequence[Unit],
    root: Unit,
    room: int,
    *,
    stored: Mapping[str, Pieces] | None = None,
    may_write: bool = True,
    division: Division | None = None,
) -> tuple[Ledger, OnDisk]:
    """What ``planned`` becomes where ``room`` bytes of host memory are all that there is, and the rest is on
    disk: first frozen weights that are ``stored`` in files, by name, which nobody needs to write; then, if
    something ``may_write``, the optimizer's state, and then weights of other layers. Moments are counted in
    fp32, though they may be shorter. ``room`` is for all ranks of a machine, as ``division`` has them; what
    each of them takes is told once.

    Raises MemoryError if there is not even room for the rings that what is on disk passes through.
    """
    division = division or Division()
    ranks = division.ranks
    layouts = [unit.layout for unit in (*units, root)]
    layers = frozenset(range(len(units)))
    parts = {position: stored_part(layouts[position], stored or {}) for position in layers}
    beside = {p: held_beside(layouts[p], part) for p, part in parts.items() if part}
    in_files = frozenset(beside)
    state = division.host_bytes(layouts, MASTERING)
    others = {name: n for name, n in planned.host.items() if name not in state and name != WEIGHTS.name}
    all_state = sum((state | division.host_bytes(layouts, MOMENTS[FP32])).values())
    ring = ring_bytes(layouts, [*MASTERING, *MOMENTS[FP32]], division) * ranks

    def with_weights(out: frozenset[int]) -> dict[str, int]:
        """Bytes of host memory, but for state, if the weights of layers ``out`` are on disk."""
        held = (
            beside.get(position, 0) if position in out else WEIGHTS.nbytes(layout)
            for position, layout in enumerate(layouts)
        )
        read = [piece for position in out & in_files for it in parts[position].values() for piece in it]
        return others | {
            WEIGHTS.name: sum(held),
            WEIGHT_RING: weight_ring_bytes([layouts[position] for position in out]),
            FILE_BLOCKS: between_bytes(read) if read else 0,
        }

    def stay(among: frozenset[int], room: int) -> frozenset[int]:
        """The first layers ``among`` these whose weights ``room`` is enough for."""
        saved = {p: WEIGHTS.nbytes(layouts[p]) - beside.get(p, 0) for p in sorted(among)}
        return among - beyond(saved, room)

    steps = [(frozenset[int](), all_state), (in_files, all_state), (in_files, ring), (layers, ring)]
    needed = [sum(of_all_ranks(with_weights(out), ranks).values()) + bytes_ for out, bytes_ in steps]
    remedy = REMEDY
    if not may_write:
        least = min(needed)
        del needed[2:]
        if least < min(needed):
            remedy = f"give disk= a folder for what must be written, or {REMEDY}"
    require(ON_DISK, Tier("host_memory", min(needed), room, remedy))
    step = next(step for step, nbytes in enumerate(needed) if nbytes <= room)
    left, (out, _) = room - needed[step], steps[step]
    masters = frozenset[int]()
    if step == 0:
        return planned, OnDisk()
    if step == 1:
        out -= stay(in_files, left)
    elif step == 2:
        masters = beyond(state_sizes(layouts, MASTERING, division), left)
    else:
        out -= stay(layers - in_files, left)
        masters = beyond(state_sizes(layouts, MASTERING, division), 0)
    disk = {
        WEIGHTS.name: sum(weights_on_disk_bytes(layouts[p], ranks) for p in out - in_files),
        **{p.name: disk_bytes([layouts[at] for at in masters], [p], division) for p in MASTERING},
    }
    in_memory = [layout for position, layout in enumerate(layouts) if position not in masters]
    host = with_weights(out) | division.host_bytes(in_memory, MASTERING)
    return Ledger(planned.device, _nonzero(host), _nonzero(disk)), OnDisk(masters, out)


def least_moments(units: Sequence[Unit], root: Unit, division: Division | None = None) -> dict[str, int]:
    """The bytes of a machine's host memory that no AdamW of theirs can do without."""
    division = division or Division()
    layouts = [unit.layout for unit in (*units, root)]
    dtypes = {slice.param.dtype for layout in layouts for slice in layout.trainable}
    # short ones have padding and scales, which small parameters may not be worth
    kept = MOMENTS if dtypes <= {BF16} else [FP32]
    least = min(sum(division.host_bytes(layouts, MOMENTS[dtype]).values()) for dtype in kept)
    return _nonzero({"moments of AdamW at least": least})


def _nonzero(amounts: Mapping[str, int]) -> dict[str, int]:
    return {purpose: nbytes for purpose, nbytes in amounts.items() if nbytes}
