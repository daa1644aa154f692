"""Recomputation: run a layer again in backward, for the tensors that the graph of its first run needs.

[Note: recomputation]
Hooks on saved tensors leave an empty reference in place of each tensor that the graph of the first run would
save. Backward runs the layer again: the tensors come in the same order and fill the references, and the run
is stopped as soon as the last reference is filled. For ``down(tanh(up(x)))``

    forward     up(x) -> refs 0, 1    tanh -> ref 2     down -> refs 3, 4     product of down
    backward    up(x) fills 0, 1      tanh fills 2      down fills 3, 4       stopped: no product

Then backward goes through the first graph. That graph must keep nothing but references, or it would hold
memory that recomputation is to free, or weights in a slot that another layer has by then. So it is dropped,
and backward builds another one from a whole second run, where

- the storage of the slot has more owners after the first run than before (a context, a closure);
- a custom function, compiled code, or hooks of others (a checkpoint in the layer) may keep tensors;
- somebody else holds the layer's input (a hook that records), whose memory must then not be freed;
- the second run saves other tensors, or in another order: TorchScript runs other code the second time. Each
  reference knows the origin of its tensor: how many nodes came before, and which of them, of which type, made
  it.

Whether the second run computes the same numbers is told by [Note: samples].

[Note: why not torch.utils.checkpoint]
`torch.utils.checkpoint` (non-reentrant) has the same idea, and stops as early. Recomputation built on it
fails in four cases. (1) A saved tensor that the layer writes later: wrong gradient, no error.
(2) TorchScript: wrong gradients or an error, since only shapes, dtypes and devices are compared.
(3) Nested tensors, which have no shape. (4) Its stop is an Exception, which a layer may catch. The code that
finds out whether a graph keeps other tensors, most of this file, would still be needed.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import cache, partial
from typing import Any, TypeVar

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, saved_tensors_hooks

from streamer.backends.base import current_thread
from streamer.engine.layer.activation import (
    Gate,
    Graph,
    LayerRun,
    Outputs,
    derived,
    detached_inputs,
    hand_on_hooks,
    has_hooks,
    point,
    show_slot,
)
from streamer.engine.layer.ambient import Ambient, without_own_checkpoint
from streamer.engine.layer.parameter_gradients import graph_is_retained
from streamer.engine.paging.unit import Attributes, Unit
from streamer.engine.tensors import guarded
from streamer.engine.tensors.attributes import Contents
from streamer.engine.tensors.nested import Tensors, fingerprint
from streamer.engine.tensors.samples import Sample, Selection, another_way
from streamer.engine.tensors.saved import Saved
from streamer.torch_private import RAW_SAVED, node_number, nodes_made, storage_id, storage_owners

T = TypeVar("T")


class Owners:
    """Counts the new owners of the storage of ``weights``: tensors, and what autograd has saved.

    In a ``with`` block the owners that the garbage collector takes away are not counted as room for new ones.
    Where it runs in another thread, this one may make and give up owners meanwhile, so that nobody can tell
    which of them it took.
    """

    def __init__(self, weights: torch.Tensor) -> None:
        #: whether `more` is exact
        self.is_exact = True
        self._thread = current_thread()
        self._weights = weights
        self._before = storage_owners(weights)
        self._at_start = 0

    def __enter__(self) -> None:
        gc.callbacks.append(self._collected)

    def __exit__(self, *_: object) -> None:
        gc.callbacks.remove(self._collected)

    def more(self) -> int:
        """How many more owners there are than when this object was made."""
        return storage_owners(self._weights) - self._before

    def check_none_left(self, unit: Unit) -> None:
        """Raise ValueError if there are more owners, after a run of ``unit`` of which no graph is left."""
        if not self.is_exact or self.more() <= 0 or unit.tree.leaves_garbage:
            return
        gc.collect()
        if self.more() > 0:
            raise ValueError(
                f"a weight of layer '{unit.name}', or a view of one, is kept beyond the layer's forward (by "
                "a hook or a closure, in a list), when other weights will be in its place: keep a clone, or "
                "look the weight up each time"
            )
        # to find that at each visit would take too long
        unit.tree.leaves_garbage = True

    def _collected(self, phase: str, _: Mapping[str, Any]) -> None:
        if current_thread() is not self._thread:
            self.is_exact = False
        elif phase == "start":
            self._at_start = storage_owners(self._weights)
        else:
            self._before -= self._at_start - storage_owners(self._weights)


def holders(tensors: Tensors) -> list[int]:
    """The reference count of each of ``tensors``."""
    return [sys.getrefcount(tensor) for tensor in tensors]


#: Names under which nodes save what an operation was given. What an operation has made beside its result (the
#: state of a random generator, a workspace) may have elements that nobody has written.
_ARGUMENTS = frozenset(
    f"{RAW_SAVED}{name}"
    for names in (
        ("self", "other", "input", "weight", "mat1", "mat2", "batch1", "batch2", "vec", "vec1", "vec2"),
        ("tensor1", "tensor2", "tensors", "query", "key", "value", "attn_mask", "attn_bias", "exponent"),
        ("mask", "condition", "index", "indices", "source", "src", "end"),
    )
    for name in names
)

#: The shape and the dtype of a tensor; None where no other tensor may stand for it, since it is made of
#: others (nested, or of a subclass).
_Kind = tuple[torch.Size, torch.dtype] | None
#: How many nodes of graphs a run has made before it saves a tensor, which of them made the tensor (-1 if none
#: of them), the type of that node, and the tensor's kind.
_Origin = tuple[int, int, type, _Kind]


class _SavedRef:
    """Stands for a tensor that a graph has saved; gone as soon as the graph does not need the tensor."""

    __slots__ = ("__weakref__", "has_gradient", "is_computed", "number", "origin", "sample", "saved")

    def __init__(self, origin: _Origin, number: int) -> None:
        self.number = number
        self.origin = origin
        self.saved: Saved | None = None
        #: whether the tensor was looked at, and is neither a leaf nor a view of the weights
        self.is_computed = False
        self.sample: Sample | None = None

    @property
    def is_plain(self) -> bool:
        """Whether another tensor of the same shape and dtype may stand for this one."""
        return self.origin[-1] is not None

    def look(self, tensor: torch.Tensor, slot: int) -> None:
        """Take a sample if ``tensor`` is neither a leaf nor a view of the weights in the storage ``slot``."""
        self.has_gradient = tensor.requires_grad
        is_leaf = self.has_gradient and tensor.grad_fn is None
        if self.is_plain and not is_leaf and storage_id(tensor) != slot:
            self.is_computed, self.sample = True, Sample.of(tensor)


class _Stop(BaseException):
    """Ends the second run of a layer. Not an Exception: a layer may catch those."""


class RecomputedTensors:
    """The tensors that the graph of one run saves. [Note: recomputation]"""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._refs: list[weakref.ref[_SavedRef]] = []
        #: of tensors that `fill` has brought: a sample of the first run and one of the second
        self.samples: list[tuple[Sample | None, Sample | None]] = []

    @contextmanager
    def expected(self, selection: Selection, weights: torch.Tensor) -> Iterator[None]:
        """Inside the block graphs save references only. Those that ``selection`` takes have samples, of
        tensors that are computed in the block, not of views of ``weights`` or other leaves."""
        start, slot = nodes_made(), storage_id(weights)
        chosen, refs, before = selection.chosen, self._refs, selection.origins

        def pack(tensor: torch.Tensor) -> _SavedRef:
            number = len(refs)
            origin, known = _origin(tensor, start), before.get(number)
            # the same object in all visits: what lives until backward costs the garbage collector time
            ref = _SavedRef(known if known == origin else origin, number)
            refs.append(weakref.ref(ref))
            if chosen is None or number in chosen:
                ref.look(tensor, slot)
            return ref

        with saved_tensors_hooks(pack, self._unpack):
            yield

    def refused(self) -> AbstractContextManager[None]:
        """Inside the block, graphs save nothing."""
        return saved_tensors_hooks(lambda _: None, self._refuse)

    def are_all_of(
        self, outputs: Iterable[torch.Tensor], leaves: Iterable[torch.Tensor], selection: Selection
    ) -> bool:
        """Whether the graph that has led from ``leaves`` to ``outputs`` keeps nothing but references.

        ``selection`` knows earlier graphs of the layer. One with as many nodes, which saves tensors of the
        same origins, is taken to be the same.
        """
        wanted = self._wanted()
        origins = {number: ref.origin for number, ref in wanted.items()}
        graph = selection.known(origins)
        if graph is None:
            are_all, numbers = self._look_through(outputs, leaves, wanted)
            selection.learn(origins, numbers, are_all=are_all)
            return are_all
        for number, ref in wanted.items():
            if number not in graph.numbers:
                ref.sample = None
        selection.end(graph.numbers)
        return graph.are_all

    def _look_through(
        self, outputs: Iterable[torch.Tensor], leaves: Iterable[torch.Tensor], wanted: dict[int, _SavedRef]
    ) -> tuple[bool, frozenset[int]]:
        """Whether the graph keeps nothing but references, and which of them have a sample worth comparing."""
        known = set(map(id, leaves))
        found: set[int] = set()
        compared: set[int] = set()
        for node in _nodes(output.grad_fn for output in outputs):
            # a write into a part keeps the node of its operation to itself
            if _is_opaque(node) or type(node).__name__ == "CopySlices":
                return False, frozenset()
            variable = getattr(node, "variable", None)
            if variable is not None and id(variable) not in known and not isinstance(variable, nn.Parameter):
                return False, frozenset()  # a leaf that the layer has made
            for name, saved in _saved_by(node):
                packed = getattr(saved, "data", saved)
                if isinstance(packed, _SavedRef) and packed.is_plain:
                    found.add(id(packed))
                    if packed.is_computed and (packed.has_gradient or name in _ARGUMENTS):
                        compared.add(packed.number)
                    else:
                        packed.sample = None
                # a graph saves a number, or None (no bias), as they are
                elif not (packed is None or (isinstance(packed, torch.Tensor) and packed.dim() == 0)):
                    return False, frozenset()
        return found == set(map(id, wanted.values())), frozenset(compared)

    def fill(self, forward: Callable[[], object]) -> bool:
        """Run ``forward`` for the tensors that it saves, and no further. Returns whether the first run has
        saved the same ones."""
        wanted = self._wanted()
        self.samples.clear()
        last = max(wanted, default=-1)
        count, is_alike, start = 0, True, nodes_made()

        def pack(tensor: torch.Tensor) -> None:
            nonlocal count, is_alike
            ref = wanted.get(count)
            if ref is not None:
                is_alike = ref.origin == _origin(tensor, start)
                held = tensor.detach()
                ref.saved = Saved(held, held._version)
                if is_alike and ref.sample is not None:
                    self.samples.append((ref.sample, Sample.of(held)))
            count += 1
            if count > last or not is_alike:
                raise _Stop

        try:
            if wanted:
                with saved_tensors_hooks(pack, self._refuse):
                    forward()
        except _Stop:
            pass
        except Exception:
            # TorchScript makes an error of its own of whatever is raised under it
            if count <= last and is_alike:
                raise
        return count > last and is_alike

    def drop(self) -> None:
        """Let go of the tensors that `fill` has brought."""
        for weak in self._refs:
            if (ref := weak()) is not None:
                ref.saved = None

    def _wanted(self) -> dict[int, _SavedRef]:
        """The references that a graph still has, by their number."""
        return {number: ref for number, weak in enumerate(self._refs) if (ref := weak()) is not None}

    def _unpack(self, ref: _SavedRef) -> torch.Tensor:
        self._gate.check()
        assert ref.saved is not None, "the gate opens after `fill`"
        return ref.saved.unchanged()

    def _refuse(self, _: None) -> torch.Tensor:
        self._gate.check()
        raise AssertionError("nobody goes back through the graph of a second run")


def is_another_way(first: Iterable[GradientEdge | None], again: Iterable[GradientEdge | None]) -> bool:
    """Whether outputs ``again`` come from other operations than the ``first``, and not because TorchScript
    has compiled them in the meantime, or from what the first run has left in a cache."""
    before, now = (
        list(_nodes(None if edge is None else edge.node for edge in edges)) for edges in (first, again)
    )
    if any(type(node).__name__ != "AccumulateGrad" for node in {*before}.intersection(now)):
        return True
    return list(map(type, before)) != list(map(type, now)) and not any(map(_is_opaque, now))


def _nodes(starts: Iterable[Node | None]) -> Iterator[Node]:
    """The nodes of the graphs that end in ``starts``."""
    seen: set[Node] = set()
    nodes = list(starts)
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            nodes.extend(before for before, _ in node.next_functions)


def contexts(outputs: Iterable[torch.Tensor]) -> Iterator[dict[str, Any]]:
    """The attributes of the contexts of the custom functions in the graph that has led to ``outputs``."""
    nodes = _nodes(output.grad_fn for output in outputs)
    return (vars(node) for node in nodes if issubclass(type(node), BackwardCFunction))


def _is_opaque(node: Node) -> bool:
    """Whether ``node``, of a custom function or compiled code, may keep what nobody else can see."""
    kind: type = type(node)
    return issubclass(kind, BackwardCFunction) or kind.__name__ == "CppFunction"


@cache
def _names(kind: type[Node]) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith(RAW_SAVED))


def _saved_by(node: Node) -> Iterator[tuple[str, Any]]:
    """What a node has saved, and under which names."""
    for name in _names(type(node)):
        saved = getattr(node, name)
        for one in saved if isinstance(saved, tuple) else (saved,):
            yield name, one


def _origin(tensor: torch.Tensor, start: int) -> _Origin:
    """The origin of a tensor that is saved in a run whose first node has number ``start``."""
    # as short as it can be: this runs for every tensor that is saved
    node = tensor.grad_fn
    count = nodes_made() - start
    number = -1 if node is None else node_number(node) - start
    if not 0 <= number < count:
        number = -1  # made before, or by another thread, which counts its own
    if (type(tensor) is torch.Tensor or guarded.is_plain(tensor)) and not tensor.is_nested:
        return count, number, type(node), (tensor.shape, tensor.dtype)
    return count, number, type(node), None


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
        self._contents = Contents(self._attributes.contents)
        self._ambient = Ambient.now(self.executor.backend.device, self._contents.generators)
        tensors = self._contents.tensors
        unwritten = fingerprint(tensors)
        buffers = unit.buffers_now()
        unit.layout.views(weights)  # they own the slot too, and are made when they are first needed
        owners = Owners(weights)
        inner, leaves = detached_inputs(inputs), unit.leaves_apart(weights)
        # a gate of its own, opened only if this graph is used: a part that the layer kept stays closed
        gate = Gate(unit.name)
        gate.guard(inner, leaves)
        with torch.enable_grad():
            # kept until the run is over; what `get_gradient_edge` does, which looks at much else
            accumulators = [derived(tensor).grad_fn for tensor in inner if tensor.requires_grad]
        held_by = holders(inner)
        self._recomputed = RecomputedTensors(gate)
        # hooks that do something would be compiled too
        may_keep = not self.call.is_compiled and all(map(self._comes_back_alike, inputs))
        with (
            self._ambient.autocast.uncached(),
            torch.enable_grad(),
            self._recomputed.expected(unit.selection, weights) if may_keep else self._recomputed.refused(),
            owners,
            without_own_checkpoint(unit.module),
        ):
            outputs, rebuild = self.call.run(weights, leaves, inner, self._attributes)
        if self.is_whole:
            hand_on_hooks(inner, inputs)
        if fingerprint(tensors) != unwritten:
            raise ValueError(
                f"layer '{unit.name}' writes into a tensor that is one of its attributes, and would do so "
                "again when it runs again in backward: make it a buffer, or wrap with activations='keep'"
            )
        self._buffers = unit.buffers_changed(buffers)
        # compiled code may draw other random numbers than the forward that it was made of
        self._needs_compiled = self.call.is_compiled and self._ambient.random.has_moved_on()
        graph = Graph.of(inner, leaves, outputs)
        detached = [output.detach() for output in outputs]
        may_keep = may_keep and self._recomputed.are_all_of(outputs, (*inner, *leaves), unit.selection)
        del outputs, accumulators
        # a hook may have recorded what a module was given, and would see it lose its memory
        if may_keep and holders(inner) == held_by:
            _let_go(inner)
            if owners.is_exact and owners.more() == len(leaves):
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
        point(kept.inputs, inputs)
        if self._shown is not weights:
            show_slot(kept.leaves, unit, weights)
            self._shown = weights
        try:
            if self._fill(weights, inputs, kept.leaves):
                self._compare(self._recomputed.samples)
                yield kept
                return
            self._recomputed.drop()
            graph = self._built_anew(weights, inputs)
            if is_another_way(kept.outputs, graph.outputs):
                raise another_way(unit.name)
            yield graph
        finally:
            self._recomputed.drop()
            if self._graph is not None:  # retain_graph=True: hold no memory and no slot in the meantime
                _let_go(kept.inputs)
                _let_go(kept.leaves)
                self._shown = None

    def _fill(self, weights: torch.Tensor, inputs: Tensors, leaves: Tensors) -> bool:
        """Run again for the tensors that the graph of ``leaves`` needs: whether it has got the same ones."""
        unit = self.call.unit
        if any(map(has_hooks, leaves)):
            leaves = unit.leaves(weights)  # the layer puts its hooks on these once more
        inner = detached_inputs(inputs)
        forward = partial(self._again, self.call.forward_on, weights, leaves, inner)
        with self.executor.root.buffers_unwritten_by(unit.name):
            return self._recomputed.fill(forward)

    def _comes_back_alike(self, tensor: torch.Tensor) -> bool:
        """Whether `point` can set this input's memory to that of the tensor that `graph` gets in backward."""
        if not guarded.is_plain(tensor) or tensor.layout != torch.strided:
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
        inner = detached_inputs(inputs)
        self.gate.guard(inner, leaves)
        with self.executor.root.buffers_unwritten_by(unit.name):
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
        outputs, _ = self._again(self.call.run, weights, leaves, inner)
        if self.is_whole:
            hand_on_hooks(inner)
        return outputs

    def _again(
        self,
        run: Callable[[torch.Tensor, Tensors, Tensors, Attributes], T],
        weights: torch.Tensor,
        leaves: Tensors,
        inner: Tensors,
    ) -> T:
        """Call ``run`` where all that the layer depends on is as it was when `first_run` began."""
        unit = self.call.unit
        with (
            self._ambient.again(),
            unit.with_attributes(self._attributes),
            self._contents.again(),
            unit.with_buffers(self._buffers),
            torch.enable_grad(),
            without_own_checkpoint(unit.module),
        ):
            return run(weights, leaves, inner, self._attributes)


class RecomputeOffload(Recompute):
    """`Recompute`, with the inputs in host memory in the meantime."""

    pages_inputs = True


def _let_go(leaves: Tensors) -> None:
    """Let ``leaves`` of a graph hold no memory until the graph is gone through."""
    numbers: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}
    for leaf in leaves:
        kind = leaf.dtype, leaf.device
        if kind not in numbers:
            numbers[kind] = leaf.new_empty(())
        leaf.data = numbers[kind].expand(leaf.shape)
