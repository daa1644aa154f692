"""Stacks of matrices, such as the experts of a layer, in one quantized parameter: their module uses
dequantized values.

No library computes with a quantized stack in all the ways that models do (expert by expert, or all at once),
so a parametrization (``torch.nn.utils.parametrize``) computes the values for the module: that of bitsandbytes
for its 4 bits (`bitsandbytes.nn.parametrize`), `Dequantized` for tensors of torchao. The weight's library
dequantizes it once in each call of the module.

[Note: experts in 4 bits]
Separate experts in a file, each in 4 bits, form one stack: its codes are those of the experts, one after the
other, and so are its scales. bitsandbytes reads a stack of N values as N / 64 blocks in a row, and so finds
each expert's own blocks, if each expert is a whole number of them. If scales are quantized too (double
quantization), each expert has an offset of its own, which bitsandbytes adds to all scales of a weight. The
scales of a stack therefore are a matrix, with a row for each expert, and its offsets a column.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrize import ParametrizationList

from streamer.quantized.parts import composite_of


class Dequantized(nn.Module):
    """The values of a tensor that has a ``dequantize`` method."""

    @torch.no_grad()
    def forward(self, weight: Any) -> torch.Tensor:
        values: torch.Tensor = weight.dequantize()
        return values


class Rounded(nn.Module):
    """Values in another ``dtype``."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values.to(self.dtype)


def stacks_in(layers: Sequence[tuple[str, nn.Module]]) -> dict[str, tuple[nn.Module, str]]:
    """The stacks in ``layers`` by name, each once: the module and the stack's attribute. A parameter of one
    of PyTorch's own modules (a kernel of a convolution) is not a stack."""
    found: dict[nn.Parameter, tuple[str, nn.Module, str]] = {}
    for path, layer in layers:
        for name, module in layer.named_modules():
            if type(module).__module__.startswith("torch."):
                continue
            for key, param in module._parameters.items():
                if param is not None and param.dim() == 3 and param.is_floating_point():
                    found.setdefault(param, (".".join(filter(None, (path, name, key))), module, key))
    return {name: (module, key) for name, module, key in found.values()}


def dequantize_in_forward(module: nn.Module, key: str, weight: Any, dtype: torch.dtype) -> None:
    """Register the quantized ``weight`` as ``key`` of ``module``, which then uses its values in ``dtype``.

    The hooks of `bitsandbytes.nn.parametrize` write one offset for a weight into a ``state_dict``, but a
    stack has several. [Note: experts in 4 bits]
    """
    state = getattr(weight, "quant_state", None)
    values: nn.Module = Dequantized()
    if state is not None:
        values = import_module("bitsandbytes.nn.parametrize").Bnb4bitParametrization(state)
    parametrize.register_parametrization(module, key, values, unsafe=True)
    original(module, key)._parameters["original"] = weight
    if _begin not in module._forward_pre_hooks.values():
        module.register_forward_pre_hook(_begin)
        module.register_forward_hook(_end, always_call=True)
    if state is not None:
        if state.dtype != dtype:
            original(module, key).append(Rounded(dtype))
        module.register_state_dict_post_hook(partial(_with_all_parts, key=key))


def _with_all_parts(module: nn.Module, held: dict[str, Any], prefix: str, _: object, *, key: str) -> None:
    """Write the parts of a weight into a ``state_dict``, by their names in bitsandbytes."""
    if (name := name_of_original(prefix + key)) not in held:
        return
    of_key = original(module, key)
    composite = composite_of(name, of_key.original, [of_key])
    assert composite is not None, "it is quantized"
    held[prefix + key] = held.pop(name)
    for part, tensor in zip(composite.names[1:], composite.parts()[1:], strict=True):
        held[f"{prefix}{key}.{part}"] = tensor.detach()


#: The attribute of a running module that ends the sharing of values within the call.
_SHARING = "_shared_values"


def _begin(module: nn.Module, _: Any) -> None:
    sharing = parametrize.cached()  # otherwise each expert would dequantize the whole stack
    sharing.__enter__()
    vars(module)[_SHARING] = sharing


def _end(module: nn.Module, *_: Any) -> None:
    if (sharing := vars(module).pop(_SHARING, None)) is not None:
        sharing.__exit__(None, None, None)


def name_of_original(name: str) -> str:
    """The name of the quantized parameter for the stack of that ``name``."""
    owner, _, key = name.rpartition(".")
    return f"{owner}.parametrizations.{key}.original"


def original(module: nn.Module, key: str) -> ParametrizationList:
    """The module that has the quantized parameter."""
    parametrizations: Any = module.parametrizations
    found: ParametrizationList = parametrizations[key]
    return found
