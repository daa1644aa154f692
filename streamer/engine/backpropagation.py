"""Going back through the graph of one run of a layer."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from streamer.engine.asked import Asked, asked_for, graph_is_retained
from streamer.engine.call import Tensors
from streamer.engine.collecting import Collector
from streamer.engine.executor import Executor
from streamer.engine.unit import Unit

Gradients = Sequence[torch.Tensor | None]


class Graph(NamedTuple):
    """A layer's own graph: its ends."""

    inputs: Tensors
    leaves: Tensors
    #: where gradients come in, for each output that may bring one; edges, since tensors would hold memory
    outputs: Sequence[GradientEdge | None]

    @staticmethod
    def of(inputs: Tensors, leaves: Tensors, outputs: Tensors) -> Graph:
        """The graph that has led from ``inputs`` and ``leaves`` to ``outputs``."""
        edges = [get_gradient_edge(output) if output.requires_grad else None for output in outputs]
        return Graph(inputs, leaves, edges)


def backpropagate(
    executor: Executor, unit: Unit, graph: Graph, gradients: Gradients, collector: Collector
) -> None:
    """Go back through ``graph`` from the gradients of its outputs. Gradients of parameters that are to be
    ADDED go to ``collector``, others are left with their leaves."""
    trained = [
        (index, leaf, what)
        for index, (leaf, what) in enumerate(zip(graph.leaves, collector.asked, strict=False))
        if leaf.requires_grad
    ]
    taken = [(index, leaf) for index, leaf, what in trained if what is Asked.ADDED]
    for index, leaf in taken:
        # as `register_post_accumulate_grad_hook` does, without a handle, which takes longer to make
        leaf._post_accumulate_grad_hooks = OrderedDict(collector=partial(collector.take, index))
    handles: list[RemovableHandle] = []
    only: list[torch.Tensor] | None = None
    if any(what is not Asked.ADDED for _, _, what in trained):
        only = [leaf for _, leaf, what in trained if what is not Asked.NOTHING]
        only += [tensor for tensor in graph.inputs if tensor.requires_grad]
        # those that the layer uses though they are registered elsewhere
        for param, what in asked_for(p for each in (*executor.units, executor.root) for p in each.trainable):
            only.append(param)
            if what is Asked.RETURNED:
                handles.append(param.register_hook(_refuse_to_return(unit)))
    pairs = [
        (output, gradient)
        for output, gradient in zip(graph.outputs, gradients, strict=True)
        if gradient is not None and output is not None
    ]
    try:
        if pairs and only != []:
            outputs, output_gradients = zip(*pairs, strict=True)
            torch.autograd.backward(outputs, output_gradients, retain_graph=graph_is_retained(), inputs=only)
    finally:
        for handle in handles:
            handle.remove()
        for _, leaf in taken:
            leaf._post_accumulate_grad_hooks.clear()


def _refuse_to_return(unit: Unit) -> Callable[[torch.Tensor | None], None]:
    """A hook for a parameter that has no place in the graph where ``unit`` stands for what is in it."""

    def hook(gradient: torch.Tensor | None) -> None:
        if gradient is not None:
            raise RuntimeError(
                f"torch.autograd.grad asks for a parameter that layer '{unit.name}' uses though it is "
                "registered elsewhere: call loss.backward(inputs=[param]) and take param.grad"
            )

    return hook
