"""A layer's batch, cut into micro-batches that run on its weights one after another.

[Note: micro-batches]
A layer runs a large batch in slices while its weights are in the slot. So the weights cross the bus twice a
step whatever the batch, and the layer's own tensors take the memory of one slice. The batch is the first
dimension of the hidden states, which are the first floating-point tensor among the arguments. An argument of
the same shape, or whose first dimension is as long, is cut too; every other argument goes to each slice
whole. If there is a nested tensor (of sequences that differ in length; evaluation of `nn.TransformerEncoder`
makes one of a padded batch), nothing is cut.

A length may be that of the batch by chance, and the first dimension of the hidden states need not be the
batch: layers compute on ``[time, batch, width]``, on one sequence ``[time, width]``, or on the tokens of all
sequences one after another. `batch_check` finds out, once for each kind of layer: two slices must give the
same results together and apart. The user may also name the dimension: ``batch_dims`` takes names of
arguments, and paths of lists of layers or globs of them. A dimension that it names for the hidden states is
used as it is; other arguments of the same length must then be named.

A layer's outputs are concatenated along the batch, or are the same for all slices; the check finds out which.
A tensor may have several entries per sample (router logits have one per token).

Random numbers are drawn slice after slice, in each layer. A layer that computes across its batch (batch
normalisation, experts with a capacity, a state that it keeps) processes one slice after another, as with
gradient accumulation: running statistics include each slice, and count it.
"""

from __future__ import annotations

import inspect
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch

from streamer.engine.tensors import Rebuild, Tensors, constants, flatten
from streamer.engine.unit import Unit
from streamer.torch_private import is_sparse


class Part(NamedTuple):
    """The batch in a tensor: its dimension, and the number of entries that belong to one sample."""

    dim: int
    per_sample: int = 1

    def of(self, tensor: torch.Tensor, start: int, length: int) -> torch.Tensor:
        """The entries of ``length`` samples from ``start`` on; a view."""
        return tensor.narrow(self.dim, start * self.per_sample, length * self.per_sample)


#: For each of some tensors the place of its batch; None if it has none and goes to every slice whole.
Parts = Sequence[Part | None]


@dataclass
class Checked:
    """The checked kinds of layers and arguments of one model. For kinds that have passed, the batch
    dimensions of the returned tensors, by their numbers of dimensions; and the kinds that have failed."""

    passed: dict[Hashable, dict[tuple[int, ...], list[bool]]] = field(default_factory=dict)
    refused: set[Hashable] = field(default_factory=set)


class BatchSlices(NamedTuple):
    """Slices of one batch: the start and length of each, the place of the batch in each argument tensor, and
    the dimension of the batch in the outputs."""

    slices: Sequence[tuple[int, int]]
    parts: Parts
    dim: int
    #: the number of the hidden states among those tensors
    hidden: int
    #: the names of the arguments that are cut, the hidden states' first
    names: Sequence[str]
    #: the path of the list that holds the layer
    layers: str
    kind: Hashable
    checked: Checked
    #: whether the user has named the batch of the hidden states
    is_named: bool = False

    def inputs(self, inputs: Tensors, number: int) -> list[torch.Tensor]:
        """The tensors of slice ``number``, detached from the user's graph."""
        start, length = self.slices[number]
        return [
            # no-grad mode would leave requires_grad out
            tensor
            if part is None
            # detached again: not a view, so that views of it can be recognized
            else part.of(tensor.detach(), start, length).detach().requires_grad_(tensor.requires_grad)
            for tensor, part in zip(inputs, self.parts, strict=True)
        ]

    def described(self, inputs: Tensors) -> str:
        """A description of the cut tensors, and of the other ways to cut them."""
        shape, (_, length) = tuple(inputs[self.hidden].shape), self.slices[0]
        other = 0 if self.dim else 1
        instead = f"{{'{self.layers}': {other}}} if dimension {other} is the batch, "
        others = "".join(f"{{'{name}': None}} if '{name}' has no batch, " for name in self.names[1:])
        return (
            f"'{self.names[0]}' of shape {shape} was cut along dimension {self.dim}, in slices of {length}: "
            f"wrap with batch_dims={others}{instead if len(shape) > 2 else ''}{{'{self.layers}': None}} to "
            "leave these layers uncut"
        )

    def explain(self, error: Exception, layer: str, inputs: Tensors) -> None:
        """Add to an ``error`` of ``layer`` that it ran on a slice, a possible cause."""
        if not isinstance(error, torch.OutOfMemoryError):
            error.add_note(
                f"micro_batch_size: layer '{layer}' was run on a part of its batch; {self.described(inputs)}"
            )

    def gradients(
        self, gradients: Sequence[torch.Tensor | None], parts: Parts, number: int
    ) -> list[torch.Tensor | None]:
        """The parts of the outputs' gradients that belong to slice ``number``; ``parts`` tells the batch of
        each. The gradient of an output that all slices share goes to the first slice."""
        start, length = self.slices[number]
        return [
            (gradient if number == 0 else None)
            if part is None or gradient is None
            else part.of(gradient, start, length)
            for gradient, part in zip(gradients, parts, strict=True)
        ]


class Joined:
    """A layer's result for a whole batch, put together from its results for slices."""

    def __init__(self, layer: str, cut: BatchSlices, parts: Parts) -> None:
        """``parts`` tells the batch of each tensor; None for a tensor that is the same in all slices."""
        self.tensors: list[torch.Tensor] = []
        #: builds the layer's result around them and, after them, the inputs
        self.rebuild: Rebuild
        self.parts = parts
        self._layer = layer
        self._cut = cut
        self._constants: list[object] = []

    def add(self, number: int, outputs: Tensors, rebuild: Rebuild, inputs: Tensors) -> None:
        """Slice ``number`` ran on the tensors ``inputs`` and has returned the result that ``rebuild`` builds
        from ``outputs`` and ``inputs``.

        Raises ValueError if it does not fit the results of other slices.
        """
        if any(map(is_sparse, outputs)):
            raise self._cannot_join("returns a sparse tensor, which PyTorch cannot put together")
        found = constants(rebuild([*outputs, *inputs]))
        if number == 0:
            self._constants, self.rebuild = found, rebuild
        if found != self._constants or len(outputs) != len(self.parts):
            raise self._cannot_join("returns other numbers, or more tensors, for one than for another")
        for index, (output, part) in enumerate(zip(outputs, self.parts, strict=True)):
            if number == 0:
                self.tensors.append(output if part is None else self._room_for(output, part))
            self._take(index, number, output)

    def _room_for(self, output: torch.Tensor, part: Part) -> torch.Tensor:
        shape = list(output.shape)
        shape[part.dim] = sum(length for _, length in self._cut.slices) * part.per_sample
        return output.new_empty(shape)

    def _take(self, index: int, number: int, output: torch.Tensor) -> None:
        """Slice ``number`` has returned ``output`` at position ``index`` of its result."""
        whole, part, (start, length) = self.tensors[index], self.parts[index], self._cut.slices[number]
        into = whole if part is None else part.of(whole, start, length)
        is_like = (into.shape, into.dtype) == (output.shape, output.dtype)
        is_equal = (
            part is not None or number == 0 or whole.is_meta or (is_like and torch.equal(whole, output))
        )
        if not is_like or not is_equal:
            raise self._cannot_join(
                f"returns a tensor of shape {tuple(output.shape)} for {length} of them, which is not one "
                "per sample and not the same in each"
            )
        if part is not None:
            into.copy_(output)

    def _cannot_join(self, what: str) -> ValueError:
        return ValueError(
            f"the micro-batches of layer '{self._layer}' cannot be put together: it {what}; wrap without "
            "micro_batch_size"
        )


class JoinedGradients:
    """The gradients of a layer's inputs, which have these ``shapes``, put together from those of slices."""

    def __init__(self, cut: BatchSlices, shapes: Sequence[torch.Size]) -> None:
        self.tensors: list[torch.Tensor | None] = [None] * len(shapes)
        self._cut = cut
        self._shapes = shapes

    def add(self, number: int, gradients: Sequence[torch.Tensor | None]) -> None:
        """Slice ``number`` has computed ``gradients``, None for inputs that it does not depend on."""
        start, length = self._cut.slices[number]
        for index, (gradient, part) in enumerate(zip(gradients, self._cut.parts, strict=True)):
            total = self.tensors[index]
            if gradient is None:
                continue
            if part is None:
                self.tensors[index] = gradient if total is None else total + gradient
                continue
            if total is None:
                # zeros, for slices without a gradient
                self.tensors[index] = total = gradient.new_zeros(self._shapes[index])
            part.of(total, start, length).copy_(gradient)


class AmbiguousBatchError(ValueError):
    """Whether an argument begins with the batch is ambiguous, or an argument cannot be cut."""


class MicroBatches:
    """Cuts the batches of one layer into slices of ``size``; None leaves them whole. ``batch_dims`` maps
    names of arguments to their batch dimension (None: no batch), and paths or globs of lists of layers to the
    batch dimension of their hidden states (None: not cut). ``checked`` is shared by all layers of a model.
    [Note: micro-batches]"""

    def __init__(
        self, unit: Unit, size: int | None, batch_dims: Mapping[str, int | None], checked: Checked
    ) -> None:
        self._layer = unit.name
        self._list = _list_of(unit)
        path = _path_among(batch_dims, unit.name)
        #: the batch dimension of the hidden states, if the user has named it for the list
        self._dim = None if path is None else batch_dims[path]
        self._size = size if path is None or self._dim is not None else None
        self._batch_dims = batch_dims
        self._signature = inspect.signature(unit.module.forward) if size is not None else None
        shapes = tuple(slice.param.shape for slice in unit.layout.slices)
        self._kind = (self._list, type(unit.module), shapes)
        self._checked = checked
        #: names in ``batch_dims`` that only ``**kwargs`` can accept
        self._among_the_rest: set[str] = set()

    def cut(self, args: tuple[Any, ...], kwargs: dict[str, Any], inputs: Tensors) -> BatchSlices | None:
        """Slices of ``inputs``, the tensors in ``args`` and ``kwargs``; None if they stay whole.

        Raises AmbiguousBatchError for an argument that may or may not begin with the batch, or that is sparse
        and would be cut, and ValueError for a wrong ``batch_dims``.
        """
        if self._size is None or not inputs or self._signature is None:
            return None
        if any(tensor.is_nested for tensor in inputs):
            return None  # PyTorch cannot take a part of it
        names = self._names(self._by_name(self._signature, args, kwargs))
        hidden = self._hidden(names, inputs)
        if hidden is None:
            return None
        name = names[id(hidden)]
        dim = self._batch_dims.get(name, self._dim) or 0
        batch = self._length(hidden, dim, "the hidden states")
        if batch <= self._size:
            return None
        dim %= hidden.dim()
        self._check_names(kwargs)
        is_named = name in self._batch_dims or self._dim is not None
        # a tensor without a name is a parameter that the layer shares with others
        parts = [
            self._part(tensor, names[id(tensor)], hidden, dim, is_named) if id(tensor) in names else None
            for tensor in inputs
        ]
        cut_names = [name]
        for tensor, part in zip(inputs, parts, strict=True):
            if part is not None and is_sparse(tensor):
                raise self._is_sparse(names[id(tensor)])
            if part is not None and tensor is not hidden:
                cut_names.append(names[id(tensor)])
        starts = range(0, batch, self._size)
        slices = [(start, min(self._size, batch - start)) for start in starts]
        number = next(number for number, tensor in enumerate(inputs) if tensor is hidden)
        places = [(names.get(id(x), "?"), x.dim(), p) for x, p in zip(inputs, parts, strict=True)]
        kind = (*self._kind, *places)
        names_cut = [*dict.fromkeys(cut_names)]
        return BatchSlices(
            slices, parts, dim, number, names_cut, self._list, kind, self._checked, is_named=is_named
        )

    @property
    def arguments(self) -> list[str]:
        """The names of the arguments of the layer's forward."""
        return [] if self._signature is None else list(self._signature.parameters)

    def expects(self, name: str) -> bool:
        """Whether the layer's forward takes ``**kwargs``. If so, calls must pass an argument of this name."""
        kinds = [] if self._signature is None else [p.kind for p in self._signature.parameters.values()]
        if inspect.Parameter.VAR_KEYWORD not in kinds:
            return False
        self._among_the_rest.add(name)
        return True

    def _check_names(self, kwargs: Mapping[str, Any]) -> None:
        for name in sorted(self._among_the_rest - kwargs.keys()):
            raise ValueError(
                f"batch_dims: layer '{self._layer}' got no argument '{name}'; its named arguments are "
                f"{', '.join(map(repr, kwargs)) or 'none'}"
            )

    def _by_name(
        self, signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[tuple[str, object]]:
        """The arguments by name, in the signature's order."""
        try:
            bound = signature.bind(*args, **kwargs).arguments
        except TypeError:
            # the layer's own forward is about to raise this error
            return []
        named: list[tuple[str, object]] = []
        for name, value in bound.items():
            is_rest = signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD
            named.extend(value.items() if is_rest else [(name, value)])
        return named

    def _names(self, named: Sequence[tuple[str, object]]) -> dict[int, str]:
        """The name of each tensor's argument, by the tensor's identity; of several names, one that is in
        ``batch_dims``."""
        names: dict[int, str] = {}
        for name, value in named:
            for tensor in flatten(value)[0]:
                other = names.setdefault(id(tensor), name)
                if name not in self._batch_dims:
                    continue
                if self._batch_dims.get(other, self._batch_dims[name]) != self._batch_dims[name]:
                    raise ValueError(
                        f"batch_dims: layer '{self._layer}' got one tensor as '{other}' and as "
                        f"'{name}', whose dimensions differ: pass a clone of the tensor"
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
        self, tensor: torch.Tensor, name: str, hidden: torch.Tensor, hidden_dim: int, is_named: bool
    ) -> Part | None:
        """The batch in an argument."""
        batch = hidden.shape[hidden_dim]
        if tensor is hidden:
            return Part(hidden_dim)
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
        if not tensor.dim() or tensor.shape[0] != batch:
            return None
        if is_named:
            raise AmbiguousBatchError(
                f"micro_batch_size: in layer '{self._layer}' it is not known whether the first dimension "
                f"of '{name}' {tuple(tensor.shape)} is the batch, since batch_dims names that of the hidden "
                f"states and nothing is checked: add '{name}': 0 to it if it is, '{name}': None if not"
            )
        return Part(0)

    def _is_sparse(self, name: str) -> AmbiguousBatchError:
        return AmbiguousBatchError(
            f"micro_batch_size: '{name}' of layer '{self._layer}' is sparse, and PyTorch cannot cut sparse "
            f"tensors: wrap with batch_dims={{'{name}': None}} if every sample needs all of it, without "
            "micro_batch_size if not"
        )

    def _length(self, tensor: torch.Tensor, dim: int, name: str) -> int:
        if not -tensor.dim() <= dim < tensor.dim():
            raise ValueError(
                f"batch_dims: in layer '{self._layer}' {name} has shape {tuple(tensor.shape)}, which has no "
                f"dimension {dim}"
            )
        return tensor.shape[dim]


def micro_batches(
    units: Sequence[Unit], size: int | None, batch_dims: Mapping[str, int | None]
) -> list[MicroBatches]:
    """Cutters of the batches of each of ``units``. Raises ValueError for a name in ``batch_dims`` that is
    neither an argument of a forward nor the path of a list of layers."""
    checked = Checked()
    cutters = [MicroBatches(unit, size, batch_dims, checked) for unit in units]
    for name in batch_dims:
        if any(_is_in(unit.name, name) for unit in units):
            continue
        if any(name in cutter.arguments for cutter in cutters):
            continue
        # an argument that only **kwargs takes has a Python identifier as its name
        if not name.isidentifier() or not any([cutter.expects(name) for cutter in cutters]):
            known = ", ".join(f"'{known}'" for known in cutters[0].arguments)
            lists = ", ".join(f"'{path}'" for path in dict.fromkeys(_list_of(unit) for unit in units))
            raise ValueError(
                f"batch_dims: no layer takes an argument '{name}', and no list of layers has that path; the "
                f"first layer takes {known}, and the layers are in {lists}"
            )
    return cutters


def _path_among(batch_dims: Mapping[str, int | None], layer: str) -> str | None:
    """The path or glob in ``batch_dims`` of the innermost list that holds ``layer``."""
    return max((path for path in batch_dims if _is_in(layer, path)), key=len, default=None)


def _is_in(layer: str, path: str) -> bool:
    wanted, parts = path.split("."), layer.split(".")
    return not path or (len(wanted) <= len(parts) and all(map(fnmatchcase, parts, wanted)))


def _list_of(unit: Unit) -> str:
    """The path of the list that holds the layer; a glob if that list is itself in a list."""
    return ".".join("*" if part.isdigit() else part for part in unit.name.split(".")[:-1])
