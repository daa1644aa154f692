"""Buffers, and tensors in attributes, that a layer's forward changes: the second run starts from the same
values as the first. Batch normalisation updates its statistics, and a recurrent layer may keep its state in
an attribute. Under `torch.utils.checkpoint` such a layer would count twice, or continue from the state after
the first run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from streamer.engine.tensors.nested import version_of

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
