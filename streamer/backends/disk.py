"""Scratch storage on one or several disks for flat buffers of host memory.

    scratch = Scratch(["/nvme0/scratch", "/nvme1/scratch"])    # a folder of each drive
    extents = [scratch.extent(nbytes) for nbytes in sizes]     # places, striped over the folders
    scratch.allocate()                                         # raises if a disk is full
    buffer = mapped(scratch.padded(max(sizes)), in_forks=False)
    scratch.write(extents[0], buffer)                          # both block: a lane's own thread calls them
    scratch.read(extents[0], buffer)
    scratch.close()

An extent is cut into pieces of at most 8 MiB, as many on each drive, and a few threads for each drive and
direction move them with preadv(2) and pwritev(2), which run without Python's lock. Reads and writes have
threads of their own, so a read does not queue behind a write. Nothing here outlasts the process: no name in a
folder, no flush of the drive's own cache. Lasting data is in checkpoints.

Ranks that train one model share the scratch files of their machine: its first rank creates and allocates
them, the others open them. All ranks create the same extents in the same order, so each knows their places.
Callers decide which bytes a rank may read and write at a time. Other machines have files of their own, and
take part in the same exchanges, so that all ranks learn of a machine without room before anything is written.

Memory for direct I/O must not be shared with forked processes (``in_forks=False``): a fork in the middle of a
read can leave the bytes with the other process.
"""

from __future__ import annotations

import enum
import errno
import itertools
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Self

import torch

from streamer.backends.base import Lane, Process
from streamer.backends.direct_io import ScratchFile, System, too_full
from streamer.backends.host_memory import mapped
from streamer.backends.ranks import Ranks
from streamer.backends.stored_tensors import Pieces, StoredTensors
from streamer.backends.thread import Worker, run_all
from streamer.errors import DiskError, warn

#: The most bytes that one system call moves.
BLOCK_BYTES = 8 << 20
#: A small extent is cut into pieces smaller than a block: this many for each thread of each drive, ...
PIECES_PER_THREAD = 2
#: ... but no piece is smaller than a block divided by this.
LEAST_BLOCK = 8
#: The number of pieces moved at the same time, for each drive and direction.
IN_FLIGHT = 4


class Direction(enum.Enum):
    """From disk to host memory, or from host memory to disk."""

    READ = "read"
    WRITE = "write"


@dataclass(frozen=True)
class Piece:
    """The work of one system call: bytes of an extent from ``start`` on, at ``offset`` of a file."""

    file: int
    offset: int
    start: int
    nbytes: int


@dataclass(frozen=True, eq=False)
class Extent:
    """A place for ``nbytes``; transfers move ``padded_bytes``, ``nbytes`` rounded up to the alignment."""

    nbytes: int
    padded_bytes: int
    pieces: tuple[Piece, ...]


class _State(enum.Enum):
    EMPTY = "it was never written"
    WRITING = "it is being written"
    WRITTEN = ""
    TORN = "the last write of it failed"


@dataclass
class _Use:
    """The state of an extent, and the number of running reads of it."""

    state: _State = _State.EMPTY
    reads: int = 0


@dataclass
class _Drive:
    """A folder's file and the threads that move its pieces."""

    file: ScratchFile
    workers: Mapping[Direction, Sequence[Worker]]
    planned: int = 0


class Scratch:
    """Extents in unnamed files, one file in each of ``folders``.

    ``direct_io`` is "prefer" (a file system without it causes one warning and is used through the page
    cache), "require" (such a file system is refused) or "off". ``in_flight`` pieces of at most
    ``block_bytes`` move at the same time for each drive and direction.

    ``throttle`` simulates a slower disk: it has the bytes per second for READ, WRITE or both. A transfer of n
    bytes then lasts at least ``n / rate`` seconds; its caller sleeps once the bytes have moved. ``clock``
    (seconds) and ``sleep`` are the functions of time used for that. ``system`` has the calls of the system,
    for tests.

    ``ranks`` of one machine share the files, and unwritten bytes are zero; if a transfer fails on one rank,
    all raise. For them, the constructor and `allocate` are collective calls, and raise RanksError for a
    failure on another rank of any machine. Files that are not ``shared`` are for this rank alone.

    Raises DiskError for a folder that cannot be used, before anything is allocated, and ValueError for
    options out of range.
    """

    def __init__(
        self,
        folders: Sequence[str | os.PathLike[str]],
        *,
        direct_io: str = "prefer",
        in_flight: int = IN_FLIGHT,
        block_bytes: int = BLOCK_BYTES,
        throttle: Mapping[Direction, float] | None = None,
        system: System | None = None,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
        ranks: Ranks | None = None,
        shared: bool = True,
    ) -> None:
        if not folders:
            raise ValueError("disk=[]: give one folder or more")
        if direct_io not in ("prefer", "require", "off"):
            raise ValueError(f"direct_io={direct_io!r}: give 'prefer', 'require' or 'off'")
        for name, value in (("in_flight", in_flight), ("block_bytes", block_bytes)):
            if value < 1:
                raise ValueError(f"{name}={value}: give 1 or more")
        for direction, rate in (throttle or {}).items():
            if not rate > 0:
                raise ValueError(f"throttle of {direction.name} is {rate}: give bytes per second above 0")
        self._throttle = dict(throttle or {})
        self._clock = clock
        self._sleep = sleep
        self._process = Process()
        self._lock = threading.Lock()
        self._transfers = itertools.count()
        self._uses: dict[Extent, _Use] = {}
        self._moved = dict.fromkeys(Direction, 0)
        #: the ranks that share the files, and those that get the error of a failed transfer
        self._ranks, self._told = (ranks or Ranks()) if shared else Ranks(), ranks or Ranks()
        with ExitStack() as opened:
            files = []

            def make() -> None:
                for folder in folders:
                    file = ScratchFile(folder, direct=direct_io != "off", system=system or System())
                    opened.callback(file.close)
                    files.append(file)
                if direct_io != "off":
                    _judge([file for file in files if file.why_not], refuse=direct_io == "require")

            def make_shared() -> tuple[list[int], list[tuple[int, str]]]:
                make()
                return [file.share() for file in files], [(file.alignment, file.why_not) for file in files]

            if self._ranks.is_alone:
                make()
            else:
                passed, found = self._ranks.share_files("making scratch files", make_shared)
                for folder, number, known in zip(folders, passed, found, strict=True):
                    if not self._ranks.is_first_of_machine:
                        file = ScratchFile(folder, system=system or System(), of_other=(number, *known))
                        opened.callback(file.close)
                        files.append(file)
            opened.pop_all()
        self.alignment = max(file.alignment for file in files)
        self._in_flight = in_flight
        self._block_bytes = self.padded(block_bytes)
        self._drives = [_Drive(file, _workers(number, in_flight)) for number, file in enumerate(files)]
        workers = [
            worker for drive in self._drives for several in drive.workers.values() for worker in several
        ]
        self._finalizer = weakref.finalize(self, _close, workers, files)
        self._finalizer.atexit = False  # a drive that hangs must not keep the process from ending

    @property
    def is_shared(self) -> bool:
        """Whether other processes write the extents too, so that an extent may be read before this process
        has written it."""
        return not self._ranks.is_alone

    def padded(self, nbytes: int) -> int:
        """Bytes of the buffer that a transfer of an extent of ``nbytes`` needs."""
        return -(-nbytes // self.alignment) * self.alignment

    def extent(self, nbytes: int) -> Extent:
        """A place for ``nbytes`` (above 0), to be used after the next `allocate`."""
        if nbytes < 1:
            raise ValueError(f"an extent of {nbytes} bytes: give 1 or more")
        self._check_open()
        padded = self.padded(nbytes)
        # the same number of pieces of the same size on each drive: all drives work until the end
        drives = len(self._drives)
        blocks = max(-(-padded // (self._block_bytes * drives)), PIECES_PER_THREAD * self._in_flight)
        count = min(blocks * drives, max(1, padded * LEAST_BLOCK // self._block_bytes))
        size = self.padded(-(-padded // count))
        # the drives with the least go first, for the remainder
        order = sorted(range(drives), key=lambda number: self._drives[number].planned)
        pieces = []
        for number, start in enumerate(range(0, padded, size)):
            drive = self._drives[order[number % drives]]
            piece = Piece(order[number % drives], drive.planned, start, min(size, padded - start))
            drive.planned += piece.nbytes
            pieces.append(piece)
        extent = Extent(nbytes, padded, tuple(pieces))
        self._uses[extent] = _Use(_State.WRITTEN if self.is_shared else _State.EMPTY)
        return extent

    def allocate(self) -> None:
        """Allocate all extents. If there is no room, raises DiskError, allocates nothing, and forgets the new
        extents."""
        self._check_open()
        before = [drive.file.nbytes for drive in self._drives]
        try:
            self._ranks.on_first_of_machine("allocating scratch files", self._allocate)
            for one in self._drives:
                one.file.nbytes = one.planned
        except BaseException:
            for one, nbytes in zip(self._drives, before, strict=True):
                one.planned = nbytes
                if one.file.nbytes > nbytes:
                    one.file.shrink(nbytes)
            for extent in [*self._uses]:
                if not self._is_allocated(extent):
                    del self._uses[extent]
            raise

    def _allocate(self) -> None:
        for drive, needed in self._growth().items():
            if needed > (free := self._drives[drive].file.free()):
                raise too_full(self._drives[drive].file.folder, needed, free)
        for one in self._drives:
            one.file.allocate(one.planned)

    def read(self, extent: Extent, into: torch.Tensor, part: range | None = None) -> None:
        """Fill the first ``extent.padded_bytes`` of ``into``, flat uint8, whose memory begins at a multiple
        of ``alignment``. Returns when they have been read. With ``part``, those bytes of the extent, which
        begin and end at multiples of ``alignment``, go to the first bytes of ``into``, and no others move.

        Raises DiskError if the disk failed, ValueError for a buffer that does not fit, and RuntimeError for
        an extent that was never written or is being written, in a forked process, and once closed.
        """
        self._transfer(extent, into, Direction.READ, part)

    def write(self, extent: Extent, source: torch.Tensor, part: range | None = None) -> None:
        """Write the first ``extent.padded_bytes`` of ``source``, or the ``part`` of the extent; as `read`.
        After an error the extent cannot be read until a write of the whole succeeds, and a part of it cannot
        be written."""
        self._transfer(extent, source, Direction.WRITE, part)

    @property
    def bytes_read(self) -> int:
        """Bytes moved by reads, with the padding."""
        return self._moved[Direction.READ]

    @property
    def bytes_written(self) -> int:
        """Bytes moved by writes, with the padding."""
        return self._moved[Direction.WRITE]

    @property
    def allocated_bytes(self) -> int:
        """Bytes allocated in all folders."""
        return sum(drive.file.nbytes for drive in self._drives)

    def cached_bytes(self) -> int:
        """Bytes of the files in the page cache: 0 with direct I/O."""
        return sum(drive.file.cached_bytes() for drive in self._drives)

    def close(self) -> None:
        """End the threads after their running transfers, and free the bytes. May be called again; in a forked
        process it does nothing."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()

    def _growth(self) -> dict[int, int]:
        """Bytes to allocate, by a drive of each file system."""
        growth: dict[int, int] = {}
        first: dict[int, int] = {}
        for number, drive in enumerate(self._drives):
            number = first.setdefault(drive.file.device, number)
            growth[number] = growth.get(number, 0) + drive.planned - drive.file.nbytes
        return growth

    def _check_open(self) -> None:
        self._process.check()
        if not self._finalizer.alive:
            raise RuntimeError("the scratch files are closed: the model that they belong to was unwrapped")

    def _transfer(
        self, extent: Extent, buffer: torch.Tensor, direction: Direction, part: range | None
    ) -> None:
        self._check_open()
        moved = range(extent.padded_bytes) if part is None else part
        end = self._clock() + len(moved) / self._throttle.get(direction, float("inf"))
        memory = self._memory(extent, buffer, moved)
        with self._lock:
            use = self._begin(extent, direction, whole=len(moved) == extent.padded_bytes)
        succeeded = False
        try:
            self._move(extent, memory, direction, moved)
            succeeded = True
        except DiskError as error:
            self._told.tell(error)
            raise
        finally:
            with self._lock:
                if direction is Direction.READ:
                    use.reads -= 1
                else:
                    use.state = _State.WRITTEN if succeeded else _State.TORN
        # a sleep may end early
        while direction in self._throttle and (left := end - self._clock()) > 0:
            self._sleep(left)

    def _is_allocated(self, extent: Extent) -> bool:
        ends = ((self._drives[piece.file].file, piece.offset + piece.nbytes) for piece in extent.pieces)
        return all(end <= file.nbytes for file, end in ends)

    def _begin(self, extent: Extent, direction: Direction, *, whole: bool) -> _Use:
        use = self._uses.get(extent)
        if use is None:
            raise ValueError("this extent is of other scratch files")
        if not self._is_allocated(extent):
            raise RuntimeError("this extent is not allocated: call allocate() first")
        if direction is Direction.READ or not whole:
            if use.state is _State.TORN:
                raise DiskError(f"an extent of {extent.nbytes} bytes on disk is lost: {use.state.value}")
            if use.state is not _State.WRITTEN:
                what = (
                    f"{direction.value} of {'' if whole else 'a part of '}an extent of {extent.nbytes} bytes"
                )
                raise RuntimeError(f"a {what} on disk cannot be right: {use.state.value}")
        if direction is Direction.READ:
            use.reads += 1
        else:
            if use.reads or use.state is _State.WRITING:
                raise RuntimeError(
                    f"a write of an extent of {extent.nbytes} bytes on disk cannot be right: it is being "
                    f"{'read' if use.reads else 'written'}"
                )
            use.state = _State.WRITING
        return use

    def _memory(self, extent: Extent, buffer: torch.Tensor, moved: range) -> memoryview:
        if buffer.dtype is not torch.uint8 or buffer.dim() != 1 or not buffer.is_contiguous():
            raise ValueError(f"a buffer of {buffer.dtype}, shape {tuple(buffer.shape)}: give flat uint8")
        if not 0 <= moved.start < moved.stop <= extent.padded_bytes or any(
            edge % self.alignment for edge in (moved.start, moved.stop)
        ):
            raise ValueError(
                f"bytes {moved.start} to {moved.stop} of an extent of {extent.padded_bytes}: give bytes that "
                f"are in it, from one multiple of {self.alignment} to another"
            )
        if buffer.numel() < len(moved):
            raise ValueError(
                f"a buffer of {buffer.numel()} bytes for an extent of {extent.nbytes}, of which "
                f"{len(moved)} move, padding included: make it of so many bytes"
            )
        if buffer.data_ptr() % self.alignment:
            raise ValueError(
                f"the buffer does not begin at a multiple of {self.alignment} bytes: take one of "
                "streamer.backends.host_memory.mapped"
            )
        return buffer.numpy().data[: len(moved)]

    def _move(self, extent: Extent, memory: memoryview, direction: Direction, moved: range) -> None:
        """Move the ``moved`` bytes of each piece, and return when no thread moves any, even after an
        error."""

        def move(piece: Piece) -> None:
            file = self._drives[piece.file].file
            call = file.read if direction is Direction.READ else file.write
            start, stop = max(piece.start, moved.start), min(piece.start + piece.nbytes, moved.stop)
            call(memory[start - moved.start : stop - moved.start], piece.offset + start - piece.start)
            with self._lock:
                self._moved[direction] += stop - start

        pieces = [
            piece
            for piece in extent.pieces
            if piece.start < moved.stop and piece.start + piece.nbytes > moved.start
        ]
        run_all(
            [
                (
                    drive.workers[direction],
                    [partial(move, piece) for piece in pieces if piece.file == number],
                )
                for number, drive in enumerate(self._drives)
            ],
            # two transfers of one piece at the same time use different threads
            turn=next(self._transfers),
        )


class Disks:
    """The folders of scratch files, the frozen parameters that are in the user's files, and the memory that
    both are read into."""

    def __init__(
        self,
        folders: Sequence[str | os.PathLike[str]],
        scratch: Callable[..., Scratch] = Scratch,
        *,
        stored: Mapping[str, Pieces] | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        """``scratch`` creates scratch files in ``folders``, which may be empty if nothing is to be written.
        ``stored`` are parameters by name; ``ranks`` share all of it. Raises DiskError for a folder that
        cannot be used."""
        self.folders = folders
        self.may_write = bool(folders)
        self.stored = stored or {}
        self._scratch = scratch
        self._ranks = ranks or Ranks()
        if folders and ranks is None:
            scratch(folders).close()

    def with_stored(self, stored: Mapping[str, Pieces]) -> Disks:
        """The same folders, with these parameters ``stored`` in files."""
        return Disks(self.folders, self._scratch, stored=stored, ranks=self._ranks)

    def among(self, ranks: Ranks) -> Disks:
        """The same for ``ranks``, which share the scratch files. The folders were tested before."""
        return Disks(self.folders, self._scratch, stored=self.stored, ranks=ranks)

    def open(self, *, shared: bool = True) -> Scratch:
        """New scratch files, ``shared`` by the ranks of this machine (then a collective call), or for this
        rank alone."""
        return self._scratch(self.folders, ranks=self._ranks, shared=shared)

    def reader(self, between: torch.Tensor) -> StoredTensors:
        """The reader of the parameters in files, which uses ``between`` as a buffer."""
        return StoredTensors(between, ranks=self._ranks)

    @staticmethod
    def buffer(nbytes: int) -> torch.Tensor:
        """Memory that is not shared with forked processes."""
        return mapped(nbytes, in_forks=False)


def _judge(files: Sequence[ScratchFile], *, refuse: bool) -> None:
    """Warn, or raise DiskError, if ``files`` is not empty: these have no direct I/O."""
    if not files:
        return
    found = "; ".join(f"disk={file}: {file.why_not}" for file in files)
    if refuse:
        raise DiskError(f"{found}: give another folder", errno.EINVAL)
    warn(f"no direct I/O: {found}. Transfers go through the page cache, which is slower")


def _workers(number: int, in_flight: int) -> dict[Direction, list[Worker]]:
    return {
        direction: [
            Worker(Lane.HOST, name=f"disk{number}-{direction.value}-{index}") for index in range(in_flight)
        ]
        for direction in Direction
    }


def _close(workers: Sequence[Worker], files: Sequence[ScratchFile]) -> None:
    Worker.close_all(workers)
    for file in files:
        file.close()
