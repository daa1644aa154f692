"""The CPU as its own accelerator, with one thread per lane, so that every order of events can occur. The
"device" is ordinary memory, separate from the host shards. Copies and updates run in their own threads,
layers in the caller's thread. Delays per lane and poisoned slots reveal races in tests; a bandwidth per lane
simulates a slow bus.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
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
    """A daemon thread that runs its tasks in order. A task that waits for failed work fails too.

    ``name`` is the thread's, by default that of the lane; a lane may have more threads than one.
    """

    def __init__(self, lane: Lane, *, name: str | None = None) -> None:
        self.lane = lane
        self._process = Process()
        self._lock = Lock()
        self._closed = False
        #: the end of the last queued work
        self._last: HostEvent | None = None
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"streamer-{name or lane.value}", daemon=True)
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


def run_all(jobs: Sequence[tuple[Sequence[Worker], Sequence[Callable[[], None]]]], *, turn: int = 0) -> None:
    """Run lists of jobs on their workers, beginning with worker ``turn``. Returns when all have run. After an
    error no more jobs begin, and it is raised when none is running.
    """
    queues = [(workers, deque(several)) for workers, several in jobs]
    changed = threading.Condition()
    running = 0

    def take(queue: deque[Callable[[], None]]) -> Callable[[], None] | None:
        nonlocal running
        with changed:
            if not queue:
                return None
            running += 1
            return queue.popleft()

    def put_down() -> None:
        nonlocal running
        with changed:
            running -= 1
            changed.notify_all()

    def stop() -> None:
        with changed:
            for _, queue in queues:
                queue.clear()

    def run(queue: deque[Callable[[], None]]) -> None:
        while (job := take(queue)) is not None:
            try:
                job()
            except BaseException:
                stop()
                raise
            finally:
                put_down()

    events: list[HostEvent] = []
    try:
        for workers, queue in queues:
            for index in range(min(len(queue), len(workers))):
                events.append(workers[(turn + index) % len(workers)].submit(partial(run, queue), ()))
        for event in events:
            event.wait()
    except BaseException:
        # the caller may reuse the memory of the jobs, so none may run any more, even after a second Ctrl-C
        at_rest = False
        while not at_rest:
            with suppress(BaseException), changed:
                stop()
                at_rest = changed.wait_for(lambda: not running)
        raise


class ThreadBackend(Backend):
    """Lanes as threads on the CPU.

    ``delays`` has, by lane, a function that returns the seconds to wait before each piece of work, except for
    `on_host`. ``poison`` fills released slots with NaN. A copy of at most `SHORT_COPY` bytes that has nothing
    to wait for runs in the caller's thread, unless its lane has a delay or a bandwidth.

    ``bytes_per_second`` has, for H2D, D2H or both, the bandwidth of a slow bus: a copy of n bytes then takes
    at least ``n / bandwidth`` seconds, and its lane sleeps after the copy. A bandwidth above that of memory
    changes nothing. ``clock`` (seconds) and ``sleep`` are the functions of time used for this. Raises
    ValueError for other lanes, and for a bandwidth that is not above 0.
    """

    def __init__(
        self,
        *,
        delays: Mapping[Lane, Delay] | None = None,
        poison: bool = False,
        bytes_per_second: Mapping[Lane, float] | None = None,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.device = torch.device("cpu")
        self.poison = poison
        self._bytes_per_second = dict(bytes_per_second or {})
        for lane, rate in self._bytes_per_second.items():
            if lane not in COPIES or not rate > 0:
                raise ValueError(
                    f"bytes_per_second of {lane.name} is {rate}: give one above 0, for Lane.H2D or Lane.D2H"
                )
        self._clock = clock
        self._sleep = sleep
        self._process = Process()
        self._delays = dict(delays or {})
        self._workers = {lane: Worker(lane) for lane in WORKER_LANES}

    def queue(self, lane: Lane, work: Callable[[], object], waits: Sequence[Event], nbytes: int) -> Event:
        rate, delay = self._bytes_per_second.get(lane), self._delays.get(lane)
        lasting = work if rate is None else self._lasting(work, nbytes / rate)
        is_short = lane in COPIES and nbytes <= SHORT_COPY and rate is None and delay is None
        return self._workers[lane].submit(lasting, waits, delay=delay, is_short=is_short)

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

    def _lasting(self, work: Callable[[], object], seconds: float) -> Callable[[], None]:
        """``work`` that ends no earlier than ``seconds`` after it began."""

        def lasting() -> None:
            end = self._clock() + seconds
            work()
            # a sleep may end early
            while (left := end - self._clock()) > 0:
                self._sleep(left)

        return lasting

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
