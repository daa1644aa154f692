"""The places of a unit's parameters in its flat buffers. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from streamer_native import QUANTUM

#: Elements to which every parameter is aligned, and bytes, as PyTorch aligns its own tensors, so that the
#: same kernels run on a slot as on a plain parameter.
ALIGN, ALIGN_BYTES = 32, 64


@dataclass(frozen=True)
class Param:
    """A parameter without a place yet. ``dtype`` is the one it is streamed in."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    trainable: bool


@dataclass(frozen=True)
class Stretch:
    """Contiguous elements of one dtype: ``offset`` in bytes in the weight and gradient buffers, ``index`` in
    elements in the buffers of optimizer state."""

    dtype: torch.dtype
    offset: int
    index: int
    numel: int

    @property
    def nbytes(self) -> int:
        """Bytes in the weight and gradient buffers."""
        return self.numel * self.dtype.itemsize

    @property
    def bytes(self) -> range:
        """The bytes themselves."""
        return range(self.offset, self.offset + self.nbytes)

    def view(self, buffer: torch.Tensor) -> torch.Tensor:
        """The elements in a unit's flat uint8 buffer of weights or gradients, in their dtype."""
        return buffer[self.offset : self.offset + self.nbytes].view(self.dtype)

    def state(self, buffer: torch.Tensor) -> torch.Tensor:
        """The elements in a unit's flat buffer of optimizer state."""
        return buffer[self.index : self.index + self.numel]

    def follows(self, other: Stretch) -> bool:
        """Whether this begins where ``other`` ends, in both kinds of buffer."""
        end = other.offset + other.nbytes, other.index + other.numel
        return self.dtype == other.dtype and (self.offset, self.index) == end


@dataclass(frozen=True)
class Slice(Stretch):
    """The stretch of one parameter, without its padding; views have the parameter's shape. ``block`` is its
    place in buffers that hold one value for every 256 elements begun."""

    param: Param
    block: int

    @cached_property
    def padded(self) -> int:
        """Elements of the parameter and its padding."""
        return -(-self.numel // ALIGN) * ALIGN

    @cached_property
    def distance(self) -> int:
        """Elements from the parameter's place in the state to that in the weights."""
        return self.offset // self.dtype.itemsize - self.index

    def view(self, buffer: torch.Tensor) -> torch.Tensor:
        return super().view(buffer).view(self.param.shape)

    def state(self, buffer: torch.Tensor) -> torch.Tensor:
        return super().state(buffer).view(self.param.shape)

    def own(self, buffer: torch.Tensor) -> torch.Tensor:
        """`view`, with a storage of its own if the buffer is in host memory: `torch.save` of one tensor, and
        code that looks for tied tensors, compare storages."""
        if buffer.device.type != "cpu" or not self.numel:
            return self.view(buffer)
        piece = torch.from_numpy(buffer[self.offset : self.offset + self.nbytes].numpy())
        return piece.view(self.dtype).view(self.param.shape)

    def blocks(self, buffer: torch.Tensor) -> torch.Tensor:
        """The parameter's values in a unit's flat buffer of one value per block."""
        return buffer[self.block : self.block + num_blocks(self.numel)]


@dataclass(frozen=True)
class Layout:
    """The flat buffers of one unit.

    Trainable parameters come first: a gradient buffer is the prefix of the weight buffer that holds
    them, and frozen parameters have neither gradient nor optimizer state.
    """

    slices: tuple[Slice, ...]
    nbytes: int
    grad_nbytes: int
    state_numel: int
    state_blocks: int

    @staticmethod
    def of(params: Iterable[Param]) -> Layout:
        """Lay out ``params`` in order, the trainable ones first."""
        slices: list[Slice] = []
        offset = index = block = grad_nbytes = state_numel = state_blocks = 0
        for param in sorted(params, key=lambda param: not param.trainable):
            numel = torch.Size(param.shape).numel()
            align = max(ALIGN_BYTES, ALIGN * param.dtype.itemsize)
            offset = -(-offset // align) * align
            slice = Slice(param.dtype, offset, index, numel, param, block)
            slices.append(slice)
            offset += slice.padded * param.dtype.itemsize
            index += slice.padded
            block += num_blocks(numel)
            if param.trainable:
                grad_nbytes, state_numel, state_blocks = offset, index, block
        return Layout(tuple(slices), offset, grad_nbytes, state_numel, state_blocks)

    @cached_property
    def trainable(self) -> tuple[Slice, ...]:
        """The slices that have a gradient."""
        return tuple(slice for slice in self.slices if slice.param.trainable)

    def views(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """The parameters in a flat uint8 buffer of weights, or the trainable ones in one of gradients.

        Created once for each permanent buffer, and kept as long as the buffer exists.
        """
        known: dict[int, tuple[Layout, list[torch.Tensor]]] = buffer.__dict__.setdefault(
            "_streamer_views", {}
        )
        if id(self) not in known:
            with torch.inference_mode(mode=False):
                # of another tensor with the same memory: views must not keep the buffer alive
                view = buffer.detach()
                fitting = (slice for slice in self.slices if slice.offset + slice.nbytes <= buffer.numel())
                known[id(self)] = self, [slice.view(view) for slice in fitting]
        return known[id(self)][1]

    def stretches(self, used: Sequence[bool]) -> list[Stretch]:
        """The stretches of the ``used`` trainable parameters, without padding. Adjacent parameters share
        one."""
        key = tuple(used)
        if key not in self._stretches:
            # the same ones are used nearly always
            self._stretches.clear()
            found: list[Stretch] = []
            for slice, is_used in zip(self.trainable, key, strict=True):
                if not is_used or not slice.numel:
                    continue
                stretch = Stretch(slice.dtype, slice.offset, slice.index, slice.numel)
                if found and stretch.follows(found[-1]):
                    found[-1] = replace(found[-1], numel=found[-1].numel + stretch.numel)
                else:
                    found.append(stretch)
            self._stretches[key] = found
        return self._stretches[key]

    @cached_property
    def _stretches(self) -> dict[tuple[bool, ...], list[Stretch]]:
        return {}

    @property
    def numel(self) -> int:
        """Parameters, without padding."""
        return sum(slice.numel for slice in self.slices)


def num_blocks(numel: int) -> int:
    """The number of blocks of 256 elements for ``numel`` elements."""
    return -(-numel // QUANTUM)
