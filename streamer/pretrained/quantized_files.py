"""Weights that are quantized in the files: in 4 bits by bitsandbytes, in 8-bit floats with a scale for each
block (DeepSeek, Qwen), or by torchao. Each is read unchanged, and streamed by its parts: [Note: parts].
"""

from __future__ import annotations

import abc
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import nn

from streamer.errors import CheckpointError
from streamer.pretrained.files import Stored, read_all
from streamer.pretrained.match import Source, commonest
from streamer.pretrained.stacks import dequantize_4_bits_in_forward, dequantize_in_forward
from streamer.quantized.bitsandbytes_private import values_of_4_bits

#: The suffix that bitsandbytes adds to a weight's name for its quantization options, in JSON.
_STATE = ".quant_state.bitsandbytes__"
#: Suffixes of the scales of block-wise 8-bit floats.
_BLOCK_SCALES = "_scale_inv"
#: The tensors of bitsandbytes other than codes: scales and their code book, and those of quantized scales.
_SCALES, _NESTED = ("absmax", "quant_map"), ("nested_absmax", "nested_quant_map")
_MAPS = ("quant_map", "nested_quant_map")
#: Suffixes of the names of tensors that belong to a quantized weight.
_SUFFIXES = (*(f".{name}" for name in (*_SCALES, *_NESTED)), _BLOCK_SCALES)
#: The kernels of bitsandbytes take the number of values as a 32-bit integer.
MOST_VALUES = 1 << 31


@dataclass(frozen=True)
class StoredQuantized(Stored):
    """A quantized weight in files. Its dtype and shape are those of its values."""

    #: tensors of the files by the names of the parts, see `streamer.quantized.parts.Composite`
    parts: Mapping[str, Stored]
    #: builds the weight from these parts, which are on a device, for inputs of a dtype
    build: Callable[[Mapping[str, torch.Tensor], torch.dtype], nn.Parameter]
    #: builds a linear module for it, without a bias, from the numbers of outputs and inputs and their dtype
    linear: Callable[[int, int, torch.dtype], nn.Module]
    #: rows and columns of a block of 8-bit floats that share a scale
    block: tuple[int, ...] = ()
    #: the options of bitsandbytes in the file for 4 bits: quant_type, blocksize, dtype, ...
    state: Mapping[str, Any] = field(default_factory=dict)

    def quantized(self, device: torch.device | str, dtype: torch.dtype) -> nn.Parameter:
        """The weight, read to ``device``; on the meta device without values."""
        return self.build({name: _read(part, device) for name, part in self.parts.items()}, dtype)

    def read(self) -> torch.Tensor:
        """Its values, on the CPU."""
        values: torch.Tensor = _dequantized(self.quantized("cpu", self.dtype))
        return values.to(self.dtype)


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
        compute = options.get("bnb_4bit_compute_dtype") or "float32"
        states = [it for name, it in stored.items() if _STATE in name]
        for state, packed in zip(states, read_all(states), strict=True):
            weight = state.name.partition(_STATE)[0]
            found[weight] = _four_bits(
                found, weight, state, packed, getattr(torch, str(compute).removeprefix("torch."))
            )
        return found
    if method == "fp8" and options.get("weight_block_size"):
        need("torchao")
        usual = usual_dtype(stored) or torch.bfloat16
        for name in [name for name in stored if name.endswith(_BLOCK_SCALES)]:
            weight = name.removesuffix(_BLOCK_SCALES)
            if weight in found:
                found[weight] = _blocks(found.pop(name), found[weight], options["weight_block_size"], usual)
        return found
    if method == "torchao":
        need("torchao")
        for file in {it.file for it in stored.values()}:
            _take_tensors_of_torchao(found, file)
        return found
    raise ValueError(
        f"{path}: its weights are quantized by {method or 'an unknown method'}, which cannot be streamed: 4 "
        "bits of bitsandbytes, block-wise fp8 and files of torchao can; or use the weights as they were "
        "before, and quantize="
    )


def _four_bits(
    found: dict[str, Stored], weight: str, state: Stored, packed: torch.Tensor, compute: torch.dtype
) -> StoredQuantized:
    """Remove the tensors of ``weight`` from ``found``; ``packed`` are the values of its ``state``."""
    bnb = import_module("bitsandbytes")
    del found[state.name]
    key = state.name.removeprefix(f"{weight}.")
    names = {name: f"{weight}.{name}" for name in (*_SCALES, *_NESTED)}
    scales = {name: found.pop(there) for name, there in names.items() if there in found}
    try:
        options = json.loads(bytes(packed.tolist()))
        shape, dtype, kind = (
            tuple(options["shape"]),
            getattr(torch, options["dtype"]),
            options["quant_type"],
        )
        nested = _NESTED if "nested_blocksize" in options else ()
        codes, *_ = found[weight], *(scales[name] for name in (*_SCALES, *nested))
    except (KeyError, ValueError, AttributeError) as error:
        raise CheckpointError(f"'{weight}' is not whole in its file ({error!r})") from error

    def build(parts: Mapping[str, torch.Tensor], dtype: torch.dtype) -> nn.Parameter:
        codes = parts["codes"]
        stats = {name: part for name, part in parts.items() if name != "codes"} | {key: packed}
        weight: nn.Parameter = bnb.nn.Params4bit.from_prequantized(codes, stats, device=codes.device)
        return weight

    def linear(outputs: int, inputs: int, dtype: torch.dtype) -> nn.Module:
        return linear_in_4_bits(outputs, inputs, compute, kind)

    return StoredQuantized(
        codes.name,
        codes.file,
        dtype,
        shape,
        parts={"codes": codes, **scales},
        build=build,
        linear=linear,
        state=options,
    )


def weight_in_4_bits(codes: torch.Tensor, state: Any) -> nn.Parameter:
    """A weight of bitsandbytes: ``codes``, and the QuantState that dequantizes them."""
    weight: nn.Parameter = import_module("bitsandbytes").nn.Params4bit(
        codes,
        requires_grad=False,
        quant_state=state,
        blocksize=state.blocksize,
        compress_statistics=state.nested,
        quant_type=state.quant_type,
        quant_storage=codes.dtype,
        bnb_quantized=True,
    )
    return weight


def linear_in_4_bits(outputs: int, inputs: int, compute: torch.dtype, kind: str) -> nn.Module:
    """A linear module of bitsandbytes, with its weight still to be set; ``kind`` is "nf4" or "fp4"."""
    module: nn.Module = import_module("bitsandbytes").nn.Linear4bit(
        inputs, outputs, bias=False, compute_dtype=compute, quant_type=kind, device="meta"
    )
    return module


def linear_without_values(outputs: int, inputs: int, dtype: torch.dtype) -> nn.Module:
    """A linear module of PyTorch, with its weight still to be set."""
    return nn.Linear(inputs, outputs, bias=False, device="meta", dtype=dtype)


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
        build=partial(_eight_bits, block=block),
        linear=linear_without_values,
        block=tuple(block),
    )


def _eight_bits(
    parts: Mapping[str, torch.Tensor], dtype: torch.dtype, *, block: Sequence[int]
) -> nn.Parameter:
    kind = import_module("torchao.quantization").Float8Tensor
    values = kind(parts["qdata"], parts["scale"], block_size=[*block], dtype=dtype)
    return nn.Parameter(values, requires_grad=False)


@dataclass(frozen=True)
class StoredStack(abc.ABC):
    """Quantized matrices that form a stack, one after the other, such as separate experts in the files. Codes
    and scales have the same order, since each matrix is a whole number of blocks."""

    matrices: tuple[StoredQuantized, ...]
    shape: tuple[int, ...]

    @staticmethod
    def of(source: Source) -> StoredStack | str:
        """The stack, or a text with the reason why there is none."""
        if not source.pieces:
            return "the model transposes or interleaves them, and does not concatenate them"
        matrices = tuple(it for it in source.pieces if isinstance(it, StoredQuantized))
        if len(matrices) != len(source.pieces):
            return "others that are in one tensor with them here are not quantized"
        first = matrices[0]
        kinds = {
            (it.dtype, it.block, *(part.dtype for part in it.parts.values()), *_kind(it)) for it in matrices
        }
        if len(kinds) > 1:
            return "they are one tensor here, and are not quantized alike"
        if first.block:
            return _StackIn8Bits(matrices, source.shape)
        if first.state:
            return _StackIn4Bits.why_not(matrices) or _StackIn4Bits(matrices, source.shape)
        return "each is a tensor of torchao"

    @property
    def pieces(self) -> dict[str, Sequence[Stored]]:
        """The stored tensors of each part, one after the other, by the part's name. Code books are the same
        for all matrices."""
        first = self.matrices[0].parts
        return {
            name: [first[name]] if name in _MAPS else [it.parts[name] for it in self.matrices]
            for name in first
        }

    @property
    def parts(self) -> dict[str, Callable[[torch.device | str], torch.Tensor]]:
        """Functions that read each part to a device, by name; to the meta device without values."""
        return {
            name: partial(_joined, pieces, self.shape_of(name, sum(prod(it.shape) for it in pieces)))
            for name, pieces in self.pieces.items()
        }

    @abc.abstractmethod
    def shape_of(self, part: str, numel: int) -> tuple[int, ...]:
        """The shape of a part, which has ``numel`` elements."""

    @abc.abstractmethod
    def quantized(self, device: torch.device | str, dtype: torch.dtype) -> nn.Parameter:
        """The stack, read to ``device``, for inputs of ``dtype``."""

    @abc.abstractmethod
    def put(self, module: nn.Module, key: str, weight: nn.Parameter, dtype: torch.dtype) -> None:
        """Register ``weight`` as ``key`` of ``module``, which then uses its values in ``dtype``."""


class _StackIn8Bits(StoredStack):
    """A stack of block-wise 8-bit floats."""

    def shape_of(self, part: str, numel: int) -> tuple[int, ...]:
        return self.shape if part == "qdata" else tuple(map(int.__floordiv__, self.shape, self._block))

    def quantized(self, device: torch.device | str, dtype: torch.dtype) -> nn.Parameter:
        parts = {part: read(device) for part, read in self.parts.items()}
        return _eight_bits(parts, dtype, block=self._block)

    def put(self, module: nn.Module, key: str, weight: nn.Parameter, dtype: torch.dtype) -> None:
        dequantize_in_forward(module, key, weight)

    @property
    def _block(self) -> tuple[int, ...]:
        return 1, *self.matrices[0].block


class _StackIn4Bits(StoredStack):
    """A stack in 4 bits of bitsandbytes. [Note: experts in 4 bits]"""

    @staticmethod
    def why_not(matrices: Sequence[StoredQuantized]) -> str:
        """The reason why there is no such stack; empty if there is."""
        state, numels = matrices[0].state, [prod(it.shape) for it in matrices]
        if len(matrices) > 1:
            block = state["blocksize"] * state.get("nested_blocksize", 1)
            if odd := [numel for numel in numels if numel % block]:
                return f"a matrix of {odd[0]} values is not a whole number of blocks of {block}"
            if "nested_blocksize" in state and len({*numels}) > 1:
                return "their scales are quantized, and they are not of one size"
        if sum(numels) >= MOST_VALUES:
            return f"bitsandbytes dequantizes fewer than {MOST_VALUES} values at once"
        return ""

    @property
    def _state(self) -> Mapping[str, Any]:
        return self.matrices[0].state

    @property
    def _has_quantized_scales(self) -> bool:
        return "nested_blocksize" in self._state

    def shape_of(self, part: str, numel: int) -> tuple[int, ...]:
        count = len(self.matrices)
        if part == "codes":
            return numel, 1
        if part == "absmax" and self._has_quantized_scales and count > 1:
            return count, numel // count
        return (numel,)

    @property
    def parts(self) -> dict[str, Callable[[torch.device | str], torch.Tensor]]:
        return super().parts | ({"offset": self._offsets} if self._has_quantized_scales else {})

    def _offsets(self, device: torch.device | str) -> torch.Tensor:
        offsets = torch.tensor([float(it.state["nested_offset"]) for it in self.matrices], device="cpu")
        return (offsets[:, None] if len(self.matrices) > 1 else offsets[0]).to(device)

    def quantized(self, device: torch.device | str, dtype: torch.dtype) -> nn.Parameter:
        new_state, options = import_module("bitsandbytes").functional.QuantState, self._state
        parts = {name: read(device) for name, read in self.parts.items()}
        of_scales = None
        if self._has_quantized_scales:
            of_scales = new_state(
                absmax=parts["nested_absmax"],
                blocksize=options["nested_blocksize"],
                code=parts["nested_quant_map"],
                dtype=getattr(torch, options["nested_dtype"]),
            )
        state = new_state(
            absmax=parts["absmax"],
            shape=torch.Size(self.shape),
            code=parts["quant_map"],
            blocksize=options["blocksize"],
            quant_type=options["quant_type"],
            dtype=self.matrices[0].dtype,
            offset=parts.get("offset"),
            state2=of_scales,
        )
        return weight_in_4_bits(parts["codes"], state)

    def put(self, module: nn.Module, key: str, weight: nn.Parameter, dtype: torch.dtype) -> None:
        dequantize_4_bits_in_forward(module, key, weight, dtype=dtype)


def _kind(it: StoredQuantized) -> tuple[object, ...]:
    """The options that dequantize 4 bits, except tensors and those of each matrix."""
    of_all = ("quant_type", "blocksize", "nested_blocksize", "nested_dtype")
    return tuple(it.state.get(name) for name in of_all)


def _joined(pieces: Sequence[Stored], shape: Sequence[int], device: torch.device | str) -> torch.Tensor:
    """A tensor of ``shape`` on ``device``, whose elements are those of ``pieces``, one after the other."""
    whole = torch.empty(shape, dtype=pieces[0].dtype, device=device)
    if not whole.is_meta:
        places = whole.view(-1).split([prod(it.shape) for it in pieces])
        for values, place in zip(read_all(pieces), places, strict=True):
            place.copy_(values.view(-1))
    return whole


def _read(stored: Stored, device: torch.device | str) -> torch.Tensor:
    if torch.device(device).type == "meta":
        return torch.empty(stored.shape, dtype=stored.dtype, device=device)
    return stored.read().to(device)


def _take_tensors_of_torchao(found: dict[str, Stored], file: Path) -> None:
    """Add the weights that torchao has quantized in ``file`` to ``found``, in place of their parts."""
    support = import_module("torchao.prototype.safetensors.safetensors_support")
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
        parts = {part: found.pop(key) for part, key in keys.items()}
        about_one = {name: metadata[name], "tensor_names": json.dumps([name])}

        def build(
            parts: Mapping[str, torch.Tensor],
            dtype: torch.dtype,
            name: str = name,
            keys: Mapping[str, str] = keys,
            about: Mapping[str, str] = about_one,
        ) -> nn.Parameter:
            flat = {keys[part]: tensor for part, tensor in parts.items()}
            whole, _ = support.unflatten_tensor_state_dict(flat, about)
            return nn.Parameter(whole[name], requires_grad=False)

        without = build({part: _read(it, "meta") for part, it in parts.items()}, torch.float32)
        found[name] = StoredQuantized(
            name,
            file,
            without.dtype,
            tuple(without.shape),
            parts=parts,
            build=build,
            linear=linear_without_values,
        )


def usual_dtype(stored: Mapping[str, Stored]) -> torch.dtype | None:
    """The dtype of most of the values that are not quantized; None if there are none."""
    return commonest(
        (it.dtype, prod(it.shape)) for name, it in stored.items() if not name.endswith(_SUFFIXES)
    )


def need(library: str) -> None:
    """Raise ValueError, with the command that installs it, if ``library`` is absent."""
    try:
        import_module(library)
    except ImportError as error:
        raise ValueError(
            f"quantized weights need {library}: pip install 'layer-streamer[quantize]' ({error})"
        ) from error


def _dequantized(weight: Any) -> Any:
    if hasattr(weight, "quant_state"):
        return values_of_4_bits(weight.data, weight.quant_state)
    return weight.dequantize()
