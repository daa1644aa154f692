"""Turn a streamed model into a plain one: `unwrap`, or `copy.deepcopy` of it or of a part of it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import cached_property, partial
from typing import Any, TypeVar

import torch
from torch import nn

from streamer.engine.executor import Executor
from streamer.engine.guard import as_plain, plain_class
from streamer.engine.handle import HANDLE, home_of, settle_out, wrapped
from streamer.engine.layer.surroundings import HAD
from streamer.engine.schedule import op as ops
from streamer.engine.unit import InParts, Unit
from streamer.errors import DiskError, warn
from streamer.model.move_in import take_out
from streamer.optim.replay.shadow import CoupledError
from streamer.quantized.parts import marked
from streamer.store.layout import Slice
from streamer.store.ledger import host, require
from streamer.store.purposes import ALL_MOMENTS

Memo = dict[int, Any]

#: The method that `copy.deepcopy` looks for.
COPIED_BY = "__deepcopy__"


class Copier:
    """Creates plain copies of the modules of one wrapped model.

    ``plain_dtypes`` are the dtypes of the copies' parameters, ``attributes`` the names of the attributes that
    `wrap` has set on every module, ``hooks`` the ids of the hooks of `wrap`.
    """

    def __init__(
        self,
        executor: Executor,
        plain_dtypes: Mapping[nn.Parameter, torch.dtype],
        attributes: Collection[str],
        hooks: Collection[int],
    ) -> None:
        self._executor = executor
        self._plain_dtypes = plain_dtypes
        self._attributes = {*attributes, HANDLE}
        self._hooks = hooks

    def of(self, module: nn.Module) -> Callable[[Memo], nn.Module]:
        """``module.__deepcopy__``."""
        return partial(self._copy, module)

    def _copy(self, module: nn.Module, memo: Memo) -> nn.Module:
        self._copy_tensors(module, memo)
        attributes = vars(module)
        plain = {
            name: self._without_own_hooks(name, getattr(value, HAD, value) if name == "forward" else value)
            for name, value in attributes.items()
            if name not in self._attributes
        }
        if plain.get("forward", plain) is None:
            del plain["forward"]
        plain |= self._held.get(module, {})
        if not hasattr(type(module), COPIED_BY):
            # a class may look up missing attributes in an inner module (peft's does), whose function would
            # copy that module in place of this one
            plain[COPIED_BY] = None
        # with these attributes, and not as a new object: its class may define its own copy
        object.__setattr__(module, "__dict__", plain)
        try:
            copied = copy.deepcopy(module, memo)
        finally:
            object.__setattr__(module, "__dict__", attributes)
        copied.__dict__.pop(COPIED_BY, None)
        return copied

    @as_plain
    def _copy_tensors(self, module: nn.Module, memo: Memo) -> None:
        """Put CPU copies of the module's exact weights, and of its buffers, into ``memo``."""
        for buffer in module.buffers():
            if id(buffer) not in memo:
                memo[id(buffer)] = buffer.detach().cpu().clone()
        params = [p for p in module.parameters() if id(p) not in memo and home_of(p) is not None]
        if not params:
            return
        self._executor.synchronize()
        self._check_room(params)
        for param in params:
            copies = [self._exact(unit, slice, own) for unit, slice, own in self._places(param)]
            if (each := self._in_parts.get(param)) is not None:
                # the modules may hold the parts too
                memo |= {id(own): copied for own, copied in zip(each.composite.parts(), copies, strict=True)}
                memo[id(param)] = marked(each.composite.assemble(copies))
                continue
            memo[id(param)] = plain_class(type(param))(copies[0], requires_grad=param.requires_grad)

    @cached_property
    def _held(self) -> dict[nn.Module, dict[str, object]]:
        """Attributes of modules with quantized weights, with their values before `wrap`."""
        return {
            module: had for each in self._in_parts.values() for module, had in each.composite.held.items()
        }

    @cached_property
    def _in_parts(self) -> dict[nn.Parameter, InParts]:
        units = (*self._executor.units, self._executor.root)
        return {each.param: each for unit in units for each in unit.in_parts}

    def _places(self, param: nn.Parameter) -> Iterator[tuple[Unit, Slice, nn.Parameter]]:
        """The unit of ``param``, its slice and itself, or those of each of its parts."""
        home = home_of(param)
        assert home is not None, "it is one of the model's"
        if (each := self._in_parts.get(param)) is None:
            yield home.unit, home.slice, param
            return
        for position in each.positions:
            yield home.unit, home.unit.layout.slices[position], home.unit.params[position]

    def _exact(self, unit: Unit, slice: Slice, param: nn.Parameter) -> torch.Tensor:
        if param.is_meta:
            return param.detach().clone()
        shard = self._executor.across.whole_shard(unit, only=slice)
        return self._executor.backend.on_host(partial(shard.values, slice, self._plain_dtypes[param]))

    def _check_room(self, params: Iterable[nn.Parameter]) -> None:
        own = [each for param in params for _, _, each in self._places(param)]
        needed = sum(param.numel() * self._plain_dtypes[param].itemsize for param in own)
        available = self._executor.backend.host_available()
        remedy = "write a checkpoint (streamer.save) instead"
        require("a plain copy of the model", host(needed, available, remedy))

    def _without_own_hooks(self, name: str, value: Any) -> Any:
        if "_hooks" not in name or not isinstance(value, dict):
            return value
        return type(value)((key, hook) for key, hook in value.items() if key not in self._hooks)


M = TypeVar("M", bound=nn.Module)


@as_plain
def unwrap(model: M) -> M:
    """Turn ``model`` into a plain CPU module again, with the trained weights, and free its memory.

    Parameters get their dtype before `wrap`, from their exact masters. If user code has replaced a
    parameter's memory since, the parameter keeps those values. Gradients are dropped. An optimizer of the
    wrapped model is of no more use; its moments are freed when you drop it. Returns the model.

    Raises ValueError if the model is not wrapped.
    """
    handle = wrapped(model)
    executor = handle.executor
    executor.host.wait_for_saving()
    units = (*executor.units, executor.root)
    try:
        # not `synchronize`, which raises the error of a copy: the host shards are whole without it
        executor.issuer.wait(
            place for unit in units for place in ops.masters_of(unit.index, executor.shard(unit))
        )
    except (DiskError, CoupledError) as error:
        executor.forget_failures()
        warn(f"the weights are as a failed update has left them ({error})")
    for unit in units:
        executor.pager.parameters.end_flight(unit)
    moved = {param for unit in units for _, param in executor.pager.parameters.elsewhere(unit)}
    with executor.host.writing_state("unwrapping"):
        executor.pager.refresh(moved)
    # first, to free memory for the weights that come out
    executor.store.drop(ALL_MOMENTS)
    for unit in units:
        take_out(executor.backend, unit, executor.across.whole_shard(unit), handle.plain_dtypes, moved)
    forget(model, executor)
    handle.take_off()
    handle.close()
    executor.release()
    return model


def forget(model: nn.Module, executor: Executor) -> None:
    """Remove the model's handle and its parameters' places, and restore its layers' own forward."""
    for unit in executor.units:
        had = getattr(unit.module.__dict__.pop("forward", None), HAD, None)
        if had is not None:
            unit.module.__dict__["forward"] = had
    settle_out(executor)
    model.__dict__.pop(HANDLE, None)
