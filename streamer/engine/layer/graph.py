"""A layer's own graph: its references to the slot, and the gradients of its parameters.

References to a slot are stored as places, since the layer's backward runs on another slot. Gradients are
copied into the gradient slot as autograd computes them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

from streamer.engine.guard import as_plain
from streamer.engine.tensors import Tensors, reachable
from streamer.engine.unit import Unit
from streamer.quantized.parts import aliases, plain_parts, rebuilt
from streamer.store.purposes import FP32
from streamer.torch_private import comes_to, is_sparse, keeps_graph


class SlotView(NamedTuple):
    """The place of a saved tensor in the slot that it is a view of; offset and stride count elements."""

    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @staticmethod
    def of(tensor: torch.Tensor) -> SlotView:
        return SlotView(tensor.dtype, int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride())

    def view(self, weights: torch.Tensor) -> torch.Tensor:
        """The same place in the slot ``weights``."""
        return weights.view(self.dtype).as_strided(self.shape, self.stride, self.offset)


class RebuiltView(NamedTuple):
    """A saved tensor that is sparse or of a subclass: the places of its parts in the slot, or the parts
    themselves if they are elsewhere (indices). ``template`` is the model for rebuilding it."""

    template: torch.Tensor
    parts: tuple[SlotView | torch.Tensor, ...]

    def view(self, weights: torch.Tensor) -> torch.Tensor:
        """The same tensor, rebuilt from parts in the slot ``weights``."""
        parts = (part.view(weights) if isinstance(part, SlotView) else part for part in self.parts)
        return rebuilt(self.template, [*parts])


def place_of(saved: torch.Tensor, weights: torch.Tensor) -> SlotView | RebuiltView:
    parts = plain_parts(saved)
    if parts[0] is saved:
        return SlotView.of(saved)
    without = rebuilt(saved, [torch.empty_like(part, device="meta") for part in parts])
    return RebuiltView(
        without, tuple(SlotView.of(part) if aliases(part, weights) else part for part in parts)
    )


class InContexts:
    """Views of the slot ``weights`` that custom functions in the graph of ``outputs`` keep in attributes of
    their contexts, outside of the hooks for saved tensors: kernels of quantized weights do so."""

    @as_plain
    def __init__(self, outputs: Tensors, weights: torch.Tensor) -> None:
        kept = {
            id(part): part
            for value in _contexts(outputs)
            for whole in reachable(value)
            # the values of a sparse tensor cannot be exchanged
            if not is_sparse(whole)
            for part in plain_parts(whole)
        }
        self._places = [(part, SlotView.of(part)) for part in kept.values() if aliases(part, weights)]

    def __bool__(self) -> bool:
        return bool(self._places)

    @as_plain
    def point(self, unit: Unit, weights: torch.Tensor) -> None:
        """Move them to the slot ``weights`` of ``unit``."""
        if self._places:
            unit.forget_leaves()  # some leaves may be among them
        for tensor, place in self._places:
            tensor.data = place.view(weights)


def _contexts(outputs: Tensors) -> Iterator[dict[str, Any]]:
    """The attributes of the contexts of the custom functions in the graph of ``outputs``."""
    found: set[Node] = set()
    nodes = [output.grad_fn for output in outputs]
    while nodes:
        node = nodes.pop()
        if node is not None and node not in found:
            found.add(node)
            nodes.extend(before for before, _ in node.next_functions)
            if issubclass(type(node), BackwardCFunction):
                yield vars(node)


def is_added_to(accumulator: Any) -> bool:
    """Whether the running backward adds to the gradient of the graph's node ``accumulator``."""
    try:
        return comes_to(accumulator)
    except RuntimeError as error:
        # the tensor is an input of `torch.autograd.grad`; there is no other way to find out
        if "running autograd.grad()" not in str(error):
            raise
        return False


def graph_is_retained() -> bool:
    """Whether the running backward retains its graph."""
    return bool(keeps_graph())


#: Gradients up to this many bytes (of biases and norms) wait for others of their size: one launch copies them
#: all.
SMALL_BYTES = 1 << 16


class Collector:
    """Copies the gradients of ``unit`` into the gradient slot ``into`` (flat uint8) as autograd computes
    them, one slice of the batch after another. With ``in_fp32``, gradients of a shorter dtype are added up in
    fp32 first, which takes 4 bytes per element until `finish`."""

    def __init__(self, unit: Unit, into: torch.Tensor, *, in_fp32: bool) -> None:
        slices = unit.layout.trainable
        self.used = [False] * len(slices)
        #: small gradients and their places
        self._waiting: list[tuple[torch.Tensor, torch.Tensor]] = []
        #: the tensors in which gradients are added up, and their final places
        self._sums = self._places = unit.layout.views(into)[: len(slices)]
        if in_fp32 and any(slice.dtype != FP32 for slice in slices):
            sums = torch.empty(unit.layout.state_numel, dtype=FP32, device=into.device)
            self._sums = [
                place if slice.dtype == FP32 else slice.state(sums)
                for slice, place in zip(slices, self._places, strict=True)
            ]

    def take(self, index: int, leaf: torch.Tensor) -> None:
        """Autograd has set the gradient of ``leaf``, the leaf of trainable parameter ``index``."""
        gradient = leaf.grad
        assert gradient is not None, "called after autograd has set it"
        if gradient.is_sparse:
            gradient = gradient.to_dense()
        place = self._sums[index]
        if self.used[index]:
            self.end_slice()
            place.add_(gradient)
        elif gradient.nbytes <= SMALL_BYTES:
            self._waiting.append((place, gradient))
        else:
            place.copy_(gradient)
        self.used[index] = True
        leaf.grad = None

    def end_slice(self) -> None:
        """Autograd has finished a slice of the batch: copy the small gradients that wait."""
        if self._waiting:
            places, gradients = zip(*self._waiting, strict=True)
            self._waiting.clear()
            torch._foreach_copy_(places, gradients)

    def finish(self) -> list[bool]:
        """Called after all slices. Returns which of the trainable parameters have a gradient in the slot."""
        for used, total, place in zip(self.used, self._sums, self._places, strict=True):
            if used and total is not place:
                place.copy_(total)
        return self.used
