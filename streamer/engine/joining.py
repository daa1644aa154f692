"""What micro-batches bring, put together to what the whole batch would have brought. [Note: micro-batches]"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from streamer.engine.cut import Cut, Part, Tensors
from streamer.engine.sharing import SharedOutputs, Shown, View, are_apart
from streamer.engine.tree import Rebuild, constants


class _Alias(NamedTuple):
    """A tensor that shows the memory of another one: of number ``given`` of what the layer was given, or else
    of number ``returned`` of what it returns."""

    given: int | None
    returned: int | None
    #: None where it shows all of it, as it is
    view: View | None


class Joined:
    """What a layer returns for a whole batch, put together from what it returns for slices of it."""

    def __init__(self, layer: str, cut: Cut, inputs: Tensors) -> None:
        self.tensors: list[torch.Tensor] = []
        #: builds the layer's result around them and, after them, the inputs
        self.rebuild: Rebuild
        #: where the batch is in each of them; None where all slices have the same
        self.parts: list[Part | None] = []
        self._layer = layer
        self._cut = cut
        self._inputs = inputs
        #: for each of them what it shows, where every slice has returned it so
        self._aliases: list[_Alias | None] = []
        self._constants: list[object] = []

    def add(self, number: int, outputs: Tensors, rebuild: Rebuild, given: Tensors) -> None:
        """Slice ``number``, which was given the tensors ``given``, has returned what ``rebuild`` makes of
        ``outputs`` and ``given``.

        Raises ValueError where that cannot be put together with what others have returned.
        """
        if len(self._cut.slices) == 1:
            self.tensors, self.parts, self.rebuild = list(outputs), [None] * len(outputs), rebuild
            return
        found = constants(rebuild([*outputs, *given]))
        if number == 0:
            self._constants = found
            for output in outputs:
                self._begin(output, outputs, given)
        if found != self._constants or len(outputs) != len(self.tensors):
            raise self._cannot_join("returns other numbers, or more tensors, for one than for another")
        for index, output in enumerate(outputs):
            self._take(index, number, output, outputs, given)
        self._join_views(number, outputs, rebuild)

    def _join_views(self, number: int, outputs: Tensors, rebuild: Rebuild) -> None:
        """Let what `rebuild` makes of slices be made of the whole batch. [Note: shared outputs]"""
        if not isinstance(rebuild, SharedOutputs):
            plain = [Shown(index) for index in range(len(outputs))]
            rebuild = SharedOutputs(rebuild, plain, [None] * len(outputs))
        shown = []
        for one in rebuild.shown:
            view = one.view
            if view is not None:
                whole, part = self.tensors[one.of], self.parts[one.of]
                view = self._of_whole(view, outputs[one.of], whole, part, number)
                if view is None:
                    raise self._shares_memory()
            shown.append(replace(one, view=view))
        passed_on = rebuild.passed_on
        if number > 0:
            before = self.rebuild
            assert isinstance(before, SharedOutputs), "as the slice before has left it"
            if shown != before.shown:
                raise self._shares_memory()
            pairs = zip(before.passed_on, passed_on, strict=True)
            passed_on = [one if one == other else None for one, other in pairs]
            rebuild = before
        self.rebuild = replace(rebuild, shown=shown, passed_on=passed_on)

    def _take(self, index: int, number: int, output: torch.Tensor, outputs: Tensors, given: Tensors) -> None:
        """Slice ``number`` has ``output`` as number ``index`` of what it returns."""
        alias = self._aliases[index]
        if alias is not None:
            other = outputs[alias.returned] if alias.given is None else given[alias.given]  # type: ignore
            if self._shows(output, other, alias, number):
                return
            is_shown = any(other is not None and other.returned == index for other in self._aliases)
            if alias.view is not None or alias.given is None or is_shown:
                raise self._shares_memory()
            # slices before this one have returned what they were given
            self.tensors[index], self._aliases[index] = self.tensors[index].clone(), None
        whole, part, (start, length) = self.tensors[index], self.parts[index], self._cut.slices[number]
        into = whole if part is None else part.of(whole, start, length)
        is_like = (into.shape, into.dtype) == (output.shape, output.dtype)
        if not is_like or not (part or number == 0 or _equal(whole, output)):
            raise self._cannot_join(
                f"returns a tensor of shape {tuple(output.shape)} for {length} of them, which is not one "
                "per sample and not the same in each"
            )
        if part is not None:
            into.copy_(output)

    def _begin(self, output: torch.Tensor, outputs: Tensors, given: Tensors) -> None:
        """Make room for the whole of what ``output``, one of ``outputs`` of the first slice, is a part of."""
        for index, tensor in enumerate(given):
            if _is_same(output, tensor):
                alias = _Alias(index, None, None)
                self._add(self._inputs[index].detach(), self._cut.parts[index], alias)
                return
        of_given = [(tensor, _Alias(index, None, None)) for index, tensor in enumerate(given)]
        returned = [(outputs[index], _Alias(None, index, None)) for index in range(len(self.tensors))]
        for tensor, alias in (*of_given, *returned):
            if not _share_memory(output, tensor):
                continue
            if alias.given is not None:
                whole, part = self._inputs[alias.given].detach(), self._cut.parts[alias.given]
            else:
                assert alias.returned is not None, "it shows one of both"
                whole, part = self.tensors[alias.returned], self.parts[alias.returned]
            view = View.of(output, tensor)
            view = None if view is None else self._of_whole(view, tensor, whole, part, 0)
            if view is None:
                raise self._shares_memory()
            part = None if part is None else Part(self._cut.dim)
            self._add(view.on(whole).detach(), part, alias._replace(view=view))
            return
        dim, (_, length) = self._cut.dim, self._cut.slices[0]
        if dim < output.dim() and output.shape[dim] == length:
            shape = list(output.shape)
            shape[dim] = self._total
            self._add(output.new_empty(shape), Part(dim), None)
        else:
            self._add(output, None, None)

    def _add(self, whole: torch.Tensor, part: Part | None, alias: _Alias | None) -> None:
        self.tensors.append(whole)
        self.parts.append(part)
        self._aliases.append(alias)

    @property
    def _total(self) -> int:
        return sum(length for _, length in self._cut.slices)

    def _shows(self, output: torch.Tensor, other: torch.Tensor, alias: _Alias, number: int) -> bool:
        """Whether ``output`` of slice ``number`` shows ``other`` as ``alias`` says."""
        if alias.view is None or output.untyped_storage()._cdata != other.untyped_storage()._cdata:
            return _is_same(output, other)
        if alias.given is not None:
            whole, part = self._inputs[alias.given], self._cut.parts[alias.given]
        else:
            assert alias.returned is not None, "it shows one of both"
            whole, part = self.tensors[alias.returned], self.parts[alias.returned]
        view = View.of(output, other)
        return view is not None and self._of_whole(view, other, whole, part, number) == alias.view

    def _of_whole(
        self, view: View, one: torch.Tensor, whole: torch.Tensor, part: Part | None, number: int
    ) -> View | None:
        """``view``, of what slice ``number`` has in ``one``, as that of ``whole``, where the batch is in
        ``part``; None where it cannot be told to show as much of every sample."""
        if part is None:
            return view
        dim, (_, length) = self._cut.dim, self._cut.slices[number]
        step = whole.stride(part.dim)
        steps = [
            (o, w) for o, w, size in zip(one.stride(), whole.stride(), one.shape, strict=True) if size > 1
        ]
        if part.per_sample != 1 or view.is_real or any(mine != its for mine, its in steps):
            return None
        if dim >= len(view.shape) or view.shape[dim] != length or (length > 1 and view.stride[dim] != step):
            return None
        shape, stride = list(view.shape), list(view.stride)
        shape[dim], stride[dim] = 1, step
        last = view.offset + sum((size - 1) * by for size, by in zip(shape, stride, strict=True))
        if view.offset < 0 or last >= step:
            return None  # of one sample it shows something of the next
        shape[dim] = self._total
        return replace(view, shape=tuple(shape), stride=tuple(stride))

    def _shares_memory(self) -> ValueError:
        return self._cannot_join(
            "returns tensors that share memory, with one another or with its arguments: let it return clones"
        )

    def _cannot_join(self, what: str) -> ValueError:
        return ValueError(
            f"the micro-batches of layer '{self._layer}' cannot be put together: it {what}; wrap without "
            "micro_batch_size"
        )


class JoinedGradients:
    """The gradients of a layer's inputs, which have these ``shapes``, put together from those of slices."""

    def __init__(self, cut: Cut, shapes: Sequence[torch.Size]) -> None:
        self.tensors: list[torch.Tensor | None] = [None] * len(shapes)
        self._cut = cut
        self._shapes = shapes

    def add(self, number: int, gradients: Sequence[torch.Tensor | None]) -> None:
        """Slice ``number`` has brought ``gradients``, None for inputs that it does not depend on."""
        start, length = self._cut.slices[number]
        for index, (gradient, part) in enumerate(zip(gradients, self._cut.parts, strict=True)):
            total = self.tensors[index]
            if gradient is None:
                continue
            if part is None:
                self.tensors[index] = gradient if total is None else total + gradient
                continue
            if total is None:
                # zeros, for slices that bring none
                self.tensors[index] = total = gradient.new_zeros(self._shapes[index])
            part.of(total, start, length).copy_(gradient)


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether both are the same view of the same storage."""
    return one.untyped_storage()._cdata == other.untyped_storage()._cdata and (
        one.storage_offset(),
        one.shape,
        one.stride(),
        one.dtype,
    ) == (other.storage_offset(), other.shape, other.stride(), other.dtype)


def _share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    is_one_storage = one.untyped_storage()._cdata == other.untyped_storage()._cdata
    return is_one_storage and one.numel() > 0 and other.numel() > 0 and not are_apart(one, other)


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.is_meta or torch.equal(one, other)
