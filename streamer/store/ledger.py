"""Bytes by purpose: what a wrapped model will take, known before anything is allocated; which memory is too
small for it, by how much, and what would help.

Whoever is about to take memory, or plans to, asks here, so that every refusal reads alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from streamer.backends.host_memory import RAISE_LOCKED_LIMIT
from streamer.errors import exact_amount
from streamer.store.layout import ALIGN_BYTES, Layout
from streamer.store.purposes import (
    BF16,
    FP16,
    FP32,
    GRADIENTS,
    MODEL,
    MOMENTS,
    PINNED,
    STAGING,
    STAGING_BUFFERS,
    host_bytes,
)
from streamer.store.shares import Division

#: What device memory is for.
WEIGHT_SLOTS, GRAD_SLOTS = "weight slots", "gradient slots"
ROOT_WEIGHTS, ROOT_GRADIENTS, BUFFERS = "root weights", "root gradients", "buffers"
#: What ranks average gradients of a shorter dtype than fp32 in.
AVERAGING = "averaging over ranks"
#: Bytes of it at most.
MOST_AVERAGING = 64 << 20
#: Gradient slots that there are at most.
MOST_GRAD_SLOTS = 2

#: Bytes of a limit that nothing reaches: there is none.
UNLIMITED = 1 << 62


def limit_of(limit: int | None) -> int:
    """``limit`` bytes, or `UNLIMITED` for None."""
    return UNLIMITED if limit is None else limit


#: Said of the host where it stands in for the device: what it needs has the device's bytes in it.
SHARED = " (whose memory is the device's too)"
#: What helps where `wrap` was given too small a budget of host memory.
REMEDY = "raise host_memory, or wrap with update='backward', dtype=torch.bfloat16, or frozen parameters"
#: What makes host memory suffice, unless weights are frozen and short already.
_EXACT = "use dtype=torch.bfloat16 or freeze parameters"
#: How to quantize, and which share of the bytes of 16-bit weights that saves.
_QUANTIZE = {'"int8"': 0.48, '"nf4"': 0.7}


@dataclass(frozen=True)
class Tier:
    """Bytes that are needed of one tier of memory, and bytes that it has; ``remedy`` says what would help."""

    name: str
    needed: int
    available: int
    remedy: str = ""

    @property
    def lacking(self) -> int:
        """Bytes that there are too few of."""
        return max(0, self.needed - self.available)

    def __str__(self) -> str:
        short = f" ({exact_amount(self.lacking)} too few)" if self.lacking else ""
        return f"{self.name} needs {exact_amount(self.needed)} and has {exact_amount(self.available)}{short}"


def host(needed: int, available: int, remedy: str = "") -> Tier:
    """The host's memory."""
    return Tier("the host", needed, available, remedy)


def verdict(what: str, tiers: Iterable[Tier]) -> str | None:
    """One line that names the tiers with too little memory for ``what``; None if every tier has room."""
    short = [tier for tier in tiers if tier.lacking]
    if not short:
        return None
    remedies = "; ".join(dict.fromkeys(tier.remedy for tier in short if tier.remedy))
    message = f"not enough memory for {what}: {', '.join(map(str, short))}"
    return f"{message}: {remedies}" if remedies else message


def require(what: str, *tiers: Tier, details: Callable[[], str] = str) -> None:
    """Raise MemoryError unless every tier has room for ``what``: the `verdict`, and ``details`` below it."""
    message = verdict(what, tiers)
    if message is not None:
        raise MemoryError(f"{message}\n{details()}".rstrip())


def lacks(tiers: Iterable[Tier]) -> str:
    """The tiers that are short, each with how many bytes it lacks."""
    return " and ".join(f"{tier.name} lacks {exact_amount(tier.lacking)}" for tier in tiers if tier.lacking)


@dataclass(frozen=True)
class Room:
    """Bytes that there are of the device and of host memory, `UNLIMITED` where there is no limit.

    ``budget`` bytes of the device are for tensors. ``shared`` says that the device's memory is the host's.
    ``device`` includes ``context``, the bytes that CUDA itself takes, as plans do. ``host`` includes
    ``freed_by_model``, bytes that the model holds now and `wrap` frees. ``lockable`` bytes may be
    page-locked. ``host_limit`` is the limit passed to `wrap`. The device's bytes are of each of ``ranks``,
    the host's of all.
    """

    device: int
    host: int
    budget: int = UNLIMITED
    shared: bool = False
    context: int = 0
    freed_by_model: int = 0
    lockable: int = UNLIMITED
    host_limit: int = UNLIMITED
    ranks: int = 1

    def host_room(self, device: int = 0) -> int:
        """Bytes of host memory that the model may take, beside ``device`` bytes of the device where the
        device's memory is the host's."""
        return min(max(0, self.host - device * self.shared * self.ranks), self.host_limit)

    @property
    def tensors(self) -> int:
        """Bytes of the device that there are for tensors."""
        return min(self.device - self.context, self.budget)

    def host_tier(self, needed: int, device: int, remedy: str = "") -> Tier:
        """What is needed of the host, with ``device`` bytes of the device where its memory is the host's."""
        needed += device * self.shared * self.ranks
        return Tier(f"the host{SHARED * self.shared}", needed, self.host, remedy)


@dataclass(frozen=True)
class Ledger:
    """Bytes by purpose on the device, in host memory and on disk."""

    device: Mapping[str, int]
    host: Mapping[str, int]
    disk: Mapping[str, int] = field(default_factory=dict)

    @property
    def outside_slots(self) -> int:
        """Bytes of the device that are for other things than slots."""
        slots = (WEIGHT_SLOTS, GRAD_SLOTS)
        return sum(nbytes for purpose, nbytes in self.device.items() if purpose not in slots)

    @property
    def pinned_host_bytes(self) -> int:
        """Bytes of the host that are copied to or from the device, and page-locked where that is a GPU."""
        return sum(nbytes for purpose, nbytes in self.host.items() if purpose in PINNED)

    def table(self, *, device: Mapping[str, int] | None = None, host: Mapping[str, int] | None = None) -> str:
        """A row for each owner below the title of its side, and one for all of them: the name, the bytes and,
        from 128 MiB on, GiB. ``device`` and ``host`` are more rows for each side."""
        sides = {
            "device": (self.device, {}, device or {}),
            "host": (self.host, {"page-locked on a GPU": self.pinned_host_bytes}, host or {}),
            "disk": (self.disk, {}, {}),
        }
        tables = {
            side: {**owners, "needed": sum(owners.values()), **nonzero(parts), **more}
            for side, (owners, parts, more) in sides.items()
            if owners
        }
        rows = [(f"  {name}", nbytes) for table in tables.values() for name, nbytes in table.items()]
        width = max(len(name) for name in [*tables, *(name for name, _ in rows)])
        digits = max(len(f"{nbytes:,}") for _, nbytes in rows)
        lines = []
        for side, table in tables.items():
            lines.append(f"{side:{width}}  {'bytes':>{digits}}")
            for name, nbytes in table.items():
                gib = f"  {nbytes / (1 << 30):10.2f} GiB" if nbytes >= 1 << 27 else ""
                lines.append(f"  {name:{width - 2}}  {nbytes:>{digits},}{gib}")
        return "\n".join(lines)

    def check(self, room: Room, *, device_remedy: str = "lower num_slots", frozen: int = 0) -> None:
        """Raise MemoryError, with what the short side needs and has, unless ``room`` has enough of both.
        ``device_remedy`` says what would help the device; ``frozen`` bytes of the host are `frozen_matrices`.
        """
        device, host = sum(self.device.values()), sum(self.host.values())
        host_remedy = _quantizing(frozen, host, room.host_room(device)) or _EXACT
        limit_remedy = REMEDY if self.disk else f"give disk= a folder for the optimizer's state, or {REMEDY}"
        lock_remedy = f"raise the limit with {RAISE_LOCKED_LIMIT}"
        locked = Tier("page-locked host memory", self.pinned_host_bytes, room.lockable, lock_remedy)

        def table() -> str:
            rows = {"available": room.host - room.freed_by_model}
            rows |= nonzero({"given back by the model": room.freed_by_model})
            if room.lockable < UNLIMITED:
                rows["may be page-locked"] = room.lockable
            return self.table(device={"available": room.tensors}, host=rows)

        require(
            "the model",
            Tier("the device", device, room.tensors, device_remedy),
            room.host_tier(host, device, host_remedy),
            Tier("host_memory", host, room.host_limit, limit_remedy),
            locked,
            details=table,
        )


def ledger(
    layouts: Sequence[Layout],
    *,
    num_slots: int,
    buffers: int,
    update_in_backward: bool = False,
    averages_in_fp32: bool = False,
    division: Division | None = None,
) -> Ledger:
    """What streaming units of these ``layouts``, the root's last, through ``num_slots`` slots takes, and
    their ``buffers`` in bytes; an optimizer's state comes on top. Ranks, each of which takes all that is on
    its device, may average gradients in fp32. Where their machines divide the state, the host's bytes are
    those of one machine."""
    division = division or Division()
    *layers, root = layouts
    largest_gradient = max(layout.grad_nbytes for layout in layers)
    device = {
        WEIGHT_SLOTS: num_slots * max(layout.nbytes for layout in layers),
        GRAD_SLOTS: num_grad_slots(num_slots) * largest_gradient,
        ROOT_WEIGHTS: root.nbytes,
        ROOT_GRADIENTS: root.grad_nbytes,
        BUFFERS: buffers,
        AVERAGING: max(reduce_bytes(layouts) if averages_in_fp32 else 0, gather_bytes(layouts, division)),
    }
    host = division.host_bytes(layouts, MODEL)
    host |= host_bytes([root] if update_in_backward else layouts, [GRADIENTS])
    host[STAGING] = STAGING_BUFFERS * largest_gradient if update_in_backward else 0
    return Ledger(nonzero(device), nonzero(host))


def num_grad_slots(num_slots: int) -> int:
    """Gradient slots beside ``num_slots`` weight slots: one is filled while another leaves."""
    return min(num_slots, MOST_GRAD_SLOTS)


def reduce_bytes(layouts: Iterable[Layout]) -> int:
    """Bytes in which ranks average the gradients of units of these layouts, a piece after another."""
    short = [
        4 * layout.state_numel
        for layout in layouts
        if any(each.dtype != torch.float32 for each in layout.trainable)
    ]
    return min(MOST_AVERAGING, max(short, default=0))


def gather_bytes(layouts: Iterable[Layout], division: Division) -> int:
    """Bytes through which ranks gather weights of units of these layouts from other machines, a piece after
    another: room for what a rank sends, and for what it gets of each machine."""
    if division.machines == 1:
        return 0
    longest = max(
        part.stop_byte - part.first_byte
        for layout in layouts
        for parts in division.parts(layout)
        for part in parts
    )
    pieces = division.machines + 1
    return pieces * -(-min(MOST_AVERAGING // pieces, longest) // ALIGN_BYTES) * ALIGN_BYTES


def least_moments(layouts: Sequence[Layout], division: Division) -> dict[str, int]:
    """The bytes of a machine's host memory that no AdamW of units of these layouts can do without."""
    dtypes = {slice.param.dtype for layout in layouts for slice in layout.trainable}
    # short ones have padding and scales, which small parameters may not be worth
    kept = MOMENTS if dtypes <= {BF16} else [FP32]
    least = min(sum(division.host_bytes(layouts, MOMENTS[dtype]).values()) for dtype in kept)
    return nonzero({"moments of AdamW at least": least})


def frozen_matrices(layouts: Sequence[Layout]) -> int:
    """Bytes of the frozen matrices in 16 bits a value, which no exact option makes fewer."""
    return sum(
        slice.nbytes
        for layout in layouts
        for slice in layout.slices
        if not slice.param.trainable and len(slice.param.shape) > 1 and slice.param.dtype in (BF16, FP16)
    )


def _quantizing(frozen: int, needed: int, there: int) -> str:
    """The mildest way to quantize that makes ``there`` bytes suffice for ``needed``, of which most are
    ``frozen`` weights; empty where there is none."""
    enough = (word for word, share in _QUANTIZE.items() if needed - share * frozen <= there)
    word = next(enough, "") if 2 * frozen >= needed else ""
    return f"quantize the frozen weights (from_pretrained(quantize={word}))" if word else ""


def nonzero(amounts: Mapping[str, int]) -> dict[str, int]:
    """Those of ``amounts`` that are not 0."""
    return {purpose: nbytes for purpose, nbytes in amounts.items() if nbytes}
