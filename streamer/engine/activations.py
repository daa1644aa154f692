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
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from streamer.engine.asked import Asked, asked_for, graph_is_retained
from streamer.engine.call import Call, Tensors
from streamer.engine.executor import Executor
from streamer.engine.gate import Gate
from streamer.engine.order import Phase
from streamer.engine.param_hooks import carried, check_hooks
from streamer.engine.tree import Rebuild
from streamer.engine.unit import Unit

Outputs = tuple[list[torch.Tensor], Rebuild]

Gradients = Sequence[torch.Tensor | None]


class Graph(NamedTuple):
    """A layer's own graph: its ends."""

    inputs: Tensors
    leaves: Tensors
    outputs: Tensors


class Visit(abc.ABC):
    """One forward of a layer and the backward that belongs to it. [Note: activation policies]"""

    #: whether backward must be given the inputs again
    saves_inputs: bool

    def __init__(self, executor: Executor, call: Call) -> None:
        self.executor = executor
        self.call = call
        self.gate = Gate(call.unit.name)
        self.release: Callable[[], object] = lambda: None
        self._written = call.unit.written()
        check_hooks(call.unit.layout.slices, call.unit.params)
        self._wanted = call.unit.wanted()

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
        self, inputs: Tensors, gradients: Gradients, asked: Sequence[Asked]
    ) -> list[torch.Tensor | None]:
        """From the gradients of the outputs those of the trainable parameters and, after them, of the inputs.

        ``asked`` says, for each trainable parameter, whether its gradient is RETURNED; what is ADDED goes to
        the host, and is None here.
        """
        unit = self.call.unit
        if self.executor.released:
            raise RuntimeError(
                "the model was unwrapped since the forward that this backward belongs to: run the forward "
                "again"
            )
        check_hooks(unit.layout.slices, unit.params)
        added = [what is Asked.ADDED for what in asked]
        if any(added):
            self.executor.check_backward(unit)
        for slice, param, is_added in zip(unit.layout.trainable, unit.trainable, added, strict=True):
            if is_added:
                self.executor.hooked.check(slice, param)
        if unit.written() != self._written:
            raise RuntimeError(
                f"the weights of layer '{unit.name}' have changed since the forward that this backward "
                "belongs to (was optimizer.step() called in between?): run the forward again"
            )
        if unit.wanted() != self._wanted:
            raise RuntimeError(
                f"requires_grad of parameters of layer '{unit.name}' has changed since the forward that this "
                "backward belongs to (were adapters switched in between?): change it after backward"
            )
        results: list[torch.Tensor | None] = []

        def go_back(weights: torch.Tensor, gradient: torch.Tensor) -> tuple[Graph, list[bool]]:
            graph = self.graph(weights, inputs)
            # for checkpoints inside of the layer: [Note: checkpointing]
            with self.gate.opened(), unit.using(graph.leaves):
                return graph, _backpropagate(self.executor, unit, graph, gradients, asked, gradient)

        def work(weights: torch.Tensor, gradient: torch.Tensor) -> list[bool]:
            try:
                graph, used = go_back(weights, gradient)
            except self.call.compile_failures as error:
                # a backward is compiled when it runs for the first time
                self.call.give_up_compiling(error)
                if not self.saves_inputs:
                    raise  # the graph cannot be built again
                graph, used = go_back(weights, gradient)
            if not graph_is_retained():
                self.release()
            for tensor in (*graph.leaves[: len(used)], *graph.inputs):
                results.append(tensor.grad)
                tensor.grad = None
            return used

        self.executor.backward(unit, work)
        return results


def _backpropagate(
    executor: Executor,
    unit: Unit,
    graph: Graph,
    gradients: Gradients,
    asked: Sequence[Asked],
    into: torch.Tensor,
) -> list[bool]:
    """Go back through ``graph``; which trainable parameters now have their gradient in ``into``, as is
    asked. Other gradients are left with their leaves."""
    used = [False] * len(asked)

    def take(leaf: torch.Tensor) -> None:
        assert leaf.grad is not None, "the hook runs after autograd has set it"
        index = places[id(leaf)]
        view = unit.layout.trainable[index].view(into)
        gradient = leaf.grad.to_dense() if leaf.grad.is_sparse else leaf.grad
        if used[index]:  # a backward inside of this one brings its part by itself
            view.add_(gradient)
        else:
            view.copy_(gradient)
        used[index] = True
        leaf.grad = None

    places = {id(leaf): index for index, leaf in enumerate(graph.leaves)}
    trained = [
        (leaf, param, what)
        for leaf, param, what in zip(graph.leaves, unit.trainable, asked, strict=False)
        if leaf.requires_grad
    ]
    handles = []
    for leaf, param, what in trained:
        if what is Asked.ADDED:
            handles += [leaf.register_post_accumulate_grad_hook(take), *carried(param, leaf)]
    only: list[torch.Tensor] | None = None
    if any(what is not Asked.ADDED for _, _, what in trained):
        only = [leaf for leaf, _, what in trained if what is not Asked.NOTHING]
        only += [tensor for tensor in graph.inputs if tensor.requires_grad]
        # those that the layer uses though they are registered elsewhere
        for param, what in asked_for(p for each in (*executor.units, executor.root) for p in each.trainable):
            only.append(param)
            if what is Asked.RETURNED:
                handles.append(param.register_hook(_refuse_to_return(unit)))
    pairs = [
        (output, gradient)
        for output, gradient in zip(graph.outputs, gradients, strict=True)
        if gradient is not None and output.requires_grad
    ]
    try:
        if pairs and only != []:
            outputs, output_gradients = zip(*pairs, strict=True)
            torch.autograd.backward(outputs, output_gradients, retain_graph=graph_is_retained(), inputs=only)
    finally:
        for handle in handles:
            handle.remove()
    return used


def _refuse_to_return(unit: Unit) -> Callable[[torch.Tensor | None], None]:
    """A hook for a parameter that has no place in the graph where ``unit`` stands for what is in it."""

    def hook(gradient: torch.Tensor | None) -> None:
        if gradient is not None:
            raise RuntimeError(
                f"torch.autograd.grad asks for a parameter that layer '{unit.name}' uses though it is "
                "registered elsewhere: call loss.backward(inputs=[param]) and take param.grad"
            )

    return hook
