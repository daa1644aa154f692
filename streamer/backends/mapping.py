"""Large blocks of host memory: one anonymous mapping each, in huge pages where the system has them.

The first touch of a page is what costs. `mapped` has every page made at once, by several threads, so that
the memory is taken when it is asked for and not in the middle of the first step; `reserved` takes none yet,
for what is filled bit by bit while the memory that it comes from is given back.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

#: What one thread touches at a time, in bytes.
TOUCH_BYTES = 1 << 28

#: A line of /proc/self/maps whose inode is not 0: first-last permissions offset device inode path
_FILE_MAPPING = re.compile(rb"^([0-9a-f]+)-([0-9a-f]+) \S+ \S+ \S+ [1-9]", re.MULTILINE)


def mapped(nbytes: int, *, in_forks: bool) -> torch.Tensor:
    """`reserved`, with all of its memory taken."""
    block = reserved(nbytes, in_forks=in_forks)
    _touch(block.numpy())
    return block


def reserved(nbytes: int, *, in_forks: bool) -> torch.Tensor:
    """A zeroed flat uint8 tensor of ``nbytes`` in a mapping of its own, given back when the last tensor that
    shows it goes. It takes memory as it is written.

    A process that is forked from this one has the memory only if ``in_forks``; then the next write to a page
    copies it, for as long as that process lives.
    """
    if not nbytes:
        return torch.zeros(0, dtype=torch.uint8)
    # a shared mapping, Python's default, gets no huge pages as most systems are set up
    mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in ("MADV_HUGEPAGE", *(() if in_forks else ("MADV_DONTFORK",))):
        # other systems than Linux have no such advice, and a kernel built without the feature refuses it
        with contextlib.suppress(OSError):
            if hasattr(mmap, advice):
                mapping.madvise(getattr(mmap, advice))
    return torch.from_numpy(np.frombuffer(mapping, dtype=np.uint8))


def file_mappings() -> list[tuple[int, int]]:
    """The addresses, each from first to one past the last and in ascending order, at which this process has
    files (shared memory is one) rather than memory of its own. Only Linux tells; elsewhere there are none."""
    try:
        maps = Path("/proc/self/maps").read_bytes()
    except OSError:
        return []
    return [(int(start, 16), int(stop, 16)) for start, stop in _FILE_MAPPING.findall(maps)]


def give_back_freed() -> None:
    """Give the system the freed memory that the C library keeps for later, where there is a call for that."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _touch(array: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> None:
    """Have every page of ``array`` made, which the kernel fills with zeros."""

    def touch(start: int) -> None:
        array[start : start + TOUCH_BYTES : mmap.PAGESIZE] = 0

    if array.size <= TOUCH_BYTES:
        touch(0)
        return
    # the cores that the process may use, where os.cpu_count has all of the machine's
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    with ThreadPoolExecutor(max_workers=cores) as pool:
        list(pool.map(touch, range(0, array.size, TOUCH_BYTES)))
