"""The surroundings of a layer's forward: autocast, checkpoints, the compiler, and recorded outputs.

[Note: checkpointing]
A checkpoint (`torch.utils.checkpoint`) around several layers would drop all tensors saved inside, and run all
of it again before the first of those layers goes backward, only to recompute the inputs that the layer has
kept. So a layer's saved tensors bypass the hooks of the checkpoints around it. Hugging Face's layers
checkpoint themselves if their ``gradient_checkpointing`` is set; the flag is off while a layer runs.

[Note: recorded outputs]
A model of transformers returns router logits of experts and weights of attention in addition to its hidden
states (``output_router_logits``, ``output_attentions``). Hooks on modules append them to lists that the
model's forward has created. In a streamed layer they are part of the layer's own graph, which the user's
backward does not reach. So each call of a layer has lists of its own. Their tensors are returned together
with the layer's result, as tensors of the user's graph, and appended to the model's lists.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from streamer.engine.guard import unguarded
from streamer.engine.unit import Unit
from streamer.torch_private import in_autocast, pop_saved_hooks, push_saved_hooks, top_saved_hooks

Forward = Callable[..., Any]

#: Shared by the blocks of all runs that have nothing to change: a generator for each takes longer.
_NOTHING = nullcontext()


def autocast_settings(device: torch.device) -> tuple[tuple[str, bool, torch.dtype], ...]:
    """Of the CPU and of ``device``: its type, whether autocast is on, and the dtype."""
    types = ("cpu",) if device.type in ("cpu", "meta") else ("cpu", device.type)
    return tuple((type, torch.is_autocast_enabled(type), torch.get_autocast_dtype(type)) for type in types)


def uncached_autocast(device: torch.device) -> AbstractContextManager[None]:
    """The block without autocast's cache of cast weights. The cache would keep a cast copy of every layer's
    weights on the device until autocast ends, and use it when the slot has other weights."""
    return _uncached_autocast(device) if in_autocast() else _NOTHING


@contextmanager
def _uncached_autocast(device: torch.device) -> Iterator[None]:
    with ExitStack() as stack:
        for type, enabled, dtype in autocast_settings(device):
            if enabled:
                stack.enter_context(torch.autocast(type, dtype=dtype, cache_enabled=False))
        yield


def past_checkpoints() -> AbstractContextManager[None]:
    """Save for backward as if no checkpoint were around the block. [Note: checkpointing]"""
    return _NOTHING if top_saved_hooks() is None else _past_checkpoints()


@contextmanager
def _past_checkpoints() -> Iterator[None]:
    hooks = []
    while (top := top_saved_hooks()) is not None:
        if getattr(top[0], "__module__", None) != torch.utils.checkpoint.__name__:
            break
        hooks.append(top)
        pop_saved_hooks()
    try:
        yield
    finally:
        for pack, unpack in reversed(hooks):
            push_saved_hooks(pack, unpack)


_FLAG = "gradient_checkpointing"


def without_own_checkpoint(layer: nn.Module) -> AbstractContextManager[None]:
    """Run the block with a layer of Hugging Face that does not checkpoint itself. [Note: checkpointing]"""
    is_set = layer.__dict__.get(_FLAG)
    return _without_own_checkpoint(layer, is_set) if is_set else _NOTHING


@contextmanager
def _without_own_checkpoint(layer: nn.Module, is_set: object) -> Iterator[None]:
    setattr(layer, _FLAG, False)
    try:
        yield
    finally:
        setattr(layer, _FLAG, is_set)


#: A backend of `torch.compile`: its name, or the function itself.
CompileBackend = str | Callable[..., Any]


def compiled(unit: Unit, backend: CompileBackend) -> Callable[..., Any]:
    """The forward of the unit's module, compiled.

    PyTorch caches compiled code by the code of the forward, and parameters are inputs of it. So layers of one
    class with parameters of the same shapes share one compilation. If it fails, the RuntimeError tells the
    remedy.
    """
    run = torch.compile(unit.module.forward, backend=backend)

    def forward(*args: Any, **kwargs: Any) -> Any:
        try:
            return run(*args, **kwargs)
        except RuntimeError as error:
            refuse_compiler_error(unit, error)
            raise

    return forward


def refuse_compiler_error(unit: Unit, error: RuntimeError) -> None:
    """Raise RuntimeError with the remedy if ``error`` was caused by compiling the layer ``unit``."""
    # the import takes a second; users who compile nothing need not wait
    dynamo: Any = sys.modules.get("torch._dynamo.exc")
    if dynamo is not None and isinstance(error, dynamo.TorchDynamoException):
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise RuntimeError(
            f"torch.compile fails on layer '{unit.name}', a {type(unit.module).__name__}: wrap with "
            f"compile=False ({reason})"
        ) from error


#: The variable that holds the model's lists, by their names.
_MODULE, _VARIABLE = "transformers.utils.output_capturing", "_active_collector"


class RecordingForward:
    """A layer's ``forward`` that returns its result and, by the lists' names, the tensors recorded during the
    call."""

    def __init__(self, forward: Forward, variable: Any, lists: dict[str, Any]) -> None:
        self._forward = forward
        self._variable = variable
        # not the lists themselves: every layer's graph would keep all tensors in them
        self._begun = {name: len(items) for name, items in lists.items() if isinstance(items, list)}
        self._others = {name: value for name, value in lists.items() if name not in self._begun}

    @staticmethod
    def of(forward: Forward) -> RecordingForward | None:
        """For ``forward``; None if nothing is recorded now."""
        variable = getattr(sys.modules.get(_MODULE), _VARIABLE, None)
        lists = None if variable is None else variable.get()
        return RecordingForward(forward, variable, lists) if lists else None

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Any, dict[str, list[Any]]]:
        # hooks read the length
        own = {name: [None] * length for name, length in self._begun.items()}
        token = self._variable.set({**own, **self._others})
        try:
            result = self._forward(*args, **kwargs)
        finally:
            self._variable.reset(token)
        return result, {name: items[self._begun[name] :] for name, items in own.items()}

    def hand_on(self, returned: tuple[Any, dict[str, list[Any]]]) -> Any:
        """The result alone of a call that has ``returned`` both; the rest goes to the model's lists."""
        result, recorded = returned
        lists = self._variable.get()
        for name, items in recorded.items():
            lists[name].extend(items)
        return result


#: A replacement of a module's ``forward`` has this attribute: the module's own forward that shadowed its
#: class's, or None.
HAD = "_streamer_had"

#: Modules that call `torch.overrides.has_torch_function`, and leave their fast path if a parameter's class
#: overrides PyTorch's functions, as the class of a wrapped model's parameters does.
_ASKING = (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention)


def plain_forwards(modules: Iterable[nn.Module]) -> Callable[[], None]:
    """Let those of ``modules``, which are outside of layers, compute by the operations that they would use
    with plain parameters; the returned function undoes that."""

    def plain(forward: Forward) -> Forward:
        def run(*args: Any, **kwargs: Any) -> Any:
            with unguarded():
                return forward(*args, **kwargs)

        return run

    with ExitStack() as stack:
        for module in modules:
            if isinstance(module, _ASKING):
                stack.callback(_stand_in(module, plain))
        return stack.pop_all().close


def _stand_in(module: nn.Module, make: Callable[[Forward], Forward]) -> Callable[[], None]:
    """Replace the forward of ``module`` by ``make(forward)``; the returned function undoes that."""
    had, forward = module.__dict__.get("forward"), module.forward
    # for inspect.signature
    instead = functools.update_wrapper(make(forward), forward, updated=())
    setattr(instead, HAD, had)
    module.__dict__["forward"] = instead

    def take_off() -> None:
        if had is None:
            module.__dict__.pop("forward", None)
        else:
            module.__dict__["forward"] = had

    return take_off
