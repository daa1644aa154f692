"""Host memory: how much this process may still take, and large blocks of it. The system reports free memory.
A control group (of a container, a batch job, a systemd unit) may allow less, and the kernel kills a process
that takes more. All groups count, from the process's own up to the root, in both versions of the kernel's
interface (Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst).

A block is one anonymous mapping, in huge pages where the system has them. The first touch of each page is
slow. `mapped` touches all pages at once, in several threads, so that the memory is taken here and not in the
middle of the first step. `reserved` touches none: its block is filled piece by piece, while the memory of the
source is freed.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath

import numpy as np
import psutil
import torch

#: The folder in which the kernel lists this process's groups and their mounts.
PROC = Path("/proc/self")

#: By version of the interface: the files of a group's limit and of its usage, and the keys of memory.stat for
#: the part that is page cache.
_FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_active_file", "total_inactive_file")),
    2: ("memory.max", "memory.current", ("active_file", "inactive_file")),
}


@dataclass(frozen=True)
class Group:
    """A control group: the folder of its files and the version of the interface, 1 or 2."""

    folder: Path
    version: int

    def available(self) -> int | None:
        """Bytes left of the group's limit, or None without a limit. Page cache counts as left, as in the
        system's available memory: the kernel frees it before it kills a process.
        """
        limit_file, taken_file, cached_keys = _FILES[self.version]
        limit, taken = _read(self.folder / limit_file).strip(), _read(self.folder / taken_file).strip()
        if not limit or limit == "max" or not taken:
            return None
        stat = dict(line.split(maxsplit=1) for line in _read(self.folder / "memory.stat").splitlines())
        cached = sum(int(stat.get(key, 0)) for key in cached_keys)
        return max(0, int(limit) - max(0, int(taken) - cached))


def available_bytes() -> int:
    """Bytes of host memory that this process can still take, without swap."""
    allowed = [left for group in groups(PROC) if (left := group.available()) is not None]
    return min([int(psutil.virtual_memory().available), *allowed])


@cache
def groups(proc: Path) -> tuple[Group, ...]:
    """The control groups that may limit a process's memory, its own before their parents; ``proc`` is its
    folder in /proc. Empty if the kernel has no such groups."""
    # number:controllers:path
    lines = (line.split(":", 2) for line in _read(proc / "cgroup").splitlines())
    own = {
        2 if not controllers else 1: path
        for _, controllers, path in lines
        if not controllers or "memory" in controllers.split(",")
    }
    return tuple(
        Group(folder, version)
        for version, root, mount in _mounts(_read(proc / "mountinfo"))
        if version in own
        for folder in _lineage(mount, root, PurePosixPath(own[version]))
    )


def _mounts(mountinfo: str) -> Iterator[tuple[int, PurePosixPath, Path]]:
    """The mounted hierarchies of groups: the version, the group that is mounted, and where."""
    for line in mountinfo.splitlines():
        # number parent major:minor root mount options ... - type source options
        before, _, after = line.partition(" - ")
        kind, *_, options = after.split()
        if kind == "cgroup2" or (kind == "cgroup" and "memory" in options.split(",")):
            root, mount = map(_unescaped, before.split()[3:5])
            yield 2 if kind == "cgroup2" else 1, PurePosixPath(root), Path(mount)


def _lineage(mount: Path, root: PurePosixPath, own: PurePosixPath) -> list[Path]:
    """The folders of the groups from ``own`` up to ``root``, which is mounted at ``mount``; only that of
    ``root`` if ``own`` is not inside of it."""
    inside = own.relative_to(root) if own.is_relative_to(root) else PurePosixPath()
    if ".." in inside.parts:
        return [mount]
    return [mount / folder for folder in (inside, *inside.parents)]


def _unescaped(path: str) -> str:
    """A path of mountinfo, which escapes spaces and similar characters as octal numbers."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), path)


def _read(path: Path) -> str:
    """The text of a file of the kernel; empty if it does not exist or must not be read."""
    try:
        # other mounts may have names in any encoding
        return path.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return ""


#: Bytes that a thread touches at a time.
TOUCH_BYTES = 1 << 28

#: A line of /proc/self/maps whose inode is not 0: first-last permissions offset device inode path
_FILE_MAPPING = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) \S+ \S+ \S+ [1-9]", re.MULTILINE)


def mapped(nbytes: int, *, in_forks: bool) -> torch.Tensor:
    """`reserved`, with all memory taken at once."""
    block = reserved(nbytes, in_forks=in_forks)
    touch(block.numpy())
    return block


def reserved(nbytes: int, *, in_forks: bool) -> torch.Tensor:
    """A zeroed flat uint8 tensor of ``nbytes`` in a mapping of its own, which is freed with the last tensor
    on it. It takes memory as it is written.

    A process that is forked from this one has the block only if ``in_forks``; while that process lives, the
    first write to a page makes a copy of the page.
    """
    if not nbytes:
        return torch.zeros(0, dtype=torch.uint8)
    # a shared mapping, Python's default, gets no huge pages as most systems are set up
    return _tensor(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), in_forks=in_forks)


def map_file(file: int, nbytes: int, *, in_forks: bool) -> torch.Tensor:
    """A flat uint8 tensor of the first ``nbytes`` of the open file ``file``, shared with other mappings of
    it."""
    return _tensor(mmap.mmap(file, nbytes, flags=mmap.MAP_SHARED), in_forks=in_forks)


def _tensor(mapping: mmap.mmap, *, in_forks: bool) -> torch.Tensor:
    for advice in ("MADV_HUGEPAGE", *(() if in_forks else ("MADV_DONTFORK",))):
        # other systems than Linux have no such advice, and a kernel built without the feature refuses it
        with contextlib.suppress(OSError):
            if hasattr(mmap, advice):
                mapping.madvise(getattr(mmap, advice))
    return torch.from_numpy(np.frombuffer(mapping, dtype=np.uint8))


def file_mappings() -> list[tuple[int, int]]:
    """The ranges of addresses (first, one past the last), in ascending order, at which this process has files
    mapped; shared memory is a file. Only on Linux; on other systems the list is empty."""
    try:
        # has only the ranges, without the paths: paths take the kernel most of the time
        ranges = [name.split("-") for name in os.listdir("/proc/self/map_files")]
    except OSError:  # not in every sandbox
        try:
            maps = Path("/proc/self/maps").read_text()
        except OSError:
            return []
        ranges = _FILE_MAPPING.findall(maps)
    return sorted((int(start, 16), int(stop, 16)) for start, stop in ranges)


def give_back_freed() -> None:
    """Return freed memory that the C library keeps for later to the system, if the library can do so."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def touch(array: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> None:
    """Write zeros into every page of ``array``, so that the kernel allocates it."""

    def write(start: int) -> None:
        array[start : start + TOUCH_BYTES : mmap.PAGESIZE] = 0

    if array.size <= TOUCH_BYTES:
        write(0)
        return
    # the cores that the process may use; os.cpu_count counts all cores
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    with ThreadPoolExecutor(max_workers=cores) as pool:
        list(pool.map(write, range(0, array.size, TOUCH_BYTES)))
