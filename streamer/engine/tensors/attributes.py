"""What the attributes of a layer's modules contain: counts in a dict, a list that grows, a generator."""

from __future__ import annotations

import dataclasses
import operator
import random
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from streamer.engine.tensors.nested import version_of

#: What every module of a wrapped model has of its own in place of its class's.
GUARDS = ("_apply", "__deepcopy__", "__reduce_ex__", "zero_grad")
#: Attributes that every module has. Parameters, buffers and hooks among them are handled elsewhere.
_OWN = frozenset(vars(nn.Module()))
#: Attributes that no forward exchanges for others: dicts of hooks, which it may write, and what `wrap` has
#: set.
FIXED = (_OWN - {"training", "_parameters", "_buffers", "_modules"}).union(GUARDS)
_MAPPINGS = frozenset((dict, OrderedDict, defaultdict, Counter))
_SEQUENCES = frozenset((list, deque))
_NUMBERS = frozenset((bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device))

#: Random generators that have a state of their own.
Generator = torch.Generator | random.Random | np.random.Generator | np.random.RandomState
_GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)


def contents_of(attributes: Mapping[nn.Module, Mapping[str, Any]]) -> list[Any]:
    """Of modules' attributes the values that are containers, tensors, generators, or tuples, which may hold
    some."""
    return [
        value
        for values in attributes.values()
        for name in values.keys() - _OWN
        if type(value := values[name]) not in _NUMBERS
        and (isinstance(value, (torch.Tensor, tuple, *_GENERATORS)) or _copy(value) is not None)
    ]


class Contents:
    """The containers among ``values`` and inside of them, each with a copy of what it holds now.

    Containers are dicts, lists, deques, sets, dataclasses and `SimpleNamespace`; tuples are searched too.
    """

    def __init__(self, values: Iterable[Any]) -> None:
        self.tensors: list[torch.Tensor] = []
        self.generators: list[Generator] = []
        self._held: list[tuple[Any, Any]] = []
        seen: set[int] = set()
        for value in values:
            self._look(value, seen)

    def _look(self, value: Any, seen: set[int]) -> None:
        stack = [value]
        while stack:
            value = stack.pop()
            kind = type(value)
            if kind in _NUMBERS or id(value) in seen:
                continue
            seen.add(id(value))
            if isinstance(value, torch.Tensor):
                self.tensors.append(value)
            elif isinstance(value, _GENERATORS):
                self.generators.append(value)
            elif kind is tuple:
                stack.extend(value)
            elif (held := _copy(value)) is not None:
                self._held.append((value, held))
                stack.extend(held.values() if isinstance(held, dict) else held)

    def put_back(self) -> None:
        """Let the containers hold what they held when this object was made."""
        _fill(self._held)

    def again(self) -> AbstractContextManager[None]:
        """Let the containers hold, inside the block, what they held when this object was made."""
        return self._again() if self._held else nullcontext()

    @contextmanager
    def tensors_as_now(self) -> Iterator[None]:
        """Let the tensors among them have, after the block, the values that they have before it."""
        plain = [tensor for tensor in self.tensors if not isinstance(tensor, nn.Parameter)]
        before = [(tensor, version_of(tensor), tensor.detach().clone()) for tensor in plain]
        try:
            yield
        finally:
            with torch.no_grad():
                for tensor, version, values in before:
                    # nobody counts the writes in inference mode
                    if version_of(tensor) != version or torch.is_inference_mode_enabled():
                        tensor.copy_(values)

    @contextmanager
    def _again(self) -> Iterator[None]:
        now = [(container, _copy(container)) for container, _ in self._held]
        try:
            self.put_back()
            yield
        finally:
            _fill(now)


def _copy(value: Any) -> dict[Any, Any] | list[Any] | set[Any] | None:
    """What a container holds; None if ``value`` is no container."""
    kind = type(value)
    if kind in _MAPPINGS:
        return dict(value)
    if kind in _SEQUENCES:
        return list(value)
    if kind is set:
        return set(value)
    if kind is SimpleNamespace or (dataclasses.is_dataclass(value) and hasattr(value, "__dict__")):
        # the dataclass itself, not an instance: it has no contents to put back
        return None if isinstance(value, type) else dict(vars(value))
    return None


def _fill(contents: Iterable[tuple[Any, Any]]) -> None:
    """Let each container hold what its copy holds."""
    for container, held in contents:
        now = _copy(container)
        if now is not None and _is_same(now, held):
            continue
        kind = type(container)
        inside = container if kind in _MAPPINGS or kind in _SEQUENCES or kind is set else vars(container)
        inside.clear()
        if kind in _SEQUENCES:
            inside.extend(held)
        else:
            inside.update(held)


def _is_same(one: Any, other: Any) -> bool:
    """Whether two copies of a container hold the same objects."""
    if len(one) != len(other):
        return False
    if isinstance(one, set):
        return bool(one == other)
    if isinstance(one, dict):
        return all(map(operator.is_, one, other)) and all(map(operator.is_, one.values(), other.values()))
    return all(map(operator.is_, one, other))
