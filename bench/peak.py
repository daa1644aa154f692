"""Bytes of the tensors that a piece of code makes, counted as they come and go; works on meta tensors."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary


class PeakBytes(TorchDispatchMode):
    """``now`` and ``peak`` bytes of storages made inside the block; ``ignoring`` were there before."""

    def __init__(self, *, ignoring: Iterable[torch.UntypedStorage] = ()) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known = WeakIdKeyDictionary()
        # what was there before looks new when it is first seen
        self._ignored = list(ignoring)
        for storage in self._ignored:
            self._known[storage] = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and (storage := tensor.untyped_storage()) not in self._known:
                self._known[storage] = None
                self.now += storage.nbytes()
                weakref.finalize(storage, self._gone, storage.nbytes())
        self.peak = max(self.peak, self.now)
        return result

    def _gone(self, nbytes: int) -> None:
        self.now -= nbytes
