"""Modules that others than their layer call, or that use weights outside of the part that is streamed.

[Note: split layers]
A layer that is too large for a slot is cut into units along its children. Its own forward then runs in the
user's graph, as that of the model does, and calls the parts. What it must not do is compute with a part's
weights by itself (``F.linear(x, self.head.weight)``): those are in host memory, where an update may be about
to write them. While it runs, a mode of `torch.overrides` therefore looks at what PyTorch's functions are
given, and refuses such weights. To ask for their shape, dtype or device is allowed; inside of the parts,
which see the weights of the slot, the mode is off.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from streamer.engine.paging.executor import Executor
from streamer.engine.paging.unit import Unit
from streamer.engine.schedule import op as ops
from streamer.engine.tensors.guarded import unguarded
from streamer.torch_private import exchange_function_modes, function_modes

_PROPERTIES = "dtype shape device ndim layout requires_grad is_leaf itemsize nbytes is_cuda is_cpu is_meta"
_METHODS = "size dim ndimension numel nelement stride element_size is_floating_point is_complex is_contiguous"

_IS_ON_DEVICE = {
    getattr(torch.Tensor, name).__get__: kind
    for name, kind in (("is_cuda", "cuda"), ("is_cpu", "cpu"), ("is_meta", "meta"))
}
_DEVICE = torch.Tensor.device.__get__

#: What tells of a tensor without reading it.
_TELLING = {
    *(getattr(torch.Tensor, name).__get__ for name in _PROPERTIES.split()),
    *(getattr(torch.Tensor, name) for name in _METHODS.split()),
    torch.is_floating_point,
    torch.is_complex,
    torch.numel,
}


@dataclass(frozen=True)
class Split:
    """A layer, or a part of one, that was cut into its children. With ``whole_bytes`` of device memory in
    all it would not have been."""

    name: str
    module: nn.Module
    whole_bytes: int


class Watch(TorchFunctionMode):
    """Refuses weights of parts outside of the parts. [Note: split layers]"""

    def __init__(
        self, device: torch.device, splits: Sequence[Split], names: Mapping[nn.Parameter, str]
    ) -> None:
        super().__init__()
        self._device = device
        self._splits = splits
        # by identity, which is told without asking PyTorch
        self._names = {id(param): (name, param) for param, name in names.items()}

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for value in _flat((args, kwargs)):
            if id(value) not in self._names:
                continue
            if func == _DEVICE:
                return self._device
            if func in _IS_ON_DEVICE:
                return self._device.type == _IS_ON_DEVICE[func]
            if func not in _TELLING:
                raise self._refusal(self._names[id(value)][0])
        return func(*args, **kwargs)

    def _refusal(self, name: str) -> RuntimeError:
        around = [split for split in self._splits if name.startswith(f"{split.name}.")]
        if not around:
            return RuntimeError(
                f"'{name}' is used in a layer that is streamed in parts, and is of another layer: call that "
                "layer, or give what is needed of it as an argument"
            )
        split = min(around, key=lambda split: len(split.name))
        return RuntimeError(
            f"layer '{split.name}' is too large for a slot and is streamed in parts, but '{name}' is used "
            "outside of its part (by the layer's own forward, or by a hook), where it is not on the device: "
            f"{split.whole_bytes} bytes of device memory would keep the layer whole (fewer with a smaller "
            "num_slots)"
        )


class SplitForward:
    """Stands in for the ``forward`` of a module whose parts are streamed. [Note: split layers]"""

    def __init__(self, watch: Watch, module: nn.Module) -> None:
        self._watch = watch
        #: what the module had of its own in place of its class's forward
        self.had = module.__dict__.get("forward")
        # for inspect.signature
        functools.update_wrapper(self, module.forward, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward: Callable[..., Any] = self.__wrapped__  # type: ignore[attr-defined]
        if any(isinstance(mode, Watch) for mode in function_modes()):
            return forward(*args, **kwargs)
        with self._watch:
            return forward(*args, **kwargs)


def watch_split(executor: Executor, splits: Sequence[Split]) -> Callable[[], None]:
    """Put a `SplitForward` on what was split; the returned function takes them off."""
    names = {
        param: slice.param.name
        for unit in executor.units
        for slice, param in zip(unit.layout.slices, unit.params, strict=True)
    }
    watch = Watch(executor.backend.device, splits, names)
    with ExitStack() as stack:
        for split in splits:
            watched = SplitForward(watch, split.module)
            split.module.__dict__["forward"] = watched
            stack.callback(_restore, split.module, watched.had)
        return stack.pop_all().close


@contextmanager
def unwatched() -> Iterator[None]:
    """Run the block without any `Watch`."""
    modes = function_modes()
    if not any(isinstance(mode, Watch) for mode in modes):
        yield
        return
    others = [mode for mode in modes if not isinstance(mode, Watch)]
    exchange_function_modes(len(modes), others)
    try:
        yield
    finally:
        exchange_function_modes(len(others), modes)


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, list | tuple):
        for item in value:
            yield from _flat(item)
    elif isinstance(value, dict):
        yield from _flat(tuple(value.values()))
    else:
        yield value


def _restore(module: nn.Module, had: Any) -> None:
    if had is None:
        module.__dict__.pop("forward", None)
    else:
        module.__dict__["forward"] = had


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
