"""One scratch file: it has no name, is allocated before it is used, and bypasses the page cache.

The file is opened with O_TMPFILE, so no folder ever lists it: when the process ends, however it ends, the
kernel frees the file. A file system that lacks O_TMPFILE gets a named file that is unlinked at once.

Direct I/O (O_DIRECT) moves bytes between a drive and the caller's memory. Some file systems refuse it, and
some accept the flag but still use the page cache (tmpfs keeps its files only there). So a new file is
tested: one block is written, and mincore(2) tells whether it is in the page cache. Without direct I/O every
transfer goes through the page cache and is then dropped from it: fdatasync(2) waits until the bytes are on
the drive, posix_fadvise(2) drops the pages. That costs a copy by the processor, and a write no longer
overlaps the drive's work with the copy of its next block.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
import tempfile
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from streamer.backends.base import Process
from streamer.errors import DiskError, exact_amount

if sys.platform == "linux":
    import fcntl

#: Addresses, offsets and sizes are multiples of this: a page, a block of ext4 and XFS. Drives may accept less
#: (512 bytes), but ext4 then locks the whole file for a write of part of a block.
ALIGNMENT = 4096

#: A transfer fails after this many calls in succession that moved too little to continue from.
MOST_STUCK = 16

#: The remedy for an error of a transfer.
_FIXES = {
    errno.ENOSPC: "free space on its file system, or give another folder",
    errno.EDQUOT: "raise the quota, or give another folder",
    errno.EIO: "the drive failed, 'dmesg' has more of it: give a folder on another drive",
    errno.ENODEV: "the drive is gone: give a folder on another one",
    errno.ENXIO: "the drive is gone: give a folder on another one",
    errno.ESTALE: "the file system is gone: mount it again, or give another folder",
    errno.EINVAL: "the file system takes no such direct I/O: give another folder",
}

Transfer = Callable[[int, Sequence[memoryview], int], int]


def set_direct(fd: int) -> None:
    """Turn direct I/O on; raises OSError if the file system refuses it."""
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)


def _absent(*_: object) -> Any:
    raise AssertionError("files are not opened where the system lacks this call")


@dataclass(frozen=True)
class System:
    """The system calls that a scratch file uses; tests replace them to inject faults."""

    open: Callable[[str, int, int], int] = os.open
    allocate: Callable[[int, int, int], None] = getattr(os, "posix_fallocate", _absent)
    preadv: Transfer = getattr(os, "preadv", _absent)
    pwritev: Transfer = getattr(os, "pwritev", _absent)
    set_direct: Callable[[int], None] = set_direct


def check_system(what: object) -> None:
    """Raise DiskError, naming the option ``what``, if the system lacks the calls used here."""
    if sys.platform != "linux":
        raise DiskError(
            f"{what}: reading and writing past the page cache needs Linux, and this is {sys.platform}: go "
            "without a disk",
            errno.ENOSYS,
        )


class ScratchFile:
    """A file without a name in ``folder``, which grows by `allocate`. Its bytes are freed when it is closed
    or garbage collected, or when its process ends.

    With ``direct`` the file bypasses the page cache if its file system supports that: ``why_not`` is then "",
    else a short reason. Raises DiskError if no file can be created in the folder.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        direct: bool = True,
        system: System,
        of_other: tuple[int, str] | None = None,
    ) -> None:
        """``of_other`` is a file that another process has created: its descriptor in this process, and the
        ``why_not`` found there."""
        self.folder = Path(folder)
        check_system(f"disk={self}")
        self._system = system
        # Path.exists raises its own errors if a folder above may not be searched
        if not os.path.exists(folder):
            raise DiskError(
                f"disk={self}: no such folder for this process: create it, or use an existing one",
                errno.ENOENT,
            )
        if not os.path.isdir(folder):
            raise DiskError(f"disk={self} is not a folder: give a folder", errno.ENOTDIR)
        self.fd = self._open() if of_other is None else of_other[0]
        self.nbytes = 0
        # a copy of the descriptor in a forked child goes with that child
        self._close_by(_close)
        self.why_not = "direct I/O is switched off"
        if of_other is not None:
            self.why_not = of_other[1]
            if not self.why_not:
                system.set_direct(self.fd)
        elif direct:
            self.why_not = self._try_direct()

    def __str__(self) -> str:
        return str(self.folder)

    def share(self) -> None:
        """From now on its bytes are freed when all processes that have opened the file, and their children,
        have closed it."""
        self._finalizer.detach()
        self._close_by(_close_shared)

    def _close_by(self, close: Callable[[int, Process], None]) -> None:
        self._finalizer = weakref.finalize(self, close, self.fd, Process())
        self._finalizer.atexit = False  # the kernel closes files

    def free(self) -> int:
        """Bytes that this process may still allocate on the file system."""
        found = os.fstatvfs(self.fd)
        return found.f_bavail * found.f_frsize

    def allocate(self, nbytes: int) -> None:
        """Make the file ``nbytes`` long, with all bytes allocated. If there is no room, raises DiskError and
        leaves the file unchanged."""
        if nbytes <= self.nbytes:
            return
        more = nbytes - self.nbytes
        if more > self.free():
            raise too_full(self.folder, more, self.free())
        # if the file system cannot allocate, the C library writes a byte into each block, which is no direct
        # I/O
        if not self.why_not:
            _clear_direct(self.fd)
        try:
            self._system.allocate(self.fd, self.nbytes, more)
            os.fdatasync(self.fd)
            os.posix_fadvise(self.fd, self.nbytes, more, os.POSIX_FADV_DONTNEED)
        except OSError as error:
            os.ftruncate(self.fd, self.nbytes)
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise too_full(self.folder, more, self.free(), error.errno) from error
            raise self._failed("allocating", error, more, self.nbytes) from error
        finally:
            if not self.why_not:
                self._system.set_direct(self.fd)
        self.nbytes = nbytes

    def shrink(self, nbytes: int) -> None:
        """Free the bytes from ``nbytes`` on."""
        os.ftruncate(self.fd, nbytes)
        self.nbytes = nbytes

    def read(self, into: memoryview, offset: int) -> None:
        """Fill ``into`` from ``offset`` on. Address, size and offset are multiples of `ALIGNMENT`. Raises
        DiskError if not all of it could be read."""
        self._move(self._system.preadv, into, offset, "reading")
        if self.why_not:
            os.posix_fadvise(self.fd, offset, len(into), os.POSIX_FADV_DONTNEED)

    def write(self, source: memoryview, offset: int) -> None:
        """Write ``source`` from ``offset`` on; as `read`."""
        self._move(self._system.pwritev, source, offset, "writing")
        if self.why_not:
            try:
                os.fdatasync(self.fd)
            except OSError as error:
                raise self._failed("writing", error, len(source), offset) from error
            os.posix_fadvise(self.fd, offset, len(source), os.POSIX_FADV_DONTNEED)

    def cached_bytes(self) -> int:
        """Bytes of this file in the page cache; takes a byte for each page; for tests."""
        if not self.nbytes:
            return 0
        with mmap.mmap(self.fd, self.nbytes, mmap.MAP_SHARED, mmap.PROT_READ) as mapping:
            resident = bytearray(-(-self.nbytes // mmap.PAGESIZE))
            one = (ctypes.c_ubyte * len(resident)).from_buffer(resident)
            mincore = ctypes.CDLL(None, use_errno=True).mincore
            if mincore(ctypes.c_void_p(_address(mapping)), ctypes.c_size_t(self.nbytes), one):
                raise OSError(ctypes.get_errno(), "mincore")
        # the other bits have no meaning
        return sum(page & 1 for page in resident) * mmap.PAGESIZE

    def close(self) -> None:
        """Free the file's bytes. May be called again; in a forked process it does nothing."""
        self._finalizer()

    def _open(self) -> int:
        try:
            try:
                return self._system.open(str(self.folder), os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
                    raise
            fd, name = tempfile.mkstemp(prefix="streamer-", dir=self.folder)
            os.unlink(name)
            return fd
        except OSError as error:
            raise DiskError(
                f"disk={self}: this process can make no file there ({error.strerror}): change the folder's "
                "permissions, or give another folder",
                error.errno,
            ) from error

    def _try_direct(self) -> str:
        """Turn direct I/O on and write one block. Returns the reason why it cannot be used, or ""."""
        self.allocate(ALIGNMENT)
        try:
            self._system.set_direct(self.fd)
            self._write_one_block()
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            _clear_direct(self.fd)
            return "the file system refuses direct I/O"
        finally:
            cached = self.cached_bytes()
            self.shrink(0)
        if cached:
            _clear_direct(self.fd)
            return "the file system puts direct I/O into the page cache (tmpfs keeps files in host memory)"
        return ""

    def _write_one_block(self) -> None:
        # not closed by hand: the traceback of an error keeps the block; a mapping begins at a page
        block = memoryview(mmap.mmap(-1, ALIGNMENT))
        self._move(self._system.pwritev, block, 0, "writing")
        self._move(self._system.preadv, block, 0, "reading")

    def _move(self, call: Transfer, memory: memoryview, offset: int, verb: str) -> None:
        failed = partial(self._failed, verb)
        _move(call, self.fd, memory, offset, least=len(memory), failed=failed)

    def _failed(self, verb: str, error: OSError, nbytes: int, offset: int) -> DiskError:
        fix = _FIXES.get(error.errno or 0, "give another folder")
        return DiskError(
            f"disk={self}: {verb} {nbytes} bytes at offset {offset} of its scratch file failed "
            f"({error.strerror or error}): {fix}",
            error.errno,
        )


class StoredFile:
    """A user's file, which is read in place and never written.

    Reads bypass the page cache if its file system supports that. Raises DiskError for a file that cannot be
    opened.
    """

    def __init__(self, path: Path, *, system: System) -> None:
        self.path = path
        check_system(path)
        self._system = system
        try:
            self._fd = system.open(str(path), os.O_RDONLY | os.O_CLOEXEC, 0)
        except OSError as error:
            raise DiskError(
                f"{path} cannot be opened ({error.strerror}): put the file back, or read the model anew",
                error.errno,
            ) from error
        self._finalizer = weakref.finalize(self, os.close, self._fd)
        self._finalizer.atexit = False  # the kernel closes files
        self._was = self._is()
        self._is_direct = True
        try:
            system.set_direct(self._fd)
            os.preadv(self._fd, [mmap.mmap(-1, ALIGNMENT)], 0)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise self._failed(error, ALIGNMENT, 0) from error
            _clear_direct(self._fd)
            self._is_direct = False

    def read(self, into: memoryview, offset: int, nbytes: int) -> None:
        """Fill the first ``nbytes`` of ``into`` from ``offset`` on, and the rest up to the end of the file.
        Address, offset and size of ``into`` are multiples of `ALIGNMENT`.

        Raises DiskError if not all of it could be read, and if the file has changed since it was opened.
        """
        if self._is() != self._was:
            raise DiskError(
                f"{self.path} has changed since the model was created, and weights are read from it: put it "
                "back, and read the model anew",
                errno.ESTALE,
            )
        _move(self._system.preadv, self._fd, into, offset, least=nbytes, failed=self._failed)
        if not self._is_direct:
            os.posix_fadvise(self._fd, offset, len(into), os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Close the file. May be called again."""
        self._finalizer()

    def _is(self) -> tuple[int, int]:
        found = os.fstat(self._fd)
        return found.st_size, found.st_mtime_ns

    def _failed(self, error: OSError, nbytes: int, offset: int) -> DiskError:
        return DiskError(
            f"{self.path}: reading {nbytes} bytes at offset {offset} failed ({error.strerror or error}): "
            "the drive failed, 'dmesg' may have more of it: put the file on another one, and read the model "
            "anew",
            error.errno,
        )


def _move(
    call: Transfer,
    fd: int,
    memory: memoryview,
    offset: int,
    *,
    least: int,
    failed: Callable[[OSError, int, int], DiskError],
) -> None:
    """Let ``call`` move all of ``memory``, or at least ``least`` bytes of it up to the end of the file."""
    done = stuck = 0
    while done < least:
        try:
            moved = call(fd, [memory[done:]], offset + done)
        except InterruptedError:
            continue
        except OSError as error:
            raise failed(error, len(memory) - done, offset + done) from error
        reached = done + moved
        if reached < least:
            # direct I/O continues at a whole block: the part of a block is moved again
            reached -= reached % ALIGNMENT
        stuck = 0 if reached > done else stuck + 1
        if stuck == MOST_STUCK:
            why = f"only {moved} bytes were moved, {MOST_STUCK} times over"
            raise failed(OSError(errno.EIO, why), len(memory) - done, offset + done)
        done = reached


def too_full(folder: Path, needed: int, free: int, number: int | None = errno.ENOSPC) -> DiskError:
    """The error for a folder without room for ``needed`` more bytes."""
    return DiskError(
        f"disk={folder} has no room: {exact_amount(needed)} are needed and {exact_amount(free)} are "
        "free: free space, or add folders on other drives",
        number,
    )


def _address(mapping: mmap.mmap) -> int:
    # the array is freed at once: it would keep the mapping from being closed
    return int(np.frombuffer(mapping, np.uint8).__array_interface__["data"][0])


def _clear_direct(fd: int) -> None:
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT)


def _close_shared(fd: int, process: Process) -> None:
    if process.is_this():
        os.close(fd)


def _close(fd: int, process: Process) -> None:
    if process.is_this():
        # forked children may still have the file open: without this its bytes would stay until they end
        os.ftruncate(fd, 0)
        os.close(fd)
