"""A layer's batch, cut into micro-batches that meet its weights one after another.

[Note: micro-batches]
A layer that is given a large batch runs it in slices while its weights are in the slot, so that they cross
the bus twice a step whatever the batch, and what it computes takes the memory of one slice. An argument is
cut if its first dimension is the batch, which is that of the hidden states: the first tensor of floating
point among the arguments. What the layer returns is put together along the same dimension.

Random numbers are drawn slice after slice, in each layer. A layer that looks across its batch (batch
normalisation, experts with a capacity) sees one slice at a time, as with gradient accumulation.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from streamer.engine.tree import flatten, reachable
from streamer.engine.unit import Unit

Tensors = Sequence[torch.Tensor]


class AmbiguousBatchError(ValueError):
    """It cannot be told which arguments begin with the batch."""


class Part(NamedTuple):
    """Where the batch is in a tensor: the dimension, and how many of its entries belong to one sample."""

    dim: int
    per_sample: int = 1

    def of(self, tensor: torch.Tensor, start: int, length: int) -> torch.Tensor:
        """What belongs to ``length`` samples from ``start`` on; a view."""
        return tensor.narrow(self.dim, start * self.per_sample, length * self.per_sample)


#: For each of some tensors where its batch is; None where it has none, and every slice is given all of it.
Parts = Sequence[Part | None]


class Cut(NamedTuple):
    """Slices of one batch: where each starts and how long it is, where the batch is in each tensor that the
    layer is given, and in which dimension of what it returns."""

    slices: Sequence[tuple[int, int]]
    parts: Parts
    dim: int = 0

    @staticmethod
    def none(inputs: Tensors) -> Cut:
        """One slice, of everything."""
        return Cut([(0, 0)], [None] * len(inputs))

    def inputs(self, inputs: Tensors, number: int) -> list[torch.Tensor]:
        """What slice ``number`` is given, apart from the user's graph."""
        start, length = self.slices[number]
        return [
            # no-grad mode would leave requires_grad out
            tensor
            if part is None
            else part.of(tensor.detach(), start, length).requires_grad_(tensor.requires_grad)
            for tensor, part in zip(inputs, self.parts, strict=True)
        ]

    def gradients(
        self, gradients: Sequence[torch.Tensor | None], parts: Parts, number: int
    ) -> list[torch.Tensor | None]:
        """What of the gradients of outputs, which have the batch where ``parts`` says, is for slice
        ``number``: for the first one, where all slices have the same output."""
        start, length = self.slices[number]
        return [
            (gradient if number == 0 else None)
            if part is None or gradient is None
            else part.of(gradient, start, length)
            for gradient, part in zip(gradients, parts, strict=True)
        ]


class MicroBatches:
    """Cuts the batches of one layer into slices of ``size``; whole where that is None. ``batch_dims`` gives
    the batch dimension of arguments by name, None for those that have none. [Note: micro-batches]"""

    def __init__(
        self,
        layer: str,
        forward: Callable[..., Any],
        size: int | None,
        batch_dims: Mapping[str, int | None],
    ) -> None:
        self._layer = layer
        self._size = size
        self._batch_dims = batch_dims
        self._signature = inspect.signature(forward) if size is not None else None
        #: names in ``batch_dims`` that only ``**kwargs`` can stand for
        self._among_the_rest: set[str] = set()

    def cut(self, args: tuple[Any, ...], kwargs: dict[str, Any], inputs: Tensors) -> Cut:
        """Slices of ``inputs``, the tensors in ``args`` and ``kwargs``.

        Raises AmbiguousBatchError for an argument that may or may not begin with the batch, and ValueError
        for a wrong ``batch_dims``.
        """
        if self._size is None or not inputs or self._signature is None:
            return Cut.none(inputs)
        names = dict(self._named(self._signature, args, kwargs))
        hidden = self._hidden(names, inputs)
        if hidden is None:
            return Cut.none(inputs)
        dim = self._batch_dims.get(names.get(id(hidden), ""), 0) or 0
        batch = self._length(hidden, dim, "the hidden states")
        if batch <= self._size:
            return Cut.none(inputs)
        self._check_names(kwargs)
        self._check_seen(args, kwargs, inputs, batch)
        parts = [
            Part(dim) if tensor is hidden else self._part(tensor, names.get(id(tensor), "?"), hidden, batch)
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

    def _named(
        self, signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Iterator[tuple[int, str]]:
        """The identity of every tensor and the name of its argument, in the signature's order."""
        try:
            bound = signature.bind(*args, **kwargs).arguments
        except TypeError:
            # which the layer's own forward is about to say
            return
        for name, value in bound.items():
            is_rest = signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD
            for key, item in (value if is_rest else {name: value}).items():
                for tensor in flatten(item)[0]:
                    yield id(tensor), key

    def _hidden(self, names: Mapping[int, str], inputs: Tensors) -> torch.Tensor | None:
        by_id = {id(tensor): tensor for tensor in inputs}
        for identity, name in names.items():
            tensor = by_id[identity]
            if tensor.is_floating_point() and tensor.dim() and self._batch_dims.get(name, 0) is not None:
                return tensor
        return None

    def _part(self, tensor: torch.Tensor, name: str, hidden: torch.Tensor, batch: int) -> Part | None:
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
        if not tensor.dim() or tensor.shape[0] != batch:
            return None
        if hidden.shape.count(batch) > 1 and tensor.shape != hidden.shape:
            raise AmbiguousBatchError(
                f"micro_batch_size: in layer '{self._layer}' the batch of the hidden states "
                f"{tuple(hidden.shape)} is as long as another of their dimensions, so that it cannot be told "
                f"whether the first dimension of '{name}' {tuple(tensor.shape)} is the batch: wrap with "
                f"batch_dims={{'{name}': 0}} if it is, {{'{name}': None}} if not"
            )
        return Part(0)

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


def micro_batches(
    units: Sequence[Unit], size: int | None, batch_dims: Mapping[str, int | None]
) -> list[MicroBatches]:
    """What cuts the batches of each of ``units``. Raises ValueError for a name in ``batch_dims`` that none of
    their forwards knows."""
    cutters = [MicroBatches(unit.name, unit.module.forward, size, batch_dims) for unit in units]
    for name in batch_dims:
        if any(name in cutter.arguments for cutter in cutters):
            continue
        if not any([cutter.expects(name) for cutter in cutters]):
            known = ", ".join(f"'{known}'" for known in cutters[0].arguments)
            raise ValueError(f"batch_dims: no layer takes an argument '{name}'; the first one takes {known}")
    return cutters
