"""The hooks and guards of a wrapped model, for calls, saving, loading, moving, copying and pickling."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from streamer.engine.executor import Executor
from streamer.engine.guard import as_plain, never_traced
from streamer.engine.handle import GUARDS
from streamer.engine.layer.arguments import refuse_trace
from streamer.engine.layer.graph import is_added_to
from streamer.engine.layer.surroundings import plain_forwards
from streamer.engine.tensors import flatten
from streamer.engine.unit import Unit
from streamer.model.unwrap import Copier
from streamer.quantized.parts import plain_parts
from streamer.torch_private import is_sparse

#: An attribute by which Accelerate (used by transformers' Trainer) takes a model as prepared, and does not
#: wrap it in DistributedDataParallel.
PREPARED = "_is_accelerate_prepared"


class _Prepared:
    """True; testing it raises RuntimeError if Accelerate is to use mixed precision."""

    def __bool__(self) -> bool:
        library = sys.modules.get("accelerate.state")
        precision = (
            "no" if library is None else library.AcceleratorState._shared_state.get("_mixed_precision")
        )
        if precision not in ("no", None):
            raise RuntimeError(
                f"mixed_precision='{precision}' (Trainer's {precision}=True) does not work with ranks that "
                "share a model: leave it out, and pass streamer.wrap dtype=torch.bfloat16"
            )
        return True


def attach_guards(
    model: nn.Module, executor: Executor, plain_dtypes: Mapping[nn.Parameter, torch.dtype]
) -> Callable[[], None]:
    """Put hooks and guards on ``model``; the returned function removes them.

    ``plain_dtypes`` are the dtypes of the parameters of a plain copy.
    """
    hooks: set[int] = set()
    copier = Copier(executor, plain_dtypes, GUARDS, hooks)
    modules = list(model.modules())
    in_layers = {module for unit in executor.units for module in unit.module.modules()}
    with ExitStack() as stack:

        def keep(handle: RemovableHandle) -> None:
            stack.callback(handle.remove)
            hooks.add(handle.id)

        stack.callback(plain_forwards(module for module in modules if module not in in_layers))
        keep(model.register_forward_pre_hook(_check_model(executor)))
        keep(model.register_forward_pre_hook(_move_inputs(executor.backend.device), with_kwargs=True))
        begin = never_traced(lambda *_: executor.begin())
        for module in modules:
            if module not in in_layers:
                # an update may be about to write the parameters that the module reads, and user code may call
                # the module without calling the model
                keep(module.register_forward_pre_hook(begin))
        if not executor.ranks.is_alone:
            model.__dict__[PREPARED] = _Prepared()
            stack.callback(model.__dict__.pop, PREPARED, None)
        for unit in (*executor.units, executor.root):
            for position, param in enumerate(unit.trainable):
                before = _BeforeAdding(executor, unit, position)
                keep(torch.Tensor.register_hook(param, before))  # type: ignore[no-untyped-call]
        keep(model.register_state_dict_post_hook(_to_cpu))
        for module in modules:
            keep(module.register_state_dict_pre_hook(lambda *_, **__: executor.synchronize()))
            keep(module.register_load_state_dict_pre_hook(_wait_before_loading(executor)))
            # .to, .cuda, .half and similar methods all call _apply
            own = {
                "_apply": _stay(module, executor.backend.device),
                "__deepcopy__": copier.of(module),
                "__reduce_ex__": _refuse_to_pickle,
                "zero_grad": _zero_grad(module, executor),
            }
            assert own.keys() == set(GUARDS)
            stack.callback(_remove, module)
            module.__dict__.update(own)
        return stack.pop_all().close


def _remove(module: nn.Module) -> None:
    for name in GUARDS:
        module.__dict__.pop(name, None)


def _check_model(executor: Executor) -> Callable[..., None]:
    @never_traced
    def hook(module: nn.Module, args: Any) -> None:
        refuse_trace()
        executor.check_unchanged()
        if torch.is_grad_enabled():
            executor.root.wanted()  # raises for a gradient without room

    return hook


def _move_inputs(device: torch.device) -> Callable[..., tuple[Any, Any]]:
    @never_traced
    def hook(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        tensors, rebuild = flatten((args, kwargs))
        if all(tensor.device == device for tensor in tensors):
            # the same objects: the model may write into a list among its arguments
            return args, kwargs
        # the user may write pinned memory again once this returns
        moved: tuple[Any, Any] = rebuild(
            [tensor.to(device, non_blocking=not tensor.is_pinned()) for tensor in tensors]
        )
        return moved

    return hook


@dataclass(eq=False)
class _BeforeAdding:
    """Called before autograd adds to the ``grad`` of a parameter: one of the root unit, or one of a layer
    that is used outside of the layer (a penalty on weights)."""

    executor: Executor
    unit: Unit
    position: int

    def __call__(self, gradient: torch.Tensor | None) -> None:
        if gradient is not None:  # gradients from a layer's own backward do not come here
            self._prepare()

    @as_plain
    def _prepare(self) -> None:
        executor, unit = self.executor, self.unit
        if not is_added_to(torch.autograd.graph.get_gradient_edge(unit.params[self.position]).node):
            return
        if not executor.ranks.is_alone:
            if unit is not executor.root:
                name = unit.layout.slices[self.position].param.name
                raise RuntimeError(
                    f"'{name}' is used outside of its layer, where its gradient would be that of one rank: "
                    "use it in the layer's forward, or leave out process_group"
                )
            executor.begin_backward()
        executor.gradients.before_adding(unit, self.position)


def _wait_before_loading(executor: Executor) -> Callable[..., None]:
    def hook(module: nn.Module, state_dict: Any, prefix: str, metadata: dict[str, Any], *_: Any) -> None:
        if metadata.get("assign_to_params_buffers"):
            raise ValueError(
                "load_state_dict(assign=True) would replace the parameters of a wrapped model: load with "
                "assign=False, or before streamer.wrap"
            )
        executor.synchronize()

    return hook


def _to_cpu(module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any) -> None:
    copies: dict[tuple[Any, ...], torch.Tensor] = {}
    for key, value in state_dict.items():
        if key.startswith(prefix) and isinstance(value, torch.Tensor):
            # tied parameters stay tied; a parameter in parts has no address except those of its parts
            addresses = tuple(part.data_ptr() for part in plain_parts(value))
            stride = None if is_sparse(value) else value.stride()
            place = addresses, value.dtype, value.shape, stride
            if place not in copies:
                copies[place] = value.cpu()
            state_dict[key] = copies[place]


def _zero_grad(module: nn.Module, executor: Executor) -> Callable[..., None]:
    @never_traced
    def zero_grad(set_to_none: bool = True) -> None:
        if not set_to_none:
            executor.before_zeroing()
        executor.zero_grad()
        type(module).zero_grad(module, set_to_none)

    return zero_grad


def _stay(module: nn.Module, device: torch.device) -> Callable[..., nn.Module]:
    """``module._apply``, which refuses to move, cast or share the module. A function that keeps device and
    dtype may run: trainers move every model to their device, which may be the model's own."""

    def apply(function: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        on_host = torch.empty(1)
        function(on_host)
        moves = on_host.is_shared()
        for dtype in {tensor.dtype for tensor in (*module.parameters(), *module.buffers())}:
            probe = torch.empty(2, dtype=dtype, device=device)
            after = function(probe)
            # trainers number the CPU by the process
            is_there = after.device == device or after.device.type == device.type == "cpu"
            moves |= not is_there or after.dtype != dtype
        if moves:
            raise RuntimeError(
                f"a wrapped model cannot be moved or cast (.to, .cuda, .half, ...), it runs on '{device}': "
                "choose device and dtype in streamer.wrap, or call streamer.unwrap(model) first"
            )
        return module

    return apply


def _refuse_to_pickle(*_: Any, **__: Any) -> NoReturn:
    raise RuntimeError(
        "a wrapped model cannot be pickled, nor copied by copy.copy: use copy.deepcopy(model), which is a "
        "plain model, or save model.state_dict()"
    )
