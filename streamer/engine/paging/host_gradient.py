"""The tensors of ``p.grad``: the flat buffers of a unit's gradients, and of their fp32 sums.

[Note: sums]
A gradient keeps the dtype that it had on the device. If a second one is added to it, and its dtype is
bfloat16 or float16, both go into an fp32 sum: thousands of additions in eight bits of precision would lose
most of the small values. ``p.grad`` is then fp32 until it is dropped, which PyTorch allows if
``Tensor.grad_dtype`` is None. A single gradient never takes those four bytes.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import nn

from streamer.engine.guard import TAG, GuardedTensor, Tag, as_plain
from streamer.engine.unit import Unit
from streamer.store.layout import Slice
from streamer.store.purposes import FP32
from streamer.torch_private import storage_owners

_ADDRESS = operator.methodcaller("data_ptr")


def is_summed(param: torch.Tensor) -> bool:
    """Whether ``p.grad`` is an fp32 sum of a parameter with a shorter dtype."""
    # called several times a step for every parameter
    return param.dtype != FP32 and (grad := param.grad) is not None and grad.dtype == FP32


class Assigned(NamedTuple):
    """A gradient that user code or autograd has assigned to ``p.grad``; ``position`` is its parameter's."""

    position: int
    param: nn.Parameter
    grad: torch.Tensor


class Buffer:
    """A flat buffer of gradients, or of sums, and the tensor of ``p.grad`` for each place in it."""

    @as_plain
    def __init__(
        self, memory: torch.Tensor, slices: Sequence[Slice], tag: Tag | None, *, summed: bool
    ) -> None:
        self.memory = memory
        self._slices = slices
        self._tag = tag
        self._summed = summed
        self.views = [self._view(position) for position in range(len(slices))]
        self._addresses = [*map(_ADDRESS, self.views)]
        #: whether user code has got the memory in another tensor or an array
        self.may_be_aliased = False
        self._owners = 0 if memory.is_meta else storage_owners(memory)

    def _view(self, position: int) -> torch.Tensor:
        slice = self._slices[position]
        place = slice.state(self.memory) if self._summed else slice.view(self.memory)
        return place if self._tag is None else GuardedTensor.of(place, self._tag)

    def place(self, position: int) -> torch.Tensor:
        """The tensor of a place. It is a new tensor if the memory of the old one was replaced (``p.grad.data
        = x``)."""
        if self.views[position].data_ptr() != self._addresses[position]:
            self.views[position] = self._view(position)
        return self.views[position]

    def owns(self, position: int, grad: torch.Tensor) -> bool:
        """Whether ``grad`` is ours, and still has our memory (``p.grad.data = x`` replaces it)."""
        return grad is self.views[position] and grad.data_ptr() == self._addresses[position]

    def owns_all(self, grads: Sequence[torch.Tensor | None]) -> bool:
        """`owns`, for a gradient of each parameter."""
        # called several times a step, and nearly always true: no frame for each parameter
        is_all = len(grads) == len(self.views) and all(map(operator.is_, grads, self.views))
        return is_all and [*map(_ADDRESS, self.views)] == self._addresses

    def owns_any(self, grad: torch.Tensor | None) -> bool:
        """Whether ``grad`` is one of ours."""
        return grad is not None and any(grad is each for each in self.views)

    def is_aliased(self) -> bool:
        """Whether user code holds the buffer's memory. Running work holds it, too."""
        if self.may_be_aliased and storage_owners(self.memory) <= self._owners:
            self.may_be_aliased = False
        return self.may_be_aliased

    def kept(self) -> list[int]:
        """The positions of tensors that have references other than ``p.grad`` itself (``g = p.grad``)."""
        if max(map(sys.getrefcount, self.views), default=0) <= _REFERENCES:
            return []
        return [at for at in range(len(self.views)) if _references(self.views, at) > _REFERENCES_OF_ONE]

    @as_plain
    def copy_out(self, position: int, scale: float) -> None:
        """Move a kept gradient to memory of its own, multiplied by ``scale``. A new tensor is then used for
        our place."""
        kept = self.views[position]
        kept.data = kept.detach() * scale
        kept.__dict__.pop(TAG, None)
        self.views[position] = self._view(position)


def _references(objects: Sequence[object], at: int) -> int:
    return sys.getrefcount(objects[at])


#: References to an object with one owner. Versions of Python differ in the references held during a call.
_REFERENCES = max(map(sys.getrefcount, [object()]))
_REFERENCES_OF_ONE = _references([object()], 0)


class Memory(Protocol):
    """The source of the buffers of a unit's gradients."""

    @property
    def is_shared(self) -> bool:
        """Whether other ranks use the buffers too, so that they cannot be exchanged."""

    def gradient(self) -> torch.Tensor:
        """The buffer of gradients, flat uint8."""

    def sums(self) -> torch.Tensor:
        """The buffer of fp32 sums, flat, allocated at its first use. Raises MemoryError."""

    def exchange(self, memory: torch.Tensor | None, *, summed: bool) -> torch.Tensor:
        """Replace the buffer of gradients or of sums by ``memory``, or by new memory. Raises MemoryError."""


class HostGradient:
    """The gradients of one unit: a buffer of them (flat uint8, in the parameters' dtypes) and, from the first
    second gradient on, one of fp32 sums, both in the unit's layout. [Note: sums]

    The root unit's buffers are on the device, the others in host memory.
    """

    def __init__(self, unit: Unit, memory: Memory, tag: Tag | None, *, sums_in_fp32: bool) -> None:
        self.unit = unit
        self._memory = memory
        self._sums_in_fp32 = sums_in_fp32
        self._tag = tag
        self._slices = unit.layout.trainable
        self._buffers = {False: self._buffer(memory.gradient(), summed=False)}
        #: the first buffers of gradients and of sums, while user code holds them
        self._homes: dict[bool, Buffer] = {}

    def _buffer(self, memory: torch.Tensor, *, summed: bool) -> Buffer:
        # with update="backward" layers have no gradients
        slices = [each for each in self._slices if summed or each.offset + each.nbytes <= memory.numel()]
        return Buffer(memory, slices, self._tag, summed=summed)

    def buffer(self, *, summed: bool) -> Buffer:
        """The buffer of gradients, or of sums."""
        if summed not in self._buffers:
            self._buffers[summed] = self._buffer(self._memory.sums(), summed=summed)
        return self._buffers[summed]

    def pairs(self) -> Iterator[tuple[Slice, nn.Parameter]]:
        """Each trainable parameter and its place."""
        return zip(self._slices, self.unit.params, strict=False)

    def sums_in_fp32(self, param: nn.Parameter) -> bool:
        """Whether a second gradient of ``param`` is added in fp32 instead of its own dtype."""
        return self._sums_in_fp32 and param.dtype != FP32

    @as_plain
    def place(self, position: int, *, summed: bool) -> torch.Tensor:
        """The place of a parameter's gradient. Raises RuntimeError if there is none."""
        buffer = self.buffer(summed=summed and self._sums_in_fp32)
        if position >= len(buffer.views):
            raise RuntimeError(
                f"'{self._slices[position].param.name}' has a gradient from outside of its layer, for which "
                "update='backward' has no room: wrap with update='step'"
            )
        return buffer.place(position)

    @as_plain
    def set_grads(self, selected: Sequence[bool], *, summed: bool = False) -> None:
        """Set ``p.grad`` to the places of the ``selected`` parameters."""
        if not any(selected):
            return
        buffer = self.buffer(summed=summed)
        for position, is_wanted in enumerate(selected):
            if is_wanted:
                self.unit.params[position].grad = buffer.place(position)

    def is_ours(self, position: int, grad: torch.Tensor) -> bool:
        """Whether ``grad`` is our tensor for the parameter's place."""
        return any(
            position < len(buffer.views) and buffer.owns(position, grad) for buffer in self._buffers.values()
        )

    @as_plain
    def assigned(self) -> list[Assigned]:
        """Gradients that were assigned to ``p.grad`` in place of ours."""
        params = self.unit.trainable
        grads = [param.grad for param in params]
        if self.buffer(summed=False).owns_all(grads):
            return []
        return [
            Assigned(position, params[position], grad)
            for position, grad in enumerate(grads)
            if grad is not None and not self.is_ours(position, grad)
        ]

    @as_plain
    def take_in(self, assigned: Sequence[Assigned]) -> None:
        """Copy gradients into our buffers, and set ``p.grad`` to their places again."""
        for _, param, grad in assigned:
            param.grad = grad  # so that only the user holds tensors of our memory
        for summed in {is_summed(param) for _, param, _ in assigned}:
            selected = [False] * len(self._slices)
            for position, param, _ in assigned:
                selected[position] = is_summed(param) == summed
            self.make_room(selected, summed=summed)
        for position, param, grad in assigned:
            place = self.place(position, summed=is_summed(param))
            place.copy_(grad.to_dense() if grad.is_sparse else grad)
            param.grad = place

    @as_plain
    def held(self) -> list[torch.Tensor]:
        """The gradients in ``p.grad`` that are in our buffers."""
        return [
            grad
            for position, param in enumerate(self.unit.trainable)
            if (grad := param.grad) is not None and self.is_ours(position, grad)
        ]

    def note_alias(self, view: torch.Tensor) -> None:
        """User code has got the memory of ``view``, our tensor for a place."""
        for buffer in (*self._buffers.values(), *self._homes.values()):
            buffer.may_be_aliased |= buffer.owns_any(view)

    @as_plain
    def is_kept(self) -> bool:
        """Whether user code holds a gradient, or its memory."""
        return any(buffer.is_aliased() or buffer.kept() for buffer in self._buffers.values())

    @as_plain
    def is_aliased(self) -> bool:
        """Whether user code holds the memory of a gradient in another tensor or an array."""
        return any(buffer.is_aliased() for buffer in self._buffers.values())

    @as_plain
    def copy_out(self, scale: float) -> None:
        """Move dropped gradients that user code keeps to memory of their own, multiplied by ``scale``."""
        for buffer in self._buffers.values():
            for position in buffer.kept():
                if self.unit.params[position].grad is not buffer.views[position]:
                    buffer.copy_out(position, scale)

    @as_plain
    def make_room(self, selected: Sequence[bool], *, summed: bool = False) -> None:
        """Gradients, or sums, are about to be written to the places of dropped gradients, for the parameters
        that are ``selected``. Dropped gradients that user code keeps must not change, as in PyTorch, which
        allocates new tensors. So the unit gets another buffer, and its earlier one when that is free.

        If ranks share the buffer, or ``p.grad`` uses a part of it, the kept gradients are copied. Raises
        RuntimeError then if other tensors with their memory would be overwritten.
        """
        if not any(selected):
            return
        buffer, home = self.buffer(summed=summed), self._homes.get(summed)
        is_kept = buffer.is_aliased() or any(selected[position] for position in buffer.kept())
        if not is_kept and home is None:
            return
        if self._memory.is_shared or any(buffer.owns_any(param.grad) for param in self.unit.trainable):
            self.copy_out(1.0)
            if buffer.is_aliased():
                raise RuntimeError(
                    f"tensors made from gradients of '{self.unit.name}' share their memory (p.grad.detach(), "
                    ".view(), .numpy()), and new gradients would overwrite it: keep copies (.clone())"
                )
        elif home is not None and not (home.is_aliased() or home.kept()):
            del self._homes[summed]
            self._memory.exchange(home.memory, summed=summed)
            self._buffers[summed] = home
        elif is_kept:
            new = self._buffer(self._memory.exchange(None, summed=summed), summed=summed)
            self._homes.setdefault(summed, buffer)
            self._buffers[summed] = new

    def memories(self) -> list[torch.Tensor]:
        """Our buffers."""
        return [buffer.memory for buffer in self._buffers.values()]

    @as_plain
    def widen(self, position: int) -> None:
        """Autograd is about to add to ``p.grad`` itself: convert it to fp32 if it is to be summed."""
        param = self.unit.params[position]
        if (grad := param.grad) is None or not self.sums_in_fp32(param) or is_summed(param):
            return
        self.make_room([at == position for at in range(len(self._slices))], summed=True)
        place = self.place(position, summed=True)
        place.copy_(grad.to_dense() if grad.is_sparse else grad)
        param.grad = place

    @as_plain
    def narrow(self, position: int) -> None:
        """Convert the gradient to the dtype of its parameter, as optimizers other than ours expect."""
        param = self.unit.params[position]
        if is_summed(param):
            total, place = param.grad, self.place(position, summed=False)
            assert total is not None
            place.copy_(total)
            param.grad = place
