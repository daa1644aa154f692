"""A layer's batch, cut into micro-batches that meet its weights one after another.

[Note: micro-batches]
A layer that is given a large batch runs it in slices while its weights are in the slot, so that they cross
the bus twice a step whatever the batch, and what it computes takes the memory of one slice. An argument is
cut if its first dimension is the batch, which is that of the hidden states: the first tensor of floating
point among the arguments. Where that may be chance (the batch is as long as the sequence, or there are as
many heads) the caller is asked, since a wrong cut may broadcast without a word. What the layer returns is put
together along the same dimension. Nothing is cut beside a nested tensor (of sequences that differ in length;
`nn.TransformerEncoder` makes one of a padded batch in evaluation).

Random numbers are drawn slice after slice, in each layer. A layer that looks across its batch (batch
normalisation, experts with a capacity, a state that it keeps) sees one slice after another, as with gradient
accumulation: running statistics take in each slice, and count it. The power iteration of a spectral norm,
which looks at weights alone, makes one step for all of them (`Unit.start_again`).
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from streamer.engine.cut import Cut, Part, Tensors
from streamer.engine.tree import flatten, reachable
from streamer.engine.unit import Unit


class AmbiguousBatchError(ValueError):
    """It cannot be told which arguments begin with the batch."""


class MicroBatches:
    """Cuts the batches of one layer into slices of ``size``; whole where that is None. ``batch_dims`` gives
    the batch dimension of arguments by name, None for those that have none. [Note: micro-batches]"""

    def __init__(self, unit: Unit, size: int | None, batch_dims: Mapping[str, int | None]) -> None:
        self._layer = unit.name
        self._size = size
        self._batch_dims = batch_dims
        self._signature = inspect.signature(unit.module.forward) if size is not None else None
        self._counts = _counts(unit.module)
        #: names in ``batch_dims`` that only ``**kwargs`` can stand for
        self._among_the_rest: set[str] = set()

    def cut(self, args: tuple[Any, ...], kwargs: dict[str, Any], inputs: Tensors) -> Cut:
        """Slices of ``inputs``, the tensors in ``args`` and ``kwargs``.

        Raises AmbiguousBatchError for an argument that may or may not begin with the batch, and ValueError
        for a wrong ``batch_dims``.
        """
        if self._size is None or not inputs or self._signature is None:
            return Cut.none(inputs)
        if any(tensor.is_nested for tensor in inputs):
            return Cut.none(inputs)  # PyTorch cannot take a part of it
        given = self._given(self._signature, args, kwargs)
        names = self._names(given)
        hidden = self._hidden(names, inputs)
        if hidden is None:
            return Cut.none(inputs)
        dim = self._batch_dims.get(names[id(hidden)], 0) or 0
        batch = self._length(hidden, dim, "the hidden states")
        if batch <= self._size:
            return Cut.none(inputs)
        dim %= hidden.dim()
        self._check_names(kwargs)
        self._check_seen(args, kwargs, inputs, batch)
        self._check_lists(given, batch)
        unnamed = [tensor for tensor in inputs if names.get(id(tensor)) not in self._batch_dims]
        parts = [
            Part(dim)
            if tensor is hidden
            else self._part(tensor, names.get(id(tensor), "?"), hidden, dim, unnamed)
            for tensor in inputs
        ]
        starts = range(0, batch, self._size)
        return Cut([(start, min(self._size, batch - start)) for start in starts], parts, dim)

    @property
    def arguments(self) -> list[str]:
        """The names of the arguments of the layer's forward."""
        return [] if self._signature is None else list(self._signature.parameters)

    def expects(self, name: str) -> bool:
        """Whether the layer's forward takes ``**kwargs``, where it is then to be given one of this name."""
        kinds = [] if self._signature is None else [p.kind for p in self._signature.parameters.values()]
        if inspect.Parameter.VAR_KEYWORD not in kinds:
            return False
        self._among_the_rest.add(name)
        return True

    def _check_names(self, kwargs: Mapping[str, Any]) -> None:
        for name in sorted(self._among_the_rest - kwargs.keys()):
            raise ValueError(
                f"batch_dims: layer '{self._layer}' is given no argument '{name}'; by name it is given "
                f"{', '.join(map(repr, kwargs)) or 'none'}"
            )

    def _given(
        self, signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[tuple[str, object]]:
        """The arguments by name, in the signature's order."""
        try:
            bound = signature.bind(*args, **kwargs).arguments
        except TypeError:
            # which the layer's own forward is about to say
            return []
        given: list[tuple[str, object]] = []
        for name, value in bound.items():
            is_rest = signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD
            given.extend(value.items() if is_rest else [(name, value)])
        return given

    def _names(self, given: Sequence[tuple[str, object]]) -> dict[int, str]:
        """In which argument each tensor is, by its identity: of several one that is in ``batch_dims``."""
        names: dict[int, str] = {}
        for name, value in given:
            for tensor in flatten(value)[0]:
                other = names.setdefault(id(tensor), name)
                if name not in self._batch_dims:
                    continue
                if self._batch_dims.get(other, self._batch_dims[name]) != self._batch_dims[name]:
                    raise ValueError(
                        f"batch_dims: layer '{self._layer}' is given one tensor as '{other}' and as "
                        f"'{name}', whose dimensions differ: give it a clone of the tensor"
                    )
                names[id(tensor)] = name
        return names

    def _hidden(self, names: Mapping[int, str], inputs: Tensors) -> torch.Tensor | None:
        by_id = {id(tensor): tensor for tensor in inputs}
        for identity, name in names.items():
            tensor = by_id[identity]
            if tensor.is_floating_point() and tensor.dim() and self._batch_dims.get(name, 0) is not None:
                return tensor
        return None

    def _part(
        self, tensor: torch.Tensor, name: str, hidden: torch.Tensor, hidden_dim: int, unnamed: Tensors
    ) -> Part | None:
        batch = hidden.shape[hidden_dim]
        if name in self._batch_dims:
            dim = self._batch_dims[name]
            if dim is None or (length := self._length(tensor, dim, f"'{name}'")) == 1:
                return None
            if length % batch:
                raise ValueError(
                    f"batch_dims={{'{name}': {dim}}}: in layer '{self._layer}' that dimension is {length} "
                    f"long (the shape is {tuple(tensor.shape)}), which the batch of {batch} does not divide"
                )
            return Part(dim, length // batch)
        if tensor.shape == hidden.shape:
            return Part(hidden_dim)
        if not tensor.dim() or tensor.shape[0] == 1:
            return None
        if tensor.shape[0] == batch:
            self._check_first(tensor, name, hidden, hidden_dim, unnamed)
            return Part(0)
        if batch in tensor.shape and tensor.dim() >= hidden.dim():
            raise self._ambiguous(
                name,
                f"whether the batch of {batch} is in '{name}' {tuple(tensor.shape)}",
                tensor.shape.index(batch),
            )
        return None

    def _check_first(
        self, tensor: torch.Tensor, name: str, hidden: torch.Tensor, hidden_dim: int, unnamed: Tensors
    ) -> None:
        """The first dimension of ``tensor`` is as long as the batch: can it be anything else?"""
        batch = hidden.shape[hidden_dim]
        is_chance = batch in (*hidden.shape[:hidden_dim], *hidden.shape[hidden_dim + 1 :])
        # scores have a dimension more than hidden states, and what has no batch is no longer than what it is
        # added to
        if tensor.dim() <= hidden.dim():
            others = [other.shape[1:] for other in unnamed if other.shape != hidden.shape]
            is_chance |= batch in self._counts or any(batch in lengths for lengths in others)
        if is_chance:
            raise self._ambiguous(
                name,
                f"whether the first dimension of '{name}' {tuple(tensor.shape)}, as long as another one or "
                "as a number that the layer knows (of heads, say), is the batch",
                0,
            )

    def _ambiguous(self, name: str, what: str, dim: int) -> AmbiguousBatchError:
        return AmbiguousBatchError(
            f"micro_batch_size: in layer '{self._layer}' it cannot be told {what}: wrap with "
            f"batch_dims={{'{name}': {dim}}} if it is, {{'{name}': None}} if not"
        )

    def _length(self, tensor: torch.Tensor, dim: int, name: str) -> int:
        if not -tensor.dim() <= dim < tensor.dim():
            raise ValueError(
                f"batch_dims: in layer '{self._layer}' {name} has shape {tuple(tensor.shape)}, which has no "
                f"dimension {dim}"
            )
        return tensor.shape[dim]

    def _check_seen(self, args: tuple[Any, ...], kwargs: dict[str, Any], inputs: Tensors, batch: int) -> None:
        """Refuse tensors that `flatten` does not find and that may have to be cut."""
        known = {id(tensor) for tensor in inputs}
        for tensor in reachable((args, kwargs)):
            if id(tensor) not in known and batch in tensor.shape:
                raise ValueError(
                    f"layer '{self._layer}' is given a tensor of shape {tuple(tensor.shape)} inside an "
                    "object of its own class, where it cannot be cut into micro-batches: give it in "
                    "a tuple, a list, a dict or a dataclass, or wrap without micro_batch_size"
                )

    def _check_lists(self, given: Sequence[tuple[str, object]], batch: int) -> None:
        """Refuse lists that may have an entry for each sample, which is not cut."""
        for name, value in given:
            if type(value) is list and len(value) == batch and name not in self._batch_dims:
                raise AmbiguousBatchError(
                    f"micro_batch_size: layer '{self._layer}' is given a list '{name}' as long as the batch "
                    f"of {batch}, which is not cut: give a tensor if it has an entry per sample, and wrap "
                    f"with batch_dims={{'{name}': None}} if not"
                )


def _counts(layer: nn.Module) -> set[int]:
    """Numbers that the code of ``layer`` knows and that may be the length of an argument, heads say."""
    counts: set[int] = set()
    for module in layer.modules():
        # not its own place among the layers
        own = [value for name, value in vars(module).items() if "layer" not in name and "idx" not in name]
        config = getattr(getattr(module, "config", None), "__dict__", {})
        own += [value for name, value in config.items() if "head" in name]
        counts.update(value for value in own if type(value) is int)
    return counts


def micro_batches(
    units: Sequence[Unit], size: int | None, batch_dims: Mapping[str, int | None]
) -> list[MicroBatches]:
    """What cuts the batches of each of ``units``. Raises ValueError for a name in ``batch_dims`` that none of
    their forwards knows."""
    cutters = [MicroBatches(unit, size, batch_dims) for unit in units]
    for name in batch_dims:
        if any(name in cutter.arguments for cutter in cutters):
            continue
        if not any([cutter.expects(name) for cutter in cutters]):
            known = ", ".join(f"'{known}'" for known in cutters[0].arguments)
            raise ValueError(f"batch_dims: no layer takes an argument '{name}'; the first one takes {known}")
    return cutters
