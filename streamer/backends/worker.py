"""One thread that runs the work of one lane in order."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Collection, Sequence

import torch

from streamer.backends.base import Event, Lane, Process, Span


class HostEvent(Event):
    """An event set by a thread: the work it stands for has been carried out by a worker or its caller."""

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self.error: BaseException | None = None
        # a lock that is held until the work is done: a `threading.Event` takes forty times as long to make
        self._running = threading.Lock()
        self._running.acquire()
        self._is_done = False
        self._span: Span | None = None

    def finish(self, span: Span | None, error: BaseException | None = None) -> None:
        """Mark the work as done, or as failed with ``error``."""
        self._span = span
        self.error = error
        self._is_done = True
        self._running.release()

    def wait(self) -> None:
        if not self._is_done:
            with self._running:
                pass
        if self.error is not None:
            raise self.error

    def failed(self) -> bool:
        return self.error is not None

    def span(self) -> Span | None:
        return self._span


Task = tuple[Callable[[], object], Sequence[Event], HostEvent]


class Worker:
    """A daemon thread that runs tasks in order; a task whose waits failed fails with their error."""

    def __init__(self, lane: Lane, *, delay: Callable[[], float] | None = None) -> None:
        self.lane = lane
        self._delay = delay
        self._process = Process()
        self._lock = threading.Lock()
        self._closed = False
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"streamer-{lane.value}", daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], object], waits: Sequence[Event]) -> HostEvent:
        """Queue ``work``; the returned event is done when it has run. Raises RuntimeError once closed, and
        in a forked process."""
        self._process.check()
        done = HostEvent(self.lane)
        with self._lock:
            if self._closed:
                raise RuntimeError(
                    f"the {self.lane.name} lane is closed: its model was unwrapped, so what was made for the "
                    "wrapped model (an optimizer, a graph) is of no more use"
                )
            self._tasks.put((work, waits, done))
        return done

    @staticmethod
    def close_all(workers: Collection[Worker]) -> None:
        """End the threads after what is queued, and wait for that. May be called again. A forked process does
        not have them.

        The garbage collector may call this in one of the threads; that one then ends later, and nobody
        waits for it or for those that may be waiting for it.
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
        # what waits for lanes where the user's code touches it is a plain tensor to the lanes themselves
        with torch._C.DisableTorchFunctionSubclass():
            self._run_tasks()

    def _run_tasks(self) -> None:
        while (task := self._tasks.get()) is not None:
            work, waits, done = task
            ready = time.perf_counter()
            span: Span | None = None
            error: BaseException | None = None
            try:
                _wait_for(waits)
                if self._delay is not None:
                    time.sleep(self._delay())
                start = time.perf_counter()
                work()
                span = Span(ready, start, time.perf_counter())
            # the thread must outlive any error: it is kept in the event and raised by whoever waits for it
            except BaseException as failure:  # noqa: BLE001
                error = failure
            # whoever is told that the work is done may count on nobody holding any more what it has used
            del task, work, waits
            done.finish(span, error)
            del done, error


def _wait_for(events: Sequence[Event]) -> None:
    for event in events:
        event.wait()
