"""The cost and memory of a piece of code, measured without data: FLOPs, seconds, and bytes allocated and
freed.
"""

from __future__ import annotations

import weakref
from collections import Counter
from contextlib import ExitStack
from typing import Any

import torch

from streamer.planner.cost import Cost, Observer, Operations, tensors_in
from streamer.planner.machine import CUDA, Machine
from streamer.torch_private import storage_id

_aten = torch.ops.aten
#: Bytes that CUDA's kernels of PyTorch allocate during one operation, for each element of its first argument:
#: fp32 sums of several blocks, gradients in fp32, sorted places. A margin, rounded up;
#: `tests/backends/test_cuda_plan.py` compares plans with PyTorch's allocator.
KERNEL_BYTES = {
    _aten.sum: 9,
    _aten.mean: 9,
    _aten._scaled_dot_product_flash_attention_backward: 5,
    _aten._scaled_dot_product_efficient_attention_backward: 5,
    _aten._softmax_backward_data: 4,
    _aten._safe_softmax: 1,
    _aten.embedding_dense_backward: 5,
    _aten.index_put: 5,
    _aten._index_put_impl_: 5,
}


#: PyTorch's allocator rounds each tensor up to a block: a share of all bytes, also a margin.
ROUNDED = 32


#: The most that reductions take: an fp32 sum of 128 outputs at a time for each of 128 threads of a block, in
#: as many blocks as a GPU of 132 multiprocessors runs at once.
MOST_SUMS = 4 * 128 * 128 * 132 * 16
_REDUCTIONS = {_aten.sum, _aten.mean}


def kernel_bytes(func: Any, args: Any, result: Any) -> int:
    """Bytes that ``func`` takes on a GPU until it is done, by `KERNEL_BYTES`."""
    packet = func.overloadpacket
    nbytes = KERNEL_BYTES[packet] * int(args[0].numel()) if packet in KERNEL_BYTES else 0
    if packet in _REDUCTIONS:
        return min(nbytes, MOST_SUMS) if _keeps_rows(args[0], result) else 0
    return nbytes


def _keeps_rows(source: torch.Tensor, result: torch.Tensor) -> bool:
    """Whether a reduction keeps the innermost dimension: only then do blocks hold partial sums."""
    return source.dim() > 1 and result.dim() > 0 and result.shape[-1] == source.shape[-1]


class Tracker(Observer):
    """``now`` and ``peak`` bytes of the storages that operations of this thread create inside the block, on
    any device, on meta tensors too. Storages created before, or by other means, do not count.

    A storage counts as long as a tensor uses it, with the bytes requested, before an allocator rounds them.
    With ``on_gpu``, `kernel_bytes` count too.
    """

    def __init__(self, *, on_gpu: bool = False) -> None:
        super().__init__()
        self._on_gpu = on_gpu
        self.now = self.peak = 0
        #: bytes now by owner, and at the peak
        self.owned: Counter[str] = Counter()
        self.owned_at_peak: Counter[str] = Counter()

    def owner(self) -> str:
        """The owner of new storages."""
        return "all"

    def see(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        if func.is_view:
            return
        there = None
        for tensor in tensors_in((result,)):
            storage = tensor.untyped_storage()
            if there is None:
                there = {storage_id(tensor) for tensor in tensors_in((*args, *kwargs.values()))}
            if (number := storage_id(tensor)) not in there:
                there.add(number)
                self._allocated(storage)
        if self.now > self.peak:
            self._note_peak()
        if self._on_gpu and (nbytes := kernel_bytes(func, args, result)):
            self.rise(nbytes)

    @property
    def taken(self) -> tuple[int, int]:
        """`now` and `peak` as an allocator counts them, which on a GPU rounds up."""
        now, peak = self.now, self.peak
        return (now + now // ROUNDED, peak + peak // ROUNDED) if self._on_gpu else (now, peak)

    def rise(self, nbytes: int) -> None:
        """Count ``nbytes`` that were allocated and are freed again."""
        owner = self.owner()
        self.now += nbytes
        self.owned[owner] += nbytes
        if self.now > self.peak:
            self._note_peak()
        self._freed(owner, nbytes)

    def _allocated(self, storage: torch.UntypedStorage) -> None:
        owner, nbytes = self.owner(), storage.nbytes()
        self.now += nbytes
        self.owned[owner] += nbytes
        weakref.finalize(storage, self._freed, owner, nbytes).atexit = False

    def _freed(self, owner: str, nbytes: int) -> None:
        self.now -= nbytes
        self.owned[owner] -= nbytes

    def _note_peak(self) -> None:
        self.peak = self.now
        self.owned_at_peak = self.owned.copy()


class Meter(ExitStack):
    """Counts FLOPs and seconds on ``machine``, and bytes, in the block."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self._tracker = Tracker(on_gpu=machine.kind == CUDA)
        self._operations = Operations(machine, self._tracker)

    def __enter__(self) -> Meter:
        self.enter_context(self._operations)
        return self

    @property
    def cost(self) -> Cost:
        """The cost so far."""
        return self._operations.cost

    @property
    def now(self) -> int:
        """Bytes that the block has allocated and not freed."""
        return self._tracker.now

    @property
    def peak(self) -> int:
        """The maximum of `now` since it was last set."""
        return self._tracker.peak

    @peak.setter
    def peak(self, nbytes: int) -> None:
        self._tracker.peak = nbytes
