"""Ways to quantize weights: by torchao or bitsandbytes, one tensor at a time."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import nn

#: The kernels of bitsandbytes take the number of values as a 32-bit integer.
MOST_VALUES = 1 << 31
META = torch.device("meta")


def need(library: str) -> None:
    """Raise ValueError, with the command that installs it, if ``library`` is absent."""
    try:
        import_module(library)
    except ImportError as error:
        raise ValueError(
            f"quantized weights need {library}: pip install 'layer-streamer[quantize]' ({error})"
        ) from error


class Scheme(abc.ABC):
    """A way to quantize weights."""

    #: the library of the scheme
    library: str
    #: the fewest values in a weight that it cannot handle, None if there is no limit
    most_values: int | None = None

    @abc.abstractmethod
    def of(self, values: torch.Tensor) -> nn.Parameter:
        """The quantized weight of ``values`` (a matrix, [out, in], or a stack of matrices), on their device,
        which may be meta."""

    @abc.abstractmethod
    def config(self, left: Sequence[str], dtype: torch.dtype) -> Any:
        """The quantization config of transformers for a model; modules of these names are ``left`` out."""


class _Int8(Scheme):
    """A scale for each row, symmetric: torchao's Int8WeightOnlyConfig."""

    library = "torchao"

    def of(self, values: torch.Tensor) -> nn.Parameter:
        quantization = import_module("torchao.quantization")
        holder = nn.Linear(values.shape[1], values.shape[0], bias=False, device=META)
        holder.weight = nn.Parameter(values, requires_grad=False)
        quantization.quantize_(holder, quantization.Int8WeightOnlyConfig())
        holder.weight.requires_grad_(False)
        return holder.weight

    def config(self, left: Sequence[str], dtype: torch.dtype) -> Any:
        kind = import_module("torchao.quantization").Int8WeightOnlyConfig()
        return import_module("transformers").TorchAoConfig(kind, modules_to_not_convert=[*left])


class _NF4(Scheme):
    """Four-bit normal floats in blocks of 64, with quantized scales (Dettmers et al., "QLoRA", 2023,
    arXiv:2305.14314): the Params4bit of bitsandbytes."""

    library, most_values = "bitsandbytes", MOST_VALUES

    def of(self, values: torch.Tensor) -> nn.Parameter:
        if not values.is_meta:
            kind = import_module("bitsandbytes").nn.Params4bit
            weight: nn.Parameter = kind(values, blocksize=64, quant_type="nf4").to(values.device)
            return weight
        # bitsandbytes itself reads the scales, to compute their mean
        scales = -(-values.numel() // 64)
        parts = {
            "codes": torch.empty(-(-values.numel() // 2), 1, dtype=torch.uint8, device=META),
            "absmax": torch.empty(scales, dtype=torch.uint8, device=META),
            "quant_map": torch.empty(16, device=META),
            "nested_absmax": torch.empty(-(-scales // 256), device=META),
            "nested_quant_map": torch.empty(256, device=META),
            "offset": torch.empty((), device=META),
        }
        options = {"quant_type": "nf4", "blocksize": 64, "nested_blocksize": 256, "nested_dtype": "float32"}
        return weight_in_4_bits(parts, options, values.shape, values.dtype)

    def config(self, left: Sequence[str], dtype: torch.dtype) -> Any:
        return import_module("transformers").BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,
            llm_int8_skip_modules=[*left],
        )


#: By the value of ``quantize=``.
SCHEMES: dict[str, type[Scheme]] = {"int8": _Int8, "nf4": _NF4}


def weight_in_4_bits(
    parts: Mapping[str, torch.Tensor], options: Mapping[str, Any], shape: Sequence[int], dtype: torch.dtype
) -> nn.Parameter:
    """A weight of bitsandbytes, of values of ``shape`` and ``dtype``, from its parts by name."""
    bnb, scales = import_module("bitsandbytes"), None
    if "nested_blocksize" in options:
        scales = bnb.functional.QuantState(
            absmax=parts["nested_absmax"],
            blocksize=options["nested_blocksize"],
            code=parts["nested_quant_map"],
            dtype=getattr(torch, options["nested_dtype"]),
        )
    state = bnb.functional.QuantState(
        absmax=parts["absmax"],
        shape=torch.Size(shape),
        code=parts["quant_map"],
        blocksize=options["blocksize"],
        quant_type=options["quant_type"],
        dtype=dtype,
        offset=parts.get("offset"),
        state2=scales,
    )
    weight: nn.Parameter = bnb.nn.Params4bit(
        parts["codes"],
        requires_grad=False,
        quant_state=state,
        blocksize=state.blocksize,
        compress_statistics=state.nested,
        quant_type=state.quant_type,
        quant_storage=parts["codes"].dtype,
        bnb_quantized=True,
    )
    return weight
