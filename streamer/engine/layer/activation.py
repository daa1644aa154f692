"""When a layer's graph is built, and what is kept until backward.

[Note: activation policies]
One `autograd.Function` (in `layer`) stands for a layer in the user's graph; the layer's own graph is a
separate one that begins at the detached inputs and at views of the slot. The policies differ in when
that graph is built:

- ``recompute`` keeps the inputs, and of the forward's graph no tensors; backward runs the forward again,
  with the random state and autocast of the first time, for the tensors that the graph needs: [Note:
  recomputation]. A second run that computes something else is noticed: [Note: samples].
- ``recompute+offload`` does the same, and the inputs wait in host memory: [Note: saved inputs].
- ``keep`` builds the graph in forward. What the graph saves of the weights is saved as a place in the
  slot, because the slot will hold other layers in between; backward looks it up in whichever slot the
  unit then has.

In all policies a hook on each weight's view moves the gradient of the weight into the gradient slot as soon
as autograd has it: the gradients of the layer leave in one copy, and it is known which weights had none. A
batch that is cut has such a graph for each slice: [Note: micro-batches].
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import compress
from typing import NamedTuple

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from streamer.engine.layer.batch_check import check_batch
from streamer.engine.layer.call import Call
from streamer.engine.layer.micro_batches import BatchSlices, Joined, JoinedGradients, Parts
from streamer.engine.layer.parameter_gradients import Asked, Collector, asked_for, graph_is_retained
from streamer.engine.paging.executor import Executor
from streamer.engine.paging.unit import Unit
from streamer.engine.schedule.order import Phase
from streamer.engine.tensors.nested import Rebuild, Tensors
from streamer.engine.tensors.param_hooks import OwnHook, check_hooks
from streamer.engine.tensors.saved import storages
from streamer.torch_private import (
    SubclassesOn,
    is_sparse,
    run_backward,
    set_accumulation_hook,
    set_gradient_hook,
)


class Gate(OwnHook):
    """Refuses gradients that come to a layer's private graph from anywhere but the layer's own backward.

    A tensor that leaves a layer through an attribute, a hook or a recorder is not connected to the user's
    graph: what flows back through it would be lost.
    """

    def __init__(self, layer: str) -> None:
        self._layer = layer
        #: where the gradients of weights go while the layer's own backward runs, None at other times
        self.collector: Collector | None = None
        #: the positions of the leaves that stand for weights, by their identity
        self._places: dict[int, int] = {}

    def check(self, *_: object) -> None:
        """Raise RuntimeError unless the layer's own backward runs."""
        if self.collector is None:
            raise RuntimeError(
                f"a tensor that layer '{self._layer}' computed reached the loss by another way than the "
                "layer's return value (an attribute, a hook, a cache, or torch.autograd.grad in the layer "
                "itself), where its gradient would be lost: return it, detach it, or do not stream this list "
                "of layers"
            )

    __call__ = check

    def guard(self, inputs: Tensors, leaves: Tensors) -> None:
        """Check whenever a gradient comes to one of these ``inputs``, or is added to one of the ``leaves``
        that stand for the layer's weights, whose gradients the collector takes."""
        for tensor in inputs:
            if tensor.requires_grad:
                set_gradient_hook(tensor, self)
        added = self._added
        for place, leaf in enumerate(leaves):
            if leaf.requires_grad:
                self._places[id(leaf)] = place
                set_accumulation_hook(leaf, added)

    def _added(self, leaf: torch.Tensor) -> None:
        if self.collector is not None:
            self.collector.take(self._places[id(leaf)], leaf)
        else:
            leaf.grad = None
            self.check()


def has_hooks(leaf: torch.Tensor) -> bool:
    """Whether ``leaf``, which is guarded, has other hooks too."""
    return bool(leaf._backward_hooks) or len(leaf._post_accumulate_grad_hooks or ()) > 1


OutputGradients = Sequence[torch.Tensor | None]


class Graph(NamedTuple):
    """The ends of a layer's own graph."""

    inputs: Tensors
    leaves: Tensors
    #: where gradients come in, for each output that may bring one; edges, since tensors would hold memory
    outputs: Sequence[GradientEdge | None]

    @staticmethod
    def of(inputs: Tensors, leaves: Tensors, outputs: Tensors) -> Graph:
        """The graph that has led from ``inputs`` and ``leaves`` to ``outputs``."""
        edges = [_edge_of(output) if output.requires_grad else None for output in outputs]
        return Graph(inputs, leaves, edges)


def derived(leaf: torch.Tensor) -> torch.Tensor:
    """What one operation makes of ``leaf``: a view, or a copy of a sparse tensor, which has no views."""
    return leaf.clone() if is_sparse(leaf) else leaf.view_as(leaf)


def _edge_of(output: torch.Tensor) -> GradientEdge:
    if output.grad_fn is None and is_sparse(output):  # PyTorch would try to make a view of it
        with torch.enable_grad():
            node = derived(output).grad_fn
        assert node is not None, "it requires a gradient, and gradients are on"
        accumulator = node.next_functions[0][0]
        assert accumulator is not None, "it is a leaf"
        return GradientEdge(accumulator, 0)
    return get_gradient_edge(output)


def backpropagate(
    executor: Executor, unit: Unit, graph: Graph, gradients: OutputGradients, collector: Collector
) -> None:
    """Go back through ``graph`` from the gradients of its outputs. Gradients of parameters that are to be
    ADDED go to ``collector``; the others stay in ``leaf.grad``."""
    handles: list[RemovableHandle] = []
    only: list[torch.Tensor] | None = None
    trained = [
        (leaf, what) for leaf, what in zip(graph.leaves, collector.asked, strict=False) if leaf.requires_grad
    ]
    if any(what is not Asked.ADDED for _, what in trained):
        only = [leaf for leaf, what in trained if what is not Asked.NOTHING]
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
            keeps = graph_is_retained()
            if only is None:
                # autograd has made these gradients itself: to look at them again would take half of the time
                accumulate = {"allow_unreachable": True, "accumulate_grad": True}
                run_backward(outputs, output_gradients, keeps, False, (), **accumulate)
            else:
                torch.autograd.backward(outputs, output_gradients, retain_graph=keeps, inputs=only)
    finally:
        for handle in handles:
            handle.remove()


def _refuse_to_return(unit: Unit) -> Callable[[torch.Tensor | None], None]:
    """A hook for a parameter that has no place in the graph where ``unit`` stands for what is in it."""

    def hook(gradient: torch.Tensor | None) -> None:
        if gradient is not None:
            raise RuntimeError(
                f"torch.autograd.grad asks for a parameter that layer '{unit.name}' uses though it is "
                "registered elsewhere: call loss.backward(inputs=[param]) and take param.grad"
            )

    return hook


Outputs = tuple[list[torch.Tensor], Rebuild]


class LayerRun(abc.ABC):
    """One run of a layer in forward, on a slice of its batch, and what is kept of it for backward. [Note:
    activation policies]"""

    #: whether inputs are saved in forward and passed to `graph` in backward
    saves_inputs: bool
    #: whether saved inputs that require grad wait in host memory
    pages_inputs = False
    #: whether the run has the whole batch, the user's own tensors, not a micro-batch
    is_whole = True

    def __init__(self, executor: Executor, call: Call) -> None:
        self.executor = executor
        self.call = call
        self.gate = Gate(call.unit.name)
        #: gives up what the run has kept on the device
        self.release: Callable[[], object] = lambda: None

    @abc.abstractmethod
    def first_run(self, weights: torch.Tensor, inputs: Tensors) -> Outputs:
        """Run the layer in forward."""

    @abc.abstractmethod
    def graph(self, weights: torch.Tensor, inputs: Tensors) -> AbstractContextManager[Graph]:
        """The layer's graph inside the block, in backward; its weights are in the slot ``weights``."""

    def go_back(
        self, weights: torch.Tensor, inputs: Tensors, gradients: OutputGradients, collector: Collector
    ) -> list[torch.Tensor | None]:
        """From the gradients of the outputs those of the inputs; parameters' go to ``collector``."""
        unit = self.call.unit
        with self.graph(weights, inputs) as graph:
            self.gate.collector = collector
            try:
                # for checkpoints inside of the layer: [Note: checkpointing]
                with self.executor.hooked.in_layer(), unit.restored(), unit.using(graph.leaves):
                    backpropagate(self.executor, unit, graph, gradients, collector)
                collector.end_slice(graph.leaves)
                return [tensor.grad for tensor in graph.inputs]
            finally:
                self.gate.collector = None
                # a graph that is kept may be gone through again, even after an error
                for tensor in (*graph.inputs, *graph.leaves):
                    tensor.grad = None


class LayerCall:
    """One call of a layer and the backward that belongs to it: a run of kind ``policy`` for each slice of the
    batch that ``cut`` makes."""

    def __init__(self, executor: Executor, call: Call, policy: type[LayerRun], cut: BatchSlices) -> None:
        self.executor = executor
        self.call = call
        self.saves_inputs = policy.saves_inputs
        self._pages_inputs = policy.pages_inputs
        #: which of the inputs are paged, and the number under which `InputPager` has them
        self._paged: list[bool] = []
        self._number: int | None = None
        self._cut = cut
        #: one for each slice
        self.runs = [policy(executor, call) for _ in cut.slices]
        for run in self.runs:
            run.is_whole = len(self.runs) == 1
        self._shapes: Sequence[torch.Size] = ()
        self._output_parts: Parts = ()
        self._release: Callable[[], object] = lambda: None
        self._written = call.unit.written()
        check_hooks(call.unit.layout.slices, call.unit.params)
        self._wanted = call.unit.wanted()

    def forward(self, inputs: Tensors) -> Outputs:
        """The tensors that leave the layer, and what puts its result together from them and, after them,
        ``inputs``."""
        self._paged = [self._pages_inputs and self.executor.inputs.takes(tensor) for tensor in inputs]
        if any(self._paged):
            self._number = self.executor.inputs.save(self, list(compress(inputs, self._paged)))
        outputs = self.executor.forward(self.call.unit, partial(self.run, inputs), Phase.FORWARD)
        if self.saves_inputs:
            self._release = self.executor.saved.hold(self, storages(self.kept(inputs)))
        return outputs

    def run(self, inputs: Tensors, weights: torch.Tensor) -> Outputs:
        """The work of `forward`, on the slot ``weights``."""
        self._shapes = [tensor.shape for tensor in inputs]
        joined = Joined(self.call.unit.name, self._cut, inputs, partial(self._run_aside, weights))
        start_again = self.call.unit.start_again() if len(self.runs) > 1 else None
        with self.call.unit.dequantized_once(times=len(self.runs)):
            if self._cut.unchecked is not None:
                with torch.enable_grad():
                    check_batch(self._cut, self.call, weights, self.executor.root, inputs)
            for number, run in enumerate(self.runs):
                if start_again is not None:
                    start_again()
                given = self._cut.inputs(inputs, number)
                try:
                    outputs, rebuild = run.first_run(weights, given)
                except Exception as error:
                    self._cut.explain(error, self.call.unit.name, inputs)
                    raise
                joined.add(number, outputs, rebuild, given)
        self._output_parts = joined.parts
        return joined.tensors, joined.rebuild

    def _run_aside(self, weights: torch.Tensor, inputs: Tensors) -> Outputs:
        with torch.enable_grad(), self.executor.root.buffers_unwritten_by(self.call.unit.name):
            return self.call.run_aside(weights, inputs)

    def kept(self, inputs: Tensors) -> list[torch.Tensor]:
        """Those of ``inputs`` that wait for backward on the device."""
        if not self.saves_inputs:
            return []
        return [tensor for tensor, is_paged in zip(inputs, self._paged, strict=True) if not is_paged]

    def backward(
        self, kept: Tensors, gradients: OutputGradients, asked: Sequence[Asked]
    ) -> list[torch.Tensor | None]:
        """The gradients of the trainable parameters and, after them, of the inputs, from those of the
        outputs. ``kept`` are the inputs that were saved on the device.

        ``asked`` says, for each trainable parameter, whether its gradient is RETURNED; one that is ADDED goes
        to ``p.grad``, and is None here.
        """
        self._check_backward(asked)
        results: list[torch.Tensor | None] = []

        def work(weights: torch.Tensor, gradient: torch.Tensor, paged: Tensors) -> list[bool]:
            inputs = self._inputs(kept, paged)
            used, found = self.go_back(weights, gradient, inputs, gradients, asked)
            if not graph_is_retained():
                self._release()
                if self._number is not None:
                    self.executor.inputs.forget(self._number)
                for run in self.runs:
                    run.release()
            results.extend(found)
            return used

        # backward() of a loss of a tensor subclass runs with subclasses switched off
        with SubclassesOn():
            self.executor.backward(self.call.unit, work, self._number)
        return results

    def go_back(
        self,
        weights: torch.Tensor,
        into: torch.Tensor,
        inputs: Tensors,
        gradients: OutputGradients,
        asked: Sequence[Asked],
    ) -> tuple[list[bool], list[torch.Tensor | None]]:
        """The work of `backward`: from the weights in a slot and the gradients of the outputs to those of the
        parameters, which it writes ``into`` a gradient slot. Says which those are, and gives what `backward`
        returns."""
        try:
            return self._go_back(weights, into, inputs, gradients, asked)
        except self.call.compile_failures as error:
            # a backward is compiled when it runs for the first time
            self.call.give_up_compiling(error)
            if not self.saves_inputs:
                raise  # the graph cannot be built again
            return self._go_back(weights, into, inputs, gradients, asked)

    def _inputs(self, kept: Tensors, paged: Tensors) -> list[torch.Tensor]:
        sources = iter(kept), iter(paged)
        return [next(sources[is_paged]) for is_paged in self._paged] if self.saves_inputs else []

    def _check_backward(self, asked: Sequence[Asked]) -> None:
        unit = self.call.unit
        if self.executor.released:
            raise RuntimeError(
                "the model was unwrapped since the forward that this backward belongs to: run the forward "
                "again"
            )
        check_hooks(unit.layout.slices, unit.params)
        added = [what is Asked.ADDED for what in asked]
        if any(added):
            self.executor.landing.check(unit)
            self.executor.hooked.check(
                compress(unit.layout.trainable, added), [*compress(unit.trainable, added)]
            )
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

    def _go_back(
        self,
        weights: torch.Tensor,
        into: torch.Tensor,
        inputs: Tensors,
        gradients: OutputGradients,
        asked: Sequence[Asked],
    ) -> tuple[list[bool], list[torch.Tensor | None]]:
        in_fp32 = len(self.runs) > 1 and self.executor.sum_in_fp32
        collector = Collector(self.call.unit, asked, into, in_fp32=in_fp32)
        joined = JoinedGradients(self._cut, self._shapes)
        recomputed_on = weights.device if self.saves_inputs else None
        with self.call.unit.dequantized_once(times=len(self.runs), backward_on=recomputed_on):
            for number, run in enumerate(self.runs):
                given = self._cut.inputs(inputs, number) if self.saves_inputs else ()
                incoming = self._cut.gradients(gradients, self._output_parts, number)
                joined.add(number, run.go_back(weights, given, incoming, collector))
        return collector.finish(), [*collector.returned, *joined.tensors]


def point(leaves: Tensors, tensors: Tensors) -> None:
    """Let ``leaves`` of a graph show the memory of ``tensors``."""
    for leaf, tensor in zip(leaves, tensors, strict=True):
        leaf.data = tensor.detach()


def show_slot(leaves: Tensors, unit: Unit, weights: torch.Tensor) -> None:
    """Let ``leaves`` of a graph, which stand for the parameters of ``unit``, show the slot ``weights``."""
    for leaf, view in zip(leaves, unit.layout.views(weights), strict=True):
        leaf.data = view


def hand_on_hooks(inner: Tensors, inputs: Tensors = ()) -> None:
    """Move the hooks that a layer has registered on its inputs to the user's tensors ``inputs``, so that the
    hooks see the whole gradient, of uses outside of the layer too."""
    for number, tensor in enumerate(inner):
        hooks = tensor._backward_hooks or {}
        for key in [key for key, hook in hooks.items() if not isinstance(hook, OwnHook)]:
            hook = hooks.pop(key)
            if inputs:
                inputs[number].register_hook(hook)


def detached_inputs(inputs: Tensors) -> list[torch.Tensor]:
    return [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in inputs]
