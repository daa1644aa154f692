"""Tensors of layers: in nested arguments and results, in the layers' modules, and kept for backward.

A layer's forward may change buffers, and tensors in attributes of its modules. Batch normalisation updates
its statistics, and a recurrent layer may keep its state in an attribute. Under `torch.utils.checkpoint` such
a layer would count twice, or continue from the state after the first run. So the second run starts from the
values that the first run has found.
"""

from __future__ import annotations

import copy
import dataclasses
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn

from streamer.backends.base import Lock
from streamer.quantized.parts import plain_parts
from streamer.torch_private import storage_bytes, storage_id

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


#: One buffer or attribute of a module: the module's dict, the name, the tensor, its version, a copy of its
#: values.
_Entry = tuple[dict[str, Any], str, torch.Tensor | None, int, torch.Tensor | None]


class Taken(NamedTuple):
    """A snapshot of buffers and tensor attributes, which reports changes to its `ModuleState`."""

    of: ModuleState
    training: bool
    entries: list[_Entry]
    is_all: bool

    def changed(self) -> Taken | None:
        """The entries that were replaced or written since then; None if there are none."""
        changed = [entry for entry in self.entries if _has_changed(entry)]
        if self.is_all:
            self.of.learn(self.training, self.entries, changed)
        # PyTorch does not count all writes to a buffer (batch normalisation), so a module's entries count
        # together
        owners = {id(held) for held, *_ in changed}
        entries = [entry for entry in self.entries if id(entry[0]) in owners]
        return self._replace(entries=entries) if entries else None

    @contextmanager
    def again(self) -> Iterator[None]:
        """Run the block with copies of these. Afterwards the modules have the same tensors as before."""
        now = [(held, name, held.get(name)) for held, name, *_ in self.entries]
        try:
            for held, name, _, _, copy in self.entries:
                held[name] = None if copy is None else copy.clone()
            yield
        finally:
            for held, name, value in now:
                held[name] = value


class ModuleState:
    """The buffers and tensor attributes of ``module`` and its submodules. The first forward in each mode,
    training or evaluation, determines which of them change; later forwards copy only those."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        #: by mode, the entries that change
        self._known: dict[bool, list[tuple[dict[str, Any], str]]] = {}

    def take(self) -> Taken | None:
        """A snapshot of the entries that may change; None if there are none."""
        training = self._module.training
        places = self._known.get(training)
        if places is None:
            return self.take_all()
        return Taken(self, training, [_entry(held, name) for held, name in places], False) if places else None

    def take_all(self) -> Taken:
        """A snapshot of all entries."""
        entries = [_entry(held, name) for held, name in self._places()]
        return Taken(self, self._module.training, entries, True)

    def learn(self, training: bool, before: list[_Entry], changed: list[_Entry]) -> None:
        """The first forward in this mode has ``changed`` these of the entries ``before``."""
        places = [(held, name) for held, name, *_ in changed]
        owners = {id(held) for held, _ in places}
        known = {(id(held), name) for held, name, *_ in before}
        new = [(held, name) for held, name in self._places() if (id(held), name) not in known]
        rest = [(held, name) for held, name, *_ in before if id(held) in owners]
        self._known[training] = [*rest, *new]

    def _places(self) -> list[tuple[dict[str, Any], str]]:
        found = [(module._buffers, name) for module in self._module.modules() for name in module._buffers]
        attributes = [
            (vars(module), name)
            for module in self._module.modules()
            for name, value in vars(module).items()
            if isinstance(value, torch.Tensor) or (value is None and name not in _OWN)
        ]
        return [*found, *attributes]


#: Attributes of every module that may be None.
_OWN = frozenset(vars(nn.Module()))


def _entry(held: dict[str, Any], name: str) -> _Entry:
    value = held.get(name)
    if not isinstance(value, torch.Tensor):
        return held, name, None, 0, None
    return held, name, value, version_of(value), value.detach().clone()


def _has_changed(entry: _Entry) -> bool:
    held, name, value, version, _ = entry
    now = held.get(name)
    if not isinstance(now, torch.Tensor):
        return value is not None
    return now is not value or version_of(now) != version


class Saved(NamedTuple):
    """A tensor that a graph has saved. With hooks for saved tensors, PyTorch does not check that it is not
    written."""

    tensor: torch.Tensor
    version: int

    @staticmethod
    def now(tensor: torch.Tensor) -> Saved:
        return Saved(tensor, tensor._version)

    def unchanged(self) -> torch.Tensor:
        """The tensor. Raises RuntimeError if it was written since it was saved."""
        if self.tensor._version != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace "
                f"operation: a tensor of shape {tuple(self.tensor.shape)} that a streamed layer has saved"
            )
        return self.tensor


def storages(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Bytes of each distinct storage under ``tensors``, by the storage's identity."""
    parts = (part for tensor in tensors for part in plain_parts(tensor))
    return {storage_id(part): storage_bytes(part) for part in parts}


class SavedBytes:
    """Counts the bytes of held storages, each once even if several objects hold it (a mask that every layer
    gets, an output that is the next layer's input)."""

    def __init__(self) -> None:
        self.now = 0
        self.peak = 0
        self._holders: Counter[int] = Counter()
        # the garbage collector may release in any thread, in the middle of `hold` too
        self._lock = Lock()

    def hold(self, held: Mapping[int, int]) -> Held:
        """Count ``held`` (as from `storages`) until the returned object is gone."""
        with self._lock:
            for storage, nbytes in held.items():
                self._holders[storage] += 1
                if self._holders[storage] == 1:
                    self.now += nbytes
            self.peak = max(self.peak, self.now)
        return Held(self, held)

    def release(self, held: Mapping[int, int]) -> None:
        """Stop counting ``held``."""
        with self._lock:
            for storage, nbytes in held.items():
                self._holders[storage] -= 1
                if not self._holders[storage]:
                    del self._holders[storage]
                    self.now -= nbytes


class Held:
    """Storages that ``of`` counts as long as this object lives."""

    def __init__(self, of: SavedBytes, held: Mapping[int, int]) -> None:
        self._of = of
        self._held = held

    def __del__(self) -> None:
        self._of.release(self._held)
