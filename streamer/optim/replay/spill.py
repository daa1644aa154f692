"""Optimizer state that does not fit in host memory spills to disk between updates.

A parameter's state on disk has an `OnDisk` in place of each tensor of 64 KiB or more. A part's state is read
during the update of the part before it, and written during the update of the part after it. So at most three
parts are in memory.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch

from streamer.backends.base import Lock
from streamer.backends.disk import Extent, Scratch

#: Bytes from which a tensor is read on its own.
LEAST = 64 << 10
#: Parts whose state is in memory at a time.
IN_MEMORY = 3

#: The parameters of a part, by their identities.
Key = tuple[int, ...]
#: Returns the states of a part's parameters, as they are held.
States = Callable[[], list[Any]]
#: Stores them.
Keep = Callable[[list[Any]], None]


@dataclass(frozen=True, eq=False)
class OnDisk:
    """A tensor in an extent of ``disk``. ``buffer`` returns memory to read it into."""

    disk: Scratch
    extent: Extent
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    buffer: Callable[[int], torch.Tensor]

    def read(self, into: torch.Tensor | None = None) -> torch.Tensor:
        """The tensor, in the memory ``into`` (flat uint8) or in new memory. Raises DiskError."""
        into = self.buffer(self.extent.padded_bytes) if into is None else into
        self.disk.read(self.extent, into)
        return self._view_in(into)

    def write(self, tensor: torch.Tensor, through: torch.Tensor) -> None:
        """Write ``tensor`` by way of the memory ``through`` (flat uint8): it is there already, or is copied.
        Raises DiskError."""
        there = self._view_in(through)
        if there.data_ptr() != tensor.data_ptr():
            there.copy_(tensor)
        self.disk.write(self.extent, through)

    def _view_in(self, memory: torch.Tensor) -> torch.Tensor:
        flat = memory[: prod(self.shape) * self.dtype.itemsize].view(self.dtype)
        return flat.as_strided(self.shape, self.stride)


class Spill:
    """Moves the state of parts between memory and a disk. ``buffer`` allocates memory for transfers."""

    def __init__(self, disk: Scratch, buffer: Callable[[int], torch.Tensor]) -> None:
        self._disk = disk
        self._buffer = buffer
        self._reading: dict[Key, Future[list[Any]]] = {}
        self._writing: dict[Key, Future[None]] = {}
        #: free transfer memory, by its bytes, and transfer memory in use, by its address
        self._free: defaultdict[int, list[torch.Tensor]] = defaultdict(list)
        self._used: dict[int, torch.Tensor] = {}
        self._lock = Lock()
        self._readers, self._writers = ThreadPoolExecutor(1), ThreadPoolExecutor(1)

    def begin_read(self, key: Key, states: States) -> None:
        """Begin to read the ``states`` of a part, unless it has begun."""
        if key not in self._reading:
            self._reading[key] = self._readers.submit(self._read, self._writing.get(key), states)

    def fetch(self, key: Key, states: States) -> list[Any]:
        """The ``states`` of a part in memory. Raises DiskError."""
        self.begin_read(key, states)
        return self._reading.pop(key).result()

    def put_back(self, key: Key, old: States, new: Sequence[Any], keep: Keep) -> None:
        """Write the ``new`` states of a part over the ``old`` ones, and pass them, with `OnDisk` in place of
        tensors, to ``keep``. Raises DiskError if an earlier write has failed."""
        for other in [other for other in self._reading if not {*other}.isdisjoint(key)]:
            del self._reading[other]
        for other in [other for other, future in self._writing.items() if future.done()]:
            self._writing.pop(other).result()
        self._writing[key] = self._writers.submit(self._write, old, new, keep)

    def write(self, state: Any) -> Any:
        """Write a state to new places, and return it with `OnDisk` in place of tensors. Raises DiskError."""
        return mapped(state, partial(self._on_disk, []))

    def finish(self) -> None:
        """Wait until everything is written. Raises DiskError."""
        while self._writing:
            self._writing.popitem()[1].result()

    def _read(self, written: Future[None] | None, states: States) -> list[Any]:
        if written is not None:
            written.result()
        return [mapped(state, self._in_memory) for state in states()]

    def _in_memory(self, value: Any) -> Any:
        if not isinstance(value, OnDisk):
            return value
        through = self._memory(value.extent.padded_bytes)
        read = value.read(through)
        with self._lock:
            self._used[read.data_ptr()] = through
        return read

    def _write(self, old: States, new: Sequence[Any], keep: Keep) -> None:
        places = [each for state in old() for each in leaves(state) if isinstance(each, OnDisk)]
        keep([mapped(state, partial(self._on_disk, places)) for state in new])

    def _on_disk(self, places: list[OnDisk], value: Any) -> Any:
        """The `OnDisk` for ``value``: the first of ``places`` of the same size, or else a new one."""
        if not isinstance(value, torch.Tensor) or value.nbytes < LEAST:
            return value
        old = next((each for each in places if each.extent.nbytes == value.nbytes), None)
        if old is not None:
            places.remove(old)
            extent = old.extent
        else:
            extent = self._disk.extent(value.nbytes)
            self._disk.allocate()
        stride = value.stride() if _is_dense(value) else value.contiguous().stride()
        place = OnDisk(self._disk, extent, value.dtype, tuple(value.shape), stride, self._buffer)
        with self._lock:
            through = self._used.pop(value.data_ptr(), None)
        through = self._memory(extent.padded_bytes) if through is None else through
        place.write(value, through)
        with self._lock:
            self._free[extent.padded_bytes].append(through)
        return place

    def _memory(self, nbytes: int) -> torch.Tensor:
        with self._lock:
            free = self._free[nbytes]
            return free.pop() if free else self._buffer(nbytes)


def in_memory(state: Any) -> Any:
    """A copy of a state, read from disk. Raises DiskError."""
    return mapped(state, lambda value: value.read() if isinstance(value, OnDisk) else value)


def is_on_disk(state: Any) -> bool:
    """Whether part of a state is on disk."""
    return any(isinstance(each, OnDisk) for each in leaves(state))


def mapped(value: Any, function: Callable[[Any], Any]) -> Any:
    """``value`` with every leaf of its dicts, lists and tuples replaced by ``function`` of the leaf."""
    if isinstance(value, dict):
        return {name: mapped(item, function) for name, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(mapped(item, function) for item in value)
    return function(value)


def leaves(value: Any) -> Iterator[Any]:
    """The leaves of nested dicts, lists and tuples."""
    items = value.values() if isinstance(value, dict) else value
    if isinstance(value, dict | list | tuple):
        for item in items:
            yield from leaves(item)
    else:
        yield value


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the tensor's elements fill a stretch of memory, in some order."""
    return torch.empty_like(tensor, memory_format=torch.preserve_format).stride() == tensor.stride()
