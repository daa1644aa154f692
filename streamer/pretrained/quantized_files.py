"""Weights that are quantized in the files: in 4 bits by bitsandbytes, in 8-bit floats with a scale for each
block (DeepSeek, Qwen), or by torchao. Each is read unchanged, and streamed by its parts: [Note: parts].
"""

from __future__ import annotations

import abc
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import nn

from streamer.errors import CheckpointError
from streamer.pretrained.files import Stored, read_all
from streamer.pretrained.match import Source, commonest
from streamer.quantized.bitsandbytes_private import values_of_4_bits
from streamer.quantized.schemes import MOST_VALUES, need, weight_in_4_bits

#: The suffix that bitsandbytes adds to a weight's name for its quantization options, in JSON.
_STATE = ".quant_state.bitsandbytes__"
#: Suffixes of the scales of block-wise 8-bit floats.
_BLOCK_SCALES = "_scale_inv"
#: The tensors of bitsandbytes other than codes: scales and their code book, and those of quantized scales.
_SCALES, _NESTED = ("absmax", "quant_map"), ("nested_absmax", "nested_quant_map")
#: Suffixes of the names of tensors that belong to a quantized weight.
_SUFFIXES = (*(f".{name}" for name in (*_SCALES, *_NESTED)), _BLOCK_SCALES)


@dataclass(frozen=True)
class StoredQuantized(Stored, abc.ABC):
    """A quantized weight in files, or several of them that form a stack, one after the other. Its dtype and
    shape are those of its values; ``parts`` are the tensors of the files by the names of the parts, see
    `streamer.quantized.parts.Composite`."""

    parts: Mapping[str, Sequence[Stored]]

    @abc.abstractmethod
    def build(self, parts: dict[str, torch.Tensor], dtype: torch.dtype) -> nn.Parameter:
        """The weight of these parts, which are on a device, for inputs of ``dtype``."""

    @abc.abstractmethod
    def shape_of(self, part: str) -> tuple[int, ...]:
        """The shape of a part."""

    @abc.abstractmethod
    def stacked(self, matrices: Sequence[Any], shape: tuple[int, ...]) -> StoredQuantized | str:
        """The stack of ``matrices``, this one the first of them, or a text with the reason why there is
        none. Codes and scales have the same order, if each matrix is a whole number of blocks."""

    def kind(self) -> tuple[object, ...]:
        """What weights of one stack have in common."""
        return self.dtype, *(piece.dtype for pieces in self.parts.values() for piece in pieces)

    def quantized(self, device: torch.device | str, dtype: torch.dtype) -> nn.Parameter:
        """The weight, read to ``device``; on the meta device without values."""
        parts = {name: _read(pieces, self.shape_of(name), device) for name, pieces in self.parts.items()}
        return self.build(parts, dtype)

    def read(self) -> torch.Tensor:
        """Its values, on the CPU."""
        weight: Any = self.quantized("cpu", self.dtype)
        is_in_4_bits = hasattr(weight, "quant_state")
        values = values_of_4_bits(weight.data, weight.quant_state) if is_in_4_bits else weight.dequantize()
        return values.to(self.dtype)


def stored_quantized(source: Source) -> StoredQuantized | str:
    """The quantized weight of a source of which some tensors are quantized, or a text with the reason why it
    is not read as it is in the files."""
    if not source.pieces:
        return "the model transposes or interleaves them, and does not concatenate them"
    matrices = [it for it in source.pieces if isinstance(it, StoredQuantized)]
    if len(matrices) != len(source.pieces):
        return "others that are in one tensor with them here are not quantized"
    if source.stored is matrices[0]:
        return matrices[0]
    if any(it.kind() != matrices[0].kind() for it in matrices):
        return "they are one tensor here, and are not quantized alike"
    return matrices[0].stacked(matrices, source.shape)


def with_quantized(path: Path, stored: Mapping[str, Stored], config: Any) -> dict[str, Stored]:
    """``stored``, with one `StoredQuantized` in place of the tensors of each quantized weight. ``config`` is
    that of the model in the folder ``path``, and has the quantization options.

    Raises ValueError for any other quantization, or if the library that reads it is absent.
    """
    of_weights = config.quantization_config
    options = of_weights if isinstance(of_weights, dict) else of_weights.to_dict()
    method, found = str(options.get("quant_method", "")), dict(stored)
    if method == "bitsandbytes" and options.get("load_in_4bit", options.get("_load_in_4bit")):
        need("bitsandbytes")
        compute = str(options.get("bnb_4bit_compute_dtype") or "float32").removeprefix("torch.")
        states = [it for name, it in stored.items() if _STATE in name]
        for state, packed in zip(states, read_all(states), strict=True):
            weight = state.name.partition(_STATE)[0]
            del found[state.name]
            found[weight] = _four_bits(found, weight, packed, getattr(torch, compute))
    elif method == "fp8" and options.get("weight_block_size"):
        need("torchao")
        usual = usual_dtype(stored) or torch.bfloat16
        for name in [name for name in stored if name.endswith(_BLOCK_SCALES)]:
            weight = name.removesuffix(_BLOCK_SCALES)
            if weight in found:
                found[weight] = _blocks(found.pop(name), found[weight], options["weight_block_size"], usual)
    elif method == "torchao":
        need("torchao")
        for file in {it.file for it in stored.values()}:
            _take_tensors_of_torchao(found, file)
    else:
        raise ValueError(
            f"{path}: its weights are quantized by {method or 'an unknown way'}, which cannot be streamed: "
            "4 bits of bitsandbytes, block-wise fp8 and files of torchao can; or use the weights as they "
            "were before, and quantize="
        )
    return found


def usual_dtype(stored: Mapping[str, Stored]) -> torch.dtype | None:
    """The dtype of most of the values that are not quantized; None if there are none."""
    return commonest(
        (it.dtype, prod(it.shape)) for name, it in stored.items() if not name.endswith(_SUFFIXES)
    )


def _read(pieces: Sequence[Stored], shape: Sequence[int], device: torch.device | str) -> torch.Tensor:
    """A tensor of ``shape`` on ``device``, whose elements are those of ``pieces``, one after the other."""
    if len(pieces) == 1 and torch.device(device).type != "meta":
        return pieces[0].read().view(shape).to(device)
    whole = torch.empty(shape, dtype=pieces[0].dtype, device=device)
    if not whole.is_meta:
        places = whole.view(-1).split([prod(it.shape) for it in pieces])
        for values, place in zip(read_all(pieces), places, strict=True):
            place.copy_(values.view(-1))
    return whole


def _numel(pieces: Sequence[Stored]) -> int:
    return sum(prod(it.shape) for it in pieces)


def _joined(matrices: Sequence[StoredQuantized]) -> dict[str, list[Stored]]:
    """The parts of a stack: those of its matrices, and code books once."""
    first = matrices[0].parts
    return {
        name: [*first[name]] if name.endswith("quant_map") else [x for it in matrices for x in it.parts[name]]
        for name in first
    }


# 4 bits


def _four_bits(
    found: dict[str, Stored], weight: str, packed: torch.Tensor, compute: torch.dtype
) -> StoredQuantized:
    """Remove the scales of ``weight`` from ``found``; ``packed`` are its options in bytes of JSON."""
    names = [name for name in (*_SCALES, *_NESTED) if f"{weight}.{name}" in found]
    scales = {name: [found.pop(f"{weight}.{name}")] for name in names}
    try:
        options = json.loads(bytes(packed.tolist()))
        nested = _NESTED if "nested_blocksize" in options else ()
        parts = {"codes": [found[weight]], **{name: scales[name] for name in (*_SCALES, *nested)}}
        dtype, shape, _ = getattr(torch, options["dtype"]), tuple(options["shape"]), options["quant_type"]
    except (KeyError, ValueError, AttributeError) as error:
        raise CheckpointError(f"'{weight}' is not whole in its file ({error!r})") from error
    offsets = (float(options.pop("nested_offset", 0.0)),)
    codes = found[weight]
    return FourBits(weight, codes.file, dtype, shape, codes.offset, parts, options, offsets, compute)


@dataclass(frozen=True)
class FourBits(StoredQuantized):
    """A weight of bitsandbytes: its options in the file (quant_type, blocksize, ...), and the offset of the
    quantized scales of each matrix. [Note: experts in 4 bits]"""

    options: Mapping[str, Any]
    offsets: tuple[float, ...]
    compute: torch.dtype

    def kind(self) -> tuple[object, ...]:
        options = ("quant_type", "blocksize", "nested_blocksize", "nested_dtype")
        return *super().kind(), *map(self.options.get, options)

    def build(self, parts: dict[str, torch.Tensor], dtype: torch.dtype) -> nn.Parameter:
        if "nested_blocksize" in self.options:
            offsets = torch.tensor(self.offsets, device="cpu")
            offsets = offsets[:, None] if len(self.offsets) > 1 else offsets[0]
            parts["offset"] = offsets.to(parts["codes"].device)
        return weight_in_4_bits(parts, self.options, self.shape, self.dtype)

    def shape_of(self, part: str) -> tuple[int, ...]:
        numel, count = _numel(self.parts[part]), len(self.offsets)
        if part == "codes":
            return numel, 1
        if part == "absmax" and "nested_blocksize" in self.options and count > 1:
            return count, numel // count
        return (numel,)

    def stacked(self, matrices: Sequence[Any], shape: tuple[int, ...]) -> StoredQuantized | str:
        numels = [prod(it.shape) for it in matrices]
        if len(matrices) > 1:
            block = self.options["blocksize"] * self.options.get("nested_blocksize", 1)
            if odd := [numel for numel in numels if numel % block]:
                return f"a matrix of {odd[0]} values is not a whole number of blocks of {block}"
            if "nested_blocksize" in self.options and len({*numels}) > 1:
                return "their scales are quantized, and they are not of one size"
        if sum(numels) >= MOST_VALUES:
            return f"bitsandbytes dequantizes fewer than {MOST_VALUES} values at once"
        offsets = tuple(offset for it in matrices for offset in it.offsets)
        return replace(self, shape=shape, parts=_joined(matrices), offsets=offsets)


# 8 bits


def _blocks(scale: Stored, codes: Stored, block: Sequence[int], usual: torch.dtype) -> StoredQuantized:
    grid = tuple(-(-length // of_block) for length, of_block in zip(codes.shape, block, strict=False))
    if len(codes.shape) != 2 or scale.shape != grid or any(map(int.__mod__, codes.shape, block)):
        raise ValueError(
            f"'{codes.name}' is fp8 of {list(codes.shape)} with scales of {list(scale.shape)} for blocks of "
            f"{list(block)}, which do not divide it: dequantize the model first"
        )
    parts = {"qdata": [codes], "scale": [scale]}
    return BlockFloats(codes.name, codes.file, usual, codes.shape, codes.offset, parts, tuple(block))


@dataclass(frozen=True)
class BlockFloats(StoredQuantized):
    """8-bit floats; the values of a ``block`` share a scale."""

    block: tuple[int, ...]

    def kind(self) -> tuple[object, ...]:
        return *super().kind(), self.block

    def build(self, parts: dict[str, torch.Tensor], dtype: torch.dtype) -> nn.Parameter:
        kind = import_module("torchao.quantization").Float8Tensor
        values = kind(parts["qdata"], parts["scale"], block_size=[*self.block], dtype=dtype)
        return nn.Parameter(values, requires_grad=False)

    def shape_of(self, part: str) -> tuple[int, ...]:
        return self.shape if part == "qdata" else tuple(map(int.__floordiv__, self.shape, self.block))

    def stacked(self, matrices: Sequence[Any], shape: tuple[int, ...]) -> StoredQuantized | str:
        return replace(self, shape=shape, parts=_joined(matrices), block=(1, *self.block))


def _take_tensors_of_torchao(found: dict[str, Stored], file: Path) -> None:
    """Add the weights that torchao has quantized in ``file`` to ``found``, in place of their parts."""
    with import_module("safetensors").safe_open(file, "pt") as opened:
        metadata: Mapping[str, str] = opened.metadata() or {}
    for name in json.loads(metadata.get("tensor_names", "[]")):
        about = json.loads(metadata[name])
        if about["_type"] == "Tensor":
            continue
        owner, _, attribute = name.rpartition(".")
        keys = {part: f"{owner}._{attribute}_{part}" for part in about["_tensor_data_names"]}
        if absent := [key for key in keys.values() if key not in found]:
            raise CheckpointError(f"'{name}' is not whole in its file: {absent[0]} is missing")
        parts = {part: [found.pop(key)] for part, key in keys.items()}
        whole = _OfTorchao(name, file, torch.float32, (), 0, parts, keys, metadata[name])
        values = whole.quantized("meta", torch.float32)
        found[name] = replace(whole, dtype=values.dtype, shape=tuple(values.shape))


@dataclass(frozen=True)
class _OfTorchao(StoredQuantized):
    """A tensor of torchao: the names of its parts in the file, and its entry in the file's metadata."""

    keys: Mapping[str, str]
    entry: str

    def build(self, parts: dict[str, torch.Tensor], dtype: torch.dtype) -> nn.Parameter:
        support = import_module("torchao.prototype.safetensors.safetensors_support")
        flat = {self.keys[part]: tensor for part, tensor in parts.items()}
        about = {self.name: self.entry, "tensor_names": json.dumps([self.name])}
        whole, _ = support.unflatten_tensor_state_dict(flat, about)
        return nn.Parameter(whole[self.name], requires_grad=False)

    def shape_of(self, part: str) -> tuple[int, ...]:
        return self.parts[part][0].shape

    def stacked(self, matrices: Sequence[Any], shape: tuple[int, ...]) -> StoredQuantized | str:
        return "each is a tensor of torchao"
