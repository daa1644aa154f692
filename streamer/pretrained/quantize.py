"""Linear modules and stacks of experts with quantized weights: quantized during reading, by torchao or
bitsandbytes, or already quantized in the files.

The model is built without values, and gets quantized weights without values, so that `wrap` lays out their
parts: [Note: parts]. A tensor is then read and quantized on the device, and its parts go to host memory,
before the next one is read.
"""

from __future__ import annotations

import abc
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import nn

from streamer.errors import shortened, warn
from streamer.pretrained.architecture import kept_in_fp32, of_library, transformers_library
from streamer.pretrained.files import Stored
from streamer.pretrained.match import Tensors, compiled
from streamer.pretrained.quantized_files import (
    MOST_VALUES,
    StoredQuantized,
    StoredStack,
    linear_in_4_bits,
    linear_without_values,
    need,
    weight_in_4_bits,
)
from streamer.pretrained.stacks import dequantize_4_bits_in_forward, dequantize_in_forward, stacks_in

#: Layers by path.
Layers = Sequence[tuple[str, nn.Module]]
#: A quantized weight on a device; on the meta device without values.
Quantized = Callable[[torch.device], nn.Parameter]

META = torch.device("meta")


class Scheme(abc.ABC):
    """A way to quantize the weight of a linear module."""

    #: the library of the scheme
    library: str
    #: the fewest values in a weight that it cannot handle, None if there is no limit
    most_values: int | None = None

    def __init__(self) -> None:
        """Raises ValueError, with the command that installs it, if the library is absent."""
        need(self.library)

    @abc.abstractmethod
    def of(self, values: torch.Tensor) -> nn.Parameter:
        """The quantized weight of ``values`` (a matrix, [out, in], or a stack of matrices), on their device,
        which may be meta."""

    @abc.abstractmethod
    def linear(self, outputs: int, inputs: int, dtype: torch.dtype) -> nn.Module:
        """A linear module without bias for such a weight, on the meta device; ``dtype`` is its inputs'."""

    @abc.abstractmethod
    def put(self, module: nn.Module, key: str, weight: nn.Parameter) -> None:
        """Register ``weight``, a quantized stack, as ``key`` of ``module``, which then uses its values."""

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
        quantized: nn.Parameter = holder.weight
        quantized.requires_grad_(False)
        return quantized

    def linear(self, outputs: int, inputs: int, dtype: torch.dtype) -> nn.Module:
        return linear_without_values(outputs, inputs, dtype)

    def put(self, module: nn.Module, key: str, weight: nn.Parameter) -> None:
        dequantize_in_forward(module, key, weight)

    def config(self, left: Sequence[str], dtype: torch.dtype) -> Any:
        kind = import_module("torchao.quantization").Int8WeightOnlyConfig()
        return transformers_library().TorchAoConfig(kind, modules_to_not_convert=[*left])


class _NF4(Scheme):
    """Four-bit normal floats in blocks of 64, with quantized scales (Dettmers et al., "QLoRA", 2023,
    arXiv:2305.14314): the Params4bit of bitsandbytes."""

    library, most_values = "bitsandbytes", MOST_VALUES
    BLOCK, BLOCK_OF_SCALES = 64, 256

    def of(self, values: torch.Tensor) -> nn.Parameter:
        bnb = import_module("bitsandbytes")
        if values.is_meta:
            codes, state = self._without_values(values, bnb.functional.QuantState)
        else:
            codes, state = bnb.functional.quantize_4bit(
                values.contiguous(), blocksize=self.BLOCK, compress_statistics=True, quant_type="nf4"
            )
        return weight_in_4_bits(codes, state)

    def _without_values(self, values: torch.Tensor, state: Any) -> tuple[torch.Tensor, Any]:
        # bitsandbytes itself reads the scales, to compute their mean
        def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=META)

        scales = -(-values.numel() // self.BLOCK)
        of_scales = state(
            absmax=empty(-(-scales // self.BLOCK_OF_SCALES)),
            code=empty(256),
            blocksize=self.BLOCK_OF_SCALES,
            dtype=torch.float32,
        )
        whole = state(
            absmax=empty(scales, dtype=torch.uint8),
            shape=values.shape,
            dtype=values.dtype,
            blocksize=self.BLOCK,
            code=empty(16),
            quant_type="nf4",
            offset=empty(),
            state2=of_scales,
        )
        return empty(-(-values.numel() // 2), 1, dtype=torch.uint8), whole

    def linear(self, outputs: int, inputs: int, dtype: torch.dtype) -> nn.Module:
        return linear_in_4_bits(outputs, inputs, dtype, "nf4")

    def put(self, module: nn.Module, key: str, weight: nn.Parameter) -> None:
        dtype = weight.quant_state.dtype  # type: ignore[attr-defined]
        dequantize_4_bits_in_forward(module, key, weight, dtype=dtype)

    def config(self, left: Sequence[str], dtype: torch.dtype) -> Any:
        return transformers_library().BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,
            llm_int8_skip_modules=[*left],
        )


#: By the value of ``quantize=``.
SCHEMES: dict[str, type[Scheme]] = {"int8": _Int8, "nf4": _NF4}


def quantize_weights(
    model: nn.Module,
    layers: Layers,
    word: str,
    skip: str | Sequence[str],
    tensors: Tensors | None,
    dtype: torch.dtype | None,
) -> None:
    """Freeze ``model``, which has no values, and set the weights of the linear modules in its ``layers``, and
    the stacks of matrices, to weights quantized by the scheme ``word``.

    Modules and stacks with a match of a pattern of ``skip`` in their name are not quantized. Nor are weights
    that other modules share, and those that transformers keeps in fp32, which it does not quantize either.
    Values are quantized in ``dtype``, or in the dtype of each parameter. ``tensors`` then knows how to read
    such a weight; without ``tensors`` nothing is read.

    Raises ValueError for an unknown ``word``, for an absent library, for an invalid pattern or one without a
    match, and if no weight is left to quantize.
    """
    if word not in SCHEMES:
        raise ValueError(f"quantize={word!r}: it is one of {', '.join(map(repr, SCHEMES))}, or None")
    scheme = SCHEMES[word]()
    model.requires_grad_(False)
    patterns = compiled([skip] if isinstance(skip, str) else skip, "skip")
    linear, stacks = _linear_modules(layers), stacks_in(layers)
    weights = {name: (module, "weight") for name, module in linear.items()} | stacks
    if unused := [rule.pattern for rule in patterns if not any(map(rule.search, weights))]:
        raise ValueError(
            f"skip={unused[0]!r} matches the name of no linear module and no experts in the layers: "
            f"{shortened([*weights])}"
        )
    in_fp32 = kept_in_fp32(model, torch.float16)  # in which it keeps most
    owners = Counter(param for module in model.modules() for param in module._parameters.values())
    chosen = {
        name: param
        for name, (module, key) in weights.items()
        if owners[param := module._parameters[key]] == 1
        and not any(rule.search(name) for rule in patterns)
        and not in_fp32(f"{name}.weight" if name in linear else name)
        and (tensors is None or tensors.source(param) is not None)
    }
    if not chosen:
        raise ValueError(
            "quantize= finds no linear module and no experts in the layers that it could quantize: "
            f"{shortened([*weights]) if weights else 'there are none'}"
        )
    for name, param in chosen.items():
        if scheme.most_values is not None and param.numel() >= scheme.most_values:
            raise ValueError(
                f"quantize={word!r}: '{name}' has {param.numel()} values, and {scheme.library} dequantizes "
                f"fewer than {scheme.most_values} at once: set quantize='int8', or skip= to a pattern of "
                "its name"
            )
    for_inputs = dtype or next(iter(chosen.values())).dtype
    for name, param in chosen.items():
        quantized = _quantizing(param, _is_transposed(linear.get(name)), scheme, tensors, dtype)
        if name in linear:
            module: Any = linear[name]
            outputs, inputs = param.shape[::-1] if _is_transposed(module) else param.shape
            quantized_module = scheme.linear(outputs, inputs, dtype or param.dtype)
            _replace(model, name, module, quantized_module, quantized, tensors)
        else:
            _put(*stacks[name], scheme.put, quantized, tensors)
    if of_library(model):
        left = [name for name, each in model.named_modules() if _is_linear(each) and name not in chosen]
        _mark_quantized(model, scheme.config(left, for_inputs))
        if stacks.keys() & chosen.keys():
            _refuse_files(model, "experts that are one quantized tensor")


def take_quantized(
    model: Any, stored: Mapping[str, Stored], tensors: Tensors, dtype: torch.dtype | None
) -> None:
    """Freeze ``model``, which has no values, and set the weights of its linear modules and stacks of experts
    to those that are quantized in the files. ``tensors`` then knows how to read them. Warnings name the
    weights that are dequantized during reading, and the reason."""
    model.requires_grad_(False)
    left = {
        name: "each is no linear module's own weight here"
        for name, it in stored.items()
        if isinstance(it, StoredQuantized)
    }
    stacks: list[StoredStack] = []
    for name, module in _linear_modules([("", model)]).items():
        source = tensors.source(module.weight)
        it = None if source is None else source.stored
        if isinstance(it, StoredQuantized) and type(module) is nn.Linear:
            for_inputs = dtype or it.dtype
            linear = it.linear(module.out_features, module.in_features, for_inputs)
            _replace(model, name, module, linear, _reading(it, for_inputs), tensors)
            left.pop(it.name, None)
    for module, key in stacks_in([("", model)]).values():
        source = tensors.source(module._parameters[key])  # type: ignore[arg-type]
        if source is None or not (names := left.keys() & {it.name for it in source.made_of}):
            continue
        stack, for_inputs = StoredStack.of(source), dtype or source.dtype
        if isinstance(stack, str):
            left |= dict.fromkeys(names, stack)
            continue
        put = partial(stack.put, dtype=for_inputs)
        _put(module, key, put, _reading(stack, for_inputs), tensors)
        stacks.append(stack)
        for name in names:
            del left[name]
    for why in dict.fromkeys(left.values()):
        names = {name for name, reason in left.items() if reason == why}
        warn(
            f"{shortened(sorted(names))}: quantized in the files, and dequantized during reading, since {why}"
        )
    _mark_quantized(model, model.config.quantization_config)
    if any(isinstance(it, StoredQuantized) and it.block for it in stored.values()):
        _refuse_files(model, "block-wise fp8 that is in tensors of torchao")
    elif stacks:
        _refuse_files(model, "experts that are one quantized tensor")


def _reading(stored: StoredQuantized | StoredStack, for_inputs: torch.dtype) -> Quantized:
    return lambda device: stored.quantized(device, for_inputs)


def _linear_modules(layers: Layers) -> dict[str, Any]:
    """The linear modules in ``layers`` by name, each once."""
    names: dict[nn.Module, str] = {}
    for path, layer in layers:
        for name, module in layer.named_modules():
            if _is_linear(module):
                names.setdefault(module, ".".join(filter(None, (path, name))))
    return {name: module for module, name in names.items()}


def _is_linear(module: nn.Module) -> bool:
    return type(module) is nn.Linear or _is_transposed(module)


def _is_transposed(module: nn.Module | None) -> bool:
    """Whether it is the Conv1D of transformers, whose weight is [in, out]."""
    kind = type(module)
    return kind.__name__ == "Conv1D" and kind.__module__.startswith("transformers.")


def _quantizing(
    param: nn.Parameter, transposed: bool, scheme: Scheme, tensors: Tensors | None, dtype: torch.dtype | None
) -> Quantized:
    """A function that returns the quantized weight of ``param``, a module's own, which may be
    ``transposed``."""
    shape, for_inputs = param.shape, dtype or param.dtype
    source = None if tensors is None else tensors.source(param)

    def quantized(device: torch.device) -> nn.Parameter:
        assert source is not None or device == META, "values have a source"
        values = torch.empty(shape, device=META) if source is None or device == META else source.read()
        values = values.to(device, for_inputs)
        return scheme.of(values.T.contiguous() if transposed else values)

    return quantized


def _put(
    module: nn.Module,
    key: str,
    put: Callable[[nn.Module, str, nn.Parameter], None],
    quantized: Quantized,
    tensors: Tensors | None,
) -> None:
    """Set ``key`` of ``module`` to a quantized stack without values."""
    before: Any = module._parameters[key]
    weight = quantized(META)
    if tensors is not None:
        tensors.quantize(before, weight, quantized)
    put(module, key, weight)


def _replace(
    model: nn.Module, name: str, module: Any, linear: Any, quantized: Quantized, tensors: Tensors | None
) -> None:
    """Replace ``module`` in the model by ``linear``, with a quantized weight without values."""
    linear.weight = quantized(META)
    linear.bias = module.bias
    linear.train(module.training)
    if tensors is not None:
        tensors.quantize(module.weight, linear.weight, quantized)
    model.set_submodule(name, linear)


def _mark_quantized(model: Any, config: Any) -> None:
    """Set attributes by which transformers, peft and trainers know the quantization, as for models that
    transformers itself has quantized."""
    auto = import_module("transformers.quantizers.auto").AutoHfQuantizer
    model.hf_quantizer = auto.from_config(config, pre_quantized=False)
    model.is_quantized = True
    model.quantization_method = model.hf_quantizer.quantization_config.quant_method
    model.config.quantization_config = model.hf_quantizer.quantization_config
    model.config._is_quantized = True
    if getattr(model.hf_quantizer.quantization_config, "load_in_4bit", False):
        model.is_loaded_in_4bit = True


def _refuse_files(model: Any, what: str) -> None:
    """Let ``save_pretrained`` refuse the whole ``model``, before it writes anything. Otherwise transformers
    fails later, or writes files that it cannot read."""
    model.hf_quantizer.is_serializable = _NotSerializable(model, what)


class _NotSerializable:
    """The method that transformers calls on the quantizer of ``model`` before it saves, for a model with
    weights (``what``) that have no file format. Its reference to the model is weak, so that the model can be
    freed."""

    def __init__(self, model: Any, what: str) -> None:
        self._model = weakref.ref(model)
        self._what = what

    def __reduce__(self) -> tuple[Any, ...]:
        # in a copy of the model it refers to the copy
        return type(self), (self._model(), self._what)

    def __call__(self) -> bool:
        """False if only adapters are saved. Raises ValueError otherwise."""
        if getattr(self._model(), "_hf_peft_config_loaded", False):
            return False
        raise ValueError(
            f"transformers has no files for {self._what}: save only adapters (by peft), a checkpoint "
            "(streamer.save), or after streamer train a whole model (streamer export --merge)"
        )
