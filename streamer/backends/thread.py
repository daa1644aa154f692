"""The CPU as its own accelerator, with one thread per lane, so that every order of events can occur. The
"device" is ordinary memory, separate from the host shards. Copies and updates run in their own threads,
layers in the caller's thread. Delays per lane and poisoned slots reveal races in tests.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from typing import TypeVar

import numpy as np
import torch

from streamer.backends.base import (
    COPIES,
    WORKER_LANES,
    Backend,
    Event,
    Failure,
    Lane,
    Latch,
    Lock,
    Process,
    Span,
)
from streamer.backends.host_memory import available_bytes, mapped, reserved
from streamer.torch_private import SubclassesOff

T = TypeVar("T")


class HostEvent(Event):
    """An event of work that a thread has carried out: a worker's, or the caller's."""

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self._failure: Failure | None = None
        self._done = Latch()
        self._span: Span | None = None

    def finish(self, span: Span | None, error: BaseException | None = None) -> None:
        """Mark the work as done, or as failed with ``error``."""
        self._span = span
        self._failure = None if error is None else Failure(error)
        self._done.open()

    def wait(self) -> None:
        self._done.wait()
        if self._failure is not None:
            raise self._failure.again()

    def is_done(self) -> bool:
        """Whether the work has run, or failed."""
        return self._done.is_open

    def failed(self) -> bool:
        return self._failure is not None

    def span(self) -> Span | None:
        return self._span


Delay = Callable[[], float]
#: The largest copy, in bytes, that takes less time than waking another thread.
SHORT_COPY = 1 << 17
Task = tuple[Callable[[], object], Sequence[Event], Delay | None, HostEvent]


class Worker:
    """A daemon thread that runs its tasks in order. A task that waits for failed work fails too."""

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self._process = Process()
        self._lock = Lock()
        self._closed = False
        #: the end of the last queued work
        self._last: HostEvent | None = None
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"streamer-{lane.value}", daemon=True)
        self._thread.start()

    def submit(
        self,
        work: Callable[[], object],
        waits: Sequence[Event],
        *,
        delay: Delay | None = None,
        is_short: bool = False,
    ) -> HostEvent:
        """Queue ``work``, which begins ``delay()`` seconds late; the returned event is its end. If it
        ``is_short`` and has nothing to wait for, it runs at once in the caller's thread. Raises RuntimeError
        once closed, and in a forked process."""
        self._process.check()
        done = HostEvent(self.lane)
        with self._lock:
            self.check_open()
            is_next = is_short and (self._last is None or self._last.is_done())
            self._last = done
            if is_next and all(event.span() is not None for event in waits):
                self._run_here(work, done)
            else:
                self._tasks.put((work, waits, delay, done))
        return done

    def _run_here(self, work: Callable[[], object], done: HostEvent) -> None:
        try:
            start = time.perf_counter()
            work()
            done.finish(Span(start, start, time.perf_counter()))
        except Exception as error:  # noqa: BLE001 - raised by who waits
            done.finish(None, error)
        except BaseException:  # Ctrl-C
            if not done.is_done():
                self._tasks.put((work, (), None, done))
            raise

    def call(self, work: Callable[[], T]) -> T:
        """Run ``work`` after all that is queued, and return its result."""
        results: list[T] = []
        self.submit(lambda: results.append(work()), ()).wait()
        return results.pop()

    def check_open(self) -> None:
        """Raise RuntimeError once the lane is closed."""
        if self._closed:
            raise RuntimeError(
                f"the {self.lane.name} lane is closed: its model was unwrapped, so objects of the "
                "wrapped model (an optimizer, a graph) are of no more use"
            )

    @staticmethod
    def close_all(workers: Collection[Worker]) -> None:
        """End the threads once their queues are empty, and join them. May be called again; in a forked
        process, which has no such threads, it does nothing.

        Where the garbage collector calls this in a worker's own thread, no thread is joined.
        """
        workers = [worker for worker in workers if worker._process.is_this()]
        for worker in workers:
            worker._end()
        if threading.current_thread() not in {worker._thread for worker in workers}:
            for worker in workers:
                worker._thread.join()

    def _end(self) -> None:
        with self._lock:
            if not self._closed:
                self._closed = True
                self._tasks.put(None)

    def _run(self) -> None:
        # a guarded tensor waits for lanes when it is used; a lane that waits for itself never ends
        with SubclassesOff():
            self._run_tasks()

    def _run_tasks(self) -> None:
        while (task := self._tasks.get()) is not None:
            work, waits, delay, done = task
            ready = time.perf_counter()
            span: Span | None = None
            error: BaseException | None = None
            try:
                _wait_for(waits)
                if delay is not None:
                    time.sleep(delay())
                start = time.perf_counter()
                work()
                span = Span(ready, start, time.perf_counter())
            # no error ends the thread: the event keeps it, and raises it in threads that wait
            except BaseException as failure:  # noqa: BLE001
                error = failure
            # dropped before `finish`, after which a waiting thread may free the memory that they refer to
            del task, work, waits, delay
            done.finish(span, error)
            del done, error


def _wait_for(events: Sequence[Event]) -> None:
    for event in events:
        event.wait()


#: Work for a pool of threads.
Job = tuple[ThreadPoolExecutor, Callable[[], None]]


def run_all(jobs: Sequence[Job]) -> None:
    """Run each job in its pool. Returns when all have run. After an error, those that have not begun are
    cancelled, and it is raised when none is running."""
    futures = list[Future[None]]()
    try:
        for pool, job in jobs:
            futures.append(pool.submit(job))
        done, _ = wait(futures, return_when=FIRST_EXCEPTION)
        for future in done:
            future.result()
    except BaseException:
        # the caller may reuse the memory of the jobs, so none may run any more, even after a second Ctrl-C
        is_running = True
        while is_running:
            with suppress(BaseException):
                for future in futures:
                    future.cancel()
                wait(futures)
                is_running = False
        raise


class ThreadBackend(Backend):
    """Lanes as threads on the CPU.

    ``delays`` has, by lane, a function that returns the seconds to wait before each piece of work, except for
    `on_host`. ``poison`` fills released slots with NaN. A copy of at most `SHORT_COPY` bytes that has nothing
    to wait for runs in the caller's thread, unless its lane has a delay.
    """

    def __init__(self, *, delays: Mapping[Lane, Delay] | None = None, poison: bool = False) -> None:
        self.device = torch.device("cpu")
        self.poison = poison
        self._process = Process()
        self._delays = dict(delays or {})
        self._workers = {lane: Worker(lane) for lane in WORKER_LANES}

    def queue(self, lane: Lane, work: Callable[[], object], waits: Sequence[Event], nbytes: int) -> Event:
        delay = self._delays.get(lane)
        is_short = lane in COPIES and nbytes <= SHORT_COPY and delay is None
        return self._workers[lane].submit(work, waits, delay=delay, is_short=is_short)

    @contextmanager
    def computing(self, waits: Sequence[Event]) -> Iterator[Event]:
        self._process.check()
        done, ready = HostEvent(Lane.COMPUTE), time.perf_counter()
        for event in waits:
            event.wait()
        if Lane.COMPUTE in self._delays:
            time.sleep(self._delays[Lane.COMPUTE]())
        start = time.perf_counter()
        try:
            yield done
        finally:
            done.finish(Span(ready, start, time.perf_counter()))

    def on_host(self, work: Callable[[], T]) -> T:
        # without a delay, which would have no effect: the caller waits
        return self._workers[Lane.HOST].call(work)

    def copy(self, into: torch.Tensor, source: torch.Tensor) -> None:
        # NumPy copies on this thread alone; PyTorch would start a team of threads in every lane
        np.copyto(into.numpy(), source.numpy())

    def device_buffer(self, nbytes: int) -> torch.Tensor:
        # not from the C library's heap, which keeps freed memory for later
        return mapped(nbytes, in_forks=True)

    def host_buffer(self, nbytes: int, *, pinned: bool = True) -> torch.Tensor:
        return mapped(nbytes, in_forks=True)

    def host_reserve(self, nbytes: int) -> torch.Tensor:
        return reserved(nbytes, in_forks=True)

    def device_available(self) -> int:
        available = self.host_available()
        return available if self.device_limit is None else min(available, self.device_limit)

    def host_available(self) -> int:
        return available_bytes()

    def close(self) -> None:
        Worker.close_all(self._workers.values())
