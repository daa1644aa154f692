"""What a piece of code costs and holds, measured without data: FLOPs, seconds, and bytes as they come and
go.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from streamer.simulate.cost import NOTHING, Cost, Observer, Operations, tensors_in
from streamer.simulate.machine import Machine
from streamer.simulate.temporaries import temporary_bytes
from streamer.torch_private import storage_id


class Tracker(Observer):
    """``now`` and ``peak`` bytes of the storages that operations of this thread make inside the block, on any
    device, on meta tensors too. What was made before, or by other means, does not count.

    Storages are counted as long as there is a tensor of theirs, and with the bytes that were asked for: how
    an allocator rounds them is not in it. With a ``machine``, what its kernels take while an operation runs
    counts too.
    """

    def __init__(self, machine: Machine | None = None) -> None:
        super().__init__()
        self._machine = machine
        self.now = self.peak = 0
        #: bytes now by owner, and at the peak
        self.owned: Counter[str] = Counter()
        self.owned_at_peak: Counter[str] = Counter()

    def owner(self) -> str:
        """Who makes what is made now."""
        return "all"

    def see(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        if func.is_view:
            return
        given = None
        for tensor in tensors_in((result,)):
            storage = tensor.untyped_storage()
            if given is None:
                given = {storage_id(tensor) for tensor in tensors_in((*args, *kwargs.values()))}
            if (number := storage_id(tensor)) not in given:
                given.add(number)
                self._made(storage)
        if self.now > self.peak:
            self._note_peak()
        if self._machine is not None:
            self.rise(temporary_bytes(self._machine, func, args, kwargs, result))

    def rise(self, nbytes: int) -> None:
        """Count ``nbytes`` that came and are gone again."""
        owner = self.owner()
        self.now += nbytes
        self.owned[owner] += nbytes
        if self.now > self.peak:
            self._note_peak()
        self._gone(owner, nbytes)

    def _made(self, storage: torch.UntypedStorage) -> None:
        owner, nbytes = self.owner(), storage.nbytes()
        self.now += nbytes
        self.owned[owner] += nbytes
        weakref.finalize(storage, self._gone, owner, nbytes).atexit = False

    def _gone(self, owner: str, nbytes: int) -> None:
        self.now -= nbytes
        self.owned[owner] -= nbytes

    def _note_peak(self) -> None:
        self.peak = self.now
        self.owned_at_peak = self.owned.copy()


@dataclass
class Measured:
    """What a part of a `Meter`'s block has cost, and the most bytes that it held on top of what was there."""

    cost: Cost = NOTHING
    rise: int = 0


class Meter(ExitStack):
    """Counts FLOPs and seconds on ``machine``, and bytes, of what runs in the block."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self._tracker = Tracker(machine)
        self._operations = Operations(machine, self._tracker)

    def __enter__(self) -> Meter:
        self.enter_context(self._operations)
        return self

    @property
    def all(self) -> Measured:
        """What the whole block has taken."""
        return Measured(self._operations.cost, self._tracker.peak)

    @property
    def now(self) -> int:
        """Bytes that were made in the block and are still there."""
        return self._tracker.now

    def recall(self, measured: Measured) -> None:
        """Count ``measured`` for work that is not run."""
        self._operations.recall(measured.cost)
        self._tracker.rise(measured.rise)

    @contextmanager
    def measuring(self) -> Iterator[Measured]:
        """Measure what runs inside; known when the block has ended."""
        tracker, measured = self._tracker, Measured()
        cost, before, peak = self._operations.cost, tracker.now, tracker.peak
        tracker.peak = before
        yield measured
        measured.cost, measured.rise = self._operations.cost - cost, tracker.peak - before
        tracker.peak = max(peak, tracker.peak)
