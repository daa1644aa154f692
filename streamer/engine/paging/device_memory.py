"""Memory that runs short: who holds the device's, how many weight slots a budget leaves room for, and a word
before the system ends the process for want of host memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import torch

from streamer.backends.base import Backend
from streamer.backends.ranks import Ranks
from streamer.engine.paging.gradients import Gradients
from streamer.engine.paging.pager import Pager
from streamer.engine.tensors.saved import SavedBytes
from streamer.engine.unit import Unit, buffer_bytes
from streamer.errors import warn
from streamer.store.ledger import AVERAGING, BUFFERS, GRAD_SLOTS, ROOT_GRADIENTS, ROOT_WEIGHTS, WEIGHT_SLOTS

#: Free host memory below which a process is soon ended by the system.
LOW_HOST_BYTES = 1 << 28


#: Seconds between two looks at host memory: a look takes as long as a small layer.
LOOK_SECONDS = 1.0


class HostWatch:
    """Warns once where little host memory is left."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._has_warned = False
        self._next_look = 0.0

    def check(self, held: Callable[[], Mapping[str, int]]) -> None:
        """Warn if little is left; ``held`` says the bytes that the wrapped model holds, by purpose."""
        if (now := time.monotonic()) < self._next_look:
            return
        self._next_look = now + LOOK_SECONDS
        available = self._backend.host_available()
        if available < LOW_HOST_BYTES and not self._has_warned:
            self._has_warned = True
            warn(
                f"only {available} bytes of host memory are free, and the system may end this process: "
                f"the wrapped model holds {sum(held().values())}, so somebody else takes more than was "
                "planned; end that, or save and wrap with less (a smaller state_dtype, update='backward')",
            )


class DeviceMemory:
    """What a wrapped model holds on its device; ``units`` are all, the root's too."""

    def __init__(
        self,
        backend: Backend,
        units: Sequence[Unit],
        pager: Pager,
        gradients: Gradients,
        saved: SavedBytes,
        averaging: int = 0,
    ) -> None:
        """``averaging`` are the bytes in which ranks average gradients."""
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
            WEIGHT_SLOTS: sum(buffer.nbytes for buffer in self.pager.slots.buffers),
            GRAD_SLOTS: of_slots,
            ROOT_WEIGHTS: self.pager.root_buffer.nbytes,
            ROOT_GRADIENTS: of_root,
            BUFFERS: buffer_bytes(self._units),
            AVERAGING: self._averaging,
        }
        return {purpose: amount for purpose, amount in nbytes.items() if amount}

    def used(self) -> tuple[int, int]:
        """Bytes now and at most: all that PyTorch has allocated where its allocator counts, else the buffers
        that there are now and what layers have saved for backward."""
        owned = sum(self.owned().values())
        return self.backend.device_used() or (owned + self._saved.now, owned + self._saved.peak)

    def out_of_memory(self, unit: Unit, error: Exception) -> torch.OutOfMemoryError:
        """``error``, of ``unit``, for which the device's memory did not suffice, with who holds it."""
        held = ", ".join(f"{purpose} {nbytes} bytes" for purpose, nbytes in self.owned().items())
        return torch.OutOfMemoryError(
            f"out of device memory in layer '{unit.name}': beside what it computes there are {held}, "
            f"and {self._saved.now} bytes saved by layers for backward. Give wrap a "
            f"micro_batch_size, activations='recompute+offload' or fewer num_slots ({error})"
        )


class Budget:
    """As many weight slots as fit into ``nbytes`` of device memory beside all else.

    What else there is shows in a step: the most that was taken, less the slots that there were. Slots are
    added once that is known, and given back where it turns out to be more than before (longer sequences,
    larger batches); there are never fewer than at first. Of a GPU, all counts that PyTorch's allocator has
    taken: the gaps between tensors are there in the next step too. A pass for which the device's memory did
    not suffice takes back all that were added, for good: how much more it wanted is not known.

    Ranks that gather layers on their devices must all have as many slots: those of the one with least room.
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
        """At ``most`` so many slots. ``ranks`` must all have as many."""
        self._ranks = ranks
        self._nbytes = nbytes
        self._memory = memory
        self._backend = memory.backend
        self._pager = memory.pager
        self._is_trained = is_trained
        self._least, self._most = len(memory.pager.slots.buffers), most
        #: whether there are as many slots as there will ever be
        self.is_fixed = self._least == self._most
        self._refused = self._backend.device_refused()
        self._peak = self._others = 0
        self._last_unit = -1

    def begin_forward(self, unit: int) -> None:
        """``unit`` is about to run forward. If that begins another pass, see what the last one has shown.

        Where nothing is trained that is all that will be needed; a step would need more.
        """
        if self.is_fixed:
            return
        begins, self._last_unit = unit <= self._last_unit, unit
        if begins and self._backend.device_refused() > self._refused:
            self._most = self._least
            if self._ranks.is_alone:
                self._pager.resize(self._least)
        elif begins and not self._is_trained:
            self.settle()

    def settle(self) -> None:
        """All that is needed has been seen: have the slots that there is room for."""
        slots = self._pager.slots
        if self.is_fixed:
            return
        _, peak = self._memory.used()
        if peak != self._peak:
            # it was reached since the last time, when there were the slots that there are now
            self._peak = peak
            self._others = max(self._others, peak - slots.nbytes * len(slots.buffers))
        if not slots.nbytes:
            return
        there = len(slots.buffers)
        room = self._backend.device_buffers_within(self._nbytes, self._others, slots.nbytes, there)
        free = there + self._backend.device_available() // slots.nbytes
        wanted = self._ranks.least("weight slots", max(self._least, min(room, free, self._most)))
        self._pager.resize(wanted)
        if (agreed := self._ranks.least("weight slots", len(slots.buffers))) < len(slots.buffers):
            self._pager.resize(agreed)
        if len(slots.buffers) < wanted:
            self._most = len(slots.buffers)
        self._refused = self._backend.device_refused()
