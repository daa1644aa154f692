"""Scratch storage on disks: what is read is what was written, or an error; nothing is left behind."""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import re
import select
import signal
import stat
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from mmap import mmap
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from streamer.backends.direct_io import ALIGNMENT, MOST_STUCK, System
from streamer.backends.disk import BLOCK_BYTES, Direction, Extent, Scratch
from streamer.backends.host_memory import mapped
from streamer.errors import DiskError
from tests.on_disk import folder
from tests.random_cases import examples

__all__ = ["folder"]

HOME = Path(__file__).parent.parent.parent
#: Seconds after which something that should happen at once is said not to happen.
PATIENCE = 20.0
SMALL = 64 << 10
POISON = 0xA5


@contextmanager
def opened(*args: Any, **options: Any) -> Iterator[Scratch]:
    scratch = Scratch(*args, **options)
    try:
        yield scratch
    finally:
        scratch.close()


def buffer_of(scratch: Scratch, nbytes: int, seed: int | None = None) -> torch.Tensor:
    """Memory for an extent: random bytes of ``seed``, or poison."""
    buffer = mapped(scratch.padded(nbytes), in_forks=False)
    if seed is None:
        return buffer.fill_(POISON)
    return buffer.random_(0, 256, generator=torch.Generator().manual_seed(seed))


def descriptors(folder: Path) -> list[int]:
    """The open files of this process that lie in ``folder`` and have no name."""
    found = []
    for link in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(link)
        except OSError:  # the one that lists
            continue
        if target.startswith(f"{folder}/") and target.endswith(" (deleted)"):
            found.append(int(link.name))
    return found


class Disk:
    """The system's calls, with something done before each transfer."""

    def __init__(self, before: Callable[[str, int, int], object] = lambda verb, fd, offset: None) -> None:
        self.before = before
        self.calls: list[tuple[str, int, int]] = []

    def system(self) -> System:
        return System(preadv=self.preadv, pwritev=self.pwritev)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self.calls.append(("read", fd, offset))
        self.before("read", fd, offset)
        return os.preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self.calls.append(("write", fd, offset))
        self.before("write", fd, offset)
        return os.pwritev(fd, buffers, offset)


# what is read is what was written


@pytest.mark.parametrize(
    ("direct_io", "drives", "in_flight"), [(True, 1, 4), (True, 3, 1), (False, 2, 4), (False, 1, 1)]
)
def test_what_is_read_is_what_was_written(folder: Path, direct_io: bool, drives: int, in_flight: int) -> None:
    sizes = [1, 4095, 4096, 4097, SMALL, 3 * SMALL + 5, 1 << 20, (5 << 20) + 1]
    options = {"direct_io": direct_io, "in_flight": in_flight, "block_bytes": 1 << 20}
    with opened([folder] * drives, **options) as scratch:
        extents = [scratch.extent(nbytes) for nbytes in sizes]
        scratch.allocate()
        for turn in range(2):  # over what is there already, too
            for seed, extent in enumerate(extents):
                scratch.write(extent, buffer_of(scratch, extent.nbytes, seed + turn))
            for seed, extent in reversed([*enumerate(extents)]):
                into = buffer_of(scratch, extent.nbytes)
                scratch.read(extent, into)
                assert torch.equal(into, buffer_of(scratch, extent.nbytes, seed + turn)), extent
        moved = sum(scratch.padded(nbytes) for nbytes in sizes)
        assert (scratch.bytes_read, scratch.bytes_written) == (2 * moved, 2 * moved)
        assert scratch.allocated_bytes == moved


@examples(20)
@given(
    blocks=st.integers(1, 12),
    drives=st.integers(1, 3),
    turns=st.lists(st.tuples(st.sampled_from(Direction), st.integers(0, 11), st.integers(1, 12)), max_size=8),
)
def test_parts_of_an_extent_move_alone(
    folder: Path, blocks: int, drives: int, turns: list[tuple[Direction, int, int]]
) -> None:
    with opened([folder] * drives, in_flight=2, block_bytes=2 * ALIGNMENT, direct_io=False) as scratch:
        extent, other = scratch.extent(blocks * ALIGNMENT - 1), scratch.extent(ALIGNMENT)
        scratch.allocate()
        expected, beside = buffer_of(scratch, extent.nbytes, 1), buffer_of(scratch, ALIGNMENT, 2)
        scratch.write(extent, expected)
        scratch.write(other, beside)
        moved = scratch.bytes_written
        for seed, (direction, first, count) in enumerate(turns):
            start = first % blocks * ALIGNMENT
            part = range(start, min(start + count * ALIGNMENT, blocks * ALIGNMENT))
            buffer = buffer_of(scratch, len(part), seed + 3 if direction is Direction.WRITE else None)
            if direction is Direction.WRITE:
                expected[part.start : part.stop] = buffer
                scratch.write(extent, buffer, part)
            else:
                scratch.read(extent, buffer, part)
                assert torch.equal(buffer, expected[part.start : part.stop])
            moved += len(part)
        assert scratch.bytes_read + scratch.bytes_written == moved
        for each, values in ((extent, expected), (other, beside)):
            into = buffer_of(scratch, each.nbytes)
            scratch.read(each, into)
            assert torch.equal(into, values)


def test_a_part_is_of_what_is_there(folder: Path) -> None:
    fails = [False]

    def before(verb: str, fd: int, offset: int) -> None:
        if fails[0]:
            raise OSError(errno.EIO, "broken")

    with opened([folder], system=Disk(before).system()) as scratch:
        extent, block = scratch.extent(4 * ALIGNMENT), buffer_of(scratch, ALIGNMENT, 1)
        scratch.allocate()
        scratch.write(extent, buffer_of(scratch, extent.nbytes, 2))
        fails[0] = True
        with pytest.raises(DiskError, match="broken"):
            scratch.write(extent, block, range(ALIGNMENT))
        fails[0] = False
        # nobody knows what a write that failed has left
        with pytest.raises(DiskError, match="is lost: the last write of it failed"):
            scratch.write(extent, block, range(ALIGNMENT))
        with pytest.raises(DiskError, match="is lost: the last write of it failed"):
            scratch.read(extent, block, range(ALIGNMENT, 2 * ALIGNMENT))
        scratch.write(extent, buffer_of(scratch, extent.nbytes, 3))
        scratch.read(extent, block, range(ALIGNMENT))
        assert torch.equal(block, buffer_of(scratch, extent.nbytes, 3)[:ALIGNMENT])


def test_a_transfer_uses_both_drives_at_once(folder: Path) -> None:
    both = threading.Barrier(2)
    disk = Disk()
    folders = [folder / "one", folder / "two"]
    for path in folders:
        path.mkdir()
    with opened(folders, in_flight=1, system=disk.system()) as scratch:
        extent = scratch.extent(4 * BLOCK_BYTES)
        scratch.allocate()
        assert [piece.file for piece in extent.pieces] == [0, 1, 0, 1]
        disk.calls.clear()
        # a call returns only when there is one on each drive
        disk.before = lambda verb, fd, offset: both.wait(PATIENCE)
        scratch.write(extent, buffer_of(scratch, extent.nbytes, 1))
        into = buffer_of(scratch, extent.nbytes)
        scratch.read(extent, into)
        assert torch.equal(into, buffer_of(scratch, extent.nbytes, 1))
        assert len({fd for _, fd, _ in disk.calls}) == 2
        assert len(disk.calls) == 8


def test_a_read_does_not_queue_behind_a_write(folder: Path) -> None:
    gate = threading.Event()
    disk = Disk()
    with opened([folder], in_flight=1, system=disk.system()) as scratch:
        one, other = scratch.extent(SMALL), scratch.extent(SMALL)
        scratch.allocate()
        scratch.write(one, buffer_of(scratch, SMALL, 1))
        disk.before = lambda verb, fd, offset: verb == "read" or gate.wait(PATIENCE)
        writing = threading.Thread(target=scratch.write, args=(other, buffer_of(scratch, SMALL, 2)))
        writing.start()
        into = buffer_of(scratch, SMALL)
        scratch.read(one, into)  # would wait for ever
        assert writing.is_alive()
        assert torch.equal(into, buffer_of(scratch, SMALL, 1))
        gate.set()
        writing.join()


# nothing is left behind


def cannot_be_unnamed(path: str, flags: int, mode: int) -> int:
    if flags & os.O_TMPFILE == os.O_TMPFILE:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
    return os.open(path, flags, mode)


@pytest.mark.parametrize("open_", [os.open, cannot_be_unnamed])
def test_the_file_has_no_name_and_takes_its_bytes_at_once(
    folder: Path, open_: Callable[[str, int, int], int]
) -> None:
    home = folder / open_.__name__
    home.mkdir()
    with opened([home], system=System(open=open_)) as scratch:
        scratch.extent(32 << 20)
        scratch.allocate()
        assert list(home.iterdir()) == []
        (fd,) = descriptors(home)
        found = os.fstat(fd)
        assert found.st_nlink == 0
        assert stat.S_IMODE(found.st_mode) == 0o600
        assert found.st_size == 32 << 20
        assert found.st_blocks * 512 >= 32 << 20
        assert not os.get_inheritable(fd)
        assert fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT
        # as a forked data loader would
        held = os.dup(fd)
    assert os.fstat(held).st_blocks == 0, "closing did not free what another process has open"
    os.close(held)
    assert descriptors(home) == []
    assert list(home.iterdir()) == []


# bad folders, full disks


def test_a_disk_that_is_too_full_is_said_before_anything_is_allocated(folder: Path) -> None:
    disk: list[tuple[int, int, int]] = []

    def allocate(fd: int, offset: int, nbytes: int) -> None:
        disk.append((fd, offset, nbytes))
        os.posix_fallocate(fd, offset, nbytes)

    with opened([folder], system=System(allocate=allocate)) as scratch:
        disk.clear()
        free = os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize
        scratch.extent(free + (free >> 1))
        with pytest.raises(DiskError, match=r"has no room: (\d+) bytes \(.* GiB\) are needed") as raised:
            scratch.allocate()
        message = str(raised.value)
        assert raised.value.errno == errno.ENOSPC
        asked, told = map(int, re.findall(r"(\d+) bytes", message))
        assert asked == scratch.padded(free + (free >> 1))
        assert told < asked
        assert disk == []


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (errno.ENOSPC, r"has no room: 1048576 bytes .* free space"),
        (errno.EFBIG, r"allocating 1048576 bytes at offset 65536 .*\(File too large\): give another folder"),
    ],
)
def test_what_cannot_be_allocated_changes_nothing(folder: Path, number: int, message: str) -> None:
    """As when another process takes the room in that moment."""
    fails = False

    def allocate(fd: int, offset: int, nbytes: int) -> None:
        os.posix_fallocate(fd, offset, nbytes)
        if fails and nbytes == 1 << 20 and fd == max(descriptors(folder)):
            raise OSError(number, os.strerror(number))

    with opened([folder, folder], system=System(allocate=allocate)) as scratch:
        one = scratch.extent(SMALL)
        other = scratch.extent(SMALL)
        scratch.allocate()
        scratch.write(one, buffer_of(scratch, SMALL, 1))
        scratch.extent(2 << 20)
        fails = True
        with pytest.raises(DiskError, match=message) as raised:
            scratch.allocate()
        assert raised.value.errno == number
        assert scratch.allocated_bytes == 2 * SMALL
        assert {os.fstat(fd).st_size for fd in descriptors(folder)} == {SMALL}
        # what was there is there
        into = buffer_of(scratch, SMALL)
        scratch.read(one, into)
        assert torch.equal(into, buffer_of(scratch, SMALL, 1))
        scratch.write(other, into)
        # others have the place of what was refused
        fails = False
        scratch.extent(1 << 20)
        scratch.allocate()
        assert scratch.allocated_bytes == 2 * SMALL + (1 << 20)


# direct I/O and the page cache


def test_direct_io_leaves_the_page_cache_alone(folder: Path) -> None:
    with opened([folder]) as scratch:
        extent = scratch.extent(64 << 20)
        scratch.allocate()
        assert scratch.cached_bytes() == 0
        scratch.write(extent, buffer_of(scratch, extent.nbytes, 1))
        assert scratch.cached_bytes() == 0
        scratch.read(extent, buffer_of(scratch, extent.nbytes))
        assert scratch.cached_bytes() == 0
        # the same bytes read in the ordinary way are seen
        (fd,) = [fd for fd in descriptors(folder) if os.fstat(fd).st_size == 64 << 20]
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT)
        os.pread(fd, 16 << 20, 0)
        assert 16 << 20 <= scratch.cached_bytes() < 64 << 20


@pytest.mark.parametrize("direction", Direction)
def test_without_direct_io_pages_are_dropped(folder: Path, direction: Direction) -> None:
    with opened([folder], direct_io=False, in_flight=2) as scratch:
        extent = scratch.extent(64 << 20)
        scratch.allocate()
        scratch.write(extent, buffer_of(scratch, extent.nbytes, 1))
        if direction is Direction.READ:
            scratch.read(extent, buffer_of(scratch, extent.nbytes))
        # the system reads ahead of a piece, into one that was dropped
        assert scratch.cached_bytes() <= 2 * BLOCK_BYTES


def refused(fd: int) -> None:
    raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))


def refused_later(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
    if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
    return os.pwritev(fd, buffers, offset)


#: File systems without direct I/O, and what is said of them.
WITHOUT = {
    "refuses": (System(set_direct=refused), r"refuses direct I/O"),
    "refuses at the first write": (System(pwritev=refused_later), r"refuses direct I/O"),
    "accepts and lies": (System(set_direct=lambda fd: None), r"puts direct I/O into the page cache"),
}


@pytest.mark.parametrize("kind", WITHOUT)
def test_a_file_system_without_direct_io_is_said_once(folder: Path, kind: str) -> None:
    system, message = WITHOUT[kind]
    with pytest.warns(UserWarning, match=rf"^no direct I/O: disk={folder}: .*{message}") as warned:
        scratch = Scratch([folder, folder], system=system)
    assert len(warned) == 1
    assert "\n" not in str(warned[0].message)
    assert warned[0].filename == __file__
    extent = scratch.extent(SMALL)
    scratch.allocate()
    scratch.write(extent, buffer_of(scratch, SMALL, 1))
    into = buffer_of(scratch, SMALL)
    scratch.read(extent, into)
    assert torch.equal(into, buffer_of(scratch, SMALL, 1))
    assert scratch.cached_bytes() == 0
    scratch.close()
    with opened([folder], system=system, direct_io=False):
        pass
    assert descriptors(folder) == []


def test_a_failed_trial_is_an_error_of_the_disk(folder: Path) -> None:
    def fails(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with pytest.raises(DiskError, match=r"writing 4096 bytes at offset 0 .*Input/output error"):
        Scratch([folder], system=System(pwritev=fails))
    gc.collect()
    assert descriptors(folder) == []


# faults


@dataclass(frozen=True)
class Fault:
    """What happens in one transfer: ``number`` is raised, or ``part`` of its bytes are moved."""

    number: int = 0
    part: float = 1.0


@dataclass
class Faulty:
    """A drive whose transfers meet ``faults`` in turn, once ``armed``, and none after them."""

    faults: list[Fault] = field(default_factory=list)
    armed: bool = False
    met: list[Fault] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def system(self) -> System:
        return System(preadv=self.preadv, pwritev=self.pwritev)

    def next(self) -> Fault:
        with self.lock:
            fault = self.faults.pop(0) if self.armed and self.faults else Fault()
            self.met.append(fault)
        if fault.number:
            raise OSError(fault.number, os.strerror(fault.number))
        return fault

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        (memory,) = buffers
        count = int(self.next().part * len(memory))
        if count == len(memory):
            return os.preadv(fd, buffers, offset)
        with mmap(-1, -(-max(count, 1) // ALIGNMENT) * ALIGNMENT) as whole:
            os.preadv(fd, [whole], offset)
            memory[:count] = whole[:count]
        return count

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        (memory,) = buffers
        count = int(self.next().part * len(memory))
        if count == len(memory):
            return os.pwritev(fd, buffers, offset)
        with mmap(-1, -(-max(count, 1) // ALIGNMENT) * ALIGNMENT) as whole:
            os.preadv(fd, [whole], offset)
            whole[:count] = memory[:count]
            os.pwritev(fd, [whole], offset)
        return count


FAULTS = st.one_of(
    st.just(Fault()),
    st.builds(Fault, number=st.sampled_from([errno.EINTR, errno.EINTR, errno.EIO, errno.ENOSPC])),
    st.builds(Fault, part=st.floats(0, 0.999)),
)


@examples(60)
@given(
    faults=st.lists(FAULTS, max_size=40),
    sizes=st.lists(st.integers(1, 30 * ALIGNMENT), min_size=1, max_size=4),
    drives=st.integers(1, 2),
    in_flight=st.integers(1, 3),
    direct_io=st.booleans(),
    turns=st.lists(st.tuples(st.sampled_from(Direction), st.integers(0, 3)), max_size=12),
)
def test_faults_never_give_a_wrong_byte(
    folder: Path,
    faults: list[Fault],
    sizes: list[int],
    drives: int,
    in_flight: int,
    direct_io: bool,
    turns: list[tuple[Direction, int]],
) -> None:
    disk = Faulty(list(faults))
    options = {"direct_io": direct_io, "in_flight": in_flight, "block_bytes": 3 * ALIGNMENT}
    with opened([folder] * drives, system=disk.system(), **options) as scratch:
        extents = [scratch.extent(nbytes) for nbytes in sizes]
        scratch.allocate()
        disk.armed = True
        #: by extent, what it holds: nothing yet, the seed of its bytes, or None after a failed write
        holds: dict[Extent, int | None] = {}
        for seed, (direction, number) in enumerate(turns):
            extent = extents[number % len(extents)]
            met = len(disk.met)
            if direction is Direction.WRITE:
                holds[extent] = seed
                source = buffer_of(scratch, extent.nbytes, seed)
                try:
                    scratch.write(extent, source)
                except DiskError as error:
                    assert_told(error, folder, "writing", disk.met[met:])
                    holds[extent] = None
                assert torch.equal(source, buffer_of(scratch, extent.nbytes, seed)), "a write changed it"
                continue
            into = buffer_of(scratch, extent.nbytes)
            if extent not in holds:
                continue
            if holds[extent] is None:
                with pytest.raises(DiskError, match="the last write of it failed"):
                    scratch.read(extent, into)
                assert torch.equal(into, buffer_of(scratch, extent.nbytes))
                continue
            try:
                scratch.read(extent, into)
            except DiskError as error:
                assert_told(error, folder, "reading", disk.met[met:])
            else:
                assert torch.equal(into, buffer_of(scratch, extent.nbytes, holds[extent]))
        # the drive is well again, and so are the files
        disk.armed = False
        for seed, extent in enumerate(extents):
            scratch.write(extent, buffer_of(scratch, extent.nbytes, seed))
        for seed, extent in enumerate(extents):
            into = buffer_of(scratch, extent.nbytes)
            scratch.read(extent, into)
            assert torch.equal(into, buffer_of(scratch, extent.nbytes, seed))


def assert_told(error: DiskError, folder: Path, verb: str, met: list[Fault]) -> None:
    """An error has folder, bytes, offset and what to do, and a fault was met that explains it."""
    assert re.fullmatch(
        rf"disk={folder}: {verb} \d+ bytes at offset \d+ of its scratch file failed \(.*\): .+", str(error)
    ), error
    numbers = {fault.number for fault in met} - {0, errno.EINTR}
    if error.errno in numbers:
        return
    assert error.errno == errno.EIO
    assert sum(fault.part < 1 for fault in met) >= MOST_STUCK


@pytest.mark.parametrize(
    ("number", "fix", "direction"),
    [
        (errno.EIO, "the drive failed, 'dmesg' has more of it", Direction.READ),
        (errno.ENOSPC, "free space on its file system", Direction.WRITE),
        (errno.ENODEV, "the drive is gone", Direction.READ),
        (errno.EINVAL, "no such direct I/O: give another folder", Direction.WRITE),
    ],
)
def test_an_error_in_mid_transfer_is_one_line(
    folder: Path, direction: Direction, number: int, fix: str
) -> None:
    disk = Faulty()
    with opened([folder], system=disk.system(), in_flight=1, block_bytes=SMALL) as scratch:
        scratch.extent(SMALL)
        extent = scratch.extent(4 * SMALL)
        scratch.allocate()
        buffer = buffer_of(scratch, extent.nbytes, 1)
        scratch.write(extent, buffer)
        disk.armed, disk.faults, disk.met = True, [Fault(), Fault(part=0.5), Fault(number=number)], []
        transfer = scratch.read if direction is Direction.READ else scratch.write
        with pytest.raises(DiskError) as raised:
            transfer(extent, buffer)
        verb = "reading" if direction is Direction.READ else "writing"
        assert str(raised.value).startswith(
            f"disk={folder}: {verb} {SMALL // 2} bytes at offset {2 * SMALL + SMALL // 2} of its scratch "
            f"file failed ({os.strerror(number)}): "
        )
        assert "\n" not in str(raised.value)
        assert fix in str(raised.value)
        assert raised.value.errno == number
        assert isinstance(raised.value.__cause__, OSError)
        assert len(disk.met) >= 3


def test_the_drive_is_at_rest_when_a_transfer_has_failed(folder: Path) -> None:
    """The other threads have let go of the buffer."""
    begun, started, ended = threading.Semaphore(0), list[int](), list[int]()
    gate = threading.Event()
    fails = False

    def pwritev(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if not fails:
            return os.pwritev(fd, buffers, offset)
        if offset == 0:
            begun.acquire(timeout=PATIENCE)
            gate.set()
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        started.append(offset)
        begun.release()
        gate.wait(PATIENCE)
        moved = os.pwritev(fd, buffers, offset)
        ended.append(offset)
        return moved

    with opened([folder], in_flight=2, system=System(pwritev=pwritev)) as scratch:
        extent = scratch.extent(8 * BLOCK_BYTES)
        scratch.allocate()
        buffer = buffer_of(scratch, extent.nbytes, 1)
        fails = True
        with pytest.raises(DiskError, match="at offset 0 "):
            scratch.write(extent, buffer)
        assert sorted(started) == sorted(ended)
        assert len(started) < 7, "it went on to the end"


def test_ctrl_c_waits_for_what_is_moving(folder: Path) -> None:
    started: list[int] = []
    ended: list[int] = []
    gate = threading.Event()

    def interrupt(number: int, frame: object) -> None:
        if not gate.is_set():
            gate.set()
            raise KeyboardInterrupt

    def preadv(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if not ready:
            return os.preadv(fd, buffers, offset)
        started.append(offset)
        # a signal that comes just before the main thread waits for a lock is handled after that wait
        while not gate.wait(0.05):
            if len(started) == 2:
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        moved = os.preadv(fd, buffers, offset)
        ended.append(offset)
        return moved

    ready = False
    handler = signal.signal(signal.SIGINT, interrupt)
    try:
        with opened([folder], in_flight=2, block_bytes=SMALL, system=System(preadv=preadv)) as scratch:
            extent = scratch.extent(16 * SMALL)
            scratch.allocate()
            scratch.write(extent, buffer_of(scratch, extent.nbytes, 1))
            ready = True
            with pytest.raises(KeyboardInterrupt):
                scratch.read(extent, buffer_of(scratch, extent.nbytes))
            assert sorted(started) == sorted(ended)
            assert len(started) < 16, "it went on to the end"
            ready = False
            into = buffer_of(scratch, extent.nbytes)
            scratch.read(extent, into)
            assert torch.equal(into, buffer_of(scratch, extent.nbytes, 1))
    finally:
        signal.signal(signal.SIGINT, handler)


def test_no_folder_is_said() -> None:
    with pytest.raises(ValueError, match=r"disk=\[\]: give one folder or more"):
        Scratch([])


def test_a_forked_process_cannot_use_it_and_does_no_harm(folder: Path) -> None:
    with opened([folder]) as scratch:
        extent = scratch.extent(SMALL)
        scratch.allocate()
        scratch.write(extent, buffer_of(scratch, SMALL, 1))
        buffer = buffer_of(scratch, SMALL)
        reader, writer = os.pipe()
        with warnings.catch_warnings():
            # Python warns of forks beside threads
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if not child:
            said = []
            for call in (scratch.read, scratch.write, lambda *_: scratch.allocate()):
                try:
                    call(extent, buffer)
                except RuntimeError as error:
                    said.append(str(error))
            scratch.close()
            del scratch
            gc.collect()
            os.write(writer, "\n".join(said).encode())
            os._exit(0)
        os.close(writer)
        assert select.select([reader], [], [], PATIENCE)[0], "the child hangs"
        said = os.read(reader, 10_000).decode().split("\n")
        os.close(reader)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert len(said) == 3
        assert all("this process was forked" in line for line in said)
        scratch.read(extent, buffer)
        assert torch.equal(buffer, buffer_of(scratch, SMALL, 1))
        assert scratch.allocated_bytes == os.fstat(descriptors(folder)[0]).st_size == SMALL


ELSEWHERE = """
import os, sys
import numba, psutil, torch, tqdm
sys.platform = "darwin"
sys.modules["fcntl"] = None
for name in ("posix_fallocate", "posix_fadvise", "preadv", "pwritev", "O_DIRECT"):
    delattr(os, name)
import streamer
model = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(4, 4)))
try:
    streamer.wrap(model, layers="0", device="cpu", disk=".")
except streamer.DiskError as error:
    print(error)
streamer.unwrap(streamer.wrap(model, layers="0", device="cpu"))
"""


def test_elsewhere_than_on_linux_all_but_the_disk_works() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", ELSEWHERE],
        capture_output=True,
        text=True,
        cwd=HOME,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    needs = "reading and writing past the page cache needs Linux, and this is darwin: go without a disk"
    assert done.stdout == f"disk=.: {needs}\n"
