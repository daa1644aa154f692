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
    point,
)
from streamer.engine.layer.ambient import Autocast
from streamer.engine.layer.call import aliases
from streamer.engine.layer.parameter_gradients import graph_is_retained
from streamer.engine.layer.recompute import (
    Recompute,
    RecomputeOffload,
)
from streamer.engine.tensors.nested import Tensors
from streamer.engine.tensors.saved import Saved, storages


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


class _Slot:
    """Holds the slot with the weights. The hooks of a graph own this object, and not the graph's owner."""

    weights: torch.Tensor


class Keep(LayerRun):
    """Build the graph in forward and keep it, with saved weights as places in the slot."""

    saves_inputs = False

    def first_run(self, weights: torch.Tensor, inputs: Tensors) -> Outputs:
        leaves = self.call.unit.leaves(weights)
        inner = detached_inputs(inputs)
        self._slot = slot = _Slot()

        held: dict[int, int] = {}

        gate = self.gate
        gate.guard([*inner, *leaves])

        def pack(saved: torch.Tensor) -> Saved | _SlotView:
            if aliases(saved, weights):
                return _SlotView.of(saved)
            held.update(storages([saved]))
            # a node may save its own output, which would keep the node, and so itself, for good
            return Saved.now(saved if saved.is_leaf else saved.detach())

        def unpack(saved: Saved | _SlotView) -> torch.Tensor:
            gate.check()
            return saved.view(slot.weights) if isinstance(saved, _SlotView) else saved.unchanged()

        with (
            Autocast.now(self.executor.backend.device).uncached(),
            torch.enable_grad(),
            torch.autograd.graph.saved_tensors_hooks(pack, unpack),
        ):
            outputs, rebuild = self.call.run(weights, leaves, inner)
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
        graph = self._graph
        self._slot.weights = weights
        point(graph.leaves, self.call.unit.leaves(weights))
        if not graph_is_retained():
            self._graph = None
        yield graph


#: The values of ``wrap(activations=...)``.
POLICIES: dict[str, type[LayerRun]] = {
    "recompute": Recompute,
    "recompute+offload": RecomputeOffload,
    "keep": Keep,
}
