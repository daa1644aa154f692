"""What micro-batches bring, put together to what the whole batch would have brought. [Note: micro-batches]"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from streamer.engine.micro_batches import Cut, Part, Tensors


class Joined:
    """What a layer returns for a whole batch, put together from what it returns for slices of it."""

    def __init__(self, layer: str, cut: Cut, inputs: Tensors) -> None:
        self.tensors: list[torch.Tensor] = []
        #: where the batch is in each of them; None where all slices have the same
        self.parts: list[Part | None] = []
        self._layer = layer
        self._cut = cut
        self._inputs = inputs
        self._passed_on: list[bool] = []

    def add(self, number: int, outputs: Tensors, given: Tensors) -> None:
        """Slice ``number``, which was given the tensors ``given``, has returned ``outputs``."""
        if len(self._cut.slices) == 1:
            self.tensors, self.parts = list(outputs), [None] * len(outputs)
            return
        if number == 0:
            for output in outputs:
                self._begin(output, given)
        if len(outputs) != len(self.tensors):
            raise self._cannot_join(
                f"returns {len(outputs)} tensors in one and {len(self.tensors)} in another"
            )
        start, length = self._cut.slices[number]
        for output, whole, part, passed_on in zip(
            outputs, self.tensors, self.parts, self._passed_on, strict=True
        ):
            if passed_on:
                continue
            into = whole if part is None else part.of(whole, start, length)
            if into.shape != output.shape or not (part or number == 0 or _equal(whole, output)):
                raise self._cannot_join(
                    f"returns a tensor of shape {tuple(output.shape)} for {length} of them, which is not one "
                    "per sample and not the same in each"
                )
            if part is not None:
                into.copy_(output)

    def _begin(self, output: torch.Tensor, given: Tensors) -> None:
        for tensor, whole, part in zip(given, self._inputs, self._cut.parts, strict=True):
            if _is_same(output, tensor):
                self._add(whole.detach(), part, passed_on=True)
                return
        dim, (_, length) = self._cut.dim, self._cut.slices[0]
        if -output.dim() <= dim < output.dim() and output.shape[dim] == length:
            shape = list(output.shape)
            shape[dim] = sum(length for _, length in self._cut.slices)
            self._add(output.new_empty(shape), Part(dim), passed_on=False)
        else:
            self._add(output, None, passed_on=False)

    def _add(self, whole: torch.Tensor, part: Part | None, *, passed_on: bool) -> None:
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
