"""Weights of bitsandbytes and their parts. They are not tensor subclasses with inner tensors.

``Params4bit`` holds its codes as data, and absmax values, code books and an offset in its ``quant_state``. If
the absmax values are quantized too (double quantization), that has a ``state2`` of its own. A weight outside
of linear modules, such as a stack of experts, may be codes with a parametrization of
``bitsandbytes.nn.parametrize``, which has the ``quant_state`` and computes the values for the module.
``Int8Params`` holds its codes (CB) as data, and a scale for each row (SCB); the first forward moves both to
its module's ``state``. [Note: parts]
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from streamer.quantized.bitsandbytes_private import blocks_go_on_in_rows
from streamer.quantized.parts import Composite, Modules, become


def composite_of(name: str, param: torch.Tensor, modules: Modules) -> Composite | None:
    """The `Composite` of ``param``. Raises ValueError for one that is not quantized yet, or is of an unknown
    class."""
    kind = _kind(param)
    if parametrizations := _parametrizations(modules):
        return _FourBits(param, parametrizations)
    if kind == "Params4bit":
        if getattr(param, "quant_state", None) is None:
            raise _not_quantized(name)
        if getattr(param.quant_state, "packing_format_for_cpu", False):  # type: ignore[attr-defined]
            raise ValueError(
                f"parameter '{name}' was repacked by an evaluation on the CPU, and cannot be trained "
                "any more: load the model again, and wrap it before an evaluation"
            )
        return _FourBits(param, modules)
    if kind == "Int8Params":
        if getattr(param, "has_fp16_weights", False):
            raise ValueError(
                f"parameter '{name}' of bitsandbytes is quantized anew in each forward "
                "(has_fp16_weights=True), which cannot be streamed: load the model with "
                "llm_int8_has_fp16_weight=False, or without quantization"
            )
        if param.dtype != torch.int8:
            raise _not_quantized(name)
        return _EightBits(param, modules)
    raise ValueError(
        f"parameter '{name}' is a {kind} of bitsandbytes, which cannot be streamed: Params4bit and "
        "Int8Params can"
    )


def _parametrizations(modules: Modules) -> list[nn.Module]:
    """The modules that have the ``quant_state`` of a parameter registered in ``modules``."""
    lists = [module for module in modules if isinstance(module, ParametrizationList)]
    return [each for module in lists for each in module if type(each).__name__ == _PARAMETRIZATION]


def _not_quantized(name: str) -> ValueError:
    return ValueError(
        f"parameter '{name}' of bitsandbytes is not quantized yet: call model.to('cpu') (or .to('cuda')) "
        "before streamer.wrap, which quantizes it"
    )


def _kind(param: torch.Tensor) -> str:
    return getattr(type(param), "_plain_class", type(param)).__name__


def _rebuilt(param: Any, data: torch.Tensor, **attributes: object) -> Any:
    """A weight of the class of ``param`` with new codes and ``attributes``."""
    weight = torch.Tensor._make_subclass(getattr(type(param), "_plain_class", type(param)), data, False)
    own = {name: value for name, value in vars(param).items() if not name.startswith("_streamer")}
    weight.__dict__.update(own, **attributes)
    return weight


#: Whether a Linear4bit evaluated on the CPU repacks its weight, permanently. It would do so in every forward
#: of a layer. The layer's first run would repack but its recomputation would not, with other roundings.
_PACKS = "support_avx512bf16_for_cpu"


#: The class of bitsandbytes that dequantizes a parameter of any module at its use.
_PARAMETRIZATION = "Bnb4bitParametrization"


class _FourBits(Composite):
    """A ``Params4bit``, or codes with a parametrization. Parts other than the codes have the names of
    bitsandbytes in files."""

    attributes = frozenset({"quant_state"})

    def hold(self) -> None:
        self.held = {module: {_PACKS: True} for module in self.modules if getattr(module, _PACKS, False)}
        for module in self.held:
            setattr(module, _PACKS, False)

    @property
    def names(self) -> list[str]:
        return ["codes", *(name for name, _, _ in _tensors_of(self._state))]

    @property
    def _state(self) -> Any:
        holders = (self.param, *self.modules)
        return next(state for each in holders if (state := getattr(each, "quant_state", None)) is not None)

    def parts(self) -> list[torch.Tensor]:
        return [self.param, *(getattr(state, attribute) for _, state, attribute in _tensors_of(self._state))]

    def assemble(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        state = copy.copy(self._state)
        state.state2 = copy.copy(state.state2)
        _set(state, parts[1:])
        weight: torch.Tensor = _rebuilt(self.param, parts[0], quant_state=state)
        return weight

    def set_parts(self, parts: Sequence[torch.Tensor]) -> None:
        if self.param.is_meta == parts[0].is_meta:
            self.param.data = parts[0]
            _set(self._state, parts[1:])
        else:
            become(self.param, self.assemble(parts))
        for module in self.modules:  # after a deepcopy the module has another object
            if (other := getattr(module, "quant_state", None)) is not None and other is not self._state:
                module.quant_state = self._state

    def is_misread_on(self, device: torch.device) -> bool:
        *rows, wide = self._state.shape
        is_cut = prod(rows) > 1 and wide % self._state.blocksize > 0
        return is_cut and device.type == "cpu" and not blocks_go_on_in_rows()

    def module_attributes(self, leaf: torch.Tensor) -> dict[str, object]:
        parametrized = any(type(module).__name__ == _PARAMETRIZATION for module in self.modules)
        return {"quant_state": leaf.quant_state} if parametrized else {}  # type: ignore[attr-defined]

    @property
    def structure(self) -> object:
        states = [self._state, self._state.state2]
        return [
            {name: value for name, value in vars(state).items() if not isinstance(value, torch.Tensor)}
            | {"state2": None}
            for state in states
            if state is not None
        ]

    @property
    def kind(self) -> str:
        state = self._state
        nested = "" if state.state2 is None else ", scales in 8 bits"
        return f"bitsandbytes {state.quant_type} in blocks of {state.blocksize}{nested}"


def _tensors_of(state: Any) -> Iterator[tuple[str, Any, str]]:
    """The name of each tensor of a QuantState, the state that has it, and the attribute."""
    for prefix, owner in (("", state), ("nested_", state.state2)):
        for attribute, name in (("absmax", "absmax"), ("code", "quant_map"), ("offset", "offset")):
            if owner is not None and isinstance(getattr(owner, attribute), torch.Tensor):
                yield prefix + name, owner, attribute


def _set(state: Any, parts: Sequence[torch.Tensor]) -> None:
    for (_, owner, attribute), part in zip([*_tensors_of(state)], parts, strict=True):
        setattr(owner, attribute, part)


class _EightBits(Composite):
    """An ``Int8Params``."""

    attributes = frozenset({"state"})

    @property
    def names(self) -> list[str]:
        return ["CB", "SCB"]

    def parts(self) -> list[torch.Tensor]:
        return [self.param, self._scales()]

    def _scales(self) -> torch.Tensor:
        holders = (self.param, *(getattr(module, "state", None) for module in self.modules))
        found: Iterator[Any] = (getattr(holder, "SCB", None) for holder in holders)
        scales: torch.Tensor = next(each for each in found if each is not None)
        return scales

    def assemble(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        weight: torch.Tensor = _rebuilt(self.param, parts[0], CB=parts[0], SCB=parts[1])
        return weight

    def set_parts(self, parts: Sequence[torch.Tensor]) -> None:
        if self.param.is_meta == parts[0].is_meta:
            self.param.data = parts[0]
            self.param.__dict__.update(CB=parts[0], SCB=parts[1])
        else:
            become(self.param, self.assemble(parts))
        for module in self.modules:
            if (state := getattr(module, "state", None)) is not None:
                state.CB = state.SCB = None

    def module_attributes(self, leaf: torch.Tensor) -> dict[str, object]:
        # the module's forward moves the codes there, and an autograd context keeps it
        state = next((module.state for module in self.modules if hasattr(module, "state")), None)
        return {} if state is None else {"state": copy.copy(state)}

    @property
    def structure(self) -> object:
        states = [module.state for module in self.modules if hasattr(module, "state")]
        return [
            {name: value for name, value in vars(state).items() if not isinstance(value, torch.Tensor)}
            for state in states
        ]

    @property
    def kind(self) -> str:
        return "bitsandbytes int8"
