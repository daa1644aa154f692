"""The activation policies. [Note: activation policies]"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from streamer.engine.layer.activation import (
    Graph,
    LayerRun,
    Outputs,
    detached_inputs,
    hand_on_hooks,
    show_slot,
)
from streamer.engine.layer.ambient import Autocast
from streamer.engine.layer.parameter_gradients import graph_is_retained
from streamer.engine.layer.recompute import (
    Owners,
    Recompute,
    RecomputeOffload,
    contexts,
)
from streamer.engine.tensors.guarded import as_plain
from streamer.engine.tensors.nested import Tensors, reachable
from streamer.engine.tensors.parts import aliases, plain_parts, remade
from streamer.engine.tensors.saved import Saved, storages
from streamer.torch_private import is_sparse


@dataclass(frozen=True)
class _SlotView:
    """The place of a saved tensor in the slot that it is a view of; offset and stride count elements."""

    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @staticmethod
    def of(tensor: torch.Tensor) -> _SlotView:
        return _SlotView(tensor.dtype, int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride())

    def view(self, weights: torch.Tensor) -> torch.Tensor:
        return weights.view(self.dtype).as_strided(self.shape, self.stride, self.offset)


@dataclass(frozen=True)
class _Remade:
    """A saved tensor that is sparse or of a subclass, by the places of its parts in the slot, or the parts
    themselves where they are elsewhere (indices); ``like`` has it made."""

    like: torch.Tensor
    parts: tuple[_SlotView | torch.Tensor, ...]

    def view(self, weights: torch.Tensor) -> torch.Tensor:
        parts = (part.view(weights) if isinstance(part, _SlotView) else part for part in self.parts)
        return remade(self.like, [*parts])


def _place_of(saved: torch.Tensor, weights: torch.Tensor) -> _SlotView | _Remade:
    """The place of a tensor that is a view of the slot ``weights``, or that is made of such."""
    parts = plain_parts(saved)
    if parts[0] is saved:
        return _SlotView.of(saved)
    without = remade(saved, [torch.empty_like(part, device="meta") for part in parts])
    return _Remade(without, tuple(_SlotView.of(part) if aliases(part, weights) else part for part in parts))


class _InContexts:
    """Views of the slot ``weights`` that custom functions in the graph of ``outputs`` keep in attributes of
    their contexts, where no hook for saved tensors sees them: kernels of quantized weights do so."""

    @as_plain
    def __init__(self, outputs: Tensors, weights: torch.Tensor) -> None:
        kept = {
            id(part): part
            for value in contexts(outputs)
            for whole in reachable(value)
            # nobody can exchange the values of a sparse tensor: `first_run` refuses views of the slot there
            if not is_sparse(whole)
            for part in plain_parts(whole)
        }
        self._places = [(part, _SlotView.of(part)) for part in kept.values() if aliases(part, weights)]

    def __len__(self) -> int:
        return len(self._places)

    @as_plain
    def point(self, weights: torch.Tensor) -> None:
        """Let them show the slot ``weights``."""
        for tensor, place in self._places:
            tensor.data = place.view(weights)


class _Slot:
    """Holds the slot with the weights. The hooks of a graph own this object, and not the graph's owner."""

    weights: torch.Tensor


class Keep(LayerRun):
    """Build the graph in forward and keep it, with saved weights as places in the slot."""

    saves_inputs = False

    def first_run(self, weights: torch.Tensor, inputs: Tensors) -> Outputs:
        unit = self.call.unit
        unit.layout.views(weights)  # they own the slot too, and are made when they are first needed
        owners = Owners(weights)
        leaves = unit.leaves(weights)
        inner = detached_inputs(inputs)
        self._slot = slot = _Slot()

        held: dict[int, int] = {}

        gate = self.gate
        gate.guard(inner, leaves)

        def pack(saved: torch.Tensor) -> Saved | _SlotView | _Remade:
            if aliases(saved, weights):
                return _place_of(saved, weights)
            held.update(storages([saved]))
            # a node may save its own output, which would keep the node, and so itself, for good
            return Saved.now(saved if saved.is_leaf else saved.detach())

        def unpack(saved: Saved | _SlotView | _Remade) -> torch.Tensor:
            gate.check()
            return saved.unchanged() if isinstance(saved, Saved) else saved.view(slot.weights)

        with (
            Autocast.now(self.executor.backend.device).uncached(),
            torch.enable_grad(),
            torch.autograd.graph.saved_tensors_hooks(pack, unpack),
            owners,
        ):
            outputs, rebuild = self.call.run(weights, leaves, inner)
        self._in_contexts = _InContexts(outputs, weights)
        # where it is not exact, the layer's next forward will tell
        if owners.is_exact and owners.more() > len(leaves) + len(self._in_contexts):
            raise RuntimeError(
                f"layer '{unit.name}' keeps views of its weights beyond its forward where nobody sees them "
                "(in a custom function, or a closure), and other weights would be in their place in "
                "backward: save them by ctx.save_for_backward, or wrap with activations='recompute'"
            )
        if self.is_whole:
            hand_on_hooks(inner, inputs)
        self.release = self.executor.saved.hold(self, held)
        self._graph: Graph | None = Graph.of(inner, leaves, outputs)
        return [output.detach() for output in outputs], rebuild

    @contextmanager
    def graph(self, weights: torch.Tensor, inputs: Tensors) -> Iterator[Graph]:
        if self._graph is None:
            raise RuntimeError(
                f"layer '{self.call.unit.name}' is gone through backward a second time: "
                "call backward(retain_graph=True) the first time"
            )
        graph, unit = self._graph, self.call.unit
        unit.attributes()
        unit.check_owned()
        self._slot.weights = weights
        self._in_contexts.point(weights)
        show_slot(graph.leaves, unit, weights)
        if not graph_is_retained():
            self._graph = None
        yield graph


#: The values of ``wrap(activations=...)``.
POLICIES: dict[str, type[LayerRun]] = {
    "recompute": Recompute,
    "recompute+offload": RecomputeOffload,
    "keep": Keep,
}
