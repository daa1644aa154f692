"""Layers that compute alike, whatever the values: how to tell them, and their outputs without running them.
Outputs that are made so have the same shapes, and share memory as the layer's own did.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from streamer.engine.handle import GUARDS
from streamer.engine.unit import Unit
from streamer.torch_private import is_sparse, storage_id

#: Attributes in which layers keep their own index, which changes nothing that they compute.
NUMBERS = {"layer_idx", "layer_id", "layer_number", "layer_index", "block_idx", "block_index"}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_PLAIN = (int, float, str, bool, type(None), torch.dtype)


@dataclass(frozen=True)
class Kind:
    """What a plan needs to know of a tensor: all but its values."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = False

    @staticmethod
    def of(tensor: torch.Tensor) -> Kind:
        """The kind of ``tensor``. Raises NotImplementedError for a sparse one: PyTorch computes nothing with
        sparse tensors on the meta device."""
        if is_sparse(tensor):
            raise NotImplementedError("PyTorch has no operations for sparse tensors without values")
        return Kind(tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad)

    def make(self) -> torch.Tensor:
        """A tensor of this kind, on the meta device."""
        tensor = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")
        return tensor.requires_grad_(self.requires_grad)


class Numbers:
    """Numbers objects in the order in which they are first met. Copies of a model get the same numbers if
    their layers are visited in the same order."""

    def __init__(self) -> None:
        self._met: dict[int, tuple[int, object]] = {}

    def of(self, value: object) -> int:
        """The number of an object. It is kept alive, so that no other object gets its ``id``."""
        return self._met.setdefault(id(value), (len(self._met), value))[0]


def structure_of(unit: Unit, numbers: Numbers) -> Hashable:
    """The structure of a layer: its modules, their attributes and hooks, the layout of its parameters. An
    object that cannot be compared is represented by its number in ``numbers``."""
    layout = [
        (slice.offset, slice.param.shape, slice.param.dtype, slice.param.trainable)
        for slice in unit.layout.slices
    ]
    names = {module: name for name, module in unit.module.named_modules()}
    ties = [[(names[module], name) for module, name in owners] for _, _, owners in unit.registered]
    parts = [(each.positions, each.composite.structure) for each in unit.in_parts]
    #: what modules have of weights that are made of parts
    skipped = {
        module: each.composite.attributes for each in unit.in_parts for module in each.composite.modules
    }
    modules = [
        (name, type(module), *_own(module, numbers, skipped.get(module, ())))
        for module, name in names.items()
    ]
    return repr((layout, ties, parts, modules))


def _own(module: nn.Module, numbers: Numbers, skipped: Collection[str]) -> list[Any]:
    """What a module's result depends on, beside parameters, children and attributes that are ``skipped``."""
    found: list[Any] = [(name, _plain(value, numbers)) for name, value in module._buffers.items()]
    for name, value in vars(module).items():
        if name in _HOOKS:
            found += [numbers.of(hook) for hook in value.values()]
        elif not (name in NUMBERS or name in skipped or name in _OURS or name.endswith(_SKIPPED)):
            found.append((name, _plain(value, numbers)))
    return found


#: What is set on modules of a wrapped model.
_OURS = {*GUARDS, "forward"}
#: How the names of PyTorch's own attributes end on which no result depends.
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


@dataclass(frozen=True)
class _Output:
    """An output: its kind, the number of its storage, and its offset there in bytes. In the storage of an
    input the offset counts from where that input begins."""

    kind: Kind
    offset: int
    storage: int


@dataclass
class _Storage:
    """A storage of outputs: its bytes, the index of an input that shares it, whether the graph keeps it."""

    nbytes: int
    given: int | None
    is_kept: bool = False


class OutputKinds:
    """The outputs, without values, of code that took the tensors ``given``."""

    def __init__(self, outputs: Sequence[torch.Tensor], given: Sequence[torch.Tensor]) -> None:
        numbers: dict[int, int] = {}
        self._storages: list[_Storage] = []
        self._alive: list[weakref.ref[torch.UntypedStorage]] = []
        of_given = {storage_id(tensor): index for index, tensor in enumerate(given)}
        self._outputs = []
        for output in outputs:
            storage = output.untyped_storage()
            number = numbers.setdefault(storage_id(output), len(numbers))
            if number == len(self._storages):
                self._storages.append(_Storage(storage.nbytes(), of_given.get(storage_id(output))))
                self._alive.append(weakref.ref(storage))
            source = self._storages[number].given
            offset = _offset(output) - (0 if source is None else _offset(given[source]))
            self._outputs.append(_Output(Kind.of(output), offset, number))

    def note_kept(self) -> int:
        """The bytes of outputs that the graph keeps. To be called once everybody else has dropped them: a
        storage that is still alive then is the graph's."""
        for storage, alive in zip(self._storages, self._alive, strict=True):
            storage.is_kept = storage.given is None and alive() is not None
        return sum(storage.nbytes for storage in self._storages if storage.is_kept)

    def make(self, given: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Outputs for other inputs of the same kinds, and those of their storages that the graph keeps."""
        bases = [
            torch.empty(storage.nbytes, dtype=torch.uint8, device="meta")
            if storage.given is None
            else given[storage.given]
            for storage in self._storages
        ]
        outputs = []
        # these views show memory that is counted already
        with _disable_current_modes():
            for output in self._outputs:
                kind, base = output.kind, bases[output.storage]
                offset = (_offset(base) + output.offset) // kind.dtype.itemsize
                tensor = torch.empty(0, dtype=kind.dtype, device="meta")
                tensor.set_(base.untyped_storage(), offset, kind.shape, kind.stride)
                outputs.append(tensor.requires_grad_(kind.requires_grad))
        kept = [base for base, storage in zip(bases, self._storages, strict=True) if storage.is_kept]
        return outputs, kept


def _offset(tensor: torch.Tensor) -> int:
    """Where ``tensor`` begins in its storage, in bytes."""
    return int(tensor.storage_offset()) * tensor.itemsize
