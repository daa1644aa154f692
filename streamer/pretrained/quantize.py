"""Linear modules and stacks of experts with quantized weights: quantized during reading, by torchao or
bitsandbytes, or already quantized in the files.

The model is built without values, and gets quantized weights without values, so that `wrap` lays out their
parts: [Note: parts]. A tensor is then read and quantized on the device, and its parts go to host memory,
before the next one is read.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import nn

from streamer.errors import shortened, warn
from streamer.pretrained.architecture import kept_in_fp32, of_library
from streamer.pretrained.files import Stored
from streamer.pretrained.match import Source, Tensors, compiled
from streamer.pretrained.quantized_files import BlockFloats, FourBits, StoredQuantized, stored_quantized
from streamer.quantized.experts import dequantize_in_forward, stacks_in
from streamer.quantized.parts import shape_of
from streamer.quantized.schemes import META, SCHEMES, Scheme, need

#: Layers by path.
Layers = Sequence[tuple[str, nn.Module]]
#: The module and the attribute of a weight.
Place = tuple[Any, str]
#: A quantized weight on a device; on the meta device without values.
Quantized = Callable[[torch.device], nn.Parameter]


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
    need(scheme.library)
    model.requires_grad_(False)
    patterns = compiled([skip] if isinstance(skip, str) else skip, "skip")
    linear, stacks = _linear_modules(layers), stacks_in(layers)
    weights: dict[str, Place] = linear | stacks
    if unused := [rule.pattern for rule in patterns if not any(map(rule.search, weights))]:
        raise ValueError(
            f"skip={unused[0]!r} matches the name of no linear module and no experts in the layers: "
            f"{shortened([*weights])}"
        )
    in_fp32 = kept_in_fp32(model, torch.float16)  # in which it keeps most
    owners = Counter(param for module in model.modules() for param in module._parameters.values())
    chosen: dict[str, nn.Parameter] = {
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
    for name, param in chosen.items():
        for_inputs, source = dtype or param.dtype, None if tensors is None else tensors.source(param)
        is_transposed = _is_transposed(weights[name][0])
        read = partial(_quantized, scheme, source, param.shape, for_inputs, is_transposed)
        _replace(model, name, weights[name], read, tensors, for_inputs)
    if of_library(model):
        left = [name for name, each in model.named_modules() if _is_linear(each) and name not in chosen]
        _mark_quantized(model, scheme.config(left, dtype or next(iter(chosen.values())).dtype))
        if stacks.keys() & chosen.keys():
            _refuse_files(model, "experts that are one quantized tensor")


def take_quantized(
    model: Any, stored: Mapping[str, Stored], tensors: Tensors, dtype: torch.dtype | None
) -> None:
    """Freeze ``model``, which has no values, and set the weights of its linear modules and stacks of experts
    to those that are quantized in the files. ``tensors`` then knows how to read them. Warnings name the
    weights that are dequantized during reading, and the reason."""
    model.requires_grad_(False)
    in_files = {name: it for name, it in stored.items() if isinstance(it, StoredQuantized)}
    left = dict.fromkeys(in_files, "each is no linear module's own weight here")
    linear = _linear_modules([("", model)])
    has_stacks = False
    for name, (module, key) in (linear | stacks_in([("", model)])).items():
        source = tensors.source(module._parameters[key])
        if source is None or not (names := left.keys() & {it.name for it in source.made_of}):
            continue
        found = stored_quantized(source)
        if name in linear and (found is not source.stored or _is_transposed(module)):
            continue
        if isinstance(found, str):
            left |= dict.fromkeys(names, found)
            continue
        for_inputs = dtype or found.dtype
        computed_in = found.compute if name in linear and isinstance(found, FourBits) else for_inputs
        _replace(model, name, (module, key), partial(found.quantized, dtype=for_inputs), tensors, computed_in)
        has_stacks |= name not in linear
        for each in names:
            del left[each]
    for why in dict.fromkeys(left.values()):
        names = {name for name, reason in left.items() if reason == why}
        warn(
            f"{shortened(sorted(names))}: quantized in the files, and dequantized during reading, since {why}"
        )
    _mark_quantized(model, model.config.quantization_config)
    if any(isinstance(it, BlockFloats) for it in in_files.values()):
        _refuse_files(model, "block-wise fp8 that is in tensors of torchao")
    elif has_stacks:
        _refuse_files(model, "experts that are one quantized tensor")


def _linear_modules(layers: Layers) -> dict[str, Place]:
    """The weights of the linear modules in ``layers`` by the module's name, each module once."""
    names: dict[nn.Module, str] = {}
    for path, layer in layers:
        for name, module in layer.named_modules():
            if _is_linear(module):
                names.setdefault(module, ".".join(filter(None, (path, name))))
    return {name: (module, "weight") for module, name in names.items()}


def _is_linear(module: nn.Module) -> bool:
    return type(module) is nn.Linear or _is_transposed(module)


def _is_transposed(module: nn.Module) -> bool:
    """Whether it is the Conv1D of transformers, whose weight is [in, out]."""
    kind = type(module)
    return kind.__name__ == "Conv1D" and kind.__module__.startswith("transformers.")


def _quantized(
    scheme: Scheme,
    source: Source | None,
    shape: torch.Size,
    dtype: torch.dtype,
    is_transposed: bool,
    device: torch.device,
) -> nn.Parameter:
    """The weight that is read from ``source`` in ``dtype``, quantized by ``scheme`` on ``device``."""
    if device == META:
        values = torch.empty(shape, dtype=dtype, device=META)
    else:
        assert source is not None, "values have a source"
        values = source.read().to(device, dtype)
    return scheme.of(values.T.contiguous() if is_transposed else values)


def _replace(
    model: nn.Module, name: str, place: Place, read: Quantized, tensors: Tensors | None, dtype: torch.dtype
) -> None:
    """Replace a weight by a quantized one without values, of which ``read`` returns one with values. A linear
    module is replaced by one for such a weight; ``name`` is its name. ``dtype`` is that of the inputs."""
    module, key = place
    weight: Any = read(META)
    if tensors is not None:
        tensors.quantize(module._parameters[key], weight, read)
    if not _is_linear(module):
        dequantize_in_forward(module, key, weight, dtype)
        return
    outputs, inputs = shape_of(weight)
    linear: Any = nn.Linear(inputs, outputs, bias=False, device=META, dtype=dtype)
    if hasattr(weight, "quant_state"):
        linear = import_module("bitsandbytes").nn.Linear4bit(
            inputs, outputs, bias=False, compute_dtype=dtype, quant_type=weight.quant_type, device=META
        )
    linear.weight, linear.bias = weight, module.bias
    linear.train(module.training)
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
