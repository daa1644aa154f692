"""The files' tensors that belong to each parameter and buffer of a model, and functions that read them."""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from streamer.checkpoint.tensors import in_a_line
from streamer.errors import CheckpointError, shortened
from streamer.model.init import exchange
from streamer.model.units import DTYPES, kept_dtype
from streamer.pretrained.architecture import Joining, Pieces, of_library
from streamer.pretrained.files import Stored
from streamer.quantized.parts import parts_of


@dataclass(frozen=True)
class Source:
    """The source of a tensor of the model: the names of the files, and the function that reads it, on the
    CPU; its ``pieces``, the stored tensors whose elements are its own, one after the other; and all stored
    tensors that it is ``made_of``, in any order. Without ``pieces`` it is converted in another way. For a
    quantized parameter ``quantized`` reads such a one to a device. [Note: parts]"""

    dtype: torch.dtype
    shape: tuple[int, ...]
    files: str
    read: Callable[[], torch.Tensor]
    pieces: Pieces = ()
    made_of: Pieces = ()
    quantized: Callable[[torch.device], nn.Parameter] | None = None

    @property
    def stored(self) -> Stored | None:
        """The one stored tensor that is equal to this one, if there is one."""
        is_one = len(self.pieces) == 1 and self.pieces[0].shape == self.shape
        return self.pieces[0] if is_one else None


class Tensors:
    """The tensors of a model, and the ``stored`` tensors for each, by the model's own names and, for a model
    of the transformers library, by that library's rules.

    ``missing`` are the tensors that are in no file. Those of ``computed`` are in none either, but their class
    computes their values. Stored tensors with a match of one of the patterns ``ignored`` are left out.

    Raises ValueError for a wrong pattern, CheckpointError for stored tensors that cannot be converted.
    """

    def __init__(self, model: nn.Module, stored: Mapping[str, Stored], ignored: str | Sequence[str]) -> None:
        patterns = compiled([ignored] if isinstance(ignored, str) else ignored, "ignore")
        wanted = {name: it for name, it in stored.items() if not any(rule.search(name) for rule in patterns)}
        self._model = model
        self._names = names_of(model)
        here = {name: tensor for tensor, aliases in self._names.items() for name in aliases}
        of_transformers = of_library(model)
        self._by_name, unexpected = (_by_rules if of_transformers else _by_name)(model, wanted, here)
        self._sources: dict[torch.Tensor, Source] = {}
        for tensor, _, source in self._in_files():
            self._sources.setdefault(tensor, source)
        absent = {aliases[0]: t for t, aliases in self._names.items() if t not in self._sources}
        allowed = SimpleNamespace(missing_keys=set(absent), unexpected_keys=set(unexpected.values()))
        if of_transformers:
            model._adjust_missing_and_unexpected_keys(allowed)  # type: ignore[operator]
        self.missing = {tensor: name for name, tensor in absent.items() if name in allowed.missing_keys}
        self.computed = {tensor for name, tensor in absent.items() if name not in allowed.missing_keys}
        self._unexpected = [name for name, target in unexpected.items() if target in allowed.unexpected_keys]
        #: parameters without values that were added later
        self.added: set[torch.Tensor] = set()

    def add(self, name: str, param: nn.Parameter) -> None:
        """Register a parameter that was added to the model under ``name``. Its values, unless it is on the
        meta device, are kept, and it moves to the meta device."""
        self._names[param] = [name]
        if param.is_meta:
            self.added.add(param)
            return
        values = param.detach().clone()
        exchange(name, param, torch.empty_like(param, device="meta"))
        self._sources[param] = Source(values.dtype, tuple(values.shape), "adapt=", lambda: values)

    def quantize(
        self, param: nn.Parameter, quantized: nn.Parameter, read: Callable[[torch.device], nn.Parameter]
    ) -> None:
        """Register that ``quantized`` replaces ``param`` in the model; ``read`` returns such a one with
        values, on a device."""
        self._names[quantized] = self._names.pop(param)
        self._sources[quantized] = replace(self._sources.pop(param), quantized=read)

    def read_into(self, param: nn.Parameter) -> bool:
        """Set the values of ``param``; returns whether the files have them."""
        if (source := self.source(param)) is None:
            return False
        if source.quantized is None:
            param.copy_(source.read())
        else:
            own = parts_of(param)
            for part, values in zip(own, parts_of(source.quantized(own[0].device)), strict=True):
                part.copy_(values)
        return True

    def name(self, tensor: torch.Tensor) -> str:
        return self._names[tensor][0]

    def source(self, tensor: torch.Tensor) -> Source | None:
        return self._sources.get(tensor)

    def faults(self, *, may_be_missing: bool) -> list[str]:
        """The faults that prevent reading the files into this model, each with the names of the tensors."""
        in_files = list(self._in_files())
        misshapen = [
            f"{name} ({list(source.shape)} in {source.files}, {list(tensor.shape)} here)"
            for tensor, name, source in in_files
            if source.shape != tuple(tensor.shape)
        ]
        unreadable = [
            f"{name} ({source.dtype})"
            for tensor, name, source in in_files
            if isinstance(tensor, nn.Parameter) and source.dtype not in DTYPES
        ]
        differing = [
            name
            for tensor, name, source in in_files
            if source is not (first := self._sources[tensor])
            and source.shape == first.shape
            and not torch.equal(source.read(), first.read())
        ]
        listed = {
            "missing (set init= to initialise them)": [] if may_be_missing else [*self.missing.values()],
            "unexpected (set ignore= to patterns to leave them out)": self._unexpected,
            "of another shape": misshapen,
            "of an unsupported dtype (convert them to bfloat16 first)": unreadable,
            "tied here, and different in the files (use a config that does not tie them)": differing,
        }
        return [f"{what}: {shortened(names)}" for what, names in listed.items() if names]

    def _in_files(self) -> Iterable[tuple[torch.Tensor, str, Source]]:
        sources = self._by_name
        for tensor, aliases in self._names.items():
            yield from ((tensor, name, sources[name]) for name in aliases if name in sources)

    def take_dtypes(self, streamed: torch.dtype | None) -> None:
        """Set parameters and floating-point buffers to the dtypes of the files; parameters that are in no
        file get the commonest.

        If the parameters are to be ``streamed`` in another dtype, shorter ones get that, which loses nothing;
        buffers keep the dtype of the model's construction. Tensors that the transformers library keeps in
        another dtype have at least that (routers, and their biases).
        """
        params = list(self._model.parameters())
        usual = commonest([(source.dtype, p.numel()) for p in params if (source := self.source(p))])
        for param in params:
            source = self.source(param)
            dtype = source.dtype if source else usual or param.dtype
            wanted = kept_dtype(param) or streamed or dtype
            param.data = param.data.to(torch.promote_types(dtype, wanted))
        for buffer in self._model.buffers():
            source = self.source(buffer)
            if source is None or not (buffer.is_floating_point() and source.dtype.is_floating_point):
                continue
            if streamed is None and kept_dtype(buffer) is None:
                buffer.data = buffer.data.to(source.dtype)

    def fill_buffers(self, module: nn.Module) -> None:
        """Read the buffers of ``module`` and of all modules in it."""
        with torch.no_grad():
            for buffer in module.buffers():
                if (source := self.source(buffer)) is not None:
                    buffer.copy_(source.read())


def compiled(patterns: Sequence[str], argument: str) -> list[re.Pattern[str]]:
    """Raises ValueError, naming the ``argument``, for an invalid regular expression."""
    try:
        return [re.compile(pattern) for pattern in patterns]
    except (re.error, TypeError) as error:
        raise ValueError(f"{argument}={patterns!r}: use regular expressions ({error})") from error


def names_of(model: nn.Module) -> dict[torch.Tensor, list[str]]:
    """The parameters and persistent buffers, with all their names, those of ``state_dict`` first."""
    known = {*model.parameters(), *model.buffers()}
    named = [
        (name, tensor)
        for name, tensor in model.state_dict(keep_vars=True).items()
        if isinstance(tensor, torch.Tensor) and tensor in known
    ]
    names: dict[torch.Tensor, list[str]] = {}
    for name, tensor in dict([*named, *model.named_parameters(remove_duplicate=False)]).items():
        names.setdefault(tensor, []).append(name)
    return names


#: Sources by the model's names; the names of unused tensors in the files, each with its name here.
_Found = tuple[dict[str, Source], dict[str, str]]


def _by_name(model: nn.Module, stored: Mapping[str, Stored], here: Mapping[str, torch.Tensor]) -> _Found:
    sources = {name: _direct(it) for name, it in stored.items() if name in here}
    return sources, {name: name for name in sorted(stored) if name not in here}


def _by_rules(model: Any, stored: Mapping[str, Stored], here: dict[str, torch.Tensor]) -> _Found:
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
    conversions: dict[str, _Conversion] = {}
    unexpected: dict[str, str] = {}
    for name in sorted(stored, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, here)
        if target not in here and name in here:
            target, pattern = rename_source_key(name, [], [], model.base_model_prefix, here)
        if target not in here or target in sources:
            unexpected[name] = target
        elif pattern is None:
            sources[target] = _direct(stored[name])
        else:
            conversion = conversions.setdefault(target, _Conversion(model, by_pattern[pattern], target))
            conversion.parts.append((pattern, stored[name]))
    for conversion in conversions.values():
        for name, source in conversion.sources().items():
            if name in here and name not in sources:
                sources[name] = source
            else:
                unexpected[name] = name
    return sources, unexpected


def _direct(stored: Stored) -> Source:
    """A tensor that is equal to one in its file."""
    return Source(stored.dtype, stored.shape, stored.file.name, stored.read, (stored,), (stored,))


@dataclass
class _Conversion:
    """Tensors that the transformers library computes from others: ``parts`` are those of the files by the
    pattern that they match (the experts of a layer, which become one tensor)."""

    model: nn.Module
    converter: Any
    target: str
    parts: list[tuple[str, Stored]] = field(default_factory=list)
    _results: dict[str, torch.Tensor] = field(default_factory=dict)

    def sources(self) -> dict[str, Source]:
        """The sources of the results, by name. Their shapes are found without reading values."""
        files = ", ".join(sorted({stored.file.name for _, stored in self.parts}))
        joining = Joining()
        try:
            with joining:
                results = self._convert(joining.empty)
        except Exception as error:  # any error of the library for shapes that do not fit together
            names = shortened([stored.name for _, stored in self.parts])
            raise CheckpointError(
                f"'{self.target}' cannot be converted from {files} ({in_a_line(error)}): {names}"
            ) from error
        return {
            name: Source(
                tensor.dtype,
                tuple(tensor.shape),
                files,
                partial(self._read, name),
                joining.pieces(tensor),
                tuple(stored for _, stored in self.parts),
            )
            for name, tensor in results.items()
        }

    def _read(self, name: str) -> torch.Tensor:
        if name not in self._results:
            self._results = self._convert(lambda stored: stored.read())
        return self._results.pop(name)

    def _convert(self, read: Callable[[Stored], torch.Tensor]) -> dict[str, torch.Tensor]:
        converter = copy.deepcopy(self.converter)
        for pattern, stored in self.parts:
            converter.add_tensor(self.target, stored.name, pattern, partial(read, stored))
        results = converter.convert(self.target, model=self.model, config=self.model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in results.items()}


def commonest(dtypes: Iterable[tuple[torch.dtype, int]]) -> torch.dtype | None:
    """The dtype of most elements, of those that can be streamed; None if there is none."""
    count: Counter[torch.dtype] = Counter()
    for dtype, numel in dtypes:
        if dtype in DTYPES:
            count[dtype] += numel
    return count.most_common(1)[0][0] if count else None
