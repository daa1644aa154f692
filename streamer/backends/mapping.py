"""Large blocks of host memory: one anonymous mapping each, in huge pages where the system has them.

Every page is made at once, by several threads, since the first touch is what costs; so the memory is taken
when it is asked for and not in the middle of the first step.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

#: What one thread touches at a time, in bytes.
TOUCH_BYTES = 1 << 28


def mapped(nbytes: int, *, in_forks: bool) -> torch.Tensor:
    """A zeroed flat uint8 tensor of ``nbytes`` in a mapping of its own, given back when the last tensor that
    shows it goes.

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
    array = np.frombuffer(mapping, dtype=np.uint8)
    _touch(array)
    return torch.from_numpy(array)


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
