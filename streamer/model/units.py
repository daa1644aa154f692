"""The units of a model: one for each layer, or for each part of a layer that is too large for a slot, and the
root unit for all the rest.

Every slot is as large as the largest unit, so one wide layer decides what all slots take. Which layers are
split, and how far, depends on sizes alone: the largest units are replaced by their parts, again and again,
until the slots fit on the device. [Note: split layers]
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.nn.utils import parametrize

from streamer.engine.layer.outside_access import Split
from streamer.engine.paging.unit import InParts, Unit
from streamer.engine.schedule.op import ROOT
from streamer.engine.tensors.parts import Composite, composite_of, has_inner_tensors, plainly
from streamer.errors import exact_amount, shortened, warn
from streamer.memory.layout import Layout, Param
from streamer.memory.slots import num_grad_slots
from streamer.model.layers import is_called, parts_of, worth_a_slot
from streamer.planner.ledger import Ledger, ledger

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

#: The attribute of a tensor that is streamed in the dtype that it names, whatever ``dtype`` of `wrap` says.
_KEPT = "_streamer_dtype"

Owners = dict[nn.Parameter, list[tuple[nn.Module, str, str]]]


def keep_dtype(tensor: torch.Tensor) -> None:
    """Let `wrap` stream ``tensor`` in the dtype that it has now, whatever its own ``dtype`` says."""
    setattr(tensor, _KEPT, tensor.dtype)


def kept_dtype(tensor: torch.Tensor) -> torch.dtype | None:
    """The dtype that `keep_dtype` keeps ``tensor`` in; None where that leaves it free."""
    return getattr(tensor, _KEPT, None)


def make_units(
    model: nn.Module, layers: Sequence[tuple[str, nn.Module]], dtype: torch.dtype | None
) -> tuple[list[Unit], Unit]:
    """One unit for each of ``layers`` (qualified name and module), and the root unit.

    ``dtype`` is what parameters are streamed in, unless `keep_dtype` keeps them in their own; None keeps
    the dtype of each. Quantized weights are streamed as they are: those of a class of their own, and
    frozen parameters of whole numbers or of 8-bit floats. Raises ValueError for what cannot be streamed:
    TorchScript, a layer without parameters, a parameter that two units share, that is sparse or complex,
    or that is trained and of another dtype than fp32, bf16 and fp16.
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
            # sparse and meta tensors have no address, nor have those that are made of others
            dense = param.layout is torch.strided and not param.is_meta and param.numel()
            dense = dense and not has_inner_tensors(param)
            if dense and at_address.setdefault(param.data_ptr(), param) is not param:
                raise _same_memory(places[0][2])
            if home.setdefault(param, index) != index:
                raise ValueError(
                    f"parameter '{places[0][2]}' belongs to {names[home[param]]} and to {names[index]}; a "
                    "parameter may be shared only within one layer or outside of all of them: give each its "
                    "own copy"
                )


def _same_memory(name: str) -> ValueError:
    """The error for parameter ``name``, which has the memory of another one."""
    remedy = "tie them by sharing the nn.Parameter itself, or give each its own copy"
    if ".lora_A." in name or ".lora_B." in name:
        # the adapter of the output embedding is a transposed view of that of the input embedding, with a
        # gradient and moments of its own: each step of plain PyTorch updates that memory twice
        remedy = (
            "peft's ensure_weight_tying makes two parameters of one memory for target_modules; give the "
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
    """Raise ValueError for a quantized weight that is trained, or that is for inputs of another dtype."""
    kind = type(composite.param).__name__
    if composite.param.requires_grad:
        raise ValueError(
            f"parameter '{name}' is a {kind}, which is streamed as it is and cannot be trained: freeze it "
            "(requires_grad_(False)) and train adapters beside it, or leave it unquantized"
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
            "bitsandbytes computes wrong on this CPU with 4-bit weights whose rows are no whole number of "
            f"blocks, here {shortened(names)}, also without streamer: use a GPU, or leave those out of "
            "quantization"
        )


def _is_raw(param: nn.Parameter) -> bool:
    """Whether a parameter holds codes: whole numbers, or floating point of fewer than 16 bits. What stands
    beside codes in a module, scales say, keeps its dtype as they do."""
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
            "or torch.float16; give wrap(dtype=...) one of them, or cast the model first"
        )
    return streamed


@dataclass(frozen=True)
class Units:
    """One way to divide a model into units. ``layers`` has the index of each unit's layer, ``split`` the
    modules that were replaced by their parts, ``remedy`` what would help where the units do not fit."""

    units: list[Unit]
    root: Unit
    layers: list[int]
    split: tuple[Split, ...] = ()
    remedy: str | None = None

    def ledger(self, num_slots: int) -> Ledger:
        """The planned bytes with ``num_slots`` slots, but no more slots than units."""
        return ledger(self.units, self.root, num_slots=min(num_slots, len(self.units)))

    def device_bytes(self, num_slots: int) -> int:
        """Bytes of the device, with ``num_slots`` slots."""
        return sum(self.ledger(num_slots).device.values())


def cut_to_fit(
    model: nn.Module,
    units: list[Unit],
    root: Unit,
    dtype: torch.dtype | None,
    *,
    num_slots: int,
    available: int,
    limit: int | None,
) -> Units:
    """Split the largest of ``units`` until ``num_slots`` slots, and what is on the device beside them, fit
    into ``available`` bytes; no further than that.

    ``dtype`` is what parameters are streamed in, ``limit`` the ``device_memory`` that `wrap` was given.
    """
    ways: list[Units] = []
    for way in _ways(model, Units(units, root, list(range(len(units)))), dtype, num_slots):
        ways.append(way)
        if way.device_bytes(num_slots) <= available:
            return way
    best = min(ways, key=lambda way: way.device_bytes(num_slots))
    remedy = _remedy(ways, best, num_slots=num_slots, available=available, limit=limit)
    return replace(best, remedy=remedy)


def refuse_micro_batches(split: Sequence[Split]) -> None:
    """Raise ValueError if there are layers that are ``split``: a part need not be given the batch in the
    dimension in which its layer is."""
    for first in split[:1]:
        raise ValueError(
            f"micro_batch_size: layer '{first.name}' is too large for a slot and would be streamed in parts, "
            f"which cannot be given micro-batches: {first.whole_bytes} bytes of device memory would keep "
            "layers whole; or leave micro_batch_size out, or name this list in batch_dims: "
            f"{{'{first.name.rpartition('.')[0]}': None}}"
        )


def _ways(model: nn.Module, way: Units, dtype: torch.dtype | None, num_slots: int) -> Iterator[Units]:
    """The ways to divide the model, ``way`` first: in each the largest units of the one before are split."""
    whole_bytes = way.device_bytes(num_slots)
    while True:
        yield way
        largest = _to_split(way.units)
        if not largest:
            return
        whole_bytes = min(whole_bytes, way.device_bytes(num_slots))
        split = (*way.split, *(Split(unit.name, unit.module, whole_bytes) for unit in largest))
        modules: list[tuple[str, nn.Module]] = []
        layers: list[int] = []
        for unit, layer in zip(way.units, way.layers, strict=True):
            parts = worth_a_slot(unit.module, unit.name) if unit in largest else [(unit.name, unit.module)]
            modules += parts
            layers += [layer] * len(parts)
        way = Units(*make_units(model, modules, dtype), layers, split)


def _to_split(units: Sequence[Unit]) -> list[Unit]:
    """The units with the largest weights or, if one of those cannot be split, with the largest gradients."""
    sizes: list[Callable[[Unit], int]] = [
        lambda unit: unit.layout.nbytes,
        lambda unit: unit.layout.grad_nbytes,
    ]
    for size in sizes:
        most = max(map(size, units))
        largest = [unit for unit in units if size(unit) == most > 0]
        if largest and not any(map(_obstacle, largest)):
            return largest
    return []


def _obstacle(unit: Unit) -> str | None:
    """Why a unit cannot be split, or None if it can."""
    module = unit.module
    kind = type(module).__name__
    if parametrize.is_parametrized(module):
        return f"it is a {kind}, which does not call its children as a plain module does"
    children = list(parts_of(module, unit.name))
    inside = {param for _, child in children for param in child.parameters()}
    for name, param in module.named_parameters():
        if param not in inside:
            return f"it is a {kind} with a parameter of its own ('{name}')"
    for name, child in children:
        if not is_called(child):
            return f"'{name}' is a {type(child).__name__}, which is never called"
    if sum(len(list(child.parameters())) for _, child in children) > len(inside):
        return "its parts share a parameter"
    return None


def _remedy(ways: Sequence[Units], best: Units, *, num_slots: int, available: int, limit: int | None) -> str:
    """What helps where the device is too small for each of ``ways``, of which ``best`` takes least."""
    fewer = [
        count
        for count in range(min(num_slots, max(len(way.units) for way in ways)) - 1, 0, -1)
        if any(way.device_bytes(count) <= available for way in ways)
    ]
    needed = best.device_bytes(num_slots)
    figure = exact_amount(needed) if limit is None else f"device_memory={needed + limit - available}"
    would_do = f"{figure} would do{f', or lower num_slots to {fewer[0]}' if fewer else ''}"
    beside = best.ledger(num_slots).beside_slots
    if beside >= available:
        return f"what is in no layer takes {exact_amount(beside)} alone; {would_do}"
    most = max(unit.layout.nbytes for unit in best.units)
    obstacles = {unit.name: _obstacle(unit) for unit in best.units if unit.layout.nbytes == most}
    name = next((name for name, obstacle in obstacles.items() if obstacle), next(iter(obstacles)))
    reason = obstacles[name] or "its parts would take more"
    return (
        f"'{name}' takes {exact_amount(most)}, a slot may take "
        f"{exact_amount(_allowed(best, num_slots, available - beside))}, and it cannot be streamed in parts "
        f"({reason}); {would_do}"
    )


def _allowed(way: Units, num_slots: int, room: int) -> int:
    """Bytes that a weight slot may take in ``room``, if a gradient slot takes as many, or as many as the
    largest gradient where that is less."""
    count = min(num_slots, len(way.units))
    grad_slots = num_grad_slots(count)
    grad_nbytes = max(unit.layout.grad_nbytes for unit in way.units)
    return max(room // (count + grad_slots), (room - grad_slots * grad_nbytes) // count)
