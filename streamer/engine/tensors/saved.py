"""Bytes that layers keep on the device from forward to backward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch

from streamer.backends.base import Lock
from streamer.quantized.parts import plain_parts
from streamer.torch_private import storage_bytes, storage_id


class Saved(NamedTuple):
    """A tensor that a graph has saved. With hooks for saved tensors, PyTorch does not check that it is not
    written."""

    tensor: torch.Tensor
    version: int

    @staticmethod
    def now(tensor: torch.Tensor) -> Saved:
        return Saved(tensor, tensor._version)

    def unchanged(self) -> torch.Tensor:
        """The tensor. Raises RuntimeError if it was written since it was saved."""
        if self.tensor._version != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace "
                f"operation: a tensor of shape {tuple(self.tensor.shape)} that a streamed layer has saved"
            )
        return self.tensor


def storages(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Bytes of each distinct storage under ``tensors``, by the storage's identity."""
    parts = (part for tensor in tensors for part in plain_parts(tensor))
    return {storage_id(part): storage_bytes(part) for part in parts}


class SavedBytes:
    """Counts the bytes of held storages, each once even if several objects hold it (a mask that every layer
    gets, an output that is the next layer's input)."""

    def __init__(self) -> None:
        self.now = 0
        self.peak = 0
        self._holders: Counter[int] = Counter()
        # the garbage collector may release in any thread, in the middle of `hold` too
        self._lock = Lock()

    def hold(self, held: Mapping[int, int]) -> Held:
        """Count ``held`` (as from `storages`) until the returned object is gone."""
        with self._lock:
            for storage, nbytes in held.items():
                self._holders[storage] += 1
                if self._holders[storage] == 1:
                    self.now += nbytes
            self.peak = max(self.peak, self.now)
        return Held(self, held)

    def release(self, held: Mapping[int, int]) -> None:
        """Stop counting ``held``."""
        with self._lock:
            for storage, nbytes in held.items():
                self._holders[storage] -= 1
                if not self._holders[storage]:
                    del self._holders[storage]
                    self.now -= nbytes


class Held:
    """Storages that ``of`` counts as long as this object lives."""

    def __init__(self, of: SavedBytes, held: Mapping[int, int]) -> None:
        self._of = of
        self._held = held

    def __del__(self) -> None:
        self._of.release(self._held)
