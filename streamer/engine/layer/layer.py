"""What a layer's ``forward`` becomes: a function of its weights, fetched for the call.

[Note: key/value caches]
A model with ``use_cache=True`` hands every layer one cache object and the layer appends its keys and
values to it. A layer that runs again in backward appends them a second time and attends to both:
wrong gradients and no error. In training an empty cache is therefore taken out of a layer's arguments
(the layer then attends to its own keys and values, as it would have), and one with tokens in it is
refused. Whatever else a layer changes among its arguments is found by `nested.fingerprint`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch.autograd import forward_ad

from streamer.engine.layer.activation import LayerCall, Outputs
from streamer.engine.layer.ambient import Autocast, past_checkpoints
from streamer.engine.layer.batch_check import check_batch
from streamer.engine.layer.call import Call, CompiledForward, Compiler, apart, is_compiled, run_on_slot
from streamer.engine.layer.micro_batches import AmbiguousBatchError, BatchSlices, Joined, MicroBatches
from streamer.engine.layer.outside_access import HAD, unwatched
from streamer.engine.layer.parameter_gradients import Asked, InGraph, asked_of
from streamer.engine.layer.policies import POLICIES
from streamer.engine.layer.recompute import Owners
from streamer.engine.layer.recorded import RecordingForward
from streamer.engine.layer.sharing import untangle
from streamer.engine.paging.executor import Executor
from streamer.engine.paging.unit import Unit
from streamer.engine.schedule.order import Phase
from streamer.engine.tensors.guarded import as_plain, never_traced
from streamer.engine.tensors.nested import Rebuild, Tensors, fingerprint, flatten, reachable
from streamer.engine.tensors.parts import aliases
from streamer.torch_private import (
    SubclassesOn,
    backward_number,
    in_distributed_forward,
    in_forward_mode,
    in_trace,
    in_transform,
    is_batched,
)


def without_caches(
    args: tuple[Any, ...], kwargs: dict[str, Any], layer: str
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """``args`` and ``kwargs`` of a layer without empty caches. [Note: key/value caches]

    Raises ValueError for a cache that holds tokens already.
    """
    caches = [value for value in (*args, *kwargs.values()) if _is_cache(value)]
    if not caches:
        return args, kwargs
    if tokens := max(int(cache.get_seq_length()) for cache in caches):
        raise ValueError(
            f"layer '{layer}' got a key/value cache with {tokens} tokens while gradients are on: train "
            "without one (use_cache=False, and cache=None or past_key_values=None), or run this forward "
            "under torch.no_grad()"
        )
    named = {name: None if _is_cache(value) else value for name, value in kwargs.items()}
    if "use_cache" in named:
        named["use_cache"] = False
    return tuple(None if _is_cache(value) else value for value in args), named


def holds_cache(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether one of the arguments is a cache."""
    return any(_is_cache(value) for value in (*args, *kwargs.values()))


def _is_cache(value: object) -> bool:
    # the protocol of transformers.Cache, which need not be installed
    return hasattr(value, "get_seq_length") and (hasattr(value, "update") or hasattr(value, "reorder_cache"))


class _Unread(dict[Any, Any]):
    """A mapping that keeps nothing."""

    def __setitem__(self, key: object, value: object) -> None:
        return


def without_unread_keys(kwargs: dict[str, Any], unit: Unit) -> dict[str, Any]:
    """``kwargs`` with a mapping that keeps nothing in place of the one in which some layers of Gemma 3n and
    Gemma 4 leave their keys and values. Nobody reads those: `find_layers` refuses layers that do."""
    if "shared_kv_states" not in kwargs:
        return kwargs
    leaves_keys = any(getattr(module, "store_full_length_kv", False) for module in unit.modules)
    return {**kwargs, "shared_kv_states": _Unread()} if leaves_keys else kwargs


def check_transforms(layer: str, tensors: Iterable[torch.Tensor | None] = ()) -> None:
    """Raise RuntimeError inside of a transform of `torch.func`, for batched gradients among ``tensors``, and
    inside of another data parallel module or of `torch.jit.trace`."""
    check_not_traced()
    batched = any(tensor is not None and is_batched(tensor) for tensor in tensors)
    if batched or in_transform():
        raise RuntimeError(
            "transforms of torch.func (grad, vjp, jvp, vmap) and batched gradients do not go through "
            f"streamed layer '{layer}': use torch.autograd.grad, or call streamer.unwrap(model) first"
        )
    if in_distributed_forward():
        raise RuntimeError(
            f"DistributedDataParallel does not see when the gradients of streamed layer '{layer}' have "
            "arrived: train without it, several GPUs by streamer.wrap(process_group=...)"
        )


def check_not_traced() -> None:
    """Raise RuntimeError inside of `torch.jit.trace`, which would record slots in place of weights."""
    if in_trace():
        raise RuntimeError(
            "torch.jit.trace (which torch.onnx.export and TensorBoard's add_graph may use) cannot record a "
            "wrapped model, whose layers have their weights only while they run: call "
            "streamer.unwrap(model) first, or trace copy.deepcopy(model), which is a plain model"
        )


def check_dual(layer: str, inputs: Tensors) -> None:
    """Raise RuntimeError for inputs of forward-mode differentiation."""
    if in_forward_mode() and any(forward_ad.unpack_dual(x).tangent is not None for x in inputs):
        raise RuntimeError(
            f"forward-mode differentiation of streamed layer '{layer}' works only where backward does not: "
            "run it under torch.no_grad()"
        )


def infer(
    run: Callable[[tuple[Any, ...], dict[str, Any]], Any],
    unit: Unit,
    micro_batches: MicroBatches,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    aside: Callable[[Rebuild, Tensors], Outputs],
    check: Callable[[BatchSlices, Rebuild, Tensors], None],
) -> Any:
    """What ``run`` makes of ``args`` and ``kwargs``; ``aside`` does `Call.run_aside` for them, and ``check``
    does `check_batch`. A batch with a key/value cache, which is written, is not cut; where the batch is not
    cut, ``run`` is given the very same objects.

    Raises ValueError where a layer whose batch is cut changes what it is given, or writes a cache of its own.
    """
    inputs, rebuild = flatten((args, kwargs))
    cut = BatchSlices.none(inputs)
    # generation comes by sequences that are as long as the batch: all of them at a time is never wrong
    with suppress(AmbiguousBatchError):
        cut = micro_batches.cut(args, kwargs, inputs) if not holds_cache(args, kwargs) else cut
    if len(cut.slices) == 1:
        return run(args, kwargs)
    joined = Joined(unit.name, cut, inputs, partial(aside, rebuild))
    start_again = unit.start_again()
    with unit.dequantized_once(times=len(cut.slices)):
        if cut.unchecked is not None:
            check(cut, rebuild, inputs)
        for number in range(len(cut.slices)):
            start_again()
            given = cut.inputs(inputs, number)
            given_args, given_kwargs = rebuild(given)
            given_kwargs = without_unread_keys(given_kwargs, unit)
            before, kept = fingerprint((given_args, given_kwargs)), _kept(unit)
            try:
                result = run(given_args, given_kwargs)
            except Exception as error:
                cut.explain(error, unit.name, inputs)
                raise
            outputs, rebuild_result = untangle(unit.name, *flatten(result), given)
            if fingerprint((given_args, given_kwargs)) != before:
                raise ValueError(
                    f"layer '{unit.name}' changes what it is given (a tensor in place, or a list), and would "
                    "do so for each micro-batch: let it return the new value, or wrap without "
                    "micro_batch_size"
                )
            _check_kept(unit, kept, cut.slices[number][1])
            joined.add(number, outputs, rebuild_result, given)
    return joined.rebuild([*joined.tensors, *inputs])


def _kept(unit: Unit) -> list[tuple[torch.Tensor, int]]:
    """Tensors of two dimensions or more that the modules of ``unit`` have beside parameters, and their
    versions."""
    held = [
        value
        for values in unit.attributes().values()
        for name, value in values.items()
        if name not in ("_parameters", "_modules")
    ]
    return [
        (tensor, 0 if tensor.is_inference() else tensor._version)
        for tensor in reachable(held)
        if tensor.dim() > 1
    ]


def _check_kept(unit: Unit, before: list[tuple[torch.Tensor, int]], length: int) -> None:
    """Raise ValueError if ``unit`` keeps a tensor of a slice of ``length`` samples, which the next slice
    would find as its own."""
    versions = {id(tensor): version for tensor, version in before}
    for tensor, version in _kept(unit):
        if version != versions.get(id(tensor), version) or (
            id(tensor) not in versions and tensor.shape[0] == length
        ):
            raise ValueError(
                f"layer '{unit.name}' writes a tensor of shape {tuple(tensor.shape)} that it keeps, a "
                "key/value cache say; one micro-batch would read another's: wrap without micro_batch_size"
            )


class StreamedLayer:
    """Stands in for the ``forward`` of the module of ``unit``. ``policy`` is a key of `POLICIES`."""

    def __init__(
        self,
        executor: Executor,
        unit: Unit,
        policy: str,
        micro_batches: MicroBatches,
        compiler: Compiler | None = None,
    ) -> None:
        self._executor = executor
        self._unit = unit
        setattr(self, HAD, unit.module.__dict__.get("forward"))
        self._policy = POLICIES[policy]
        self._call_kind = LayerCall
        self._micro_batches = micro_batches
        self._forward: Callable[..., Any] = (
            unit.module.forward if compiler is None else compiler.compile(unit)
        )

    def visit_as(self, kind: type[LayerCall]) -> None:
        """Let calls of the layer be of another kind."""
        self._call_kind = kind

    @never_traced
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # a module around it may have switched subclasses off: `plain_forwards`
        with unwatched(), SubclassesOn():
            return self._call(args, kwargs)

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        forward = self._forward
        # compiled code does not record
        recording = RecordingForward.of(forward.plain if isinstance(forward, CompiledForward) else forward)
        if recording is None:
            return self._call_of(forward, args, kwargs)
        return recording.hand_on(self._call_of(recording, args, kwargs))

    def _call_of(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._executor.structure.enter(self._unit.index)
        check_transforms(self._unit.name)
        if not torch.is_grad_enabled():
            return self._infer(forward, args, kwargs, Phase.INFERENCE)
        args, kwargs = without_caches(args, kwargs, self._unit.name)
        kwargs = without_unread_keys(kwargs, self._unit)
        inputs, rebuild = flatten((args, kwargs))
        if not _needs_graph(inputs) and not _needs_graph(self._unit.params):
            return self._infer(forward, args, kwargs, Phase.FROZEN)
        check_dual(self._unit.name, inputs)
        cut = self._micro_batches.cut(args, kwargs, inputs)
        layer_call = self._call_kind(self._executor, Call(self._unit, forward, rebuild), self._policy, cut)
        results: list[Any] = []
        with past_checkpoints():
            token = InGraph.apply(*self._unit.trainable)
            outputs = _Layer.apply(layer_call, results, token, *inputs)
        return results.pop()((*outputs, *inputs))

    def _infer(
        self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], phase: Phase
    ) -> Any:
        """Run the layer without a graph, on the very objects it was given: it may write into a cache."""

        unit = self._unit

        def work(weights: torch.Tensor) -> Any:
            unit.layout.views(weights)  # they own the slot too, and are made when they are first needed
            owners = Owners(weights)
            leaves = unit.leaves(weights)

            def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
                outputs, rebuild = flatten(run_on_slot(unit, forward, weights, leaves, args, kwargs))
                return rebuild(apart(outputs, weights))

            def aside(rebuild: Rebuild, inputs: Tensors) -> Outputs:
                with self._executor.root.buffers_unwritten_by(unit.name):
                    return Call(unit, forward, rebuild).run_aside(weights, inputs)

            def check(cut: BatchSlices, rebuild: Rebuild, inputs: Tensors) -> None:
                check_batch(cut, Call(unit, forward, rebuild), weights, self._executor.root, inputs)

            autocast = Autocast.now(self._executor.backend.device)
            with autocast.uncached(), _slot_for_now(unit, weights), owners:
                result = infer(run, unit, self._micro_batches, args, kwargs, aside, check)
            leaves.clear()
            if phase is Phase.INFERENCE and not is_compiled(forward):
                owners.check_none_left(unit)
            return result

        return self._executor.forward(self._unit, work, phase)


@contextmanager
def _slot_for_now(unit: Unit, weights: torch.Tensor) -> Iterator[None]:
    """After the block, raise if backward reads a view of the slot ``weights`` that autograd has saved inside:
    the slot will hold another layer by then."""
    is_over = False

    def unpack(saved: torch.Tensor) -> torch.Tensor:
        if is_over and aliases(saved, weights):
            raise RuntimeError(
                f"layer '{unit.name}' is frozen and no input requires a gradient, but backward goes through "
                "it to a tensor of another module: pass that tensor to the layer as an argument"
            )
        return saved

    with torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, unpack):
        try:
            yield
        finally:
            is_over = True


#: By autograd's own words, which name no layer, what they mean for a layer in whose backward they are raised.
_MEANINGS = {
    "modified by an inplace operation": "was given, or has returned, a tensor that was written before its "
    "backward, which needs it (write into a clone)",
    "backward through the graph a second time": "is gone through backward a second time, or uses a tensor "
    "that is none of its arguments and whose graph a backward has gone through already, that of another "
    "layer, micro-batch or step (pass the tensor to the layer as an argument)",
}


class _Layer(torch.autograd.Function):
    """A streamed layer in the user's graph: tensors in, tensors out.

    Its parameters are `InGraph`, which has made ``token`` of them. What builds the layer's result around the
    tensors that come out and, after them, those that went in is appended to ``results``.
    """

    @staticmethod
    def forward(
        ctx: Any,
        layer_call: LayerCall,
        results: list[Any],
        token: torch.Tensor,
        *inputs: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.layer_call = layer_call
        turns = layer_call.executor.turns
        with turns.lock:
            ctx.training_pass = turns.forward()
            outputs, rebuild = layer_call.forward(inputs)
        results.append(rebuild)
        ctx.save_for_backward(*layer_call.kept(inputs))
        ctx.mark_non_differentiable(*(out for out in outputs if not _is_differentiable(out.dtype)))
        return tuple(outputs)

    @staticmethod
    @never_traced
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        layer_call: LayerCall = ctx.layer_call
        unit = layer_call.call.unit
        check_transforms(unit.name, gradients)
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"create_graph=True: streamed layer '{unit.name}' has no gradients of gradients (gradient "
                "penalties, Hessians): leave create_graph out, or call streamer.unwrap(model) first"
            )
        params, _ = ctx.next_functions[0]
        asked = [*map(asked_of, InGraph.accumulators(params, len(unit.trainable)))]
        turns = layer_call.executor.turns
        try:
            with turns.lock:
                turns.backward(ctx.training_pass)
                finish_with_this_backward(layer_call.executor)
                found = layer_call.backward(ctx.saved_tensors, gradients, asked)
        except RuntimeError as error:
            for words, meaning in _MEANINGS.items():
                if words in str(error):
                    raise RuntimeError(f"layer '{unit.name}' {meaning}: {error}") from error
            raise
        of_params, of_inputs = found[: len(asked)], found[len(asked) :]
        if Asked.RETURNED in asked:
            params.gradients = tuple(
                None if gradient is None else gradient.to(param.device)
                for gradient, param in zip(of_params, unit.trainable, strict=True)
            )
        return (None, None, None, *of_inputs)


@as_plain
def _needs_graph(tensors: Iterable[torch.Tensor]) -> bool:
    return any(tensor.requires_grad for tensor in tensors)


def _is_differentiable(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def finish_with_this_backward(executor: Executor) -> None:
    """Let the backward that is running end only when all gradients are in host memory."""
    task = backward_number()
    if executor.backward_task != task:
        executor.backward_task = task
        executor.turns.until_backward_ends(executor.finish_backward)
