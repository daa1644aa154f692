"""Page-locked host memory of the exact size.

PyTorch's pinned allocator rounds every block up to a power of two. Here a block is one anonymous
mapping, touched by several threads (the first touch is what costs), then registered with CUDA.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import resource
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

#: What one thread touches at a time, in bytes.
TOUCH_BYTES = 1 << 28
#: From CUDA's runtime API: page-locked for every CUDA context, not only for the one that is current.
REGISTER_PORTABLE = 1


class PinnedBlocks:
    """The registered mappings of one backend, whose copies go to and from ``device``."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._registered: list[int] = []
        self._pinning = True

    def allocate(self, nbytes: int) -> torch.Tensor:
        """A zeroed flat uint8 tensor of ``nbytes``, page-locked where the system allows it.

        Where it does not, warns once with the limit and how to raise it, and goes on unpinned: copies
        then block their lane and run slower, and nothing else changes. A process that is forked from
        this one does not have the memory.
        """
        block = mapped(nbytes)
        if self._pinning and nbytes:
            self._register(block.data_ptr(), nbytes)
        return block

    def close(self) -> None:
        """Unregister every block; the memory itself goes when its last tensor does. Idempotent."""
        while self._registered:
            torch.cuda.cudart().cudaHostUnregister(self._registered.pop())

    def _register(self, address: int, nbytes: int) -> None:
        error = torch.cuda.cudart().cudaHostRegister(address, nbytes, REGISTER_PORTABLE)
        if int(error) == 0:
            self._registered.append(address)
            return
        self._pinning = False
        _forget_error(self._device)
        soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        limit = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft} bytes"
        warnings.warn(
            f"could not page-lock {nbytes} bytes of host memory (CUDA error {int(error)}: "
            f"{torch.cuda.cudart().cudaGetErrorString(error)}; the locked-memory limit is {limit}): copies "
            "will be slower. Raise it with 'ulimit -l unlimited', or '--ulimit memlock=-1' for a container.",
            stacklevel=4,
        )


def mapped(nbytes: int) -> torch.Tensor:
    """A zeroed flat uint8 tensor of ``nbytes`` in a mapping of its own, in huge pages where the system has
    them, every page of it made; given back when the last tensor that shows it goes."""
    if not nbytes:
        return torch.zeros(0, dtype=torch.uint8)
    array = np.frombuffer(_mapping(nbytes), dtype=np.uint8)
    _touch(array)
    return torch.from_numpy(array)


def _mapping(nbytes: int) -> mmap.mmap:
    # a shared mapping, Python's default, gets no huge pages as most systems are set up
    mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # a fork would copy page-locked memory at once, all of it, or let the next write move it away from
    # where the GPU looks for it; so a forked data loader must not get it
    for advice in (mmap.MADV_HUGEPAGE, mmap.MADV_DONTFORK):
        # a kernel built without the feature refuses the advice
        with contextlib.suppress(OSError):
            mapping.madvise(advice)
    return mapping


def _touch(array: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> None:
    """Have every page of ``array`` made, which the kernel fills with zeros."""

    def touch(start: int) -> None:
        array[start : start + TOUCH_BYTES : mmap.PAGESIZE] = 0

    # these are the cores that the process may use, where os.cpu_count has all of the machine's
    with ThreadPoolExecutor(max_workers=len(os.sched_getaffinity(0))) as pool:
        list(pool.map(touch, range(0, array.size, TOUCH_BYTES)))


def _forget_error(device: torch.device) -> None:
    """Clear the last CUDA error of this thread, which its next kernel would be blamed for.

    PyTorch offers no cudaGetLastError; what it raises after launching a kernel has been cleared.
    """
    with contextlib.suppress(RuntimeError):
        torch.arange(2, device=device)
