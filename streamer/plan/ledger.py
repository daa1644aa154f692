"""Bytes by owner: what a wrapped model will take, known before anything is allocated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from streamer.engine.gradients import num_grad_slots
from streamer.engine.unit import Unit
from streamer.memory.host import ADAMW_PURPOSES, MODEL_PURPOSES, host_bytes
from streamer.memory.slots import BUFFERS, GRAD_SLOTS, ROOT_GRADIENTS, ROOT_WEIGHTS, WEIGHT_SLOTS


@dataclass(frozen=True)
class Ledger:
    """Bytes by purpose on the device and in host memory."""

    device: Mapping[str, int]
    host: Mapping[str, int]

    def check(self, *, device_available: int, host_available: int, shared: bool) -> None:
        """Raise MemoryError, with what each side needs and has, if either has too little.

        ``shared`` says that both sides draw on the same memory, as where the CPU stands in for a GPU.
        """
        device, host = sum(self.device.values()), sum(self.host.values())
        if shared:
            fits = device + host <= min(device_available, host_available)
        else:
            fits = device <= device_available and host <= host_available
        if fits:
            return
        raise MemoryError(
            f"not enough memory: the device needs {_amount(device)} ({_parts(self.device)}) and has "
            f"{_amount(device_available)}, the host needs {_amount(host)} ({_parts(self.host)}) and has "
            f"{_amount(host_available)}{' (the same memory as the device)' if shared else ''}: lower "
            "num_slots if it is the device, use dtype=torch.bfloat16 or freeze parameters if it is the host"
        )


def ledger(units: Sequence[Unit], root: Unit, *, num_slots: int) -> Ledger:
    """What streaming ``units`` through ``num_slots`` slots takes, an AdamW for them included."""
    layouts = [unit.layout for unit in (*units, root)]
    buffers = {buffer.data_ptr(): buffer.nbytes for unit in (*units, root) for buffer in unit.buffers()}
    device = {
        WEIGHT_SLOTS: num_slots * max(unit.layout.nbytes for unit in units),
        GRAD_SLOTS: num_grad_slots(num_slots) * max(unit.layout.grad_nbytes for unit in units),
        ROOT_WEIGHTS: root.layout.nbytes,
        ROOT_GRADIENTS: root.layout.grad_nbytes,
        BUFFERS: sum(buffers.values()),
    }
    host = host_bytes(layouts, (*MODEL_PURPOSES, *ADAMW_PURPOSES))
    return Ledger(_nonzero(device), _nonzero(host))


def _nonzero(amounts: Mapping[str, int]) -> dict[str, int]:
    return {purpose: nbytes for purpose, nbytes in amounts.items() if nbytes}


def _parts(amounts: Mapping[str, int]) -> str:
    return ", ".join(f"{purpose} {_amount(nbytes)}" for purpose, nbytes in amounts.items())


def _amount(nbytes: int) -> str:
    return f"{nbytes} bytes" if nbytes < 1 << 20 else f"{nbytes} bytes ({nbytes / (1 << 30):.2f} GiB)"
