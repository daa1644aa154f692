"""No data and no hardware: meta tensors and a clock that runs at a machine's rates.

The executor runs on it unchanged, so what it says of bytes and of order is what a real run does.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.flop_counter import flop_registry

from streamer.backends.allocator import buffers_within
from streamer.backends.attention import CPU_FLOPS, FusedAttention
from streamer.backends.base import Backend, Event, Lane, Span
from streamer.backends.machine import Machine

_FORMULAS = {**flop_registry, **CPU_FLOPS}


class Flops(TorchDispatchMode):
    """Counts the FLOPs of matrix products, convolutions and attention in the block, by PyTorch's formulas.

    `torch.utils.flop_counter.FlopCounterMode` counts the same, by module too, and takes several times longer.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        formula = _FORMULAS.get(func.overloadpacket)
        if formula is not None:
            self.total += formula(*args, **(kwargs or {}), out_val=result)
        return result


class VirtualEvent(Event):
    """Work whose time is known as soon as it is submitted."""

    def __init__(self, lane: Lane, span: Span) -> None:
        self.lane = lane
        self._span = span

    def wait(self) -> None:
        return

    def failed(self) -> bool:
        return False

    def span(self) -> Span:
        return self._span


class CountsBytes(Protocol):
    """A context manager that counts bytes: those that there are now, and were at most."""

    now: int
    peak: int

    def __enter__(self) -> object: ...

    def __exit__(self, *exception: Any) -> object: ...


class VirtualBackend(Backend):
    """Lanes as clocks. COMPUTE runs its work on meta tensors and counts its FLOPs; the other lanes run
    nothing and take the time of their bytes.

    What the caller computes between two pieces of work (a head, a loss) takes COMPUTE's time too, inside of
    `counting_caller`; ``caller_seconds`` is the sum of that.
    """

    def __init__(self, machine: Machine) -> None:
        self.device = torch.device("meta")
        self.machine = machine
        self._host_taken = self._device_taken = 0
        self._free_at = dict.fromkeys(Lane, 0.0)
        #: whether a layer's work runs
        self.is_computing = False
        #: of all that has run
        self.flops = 0
        self._recalled = 0
        self._memory: CountsBytes | None = None
        self.caller_seconds = 0.0
        self._caller: Flops | None = None
        self._counted = 0

    @contextmanager
    def counting_caller(self) -> Iterator[None]:
        """Count the FLOPs of the calling thread inside the block, also those of no submitted work."""
        with FusedAttention(self.machine.kind), Flops() as self._caller:
            self._counted = 0
            try:
                yield
                self._let_caller_compute()
            finally:
                self._caller = None

    def _let_caller_compute(self) -> None:
        if self._caller is not None:
            flops = self._caller.total - self._counted
            seconds = flops / self.machine.flops_per_second
            self.flops += flops
            self._counted = self._caller.total
            self._free_at[Lane.COMPUTE] += seconds
            self.caller_seconds += seconds

    def submit(self, lane: Lane, work: Callable[[], object], waits: Sequence[Event], nbytes: int) -> Event:
        self._let_caller_compute()
        if lane is Lane.COMPUTE:
            self.is_computing, self._recalled = True, 0
            try:
                with FusedAttention(self.machine.kind), Flops() as counter:
                    work()
            finally:
                self.is_computing = False
            # the mode around this one has seen them too
            self._counted += counter.total
            self.flops += counter.total + self._recalled
            seconds = (counter.total + self._recalled) / self.machine.flops_per_second
        else:
            seconds = nbytes / self._bytes_per_second(lane)
        ready = self._free_at[lane]
        ends = [span.end for event in waits if (span := event.span()) is not None]
        start = max([ready, *ends])
        self._free_at[lane] = start + seconds
        return VirtualEvent(lane, Span(ready, start, start + seconds))

    def recall(self, flops: int) -> None:
        """Let the work that runs have taken these FLOPs too, which it did not execute."""
        self._recalled += flops

    @contextmanager
    def counting_memory(self, counter: CountsBytes) -> Iterator[None]:
        """Take what ``counter`` counts inside the block for what is on the device beside the buffers, where
        the machine's device has an allocator that would count it."""
        self._memory = counter if self.machine.kind == "cuda" else None
        with counter:
            yield

    def device_used(self) -> tuple[int, int] | None:
        if self._memory is None:
            return None
        return self._device_taken + self._memory.now, self._device_taken + self._memory.peak

    def device_buffers_within(self, nbytes: int, beside: int, each: int) -> int:
        if self.machine.kind == "cuda":
            return buffers_within(nbytes, beside, each)
        return super().device_buffers_within(nbytes, beside, each)

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

    def _bytes_per_second(self, lane: Lane) -> float:
        rates = {
            Lane.H2D: self.machine.h2d_bytes_per_second,
            Lane.D2H: self.machine.d2h_bytes_per_second,
            Lane.HOST: self.machine.host_bytes_per_second,
        }
        return rates[lane]
