"""Where each parameter of a unit lies in the unit's flat buffers. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

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
    elements in the buffers of optimizer state."""

    param: Param
    numel: int
    offset: int
    index: int

    @property
    def nbytes(self) -> int:
        """Bytes of the parameter, without padding."""
        return self.numel * self.param.dtype.itemsize

    def view(self, buffer: torch.Tensor) -> torch.Tensor:
        """The parameter in a unit's flat uint8 weight or gradient buffer, in its dtype and shape."""
        flat = buffer[self.offset : self.offset + self.nbytes]
        return flat.view(self.param.dtype).view(self.param.shape)

    def state(self, buffer: torch.Tensor) -> torch.Tensor:
        """The parameter's elements in a unit's flat buffer of optimizer state, in the parameter's shape."""
        return buffer[self.index : self.index + self.numel].view(self.param.shape)


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

    @staticmethod
    def of(params: Iterable[Param]) -> Layout:
        """Lay out ``params`` in order, the trainable ones first."""
        slices: list[Slice] = []
        offset = index = grad_nbytes = state_numel = 0
        for param in sorted(params, key=lambda param: not param.trainable):
            numel = torch.Size(param.shape).numel()
            padded = -(-numel // ALIGN) * ALIGN
            offset = -(-offset // (ALIGN * param.dtype.itemsize)) * (ALIGN * param.dtype.itemsize)
            slices.append(Slice(param, numel, offset, index))
            offset += padded * param.dtype.itemsize
            index += padded
            if param.trainable:
                grad_nbytes, state_numel = offset, index
        return Layout(tuple(slices), offset, grad_nbytes, state_numel)

    @property
    def trainable(self) -> tuple[Slice, ...]:
        """The slices that have a gradient."""
        return tuple(slice for slice in self.slices if slice.param.trainable)

    def runs(self, used: Sequence[bool]) -> list[tuple[torch.dtype, int, int]]:
        """Stretches of the gradient buffer, as (dtype, first byte, end), that hold the ``used`` ones of
        the trainable parameters and nothing else, neighbours without padding between them made one."""
        runs: list[tuple[torch.dtype, int, int]] = []
        for slice, is_used in zip(self.trainable, used, strict=True):
            if not is_used or not slice.numel:
                continue
            start, stop = slice.offset, slice.offset + slice.nbytes
            if runs and runs[-1][0] == slice.param.dtype and runs[-1][2] == start:
                start = runs.pop()[1]
            runs.append((slice.param.dtype, start, stop))
        return runs

    @property
    def numel(self) -> int:
        """Parameters, without padding."""
        return sum(slice.numel for slice in self.slices)
