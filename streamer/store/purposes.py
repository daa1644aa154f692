"""The purposes of host memory: one buffer for each, and the bytes of it that a unit takes. Pure
arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from streamer.store.layout import Layout, Slice, num_blocks

#: Every shard starts at a multiple of this many bytes in its buffer, as every parameter does in a shard.
SHARD_ALIGN = 64


@dataclass(frozen=True)
class Purpose:
    """A kind of host buffer: its name in ledgers, its dtype, the number of its elements for a unit, and a
    parameter's part of it; ``pinned`` if it is copied to or from the device."""

    name: str
    dtype: torch.dtype
    numel: Callable[[Layout], int]
    part: Callable[[Slice, torch.Tensor], torch.Tensor] = Slice.state
    pinned: bool = False

    def bytes(self, elements: range) -> range:
        """The bytes of these elements (or blocks) in a unit's flat buffer."""
        size = self.dtype.itemsize
        return range(elements.start * size, elements.stop * size)

    def range(self, slice: Slice) -> range:
        """A parameter's range of elements (or blocks) in a unit's flat buffer of optimizer state."""
        if self.part is Slice.blocks:
            return range(slice.block, slice.block + num_blocks(slice.numel))
        return range(slice.index, slice.index + slice.numel)

    def shape(self, slice: Slice) -> tuple[int, ...]:
        """The shape of a parameter's part."""
        return (num_blocks(slice.numel),) if self.part is Slice.blocks else slice.param.shape

    def nbytes(self, layout: Layout) -> int:
        """Bytes that a unit takes, padding included."""
        return -(-self.numel(layout) * self.dtype.itemsize // SHARD_ALIGN) * SHARD_ALIGN


def _state(layout: Layout) -> int:
    return layout.state_numel


def _state_of(*dtypes: torch.dtype) -> Callable[[Layout], int]:
    """One element for each trainable one, in units that have trainable parameters of one of ``dtypes``."""

    def numel(layout: Layout) -> int:
        trainable = {slice.param.dtype for slice in layout.trainable}
        return layout.state_numel if trainable.intersection(dtypes) else 0

    return numel


FP32, BF16, FP16, INT8 = torch.float32, torch.bfloat16, torch.float16, torch.int8

#: The streamed weights, laid out by `Layout`.
WEIGHTS = Purpose("weights", torch.uint8, lambda layout: layout.nbytes, Slice.view, pinned=True)
#: The bits of masters that rounding to bf16 removed, and the masters of fp16 weights: see `HostShard`.
REMAINDERS = Purpose("remainders", torch.uint16, _state_of(BF16))
MASTERS = Purpose("fp32 masters", FP32, _state_of(FP16))
#: Gradients in the device's dtype, and the fp32 sums of several gradients of a shorter dtype.
GRADIENTS = Purpose("gradients", torch.uint8, lambda layout: layout.grad_nbytes, Slice.view, pinned=True)
SUMS = Purpose("gradient sums", FP32, _state_of(BF16, FP16), pinned=True)  # the root's come as sums
#: A ring of buffers for gradients that an update consumes as soon as they are on the host.
STAGING = "gradient staging"
#: The number of these buffers with update='backward': one fills, one is read, two even out delays.
STAGING_BUFFERS = 4
#: Buffers that optimizer state on disk passes through when it is updated.
STATE_RING = "ring of state on disk"
#: Buffers that weights on disk pass through on their way to the device.
WEIGHT_RING = "ring of weights on disk"
#: Memory for blocks of files from which weights are read.
FILE_BLOCKS = "blocks of files"
#: Copies of weights on disk that user code reads or writes.
WEIGHT_COPIES = "copies of weights on disk"
#: State of optimizers of PyTorch, and the fp32 copies of masters and gradients for their updates.
OPTIMIZER_STATE, UPDATE_SCRATCH = "optimizer state", "scratch of updates"
#: Inputs that layers have saved for backward and copied to host memory.
SAVED_INPUTS = "saved inputs"

#: Purposes whose buffers are copied to or from the device; for a GPU they are page-locked.
PINNED = frozenset({WEIGHTS.name, GRADIENTS.name, SUMS.name, STAGING, SAVED_INPUTS, WEIGHT_RING})

#: Purposes that each rank allocates for itself; ranks share the others.
OF_EACH_RANK = (
    STAGING,
    SAVED_INPUTS,
    STATE_RING,
    WEIGHT_RING,
    FILE_BLOCKS,
    WEIGHT_COPIES,
    OPTIMIZER_STATE,
    UPDATE_SCRATCH,
)


def of_all_ranks(host: Mapping[str, int], ranks: int) -> dict[str, int]:
    """Bytes of host memory by purpose of all ``ranks``, from the bytes of one in ``host``."""
    return {name: nbytes * (ranks if name in OF_EACH_RANK else 1) for name, nbytes in host.items()}


#: Together with the weights, these are the exact masters.
MASTERING = (REMAINDERS, MASTERS)
#: A model without its gradients.
MODEL = (WEIGHTS, *MASTERING)
#: Adam's moments by their dtype; in 8 bits with one scale for every block of 256 elements.
MOMENTS = {
    FP32: (Purpose("exp_avg", FP32, _state), Purpose("exp_avg_sq", FP32, _state)),
    BF16: (Purpose("exp_avg", BF16, _state), Purpose("exp_avg_sq", BF16, _state)),
    INT8: (
        Purpose("exp_avg", INT8, _state),
        Purpose("exp_avg_sq", torch.uint8, _state),
        Purpose("exp_avg_scale", FP32, lambda layout: layout.state_blocks, Slice.blocks),
        Purpose("exp_avg_sq_scale", FP32, lambda layout: layout.state_blocks, Slice.blocks),
    ),
}
ALL_MOMENTS = tuple(purpose for kept in MOMENTS.values() for purpose in kept)
#: Purposes that machines may divide.
DIVIDED = frozenset(purpose.name for purpose in (*MASTERING, *ALL_MOMENTS))


def host_bytes(layouts: Sequence[Layout], purposes: Iterable[Purpose]) -> dict[str, int]:
    """Bytes of host memory by purpose for units of these layouts."""
    return {purpose.name: sum(purpose.nbytes(layout) for layout in layouts) for purpose in purposes}
