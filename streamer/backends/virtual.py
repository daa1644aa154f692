"""No data and no hardware: meta tensors and a clock that runs at a machine's rates.

The executor runs on it unchanged, so what it says of bytes and of order is what a real run does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch

from streamer.backends.base import Backend, Event, Lane
from streamer.backends.clocks import clock_of
from streamer.backends.machine import Machine
from streamer.backends.operations import Operations


class VirtualBackend(Backend):
    """Lanes as clocks. COMPUTE runs its work on meta tensors and takes the time of its operations; the other
    lanes run nothing and take the time of their bytes.

    What the caller computes between two pieces of work (a head, a loss) takes COMPUTE's time too, inside of
    `counting_caller`; ``caller_seconds`` is the sum of that. ``flops`` are those of all that has run.
    """

    def __init__(self, machine: Machine) -> None:
        self.device = torch.device("meta")
        self.machine = machine
        self._host_taken = self._device_taken = 0
        self._clock = clock_of(machine)
        self.flops = 0
        self.caller_seconds = 0.0
        self._caller: Operations | None = None
        self._counted_flops, self._counted_seconds = 0, 0.0

    @contextmanager
    def counting_caller(self) -> Iterator[None]:
        """Count what the calling thread runs inside the block, also what is in no submitted work."""
        with Operations(self.machine) as self._caller:
            self._counted_flops, self._counted_seconds = 0, 0.0
            try:
                yield
                self._let_caller_compute()
            finally:
                self._caller = None

    def _let_caller_compute(self) -> None:
        if self._caller is not None:
            seconds = self._caller.seconds - self._counted_seconds
            self.flops += self._caller.flops - self._counted_flops
            self._counted_flops, self._counted_seconds = self._caller.flops, self._caller.seconds
            self.caller_seconds += self._clock.compute(seconds)

    def submit(self, lane: Lane, work: Callable[[], object], waits: Sequence[Event], nbytes: int) -> Event:
        self._let_caller_compute()
        if lane is not Lane.COMPUTE:
            return self._clock.submit(lane, nbytes / self._bytes_per_second(lane), waits)
        counter = self._caller or Operations(self.machine)
        flops, seconds = counter.flops, counter.seconds
        with nullcontext() if counter is self._caller else counter:
            work()
        self.flops += counter.flops - flops
        self._counted_flops, self._counted_seconds = counter.flops, counter.seconds
        return self._clock.submit(lane, counter.seconds - seconds, waits)

    def copy(self, into: torch.Tensor, source: torch.Tensor) -> None:
        raise AssertionError("nothing is copied on the virtual backend")

    def device_buffer(self, nbytes: int) -> torch.Tensor:
        self._device_taken += nbytes
        return torch.empty(nbytes, dtype=torch.uint8, device="meta")

    def host_buffer(self, nbytes: int, *, pinned: bool = True) -> torch.Tensor:
        self._host_taken += nbytes
        return torch.empty(nbytes, dtype=torch.uint8, device="meta")

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

    def _bytes_per_second(self, lane: Lane) -> float:
        rates = {
            Lane.H2D: self.machine.h2d_bytes_per_second,
            Lane.D2H: self.machine.d2h_bytes_per_second,
            Lane.HOST: self.machine.host_bytes_per_second,
        }
        return rates[lane]
