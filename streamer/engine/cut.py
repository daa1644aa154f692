"""Slices of a batch, and where it is in the tensors that go through a layer. [Note: micro-batches]"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

Tensors = Sequence[torch.Tensor]


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
            # detached again: no view, so that what is a view of it can be told
            else part.of(tensor.detach(), start, length).detach().requires_grad_(tensor.requires_grad)
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
