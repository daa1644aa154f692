"""Where each parameter of a unit lies in the unit's flat buffers. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from streamer_native import QUANTUM

#: Elements to which every parameter is aligned: 64 bytes or more, as PyTorch aligns its own tensors,
#: so that the same kernels run on a slot as on a plain parameter.
ALIGN = 32


@dataclass(frozen=True)
class Param:
    """A parameter before it has a place. ``dtype`` is the streamed one."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    trainable: bool


@dataclass(frozen=True)
class Slice:
    """A parameter and its place: ``offset`` in bytes in the weight and gradient buffers, ``index`` in
    elements in the buffers of optimizer state, ``block`` in those that hold one value for every 256 elements
    begun."""

    param: Param
    numel: int
    offset: int
    index: int
    block: int

    @property
    def nbytes(self) -> int:
        """Bytes of the parameter, without padding."""
        return self.numel * self.param.dtype.itemsize

    @cached_property
    def padded(self) -> Stretch:
        """The parameter's elements, and those that pad it."""
        return Stretch(self.param.dtype, self.offset, self.index, -(-self.numel // ALIGN) * ALIGN)

    def view(self, buffer: torch.Tensor) -> torch.Tensor:
        """The parameter in a unit's flat uint8 weight or gradient buffer, in its dtype and shape."""
        flat = buffer[self.offset : self.offset + self.nbytes]
        return flat.view(self.param.dtype).view(self.param.shape)

    def own(self, buffer: torch.Tensor) -> torch.Tensor:
        """`view`, under a storage of the parameter's own if the buffer is in host memory: who saves one
        tensor, or looks for tensors that are tied, goes by storages."""
        if buffer.device.type != "cpu" or not self.numel:
            return self.view(buffer)
        piece = torch.from_numpy(buffer[self.offset : self.offset + self.nbytes].numpy())
        return piece.view(self.param.dtype).view(self.param.shape)

    def state(self, buffer: torch.Tensor) -> torch.Tensor:
        """The parameter's elements in a unit's flat buffer of optimizer state, in the parameter's shape."""
        return buffer[self.index : self.index + self.numel].view(self.param.shape)

    def blocks(self, buffer: torch.Tensor) -> torch.Tensor:
        """The parameter's values in a unit's flat buffer of one value per block."""
        return buffer[self.block : self.block + num_blocks(self.numel)]


@dataclass(frozen=True)
class Stretch:
    """Elements of one dtype that lie side by side: ``offset`` in bytes in the weight and gradient buffers,
    ``index`` in elements in the buffers of optimizer state."""

    dtype: torch.dtype
    offset: int
    index: int
    numel: int

    def view(self, buffer: torch.Tensor) -> torch.Tensor:
        """The elements in a flat uint8 buffer of weights or gradients, in their dtype."""
        return buffer[self.offset : self.offset + self.numel * self.dtype.itemsize].view(self.dtype)

    def state(self, buffer: torch.Tensor) -> torch.Tensor:
        """The elements in a flat buffer of optimizer state."""
        return buffer[self.index : self.index + self.numel]

    def follows(self, other: Stretch) -> bool:
        """Whether this begins where ``other`` ends, in both kinds of buffer."""
        return (
            self.dtype == other.dtype
            and self.index == other.index + other.numel
            and self.offset == other.offset + other.numel * other.dtype.itemsize
        )


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
            padded = -(-numel // ALIGN) * ALIGN
            offset = -(-offset // (ALIGN * param.dtype.itemsize)) * (ALIGN * param.dtype.itemsize)
            slices.append(Slice(param, numel, offset, index, block))
            offset += padded * param.dtype.itemsize
            index += padded
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

        Made once for each buffer that stays, which has them until it is gone.
        """
        made: dict[int, tuple[Layout, list[torch.Tensor]]] = buffer.__dict__.setdefault("_streamer_views", {})
        if id(self) not in made:
            with torch.inference_mode(mode=False):
                # of another tensor that shows the buffer: it shall not be kept by its own views
                shown = buffer.detach()
                fitting = (slice for slice in self.slices if slice.offset + slice.nbytes <= buffer.numel())
                made[id(self)] = self, [slice.view(shown) for slice in fitting]
        return made[id(self)][1]

    def stretches(self, used: Sequence[bool]) -> list[Stretch]:
        """Stretches that hold the ``used`` ones of the trainable parameters and nothing else, no padding,
        neighbours made one."""
        key = tuple(used)
        if key not in self._stretches:
            # nearly always the same ones are used
            self._stretches.clear()
            self._stretches[key] = self._make_stretches(used)
        return self._stretches[key]

    @cached_property
    def _stretches(self) -> dict[tuple[bool, ...], list[Stretch]]:
        return {}

    def _make_stretches(self, used: Sequence[bool]) -> list[Stretch]:
        stretches: list[Stretch] = []
        for slice, is_used in zip(self.trainable, used, strict=True):
            if not is_used or not slice.numel:
                continue
            stretch = Stretch(slice.param.dtype, slice.offset, slice.index, slice.numel)
            if stretches and stretch.follows(stretches[-1]):
                last = stretches.pop()
                stretch = replace(last, numel=last.numel + stretch.numel)
            stretches.append(stretch)
        return stretches

    @property
    def numel(self) -> int:
        """Parameters, without padding."""
        return sum(slice.numel for slice in self.slices)


def num_blocks(numel: int) -> int:
    """Blocks of 256 elements that ``numel`` elements begin."""
    return -(-numel // QUANTUM)
