"""Modules whose forward needs company: those inside of layers that others call, and those that look at the
class of parameters."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

from torch import nn

from streamer.engine import op as ops
from streamer.engine.executor import Executor
from streamer.engine.guarded import unguarded
from streamer.engine.unit import Unit

#: What every module of a wrapped model has of its own in place of its class's.
GUARDS = ("_apply", "__deepcopy__", "__reduce_ex__", "zero_grad")


class InnerForward:
    """Stands in for the ``forward`` of a module of ``unit`` that has parameters.

    Called in the run of its own layer it finds the weights of the slot. Whoever else calls it (another layer,
    the user) finds those in host memory, which an update may be about to write.
    """

    def __init__(self, executor: Executor, unit: Unit, module: nn.Module) -> None:
        self._executor = executor
        self._unit = unit
        self._module = module
        #: what the module had of its own in place of its class's forward
        self.had = module.__dict__.get("forward")
        self._name, self._param = next((n, p) for n, p in module._parameters.items() if p is not None)
        # for inspect.signature
        functools.update_wrapper(self, module.forward, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._module._parameters.get(self._name) is self._param:
            self._let_weights_be_read()
        return self.__wrapped__(*args, **kwargs)  # type: ignore[attr-defined]

    def _let_weights_be_read(self) -> None:
        if self._executor.released:
            return
        if self._executor.backend.device.type == "cuda":
            raise RuntimeError(
                f"a {type(self._module).__name__} of layer '{self._unit.name}' is called outside of it, "
                "where its weights are in host memory: call the layer, or do not stream it"
            )
        self._executor.issuer.wait([ops.shard(self._unit.index)])


class PlainForward:
    """Stands in for the ``forward`` of a module outside of layers that computes by other operations where a
    parameter's class overrides PyTorch's functions, as those of a wrapped model do."""

    #: They ask `torch.overrides.has_torch_function`, and leave their fast path.
    KINDS = (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention)

    def __init__(self, module: nn.Module) -> None:
        #: what the module had of its own in place of its class's forward
        self.had = module.__dict__.get("forward")
        # for inspect.signature
        functools.update_wrapper(self, module.forward, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with unguarded():
            return self.__wrapped__(*args, **kwargs)  # type: ignore[attr-defined]


def plain_forwards(modules: Iterable[nn.Module]) -> Callable[[], None]:
    """Put a `PlainForward` on those of ``modules`` that need one; the returned function takes them off."""
    with ExitStack() as stack:
        for module in modules:
            if isinstance(module, PlainForward.KINDS):
                plain = PlainForward(module)
                module.__dict__["forward"] = plain
                stack.callback(_restore, module, plain.had)
        return stack.pop_all().close


def guard_inner_modules(executor: Executor) -> Callable[[], None]:
    """Put an `InnerForward` on every module inside of a layer that has parameters; the returned function
    takes them off."""
    with ExitStack() as stack:
        for unit in executor.units:
            for module in unit.module.modules():
                if module is unit.module or not any(p is not None for p in module._parameters.values()):
                    continue
                if isinstance(module.__dict__.get("forward"), InnerForward):  # it is in two layers
                    continue
                guarded = InnerForward(executor, unit, module)
                module.__dict__["forward"] = guarded
                stack.callback(_restore, module, guarded.had)
        return stack.pop_all().close


def _restore(module: nn.Module, had: Any) -> None:
    if had is None:
        module.__dict__.pop("forward", None)
    else:
        module.__dict__["forward"] = had
