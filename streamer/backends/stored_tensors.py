"""Reads tensors from the user's files: from any byte offset, bypassing the page cache, into memory of another
dtype if needed. Direct I/O moves whole blocks to aligned addresses, but a tensor in a safetensors file may
begin anywhere. So blocks are read into a buffer, and the processor copies the tensor's bytes out of it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from streamer.backends.base import Process
from streamer.backends.direct_io import ALIGNMENT, StoredFile, System
from streamer.backends.ranks import Ranks
from streamer.backends.thread import Job, run_all
from streamer.errors import DiskError
from streamer.torch_private import SubclassesOff

#: The largest number of bytes in one read, and the number of reads at the same time.
BLOCK_BYTES = 8 << 20
IN_FLIGHT = 4


@dataclass(frozen=True)
class StoredTensor:
    """``numel`` elements of ``dtype``, from byte ``offset`` of ``file`` on."""

    file: Path
    offset: int
    dtype: torch.dtype
    numel: int

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.numel * self.dtype.itemsize


#: Tensors that form one parameter, in order.
Pieces = Sequence[StoredTensor]


def read_into(pieces: Pieces, values: torch.Tensor) -> Iterator[tuple[StoredTensor, torch.Tensor]]:
    """The reads for `StoredTensors` that fill contiguous ``values`` from ``pieces``."""
    return zip(pieces, values.view(-1).split([piece.numel for piece in pieces]), strict=True)


def between_bytes(tensors: Iterable[StoredTensor]) -> int:
    """Bytes of the buffer that `StoredTensors` needs to read these."""
    largest = max((tensor.nbytes for tensor in tensors), default=0)
    block = -(-min(largest, BLOCK_BYTES) // ALIGNMENT) * ALIGNMENT
    # a tensor may begin and end inside of a block
    return IN_FLIGHT * (block + 2 * ALIGNMENT)


class StoredTensors:
    """Reads tensors of files. ``between`` is the buffer for running reads: `between_bytes`, flat uint8, at a
    multiple of `ALIGNMENT`."""

    def __init__(
        self, between: torch.Tensor, *, system: System | None = None, ranks: Ranks | None = None
    ) -> None:
        """If a read fails, the other ``ranks`` get the reason."""
        self._system = system or System()
        self._ranks = ranks or Ranks()
        self._process = Process()
        self._lock = threading.Lock()
        self._files: dict[Path, StoredFile] = {}
        self._between = deque(between.chunk(IN_FLIGHT))
        self._threads = ThreadPoolExecutor(IN_FLIGHT, "streamer-files")
        #: bytes of tensors that were read
        self.bytes_read = 0

    def open(self, files: Iterable[Path]) -> None:
        """Open these files. Raises DiskError for one that cannot be."""
        with self._telling():
            for path in files:
                if path not in self._files:
                    self._files[path] = StoredFile(path, system=self._system)

    def read(self, wanted: Iterable[tuple[StoredTensor, torch.Tensor]]) -> None:
        """Fill each tensor in memory, contiguous and on the CPU, from the stored tensor paired with it,
        rounded to its dtype. Returns when all are filled. Several threads may call this.

        Raises DiskError if not all could be read, and RuntimeError in a forked process and once closed.
        """
        self._process.check()
        jobs = list[Job]()
        for stored, into in wanted:
            assert into.is_contiguous() and into.numel() == stored.numel
            flat, most = into.view(-1), BLOCK_BYTES // stored.dtype.itemsize
            for start in range(0, stored.numel, most):
                elements = range(start, min(start + most, stored.numel))
                jobs.append((self._threads, partial(self._read, stored, flat, elements)))
        with self._telling():
            run_all(jobs)

    @contextmanager
    def _telling(self) -> Iterator[None]:
        try:
            yield
        except DiskError as error:
            self._ranks.tell(error)
            raise

    def _read(self, stored: StoredTensor, into: torch.Tensor, elements: range) -> None:
        size = stored.dtype.itemsize
        begin, end = (stored.offset + at * size for at in (elements.start, elements.stop))
        first = begin - begin % ALIGNMENT
        whole = -(-(end - first) // ALIGNMENT) * ALIGNMENT
        between = self._between.pop()
        try:
            self._files[stored.file].read(between.numpy().data[:whole], first, end - first)
            found, target = between[begin - first : end - first], into[elements.start : elements.stop]
            if target.dtype == stored.dtype:
                # by NumPy, on this thread alone
                target.view(torch.uint8).numpy()[:] = found.numpy()
            else:
                # a view in another dtype begins at a multiple of its size
                found = found if begin % size == 0 else found.clone()
                with SubclassesOff():
                    target.copy_(found.view(stored.dtype))
        finally:
            self._between.append(between)
        with self._lock:
            self.bytes_read += end - begin

    def close(self) -> None:
        """End the threads and close the files. May be called again; in a forked process it does nothing."""
        if self._process.is_this():
            self._threads.shutdown()
            for file in self._files.values():
                file.close()
