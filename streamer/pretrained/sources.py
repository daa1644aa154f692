"""Which tensors of the files belong to which tensors of a model."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from streamer.files.shards import Stored

#: What reads a tensor of the model, on the CPU, by the model's name for it.
Read = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Source:
    """Where a tensor of the model comes from."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    files: str
    read: Read


def direct(stored: Stored) -> Source:
    """A tensor as it is in its file."""
    return Source(stored.dtype, stored.shape, stored.file.name, stored.read)


@dataclass
class Conversion:
    """Tensors that the transformers library makes of others: ``parts`` are those of the files by the pattern
    that they match (the experts of a layer, of which it makes one tensor)."""

    model: nn.Module
    converter: Any
    target: str
    parts: list[tuple[str, Stored]] = field(default_factory=list)
    _made: dict[str, torch.Tensor] = field(default_factory=dict)

    def sources(self) -> dict[str, Source]:
        """Those that come out, by name. Their shapes are found out without reading anything."""
        shapes = self._convert(lambda stored: torch.empty(stored.shape, dtype=stored.dtype, device="meta"))
        files = ", ".join(sorted({stored.file.name for _, stored in self.parts}))
        return {
            name: Source(tensor.dtype, tuple(tensor.shape), files, partial(self._read, name))
            for name, tensor in shapes.items()
        }

    def _read(self, name: str) -> torch.Tensor:
        if name not in self._made:
            self._made.update(self._convert(Stored.read))
        return self._made.pop(name)

    def _convert(self, read: Callable[[Stored], torch.Tensor]) -> dict[str, torch.Tensor]:
        converter = copy.deepcopy(self.converter)
        for pattern, stored in self.parts:
            converter.add_tensor(self.target, stored.name, pattern, partial(read, stored))
        made = converter.convert(self.target, model=self.model, config=self.model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


@dataclass(frozen=True)
class Matched:
    """Sources by the model's names, and what no tensor of the model is made of."""

    sources: dict[str, Source]
    unexpected: list[str]


def match(model: nn.Module, stored: Mapping[str, Stored], ignored: Sequence[str]) -> Matched:
    """The source of each tensor of ``model``, which has the files' names, or the transformers library's for
    them. Names that one of the ``ignored`` patterns is found in are left out."""
    names = {name for name in stored if not any(re.search(pattern, name) for pattern in ignored)}
    here: dict[str, torch.Tensor] = dict(model.state_dict(keep_vars=True))
    if hasattr(model, "base_model_prefix"):
        return _of_transformers(model, {name: stored[name] for name in names}, here)
    return Matched(
        {name: direct(stored[name]) for name in here if name in names}, sorted(names - here.keys())
    )


def _of_transformers(model: Any, stored: Mapping[str, Stored], here: dict[str, torch.Tensor]) -> Matched:
    # the library's own rules: other names, other layouts, a body's weights in a model with a head
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    rules = get_model_conversion_mapping(model)
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    sources: dict[str, Source] = {}
    conversions: dict[str, Conversion] = {}
    unexpected = []
    for name in sorted(stored, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, here)
        if target not in here and name in here:
            target, pattern = name, None
        if target not in here:
            unexpected.append(name)
        elif pattern is None:
            sources[target] = direct(stored[name])
        else:
            rule = conversions.setdefault(target, Conversion(model, by_pattern[pattern], target))
            rule.parts.append((pattern, stored[name]))
    for conversion in conversions.values():
        sources |= conversion.sources()
    ignorable = model._keys_to_ignore_on_load_unexpected or ()
    return Matched(
        sources, [name for name in unexpected if not any(re.search(rule, name) for rule in ignorable)]
    )
