"""The activation policies. [Note: activation policies]"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch.autograd.graph import get_gradient_edge

from streamer.engine.layer.activation import Gate, Graph, LayerRun, Outputs
from streamer.engine.layer.ambient import Ambient, Autocast, without_own_checkpoint
from streamer.engine.layer.call import aliases
from streamer.engine.layer.parameter_gradients import graph_is_retained
from streamer.engine.layer.recompute import Owners, RecomputedTensors, holders, is_another_way
from streamer.engine.tensors.attributes import Contents
from streamer.engine.tensors.guarded import is_plain
from streamer.engine.tensors.nested import Tensors, fingerprint
from streamer.engine.tensors.param_hooks import OWN_HOOK
from streamer.engine.tensors.samples import Sample, another_way
from streamer.engine.tensors.saved import Saved, storages


class Recompute(LayerRun):
    """Keep the inputs, run the forward again in backward. [Note: recomputation]"""

    saves_inputs = True
    #: the graph of the first run, where that is the one to go back through
    _graph: Graph | None = None
    #: the slot that its leaves show
    _shown: torch.Tensor | None = None

    def first_run(self, weights: torch.Tensor, inputs: Tensors) -> Outputs:
        unit = self.call.unit
        self._attributes = unit.attributes()
        self._contents = Contents(unit.contents)
        self._ambient = Ambient.now(self.executor.backend.device, self._contents.generators)
        tensors = self._contents.tensors
        unwritten = fingerprint(tensors)
        buffers = unit.buffers_now()
        unit.layout.views(weights)  # they own the slot too, and are made when they are first needed
        owners = Owners(weights)
        inner, leaves = _detached(inputs), unit.leaves_apart(weights)
        # one of its own: if the layer has kept a part of a graph that is dropped, not even backward may go on
        gate = Gate(unit.name)
        gate.guard([*inner, *leaves])
        accumulators = [get_gradient_edge(tensor) for tensor in inner if tensor.requires_grad]
        held_by = holders(inner)
        self._late = RecomputedTensors(unit.name, gate)
        # hooks that do something would be compiled too
        may_keep = not self.call.is_compiled and all(map(self._comes_back_alike, inputs))
        with (
            self._ambient.autocast.uncached(),
            torch.enable_grad(),
            self._late.expected(unit.selection, weights) if may_keep else self._late.refused(),
            owners.counted(),
            without_own_checkpoint(unit.module),
        ):
            outputs, rebuild = self.call.run(weights, leaves, inner)
        if self.is_whole:
            _hand_on_hooks(inner, inputs)
        if fingerprint(tensors) != unwritten:
            raise ValueError(
                f"layer '{unit.name}' writes into a tensor that is one of its attributes, and would do so "
                "again when it runs again in backward: make it a buffer, or wrap with activations='keep'"
            )
        self._buffers = unit.buffers_changed(buffers)
        # compiled code may draw other random numbers than the forward that it was made of
        self._needs_compiled = self.call.is_compiled and self._ambient.has_moved_on()
        graph = Graph.of(inner, leaves, outputs)
        detached = [output.detach() for output in outputs]
        may_keep = may_keep and self._late.are_all_of(outputs, (*inner, *leaves), unit.selection)
        del outputs, accumulators
        # a hook may have recorded what a module was given, and would see it lose its memory
        if may_keep and holders(inner) == held_by:
            _let_go(inner)
            if owners.more() == len(leaves):
                self.gate, self._graph, self._shown = gate, graph, weights
        self._samples = [] if self._graph is not None else [Sample.of(output) for output in detached]
        return detached, rebuild

    @contextmanager
    def graph(self, weights: torch.Tensor, inputs: Tensors) -> Iterator[Graph]:
        kept, unit = self._graph, self.call.unit
        if not graph_is_retained():
            self._graph = None
        if kept is None:
            yield self._built_anew(weights, inputs)
            return
        _point(kept.inputs, inputs)
        if self._shown is not weights:
            _point(kept.leaves, unit.leaves(weights))
            self._shown = weights
        try:
            # on others than the graph's own, where the layer may have put hooks
            leaves, inner = unit.leaves(weights), _detached(inputs)
            if self._late.bring(partial(self._run_again, weights, leaves, inner)):
                self._compare(self._late.samples)
                yield kept
                return
            self._late.drop()
            graph = self._built_anew(weights, inputs)
            if is_another_way(kept.outputs, graph.outputs):
                raise another_way(unit.name)
            yield graph
        finally:
            self._late.drop()
            _let_go(kept.inputs)
            if self._graph is not None:  # it is kept on, for as long as anybody likes
                _let_go(kept.leaves)
                self._shown = None

    def _comes_back_alike(self, tensor: torch.Tensor) -> bool:
        """Whether `_point` can exchange the memory of this input for what `graph` will be given."""
        if not is_plain(tensor) or tensor.layout != torch.strided:
            return False
        # what has gaps comes from the host without them, and PyTorch may compute with it by other operations
        return not self.pages_inputs or tensor.stride() == torch.empty_like(tensor, device="meta").stride()

    def _built_anew(self, weights: torch.Tensor, inputs: Tensors) -> Graph:
        unit = self.call.unit
        if self._needs_compiled and not self.call.is_compiled:
            raise RuntimeError(
                f"layer '{unit.name}' drew random numbers in its compiled forward, and compiling has failed "
                "since then, so that it cannot draw the same again: call zero_grad and run the forward again"
            )
        leaves = unit.leaves(weights)
        inner = _detached(inputs)
        self.gate.guard([*inner, *leaves])
        outputs = self._run_again(weights, leaves, inner)
        self._compare(zip(self._samples, map(Sample.of, outputs), strict=False))
        return Graph.of(inner, leaves, outputs)

    def _compare(self, samples: Iterable[tuple[Sample | None, Sample | None]]) -> None:
        """Hold what both runs have computed against each other. [Note: samples]"""
        unit = self.call.unit
        is_short = unit.is_short or self._ambient.autocast.is_on()
        for first, again in samples:
            if first is not None and again is not None:
                self.executor.samples.add(unit.name, first, again, is_short=is_short)

    def _run_again(self, weights: torch.Tensor, leaves: Tensors, inner: Tensors) -> Tensors:
        unit = self.call.unit
        with (
            self._ambient.again(),
            unit.with_attributes(self._attributes),
            self._contents.again(),
            unit.with_buffers(self._buffers),
            torch.enable_grad(),
            without_own_checkpoint(unit.module),
        ):
            outputs, _ = self.call.run(weights, leaves, inner)
        if self.is_whole:
            _hand_on_hooks(inner)
        return outputs


@dataclass(frozen=True)
class _SlotView:
    """A saved tensor that is a view of a slot, by its place in it (in elements, as torch counts)."""

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
    """Where the weights are: an object of its own, so that what the graph saves does not own the graph."""

    weights: torch.Tensor


class RecomputeOffload(Recompute):
    """`Recompute`, with the inputs in host memory in the meantime."""

    pages_inputs = True


class Keep(LayerRun):
    """Build the graph in forward and keep it, with saved weights as places in the slot."""

    saves_inputs = False

    def first_run(self, weights: torch.Tensor, inputs: Tensors) -> Outputs:
        leaves = self.call.unit.leaves(weights)
        inner = _detached(inputs)
        self._slot = slot = _Slot()

        held: dict[int, int] = {}

        gate = self.gate
        gate.guard([*inner, *leaves])

        def pack(saved: torch.Tensor) -> Saved | _SlotView:
            if aliases(saved, weights):
                return _SlotView.of(saved)
            held.update(storages([saved]))
            return Saved.now(saved)

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
            _hand_on_hooks(inner, inputs)
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
        _point(graph.leaves, self.call.unit.leaves(weights))
        if not graph_is_retained():
            self._graph = None
        yield graph


#: The values of ``wrap(activations=...)``.
POLICIES: dict[str, type[LayerRun]] = {
    "recompute": Recompute,
    "recompute+offload": RecomputeOffload,
    "keep": Keep,
}


def _point(leaves: Tensors, tensors: Tensors) -> None:
    """Let ``leaves`` of a graph show the memory of ``tensors``."""
    for leaf, tensor in zip(leaves, tensors, strict=True):
        leaf.data = tensor.detach()


def _let_go(leaves: Tensors) -> None:
    """Let ``leaves`` of a graph hold no memory until the graph is gone through."""
    numbers = {(leaf.dtype, leaf.device): leaf for leaf in leaves}
    numbers = {kind: leaf.new_empty(()) for kind, leaf in numbers.items()}
    _point(leaves, [numbers[leaf.dtype, leaf.device].expand(leaf.shape) for leaf in leaves])


def _hand_on_hooks(inner: Tensors, inputs: Tensors = ()) -> None:
    """Take the hooks that a layer has put on what it was given, and put them on ``inputs`` in the user's
    graph: they hear of the gradient of all that is made of a tensor, in the layer or elsewhere."""
    for number, tensor in enumerate(inner):
        hooks = tensor._backward_hooks or {}
        for key in [key for key, hook in hooks.items() if not getattr(hook, OWN_HOOK, False)]:
            hook = hooks.pop(key)
            if inputs:
                inputs[number].register_hook(hook)


def _detached(inputs: Tensors) -> list[torch.Tensor]:
    return [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in inputs]
