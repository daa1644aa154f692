"""Bytes by owner: what a wrapped model will take, known before anything is allocated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from streamer.engine.landing import RING
from streamer.engine.unit import Unit, buffer_bytes
from streamer.memory.purposes import BF16, FP32, GRADIENTS, INT8, MODEL, MOMENTS, STAGING, SUMS, host_bytes
from streamer.memory.slots import (
    BUFFERS,
    GRAD_SLOTS,
    ROOT_GRADIENTS,
    ROOT_WEIGHTS,
    WEIGHT_SLOTS,
    num_grad_slots,
)

_SLOTS = (WEIGHT_SLOTS, GRAD_SLOTS)


@dataclass(frozen=True)
class Ledger:
    """Bytes by purpose on the device and in host memory."""

    device: Mapping[str, int]
    host: Mapping[str, int]

    @property
    def beside_slots(self) -> int:
        """Bytes of the device that are for other things than slots."""
        return sum(nbytes for purpose, nbytes in self.device.items() if purpose not in _SLOTS)

    def check(
        self,
        *,
        device_available: int,
        host_available: int,
        shared: bool,
        given_back: int = 0,
        device_mend: str | None = None,
    ) -> None:
        """Raise MemoryError, with what each side needs and has, if either has too little.

        ``shared`` says that both sides draw on the same memory, as where the CPU stands in for a GPU;
        ``given_back`` bytes of the host's are taken now and will be free. ``device_mend`` says what would
        help the device.
        """
        device, host = sum(self.device.values()), sum(self.host.values())
        on_host = device + host if shared else host
        if device <= device_available and on_host <= host_available + given_back:
            return
        more = f" and gets {amount(given_back)} from the model's own weights" if given_back else ""
        raise MemoryError(
            f"not enough memory: the device needs {amount(device)} ({_parts(self.device)}) and has "
            f"{amount(device_available)}, the host needs {amount(host)} ({_parts(self.host)}) and has "
            f"{amount(host_available)}{more}{' (the same memory as the device)' if shared else ''}: "
            f"{device_mend or 'lower num_slots if it is the device'}; use dtype=torch.bfloat16 or freeze "
            "parameters if it is the host"
        )


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


def accumulation_bytes(
    units: Sequence[Unit], root: Unit, *, num_slots: int, sum_in_fp32: bool
) -> dict[str, int]:
    """The bytes of host memory that a second backward before a step takes on top."""
    layouts = [unit.layout for unit in (*units, root)]
    staging = num_grad_slots(num_slots) * max(unit.layout.grad_nbytes for unit in units)
    sums = host_bytes(layouts, [SUMS]) if sum_in_fp32 else {}
    return _nonzero({STAGING: staging, **sums})


def least_moments(units: Sequence[Unit], root: Unit) -> dict[str, int]:
    """The bytes of host memory that no AdamW of theirs can do without."""
    layouts = [unit.layout for unit in (*units, root)]
    dtypes = {slice.param.dtype for layout in layouts for slice in layout.trainable}
    smallest = INT8 if dtypes <= {BF16} else FP32
    return _nonzero({"moments of AdamW at least": sum(host_bytes(layouts, MOMENTS[smallest]).values())})


def _nonzero(amounts: Mapping[str, int]) -> dict[str, int]:
    return {purpose: nbytes for purpose, nbytes in amounts.items() if nbytes}


def _parts(amounts: Mapping[str, int]) -> str:
    return ", ".join(f"{purpose} {amount(nbytes)}" for purpose, nbytes in amounts.items())


def amount(nbytes: int) -> str:
    """Bytes as an error tells them."""
    return f"{nbytes} bytes" if nbytes < 1 << 20 else f"{nbytes} bytes ({nbytes / (1 << 30):.2f} GiB)"
