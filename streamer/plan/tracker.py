"""Bytes of the tensors that a piece of code makes, counted as they come and go."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Tracker(TorchDispatchMode):
    """``now`` and ``peak`` bytes of the storages that operations of this thread make inside the block, on any
    device, on meta tensors too. What was made before, or by other means, does not count.

    Storages are counted as long as there is a tensor of theirs, and with the bytes that were asked for: how
    an allocator rounds them is not in it.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        #: bytes now by owner, and at the peak
        self.owned: Counter[str] = Counter()
        self.owned_at_peak: Counter[str] = Counter()

    def owner(self) -> str:
        """Who makes what is made now."""
        return "all"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func.is_view:
            return result
        given = None
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            if given is None:
                given = {tensor.untyped_storage()._cdata for tensor in _tensors((args, kwargs))}
            if storage._cdata not in given:
                given.add(storage._cdata)
                self._made(storage)
        if self.now > self.peak:
            self._note_peak()
        return result

    def rise(self, nbytes: int) -> None:
        """Count ``nbytes`` that came and are gone again."""
        owner = self.owner()
        self.now += nbytes
        self.owned[owner] += nbytes
        if self.now > self.peak:
            self._note_peak()
        self._gone(owner, nbytes)

    def _made(self, storage: torch.UntypedStorage) -> None:
        owner, nbytes = self.owner(), storage.nbytes()
        self.now += nbytes
        self.owned[owner] += nbytes
        weakref.finalize(storage, self._gone, owner, nbytes).atexit = False

    def _gone(self, owner: str, nbytes: int) -> None:
        self.now -= nbytes
        self.owned[owner] -= nbytes

    def _note_peak(self) -> None:
        self.peak = self.now
        self.owned_at_peak = self.owned.copy()


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors among the arguments, or in the result, of an operation."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
