"""What a unit keeps in host memory: the streamed weight, what makes it an exact fp32 master, its gradient.

One buffer per purpose for the whole model, each unit's shard a piece of it: a few large blocks are
pinned in no time, thousands of small ones are not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import streamer_native as native
from streamer.memory.layout import Layout, Slice

#: Every shard starts at a multiple of this many bytes in its buffer, as every parameter does in a shard.
SHARD_ALIGN = 64
#: The remainder of a bf16 weight that is its own master: see streamer_native.bfloat16.
EXACT_REMAINDER = 0x8000

WEIGHTS, REMAINDERS, MASTERS, GRADIENTS = "weights", "remainders", "fp32 masters", "gradients"
EXP_AVG, EXP_AVG_SQ, STAGING = "exp_avg", "exp_avg_sq", "gradient staging"

Allocate = Callable[[int], torch.Tensor]


def shard_nbytes(layout: Layout, purpose: str) -> int:
    """Bytes that a unit takes in the buffer of ``purpose``, padding included."""
    trainable_dtypes = {slice.param.dtype for slice in layout.trainable}
    nbytes = {
        WEIGHTS: layout.nbytes,
        REMAINDERS: 2 * layout.state_numel if torch.bfloat16 in trainable_dtypes else 0,
        MASTERS: 4 * layout.state_numel if torch.float16 in trainable_dtypes else 0,
        GRADIENTS: layout.grad_nbytes,
        EXP_AVG: 4 * layout.state_numel,
        EXP_AVG_SQ: 4 * layout.state_numel,
    }[purpose]
    return -(-nbytes // SHARD_ALIGN) * SHARD_ALIGN


def host_bytes(layouts: Sequence[Layout], purposes: Sequence[str]) -> dict[str, int]:
    """Bytes of host memory by purpose for units of these layouts."""
    return {purpose: sum(shard_nbytes(layout, purpose) for layout in layouts) for purpose in purposes}


#: What `wrap` allocates, and what AdamW adds.
MODEL_PURPOSES = (WEIGHTS, REMAINDERS, MASTERS, GRADIENTS)
ADAMW_PURPOSES = (EXP_AVG, EXP_AVG_SQ)


@dataclass
class HostShard:
    """The pieces of the host buffers that belong to one unit, as flat tensors.

    ``weight`` and ``gradient`` are uint8, laid out by ``layout``; ``remainder`` (uint16, bf16 weights)
    and ``master`` (fp32, fp16 weights) have one element per trainable parameter element, padding
    included, or none where the dtype needs none. ``state`` holds what an optimizer asked for.
    """

    layout: Layout
    weight: torch.Tensor
    gradient: torch.Tensor
    remainder: torch.Tensor
    master: torch.Tensor
    state: dict[str, torch.Tensor]

    def load(self, slice: Slice, values: torch.Tensor) -> None:
        """Set the weight, and the exact fp32 master where the parameter is trained, from ``values``."""
        weight = slice.view(self.weight)
        if not slice.param.trainable or weight.dtype == torch.float32 or values.dtype == weight.dtype:
            weight.copy_(values)
            self.rebase(slice)
            return
        exact = values.to(torch.float32).contiguous()
        if weight.dtype == torch.bfloat16:
            native.split(array(exact), array(weight), array(slice.state(self.remainder)))
        else:
            slice.state(self.master).copy_(exact)
            weight.copy_(exact)

    def rebase(self, slice: Slice) -> None:
        """Make the master equal to the streamed weight: somebody has just written the weight."""
        if not slice.param.trainable:
            return
        if slice.param.dtype == torch.bfloat16:
            slice.state(self.remainder.view(torch.int16)).fill_(EXACT_REMAINDER - (1 << 16))
        elif slice.param.dtype == torch.float16:
            slice.state(self.master).copy_(slice.view(self.weight))

    def exact(self, slice: Slice) -> torch.Tensor:
        """A copy of the parameter in full precision: fp32 where it is trained, else as it is."""
        weight = slice.view(self.weight)
        if not slice.param.trainable or weight.dtype == torch.float32:
            return weight.clone()
        if weight.dtype == torch.float16:
            return slice.state(self.master).clone()
        exact = torch.empty(slice.param.shape, dtype=torch.float32)
        native.join(array(weight), array(slice.state(self.remainder)), array(exact))
        return exact


def array(tensor: torch.Tensor) -> Any:
    """A contiguous tensor as the flat NumPy array that the kernels take: bf16 as its bits in uint16."""
    flat = tensor.view(-1)
    return flat.view(torch.uint16).numpy() if flat.dtype == torch.bfloat16 else flat.numpy()


class HostStore:
    """The host buffers of all units, by purpose."""

    def __init__(self, layouts: Sequence[Layout], allocate: Allocate) -> None:
        self._layouts = tuple(layouts)
        self._allocate = allocate
        self._buffers: dict[str, torch.Tensor] = {}
        pieces = {purpose: self._pieces(purpose) for purpose in MODEL_PURPOSES}
        self.shards = [
            HostShard(
                layout,
                weight=pieces[WEIGHTS][i][: layout.nbytes],
                gradient=pieces[GRADIENTS][i][: layout.grad_nbytes],
                remainder=pieces[REMAINDERS][i].view(torch.uint16),
                master=pieces[MASTERS][i].view(torch.float32),
                state={},
            )
            for i, layout in enumerate(self._layouts)
        ]

    def add_state(self, purposes: Sequence[str]) -> None:
        """Give every shard an fp32 buffer of zeros for each of ``purposes`` that it has not yet."""
        for purpose in purposes:
            if purpose not in self._buffers:
                for shard, piece in zip(self.shards, self._pieces(purpose), strict=True):
                    shard.state[purpose] = piece.view(torch.float32)

    def staging(self, count: int) -> list[torch.Tensor]:
        """``count`` buffers that each hold any unit's gradient, for gradients that are added to others."""
        nbytes = max((layout.grad_nbytes for layout in self._layouts), default=0)
        self._buffers[STAGING] = self._allocate(count * nbytes)
        return list(self._buffers[STAGING].split(nbytes)) if nbytes else []

    def bytes_by_purpose(self) -> dict[str, int]:
        """Bytes allocated, by purpose; purposes that take none are left out."""
        return {purpose: buffer.numel() for purpose, buffer in self._buffers.items() if buffer.numel()}

    def _pieces(self, purpose: str) -> list[torch.Tensor]:
        sizes = [shard_nbytes(layout, purpose) for layout in self._layouts]
        self._buffers[purpose] = self._allocate(sum(sizes))
        return list(self._buffers[purpose].split(sizes))
