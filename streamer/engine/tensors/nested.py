"""Extracts tensors from the nested arguments and results of layers, and puts others in their place."""

from __future__ import annotations

import copy
import dataclasses
import operator
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from functools import partial
from types import FunctionType, ModuleType
from typing import Any

import torch

Tensors = Sequence[torch.Tensor]
Rebuild = Callable[[Sequence[torch.Tensor]], Any]


class _Hole(int):
    """Stands for the tensor of this number."""

    __slots__ = ()


def flatten(value: object) -> tuple[list[torch.Tensor], Rebuild]:
    """The tensors in ``value``, and a function that rebuilds the value around other tensors. It searches
    tuples, named tuples, lists, dicts and other mutable mappings, and dataclasses. A tensor in several places
    is extracted once, so that ``query is key`` stays true. Lists and mappings are new objects, so that the
    layer may add to them.
    """
    tensors: list[torch.Tensor] = []
    holes: dict[int, _Hole] = {}

    def take(leaf: object) -> object:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if id(leaf) not in holes:
            holes[id(leaf)] = _Hole(len(tensors))
            tensors.append(leaf)
        return holes[id(leaf)]

    return tensors, partial(_fill, _map(take, value))


def _fill(skeleton: Any, tensors: Tensors) -> Any:
    """``skeleton`` with ``tensors`` in place of its holes."""
    return _map(lambda leaf: tensors[leaf] if type(leaf) is _Hole else leaf, skeleton)


def version_of(tensor: torch.Tensor) -> int:
    """The number of in-place writes to ``tensor``; 0 for tensors of inference mode, which do not count."""
    # called several times for each use of a layer; `is_inference` takes longer than to try
    try:
        return tensor._version
    except RuntimeError:
        return 0


def constants(value: object) -> list[object]:
    """The leaves of ``value`` in a form that can be compared: numbers, strings and None as they are; of
    others, and of tensors, the type."""
    found: list[object] = []

    def note(leaf: object) -> object:
        found.append(leaf if isinstance(leaf, int | float | complex | str | bytes | None) else type(leaf))
        return leaf

    _map(note, value)
    return found


def walk(values: Iterable[Any]) -> Iterator[Any]:
    """The items of ``values`` in order, with lists, tuples and dicts replaced by their items."""
    for value in values:
        if isinstance(value, list | tuple):
            yield from walk(value)
        elif isinstance(value, dict):
            yield from walk(value.values())
        else:
            yield value


def reachable(value: object) -> list[torch.Tensor]:
    """The tensors that can be reached from ``value``, also through the attributes of any object, each as
    often as it occurs."""
    tensors: list[torch.Tensor] = []
    entered: set[int] = set()
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, torch.Tensor):
            tensors.append(item)
        elif id(item) not in entered and not isinstance(item, _OPAQUE):
            entered.add(id(item))
            stack.extend(_children(item))
    return tensors


#: Types without argument tensors, or with far too many other objects.
_OPAQUE = (str, bytes, int, float, complex, type(None), type, ModuleType, FunctionType, torch.nn.Module)


def _children(value: object) -> Iterable[object]:
    if isinstance(value, list | tuple | set):
        return value
    if isinstance(value, dict):
        return list(value.values())
    return list(getattr(value, "__dict__", {}).values())


_SEQUENCES = (tuple, list)
#: The types of most leaves, tested first.
_LEAVES = frozenset({torch.Tensor, _Hole, type(None), bool, int, float, str})


def _map(function: Callable[[Any], object], value: Any) -> Any:
    """``value`` with ``function`` applied to its leaves. Lists and mappings are new objects, others only if a
    leaf changes."""
    kind = type(value)
    if kind in _LEAVES:
        return function(value)
    if kind is dict:
        return {key: _map(function, child) for key, child in value.items()}
    if isinstance(value, _SEQUENCES):
        children = [_map(function, child) for child in value]
        if kind is list:
            return children
        if isinstance(value, tuple) and all(map(operator.is_, children, value)):
            return value
        return type(value)(*children) if hasattr(value, "_fields") else type(value)(children)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        items: MutableMapping[Any, Any] = {
            field.name: getattr(value, field.name) for field in dataclasses.fields(value)
        }
    elif isinstance(value, MutableMapping):
        items = value
    else:
        return function(value)
    changed = {key: new for key, old in items.items() if (new := _map(function, old)) is not old}
    if not changed and items is not value:
        return value
    result = copy.copy(value)
    for key, new in changed.items():
        if items is not value:
            object.__setattr__(result, key, new)
        if isinstance(result, dict):
            # a dataclass that is also a dict (outputs of Hugging Face) has its fields in both ways
            dict.__setitem__(result, key, new)
        elif items is value:
            result[key] = new
    return result
