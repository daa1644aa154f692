"""Who else holds what a layer was lent for one run. [Note: recomputation]"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from streamer.engine.call import Tensors


class Owners:
    """Tells whether the storage of ``weights`` has got more owners: tensors, and what autograd has saved."""

    def __init__(self, weights: torch.Tensor) -> None:
        self._weights = weights
        self._before = self._count()

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Inside the block garbage that is collected does not make room for new owners."""
        count = 0

        def collected(phase: str, _: Mapping[str, Any]) -> None:
            nonlocal count
            if phase == "stop":
                self._before -= count - self._count()
            count = self._count()

        gc.callbacks.append(collected)
        try:
            yield
        finally:
            gc.callbacks.remove(collected)

    def more(self) -> int:
        """How many more there are than when this was made."""
        return self._count() - self._before

    def _count(self) -> int:
        count: int = torch._C._storage_Use_Count(self._weights.untyped_storage()._cdata)
        return count


def holders(tensors: Tensors) -> list[int]:
    """How many hold each of ``tensors``, in Python or not."""
    return [sys.getrefcount(tensor) for tensor in tensors]
