"""No data and no hardware: meta tensors, and a clock that runs at a machine's rates.

The executor runs on it unchanged, so its bytes and its order are those of a real run.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import takewhile
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch.utils._python_dispatch import _disable_current_modes

from streamer.backends.base import Backend, Event, Lane, Span, buffers_within
from streamer.backends.disk import Disks, Extent, Scratch
from streamer.backends.machines import Placement
from streamer.backends.ranks import Mean, Ranks
from streamer.backends.stored_tensors import Pieces, StoredTensors
from streamer.planner.cost import NOTHING, Cost, DeviceKernels, Operations, SeesOperations
from streamer.planner.machine import CPU, CUDA, KeptRates, Machine

T = TypeVar("T")


class VirtualEvent(Event):
    """Work whose time is known as soon as it is submitted, or, of COMPUTE, when the caller has done it."""

    def __init__(self, lane: Lane, span: Span | None = None) -> None:
        self.lane = lane
        self._span = span

    def is_over(self, span: Span) -> None:
        """Its time is known now."""
        self._span = span

    def wait(self) -> None:
        return

    def failed(self) -> bool:
        return False

    def span(self) -> Span:
        assert self._span is not None, "whoever waits has submitted it"
        return self._span


class Clock:
    """The lanes of a machine: each begins as its queue and its waits allow, and no sooner than the loop has
    issued its work, which runs ahead of a GPU.

    Work at the same time as other lanes takes longer by what each of them adds (``shares``). It is slowed by
    what was submitted before it, not by what comes later.
    """

    def __init__(self, shares: KeptRates | Machine) -> None:
        pairs = [(lane, other) for lane in Lane for other in Lane if lane is not other]
        self._added = {(lane, other): 1 / shares.kept(lane, other) - 1 for lane, other in pairs}
        self._free_at = dict.fromkeys(Lane, 0.0)
        self._spans: dict[Lane, deque[Span]] = {lane: deque(maxlen=64) for lane in Lane}

    def submit(self, lane: Lane, seconds: float, waits: Sequence[Event], issued: float = 0.0) -> VirtualEvent:
        """Work that takes ``seconds`` alone, after all that is in its lane, after ``waits``, and from
        ``issued`` on."""
        ready = max(self._free_at[lane], issued)
        start = max([ready, *(span.end for event in waits if (span := event.span()) is not None)])
        end = self._end(lane, start, seconds) if any(self._added.values()) else start + seconds
        self._free_at[lane] = end
        span = Span(ready, start, end)
        self._spans[lane].append(span)
        return VirtualEvent(lane, span)

    def compute(self, seconds: float, issued: float = 0.0) -> None:
        """Work of the caller's own on COMPUTE, between two that are submitted."""
        self._free_at[Lane.COMPUTE] = max(self._free_at[Lane.COMPUTE], issued) + seconds

    def now(self) -> float:
        """When COMPUTE is done with all that it has."""
        return self._free_at[Lane.COMPUTE]

    def _end(self, lane: Lane, start: float, seconds: float) -> float:
        """When work ends that begins at ``start``, slowed by what the other lanes do by then."""
        spans = [
            (other, span)
            for other in Lane
            if other is not lane
            for span in takewhile(lambda span: span.end > start, reversed(self._spans[other]))
        ]
        edges = sorted({edge for _, span in spans for edge in (span.start, span.end) if edge > start})
        at = start
        for edge in [*edges, float("inf")]:
            others = [other for other, span in spans if span.start <= at < span.end]
            # seconds that a second's work takes at the same time as the others
            factor = 1 + sum(self._added[lane, other] for other in others)
            if at + seconds * factor <= edge:
                return at + seconds * factor
            seconds -= (edge - at) / factor
            at = edge
        raise AssertionError("the last edge is never passed")


class CountsBytes(SeesOperations, Protocol):
    """Counts the bytes that operations hold: now, and at most so far."""

    @property
    def taken(self) -> tuple[int, int]: ...

    def rise(self, nbytes: int) -> None: ...


class VirtualBackend(Backend):
    """Lanes as clocks. COMPUTE runs its work on meta tensors and takes the time of its operations; the other
    lanes run nothing and take the time of their bytes.

    What the caller computes between two pieces of work (a head, a loss) takes COMPUTE's time too, inside of
    `counting_caller`; ``caller_seconds`` is the sum of that.
    """

    def __init__(self, machine: Machine) -> None:
        self.device = self.host = torch.device("meta")
        self.machine = machine
        self._host_taken = self._device_taken = 0
        self._clock = Clock(machine)
        #: when the thread that launches a GPU's operations is done with all so far, in seconds
        self._issued = 0.0
        #: whether a layer's work runs
        self.is_computing = False
        #: of all that has run, and the seconds that COMPUTE takes for it while no other lane works
        self.flops = 0
        self.compute_seconds = 0.0
        #: bytes that the lanes have moved
        self.moved = dict.fromkeys(Lane, 0)
        self._counted_apart = NOTHING
        self._memory: CountsBytes | None = None
        self.caller_seconds = 0.0
        self._caller: Operations | None = None
        self._counted = NOTHING

    @contextmanager
    def counting_caller(self, memory: CountsBytes | None = None) -> Iterator[None]:
        """Count what the calling thread runs inside the block, also what is in no submitted work, and let
        ``memory`` count the bytes of it. Where the machine's device has an allocator, these are taken for
        what is on the device in addition to the buffers."""
        self._memory = memory if self.machine.kind == CUDA else None
        self._caller = Operations(self.machine, *(() if memory is None else (memory,)))
        with DeviceKernels(self.machine.kind), self._caller:
            self._counted = NOTHING
            try:
                yield
                self.let_caller_compute()
            finally:
                self._caller = None

    def now(self) -> float:
        """When COMPUTE is done with all that it has, in seconds."""
        return self._clock.now()

    def let_caller_compute(self) -> None:
        """Let what the caller has computed by now take its time."""
        if self._caller is not None:
            cost = self._caller.cost - self._counted
            self._counted = self._caller.cost
            self.flops += cost.flops
            self.compute_seconds += cost.seconds
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
        self.is_computing, self._counted_apart = True, NOTHING
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
            event.is_over(self._computed(cost + self._counted_apart, waits).span())

    def _computed(self, cost: Cost, waits: Sequence[Event]) -> VirtualEvent:
        """The end of work of that ``cost`` on COMPUTE."""
        self.flops += cost.flops
        self.compute_seconds += cost.seconds
        machine, seconds = self.machine, cost.seconds
        if not seconds:  # some work marks a moment and does nothing
            return self._clock.submit(Lane.COMPUTE, 0.0, waits, self._issue(cost.ops))
        issued = self._issue(cost.ops, machine.seconds_per_visit)
        # where the host's cores compute, they do nothing while they work for the library
        seconds += machine.seconds_per_visit if machine.kind == CPU else 0.0
        return self._clock.submit(Lane.COMPUTE, seconds, waits, issued)

    def count(self, cost: Cost) -> None:
        """Let the work that runs in `computing` take ``cost`` too, which was measured apart from it."""
        self._counted_apart += cost

    def device_used(self) -> tuple[int, int] | None:
        if self._memory is None:
            return None
        now, peak = self._memory.taken
        return self._device_taken + now, self._device_taken + peak

    def device_buffers_within(self, nbytes: int, others: int, each: int, there: int) -> int:
        if self.machine.kind == CUDA:
            return buffers_within(nbytes, others, each)
        return super().device_buffers_within(nbytes, others, each, there)

    def set_host_threads(self, count: int) -> None:
        return

    def copy(self, into: torch.Tensor, source: torch.Tensor) -> None:
        raise AssertionError("nothing is copied on the virtual backend")

    def device_buffer(self, nbytes: int) -> torch.Tensor:
        buffer = self._buffer(nbytes)
        self._device_taken += nbytes
        weakref.finalize(buffer.untyped_storage(), self._freed, nbytes).atexit = False
        return buffer

    def _freed(self, nbytes: int) -> None:
        self._device_taken -= nbytes

    def host_buffer(self, nbytes: int, *, pinned: bool = True) -> torch.Tensor:
        self._host_taken += nbytes
        return self._buffer(nbytes)

    def _buffer(self, nbytes: int) -> torch.Tensor:
        # outside of modes: these count what the model computes
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


class VirtualScratch(Scratch):
    """Scratch files that are never read or written: the lanes of the virtual backend run nothing. There is
    always room: the plan says how much is needed."""

    is_shared = False

    def __init__(self) -> None:
        pass

    def extent(self, nbytes: int) -> Extent:
        return Extent(nbytes, self.padded(nbytes), ())

    def allocate(self) -> None:
        pass

    def close(self) -> None:
        pass


class VirtualReader(StoredTensors):
    """Files that are never read, and need not be there."""

    def __init__(self) -> None:
        pass

    def open(self, files: Iterable[Path]) -> None:
        pass

    def close(self) -> None:
        pass


class VirtualDisks(Disks):
    """As many disks as are needed; ``stored`` are the tensors that files hold already."""

    def __init__(
        self, backend: VirtualBackend, stored: Mapping[str, Pieces], *, may_write: bool = True
    ) -> None:
        super().__init__([], stored=stored)
        self._backend = backend
        self.may_write = may_write

    def reader(self, between: torch.Tensor) -> VirtualReader:
        return VirtualReader()

    def open(self, *, shared: bool = True) -> VirtualScratch:
        return VirtualScratch()

    def buffer(self, nbytes: int) -> torch.Tensor:
        return self._backend.host_buffer(nbytes, pinned=False)


class VirtualRanks(Ranks):
    """The first of as many ranks as the machine of ``backend`` has, on as many machines that divide the
    state. The others are not there: each is taken to do what this one does. Nothing is shared or sent."""

    def __init__(self, backend: VirtualBackend) -> None:
        super().__init__()
        here, machines = backend.machine.ranks, backend.machine.machines
        self.size = here * machines
        rows = tuple(tuple(range(start, start + here)) for start in range(0, self.size, here))
        self._place(Placement(rows, 0), are_replicas=False)
        self._backend = backend

    def exchange(self, what: str, value: object = None, **how: object) -> list[Any]:
        return [value] * self.size

    def _on(self, leader: int, what: str, work: Callable[[], T]) -> T:
        return work()

    def tell(self, error: BaseException) -> None:
        return

    def host_buffer(self, backend: Backend, nbytes: int, *, pinned: bool) -> torch.Tensor:
        return backend.host_buffer(nbytes, pinned=pinned)

    def host_reserve(self, backend: Backend, nbytes: int) -> torch.Tensor:
        return backend.host_reserve(nbytes)

    def all_gather(self, whole: torch.Tensor) -> None:
        return

    def average(self, means: Sequence[Mean]) -> None:
        return

    def gathered(self, number: torch.Tensor, *, of_machines: bool = False) -> torch.Tensor:
        return number.expand(self.size if of_machines else self.local_size)

    def gather(self, pieces: Sequence[torch.Tensor], buffer: torch.Tensor) -> None:
        return

    def replicate(self, shared: Iterable[torch.Tensor]) -> None:
        return

    def over_network(self, nbytes: int) -> int:
        """The bytes between GPUs of one machine that take as long as ``nbytes`` to other machines: one lane
        sends both, and its rate is that between GPUs."""
        return self._backend.machine.as_between_gpus(nbytes)

    def broadcast(self, tensor: torch.Tensor) -> None:
        return
