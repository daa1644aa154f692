"""When a layer's graph is built, and what is kept until backward.

[Note: activation policies]
One `autograd.Function` (in `layer`) stands for a layer in the user's graph; the layer's own graph is a
separate one that begins at the detached inputs and at views of the slot. The policies differ in when
that graph is built:

- ``recompute`` runs the forward without a graph and keeps the inputs; backward runs the forward again,
  with the random state and autocast of the first time, and goes back through the graph at once.
- ``keep`` builds the graph in forward. What the graph saves of the weights is saved as a place in the
  slot, because the slot will hold other layers in between; backward looks it up in whichever slot the
  unit then has.

In both, a hook on each weight's view moves its gradient into the gradient slot as soon as autograd has
it, so that the whole gradient leaves as one copy, and so that it is known which weights had none.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch

from streamer.engine.ambient import Ambient, Autocast
from streamer.engine.call import Call, Tensors, aliases
from streamer.engine.executor import Executor
from streamer.engine.order import Phase
from streamer.engine.saved import storages
from streamer.engine.tree import Rebuild
from streamer.engine.unit import Unit

Outputs = tuple[list[torch.Tensor], Rebuild]


class Graph(NamedTuple):
    """A layer's own graph: its ends."""

    inputs: Tensors
    leaves: Tensors
    outputs: Tensors


class _Gate:
    """Refuses gradients that come to a layer's private graph from anywhere but the layer's own backward.

    A tensor that leaves a layer through an attribute, a hook or a recorder is not connected to the user's
    graph: what flows back through it would be lost.
    """

    def __init__(self, layer: str) -> None:
        self._layer = layer
        self._is_open = False

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Let gradients through inside the block."""
        self._is_open = True
        try:
            yield
        finally:
            self._is_open = False

    def check(self, *_: object) -> None:
        """Raise RuntimeError unless open."""
        if not self._is_open:
            raise RuntimeError(
                f"a tensor that layer '{self._layer}' computed reached the loss by another way than the "
                "layer's return value (an attribute, a hook, recorded outputs such as router logits), where "
                "its gradient would be lost: return it, detach it, or do not stream this list of layers"
            )

    def guard(self, tensors: Tensors) -> None:
        """Check whenever a gradient comes to one of these leaves."""
        for tensor in tensors:
            if tensor.requires_grad:
                tensor.register_hook(self.check)


class Visit(abc.ABC):
    """One forward of a layer and the backward that belongs to it. [Note: activation policies]"""

    #: whether backward must be given the inputs again
    saves_inputs: bool

    def __init__(self, executor: Executor, call: Call) -> None:
        self.executor = executor
        self.call = call
        #: whether the backward that is running asks for gradients of weights
        self.wants_weights = True
        self._gate = _Gate(call.unit.name)
        self._release: Callable[[], object] = lambda: None
        self._written = call.unit.written()

    @abc.abstractmethod
    def first_run(self, weights: torch.Tensor, inputs: Tensors) -> Outputs:
        """Run the layer in forward."""

    @abc.abstractmethod
    def graph(self, weights: torch.Tensor, inputs: Tensors) -> Graph:
        """The layer's graph in backward, its weights being those in the slot ``weights``."""

    def forward(self, inputs: Tensors) -> Outputs:
        """The layer's output tensors, and what puts its result together from them."""
        unit = self.call.unit
        return self.executor.forward(unit, lambda weights: self.first_run(weights, inputs), Phase.FORWARD)

    def backward(
        self, inputs: Tensors, gradients: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        """Gradients of the inputs from those of the outputs; those of the weights go to the host."""
        unit = self.call.unit
        if unit.written() != self._written:
            raise RuntimeError(
                f"the weights of layer '{unit.name}' have changed since the forward that this backward "
                "belongs to (was optimizer.step() called in between?): run the forward again"
            )
        input_gradients: list[torch.Tensor | None] = []

        def work(weights: torch.Tensor, gradient: torch.Tensor) -> list[bool]:
            graph = self.graph(weights, inputs)
            with self._gate.opened():
                used = _backpropagate(unit, graph, gradients, into=gradient if self.wants_weights else None)
            if not _graph_is_retained():
                self._release()
            for tensor in graph.inputs:
                input_gradients.append(tensor.grad)
                tensor.grad = None
            return used

        self.executor.backward(unit, work)
        return input_gradients


class Recompute(Visit):
    """Keep the inputs, run the forward again in backward."""

    saves_inputs = True

    def first_run(self, weights: torch.Tensor, inputs: Tensors) -> Outputs:
        unit = self.call.unit
        self._ambient = Ambient.now(self.executor.backend.device)
        self._modes = unit.modes()
        buffers = unit.buffers_now()
        inner, leaves = _detached(inputs), unit.leaves(weights)
        self._gate.guard([*inner, *leaves])

        def refuse(_: None) -> torch.Tensor:
            self._gate.check()
            raise AssertionError("a graph that has saved nothing is not gone through")

        with (
            self._ambient.autocast.uncached(),
            # a graph that saves nothing, only to find out who goes back through it
            torch.enable_grad(),
            torch.autograd.graph.saved_tensors_hooks(lambda _: None, refuse),
        ):
            outputs, rebuild = self.call.run(weights, leaves, inner)
        self._release = self.executor.saved.hold(self, storages(inputs))
        self._buffers = unit.buffers_changed(buffers)
        return [output.detach() for output in outputs], rebuild

    def graph(self, weights: torch.Tensor, inputs: Tensors) -> Graph:
        unit = self.call.unit
        leaves = unit.leaves(weights)
        inner = _detached(inputs)
        self._gate.guard([*inner, *leaves])
        with (
            self._ambient.again(),
            unit.in_modes(self._modes),
            unit.with_buffers(self._buffers),
            torch.enable_grad(),
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


class Keep(Visit):
    """Build the graph in forward and keep it, with saved weights as places in the slot."""

    saves_inputs = False

    def first_run(self, weights: torch.Tensor, inputs: Tensors) -> Outputs:
        leaves = self.call.unit.leaves(weights)
        inner = _detached(inputs)
        self._slot = slot = _Slot()

        held: dict[int, int] = {}

        gate = self._gate
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
        self._release = self.executor.saved.hold(self, held)
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
        if not _graph_is_retained():
            self._graph = None
        return graph


#: The values of ``wrap(activations=...)``.
POLICIES: dict[str, type[Visit]] = {"recompute": Recompute, "keep": Keep}


def _backpropagate(
    unit: Unit, graph: Graph, gradients: Sequence[torch.Tensor | None], *, into: torch.Tensor | None
) -> list[bool]:
    """Go back through ``graph``; which trainable parameters now have their gradient in ``into``, if that
    is given."""
    used = [False] * len(unit.layout.trainable)

    def take(leaf: torch.Tensor) -> None:
        assert leaf.grad is not None, "the hook runs after autograd has set it"
        if into is not None:
            index = places[id(leaf)]
            view = unit.layout.trainable[index].view(into)
            view.copy_(leaf.grad.to_dense() if leaf.grad.is_sparse else leaf.grad)
            used[index] = True
        leaf.grad = None

    trained = [leaf for leaf in graph.leaves[: len(used)] if leaf.requires_grad]
    places = {id(leaf): index for index, leaf in enumerate(graph.leaves)}
    handles = [leaf.register_post_accumulate_grad_hook(take) for leaf in trained]
    pairs = [
        (output, gradient)
        for output, gradient in zip(graph.outputs, gradients, strict=True)
        if gradient is not None and output.requires_grad
    ]
    try:
        if pairs:
            outputs, output_gradients = zip(*pairs, strict=True)
            torch.autograd.backward(outputs, output_gradients, retain_graph=_graph_is_retained())
    finally:
        for handle in handles:
            handle.remove()
    return used


def _detached(inputs: Tensors) -> list[torch.Tensor]:
    return [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in inputs]


def _graph_is_retained() -> bool:
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())
