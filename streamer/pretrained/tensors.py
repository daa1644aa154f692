"""A model's parameters and buffers, each with where its values come from."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

import torch
from torch import nn

from streamer.files.errors import shortened
from streamer.pretrained.sources import Matched, Source
from streamer.units import DTYPES


class Tensors:
    """What of a model is in files. ``missing`` and ``computed`` are in none: see `Matched`."""

    def __init__(self, model: nn.Module, matched: Matched) -> None:
        self._model = model
        self._matched = matched
        self._sources: dict[torch.Tensor, Source] = {}
        for tensor, aliases in matched.names.items():
            for name in aliases:
                if name in matched.sources:
                    self._sources.setdefault(tensor, matched.sources[name])
        first = {aliases[0]: tensor for tensor, aliases in matched.names.items()}
        self.missing = {first[name] for name in matched.missing}
        self.computed = {first[name] for name in matched.computed}

    def name(self, tensor: torch.Tensor) -> str:
        return self._matched.names[tensor][0]

    def source(self, tensor: torch.Tensor) -> Source | None:
        return self._sources.get(tensor)

    def faults(self, *, may_be_missing: bool) -> list[str]:
        """What speaks against reading the files into this model, each with the names of the tensors."""
        missing = [] if may_be_missing else self._matched.missing
        listed = {
            "missing (give init= to make new ones)": missing,
            "unexpected (give ignore= patterns for those to leave out)": self._matched.unexpected,
            "of another shape": self._misshapen(),
            "of a dtype that is not streamed": self._unreadable(),
            "tied here, and different in the files (give a config that does not tie them)": self._differing(),
        }
        return [f"{what}: {shortened(names)}" for what, names in listed.items() if names]

    def _misshapen(self) -> list[str]:
        return [
            f"{name} ({list(source.shape)} in {source.files}, {list(tensor.shape)} here)"
            for tensor, name, source in self._in_files()
            if source.shape != tuple(tensor.shape)
        ]

    def _unreadable(self) -> list[str]:
        return [
            f"{name} ({source.dtype})"
            for tensor, name, source in self._in_files()
            if isinstance(tensor, nn.Parameter) and source.dtype not in DTYPES
        ]

    def _differing(self) -> list[str]:
        """Names that stand for one tensor here and for different ones in the files."""
        return [
            name
            for tensor, name, source in self._in_files()
            if source is not (first := self._sources[tensor])
            and source.shape == first.shape
            and not torch.equal(source.read(), first.read())
        ]

    def _in_files(self) -> Iterable[tuple[torch.Tensor, str, Source]]:
        sources = self._matched.sources
        for tensor, aliases in self._matched.names.items():
            yield from ((tensor, name, sources[name]) for name in aliases if name in sources)

    def take_dtypes(self, streamed: torch.dtype | None) -> None:
        """Let parameters and floating-point buffers have the dtypes of the files, parameters that are in none
        the commonest.

        Where the parameters are to be ``streamed`` in another dtype, those that are shorter get that, which
        loses nothing; buffers keep the dtype that the model was built with, but for those that a model of the
        transformers library wants in fp32 beside such parameters (the biases of routers).
        """
        params = list(self._model.parameters())
        usual = commonest([(source.dtype, p.numel()) for p in params if (source := self.source(p))])
        for param in params:
            source = self.source(param)
            dtype = source.dtype if source else usual or param.dtype
            param.data = param.data.to(torch.promote_types(dtype, streamed or dtype))
        plan = getattr(self._model, "_get_dtype_plan", None)
        wide = [rule.replace("*", ".*") for rule in (plan(streamed) if plan and streamed else ())]
        for buffer in self._model.buffers():
            source = self.source(buffer)
            if source is None or not (buffer.is_floating_point() and source.dtype.is_floating_point):
                continue
            if streamed is None:
                buffer.data = buffer.data.to(source.dtype)
            elif any(re.search(rule, self.name(buffer)) for rule in wide):
                buffer.data = buffer.data.to(torch.float32)

    def fill_buffers(self, module: nn.Module) -> None:
        """Read the buffers of ``module`` and of all modules in it."""
        with torch.no_grad():
            for buffer in module.buffers():
                if (source := self.source(buffer)) is not None:
                    buffer.copy_(source.read())


def commonest(dtypes: Iterable[tuple[torch.dtype, int]]) -> torch.dtype | None:
    """The dtype of most elements, of those that can be streamed; None where there is none."""
    count: Counter[torch.dtype] = Counter()
    for dtype, numel in dtypes:
        if dtype in DTYPES:
            count[dtype] += numel
    return count.most_common(1)[0][0] if count else None
