"""What a layer has returned, made again without running it: the same shapes, sharing memory as they did."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.utils._python_dispatch import _disable_current_modes

from streamer.plan.structure import Kind


@dataclass(frozen=True)
class _Output:
    """A tensor: its kind, and where it begins in which of the storages, in bytes; in one that was given, from
    where the tensor that was given with it begins."""

    kind: Kind
    offset: int
    storage: int


@dataclass
class _Storage:
    """Its bytes, or the number of the tensor that was given with it; whether something else keeps it."""

    nbytes: int
    given: int | None
    is_kept: bool = False


class OutputKinds:
    """``outputs`` of a piece of code that was given the tensors ``given``."""

    def __init__(self, outputs: Sequence[torch.Tensor], given: Sequence[torch.Tensor]) -> None:
        numbers: dict[int, int] = {}
        self._storages: list[_Storage] = []
        self._alive: list[weakref.ref[torch.UntypedStorage]] = []
        of_given = {tensor.untyped_storage()._cdata: index for index, tensor in enumerate(given)}
        self._outputs = []
        for output in outputs:
            storage = output.untyped_storage()
            number = numbers.setdefault(storage._cdata, len(numbers))
            if number == len(self._storages):
                self._storages.append(_Storage(storage.nbytes(), of_given.get(storage._cdata)))
                self._alive.append(weakref.ref(storage))
            source = self._storages[number].given
            offset = _offset(output) - (0 if source is None else _offset(given[source]))
            self._outputs.append(_Output(Kind.of(output), offset, number))

    def note_kept(self) -> int:
        """Whoever was given the outputs has dropped them: what is still there is kept by the graph. Its
        bytes."""
        for storage, alive in zip(self._storages, self._alive, strict=True):
            storage.is_kept = storage.given is None and alive() is not None
        return sum(storage.nbytes for storage in self._storages if storage.is_kept)

    def make(self, given: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The outputs for other tensors of the same kinds, and what is to be kept of their memory."""
        bases = [
            torch.empty(storage.nbytes, dtype=torch.uint8, device="meta")
            if storage.given is None
            else given[storage.given]
            for storage in self._storages
        ]
        outputs = []
        # they are made of memory that is counted already
        with _disable_current_modes():
            for output in self._outputs:
                kind, base = output.kind, bases[output.storage]
                offset = (_offset(base) + output.offset) // kind.dtype.itemsize
                tensor = torch.empty(0, dtype=kind.dtype, device="meta")
                tensor.set_(base.untyped_storage(), offset, kind.shape, kind.stride)
                outputs.append(tensor.requires_grad_(kind.requires_grad))
        kept = [base for base, storage in zip(bases, self._storages, strict=True) if storage.is_kept]
        return outputs, kept


def _offset(tensor: torch.Tensor) -> int:
    """Where it begins in its storage, in bytes."""
    return int(tensor.storage_offset()) * tensor.itemsize
