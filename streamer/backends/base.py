"""The interface of a backend: lanes that run work in order, events that mark its end, and memory.

Only the files of this folder use streams, threads and pinned memory. All other code submits work to a lane,
with the events that the work must wait for, and gets the event of its end. `in_background` runs work in a
thread of its own, which reads data that other threads are about to change.
"""

from __future__ import annotations

import abc
import enum
import os
import threading
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Generic, NamedTuple, TypeVar

import torch

import streamer_native as native

T = TypeVar("T")


class Lane(enum.Enum):
    """A queue of work that runs in order: its name, and the name of its group of similar lanes.

    All data by lane follows from this list. The kind of an op decides on which lane it runs
    (`streamer.engine.schedule.op.OpKind`). A machine has a rate ``{name}_bytes_per_second`` for every lane
    that moves bytes, and a share ``{group}_{group}`` of it for every two groups that work at the same time
    (`streamer.planner.machine`); calibration measures both. A trace has a row for each lane.
    """

    COMPUTE = "compute", "compute"  # the caller's own thread (and, on a GPU, its current stream)
    H2D = "h2d", "copy"  # host to device copies
    D2H = "d2h", "copy"  # device to host copies
    HOST = "host", "host"  # work on host memory: updates, accumulation, norms
    DISK_READ = "disk_read", "disk"  # disk to host memory
    DISK_WRITE = "disk_write", "disk"  # host memory to disk
    COLLECTIVE = "collective", "copy"  # between ranks: their gradients, and parts of weights
    BARRIER = "barrier", "copy"  # waiting for other ranks' reads and updates, which moves nothing

    group: str

    def __new__(cls, name: str, group: str) -> Lane:
        lane = object.__new__(cls)
        lane._value_ = name
        lane.group = group
        return lane

    # Enum.__hash__ is a Python function, slow for a dictionary key that every op uses
    __hash__ = object.__hash__


#: All lanes but COMPUTE: each runs in a thread of its own, in parallel with the caller's.
WORKER_LANES: tuple[Lane, ...] = tuple(lane for lane in Lane if lane is not Lane.COMPUTE)
#: The lanes that copy between host and device.
COPIES: tuple[Lane, Lane] = Lane.H2D, Lane.D2H
#: The lanes with a stream on a GPU, and those of them whose work waits for other processes.
STREAMS: tuple[Lane, ...] = *COPIES, Lane.COLLECTIVE
WAITING: tuple[Lane, ...] = (Lane.COLLECTIVE,)
#: The lanes between disk and host memory: from disk, and to disk.
DISKS: tuple[Lane, Lane] = Lane.DISK_READ, Lane.DISK_WRITE
#: The lanes that a run without ranks, and without anything on disk, does not use.
SPECIAL: tuple[Lane, ...] = *DISKS, Lane.COLLECTIVE, Lane.BARRIER


class Span(NamedTuple):
    """The time of a piece of work, in seconds on its backend's clock.

    ``ready`` is when the work was next in its lane, ``start`` when all events that it waited for were done.
    """

    ready: float
    start: float
    end: float


class Process:
    """The process that created this object. A child that is forked from it has a copy of its memory but not
    its threads, and may not use CUDA."""

    #: the number of forks between the first process that imported this module and the running one
    _forks = 0

    def __init__(self) -> None:
        self._forks_before = Process._forks

    def is_this(self) -> bool:
        """Whether the caller runs in that process."""
        return Process._forks == self._forks_before

    @staticmethod
    def _is_forked() -> None:
        Process._forks += 1

    def check(self) -> None:
        """Raise RuntimeError if the caller runs in a forked child, where the lanes have no threads."""
        if not self.is_this():
            raise RuntimeError(
                "this process was forked from the one that wrapped the model, and cannot run it: a data "
                "loader's workers may hold a wrapped model, but must not call it"
            )


# called several times for each layer; `os.getpid` would take a system call
os.register_at_fork(after_in_child=Process._is_forked)


class Latch:
    """Opens once, for all threads that wait. Creating a `threading.Event` takes forty times as long."""

    __slots__ = ("_shut", "is_open")

    def __init__(self) -> None:
        self.is_open = False
        # a lock that is held until then
        self._shut = threading.Lock()
        self._shut.acquire()

    def open(self) -> None:
        """Let all waiting threads continue, later ones too."""
        if not self.is_open:
            self.is_open = True
            self._shut.release()

    def wait(self) -> None:
        """Block the caller until it is open."""
        if not self.is_open:
            with self._shut:
                pass


class Failure:
    """An error that is raised to every caller, each time with its present traceback."""

    def __init__(self, error: BaseException) -> None:
        self._error = error
        self._traceback = error.__traceback__

    def again(self) -> BaseException:
        """The error, to be raised: Python adds to its traceback each time."""
        return self._error.with_traceback(self._traceback)


class Event(abc.ABC):
    """The end of one piece of work on a lane."""

    lane: Lane
    #: the intervals from its lane's turn to its end, each with the lane at work: [Note: exposed time]
    blame: tuple[tuple[int, float, float], ...] | None = None

    @abc.abstractmethod
    def wait(self) -> None:
        """Block the calling thread until the work is done; raise its error."""

    @abc.abstractmethod
    def failed(self) -> bool:
        """Whether the work has raised, or did not run because an event that it waited for had failed."""

    @abc.abstractmethod
    def span(self) -> Span | None:
        """The time of the work, or None until it is done."""


class Backend(abc.ABC):
    """Lanes and memory of one device."""

    device: torch.device
    #: the place of host memory; the meta device if a backend has no values
    host: torch.device = torch.device("cpu")
    #: fill released slots with NaN, so that a stale read is detected
    poison: bool = False
    #: bytes of the device that may be used, if limited
    device_limit: int | None = None

    @property
    def has_values(self) -> bool:
        """Whether tensors of it have values."""
        return self.host.type != "meta"

    def submit(self, lane: Lane, work: Callable[[], object], waits: Sequence[Event], nbytes: int) -> Event:
        """Run ``work``, which moves ``nbytes``, after all earlier work in the lane and after ``waits``.

        On COMPUTE, ``work`` is called before this returns, as the block of `computing`. On the other lanes,
        errors of ``work`` are raised by the waits for the event.
        """
        if lane is not Lane.COMPUTE:
            return self.queue(lane, work, waits, nbytes)
        with self.computing(waits) as event:
            work()
        return event

    @abc.abstractmethod
    def queue(self, lane: Lane, work: Callable[[], object], waits: Sequence[Event], nbytes: int) -> Event:
        """`submit` for the lanes but COMPUTE."""

    @abc.abstractmethod
    def computing(self, waits: Sequence[Event]) -> AbstractContextManager[Event]:
        """Run the block on COMPUTE (on a GPU: the work that it enqueues) after all earlier work in that lane
        and after ``waits``. Yields the event of its end, which is set even if the block raises."""

    def on_host(self, work: Callable[[], T]) -> T:
        """Run ``work`` on HOST after all earlier work in that lane, wait for it, and return its result.

        Kernels of streamer_native are only called on that lane: their number of threads is a setting of its
        thread.
        """
        results: list[T] = []
        self.submit(Lane.HOST, lambda: results.append(work()), (), 0).wait()
        return results.pop()

    def set_host_threads(self, count: int) -> None:
        """Let kernels of streamer_native use ``count`` threads."""
        self.on_host(lambda: native.set_num_threads(count))

    def finish_compute(self) -> None:
        """Return when all work is done that the caller has queued on the device so far."""
        with self.computing(()) as done:
            pass
        done.wait()

    @abc.abstractmethod
    def copy(self, into: torch.Tensor, source: torch.Tensor) -> None:
        """Copy ``source`` into ``into`` (flat uint8, equal sizes); called by work on H2D and D2H."""

    @abc.abstractmethod
    def device_buffer(self, nbytes: int) -> torch.Tensor:
        """A zeroed flat uint8 tensor of ``nbytes`` on the device."""

    @abc.abstractmethod
    def host_buffer(self, nbytes: int, *, pinned: bool = True) -> torch.Tensor:
        """A zeroed flat uint8 tensor of ``nbytes`` in host memory; ``pinned`` if copies are to run to or
        from it."""

    @abc.abstractmethod
    def host_reserve(self, nbytes: int) -> torch.Tensor:
        """A zeroed flat uint8 tensor of ``nbytes`` that takes host memory only as it is written."""

    def pin(self, buffer: torch.Tensor) -> None:
        """Make a buffer of `host_reserve` ready for copies to and from the device, once it is written."""
        return

    def unpin(self, buffer: torch.Tensor) -> None:
        """Undo `pin` for a buffer that is about to be freed, while no copy to or from it is running."""
        return

    @abc.abstractmethod
    def device_available(self) -> int:
        """Bytes free on the device, within its limit if there is one."""

    def limit_device(self, nbytes: int) -> None:
        """Let the device have no more than ``nbytes``."""
        self.device_limit = nbytes

    @abc.abstractmethod
    def host_available(self) -> int:
        """Bytes available in host memory."""

    def device_used(self) -> tuple[int, int] | None:
        """Bytes of all tensors on the device, now and at their peak, if its allocator counts them."""
        return None

    def device_refused(self) -> int:
        """How often the device's allocator has refused memory; 0 if it does not count that."""
        return 0

    def device_buffers_within(self, nbytes: int, others: int, each: int, there: int) -> int:
        """The number of buffers of ``each`` bytes that fit in ``nbytes`` of the device. ``there`` of them
        exist, and the other tensors take at most ``others`` bytes."""
        return (nbytes - others) // each

    def changes_stream(self) -> bool:
        """Whether the caller's current stream differs from that of the last work on COMPUTE."""
        return False

    def device_trim(self) -> None:
        """Return the memory of freed buffers to the device."""
        return

    @abc.abstractmethod
    def close(self) -> None:
        """End the lanes once their queues are empty, and free the memory that the backend holds. May be
        called again; in a process that was forked from the backend's own it does nothing."""


#: A lock that its holder may take again: the garbage collector may interrupt a thread that holds the lock and
#: run code that takes it, in that thread.
Lock = threading.RLock
Thread = threading.Thread
current_thread = threading.current_thread


#: One part in this many of the bytes that are allocated and freed again on the device is left for gaps.
GAPS = 8
#: Large blocks are rounded up to a multiple of this many bytes by PyTorch's caching allocator.
BLOCK_BYTES = 2 << 20
#: PyTorch's caching allocator takes memory from a GPU in pieces of this many bytes; for large tensors,
#: without expandable segments, in multiples of `BLOCK_BYTES`.
PIECE_BYTES = 20 << 20


def gaps(nbytes: int) -> int:
    """Bytes to leave free for the gaps between ``nbytes`` that are allocated and freed again, and in the
    allocator's last piece."""
    return nbytes // GAPS + PIECE_BYTES


def buffers_within(nbytes: int, others: int, each: int) -> int:
    """The number of buffers of ``each`` bytes that fit in ``nbytes``, if other tensors take at most
    ``others`` bytes."""
    return (nbytes - others - gaps(others)) // (-(-each // BLOCK_BYTES) * BLOCK_BYTES)


K = TypeVar("K", bound=Hashable)


class Handover(Generic[K]):
    """``keys`` name the data to read. Before it changes the data of a key, a thread calls `before_change`,
    which waits until the data is read."""

    def __init__(self, keys: Iterable[K]) -> None:
        self._left = list(keys)
        self._changed = threading.Condition()

    def before_change(self, key: K) -> None:
        """Return when the data of ``key`` may be changed. Not to be called by the reading thread."""
        with self._changed:
            self._changed.wait_for(lambda: key not in self._left)

    def read_all(self, read: Callable[[K], None]) -> None:
        """Call ``read`` with every key, in order. An error ends all waiting."""
        try:
            while self._left:
                read(self._left[0])
                with self._changed:
                    self._left.pop(0)
                    self._changed.notify_all()
        finally:
            self.stop()

    def stop(self) -> None:
        """Read no more, and end all waiting."""
        with self._changed:
            self._left.clear()
            self._changed.notify_all()


class Background(Future[None]):
    """Work in a thread of its own. ``is_awaited`` is whether `result`, which raises its error, was called."""

    def __init__(self) -> None:
        super().__init__()
        self.is_awaited = False

    def result(self, timeout: float | None = None) -> None:
        """Wait until the work is done; raise its error."""
        self.is_awaited = True
        super().result(timeout)


def in_background(work: Callable[[], None], name: str) -> Background:
    """Run ``work`` in a thread of its own; the process does not end before that thread."""
    done = Background()
    # no caller can cancel it now: a cancelled future takes no result
    done.set_running_or_notify_cancel()

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised by `result`
            done.set_exception(error)
        else:
            done.set_result(None)

    threading.Thread(target=run, name=name).start()
    return done
