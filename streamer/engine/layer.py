"""What a layer's ``forward`` becomes: a function of its weights, fetched for the call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from streamer.engine.activations import Visit
from streamer.engine.ambient import Autocast
from streamer.engine.asked import asked_of
from streamer.engine.call import Call, aliases, run_on_slot
from streamer.engine.checkpointing import past_checkpoints
from streamer.engine.compiled import Compiler
from streamer.engine.executor import Executor
from streamer.engine.guarded import as_plain
from streamer.engine.inference import infer
from streamer.engine.kvcache import without_caches
from streamer.engine.micro_batches import MicroBatches
from streamer.engine.order import Phase
from streamer.engine.param_hooks import shield
from streamer.engine.policies import POLICIES
from streamer.engine.split import unwatched
from streamer.engine.tracing import never_traced
from streamer.engine.transforms import check_dual, check_transforms
from streamer.engine.tree import flatten
from streamer.engine.unit import Unit


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
        #: what the module had of its own in place of its class's forward
        self.had = unit.module.__dict__.get("forward")
        self._policy = POLICIES[policy]
        self._visit = Visit
        self._micro_batches = micro_batches
        self._forward: Callable[..., Any] = (
            unit.module.forward if compiler is None else compiler.compile(unit)
        )

    def visit_as(self, kind: type[Visit]) -> None:
        """Let visits be of another kind."""
        self._visit = kind

    @never_traced
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # a module around it may have switched subclasses off: `PlainForward`
        with unwatched(), torch._C._EnableTorchFunction():
            return self._call(args, kwargs)

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._executor.structure.enter(self._unit.index)
        check_transforms(self._unit.name)
        if not torch.is_grad_enabled():
            return self._infer(args, kwargs, Phase.INFERENCE)
        args, kwargs = without_caches(args, kwargs, self._unit.name)
        inputs, rebuild = flatten((args, kwargs))
        if not _needs_graph(inputs) and not _needs_graph(self._unit.params):
            return self._infer(args, kwargs, Phase.FROZEN)
        check_dual(self._unit.name, inputs)
        cut = self._micro_batches.cut(args, kwargs, inputs)
        visit = self._visit(self._executor, Call(self._unit, self._forward, rebuild), self._policy, cut)
        results: list[Any] = []
        with past_checkpoints():
            outputs = _Layer.apply(visit, results, *self._unit.trainable, *inputs)  # type: ignore[no-untyped-call]
        return results.pop()((*outputs, *inputs))

    def _infer(self, args: tuple[Any, ...], kwargs: dict[str, Any], phase: Phase) -> Any:
        """Run the layer without a graph, on the very objects it was given: it may write into a cache."""

        unit = self._unit

        def work(weights: torch.Tensor) -> Any:
            run = partial(run_on_slot, unit, self._forward, weights, unit.leaves(weights))
            with Autocast.now(self._executor.backend.device).uncached(), _slot_for_now(unit, weights):
                return infer(run, unit, self._micro_batches, args, kwargs)

        return self._executor.forward(self._unit, work, phase)


@contextmanager
def _slot_for_now(unit: Unit, weights: torch.Tensor) -> Iterator[None]:
    """Refuse gradients that come after the block to what autograd has saved in it of the slot ``weights``:
    that will soon hold another layer, and nothing that ``unit`` was known to be given needed one."""
    is_over = False

    def unpack(saved: torch.Tensor) -> torch.Tensor:
        if is_over and aliases(saved, weights):
            raise RuntimeError(
                f"layer '{unit.name}' is frozen and was given nothing that needs a gradient, but one goes "
                "through it, to a tensor of another module: give that to the layer as an argument"
            )
        return saved

    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, unpack):
        try:
            yield
        finally:
            is_over = True


class _Layer(torch.autograd.Function):
    """A streamed layer in the user's graph: its trainable parameters and tensors in, tensors out.

    The parameters are there to be found by who asks for their gradients: [Note: parameter hooks]. What builds
    the layer's result around the tensors that come out and, after them, those that went in is appended to
    ``results``.
    """

    @staticmethod
    def forward(
        ctx: Any, visit: Visit, results: list[Any], *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.visit = visit
        inputs = tensors[len(visit.call.unit.trainable) :]
        turns = visit.executor.turns
        with turns.lock:
            ctx.training_pass = turns.forward()
            outputs, rebuild = visit.forward(inputs)
        results.append(rebuild)
        ctx.save_for_backward(*visit.kept(inputs))
        ctx.mark_non_differentiable(*(out for out in outputs if not _is_differentiable(out.dtype)))
        return tuple(outputs)

    @staticmethod
    @never_traced
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        visit: Visit = ctx.visit
        unit = visit.call.unit
        check_transforms(unit.name, gradients)
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"create_graph=True: streamed layer '{unit.name}' has no gradients of gradients (gradient "
                "penalties, Hessians): leave create_graph out, or call streamer.unwrap(model) first"
            )
        accumulators = [node for node, _ in ctx.next_functions[: len(unit.trainable)]]
        asked = [asked_of(accumulator) for accumulator in accumulators]
        turns = visit.executor.turns
        try:
            with turns.lock:
                turns.backward(ctx.training_pass)
                _finish_with_this_backward(visit.executor)
                found = visit.backward(ctx.saved_tensors, gradients, asked)
        except RuntimeError as error:
            if "modified by an inplace operation" in str(error):
                # autograd's own words name no layer
                raise RuntimeError(
                    f"layer '{unit.name}' was given, or has returned, a tensor that was written before its "
                    f"backward, which needs it (write into a clone): {error}"
                ) from error
            raise
        shield(unit.trainable)
        of_params, of_inputs = found[: len(asked)], found[len(asked) :]
        returned = [
            None if gradient is None else gradient.to(param.device)
            for gradient, param in zip(of_params, unit.trainable, strict=True)
        ]
        return (None, None, *returned, *of_inputs)


@as_plain
def _needs_graph(tensors: Iterable[torch.Tensor]) -> bool:
    return any(tensor.requires_grad for tensor in tensors)


def _is_differentiable(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _finish_with_this_backward(executor: Executor) -> None:
    """Let the backward that is running end only when all gradients are in host memory."""
    task = torch._C._current_graph_task_id()
    if executor.backward_task != task:
        executor.backward_task = task
        executor.turns.until_backward_ends(executor.finish_backward)
