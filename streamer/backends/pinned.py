"""Page-locked host memory of the exact size.

PyTorch's pinned allocator rounds every block up to a power of two. Here a block is one anonymous
mapping, registered with CUDA.
"""

from __future__ import annotations

import contextlib
import mmap
import platform
import resource
import warnings

import torch

from streamer.backends.host_memory import RAISE_LOCKED_LIMIT
from streamer.backends.mapping import mapped

#: From CUDA's runtime API: page-locked for every CUDA context, not only for the one that is current.
REGISTER_PORTABLE = 1

#: A larger limit of locked memory is not tried out.
MOST_TRIED_BYTES = 1 << 26


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
        # a fork would copy page-locked memory at once, all of it, or let the next write move it away from
        # where the GPU looks for it; so a forked data loader must not get it
        block = mapped(nbytes, in_forks=False)
        self.pin(block)
        return block

    def pin(self, block: torch.Tensor) -> None:
        """Page-lock all of a flat uint8 tensor in a mapping of its own, as `allocate` does."""
        if self._pinning and block.numel():
            self._register(block.data_ptr(), block.numel())

    def unpin(self, block: torch.Tensor) -> None:
        """Unregister a block before the others; it is about to be given up."""
        if block.data_ptr() in self._registered:
            self._registered.remove(block.data_ptr())
            torch.cuda.cudart().cudaHostUnregister(block.data_ptr())

    def close(self) -> None:
        """Unregister every block; the memory itself goes when its last tensor does. Idempotent."""
        while self._registered:
            torch.cuda.cudart().cudaHostUnregister(self._registered.pop())

    def limit(self) -> int | None:
        """Bytes that may be page-locked, or None where no limit is known.

        NVIDIA's kernel module pins the pages of a registration itself and does not count them towards
        RLIMIT_MEMLOCK (os_lock_user_pages in kernel-open/nvidia/os-mlock.c of its sources), of which a
        process usually has no more than 64 KiB or 8 MiB. So the limit is believed only where a page can be
        registered and a block just above the limit cannot. One that is too large for that is not believed;
        should it hold after all, `allocate` says so.
        """
        soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        if soft == resource.RLIM_INFINITY or soft > MOST_TRIED_BYTES:
            return None
        is_held = self._can_register(mmap.PAGESIZE) and not self._can_register(soft + mmap.PAGESIZE)
        return soft if is_held else None

    def _can_register(self, nbytes: int) -> bool:
        block = mapped(nbytes, in_forks=False)
        cudart = torch.cuda.cudart()
        if int(cudart.cudaHostRegister(block.data_ptr(), nbytes, REGISTER_PORTABLE)):
            _forget_error(self._device)
            return False
        cudart.cudaHostUnregister(block.data_ptr())
        return True

    def _register(self, address: int, nbytes: int) -> None:
        error = torch.cuda.cudart().cudaHostRegister(address, nbytes, REGISTER_PORTABLE)
        if int(error) == 0:
            self._registered.append(address)
            return
        self._pinning = False
        _forget_error(self._device)
        # CUDA on WSL User Guide, known limitations: there is less memory to pin than there is memory
        is_wsl = "microsoft" in platform.release().lower()
        mend = "WSL has no more of it; Linux itself has" if is_wsl else f"Raise it with {RAISE_LOCKED_LIMIT}"
        soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        limit = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft} bytes"
        warnings.warn(
            f"could not page-lock {nbytes} bytes of host memory (CUDA error {int(error)}: "
            f"{torch.cuda.cudart().cudaGetErrorString(error)}; the locked-memory limit is {limit}): copies "
            f"will be slower. {mend}.",
            stacklevel=5,
        )


def _forget_error(device: torch.device) -> None:
    """Clear the last CUDA error of this thread, which its next kernel would be blamed for.

    PyTorch offers no cudaGetLastError; what it raises after launching a kernel has been cleared.
    """
    with contextlib.suppress(RuntimeError):
        torch.arange(2, device=device)
