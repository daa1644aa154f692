"""The activation policies. [Note: activation policies]"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from streamer.engine.activations import Outputs, Run
from streamer.engine.ambient import Ambient, Autocast
from streamer.engine.asked import graph_is_retained
from streamer.engine.backpropagation import Graph
from streamer.engine.call import Tensors, aliases
from streamer.engine.checkpointing import without_own_checkpoint
from streamer.engine.gate import Gate
from streamer.engine.saved import storages
from streamer.engine.tree import fingerprint


class Recompute(Run):
    """Keep the inputs, run the forward again in backward."""

    saves_inputs = True

    def first_run(self, weights: torch.Tensor, inputs: Tensors) -> Outputs:
        unit = self.call.unit
        self._attributes = unit.attributes()
        held = [value for values in self._attributes.values() for value in values.values()]
        generators = [value for value in held if type(value) is torch.Generator]
        self._ambient = Ambient.now(self.executor.backend.device, generators)
        tensors = [value for value in held if isinstance(value, torch.Tensor)]
        unwritten = fingerprint(tensors)
        buffers = unit.buffers_now()
        inner, leaves = _detached(inputs), unit.leaves(weights)
        # nobody may go through the graph of this run, nor backward if the layer has kept a part of it
        gate = Gate(unit.name)
        gate.guard([*inner, *leaves])

        def refuse(_: None) -> torch.Tensor:
            gate.check()
            raise AssertionError("a graph that has saved nothing is not gone through")

        with (
            self._ambient.autocast.uncached(),
            # a graph that saves nothing, only to find out who goes back through it
            torch.enable_grad(),
            torch.autograd.graph.saved_tensors_hooks(lambda _: None, refuse),
            without_own_checkpoint(unit.module),
        ):
            outputs, rebuild = self.call.run(weights, leaves, inner)
        if fingerprint(tensors) != unwritten:
            raise ValueError(
                f"layer '{unit.name}' writes into a tensor that is one of its attributes, and would do so "
                "again when it runs again in backward: make it a buffer, or wrap with activations='keep'"
            )
        self._buffers = unit.buffers_changed(buffers)
        # compiled code may draw other random numbers than the forward that it was made of
        self._needs_compiled = self.call.is_compiled and self._ambient.has_moved_on()
        return [output.detach() for output in outputs], rebuild

    def graph(self, weights: torch.Tensor, inputs: Tensors) -> Graph:
        unit = self.call.unit
        if self._needs_compiled and not self.call.is_compiled:
            raise RuntimeError(
                f"layer '{unit.name}' drew random numbers in its compiled forward, and compiling has failed "
                "since then, so that it cannot draw the same again: call zero_grad and run the forward again"
            )
        leaves = unit.leaves(weights)
        inner = _detached(inputs)
        self.gate.guard([*inner, *leaves])
        with (
            self._ambient.again(),
            unit.with_attributes(self._attributes),
            unit.with_buffers(self._buffers),
            torch.enable_grad(),
            without_own_checkpoint(unit.module),
        ):
            outputs, _ = self.call.run(weights, leaves, inner)
        return Graph(inner, leaves, outputs)


@dataclass(frozen=True)
class _Place:
    """A saved tensor that is a view of a slot, by its place in it (in elements, as torch counts)."""

    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @staticmethod
    def of(tensor: torch.Tensor) -> _Place:
        return _Place(tensor.dtype, int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride())

    def view(self, weights: torch.Tensor) -> torch.Tensor:
        return weights.view(self.dtype).as_strided(self.shape, self.stride, self.offset)


class _Saved(NamedTuple):
    """Any other saved tensor. PyTorch leaves it to the hooks to see that it has not been written since."""

    tensor: torch.Tensor
    version: int

    def unchanged(self) -> torch.Tensor:
        if self.tensor._version != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace "
                f"operation: a tensor of shape {tuple(self.tensor.shape)} that a streamed layer has saved"
            )
        return self.tensor


class _Slot:
    """Where the weights are: an object of its own, so that what the graph saves does not own the graph."""

    weights: torch.Tensor


class RecomputeOffload(Recompute):
    """`Recompute`, with the inputs in host memory in the meantime."""

    pages_inputs = True


class Keep(Run):
    """Build the graph in forward and keep it, with saved weights as places in the slot."""

    saves_inputs = False

    def first_run(self, weights: torch.Tensor, inputs: Tensors) -> Outputs:
        leaves = self.call.unit.leaves(weights)
        inner = _detached(inputs)
        self._slot = slot = _Slot()

        held: dict[int, int] = {}

        gate = self.gate
        gate.guard([*inner, *leaves])

        def pack(saved: torch.Tensor) -> _Saved | _Place:
            if aliases(saved, weights):
                return _Place.of(saved)
            held.update(storages([saved]))
            return _Saved(saved, saved._version)

        def unpack(saved: _Saved | _Place) -> torch.Tensor:
            gate.check()
            return saved.view(slot.weights) if isinstance(saved, _Place) else saved.unchanged()

        with (
            Autocast.now(self.executor.backend.device).uncached(),
            torch.enable_grad(),
            torch.autograd.graph.saved_tensors_hooks(pack, unpack),
        ):
            outputs, rebuild = self.call.run(weights, leaves, inner)
        self.release = self.executor.saved.hold(self, held)
        self._graph: Graph | None = Graph(inner, leaves, outputs)
        return [output.detach() for output in outputs], rebuild

    def graph(self, weights: torch.Tensor, inputs: Tensors) -> Graph:
        if self._graph is None:
            raise RuntimeError(
                f"layer '{self.call.unit.name}' is gone through backward a second time: "
                "call backward(retain_graph=True) the first time"
            )
        graph = self._graph
        self._slot.weights = weights
        for slice, leaf in zip(self.call.unit.layout.slices, graph.leaves, strict=True):
            leaf.data = slice.view(weights)
        if not graph_is_retained():
            self._graph = None
        return graph


#: The values of ``wrap(activations=...)``.
POLICIES: dict[str, type[Run]] = {
    "recompute": Recompute,
    "recompute+offload": RecomputeOffload,
    "keep": Keep,
}


def _detached(inputs: Tensors) -> list[torch.Tensor]:
    return [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in inputs]
