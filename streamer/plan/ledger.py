"""Bytes by owner: what a wrapped model will take, known before anything is allocated, also as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from streamer.backends.host_memory import RAISE_LOCKED_LIMIT
from streamer.engine.paging.unit import Unit, buffer_bytes
from streamer.engine.paging.update_in_backward import RING
from streamer.memory.placement import (
    ON_DISK,
    REMEDY,
    beyond,
    disk_bytes,
    ring_bytes,
    weight_ring_bytes,
    weights_on_disk_bytes,
)
from streamer.memory.purposes import (
    BF16,
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
)
from streamer.memory.slots import (
    BUFFERS,
    GRAD_SLOTS,
    ROOT_GRADIENTS,
    ROOT_WEIGHTS,
    WEIGHT_SLOTS,
    num_grad_slots,
)
from streamer.memory.verdict import Tier, require
from streamer.plan.room import Room


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

    def check(self, room: Room, *, device_remedy: str | None = None) -> None:
        """Raise MemoryError, with what each side needs and has, unless ``room`` has enough of both.
        ``device_remedy`` says what would help the device."""
        device, host = sum(self.device.values()), sum(self.host.values())
        given_back = {"given back by the model": room.given_back}
        rows = {"available": room.host - room.given_back, **_nonzero(given_back)}
        tiers = [
            Tier("the device", device, room.tensors, device_remedy or "lower num_slots"),
            room.host_tier(host, device, "use dtype=torch.bfloat16 or freeze parameters"),
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


def ledger(units: Sequence[Unit], root: Unit, *, num_slots: int, update_in_backward: bool = False) -> Ledger:
    """What streaming ``units`` through ``num_slots`` slots takes; an optimizer's state comes on top."""
    layouts = [unit.layout for unit in (*units, root)]
    device = {
        WEIGHT_SLOTS: num_slots * max(unit.layout.nbytes for unit in units),
        GRAD_SLOTS: num_grad_slots(num_slots) * max(unit.layout.grad_nbytes for unit in units),
        ROOT_WEIGHTS: root.layout.nbytes,
        ROOT_GRADIENTS: root.layout.grad_nbytes,
        BUFFERS: buffer_bytes((*units, root)),
    }
    host = host_bytes(layouts, MODEL)
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


def to_disk(planned: Ledger, units: Sequence[Unit], root: Unit, room: int) -> tuple[Ledger, OnDisk]:
    """What ``planned`` becomes where ``room`` bytes of host memory are all that there is, and the rest goes
    to disk: first the optimizer's state, then weights of layers. Moments are counted in fp32, though they may
    be shorter.

    Raises MemoryError if there is not even room for the rings that what is on disk passes through.
    """
    layouts = [unit.layout for unit in (*units, root)]
    state = host_bytes(layouts, MASTERING)
    fixed = {name: nbytes for name, nbytes in planned.host.items() if name not in state}
    held, weights = sum(fixed.values()), frozenset[int]()
    in_memory = held + sum((state | host_bytes(layouts, MOMENTS[FP32])).values())
    if in_memory <= room:
        return planned, OnDisk()
    state_there = held + ring_bytes(layouts, [*MASTERING, *MOMENTS[FP32]])
    weight_ring = weight_ring_bytes(layouts)
    weights_there = state_there - sum(WEIGHTS.nbytes(layout) for layout in layouts[:-1]) + weight_ring
    require(ON_DISK, Tier("host_memory", min(in_memory, state_there, weights_there), room, REMEDY))
    left = room - state_there
    if left < 0:
        weights = beyond(layouts, [WEIGHTS], room - weights_there, with_root=False)
        stay = [layout for position, layout in enumerate(layouts) if position not in weights]
        fixed |= {WEIGHT_RING: weight_ring, **host_bytes(stay, [WEIGHTS])}
        left = 0
    masters = beyond(layouts, MASTERING, left)
    disk = {
        WEIGHTS.name: sum(weights_on_disk_bytes(layouts[position]) for position in weights),
        **{purpose.name: disk_bytes([layouts[p] for p in masters], [purpose]) for purpose in MASTERING},
    }
    stay = [layout for position, layout in enumerate(layouts) if position not in masters]
    host = {**fixed, **host_bytes(stay, MASTERING)}
    return Ledger(planned.device, _nonzero(host), _nonzero(disk)), OnDisk(masters, weights)


def least_moments(units: Sequence[Unit], root: Unit) -> dict[str, int]:
    """The bytes of host memory that no AdamW of theirs can do without."""
    layouts = [unit.layout for unit in (*units, root)]
    dtypes = {slice.param.dtype for layout in layouts for slice in layout.trainable}
    # short ones have padding and scales, which small parameters may not be worth
    kept = MOMENTS if dtypes <= {BF16} else [FP32]
    least = min(sum(host_bytes(layouts, MOMENTS[dtype]).values()) for dtype in kept)
    return _nonzero({"moments of AdamW at least": least})


def _nonzero(amounts: Mapping[str, int]) -> dict[str, int]:
    return {purpose: nbytes for purpose, nbytes in amounts.items() if nbytes}
