"""A model cut into units: one for each layer, one for all the rest."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
from torch import nn

from streamer.engine.op import ROOT
from streamer.engine.unit import Unit
from streamer.memory.layout import Layout, Param

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

Owners = dict[nn.Parameter, list[tuple[nn.Module, str, str]]]


def make_units(
    model: nn.Module, layers: Sequence[tuple[str, nn.Module]], dtype: torch.dtype | None
) -> tuple[list[Unit], Unit]:
    """One unit for each of ``layers`` (qualified name and module), and the root unit.

    ``dtype`` is what parameters are streamed in; None keeps theirs. Raises ValueError for what cannot be
    streamed: TorchScript, a layer without parameters, a parameter that two units share or that is sparse,
    complex, on the meta device without being virtual, or of another dtype than fp32, bf16 and fp16.
    """
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise ValueError(
                f"'{name}' is TorchScript, whose code does not see weights that are in a slot: wrap the "
                "model with the module that it was made of"
            )
    inside = {module for _, layer in layers for module in layer.modules()}
    owners = [_owners(name, layer.named_modules()) for name, layer in layers]
    rest = ((name, module) for name, module in model.named_modules() if module not in inside)
    owners.append(_owners("", rest))
    _check_unshared(owners, [*(f"layer '{name}'" for name, _ in layers), "the rest of the model"])
    units = [
        _unit(index, name, layer, owned, dtype)
        for index, ((name, layer), owned) in enumerate(zip(layers, owners[:-1], strict=True))
    ]
    for unit in units:
        if not unit.params:
            raise ValueError(
                f"layer '{unit.name}' has no parameters, so there is nothing to stream: put what it does "
                "into the layer before or after it"
            )
    root = _unit(ROOT, "root", model, owners[-1], dtype, inside)
    return units, root


def layout_of(name: str, module: nn.Module, dtype: torch.dtype | None) -> Layout:
    """The layout that the unit of ``module`` (qualified name ``name``) would have."""
    owned = _owners(name, module.named_modules())
    return Layout.of(_param(param, places, dtype) for param, places in owned.items())


def _owners(prefix: str, modules: Iterable[tuple[str, nn.Module]]) -> Owners:
    owners: Owners = defaultdict(list)
    for path, module in modules:
        for name, param in module._parameters.items():
            if param is not None:
                owners[param].append((module, name, ".".join(part for part in (prefix, path, name) if part)))
    return owners


def _check_unshared(owners: Sequence[Owners], names: Sequence[str]) -> None:
    home: dict[nn.Parameter, int] = {}
    at_address: dict[int, nn.Parameter] = {}
    for index, owned in enumerate(owners):
        for param, places in owned.items():
            # sparse and meta tensors have no address
            dense = param.layout is torch.strided and not param.is_meta and param.numel()
            if dense and at_address.setdefault(param.data_ptr(), param) is not param:
                raise ValueError(
                    f"parameter '{places[0][2]}' has the same memory as another one: tie them by sharing the "
                    "nn.Parameter itself, or give each its own copy"
                )
            if home.setdefault(param, index) != index:
                raise ValueError(
                    f"parameter '{places[0][2]}' belongs to {names[home[param]]} and to {names[index]}; a "
                    "parameter may be shared only within one layer or outside of all of them: give each its "
                    "own copy"
                )


def _unit(
    index: int,
    name: str,
    module: nn.Module,
    owned: Owners,
    dtype: torch.dtype | None,
    elsewhere: Iterable[nn.Module] = (),
) -> Unit:
    params = {
        _param(param, places, dtype): (param, tuple((owner, attribute) for owner, attribute, _ in places))
        for param, places in owned.items()
    }
    layout = Layout.of(params)
    others = set(elsewhere)
    return Unit(
        index=index,
        name=name,
        module=module,
        layout=layout,
        params=tuple(params[slice.param][0] for slice in layout.slices),
        owners=tuple(params[slice.param][1] for slice in layout.slices),
        buffer_owners=tuple(
            (owner, key) for owner in module.modules() if owner not in others for key in owner._buffers
        ),
    )


def _param(
    param: nn.Parameter, places: Sequence[tuple[nn.Module, str, str]], dtype: torch.dtype | None
) -> Param:
    name = places[0][2]
    return Param(name, tuple(param.shape), _streamed_dtype(param, name, dtype), param.requires_grad)


def _streamed_dtype(param: nn.Parameter, name: str, dtype: torch.dtype | None) -> torch.dtype:
    if param.layout is not torch.strided:
        raise ValueError(
            f"parameter '{name}' is sparse ({param.layout}): make it dense, or leave it out of the model"
        )
    if param.dtype.is_complex:
        raise ValueError(f"parameter '{name}' is complex ({param.dtype}): store its real and imaginary parts")
    if not param.dtype.is_floating_point:
        raise ValueError(
            f"parameter '{name}' has dtype {param.dtype}, which is no floating point: cast the model first, "
            "or register it as a buffer, which stays on the device"
        )
    streamed = param.dtype if dtype is None else dtype
    if streamed not in DTYPES:
        raise ValueError(
            f"parameter '{name}' has dtype {param.dtype}: streamed weights are torch.float32, torch.bfloat16 "
            "or torch.float16; give wrap(dtype=...) one of them, or cast the model first"
        )
    return streamed
