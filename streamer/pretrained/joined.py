"""Tensors that are concatenations of others: the files' tensors, in order.

The experts of a layer are one tensor in a model of transformers, and separate tensors in its files. The rules
of that library stack and concatenate them. If nothing else happens to them, the elements of the result are
those of whole tensors of the files, and it can be read from there piece by piece.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from streamer.pretrained.files import Stored

#: In the order of elements in memory; empty for a tensor computed in any other way.
Pieces = tuple[Stored, ...]


class Joining(TorchFunctionMode):
    """Inside the block, follows tensors through ``torch.stack`` and ``torch.cat``. It reads no values, so
    tensors may be on the meta device."""

    def __init__(self) -> None:
        super().__init__()
        # holds the tensors too, so that their ids are not reused
        self._known: dict[int, tuple[torch.Tensor, Pieces]] = {}

    def empty(self, stored: Stored) -> torch.Tensor:
        """A tensor without values that stands for a ``stored`` one."""
        tensor = torch.empty(stored.shape, dtype=stored.dtype, device="meta")
        self._known[id(tensor)] = tensor, (stored,)
        return tensor

    def pieces(self, tensor: torch.Tensor) -> Pieces:
        """The stored tensors whose elements, one after the other, are those of ``tensor``. Empty for a tensor
        computed in any other way, or written since."""
        _, pieces = self._known.get(id(tensor), (tensor, ()))
        return pieces if tensor._version == 0 else ()

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if function is torch.stack or function is torch.cat:
            self._follow(result, *args, **(kwargs or {}))
        return result

    def _follow(
        self, result: torch.Tensor, tensors: Sequence[torch.Tensor], dim: int = 0, **other: object
    ) -> None:
        # of each tensor in turn, for every index of the dimensions before
        rows = prod(result.shape[:dim])
        columns = [_divided(self.pieces(tensor), rows) for tensor in tensors]
        if not other and all(columns):
            pieces = (piece for row in zip(*columns, strict=True) for group in row for piece in group)
            self._known[id(result)] = result, tuple(pieces)


def _divided(pieces: Pieces, count: int) -> list[list[Stored]]:
    """``pieces`` in ``count`` groups of equal size; empty if a piece would be in two of them."""
    numel = sum(prod(piece.shape) for piece in pieces)
    if not numel:
        return []
    groups: list[list[Stored]] = [[]]
    room = numel // count
    for piece in pieces:
        if not room:
            groups.append([])
            room = numel // count
        groups[-1].append(piece)
        if (room := room - prod(piece.shape)) < 0:
            return []
    return groups
