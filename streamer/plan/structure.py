"""What a layer computes by, apart from values: equal for layers that are copies of one."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from streamer.engine.inner import GUARDS
from streamer.engine.unit import Unit

#: Names under which layers keep which of them they are, on which nothing depends that they compute.
NUMBERS = {"layer_idx", "layer_id", "layer_number", "layer_index", "block_idx", "block_index"}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_PLAIN = (int, float, str, bool, type(None), torch.dtype)


@dataclass(frozen=True)
class Kind:
    """What a tensor is, but for its values."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = False

    @staticmethod
    def of(tensor: torch.Tensor) -> Kind:
        """The kind of ``tensor``."""
        return Kind(tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad)

    def make(self) -> torch.Tensor:
        """A tensor of this kind, on the meta device."""
        tensor = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")
        return tensor.requires_grad_(self.requires_grad)


class Numbers:
    """Objects by number, in the order in which they were met first: the same ones for copies of a model whose
    layers are gone through in the same order."""

    def __init__(self) -> None:
        self._met: dict[int, tuple[int, object]] = {}

    def of(self, value: object) -> int:
        """The number of an object, which is kept alive: its identity is not to be another's."""
        return self._met.setdefault(id(value), (len(self._met), value))[0]


def structure_of(unit: Unit, numbers: Numbers) -> Hashable:
    """The structure of a layer: its modules, their attributes and hooks, the layout of its parameters. What
    cannot be compared goes by its number among ``numbers``."""
    layout = [
        (slice.offset, slice.param.shape, slice.param.dtype, slice.param.trainable)
        for slice in unit.layout.slices
    ]
    names = {module: name for name, module in unit.module.named_modules()}
    ties = [[(names[module], name) for module, name in owners] for owners in unit.owners]
    modules = [(name, type(module), *_own(module, numbers)) for module, name in names.items()]
    return repr((layout, ties, modules))


def _own(module: nn.Module, numbers: Numbers) -> list[Any]:
    """What a module computes by, beside parameters and children."""
    found: list[Any] = [(name, _plain(value, numbers)) for name, value in module._buffers.items()]
    for name, value in vars(module).items():
        if name in _HOOKS:
            found += [numbers.of(hook) for hook in value.values()]
        elif name not in NUMBERS and name not in (*GUARDS, "forward") and not name.endswith(_SKIPPED):
            found.append((name, _plain(value, numbers)))
    return found


#: Dictionaries of PyTorch's own that say nothing of what is computed.
_SKIPPED = (
    "_hooks",
    "_hooks_with_kwargs",
    "_hooks_always_called",
    "_parameters",
    "_buffers",
    "_modules",
    "_set",
)


def _plain(value: object, numbers: Numbers) -> object:
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, torch.Tensor):
        return Kind.of(value)
    if isinstance(value, list | tuple):
        return [_plain(item, numbers) for item in value]
    return numbers.of(value)
