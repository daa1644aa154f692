"""Memory limits: the holders of device memory, the number of weight slots that fit a budget, and a warning
before the system kills the process for lack of host memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import torch

from streamer.backends.base import Backend
from streamer.backends.ranks import Ranks
from streamer.engine.paging.gradients import Gradients
from streamer.engine.paging.pager import Pager
from streamer.engine.tensors import SavedBytes
from streamer.engine.unit import Unit, buffer_bytes
from streamer.errors import warn
from streamer.store.ledger import AVERAGING, BUFFERS, GRAD_SLOTS, ROOT_GRADIENTS, ROOT_WEIGHTS, WEIGHT_SLOTS

#: Bytes of free host memory below which the system is about to kill a process.
LOW_HOST_BYTES = 1 << 28


#: Seconds between two checks of host memory: a check takes as long as a small layer.
LOOK_SECONDS = 1.0


class HostWatch:
    """Warns once when little host memory is left."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._has_warned = False
        self._next_look = 0.0

    def check(self, held: Callable[[], Mapping[str, int]]) -> None:
        """Warn if little is left; ``held`` returns the bytes that the wrapped model holds, by purpose."""
        if (now := time.monotonic()) < self._next_look:
            return
        self._next_look = now + LOOK_SECONDS
        available = self._backend.host_available()
        if available < LOW_HOST_BYTES and not self._has_warned:
            self._has_warned = True
            warn(
                f"only {available} bytes of host memory are free, and the system may end this process: "
                f"the wrapped model holds {sum(held().values())}, so other code takes more than was "
                "planned; end that, or save and wrap with less (a smaller state_dtype, update='backward')",
            )


class DeviceMemory:
    """The device memory of a wrapped model; ``units`` are all units, including the root."""

    def __init__(
        self,
        backend: Backend,
        units: Sequence[Unit],
        pager: Pager,
        gradients: Gradients,
        saved: SavedBytes,
        averaging: int = 0,
    ) -> None:
        """``averaging`` is the size in bytes of the buffer in which ranks average gradients."""
        self._averaging = averaging
        self.backend = backend
        self.pager = pager
        self._units = units
        self._gradients = gradients
        self._saved = saved

    def owned(self) -> dict[str, int]:
        """Bytes of the buffers, by purpose."""
        of_slots, of_root = self._gradients.device_bytes()
        nbytes = {
            WEIGHT_SLOTS: self.pager.slot_bytes(),
            GRAD_SLOTS: of_slots,
            ROOT_WEIGHTS: self.pager.root_buffer.nbytes,
            ROOT_GRADIENTS: of_root,
            BUFFERS: buffer_bytes(self._units),
            AVERAGING: self._averaging,
        }
        return {purpose: amount for purpose, amount in nbytes.items() if amount}

    def used(self) -> tuple[int, int]:
        """Bytes now and at the peak: all that PyTorch has allocated if its allocator counts, else the buffers
        that exist now and the tensors that layers have saved for backward."""
        owned = sum(self.owned().values())
        return self.backend.device_used() or (owned + self._saved.now, owned + self._saved.peak)

    def out_of_memory(self, unit: Unit, error: Exception) -> torch.OutOfMemoryError:
        """The error to raise for ``error``, an out-of-memory error in ``unit``: it lists the holders of the
        memory."""
        held = ", ".join(f"{purpose} {nbytes} bytes" for purpose, nbytes in self.owned().items())
        return torch.OutOfMemoryError(
            f"out of device memory in layer '{unit.name}': in addition to its own tensors there are {held}, "
            f"and {self._saved.now} bytes saved by layers for backward. Call wrap with a "
            f"micro_batch_size, activations='recompute+offload' or fewer num_slots ({error})"
        )


class Budget:
    """The number of weight slots that fit into ``nbytes`` of device memory together with everything else.

    A step measures everything else: the peak less the slots. Slots are added once that is known, and removed
    if it grows (longer sequences, larger batches). There are never fewer than at first. On a GPU, everything
    that PyTorch's allocator has taken counts: the gaps between tensors will exist in the next step too. If
    device memory did not suffice for a forward or backward, all added slots are removed for good, because the
    missing amount is unknown.

    Ranks that gather layers on their devices must all have the same number of slots: that of the rank with
    the least room.
    """

    def __init__(
        self,
        nbytes: int,
        memory: DeviceMemory,
        *,
        most: int,
        is_trained: bool,
        ranks: Ranks,
    ) -> None:
        """There are at ``most`` so many slots. ``ranks`` must all have the same number."""
        self._ranks = ranks
        self._nbytes = nbytes
        self._memory = memory
        self._backend = memory.backend
        self._residency = memory.pager.training
        self._is_trained = is_trained
        self._least, self._most = len(self._residency.slots.buffers), most
        #: whether the number of slots cannot change any more
        self.is_fixed = self._least == self._most
        self._refused = self._backend.device_refused()
        self._peak = self._others = 0
        self._last_unit = -1

    def begin_forward(self, unit: int) -> None:
        """``unit`` is about to run forward. If that begins another pass over the model, evaluate the last
        one.

        If nothing is trained, a forward measures all that will be needed; a step would need more.
        """
        if self.is_fixed:
            return
        begins, self._last_unit = unit <= self._last_unit, unit
        if begins and self._backend.device_refused() > self._refused:
            self._most = self._least
            if self._ranks.is_alone:
                self._residency.resize(self._least)
        elif begins and not self._is_trained:
            self.settle()

    def settle(self) -> None:
        """The need for memory has been measured: resize to the slots that fit."""
        slots = self._residency.slots
        if self.is_fixed:
            return
        _, peak = self._memory.used()
        if peak != self._peak:
            # the peak was reached since the last call, with the current number of slots
            self._peak = peak
            self._others = max(self._others, peak - slots.nbytes * len(slots.buffers))
        if not slots.nbytes:
            return
        there = len(slots.buffers)
        room = self._backend.device_buffers_within(self._nbytes, self._others, slots.nbytes, there)
        free = there + self._backend.device_available() // slots.nbytes
        wanted = self._ranks.least("weight slots", max(self._least, min(room, free, self._most)))
        self._residency.resize(wanted)
        if (agreed := self._ranks.least("weight slots", len(slots.buffers))) < len(slots.buffers):
            self._residency.resize(agreed)
        if len(slots.buffers) < wanted:
            self._most = len(slots.buffers)
        self._refused = self._backend.device_refused()
