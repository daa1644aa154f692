"""Page-locked host memory of the exact size.

PyTorch's pinned allocator rounds every block up to a power of two. Here a block is one anonymous
mapping, touched by several threads (the first touch is what costs), then registered with CUDA.
"""

from __future__ import annotations

import mmap
import os
import resource
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

TOUCH_BYTES = 1 << 28


class PinnedBlocks:
    """The registered mappings of one backend."""

    def __init__(self) -> None:
        self._registered: list[int] = []
        self._pinning = True

    def allocate(self, nbytes: int) -> torch.Tensor:
        """A zeroed flat uint8 tensor of ``nbytes``, page-locked where the system allows it.

        Where it does not, warns once with the limit and how to raise it, and goes on unpinned: copies
        then block their lane and run slower, and nothing else changes.
        """
        mapping = mmap.mmap(-1, max(nbytes, 1))
        if hasattr(mmap, "MADV_HUGEPAGE"):
            mapping.madvise(mmap.MADV_HUGEPAGE)
        array = np.frombuffer(mapping, dtype=np.uint8)
        chunks = [array[at : at + TOUCH_BYTES] for at in range(0, array.size, TOUCH_BYTES)]
        with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
            list(pool.map(lambda chunk: chunk.fill(0), chunks))
        if self._pinning and nbytes:
            self._register(array.ctypes.data, array.size)
        return torch.from_numpy(array)[:nbytes]

    def close(self) -> None:
        """Unregister every block; the memory itself goes when its last tensor does."""
        while self._registered:
            torch.cuda.cudart().cudaHostUnregister(self._registered.pop())

    def _register(self, address: int, nbytes: int) -> None:
        error = torch.cuda.cudart().cudaHostRegister(address, nbytes, 0)
        if int(error) == 0:
            self._registered.append(address)
            return
        self._pinning = False
        soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        limit = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft} bytes"
        warnings.warn(
            f"could not page-lock {nbytes} bytes of host memory (CUDA error {int(error)}; the locked-memory "
            f"limit is {limit}): copies will be slower. Raise it with 'ulimit -l unlimited', or "
            "'--ulimit memlock=-1' for a container.",
            stacklevel=4,
        )
