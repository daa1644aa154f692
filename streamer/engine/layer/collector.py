"""Copies the gradients of a layer's parameters into the gradient slot."""

from __future__ import annotations

from typing import Any

import torch

from streamer.engine.unit import Unit
from streamer.store.purposes import FP32
from streamer.torch_private import comes_to, keeps_graph


def is_added_to(accumulator: Any) -> bool:
    """Whether the running backward adds to the gradient of the graph's node ``accumulator``."""
    try:
        return comes_to(accumulator)
    except RuntimeError as error:
        # the tensor is an input of `torch.autograd.grad`; there is no other way to find out
        if "running autograd.grad()" not in str(error):
            raise
        return False


def graph_is_retained() -> bool:
    """Whether the running backward retains its graph."""
    return bool(keeps_graph())


#: Gradients up to this many bytes (of biases and norms) wait for others of their size: one launch copies them
#: all.
SMALL_BYTES = 1 << 16


class Collector:
    """Copies the gradients of ``unit`` into the gradient slot ``into`` (flat uint8) as autograd computes
    them, one slice of the batch after another. With ``in_fp32``, gradients of a shorter dtype are added up in
    fp32 first, which takes 4 bytes per element until `finish`."""

    def __init__(self, unit: Unit, into: torch.Tensor, *, in_fp32: bool) -> None:
        slices = unit.layout.trainable
        self.used = [False] * len(slices)
        #: small gradients and their places
        self._waiting: list[tuple[torch.Tensor, torch.Tensor]] = []
        #: the tensors in which gradients are added up, and their final places
        self._sums = self._places = unit.layout.views(into)[: len(slices)]
        if in_fp32 and any(slice.dtype != FP32 for slice in slices):
            sums = torch.empty(unit.layout.state_numel, dtype=FP32, device=into.device)
            self._sums = [
                place if slice.dtype == FP32 else slice.state(sums)
                for slice, place in zip(slices, self._places, strict=True)
            ]

    def take(self, index: int, leaf: torch.Tensor) -> None:
        """Autograd has set the gradient of ``leaf``, the leaf of trainable parameter ``index``."""
        gradient = leaf.grad
        assert gradient is not None, "called after autograd has set it"
        if gradient.is_sparse:
            gradient = gradient.to_dense()
        place = self._sums[index]
        if self.used[index]:
            self.end_slice()
            place.add_(gradient)
        elif gradient.nbytes <= SMALL_BYTES:
            self._waiting.append((place, gradient))
        else:
            place.copy_(gradient)
        self.used[index] = True
        leaf.grad = None

    def end_slice(self) -> None:
        """Autograd has finished a slice of the batch: copy the small gradients that wait."""
        if self._waiting:
            places, gradients = zip(*self._waiting, strict=True)
            self._waiting.clear()
            torch._foreach_copy_(places, gradients)

    def finish(self) -> list[bool]:
        """Called after all slices. Returns which of the trainable parameters have a gradient in the slot."""
        for used, total, place in zip(self.used, self._sums, self._places, strict=True):
            if used and total is not place:
                place.copy_(total)
        return self.used
