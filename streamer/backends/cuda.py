"""CUDA: a stream for each direction of the bus, a thread for the host, the caller's stream for compute.

Every lane but COMPUTE has a worker thread that enqueues its work, because a copy may have to wait for
an update that runs in a thread, and no stream can wait for a thread. An event therefore has two parts:
it is *issued* once its CUDA event stands in a stream, and done once that CUDA event is.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import psutil
import torch

from streamer.backends.base import Backend, Event, Lane, Span
from streamer.backends.pinned import PinnedBlocks
from streamer.backends.worker import Worker


class CudaEvent(Event):
    """The end of work that was enqueued on a CUDA stream."""

    def __init__(self, lane: Lane, clock: CudaClock) -> None:
        self.lane = lane
        self.error: BaseException | None = None
        self._issued = threading.Event()
        self._clock = clock
        self._marks: tuple[torch.cuda.Event, torch.cuda.Event, torch.cuda.Event] | None = None

    def enqueue(self, stream: torch.cuda.Stream, work: Callable[[], object], waits: Sequence[Event]) -> None:
        """Let ``stream`` wait for ``waits``, then run ``work`` with it as the current stream."""
        ready, start = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        end = torch.cuda.Event(enable_timing=True, blocking=True)
        try:
            with torch.cuda.stream(stream):
                ready.record(stream)
                for event in waits:
                    if isinstance(event, CudaEvent):
                        event.hold(stream)
                    else:
                        event.wait()
                start.record(stream)
                work()
                end.record(stream)
                self._marks = (ready, start, end)
        except BaseException as error:
            self.error = error
            raise
        finally:
            self._issued.set()

    def hold(self, stream: torch.cuda.Stream) -> None:
        """Make what is enqueued on ``stream`` from now on wait for this event."""
        stream.wait_event(self._finished())

    def wait(self) -> None:
        self._finished().synchronize()

    def failed(self) -> bool:
        return self.error is not None

    def span(self) -> Span | None:
        if not self._issued.is_set() or self._marks is None or not self._marks[-1].query():
            return None
        ready, start, end = (self._clock.seconds(mark) for mark in self._marks)
        return Span(ready, start, end)

    def _finished(self) -> torch.cuda.Event:
        self._issued.wait()
        if self._marks is None:
            assert self.error is not None, "an event without marks has failed"
            raise self.error
        return self._marks[-1]


class CudaClock:
    """CUDA events on the clock of ``time.perf_counter``, so that one trace holds streams and threads."""

    def __init__(self, device: torch.device) -> None:
        self._origin = torch.cuda.Event(enable_timing=True)
        self._origin.record(torch.cuda.current_stream(device))
        self._origin.synchronize()
        self._origin_seconds = time.perf_counter()

    def seconds(self, mark: torch.cuda.Event) -> float:
        """When ``mark`` passed, in seconds."""
        return self._origin_seconds + float(self._origin.elapsed_time(mark)) / 1e3


class CudaBackend(Backend):
    """Lanes of one CUDA device. COMPUTE is whichever stream is current when work is submitted."""

    def __init__(self, device: torch.device, *, poison: bool = False) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", index)
        self.poison = poison
        self._clock = CudaClock(self.device)
        self._pinned = PinnedBlocks()
        self._streams = {lane: torch.cuda.Stream(self.device) for lane in (Lane.H2D, Lane.D2H)}
        self._workers = {lane: Worker(lane) for lane in (Lane.H2D, Lane.D2H, Lane.HOST)}

    def submit(self, lane: Lane, work: Callable[[], object], waits: Sequence[Event], nbytes: int) -> Event:
        if lane is Lane.HOST:
            return self._workers[lane].submit(work, waits)
        event = CudaEvent(lane, self._clock)
        if lane is Lane.COMPUTE:
            event.enqueue(torch.cuda.current_stream(self.device), work, waits)
        else:
            self._workers[lane].submit(lambda: event.enqueue(self._streams[lane], work, waits), ())
        return event

    def copy(self, into: torch.Tensor, source: torch.Tensor) -> None:
        into.copy_(source, non_blocking=True)

    def device_buffer(self, nbytes: int) -> torch.Tensor:
        buffer = torch.zeros(nbytes, dtype=torch.uint8, device=self.device)
        # the lanes' streams know nothing of the stream that has just filled the buffer
        torch.cuda.current_stream(self.device).synchronize()
        return buffer

    def host_buffer(self, nbytes: int) -> torch.Tensor:
        return self._pinned.allocate(nbytes)

    def device_available(self) -> int:
        free, _ = torch.cuda.mem_get_info(self.device)
        reserved_unused = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return int(free) + reserved_unused

    def host_available(self) -> int:
        return int(psutil.virtual_memory().available)

    def device_used(self) -> tuple[int, int] | None:
        return torch.cuda.memory_allocated(self.device), torch.cuda.max_memory_allocated(self.device)

    def close(self) -> None:
        for worker in self._workers.values():
            worker.close()
        for stream in self._streams.values():
            stream.synchronize()
        self._pinned.close()
