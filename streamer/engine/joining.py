"""What micro-batches bring, put together to what the whole batch would have brought. [Note: micro-batches]"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from streamer.engine.cut import Cut, Part, Tensors
from streamer.engine.tree import Rebuild, constants


class Joined:
    """What a layer returns for a whole batch, put together from what it returns for slices of it."""

    def __init__(self, layer: str, cut: Cut, inputs: Tensors) -> None:
        self.tensors: list[torch.Tensor] = []
        #: builds the layer's result around them
        self.rebuild: Rebuild
        #: where the batch is in each of them; None where all slices have the same
        self.parts: list[Part | None] = []
        self._layer = layer
        self._cut = cut
        self._inputs = inputs
        #: which of the inputs each of them is, where every slice has returned what it was given of one
        self._passed_on: list[int | None] = []

    def add(self, number: int, outputs: Tensors, rebuild: Rebuild, given: Tensors) -> None:
        """Slice ``number``, which was given the tensors ``given``, has returned what ``rebuild`` makes of
        ``outputs``.

        Raises ValueError where that cannot be put together with what others have returned.
        """
        if number == 0:
            self.rebuild = rebuild
        if len(self._cut.slices) == 1:
            self.tensors, self.parts = list(outputs), [None] * len(outputs)
            return
        if number == 0:
            self._constants = constants(rebuild(outputs))
            for output in outputs:
                self._begin(output, given)
        if constants(rebuild(outputs)) != self._constants or len(outputs) != len(self.tensors):
            raise self._cannot_join("returns other numbers, or more tensors, for one than for another")
        for index, output in enumerate(outputs):
            self._take(index, number, output, given)

    def _take(self, index: int, number: int, output: torch.Tensor, given: Tensors) -> None:
        """Slice ``number`` has ``output`` as number ``index`` of what it returns."""
        passed_on = self._passed_on[index]
        if passed_on is not None and _is_same(output, given[passed_on]):
            return
        if passed_on is not None:
            # slices before this one have returned what they were given
            self.tensors[index], self._passed_on[index] = self.tensors[index].clone(), None
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

    def _begin(self, output: torch.Tensor, given: Tensors) -> None:
        for index, tensor in enumerate(given):
            if _is_same(output, tensor):
                self._add(self._inputs[index].detach(), self._cut.parts[index], index)
                return
        dim, (_, length) = self._cut.dim, self._cut.slices[0]
        if dim < output.dim() and output.shape[dim] == length:
            shape = list(output.shape)
            shape[dim] = sum(length for _, length in self._cut.slices)
            self._add(output.new_empty(shape), Part(dim), None)
        else:
            self._add(output, None, None)

    def _add(self, whole: torch.Tensor, part: Part | None, passed_on: int | None) -> None:
        self.tensors.append(whole)
        self.parts.append(part)
        self._passed_on.append(passed_on)

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


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.is_meta or torch.equal(one, other)
