"""A streamed layer: its forward and its backward each run on the slot that holds the layer at that time.

[Note: the layer]
A layer is a function of its weights. One `autograd.Function` represents it in the user's graph. The layer's
own graph is separate: it begins at the detached inputs and at views of a slot. The policy,
`wrap(activations=...)`, determines what that graph saves:

- "recompute" runs the layer under `torch.utils.checkpoint`, which drops the tensors that the graph saves.
  Backward's first unpack runs the layer again, on the slot that holds it at that time. Random states,
  autocast, early stop and the check that both runs save the same tensors are PyTorch's, and so is the
  contract;
- "recompute+offload" does the same, and the inputs wait in host memory: [Note: saved inputs];
- "keep" saves a view of the slot as its offset, size and stride, and everything else as it is.

Slots hold other layers in between, so only the layer's own backward may enter the layer's own graph.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, MutableMapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import compress
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from streamer.engine.executor import Executor
from streamer.engine.guard import never_traced
from streamer.engine.layer.arguments import (
    MEANINGS,
    Outputs,
    accumulator,
    added_to,
    apart,
    containers,
    detached,
    hand_over,
    is_cache,
    is_plain,
    let_go,
    passed_on,
    refuse_dual,
    refuse_transforms,
    require_grad,
    without_caches,
)
from streamer.engine.layer.batch_check import check_once, passes, run_in_slices
from streamer.engine.layer.graph import (
    Collector,
    InContexts,
    RebuiltView,
    SlotView,
    graph_is_retained,
    is_added_to,
    place_of,
)
from streamer.engine.layer.micro_batches import (
    AmbiguousBatchError,
    BatchSlices,
    JoinedGradients,
    MicroBatches,
    Parts,
)
from streamer.engine.layer.surroundings import (
    HAD,
    RecordingForward,
    past_checkpoints,
    refuse_compiler_error,
    uncached_autocast,
    without_own_checkpoint,
)
from streamer.engine.schedule.order import Phase
from streamer.engine.tensors import Rebuild, Saved, Taken, Tensors, flatten, storages
from streamer.engine.unit import Unit, leaked
from streamer.quantized.parts import aliases
from streamer.torch_private import (
    SubclassesOn,
    run_backward,
    storage_owners,
)

Forward = Callable[..., Any]
OutputGradients = Sequence[torch.Tensor | None]


class Policy(NamedTuple):
    """The data of a layer's forward that is kept until its backward. [Note: the layer]"""

    keeps_graph: bool = False
    offloads_inputs: bool = False


#: The values of ``wrap(activations=...)``.
POLICIES = {
    "recompute": Policy(),
    "recompute+offload": Policy(offloads_inputs=True),
    "keep": Policy(keeps_graph=True),
}


class Call(NamedTuple):
    """A layer's forward and its arguments without their tensors. ``rebuild`` builds (args, kwargs,
    replacements of `Unit.shared`) from the tensors."""

    unit: Unit
    forward: Forward
    rebuild: Rebuild

    def run(self, inputs: Tensors) -> Outputs:
        """The tensors in the layer's result, followed by those that it has put into containers among its
        arguments. [Note: containers]"""
        args, kwargs, shared = self.rebuild(inputs)
        self.unit.register_shared(shared)
        boxes = containers((*args, *kwargs.values()))
        before = [dict(box) if isinstance(box, MutableMapping) else list(box) for box in boxes]
        result = self.forward(*args, **kwargs)
        added = [added_to(box, old) for box, old in zip(boxes, before, strict=True)]
        return passed_on(*flatten((result, added)), inputs)

    def run_aside(self, weights: torch.Tensor, inputs: Tensors) -> Outputs:
        """The result of `run` for ``inputs`` on the slot ``weights``, without side effects: its graph saves
        nothing, and the layer's buffers and tensor attributes and all random states are restored."""
        unit = self.unit
        devices = [weights.device] if weights.device.type == "cuda" else []
        saves_nothing = saved_tensors_hooks(lambda _: None, _nothing_saved)
        with (
            torch.random.fork_rng(devices),
            saves_nothing,
            unit.using(unit.leaves(weights)),
            unit.state.take_all().again(),
        ):
            return self.run(inputs)


def _nothing_saved(_: object) -> torch.Tensor:
    raise AssertionError("a side run has no backward")


class _Frame:
    """The state that the layer's own graph needs to run the layer again. The graph holds this object. It must
    not hold the graph: the garbage collector could not find that cycle."""

    def __init__(self, call: Call) -> None:
        self.call = call
        #: the slot with the weights, and the inputs, during the layer's forward or backward
        self.weights: torch.Tensor | None = None
        self.inputs: Tensors = ()
        self.rebuild: Rebuild | None = None
        #: the state that the first run has changed, from before that run
        self._before: Taken | None = None

    def run(self, _: object = None) -> tuple[torch.Tensor, ...]:
        """The layer's tensors. The second run starts from the same state as the first."""
        self.check()
        unit, is_first = self.call.unit, self.rebuild is None
        before = unit.state.take() if is_first else self._before
        with without_own_checkpoint(unit.module):
            if is_first or before is None:
                outputs, rebuild = self.call.run(self.inputs)
            else:
                with before.again():
                    outputs, rebuild = self.call.run(self.inputs)
        if is_first:
            self.rebuild, self._before = rebuild, None if before is None else before.changed()
        return tuple(outputs)

    def check(self) -> torch.Tensor:
        """The slot. Raises RuntimeError unless the layer's own forward or backward is running."""
        if self.weights is None:
            raise leaked(self.call.unit.name)
        return self.weights


class LayerRun:
    """One run of a layer, on its batch or on a slice of it: the layer's own graph, from forward to
    backward."""

    def __init__(self, executor: Executor, call: Call, policy: Policy) -> None:
        self.executor = executor
        self.call = call
        self.policy = policy
        #: counts the bytes that the run keeps on the device
        self.held: object = None
        self._frame = _Frame(call)
        #: the beginning of the layer's own graph; it holds no memory between forward and backward
        self._inputs: list[torch.Tensor] = []
        #: their gradients so far
        self._gradients: list[torch.Tensor | None] = []
        #: the entry of gradients for each output that may have one; edges, since tensors would hold memory
        self._outputs: list[GradientEdge | None] | None = None
        self._contexts: InContexts | None = None

    @property
    def needs_backward(self) -> bool:
        """Whether one of the outputs may get a gradient."""
        return any(edge is not None for edge in self._outputs or ())

    def first_run(self, weights: torch.Tensor, inputs: Tensors) -> Outputs:
        """The output tensors of the layer, and the function that builds its result from them. The weights are
        in the slot ``weights``."""
        unit, frame = self.call.unit, self._frame
        self._inputs, self._gradients = detached(inputs), [None] * len(inputs)
        ends = []  # held until the graph holds them
        for place, leaf in enumerate(self._inputs):
            if leaf.requires_grad and is_plain(leaf):
                ends.append(accumulator(leaf))
                ends[-1].register_prehook(partial(_take, self._gradients, place))
        leaves, owners = unit.leaves(weights), storage_owners(weights)
        frame.weights, frame.inputs = weights, self._inputs
        try:
            unit.swap_in(leaves)
            with past_checkpoints(), uncached_autocast(weights.device):
                run = self._with_graph if self.policy.keeps_graph else self._checkpointed
                outputs = apart(run(weights), (weights, *inputs))
        finally:
            unit.restore()
            frame.weights, frame.inputs = None, ()
        assert frame.rebuild is not None, "it has run"
        # searching the graph takes as long as a small layer
        if unit.has_contexts or storage_owners(weights) > owners:
            self._contexts = InContexts(outputs, weights)
            unit.has_contexts = bool(self._contexts)
        let_go(self._inputs)
        self._outputs = [get_gradient_edge(output) if output.requires_grad else None for output in outputs]
        return [output.detach() for output in outputs], frame.rebuild

    def _checkpointed(self, weights: torch.Tensor) -> Sequence[torch.Tensor]:
        # the tensor selects the device of the random state to keep
        blank = self.executor.blank
        found: Sequence[torch.Tensor] = checkpoint(self._frame.run, blank, use_reentrant=False)
        return found

    def _with_graph(self, weights: torch.Tensor) -> Sequence[torch.Tensor]:
        held: dict[int, int] = {}
        frame = self._frame

        def pack(saved: torch.Tensor) -> Saved | SlotView | RebuiltView:
            if aliases(saved, weights):
                return place_of(saved, weights)
            held.update(storages([saved]))
            # a node may save its own output, which would keep the node, and so itself, for good; the memory
            # of an input's leaf is about to be freed
            return Saved.now(saved.detach())

        def unpack(saved: Saved | SlotView | RebuiltView) -> torch.Tensor:
            slot = frame.check()
            return saved.unchanged() if isinstance(saved, Saved) else saved.view(slot)

        with saved_tensors_hooks(pack, unpack):
            outputs = frame.run()
        self.held = self.executor.saved.hold(held)
        return outputs

    def go_back(
        self, weights: torch.Tensor, inputs: Tensors, gradients: OutputGradients, collector: Collector | None
    ) -> list[torch.Tensor | None]:
        """The gradients of the inputs, from those of the outputs. Those of parameters go to ``collector``;
        without one they are not computed. The weights are in the slot ``weights``."""
        unit, frame, ends, keeps = self.call.unit, self._frame, self._outputs, graph_is_retained()
        if ends is None:
            raise RuntimeError(
                f"layer '{unit.name}' runs backward a second time: call "
                "backward(retain_graph=True) the first time"
            )
        if not keeps:
            self._outputs = None
        frame.weights, frame.inputs = weights, detached(inputs)
        unit.collector = collector
        pairs = [
            (end, gradient)
            for end, gradient in zip(ends, gradients, strict=True)
            if end is not None and gradient is not None
        ]
        try:
            if self._contexts is not None:
                self._contexts.point(unit, weights)
            # also for checkpoints inside the layer, which run a part of it again
            unit.swap_in(unit.leaves(weights))
            _go_through(pairs, self._inputs, collector, keeps)
        finally:
            unit.restore()
            frame.weights, frame.inputs, unit.collector = None, (), None
            come = zip(self._gradients, self._inputs, strict=True)
            found = [leaf.grad if gradient is None else gradient for gradient, leaf in come]
            # a retained graph may run backward again, even after an error
            for place, leaf in enumerate(self._inputs):
                self._gradients[place] = leaf.grad = None
        return found


def _take(found: list[torch.Tensor | None], place: int, gradients: tuple[torch.Tensor, ...]) -> tuple[None]:
    """An input's gradient has arrived: keep it as it is. Autograd would copy a gradient if its strides
    differ from the leaf's, and other strides mean other rounding in the layer before."""
    (found[place],) = gradients
    return (None,)


def _go_through(
    pairs: Sequence[tuple[GradientEdge, torch.Tensor]],
    inputs: Tensors,
    collector: Collector | None,
    keeps: bool,
) -> None:
    if not pairs:
        return
    ends, gradients = zip(*pairs, strict=True)
    if collector is not None:
        # autograd has computed these gradients itself: checking them again would take half of the time
        run_backward(ends, gradients, keeps, False, (), allow_unreachable=True, accumulate_grad=True)
        collector.end_slice()
    elif wanted := [tensor for tensor in inputs if tensor.requires_grad]:
        torch.autograd.backward(ends, gradients, retain_graph=keeps, inputs=wanted)


class LayerCall:
    """One call of a layer and its backward: one run for each slice of the batch that ``cut`` makes, or one
    run of the whole batch if that is None."""

    def __init__(self, executor: Executor, call: Call, policy: Policy, cut: BatchSlices | None) -> None:
        self.executor = executor
        self.thread = executor.caller()
        self._updates = call.unit.updates
        self.call = call
        self.policy = policy
        self.saves_inputs = not policy.keeps_graph
        slices = 1 if cut is None else len(cut.slices)
        self.runs = [LayerRun(executor, call, policy) for _ in range(slices)]
        #: the output tensors of the layer, until it has returned
        self.outputs: list[torch.Tensor] = []
        #: the number of inputs in `InputPager`, and which of the inputs they are, if there are any
        self._number: int | None = None
        self._paged: Sequence[bool] = ()
        self._cut = cut
        self._shapes: Sequence[torch.Size] = ()
        self._parts: Parts = ()
        #: counts the bytes that wait for backward on the device
        self._held: object = None

    def page_out(self, inputs: Tensors) -> None:
        """Copy those of ``inputs`` that wait in host memory to it."""
        if self.policy.offloads_inputs:
            self._paged = [self.executor.inputs.takes(tensor) for tensor in inputs]
            if any(self._paged):
                self._number = self.executor.inputs.save(self, list(compress(inputs, self._paged)))

    def run(self, inputs: Tensors, weights: torch.Tensor) -> Outputs:
        """The tensors in the layer's result, and the function that builds it from them, on the slot
        ``weights``."""
        if self._cut is None:
            return self.runs[0].first_run(weights, inputs)
        self._shapes = [tensor.shape for tensor in inputs]
        runs = [partial(run.first_run, weights) for run in self.runs]
        check_once(self._cut, self.call, weights, inputs)
        joined = run_in_slices(self._cut, self.call, weights, inputs, runs)
        # only this part of it: the layer's outputs hold this object
        self._parts = joined.parts
        return joined.tensors, joined.rebuild

    @property
    def needs_backward(self) -> bool:
        """Whether one of the outputs may get a gradient."""
        return any(run.needs_backward for run in self.runs)

    def keep(self, inputs: Tensors) -> None:
        """The layer has run: count the bytes that wait for its backward on the device."""
        if self.saves_inputs:
            self._held = self.executor.saved.hold(storages(self.kept(inputs)))

    def kept(self, inputs: Tensors) -> Tensors:
        """The ``inputs`` that wait for backward on the device."""
        if not self.saves_inputs:
            return ()
        return inputs if self._number is None else [*compress(inputs, map(operator.not_, self._paged))]

    def backward(self, kept: Tensors, gradients: OutputGradients, *, adds: bool) -> list[torch.Tensor | None]:
        """The gradients of the inputs, from those of the outputs; with ``adds``, those of the parameters are
        copied to the host. ``kept`` are the inputs that were saved on the device."""
        unit, executor = self.call.unit, self.executor
        if executor.released:
            raise RuntimeError(
                "the model was unwrapped since the forward that this backward belongs to: run the forward "
                "again"
            )
        if self._updates != unit.updates:
            raise RuntimeError(
                f"the weights of layer '{unit.name}' were updated since the forward that this backward "
                "belongs to: call backward() before optimizer.step()"
            )
        if adds:
            executor.gradients.check(unit)
        # backward() of a loss of a tensor subclass runs with subclasses switched off
        with SubclassesOn(), executor.backward(unit, self._number) as run:
            inputs = kept
            if self._number is not None:
                sources = iter(kept), iter(run.inputs)
                inputs = [next(sources[is_paged]) for is_paged in self._paged]
            into = run.gradient if adds else None
            run.used, found = self.go_back(run.weights, into, inputs, gradients)
            if not graph_is_retained():
                self._give_up()
        return found

    def go_back(
        self,
        weights: torch.Tensor,
        into: torch.Tensor | None,
        inputs: Tensors,
        gradients: OutputGradients,
    ) -> tuple[list[bool], list[torch.Tensor | None]]:
        """The work of `backward`: computes the gradients of the inputs from the weights in a slot and the
        gradients of the outputs. Writes those of the parameters ``into`` a gradient slot if there is one.
        Also returns which parameters have a gradient."""
        unit, cut = self.call.unit, self._cut
        in_fp32 = cut is not None and self.executor.sum_in_fp32
        collector = None if into is None else Collector(unit, into, in_fp32=in_fp32)
        if cut is None:
            found = self.runs[0].go_back(weights, inputs, gradients, collector)
        else:
            joined = JoinedGradients(cut, self._shapes)
            for number, run in enumerate(self.runs):
                part = cut.inputs(inputs, number) if self.saves_inputs else ()
                incoming = cut.gradients(gradients, self._parts, number)
                joined.add(number, run.go_back(weights, part, incoming, collector))
            found = joined.tensors
        used = [False] * len(unit.trainable) if collector is None else collector.finish()
        return used, found

    def _give_up(self) -> None:
        """Release everything: there will be no other backward."""
        self._held = None
        if self._number is not None:
            self.executor.inputs.forget(self._number)
        for run in self.runs:
            run.held = None


MakeCall = Callable[[Executor, Call, Policy, BatchSlices | None], LayerCall]


class _Layer(torch.autograd.Function):
    """A streamed layer in the user's graph: tensors in, tensors out.

    The ``token`` is a leaf that requires a gradient, so that backward runs even if no input requires one. A
    backward for selected tensors does not reach the token: then the parameters' gradients are not needed.
    """

    @staticmethod
    def forward(
        ctx: Any, call: LayerCall, token: torch.Tensor, *inputs: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.call = call
        ctx.save_for_backward(*call.kept(inputs))
        outputs, call.outputs = call.outputs, []
        ctx.mark_non_differentiable(*(t for t in outputs if not (t.is_floating_point() or t.is_complex())))
        return tuple(outputs)

    @staticmethod
    @never_traced
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        call: LayerCall = ctx.call
        executor, name = call.executor, call.call.unit.name
        refuse_transforms(name, gradients)
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"create_graph=True: streamed layer '{name}' has no gradients of gradients (gradient "
                "penalties, Hessians): leave create_graph out, or call streamer.unwrap(model) first"
            )
        adds = is_added_to(ctx.next_functions[0][0])
        try:
            with executor.lock:
                executor.train_in(call.thread)
                executor.begin_backward()
                found = call.backward(ctx.saved_tensors, gradients, adds=adds)
        except RuntimeError as error:
            refuse_compiler_error(call.call.unit, error)
            for words, meaning in MEANINGS.items():
                if words in str(error) and name not in str(error):
                    raise RuntimeError(f"layer '{name}' {meaning}: {str(error).splitlines()[0]}") from error
            raise
        return (None, None, *found)


class StreamedLayer:
    """Replaces the ``forward`` of the module of ``unit``; ``forward`` is the module's own, or its compiled
    version."""

    def __init__(
        self, executor: Executor, unit: Unit, policy: Policy, micro_batches: MicroBatches, forward: Forward
    ) -> None:
        self._executor = executor
        self._unit = unit
        setattr(self, HAD, unit.module.__dict__.get("forward"))
        self._policy = policy
        self._make_call: MakeCall = LayerCall
        self._micro_batches = micro_batches
        self._forward = forward
        self._plain: Forward = unit.module.forward

    def call_as(self, call: MakeCall) -> None:
        """Let ``call`` build the calls of the layer; a plan does so."""
        self._make_call = call

    @never_traced
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        run = self._train if torch.is_grad_enabled() else self._infer
        # a surrounding module may have switched subclasses off: `plain_forwards`
        with SubclassesOn():
            refuse_transforms(self._unit.name)
            # compiled code would not record
            recording = RecordingForward.of(self._plain)
            if recording is None:
                return run(self._forward, args, kwargs)
            return recording.hand_on(run(recording, args, kwargs))

    def _train(self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the layer with a graph of its own, which `_Layer` uses in backward."""
        executor, unit = self._executor, self._unit
        args, kwargs = without_caches(args, kwargs, unit.name)
        inputs, rebuild = flatten((args, kwargs, tuple(each.param for each in unit.shared)))
        refuse_dual(unit.name, inputs)
        cut = self._micro_batches.cut(args, kwargs, inputs)
        call = self._make_call(executor, Call(unit, forward, rebuild), self._policy, cut)
        phase = Phase.FORWARD if require_grad(inputs) or require_grad(unit.params) else Phase.FROZEN
        with executor.lock:
            executor.check_thread(call.thread)
            call.page_out(inputs)
            with executor.forward(unit, phase) as weights:
                call.outputs, build = call.run(inputs, weights)
            call.keep(inputs)
            outputs: Sequence[torch.Tensor] = call.outputs
            if call.needs_backward:
                with past_checkpoints():
                    outputs = _Layer.apply(call, executor.token, *inputs)
        return hand_over((*args, *kwargs.values()), build((*outputs, *inputs)))

    def _infer(self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the layer without a graph, on the caller's own objects: it may write into a cache."""
        unit = self._unit
        with (
            self._executor.forward(unit, Phase.INFERENCE) as weights,
            uncached_autocast(weights.device),
            unit.using(unit.leaves(weights)),
        ):
            return self._infer_on(weights, forward, args, kwargs)

    def _infer_on(
        self, weights: torch.Tensor, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        unit = self._unit
        inputs, rebuild = flatten((args, kwargs, tuple(each.param for each in unit.shared)))
        # generation has sequences as long as the batch: running all of them at once is never wrong
        cut, call = None, Call(unit, forward, rebuild)
        with suppress(AmbiguousBatchError):
            if not any(map(is_cache, (*args, *kwargs.values()))):
                cut = self._micro_batches.cut(args, kwargs, inputs)
        if cut is not None and passes(cut, call, weights, inputs):
            return self._infer_in_slices(weights, cut, call, (*args, *kwargs.values()), inputs)
        outputs, rebuild_result = flatten(forward(*args, **kwargs))
        # it may return one of its own arguments
        own = {id(tensor) for tensor in inputs}
        own_outputs = iter(apart([out for out in outputs if id(out) not in own], (weights,)))
        return rebuild_result([out if id(out) in own else next(own_outputs) for out in outputs])

    def _infer_in_slices(
        self, weights: torch.Tensor, cut: BatchSlices, call: Call, arguments: Sequence[Any], inputs: Tensors
    ) -> Any:
        def run(part: Tensors) -> Outputs:
            outputs, rebuild = call.run(part)
            return apart(outputs, (weights, *part)), rebuild

        joined = run_in_slices(cut, call, weights, inputs, [run] * len(cut.slices))
        return hand_over(arguments, joined.rebuild([*joined.tensors, *inputs]))
