"""`from_pretrained`: a model from files, a layer at a time into host memory."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from streamer.files.errors import CheckpointError, shortened
from streamer.files.shards import stored_tensors
from streamer.find import Layers
from streamer.initialising import Init
from streamer.pretrained.architecture import ModelClass, build
from streamer.pretrained.sources import Source, match
from streamer.units import DTYPES
from streamer.wrapping import wrap


def from_pretrained(
    path: str | os.PathLike[str],
    model_class: ModelClass | None = None,
    layers: Layers = None,
    *,
    config: Any = None,
    init: Init | str | None = None,
    ignore: Sequence[str] = (),
    **options: Any,
) -> nn.Module:
    """A wrapped model with the weights of a local Hugging Face folder, or of a safetensors file.

    The weights go from the files, which are mapped and not read as a whole, into host memory, a layer at a
    time: the model is never whole anywhere else. Nothing is downloaded.

    Args:
        path: a folder with ``config.json`` and ``model.safetensors`` or several files with their index, or a
            safetensors file.
        model_class: a class of the transformers library, one of its Auto classes, or a function without
            arguments that makes a model whose ``state_dict`` has the files' names. None is the class that
            ``config.json`` names.
        layers: see `streamer.wrap`.
        config: the config of a transformers model in place of that in the folder, such as one with dropout.
        init: gives first values to modules whose parameters are not in the files, such as a new head: a
            function as for `streamer.wrap`, or the name of a method of the model (``"_init_weights"`` of
            transformers' models). Without it, what is missing is an error.
        ignore: regular expressions; tensors of the files are left out if one is found in their name.
        options: for `streamer.wrap`. ``dtype=None`` streams each parameter in the dtype that it has in the
            files.

    A transformers model is in evaluation mode, as that library's ``from_pretrained`` leaves it: call
    ``model.train()`` for dropout.

    Raises:
        CheckpointError: a ValueError that lists the tensors that are missing, unexpected, of another shape or
            in a file that is cut off, before anything is allocated.
        ValueError, MemoryError: what `streamer.wrap` raises, and for a path or class that cannot be used.
    """
    path = Path(path)
    if not path.exists():
        raise ValueError(f"{path}: there is no such file or folder; nothing is downloaded: give a local one")
    model = build(path, model_class, config, options.get("dtype"))
    stored = stored_tensors(path)
    matched = match(model, stored, ignore)
    tensors = _Tensors(model, matched.sources)
    initialise = getattr(model, init) if isinstance(init, str) else init
    if initialise is None and (computed := getattr(model, "_keys_to_ignore_on_load_missing", None)):
        # in no file, since their class computes them (sines of positions)
        tensors.missing = [n for n in tensors.missing if not any(re.search(rule, n) for rule in computed)]
        initialise = None if tensors.missing else model._init_weights
    faults = [
        *_fault("unexpected (give ignore= patterns for those to leave out)", matched.unexpected),
        *_fault("of another shape", tensors.misshapen),
        *_fault("tied here, and different in the files", tensors.differing()),
        *(_fault("missing (give init= to make new ones)", tensors.missing) if initialise is None else ()),
    ]
    if faults:
        raise CheckpointError(f"{path} is not of a {type(model).__name__}; {'; '.join(faults)}")
    if unread := [name for name, source in matched.sources.items() if source.dtype not in _READABLE]:
        raise CheckpointError(f"{path}: of a dtype that is not streamed: {shortened(unread)}")
    tensors.take_dtypes()
    tensors.fill_buffers(model)
    return wrap(model, layers=layers, init=_Loader(tensors, initialise), **options)


_READABLE = (*DTYPES, torch.int64, torch.int32, torch.bool)


def _fault(what: str, names: Sequence[str]) -> list[str]:
    return [f"{what}: {shortened(names)}"] if names else []


class _Tensors:
    """The model's parameters and buffers, each with its source."""

    def __init__(self, model: nn.Module, sources: Mapping[str, Source]) -> None:
        self._params = [param for _, param in model.named_parameters()]
        self._sources: dict[torch.Tensor, Source] = {}
        self._others: list[tuple[str, torch.Tensor, Source]] = []
        self.missing: list[str] = []
        self.misshapen: list[str] = []
        names: dict[torch.Tensor, list[str]] = {}
        for name, tensor in model.state_dict(keep_vars=True).items():
            names.setdefault(tensor, []).append(name)
        for tensor, aliases in names.items():
            found = [name for name in aliases if name in sources]
            if not found:
                self.missing.append(aliases[0])
                continue
            self._sources[tensor] = sources[found[0]]
            self._others += [(name, tensor, sources[name]) for name in found[1:]]
            self.misshapen += [
                f"{name} ({list(sources[name].shape)} in {sources[name].files}, {list(tensor.shape)} here)"
                for name in found
                if sources[name].shape != tuple(tensor.shape)
            ]

    def source(self, tensor: torch.Tensor) -> Source | None:
        return self._sources.get(tensor)

    def differing(self) -> list[str]:
        """Names that stand for one tensor here and for different ones in the files."""
        return [
            name
            for name, tensor, source in self._others
            if source.shape == self._sources[tensor].shape
            and not torch.equal(source.read(), self._sources[tensor].read())
        ]

    def take_dtypes(self) -> None:
        """Let parameters have the dtypes of the files, those that are in none the commonest."""
        count: Counter[torch.dtype] = Counter()
        for param in self._params:
            if (source := self._sources.get(param)) is not None:
                count[source.dtype] += param.numel()
        for param in self._params:
            source = self._sources.get(param)
            if source is not None:
                param.data = param.data.to(source.dtype)
            elif count:
                param.data = param.data.to(count.most_common(1)[0][0])

    def fill_buffers(self, module: nn.Module) -> None:
        """Read the buffers of ``module`` and of all modules in it."""
        with torch.no_grad():
            for buffer in module.buffers():
                if (source := self._sources.get(buffer)) is not None:
                    buffer.copy_(source.read())


class _Loader:
    """Reads the parameters of one module after another: an `Init`."""

    def __init__(self, tensors: _Tensors, init: Callable[[nn.Module], object] | None) -> None:
        self._tensors = tensors
        self._init = init
        self._read: set[torch.Tensor] = set()

    def __call__(self, module: nn.Module) -> None:
        params = [param for param in module._parameters.values() if param is not None]
        if self._init is not None and any(self._tensors.source(param) is None for param in params):
            self._init(module)
            self._tensors.fill_buffers(module)
        for param in params:
            source = self._tensors.source(param)
            if source is not None and param not in self._read:
                param.copy_(source.read())
                self._read.add(param)
