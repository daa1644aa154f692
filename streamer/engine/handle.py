"""How the public functions find what `wrap` has attached to a model and to its parameters."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NoReturn, Protocol

import torch
from torch import nn

from streamer.engine.executor import Executor
from streamer.engine.guard import Access, Kind, Tag, guard_parameter, unguard_parameter
from streamer.engine.schedule.op import ROOT
from streamer.engine.unit import Unit
from streamer.store.layout import Slice

#: Methods that every module of a wrapped model replaces by its own.
GUARDS = ("_apply", "__deepcopy__", "__reduce_ex__", "zero_grad")

HANDLE, HOME = "_streamer", "_streamer_home"


#: the executors of all wrapped models
_executors: weakref.WeakSet[Executor] = weakref.WeakSet()


@dataclass(frozen=True)
class Home:
    """The place of a parameter in a wrapped model."""

    executor: Executor
    unit: Unit
    slice: Slice

    def __reduce__(self) -> NoReturn:
        # raised when the parameter is pickled, since it holds this object
        raise RuntimeError(
            f"'{self.slice.param.name}' belongs to a wrapped model and cannot be pickled: save "
            "model.state_dict(), or param.detach()"
        )


class PlannedBytes(Protocol):
    """Bytes that `wrap` has planned, by purpose, on the device and in host memory."""

    @property
    def device(self) -> Mapping[str, int]: ...

    @property
    def host(self) -> Mapping[str, int]: ...


@dataclass(frozen=True)
class Wrapped:
    """The object that `wrap` attaches to a model. ``take_off`` removes hooks and guards, ``close`` ends
    lanes."""

    executor: Executor
    planned: PlannedBytes
    plain_dtypes: dict[nn.Parameter, torch.dtype]
    take_off: Callable[[], None]
    close: Callable[[], object]
    #: the options chosen for "auto": a `streamer.planner.choose.Chosen`
    chosen: object = None


def settle_in(executor: Executor) -> None:
    """Move the root's parameters to the device, and attach to every parameter its home and its guard."""
    executor.issuer.synchronize()
    _executors.add(executor)
    for slice, param in executor.root.placed():
        param.data = slice.own(executor.pager.root_buffer)
    executor.root.refresh_parts()
    for unit in (*executor.units, executor.root):
        for slice, param in unit.placed():
            param.__dict__[HOME] = Home(executor, unit, slice)
        for each in unit.in_parts:
            each.composite.hold()
            each.param.__dict__[HOME] = Home(executor, unit, unit.layout.slices[each.positions[0]])
    if executor.backend.device.type != "meta":
        _guard(executor)


def _guard(executor: Executor) -> None:
    """Guard the parameters of the wrapped model. [Note: what the user sees]"""
    access: weakref.ref[Access] = weakref.ref(executor)
    for unit in (*executor.units, executor.root):
        names = [slice.param.name for slice in unit.layout.slices]
        in_parts = [(each.positions[0], each.param) for each in unit.in_parts]
        for position, param in (*enumerate(unit.params), *in_parts):
            tag = Tag(access, Kind.PARAMETER, unit.index, position, names[position])
            guard_parameter(param, tag, in_layer=unit.index != ROOT)
    executor.pager.parameters.guard()


def settle_out(executor: Executor) -> None:
    """Undo `settle_in`: the parameters become plain ones."""
    for unit in (*executor.units, executor.root):
        for each in unit.in_parts:
            each.composite.let_go()
        for param in (*unit.params, *(each.param for each in unit.in_parts)):
            unguard_parameter(param)
            param.__dict__.pop(HOME, None)


def wrapped(model: nn.Module) -> Wrapped:
    """The handle of a wrapped model. Raises ValueError if it is not wrapped."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"give the wrapped model itself, not a {type(model).__name__}")
    handle = model.__dict__.get(HANDLE)
    if not isinstance(handle, Wrapped):
        part = wrapped_part(model)
        remedy = f"give {part}, which is" if part else "call streamer.wrap(model, layers=...) first"
        raise ValueError(f"this {type(model).__name__} is not wrapped: {remedy}")
    return handle


def wrapped_part(model: nn.Module) -> str | None:
    """The path in ``model`` of a module that was wrapped itself, if there is one."""
    names = (name for name, module in model.named_modules(prefix="model") if HANDLE in module.__dict__)
    return next(names, None)


def home_of(param: torch.Tensor) -> Home | None:
    """The home of a parameter, or None if its model is not wrapped."""
    home = param.__dict__.get(HOME)
    return home if isinstance(home, Home) else None


def shares_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor shares memory with weights of a wrapped model."""
    if tensor.is_meta or tensor.is_sparse:
        return False
    address = tensor.data_ptr()
    return any(executor.holds(address) for executor in _executors)


def require_home(param: torch.Tensor) -> Home:
    """The home of a parameter. Raises ValueError if its model is not wrapped."""
    home: Home | None = param.__dict__.get(HOME)
    if home is None:
        raise ValueError(
            f"a parameter of shape {tuple(param.shape)} belongs to no wrapped model: call "
            "streamer.wrap(model, ...) before streamer.AdamW(model.parameters()) and after adding parameters "
            "(adapters) to the model, and leave out parameters that are not in that model"
        )
    return home
