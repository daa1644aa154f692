"""References of a layer's own graph to a slot, stored as places: the layer's backward runs on another
slot."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

from streamer.engine.guard import as_plain
from streamer.engine.tensors.nested import Tensors, reachable
from streamer.engine.unit import Unit
from streamer.quantized.parts import aliases, plain_parts, rebuilt
from streamer.torch_private import is_sparse


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
