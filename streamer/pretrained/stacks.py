"""Stacks of matrices, such as the experts of a layer, that one quantized parameter holds: their module sees
them dequantized.

No library computes with a quantized stack in all the ways that models do (expert by expert, or all at once),
so a parametrization (``torch.nn.utils.parametrize``) gives the module the values: that of bitsandbytes for
its 4 bits (`bitsandbytes.nn.parametrize`), `Dequantized` for tensors of torchao. The values are made once in
each call of the module, by the library that has quantized them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrize import ParametrizationList


class Dequantized(nn.Module):
    """The values of a tensor that can ``dequantize``."""

    @torch.no_grad()
    def forward(self, weight: Any) -> torch.Tensor:
        values: torch.Tensor = weight.dequantize()
        return values


def stacks_in(layers: Sequence[tuple[str, nn.Module]]) -> dict[str, tuple[nn.Module, str]]:
    """The stacks in ``layers`` by their names, each once: the module and the attribute that it is. A
    parameter of one of PyTorch's own modules (a kernel of a convolution) is none."""
    found: dict[nn.Parameter, tuple[str, nn.Module, str]] = {}
    for path, layer in layers:
        for name, module in layer.named_modules():
            if type(module).__module__.startswith("torch."):
                continue
            for key, param in module._parameters.items():
                if param is not None and param.dim() == 3 and param.is_floating_point():
                    found.setdefault(param, (".".join(filter(None, (path, name, key))), module, key))
    return {name: (module, key) for name, module, key in found.values()}


def dequantize_in_forward(module: nn.Module, key: str, weight: nn.Parameter) -> None:
    """Let ``module`` have the quantized ``weight`` as ``key``, and see its values."""
    parametrize.register_parametrization(module, key, Dequantized(), unsafe=True)
    original(module, key)._parameters["original"] = weight
    if _begin not in module._forward_pre_hooks.values():
        module.register_forward_pre_hook(_begin)
        module.register_forward_hook(_end, always_call=True)


#: The attribute of a module that is running that ends the sharing of values within the call.
_SHARING = "_shared_values"


def _begin(module: nn.Module, _: Any) -> None:
    sharing = parametrize.cached()  # or each expert would have the whole stack dequantized
    sharing.__enter__()
    vars(module)[_SHARING] = sharing


def _end(module: nn.Module, *_: Any) -> None:
    if (sharing := vars(module).pop(_SHARING, None)) is not None:
        sharing.__exit__(None, None, None)


def name_of_original(name: str) -> str:
    """The name of the quantized parameter that stands for the stack of that ``name``."""
    owner, _, key = name.rpartition(".")
    return f"{owner}.parametrizations.{key}.original"


def original(module: nn.Module, key: str) -> ParametrizationList:
    """The module that has the quantized parameter."""
    parametrizations: Any = module.parametrizations
    found: ParametrizationList = parametrizations[key]
    return found
