"""The units of a model: one for each layer, and the root unit for all other parameters."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

import torch
from torch import nn

from streamer.engine.schedule.op import ROOT
from streamer.engine.unit import InParts, Shared, Unit
from streamer.errors import shortened, warn
from streamer.quantized.parts import Composite, composite_of, has_inner_tensors, plainly
from streamer.store.layout import Layout, Param

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

#: The attribute of a tensor that names the dtype to stream it in, whatever ``dtype`` of `wrap` is.
_KEPT = "_streamer_dtype"

Owners = dict[nn.Parameter, list[tuple[nn.Module, str, str]]]


def keep_dtype(tensor: torch.Tensor) -> None:
    """Make `wrap` stream ``tensor`` in its present dtype, whatever the ``dtype`` of `wrap` is."""
    setattr(tensor, _KEPT, tensor.dtype)


def kept_dtype(tensor: torch.Tensor) -> torch.dtype | None:
    """The dtype in which `keep_dtype` keeps ``tensor``; None if there is none."""
    return getattr(tensor, _KEPT, None)


def make_units(
    model: nn.Module, layers: Sequence[tuple[str, nn.Module]], dtype: torch.dtype | None
) -> tuple[list[Unit], Unit]:
    """One unit for each of ``layers`` (qualified name and module), and the root unit.

    ``dtype`` is the dtype to stream parameters in, unless `keep_dtype` keeps their own; None keeps the dtype
    of each. Quantized weights are streamed unchanged: those of a special class, and frozen parameters of
    integers or of 8-bit floats. A parameter that two layers share, or a layer and the rest of the model, is
    in the root unit. Raises ValueError for a model that cannot be streamed: TorchScript, a layer without
    parameters of its own, a parameter that is sparse or complex, or a trained one of another dtype than fp32,
    bf16 and fp16.
    """
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise ValueError(
                f"'{name}' is TorchScript, whose code does not use weights that are in a slot: wrap the "
                "model with the module that it was compiled from"
            )
    inside = {module for _, layer in layers for module in layer.modules()}
    owners = [_owners(name, layer.named_modules()) for name, layer in layers]
    rest = ((name, module) for name, module in model.named_modules() if module not in inside)
    owners.append(_owners("", rest))
    _check_addresses(owners)
    shared = _take_shared(owners)
    for (name, _), owned in zip(layers, owners[:-1], strict=True):
        if not owned:
            raise ValueError(
                f"layer '{name}' has no parameters of its own, so there is nothing to stream: put what it "
                "does into the layer before or after it, or leave it out of layers="
            )
    units = [
        _unit(index, name, layer, owned, dtype, shared=held)
        for index, ((name, layer), owned, held) in enumerate(zip(layers, owners[:-1], shared, strict=True))
    ]
    root = _unit(ROOT, "root", model, owners[-1], dtype, inside)
    return units, root


def _owners(prefix: str, modules: Iterable[tuple[str, nn.Module]]) -> Owners:
    owners: Owners = defaultdict(list)
    for path, module in modules:
        for name, param in module._parameters.items():
            if param is not None:
                owners[param].append((module, name, ".".join(part for part in (prefix, path, name) if part)))
    return owners


def _check_addresses(owners: Sequence[Owners]) -> None:
    """Raise ValueError if two parameters have the same memory."""
    at_address: dict[int, nn.Parameter] = {}
    for owned in owners:
        for param, places in owned.items():
            # sparse and meta tensors have no address, nor have those with inner tensors
            dense = param.layout is torch.strided and not param.is_meta and param.numel()
            dense = dense and not has_inner_tensors(param)
            if dense and at_address.setdefault(param.data_ptr(), param) is not param:
                raise _same_memory(places[0][2])


def _take_shared(owners: Sequence[Owners]) -> list[Owners]:
    """Move parameters of several of ``owners`` to the last, the root. Returns, for each of the others, those
    of its moved parameters that may be trained."""
    holders = Counter(param for owned in owners for param in owned)
    root, found = owners[-1], []
    for owned in owners[:-1]:
        taken = {param: owned.pop(param) for param in [*owned] if holders[param] > 1}
        for param, places in taken.items():
            root[param] += places
        found.append({param: places for param, places in taken.items() if param.requires_grad})
    return found


def _same_memory(name: str) -> ValueError:
    """The error for parameter ``name``, which shares the memory of another one."""
    remedy = "tie them by sharing the nn.Parameter itself, or give each its own copy"
    if ".lora_A." in name or ".lora_B." in name:
        # the adapter of the output embedding is a transposed view of that of the input embedding, with its
        # own gradient and moments: each step of plain PyTorch updates that memory twice
        remedy = (
            "peft's ensure_weight_tying creates two parameters in one memory for target_modules; name the "
            "embedding in modules_to_save or its tokens in trainable_token_indices, which are tied as one "
            "parameter, or leave it out of target_modules"
        )
    return ValueError(f"parameter '{name}' has the same memory as another one: {remedy}")


def _unit(
    index: int,
    name: str,
    module: nn.Module,
    owned: Owners,
    dtype: torch.dtype | None,
    elsewhere: Iterable[nn.Module] = (),
    shared: Owners | None = None,
) -> Unit:
    params: dict[Param, nn.Parameter] = {}
    composites: dict[nn.Parameter, tuple[Composite, list[Param]]] = {}
    raw = {owner for param, places in owned.items() if _is_raw(param) for owner, _, _ in places}
    for param, places in owned.items():
        full_name = places[0][2]
        composite = composite_of(full_name, param, [owner for owner, _, _ in places])
        if composite is not None:
            _check_frozen(composite, full_name, dtype)
            parts = _parts(composite, full_name)
            composites[param] = composite, [*parts]
            params |= parts
            continue
        scales = not param.requires_grad and all(owner in raw and key != "bias" for owner, key, _ in places)
        streamed = _streamed_dtype(param, full_name, None if scales else dtype)
        params[Param(full_name, tuple(param.shape), streamed, param.requires_grad)] = param
    layout = Layout.of(params)
    in_order = tuple(params[slice.param] for slice in layout.slices)
    position = {slice.param: place for place, slice in enumerate(layout.slices)}
    others = set(elsewhere)
    return Unit(
        index=index,
        name=name,
        module=module,
        layout=layout,
        params=in_order,
        owners=tuple(tuple((owner, key) for owner, key, _ in owned.get(param, ())) for param in in_order),
        shared=tuple(
            Shared(param, tuple((owner, key) for owner, key, _ in places))
            for param, places in (shared or {}).items()
        ),
        buffer_owners=tuple(
            (owner, key) for owner in module.modules() if owner not in others for key in owner._buffers
        ),
        in_parts=tuple(
            InParts(
                name=owned[param][0][2],
                composite=composite,
                positions=tuple(position[part] for part in parts),
                owners=tuple((owner, key) for owner, key, _ in owned[param]),
            )
            for param, (composite, parts) in composites.items()
        ),
    )


def _parts(composite: Composite, name: str) -> dict[Param, nn.Parameter]:
    """The parts of a parameter, as frozen parameters. [Note: parts]"""
    parts: dict[Param, nn.Parameter] = {}
    for key, plain in zip(composite.names, plainly(composite.parts()), strict=True):
        described = Param(f"{name}.{key}", tuple(plain.shape), plain.dtype, trainable=False)
        parts[described] = nn.Parameter(plain.contiguous(), requires_grad=False)
    return parts


def _check_frozen(composite: Composite, name: str, dtype: torch.dtype | None) -> None:
    """Raise ValueError for a quantized weight that is trained, or is for inputs of another dtype."""
    kind = type(composite.param).__name__
    if composite.param.requires_grad:
        raise ValueError(
            f"parameter '{name}' is a {kind}, which is streamed unchanged and cannot be trained: freeze it "
            "(requires_grad_(False)) and train adapters, or leave it unquantized"
        )
    if dtype is not None and composite.dtype not in (None, dtype):
        raise ValueError(
            f"parameter '{name}' is a {kind} for inputs of {composite.dtype}, which dtype={dtype} cannot "
            f"change: quantize a model of {dtype} (model.to({dtype}) before), or leave dtype out"
        )


def warn_of_misread(units: Iterable[Unit], device: torch.device) -> None:
    """Warn of quantized weights with which their own library computes wrong on ``device``."""
    names = [each.name for unit in units for each in unit.in_parts if each.composite.is_misread_on(device)]
    if names:
        warn(
            "bitsandbytes computes wrong on this CPU with 4-bit weights whose rows are not a whole number of "
            f"blocks, here {shortened(names)}, also without streamer: use a GPU, or leave those out of "
            "quantization"
        )


def _is_raw(param: nn.Parameter) -> bool:
    """Whether a parameter holds codes: integers, or floating point of fewer than 16 bits. Other parameters of
    the module, such as scales, keep their dtype too."""
    is_number = param.layout is torch.strided and not param.is_complex()
    return is_number and (not param.is_floating_point() or param.dtype.itemsize == 1)


def _streamed_dtype(param: nn.Parameter, name: str, dtype: torch.dtype | None) -> torch.dtype:
    if param.layout is not torch.strided:
        raise ValueError(
            f"parameter '{name}' is sparse ({param.layout}): make it dense, or leave it out of the model"
        )
    if param.dtype.is_complex:
        raise ValueError(f"parameter '{name}' is complex ({param.dtype}): store its real and imaginary parts")
    if _is_raw(param) and not param.requires_grad:
        if type(param) is not nn.Parameter:
            raise ValueError(
                f"parameter '{name}' is a {type(param).__name__} of {param.dtype}, which does not say what "
                "it is made of (__tensor_flatten__), so it cannot be streamed: quantize with torchao or "
                "bitsandbytes, or keep that list of layers out of layers="
            )
        return param.dtype
    streamed = param.dtype if dtype is None else kept_dtype(param) or dtype
    if streamed not in DTYPES:
        raise ValueError(
            f"parameter '{name}' has dtype {param.dtype}: streamed weights are torch.float32, torch.bfloat16 "
            "or torch.float16; set wrap(dtype=...) to one of them, or cast the model first"
        )
    return streamed
