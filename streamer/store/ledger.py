"""Bytes by purpose that a wrapped model will take, before anything is allocated; which memory is too small
for it, by how much, and what would help. All checks of memory are here, so that their errors read alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

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

#: Purposes of device memory.
WEIGHT_SLOTS, GRAD_SLOTS = "weight slots", "gradient slots"
ROOT_WEIGHTS, ROOT_GRADIENTS, BUFFERS = "root weights", "root gradients", "buffers"
#: The buffer in which ranks average gradients of a shorter dtype than fp32, and its most bytes.
AVERAGING = "averaging over ranks"
MOST_AVERAGING = 64 << 20
#: The largest number of gradient slots.
MOST_GRAD_SLOTS = 2

#: A limit that nothing reaches.
UNLIMITED = 1 << 62


def limit_of(limit: int | None) -> int:
    """``limit`` bytes, or `UNLIMITED` for None."""
    return UNLIMITED if limit is None else limit


#: For a host that stands in for the device: its bytes include the device's.
SHARED = " (whose memory is the device's too)"
#: The remedy for a too small ``host_memory`` of `wrap`.
REMEDY = "raise host_memory, or wrap with update='backward', dtype=torch.bfloat16, or frozen parameters"
#: The remedy for too little host memory, unless most weights are frozen and in 16 bits.
_EXACT = "use dtype=torch.bfloat16 or freeze parameters"
#: Values of ``quantize=``, and the share of the bytes of 16-bit weights that each saves.
_QUANTIZE = {'"int8"': 0.48, '"nf4"': 0.7}


@dataclass(frozen=True)
class Tier:
    """Needed and available bytes of one tier of memory, and the ``remedy`` if there are too few."""

    name: str
    needed: int
    available: int
    remedy: str = ""

    @property
    def lacking(self) -> int:
        """The number of missing bytes."""
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
    """Raise MemoryError, with the `verdict` and then ``details``, unless every tier has room for ``what``."""
    message = verdict(what, tiers)
    if message is not None:
        raise MemoryError(f"{message}\n{details()}".rstrip())


def lacks(tiers: Iterable[Tier]) -> str:
    """The tiers with too little memory, each with its missing bytes."""
    return " and ".join(f"{tier.name} lacks {exact_amount(tier.lacking)}" for tier in tiers if tier.lacking)


@dataclass(frozen=True)
class Room:
    """Bytes of the device and of host memory, `UNLIMITED` if there is no limit.

    ``budget`` bytes of the device are for tensors. ``shared`` says that the device's memory is the host's.
    ``device`` includes ``context``, the bytes that CUDA itself takes, as plans do. ``host`` includes
    ``freed_by_model``, bytes that the model holds now and `wrap` frees. ``host_limit`` is the limit passed to
    `wrap`. The device's bytes are per rank, the host's for all ``ranks`` together.
    """

    device: int
    host: int
    budget: int = UNLIMITED
    shared: bool = False
    context: int = 0
    freed_by_model: int = 0
    host_limit: int = UNLIMITED
    ranks: int = 1

    def host_room(self, device: int = 0) -> int:
        """Bytes of host memory for the model. If the device's memory is the host's, ``device`` bytes per
        rank are subtracted."""
        return min(max(0, self.host - device * self.shared * self.ranks), self.host_limit)

    @property
    def tensors(self) -> int:
        """Bytes of the device for tensors."""
        return min(self.device - self.context, self.budget)

    def host_tier(self, needed: int, device: int, remedy: str = "") -> Tier:
        """The tier of host memory. If the device's memory is the host's, ``device`` bytes are added to it."""
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
        """Bytes of the device outside of slots."""
        slots = (WEIGHT_SLOTS, GRAD_SLOTS)
        return sum(nbytes for purpose, nbytes in self.device.items() if purpose not in slots)

    @property
    def pinned_host_bytes(self) -> int:
        """Bytes of the host that are copied to or from the device; for a GPU they are page-locked."""
        return sum(nbytes for purpose, nbytes in self.host.items() if purpose in PINNED)

    def table(self, *, device: Mapping[str, int] | None = None, host: Mapping[str, int] | None = None) -> str:
        """A table with the sides device, host and disk: a row for each owner and one for their sum, with
        bytes and, from 128 MiB on, GiB. ``device`` and ``host`` are additional rows of these sides."""
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
        """Raise MemoryError, with needed and available bytes, unless ``room`` has enough of both.
        ``device_remedy`` is the remedy for the device; ``frozen`` are the bytes of `frozen_matrices`.
        """
        device, host = sum(self.device.values()), sum(self.host.values())
        host_remedy = _quantizing(frozen, host, room.host_room(device)) or _EXACT
        limit_remedy = REMEDY if self.disk else f"give disk= a folder for the optimizer's state, or {REMEDY}"

        def table() -> str:
            rows = {"available": room.host - room.freed_by_model}
            rows |= nonzero({"freed by the model": room.freed_by_model})
            return self.table(device={"available": room.tensors}, host=rows)

        require(
            "the model",
            Tier("the device", device, room.tensors, device_remedy),
            room.host_tier(host, device, host_remedy),
            Tier("host_memory", host, room.host_limit, limit_remedy),
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
    """The bytes for streaming units of these ``layouts``, the root's last, through ``num_slots`` slots,
    including their ``buffers`` (bytes) and without an optimizer's state. The device's bytes are those of one
    rank, the host's those of one machine. Ranks may average gradients in fp32."""
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
    """The number of gradient slots for ``num_slots`` weight slots: one is filled while another is copied
    out."""
    return min(num_slots, MOST_GRAD_SLOTS)


def reduce_bytes(layouts: Iterable[Layout]) -> int:
    """Bytes of the buffer in which ranks average gradients of units of these layouts, piece by piece."""
    short = [
        4 * layout.state_numel
        for layout in layouts
        if any(each.dtype != torch.float32 for each in layout.trainable)
    ]
    return min(MOST_AVERAGING, max(short, default=0))


def gather_bytes(layouts: Iterable[Layout], division: Division) -> int:
    """Bytes of the buffer through which ranks gather weights of units of these layouts from other machines,
    piece by piece: a rank's own piece, and one from each other machine."""
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
    """The least bytes of a machine's host memory for the state of AdamW over units of these layouts."""
    dtypes = {slice.param.dtype for layout in layouts for slice in layout.trainable}
    # short dtypes add padding and scales: for small parameters fp32 may take less
    kept = MOMENTS if dtypes <= {BF16} else [FP32]
    least = min(sum(division.host_bytes(layouts, MOMENTS[dtype]).values()) for dtype in kept)
    return nonzero({"moments of AdamW at least": least})


def frozen_matrices(layouts: Sequence[Layout]) -> int:
    """Bytes of the frozen matrices in 16 bits a value. Only quantization reduces them."""
    return sum(
        slice.nbytes
        for layout in layouts
        for slice in layout.slices
        if not slice.param.trainable and len(slice.param.shape) > 1 and slice.param.dtype in (BF16, FP16)
    )


def _quantizing(frozen: int, needed: int, there: int) -> str:
    """The remedy to quantize in the most bits for which ``there`` bytes suffice; empty if none suffices, or
    if ``frozen`` weights are less than half of ``needed``."""
    enough = (word for word, share in _QUANTIZE.items() if needed - share * frozen <= there)
    word = next(enough, "") if 2 * frozen >= needed else ""
    return f"quantize the frozen weights (from_pretrained(quantize={word}))" if word else ""


def nonzero(amounts: Mapping[str, int]) -> dict[str, int]:
    """Those of ``amounts`` that are not 0."""
    return {purpose: nbytes for purpose, nbytes in amounts.items() if nbytes}
