"""CUDA: a stream for each direction of the bus, a thread for the host, the caller's stream for compute.

A copy may have to wait for an update that runs in a thread, and no stream can wait for a thread. Then the
lane's worker thread enqueues the copy and all later work in its lane. If the copy waits for streams alone,
the caller enqueues it: waking a thread takes longer. Work that waits for other ranks is always enqueued by
the worker. An event therefore has two parts: it is *issued* once its CUDA event is recorded in a stream, and
done once that CUDA event is.

Pinned host memory has the exact size. PyTorch's pinned allocator rounds every block up to a power of two.
Here a block is one anonymous mapping, registered with CUDA.
"""

from __future__ import annotations

import platform
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial

import torch

from streamer.backends.base import (
    BLOCK_BYTES,
    PIECE_BYTES,
    STREAMS,
    WAITING,
    WORKER_LANES,
    Backend,
    Event,
    Failure,
    Lane,
    Latch,
    Process,
    Span,
)
from streamer.backends.host_memory import available_bytes, mapped, reserved
from streamer.backends.thread import Worker
from streamer.errors import warn
from streamer.torch_private import CudaMark, allocator_settings, set_allocator

#: From CUDA's runtime API: page-locked for every CUDA context, not only for the one that is current.
REGISTER_PORTABLE = 1


class PinnedBlocks:
    """The registered mappings of one backend, whose copies go to and from ``device``."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._registered: list[int] = []
        self._pinning = True

    def allocate(self, nbytes: int) -> torch.Tensor:
        """A zeroed flat uint8 tensor of ``nbytes``, page-locked if the system allows it.

        If it does not, this warns once with the limit and the way to raise it, and continues with unpinned
        memory: copies then block their lane and run slower. A process that is forked from this one does not
        have the memory.
        """
        # a fork would copy all page-locked memory at once, or let the next write move it away from the GPU's
        # mapping; so a forked data loader must not get it
        block = mapped(nbytes, in_forks=False)
        self.pin(block)
        return block

    def pin(self, block: torch.Tensor) -> None:
        """Page-lock all of a flat uint8 tensor in a mapping of its own, as `allocate` does."""
        if self._pinning and block.numel():
            self._register(block.data_ptr(), block.numel())

    def unpin(self, block: torch.Tensor) -> None:
        """Unregister a block before the others; it is about to be freed."""
        if block.data_ptr() in self._registered:
            self._registered.remove(block.data_ptr())
            torch.cuda.cudart().cudaHostUnregister(block.data_ptr())

    @property
    def is_pinning(self) -> bool:
        """Whether all blocks are page-locked: enqueueing a copy to or from them does not block."""
        return self._pinning

    def close(self) -> None:
        """Unregister every block; the memory itself is freed with its last tensor. Idempotent."""
        while self._registered:
            torch.cuda.cudart().cudaHostUnregister(self._registered.pop())

    def _register(self, address: int, nbytes: int) -> None:
        error = torch.cuda.cudart().cudaHostRegister(address, nbytes, REGISTER_PORTABLE)
        if int(error) == 0:
            self._registered.append(address)
            return
        self._pinning = False
        _forget_error(self._device)
        # CUDA on WSL User Guide, known limitations: there is less memory to pin than there is memory
        is_wsl = "microsoft" in platform.release().lower()
        remedy = "Raise it with 'ulimit -l unlimited', or '--ulimit memlock=-1' for a container"
        if is_wsl:
            remedy = "WSL has no more of it; Linux itself has"
        soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        limit = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft} bytes"
        warn(
            f"could not page-lock {nbytes} bytes of host memory (CUDA error {int(error)}: "
            f"{torch.cuda.cudart().cudaGetErrorString(error)}; the locked-memory limit is {limit}): copies "
            f"will be slower. {remedy}.",
        )


def _forget_error(device: torch.device) -> None:
    """Clear the last CUDA error of this thread: PyTorch would raise it after the next kernel.

    PyTorch has no cudaGetLastError, but it clears an error that it raises after launching a kernel.
    """
    with suppress(RuntimeError):
        torch.arange(2, device=device)


#: Seconds after which a clock's origin is set anew.
ORIGIN_SECONDS = 10.0


class CudaEvent(Event):
    """The end of work that was enqueued on a CUDA stream."""

    def __init__(self, lane: Lane, clock: CudaClock) -> None:
        self.lane = lane
        self._failure: Failure | None = None
        self._issued = Latch()
        self._clock = clock
        self._end: CudaMark | None = None
        self._marks: tuple[CudaMark, CudaMark, CudaMark] | None = None
        self._span: Span | None = None

    def enqueue(self, stream: torch.cuda.Stream, work: Callable[[], object], waits: Sequence[Event]) -> None:
        """Let ``stream`` wait for ``waits``, then run ``work`` with ``stream`` as the current one."""
        try:
            with stream:
                marks = self.begin(stream, waits)
                work()
                self.end(stream, marks)
        except BaseException as error:
            self.fail(error)
            raise

    def begin(self, stream: torch.cuda.Stream, waits: Sequence[Event]) -> tuple[CudaMark, CudaMark]:
        """Let ``stream``, the current one, wait for ``waits``. Returns events before and after that wait."""
        ready = start = CudaMark(enable_timing=True)
        ready.record(stream)
        for event in waits:
            if isinstance(event, CudaEvent):
                event.hold(stream)
            else:
                event.wait()
        if waits:
            start = CudaMark(enable_timing=True)
            start.record(stream)
        return ready, start

    def end(self, stream: torch.cuda.Stream, marks: tuple[CudaMark, CudaMark]) -> None:
        """The work is enqueued on ``stream``, which began it at ``marks``."""
        end = CudaMark(enable_timing=True, blocking=True)
        end.record(stream)
        self._marks, self._end = (*marks, end), end
        self._issued.open()

    def fail(self, error: BaseException) -> None:
        """Raise ``error`` in the waits for the work, which was not enqueued."""
        self._failure = Failure(error)
        self._issued.open()

    def is_issued(self) -> bool:
        """Whether a stream can wait for it."""
        return self._issued.is_open

    def hold(self, stream: torch.cuda.Stream) -> None:
        """Make all later work on ``stream`` wait for this event."""
        self._finished().wait(stream)

    def wait(self) -> None:
        self._finished().synchronize()

    def failed(self) -> bool:
        return self._failure is not None

    def span(self) -> Span | None:
        if self._issued.is_open and self._marks is not None and self._marks[-1].query():
            # read again and again by the waits for this event
            self._span, self._marks = self._clock.span(*self._marks), None
        return self._span

    def _finished(self) -> CudaMark:
        self._issued.wait()
        if self._failure is not None:
            raise self._failure.again()
        assert self._end is not None, "what was issued has an end"
        return self._end


def _is_for_streams(event: Event) -> bool:
    """Whether no thread need wait for ``event``: a stream can wait for it, or it is over."""
    return event.is_issued() if isinstance(event, CudaEvent) else event.span() is not None


class CudaClock:
    """CUDA events on the clock of ``time.perf_counter``, so that one trace holds streams and threads.

    CUDA measures the time between two events in fp32 milliseconds, which after an hour is no finer than a
    quarter of one, and the two clocks drift apart; so the origin is never much more than `ORIGIN_SECONDS`
    old.
    """

    def __init__(self, device: torch.device) -> None:
        # a stream of its own: a new origin must not wait for the lanes
        self._stream = torch.cuda.Stream(device)
        self._set_origin()

    def span(self, ready: CudaMark, start: CudaMark, end: CudaMark) -> Span:
        """The times of the three marks, once all have passed."""
        if time.perf_counter() - self._origin_seconds > ORIGIN_SECONDS:
            self._set_origin()
        began = self._seconds(ready)
        return Span(began, began if start is ready else self._seconds(start), self._seconds(end))

    def _seconds(self, mark: CudaMark) -> float:
        after = float(self._origin.elapsed_time(mark))
        # CUDA's manual promises no times below zero, so what passed before the origin is measured backwards
        milliseconds = after if after > 0 else -float(mark.elapsed_time(self._origin))
        return self._origin_seconds + milliseconds / 1e3

    def _set_origin(self) -> None:
        self._origin = CudaMark(enable_timing=True)
        self._origin.record(self._stream)
        self._origin.synchronize()
        self._origin_seconds = time.perf_counter()


class CudaBackend(Backend):
    """Lanes of one CUDA device. COMPUTE is the stream that is current when work is submitted."""

    def __init__(self, device: torch.device, *, poison: bool = False) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        if index >= torch.cuda.device_count():
            raise ValueError(
                f"device='cuda:{index}' does not exist: PyTorch finds {torch.cuda.device_count()} CUDA "
                "device(s) here, counted from 'cuda:0'"
            )
        self.device = torch.device("cuda", index)
        #: PyTorch finds the current stream of a device number in half of the time
        self._index = index
        self.poison = poison
        self._process = Process()
        self._clock = CudaClock(self.device)
        self._pinned = PinnedBlocks(self.device)
        #: the stream of buffers that stay
        self._buffers = torch.cuda.Stream(self.device)
        self._streams = {lane: torch.cuda.Stream(self.device) for lane in STREAMS}
        self._workers = {lane: Worker(lane) for lane in WORKER_LANES}
        #: by lane, the last work of its worker
        self._last_queued = {lane: worker.submit(lambda: None, ()) for lane, worker in self._workers.items()}
        self._last_compute: tuple[torch.cuda.Stream, CudaEvent] | None = None
        self._own_fraction: float | None = None

    def queue(self, lane: Lane, work: Callable[[], object], waits: Sequence[Event], nbytes: int) -> Event:
        self._process.check()
        if lane in WORKER_LANES and lane not in STREAMS:
            return self._workers[lane].submit(work, waits)
        event = CudaEvent(lane, self._clock)
        self._enqueue(event, work, waits)
        return event

    @contextmanager
    def computing(self, waits: Sequence[Event]) -> Iterator[Event]:
        self._process.check()
        event, stream = CudaEvent(Lane.COMPUTE, self._clock), self._current_stream()
        if self._last_compute is not None and self._last_compute[0] != stream:
            # the caller has switched to another stream, and the lane must stay in order
            waits = (self._last_compute[1], *waits)
        # the lane must also wait for a block that raises
        marks = event.begin(stream, waits)
        try:
            yield event
        finally:
            self._last_compute = stream, event
            try:
                event.end(stream, marks)
            except BaseException as error:
                event.fail(error)
                raise

    def _enqueue(self, event: CudaEvent, work: Callable[[], object], waits: Sequence[Event]) -> None:
        lane = event.lane
        enqueue = partial(event.enqueue, self._streams[lane], work, waits)
        is_next = lane not in WAITING and self._last_queued[lane].is_done() and self._pinned.is_pinning
        if not is_next or not all(map(_is_for_streams, waits)):
            self._last_queued[lane] = self._workers[lane].submit(enqueue, ())
            return
        self._workers[lane].check_open()
        try:
            enqueue()
        # raised in the waits for the event, as if the worker had enqueued the copy: Ctrl-C too
        except BaseException as error:  # noqa: BLE001
            event.fail(error)

    def copy(self, into: torch.Tensor, source: torch.Tensor) -> None:
        # .data has a version counter of its own: that of ``into`` counts the user's writes
        into.data.copy_(source, non_blocking=True)

    def device_buffer(self, nbytes: int) -> torch.Tensor:
        # PyTorch's allocator keeps a separate pool for each stream. In the pool of COMPUTE's stream, a
        # permanent buffer would lie between temporary tensors, and a large tensor might find no room.
        with torch.cuda.stream(self._buffers):
            buffer = torch.zeros(nbytes, dtype=torch.uint8, device=self.device)
        # the lanes' streams do not wait for the stream that has just filled the buffer
        self._buffers.synchronize()
        return buffer

    def host_buffer(self, nbytes: int, *, pinned: bool = True) -> torch.Tensor:
        if not pinned:
            # in a forked data loader, each later write of an update would copy the page
            return mapped(nbytes, in_forks=False)
        # registering creates a context on the thread's current device if there is none yet
        with torch.cuda.device(self.device):
            return self._pinned.allocate(nbytes)

    def host_reserve(self, nbytes: int) -> torch.Tensor:
        return reserved(nbytes, in_forks=False)

    def pin(self, buffer: torch.Tensor) -> None:
        with torch.cuda.device(self.device):
            self._pinned.pin(buffer)

    def unpin(self, buffer: torch.Tensor) -> None:
        self._pinned.unpin(buffer)

    def device_available(self) -> int:
        free, _ = torch.cuda.mem_get_info(self.device)
        allocated = torch.cuda.memory_allocated(self.device)
        available = int(free) + torch.cuda.memory_reserved(self.device) - allocated
        return available if self.device_limit is None else min(available, self.device_limit - allocated)

    def limit_device(self, nbytes: int) -> None:
        super().limit_device(nbytes)
        with torch.cuda.device(self.device):
            self._expand_segments()
            # unused cached memory would count against the limit
            torch.cuda.empty_cache()
        _, total = torch.cuda.mem_get_info(self.device)
        self._own_fraction = torch.cuda.get_per_process_memory_fraction(self.device)
        torch.cuda.set_per_process_memory_fraction(min(1.0, nbytes / total), self.device)

    def _expand_segments(self) -> None:
        """Let PyTorch's allocator use expandable segments from now on. A process that has chosen a setting of
        the allocator keeps its settings, since one call sets most of them.

        Without expandable segments a tensor may find no room between others, though enough is free in all.
        """
        if sys.platform != "linux" or torch.cuda.get_allocator_backend() != "native":
            return
        if allocator_settings()["PYTORCH_CUDA_ALLOC_CONF"]:
            return
        set_allocator("expandable_segments:True")
        try:
            # from the device: the allocator has kept nothing of this stream
            with torch.cuda.stream(self._buffers):
                torch.empty(1, device=self.device)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:  # this GPU, or its virtualization, does not support such mappings
            set_allocator("expandable_segments:False")

    def host_available(self) -> int:
        return available_bytes()

    def device_used(self) -> tuple[int, int] | None:
        return torch.cuda.memory_allocated(self.device), torch.cuda.max_memory_allocated(self.device)

    def device_refused(self) -> int:
        return int(torch.cuda.memory_stats(self.device).get("num_ooms", 0))

    def device_buffers_within(self, nbytes: int, others: int, each: int, there: int) -> int:
        # memory that the allocator has taken serves the next step as it did this one, gaps included
        left = nbytes - torch.cuda.memory_reserved(self.device)
        pieces = left // PIECE_BYTES
        if each <= PIECE_BYTES // 2:
            return there + pieces * (PIECE_BYTES // each)
        return there + pieces * PIECE_BYTES // (-(-each // BLOCK_BYTES) * BLOCK_BYTES)

    def changes_stream(self) -> bool:
        last = self._last_compute
        return last is not None and last[0] != self._current_stream()

    def _current_stream(self) -> torch.cuda.Stream:
        last = self._last_compute
        # called several times for each layer: PyTorch takes six times as long to create one
        if last is not None and torch.accelerator.current_stream(self._index).stream_id == last[0].stream_id:
            return last[0]
        return torch.cuda.current_stream(self._index)

    def device_trim(self) -> None:
        torch.cuda.empty_cache()

    def close(self) -> None:
        if not self._process.is_this():
            return
        Worker.close_all(self._workers.values())
        try:
            # the slots' memory is about to be freed, and layers may have run on the caller's streams
            torch.cuda.synchronize(self.device)
        finally:
            if self._own_fraction is not None:
                torch.cuda.set_per_process_memory_fraction(self._own_fraction, self.device)
                self._own_fraction = None
            self._pinned.close()
