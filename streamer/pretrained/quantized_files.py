"""Weights that are quantized in the files: in 4 bits by bitsandbytes, in 8-bit floats with a scale for each
block (DeepSeek, Qwen), or by torchao. Each is read as it is, and streamed by its parts: [Note: parts].
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import nn

from streamer.errors import CheckpointError
from streamer.pretrained.files import Stored
from streamer.pretrained.match import Source, commonest

#: What bitsandbytes appends to the name of a weight: how it is quantized, in JSON.
_STATE = ".quant_state.bitsandbytes__"
#: And what block-wise 8-bit floats have beside their weight.
_BLOCK_SCALES = "_scale_inv"
#: How names of tensors end that belong to a quantized weight.
_BESIDE = (".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map", _BLOCK_SCALES)


@dataclass(frozen=True)
class StoredQuantized(Stored):
    """A quantized weight in files. Its dtype and shape are those of its values."""

    #: tensors of the files by the names of the parts, see `streamer.engine.tensors.parts.Composite`
    parts: Mapping[str, Stored]
    #: the weight made of these parts, which are on a device, for inputs of a dtype
    made: Callable[[Mapping[str, torch.Tensor], torch.dtype], nn.Parameter]
    #: a linear module for it: of so many outputs and inputs, without a bias, for inputs of a dtype
    linear: Callable[[int, int, torch.dtype], nn.Module]
    #: rows and columns of a block of 8-bit floats that have a scale
    block: tuple[int, ...] = ()

    def quantized(self, device: torch.device | str, dtype: torch.dtype) -> nn.Parameter:
        """The weight, read to ``device``; on the meta device without values."""
        return self.made({name: _read(part, device) for name, part in self.parts.items()}, dtype)

    def read(self) -> torch.Tensor:
        """Its values, on the CPU."""
        values: torch.Tensor = _dequantized(self.quantized("cpu", self.dtype))
        return values.to(self.dtype)


def with_quantized(path: Path, stored: Mapping[str, Stored], config: Any) -> dict[str, Stored]:
    """``stored``, where the tensors that a quantized weight is made of are one `StoredQuantized` in place of
    several. ``config`` is that of the model in the folder ``path``, which says how they are quantized.

    Raises ValueError for what is quantized in another way, or where the library is absent that reads it.
    """
    of_weights = config.quantization_config
    told = of_weights if isinstance(of_weights, dict) else of_weights.to_dict()
    method, found = str(told.get("quant_method", "")), dict(stored)
    if method == "bitsandbytes" and told.get("load_in_4bit", told.get("_load_in_4bit")):
        need("bitsandbytes")
        compute = told.get("bnb_4bit_compute_dtype") or "float32"
        for name in [name for name in stored if _STATE in name]:
            weight = name.partition(_STATE)[0]
            found[weight] = _four_bits(found, weight, getattr(torch, str(compute).removeprefix("torch.")))
        return found
    if method == "fp8" and told.get("weight_block_size"):
        need("torchao")
        usual = usual_dtype(stored) or torch.bfloat16
        for name in [name for name in stored if name.endswith(_BLOCK_SCALES)]:
            weight = name.removesuffix(_BLOCK_SCALES)
            if weight in found:
                found[weight] = _blocks(found.pop(name), found[weight], told["weight_block_size"], usual)
        return found
    if method == "torchao":
        need("torchao")
        for file in {it.file for it in stored.values()}:
            _take_tensors_of_torchao(found, file)
        return found
    raise ValueError(
        f"{path}: its weights are quantized by {method or 'an unknown method'}, which cannot be streamed: 4 "
        "bits of bitsandbytes, block-wise fp8 and files of torchao can; or give the weights as they were "
        "before, and quantize="
    )


def _four_bits(found: dict[str, Stored], weight: str, compute: torch.dtype) -> StoredQuantized:
    """Takes what belongs to ``weight`` out of ``found``."""
    bnb = import_module("bitsandbytes")
    prefix = f"{weight}."
    beside = {name.removeprefix(prefix): found.pop(name) for name in [*found] if name.startswith(prefix)}
    (state,) = [name for name in beside if name.startswith(_STATE.lstrip("."))]
    packed = beside.pop(state).read()
    try:
        told = json.loads(bytes(packed.tolist()))
        shape, dtype, kind = tuple(told["shape"]), getattr(torch, told["dtype"]), told["quant_type"]
        nested = ("nested_absmax", "nested_quant_map") if "nested_blocksize" in told else ()
        codes, *_ = found[weight], *(beside[name] for name in ("absmax", "quant_map", *nested))
    except (KeyError, ValueError, AttributeError) as error:
        raise CheckpointError(f"'{weight}' is not whole in its file ({error!r})") from error

    def made(parts: Mapping[str, torch.Tensor], dtype: torch.dtype) -> nn.Parameter:
        codes = parts["codes"]
        stats = {name: part for name, part in parts.items() if name != "codes"} | {state: packed}
        weight: nn.Parameter = bnb.nn.Params4bit.from_prequantized(codes, stats, device=codes.device)
        return weight

    def linear(outputs: int, inputs: int, dtype: torch.dtype) -> nn.Module:
        module: nn.Module = bnb.nn.Linear4bit(
            inputs, outputs, bias=False, compute_dtype=compute, quant_type=kind, device="meta"
        )
        return module

    return StoredQuantized(
        codes.name, codes.file, dtype, shape, parts={"codes": codes, **beside}, made=made, linear=linear
    )


def _blocks(scale: Stored, codes: Stored, block: Sequence[int], usual: torch.dtype) -> StoredQuantized:
    grid = tuple(-(-length // of_block) for length, of_block in zip(codes.shape, block, strict=False))
    if len(codes.shape) != 2 or scale.shape != grid or any(map(int.__mod__, codes.shape, block)):
        raise ValueError(
            f"'{codes.name}' is fp8 of {list(codes.shape)} with scales of {list(scale.shape)} for blocks of "
            f"{list(block)}, which do not divide it: dequantize the model first"
        )

    parts = {"qdata": codes, "scale": scale}
    return StoredQuantized(
        codes.name,
        codes.file,
        usual,
        codes.shape,
        parts=parts,
        made=partial(_eight_bits, block=block),
        linear=_linear,
        block=tuple(block),
    )


def _eight_bits(
    parts: Mapping[str, torch.Tensor], dtype: torch.dtype, *, block: Sequence[int]
) -> nn.Parameter:
    kind = import_module("torchao.quantization").Float8Tensor
    values = kind(parts["qdata"], parts["scale"], block_size=[*block], dtype=dtype)
    return nn.Parameter(values, requires_grad=False)


@dataclass(frozen=True)
class StoredStack:
    """Matrices in block-wise 8-bit floats that are one after the other a stack, as experts are that lie one
    by one in the files. Codes and scales lie alike, since blocks divide each matrix."""

    matrices: tuple[StoredQuantized, ...]
    shape: tuple[int, ...]

    @staticmethod
    def of(source: Source) -> StoredStack | None:
        """None for what is made of others, or in another way (turned, or interleaved)."""
        matrices = tuple(it for it in source.pieces if isinstance(it, StoredQuantized) and it.block)
        kinds = {(it.block, *(part.dtype for part in it.parts.values())) for it in matrices}
        if len(kinds) != 1 or len(matrices) != len(source.pieces):
            return None
        return StoredStack(matrices, source.shape)

    @property
    def parts(self) -> dict[str, Callable[[torch.device | str], torch.Tensor]]:
        """By name what reads each to a device; to the meta device without values."""
        shapes = {"qdata": self.shape, "scale": tuple(map(int.__floordiv__, self.shape, self._block))}
        return {
            part: partial(_joined, [it.parts[part] for it in self.matrices], shape)
            for part, shape in shapes.items()
        }

    def quantized(self, device: torch.device | str, dtype: torch.dtype) -> nn.Parameter:
        """The stack, read to ``device``, for inputs of ``dtype``."""
        parts = {part: read(device) for part, read in self.parts.items()}
        return _eight_bits(parts, dtype, block=self._block)

    @property
    def _block(self) -> tuple[int, ...]:
        return 1, *self.matrices[0].block


def _joined(pieces: Sequence[Stored], shape: Sequence[int], device: torch.device | str) -> torch.Tensor:
    """A tensor of that shape on ``device``, whose elements are those of ``pieces``, one after the other."""
    whole = torch.empty(shape, dtype=pieces[0].dtype, device=device)
    if not whole.is_meta:
        for piece, place in zip(pieces, whole.view(-1).split([prod(it.shape) for it in pieces]), strict=True):
            place.copy_(piece.read().view(-1))
    return whole


def _read(stored: Stored, device: torch.device | str) -> torch.Tensor:
    if torch.device(device).type == "meta":
        return torch.empty(stored.shape, dtype=stored.dtype, device=device)
    return stored.read().to(device)


def _take_tensors_of_torchao(found: dict[str, Stored], file: Path) -> None:
    """Put the weights that torchao has quantized in ``file`` into ``found``, in place of their parts."""
    support = import_module("torchao.prototype.safetensors.safetensors_support")
    with import_module("safetensors").safe_open(file, "pt") as opened:
        told: Mapping[str, str] = opened.metadata() or {}
    for name in json.loads(told.get("tensor_names", "[]")):
        about = json.loads(told[name])
        if about["_type"] == "Tensor":
            continue
        owner, _, attribute = name.rpartition(".")
        keys = {part: f"{owner}._{attribute}_{part}" for part in about["_tensor_data_names"]}
        if absent := [key for key in keys.values() if key not in found]:
            raise CheckpointError(f"'{name}' is not whole in its file: {absent[0]} is missing")
        parts = {part: found.pop(key) for part, key in keys.items()}
        about_one = {name: told[name], "tensor_names": json.dumps([name])}

        def made(
            parts: Mapping[str, torch.Tensor],
            dtype: torch.dtype,
            name: str = name,
            keys: Mapping[str, str] = keys,
            about: Mapping[str, str] = about_one,
        ) -> nn.Parameter:
            flat = {keys[part]: tensor for part, tensor in parts.items()}
            whole, _ = support.unflatten_tensor_state_dict(flat, about)
            return nn.Parameter(whole[name], requires_grad=False)

        without = made({part: _read(it, "meta") for part, it in parts.items()}, torch.float32)
        found[name] = StoredQuantized(
            name, file, without.dtype, tuple(without.shape), parts=parts, made=made, linear=_linear
        )


def _linear(outputs: int, inputs: int, dtype: torch.dtype) -> nn.Module:
    return nn.Linear(inputs, outputs, bias=False, device="meta", dtype=dtype)


def usual_dtype(stored: Mapping[str, Stored]) -> torch.dtype | None:
    """The dtype of most of the values that are not quantized; None where there are none."""
    return commonest((it.dtype, prod(it.shape)) for name, it in stored.items() if not name.endswith(_BESIDE))


def need(library: str) -> None:
    """Raise ValueError, with the line that installs it, where ``library`` is absent."""
    try:
        import_module(library)
    except ImportError as error:
        raise ValueError(
            f"quantized weights need {library}: pip install 'streamer[quantize]' ({error})"
        ) from error


def _dequantized(weight: Any) -> Any:
    if hasattr(weight, "quant_state"):
        return import_module("bitsandbytes").functional.dequantize_4bit(weight.data, weight.quant_state)
    return weight.dequantize()
