"""What a unit keeps in host memory: the streamed weight, what makes it an exact fp32 master, its gradient.

One buffer per purpose for the whole model, each unit's shard a piece of it: a few large blocks are
pinned in no time, thousands of small ones are not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any, Protocol

import torch

import streamer_native as native
from streamer.memory.layout import Layout, Slice
from streamer.memory.purposes import (
    ALL_MOMENTS,
    GRADIENTS,
    MASTERS,
    MODEL,
    REMAINDERS,
    STAGING,
    SUMS,
    WEIGHTS,
    Purpose,
)

#: The remainder of a bf16 weight that is its own master: see streamer_native.bfloat16.
EXACT_REMAINDER = 0x8000


class Allocate(Protocol):
    """What gives a `HostStore` its memory: see `Backend.host_buffer`."""

    def __call__(self, nbytes: int, *, pinned: bool) -> torch.Tensor: ...


@cache
def _nothing(dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(0, dtype=dtype)


class HostShard:
    """All host buffers of one unit (whole, not a rank's part), as flat tensors by the name of their purpose.

    ``weight`` and ``gradient`` are uint8, laid out by ``layout``; remainders (uint16, of bf16 weights),
    masters (fp32, of fp16 weights) and ``sums`` (fp32, of gradients in bf16 or fp16) have one element per
    trainable parameter element, padding included. What the unit does not hold has no elements.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.held: dict[str, torch.Tensor] = {}
        #: called before what is held changes, by an update say
        self.before_change: Callable[[], None] | None = None

    def __getitem__(self, purpose: Purpose) -> torch.Tensor:
        """The piece for ``purpose``, empty if the unit holds none."""
        piece = self.held.get(purpose.name)
        return _nothing(purpose.dtype) if piece is None else piece

    @property
    def weight(self) -> torch.Tensor:
        return self[WEIGHTS]

    @property
    def gradient(self) -> torch.Tensor:
        return self[GRADIENTS]

    @property
    def sums(self) -> torch.Tensor:
        return self[SUMS]

    def load(self, slice: Slice, values: torch.Tensor) -> None:
        """Set the weight, and the exact fp32 master where the parameter is trained, from ``values``."""
        weight = slice.view(self.weight)
        if not slice.param.trainable or weight.dtype == torch.float32 or values.dtype == weight.dtype:
            weight.copy_(values)
            self.rebase(slice)
            return
        exact = values.to(torch.float32).contiguous()
        if weight.dtype == torch.bfloat16:
            native.split(array(exact), array(weight), array(slice.state(self[REMAINDERS])))
        else:
            slice.state(self[MASTERS]).copy_(exact)
            weight.copy_(exact)

    def rebase(self, slice: Slice) -> None:
        """Make the master equal to the streamed weight, which was just written."""
        if not slice.param.trainable:
            return
        if slice.param.dtype == torch.bfloat16:
            slice.state(self[REMAINDERS].view(torch.int16)).fill_(EXACT_REMAINDER - (1 << 16))
        elif slice.param.dtype == torch.float16:
            slice.state(self[MASTERS]).copy_(slice.view(self.weight))

    def exact(self, slice: Slice) -> torch.Tensor:
        """A copy of the parameter in full precision: fp32 where it is trained, else as it is."""
        weight = slice.view(self.weight)
        if not slice.param.trainable or weight.dtype == torch.float32:
            return weight.clone()
        if weight.dtype == torch.float16:
            return slice.state(self[MASTERS]).clone()
        exact = torch.empty(slice.param.shape, dtype=torch.float32)
        native.join(array(weight), array(slice.state(self[REMAINDERS])), array(exact))
        return exact

    def joined(self, slice: Slice) -> torch.Tensor:
        """`exact` by PyTorch: on any thread, where kernels run on the HOST lane only, and slower."""
        weight = slice.view(self.weight)
        if weight.dtype != torch.bfloat16 or not slice.param.trainable:
            return self.exact(slice)
        # wraps around, as the kernel's unsigned arithmetic does
        high = weight.contiguous().view(torch.int16).to(torch.int32) << 16
        low = slice.state(self[REMAINDERS].view(torch.int16)).to(torch.int32) & 0xFFFF
        return ((high | low) - EXACT_REMAINDER).view(torch.float32)

    def copy(self) -> HostShard:
        """The weights, what makes them masters and the optimizer's state, in memory of their own."""
        copy = HostShard(self.layout)
        kept = {purpose.name for purpose in (*MODEL, *ALL_MOMENTS)}
        copy.held = {name: piece.clone() for name, piece in self.held.items() if name in kept}
        return copy

    def about_to_change(self) -> None:
        """Called before a write: a reader in the background (a checkpoint) finishes, or copies the shard."""
        if self.before_change is not None:
            self.before_change()


def array(tensor: torch.Tensor) -> Any:
    """A contiguous tensor as the flat NumPy array that the kernels take: bf16 as its bits in uint16."""
    flat = tensor.view(-1)
    return flat.view(torch.uint16).numpy() if flat.dtype == torch.bfloat16 else flat.numpy()


class HostStore:
    """The host buffers of all units, by purpose."""

    def __init__(
        self,
        layouts: Sequence[Layout],
        allocate: Allocate,
        reserve: Callable[[int], torch.Tensor] | None = None,
    ) -> None:
        """With ``reserve`` (see `Backend.host_reserve`), what a model takes beside its gradients takes memory
        as it is written, and is to be pinned by `pin` when all of it is."""
        self.shards = [HostShard(layout) for layout in layouts]
        self._allocate = allocate
        self._buffers: dict[str, torch.Tensor] = {}
        for purpose in MODEL:
            nbytes = sum(purpose.nbytes(layout) for layout in layouts)
            buffer = reserve(nbytes) if reserve else allocate(nbytes, pinned=purpose.pinned)
            self._deal(purpose, buffer, self.shards)

    def pin(self, pin: Callable[[torch.Tensor], None]) -> None:
        """Let ``pin`` make those of the model's buffers that are copied to the device ready for that."""
        for purpose in MODEL:
            if purpose.pinned:
                pin(self._buffers[purpose.name])

    def add(self, purposes: Iterable[Purpose], *, only: Sequence[HostShard] | None = None) -> None:
        """Give every shard (or ``only`` these) a zeroed piece for each of ``purposes``."""
        shards = self.shards if only is None else only
        for purpose in purposes:
            nbytes = sum(purpose.nbytes(shard.layout) for shard in shards)
            self._deal(purpose, self._allocate(nbytes, pinned=purpose.pinned), shards)

    def _deal(self, purpose: Purpose, buffer: torch.Tensor, shards: Sequence[HostShard]) -> None:
        """Let each of ``shards`` have its piece of ``buffer``."""
        self._buffers[purpose.name] = buffer
        sizes = [purpose.nbytes(shard.layout) for shard in shards]
        for shard, piece in zip(shards, buffer.split(sizes), strict=True):
            # .data: a version counter for each shard, which tells whether that shard was written
            shard.held[purpose.name] = piece.view(purpose.dtype)[: purpose.numel(shard.layout)].data

    def holds(self, purposes: Iterable[Purpose]) -> bool:
        """Whether there is a buffer for each of ``purposes``, in its dtype."""
        return all(
            (piece := shard.held.get(purpose.name)) is not None and piece.dtype == purpose.dtype
            for purpose in purposes
            for shard in self.shards
        )

    def drop(self, purposes: Iterable[Purpose]) -> None:
        """Free the buffers for ``purposes``. Not for pinned buffers: the backend has them registered."""
        purposes = list(purposes)
        assert not any(purpose.pinned for purpose in purposes)
        for purpose in purposes:
            self._buffers.pop(purpose.name, None)
            for shard in self.shards:
                shard.held.pop(purpose.name, None)

    def drop_all(self) -> None:
        """Give up every buffer."""
        self._buffers.clear()
        for shard in self.shards:
            shard.held.clear()

    def staging(self, count: int, nbytes: int) -> list[torch.Tensor]:
        """``count`` buffers of ``nbytes`` for gradients that are used up when they have landed."""
        self._buffers[STAGING] = self._allocate(count * nbytes, pinned=True)
        return list(self._buffers[STAGING].split(nbytes)) if nbytes else []

    def bytes_by_purpose(self) -> dict[str, int]:
        """Bytes allocated, by purpose; purposes that take none are left out."""
        return {purpose: buffer.numel() for purpose, buffer in self._buffers.items() if buffer.numel()}
