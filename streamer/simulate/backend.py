"""No data and no hardware: meta tensors and a clock that runs at a machine's rates.

The executor runs on it unchanged, so what it says of bytes and of order is what a real run does.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Protocol

import torch
from torch.utils._python_dispatch import _disable_current_modes

from streamer.backends.base import Backend, Event, Lane, buffers_within
from streamer.simulate.clock import Clock, VirtualEvent
from streamer.simulate.cost import NOTHING, Cost, DeviceKernels, Operations, SeesOperations
from streamer.simulate.machine import CPU, CUDA, Machine


class CountsBytes(SeesOperations, Protocol):
    """Counts the bytes that operations hold: those that there are now, and were at most."""

    now: int
    peak: int


class VirtualBackend(Backend):
    """Lanes as clocks. COMPUTE runs its work on meta tensors and takes the time of its operations; the other
    lanes run nothing and take the time of their bytes.

    What the caller computes between two pieces of work (a head, a loss) takes COMPUTE's time too, inside of
    `counting_caller`; ``caller_seconds`` is the sum of that.
    """

    def __init__(self, machine: Machine) -> None:
        self.device = torch.device("meta")
        self.machine = machine
        self._host_taken = self._device_taken = 0
        self._clock = Clock(machine)
        #: when the thread that launches a GPU's operations is done with all so far, in seconds
        self._issued = 0.0
        #: whether a layer's work runs
        self.is_computing = False
        #: of all that has run
        self.flops = 0
        #: bytes that the lanes have moved
        self.moved = dict.fromkeys(Lane, 0)
        self._recalled = NOTHING
        self._memory: CountsBytes | None = None
        self.caller_seconds = 0.0
        self._caller: Operations | None = None
        self._counted = NOTHING

    @contextmanager
    def counting_caller(self, memory: CountsBytes | None = None) -> Iterator[None]:
        """Count what the calling thread runs inside the block, also what is in no submitted work, and let
        ``memory`` see it. What ``memory`` counts is taken for what is on the device beside the buffers, where
        the machine's device has an allocator that would count it."""
        self._memory = memory if self.machine.kind == CUDA else None
        beside = () if memory is None else (memory,)
        self._caller = Operations(self.machine, *beside)
        with DeviceKernels(self.machine.kind), self._caller:
            self._counted = NOTHING
            try:
                yield
                self.let_caller_compute()
            finally:
                self._caller = None

    def now(self) -> float:
        """When COMPUTE is done with what it has been given so far, in seconds."""
        return self._clock.now()

    def let_caller_compute(self) -> None:
        """Let what the caller has computed by now take its time."""
        if self._caller is not None:
            cost = self._caller.cost - self._counted
            self._counted = self._caller.cost
            self.flops += cost.flops
            self.caller_seconds += cost.seconds
            self._clock.compute(cost.seconds, self._issue(cost.ops))

    def _issue(self, ops: int, seconds: float = 0.0) -> float:
        """When the thread that launches ``ops`` operations begins with them, after ``seconds`` of its own
        work."""
        if self.machine.kind == CPU:
            return 0.0
        begun = self._issued + seconds
        self._issued = begun + ops * self.machine.seconds_per_op
        return begun

    def queue(self, lane: Lane, work: Callable[[], object], waits: Sequence[Event], nbytes: int) -> Event:
        self.let_caller_compute()
        self.moved[lane] += nbytes
        seconds = nbytes / self.machine.bytes_per_second(lane)
        return self._clock.submit(lane, seconds, waits, self._issued)

    @contextmanager
    def computing(self, waits: Sequence[Event]) -> Iterator[Event]:
        self.let_caller_compute()
        event = VirtualEvent(Lane.COMPUTE)
        self.is_computing, self._recalled = True, NOTHING
        # the caller's own are off where PyTorch calls Python: in backward
        kernels, caller = DeviceKernels(self.machine.kind), self._caller
        before = NOTHING if caller is None else caller.cost
        counting = Operations(self.machine) if caller is None else nullcontext(caller)
        try:
            with kernels, counting as operations:
                yield event
        finally:
            self.is_computing = False
            cost = operations.cost - before
            if caller is not None:
                self._counted = caller.cost
            event.is_over(self._computed(cost + self._recalled, waits).span())

    def _computed(self, cost: Cost, waits: Sequence[Event]) -> VirtualEvent:
        """The end of work of that ``cost`` on COMPUTE."""
        self.flops += cost.flops
        machine, seconds = self.machine, cost.seconds
        if not seconds:  # some work marks a moment and does nothing
            return self._clock.submit(Lane.COMPUTE, 0.0, waits, self._issue(cost.ops))
        issued = self._issue(cost.ops, machine.seconds_per_visit)
        # where the host's cores compute, they do nothing while they work for the library
        seconds += machine.seconds_per_visit if machine.kind == CPU else 0.0
        return self._clock.submit(Lane.COMPUTE, seconds, waits, issued)

    def recall(self, cost: Cost) -> None:
        """Let the work that runs have cost this too, which it did not execute."""
        self._recalled += cost

    def device_used(self) -> tuple[int, int] | None:
        if self._memory is None:
            return None
        return self._device_taken + self._memory.now, self._device_taken + self._memory.peak

    def device_buffers_within(self, nbytes: int, beside: int, each: int, there: int) -> int:
        if self.machine.kind == CUDA:
            return buffers_within(nbytes, beside, each)
        return super().device_buffers_within(nbytes, beside, each, there)

    def copy(self, into: torch.Tensor, source: torch.Tensor) -> None:
        raise AssertionError("nothing is copied on the virtual backend")

    def device_buffer(self, nbytes: int) -> torch.Tensor:
        buffer = self._buffer(nbytes)
        self._device_taken += nbytes
        weakref.finalize(buffer.untyped_storage(), self._give_back, nbytes).atexit = False
        return buffer

    def _give_back(self, nbytes: int) -> None:
        self._device_taken -= nbytes

    def host_buffer(self, nbytes: int, *, pinned: bool = True) -> torch.Tensor:
        self._host_taken += nbytes
        return self._buffer(nbytes)

    def _buffer(self, nbytes: int) -> torch.Tensor:
        # not by an operation, as elsewhere: what counts those counts what the model makes
        with _disable_current_modes():
            return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def host_reserve(self, nbytes: int) -> torch.Tensor:
        return self.host_buffer(nbytes)

    def device_available(self) -> int:
        limit = self.device_limit
        there = self.machine.device_bytes if limit is None else min(limit, self.machine.device_bytes)
        return there - self._device_taken

    def host_available(self) -> int:
        return self.machine.host_bytes - self._host_taken

    def close(self) -> None:
        return
