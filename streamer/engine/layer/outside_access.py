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
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from streamer.engine.paging.executor import Executor
from streamer.engine.tensors.guarded import METADATA, unguarded
from streamer.engine.tensors.nested import walk
from streamer.torch_private import exchange_function_modes, function_modes

Forward = Callable[..., Any]

#: What stands in for a module's ``forward`` has this attribute: what the module had of its own in place of
#: its class's forward, or None.
HAD = "_streamer_had"

_DEVICE = torch.Tensor.device.__get__
_IS_ON_DEVICE = {
    getattr(torch.Tensor, name).__get__: kind
    for name, kind in (("is_cuda", "cuda"), ("is_cpu", "cpu"), ("is_meta", "meta"))
}
#: What tells of a weight of a part without reading it.
_ALLOWED = METADATA | {torch.Tensor.stride, torch.Tensor.is_contiguous}


def _stand_in(module: nn.Module, make: Callable[[Forward], Forward]) -> Callable[[], None]:
    """Put ``make(forward)`` in place of the forward of ``module``; the returned function takes it off."""
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
        for value in walk((*args, *kwargs.values())):
            if id(value) not in self._names:
                continue
            if func == _DEVICE:
                return self._device
            if func in _IS_ON_DEVICE:
                return self._device.type == _IS_ON_DEVICE[func]
            if func not in _ALLOWED:
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


def watch_split(executor: Executor, splits: Sequence[Split]) -> Callable[[], None]:
    """Let a `Watch` be on while the modules of ``splits`` run; the returned function ends that.
    [Note: split layers]"""
    names = {param: name for unit in executor.units for name, param, _ in unit.registered}
    watch = Watch(executor.backend.device, splits, names)

    def watched(forward: Forward) -> Forward:
        def run(*args: Any, **kwargs: Any) -> Any:
            if any(isinstance(mode, Watch) for mode in function_modes()):
                return forward(*args, **kwargs)
            with watch:
                return forward(*args, **kwargs)

        return run

    with ExitStack() as stack:
        for split in splits:
            stack.callback(_stand_in(split.module, watched))
        return stack.pop_all().close


def unwatched() -> AbstractContextManager[None]:
    """Run the block without any `Watch`."""
    modes = function_modes()
    return _unwatched(modes) if any(isinstance(mode, Watch) for mode in modes) else nullcontext()


@contextmanager
def _unwatched(modes: list[TorchFunctionMode]) -> Iterator[None]:
    others = [mode for mode in modes if not isinstance(mode, Watch)]
    exchange_function_modes(len(modes), others)
    try:
        yield
    finally:
        exchange_function_modes(len(others), modes)


#: Modules that ask `torch.overrides.has_torch_function`, and leave their fast path where a parameter's class
#: overrides PyTorch's functions, as those of a wrapped model do.
_ASKING = (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention)


def plain_forwards(modules: Iterable[nn.Module]) -> Callable[[], None]:
    """Let those of ``modules``, which are outside of layers, compute by the operations that they would use
    with plain parameters; the returned function ends that."""

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
