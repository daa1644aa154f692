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
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import torch

from streamer.backends.base import Process
from streamer.backends.direct_io import ALIGNMENT, ScratchFile, System
from streamer.backends.host_memory import mapped
from streamer.backends.ranks import Ranks
from streamer.backends.stored_tensors import Pieces, StoredTensors
from streamer.backends.thread import Job, run_all
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


@dataclass
class _Drive:
    """A folder's file and the threads that move its pieces."""

    file: ScratchFile
    threads: Mapping[Direction, ThreadPoolExecutor]
    planned: int = 0


class Scratch:
    """Extents in unnamed files, one file in each of ``folders``.

    Without ``direct_io``, or on a file system that lacks it (which causes one warning), transfers go through
    the page cache. ``in_flight`` pieces of at most ``block_bytes`` move at the same time for each drive and
    direction. ``system`` has the calls of the system, for tests.

    ``ranks`` of one machine share the files, and unwritten bytes are zero; if a transfer fails on one rank,
    all raise. For them, the constructor and `allocate` are collective calls, and raise RanksError for a
    failure on another rank of any machine. Files that are not ``shared`` are for this rank alone.

    Raises DiskError for a folder that cannot be used, before anything is allocated.
    """

    def __init__(
        self,
        folders: Sequence[str | os.PathLike[str]],
        *,
        direct_io: bool = True,
        in_flight: int = IN_FLIGHT,
        block_bytes: int = BLOCK_BYTES,
        system: System | None = None,
        ranks: Ranks | None = None,
        shared: bool = True,
    ) -> None:
        if not folders:
            raise ValueError("disk=[]: give one folder or more")
        self._process = Process()
        self._lock = threading.Lock()
        self._is_open = True
        #: extents with a failed last write
        self._torn: set[Extent] = set()
        self._moved = dict.fromkeys(Direction, 0)
        #: the ranks that share the files, and those that get the error of a failed transfer
        self._ranks, self._all_ranks = (ranks or Ranks()) if shared else Ranks(), ranks or Ranks()
        with ExitStack() as opened:
            files = list[ScratchFile]()

            def make() -> tuple[list[int], list[str]]:
                for folder in folders:
                    files.append(ScratchFile(folder, direct=direct_io, system=system or System()))
                    opened.callback(files[-1].close)
                if direct_io and (found := "; ".join(f"disk={f}: {f.why_not}" for f in files if f.why_not)):
                    warn(f"no direct I/O: {found}. Transfers go through the page cache, which is slower")
                return [file.fd for file in files], [file.why_not for file in files]

            numbers, reasons = self._ranks.share_files("making scratch files", make)
            if not self._ranks.is_first_of_machine:
                for folder, number, why_not in zip(folders, numbers, reasons, strict=True):
                    files.append(ScratchFile(folder, system=system or System(), of_other=(number, why_not)))
                    opened.callback(files[-1].close)
            if self.is_shared:
                for file in files:
                    file.share()
            opened.pop_all()
        self._in_flight = in_flight
        self._block_bytes = self.padded(block_bytes)
        self._drives = [_Drive(file, _threads(number, in_flight)) for number, file in enumerate(files)]

    @property
    def is_shared(self) -> bool:
        """Whether other processes write the extents too, so that an extent may be read before this process
        has written it."""
        return not self._ranks.is_alone

    def padded(self, nbytes: int) -> int:
        """Bytes of the buffer that a transfer of an extent of ``nbytes`` needs."""
        return -(-nbytes // ALIGNMENT) * ALIGNMENT

    def extent(self, nbytes: int) -> Extent:
        """A place for ``nbytes`` (above 0), to be used after the next `allocate`."""
        assert nbytes > 0
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
        return Extent(nbytes, padded, tuple(pieces))

    def allocate(self) -> None:
        """Allocate all extents. If there is no room, raises DiskError, allocates nothing, and the new
        extents are of no use."""
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
            raise

    def _allocate(self) -> None:
        for one in self._drives:
            one.file.allocate(one.planned)

    def read(self, extent: Extent, into: torch.Tensor, part: range | None = None) -> None:
        """Fill the first ``extent.padded_bytes`` of ``into``, flat uint8, whose memory begins at a multiple
        of `ALIGNMENT`. Returns when they have been read. With ``part``, those bytes of the extent, which
        begin and end at multiples of `ALIGNMENT`, go to the first bytes of ``into``, and no others move.

        Raises DiskError if the disk failed, and RuntimeError in a forked process and once closed.
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
        if self._process.is_this() and self._is_open:
            self._is_open = False
            for drive in self._drives:
                for threads in drive.threads.values():
                    threads.shutdown()
                drive.file.close()

    def _check_open(self) -> None:
        self._process.check()
        if not self._is_open:
            raise RuntimeError("the scratch files are closed: the model that they belong to was unwrapped")

    def _transfer(
        self, extent: Extent, buffer: torch.Tensor, direction: Direction, part: range | None
    ) -> None:
        self._check_open()
        moved = range(extent.padded_bytes) if part is None else part
        is_whole = len(moved) == extent.padded_bytes
        assert buffer.dtype is torch.uint8 and buffer.numel() >= len(moved)
        assert not any(place % ALIGNMENT for place in (buffer.data_ptr(), moved.start, moved.stop))
        if extent in self._torn and (direction is Direction.READ or not is_whole):
            raise DiskError(
                f"an extent of {extent.nbytes} bytes on disk is lost: the last write of it failed"
            )
        if direction is Direction.WRITE:
            self._torn.add(extent)
        memory = buffer.numpy().data[: len(moved)]
        threads = [drive.threads[direction] for drive in self._drives]
        jobs: list[Job] = [
            (threads[piece.file], partial(self._move, piece, memory, direction, moved))
            for piece in extent.pieces
            if piece.start < moved.stop and piece.start + piece.nbytes > moved.start
        ]
        try:
            run_all(jobs)
        except DiskError as error:
            self._all_ranks.tell(error)
            raise
        if direction is Direction.WRITE:
            self._torn.discard(extent)

    def _move(self, piece: Piece, memory: memoryview, direction: Direction, moved: range) -> None:
        """Move those bytes of ``piece`` that are ``moved``."""
        file = self._drives[piece.file].file
        call = file.read if direction is Direction.READ else file.write
        start, stop = max(piece.start, moved.start), min(piece.start + piece.nbytes, moved.stop)
        call(memory[start - moved.start : stop - moved.start], piece.offset + start - piece.start)
        with self._lock:
            self._moved[direction] += stop - start


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

    def buffer(self, nbytes: int) -> torch.Tensor:
        """Memory that is not shared with forked processes."""
        return mapped(nbytes, in_forks=False)


def _threads(number: int, count: int) -> dict[Direction, ThreadPoolExecutor]:
    return {
        direction: ThreadPoolExecutor(count, f"streamer-disk{number}-{direction.value}")
        for direction in Direction
    }
