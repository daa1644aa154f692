"""Disks of the virtual backend: places without bytes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from streamer.backends.direct_io import ALIGNMENT
from streamer.backends.disk import Extent
from streamer.backends.stored_tensors import Pieces, StoredTensor
from streamer.simulate.backend import VirtualBackend


class VirtualScratch:
    """Extents that nobody reads or writes."""

    is_shared = False

    def padded(self, nbytes: int) -> int:
        """Bytes with their padding, as direct I/O has them."""
        return -(-nbytes // ALIGNMENT) * ALIGNMENT

    def extent(self, nbytes: int) -> Extent:
        """A place for ``nbytes``."""
        return Extent(nbytes, self.padded(nbytes), ())

    def allocate(self) -> None:
        """There is always room: the plan says how much is needed."""

    def read(self, extent: Extent, into: torch.Tensor, part: range | None = None) -> None:
        """Never called: lanes of the virtual backend run nothing."""
        raise AssertionError("nothing is read on the virtual backend")

    def write(self, extent: Extent, source: torch.Tensor, part: range | None = None) -> None:
        """Never called."""
        raise AssertionError("nothing is written on the virtual backend")

    def close(self) -> None:
        """There is nothing to close."""


class VirtualReader:
    """What reads nothing."""

    def open(self, files: Iterable[Path]) -> None:
        """Files need not be there."""

    def read(self, wanted: Iterable[tuple[StoredTensor, torch.Tensor]]) -> None:
        """Never called."""
        raise AssertionError("nothing is read on the virtual backend")

    def close(self) -> None:
        """There is nothing to close."""


class VirtualDisks:
    """As many disks as are needed, and what is ``stored`` in files."""

    def __init__(
        self, backend: VirtualBackend, stored: Mapping[str, Pieces], *, may_write: bool = True
    ) -> None:
        self._backend = backend
        self.stored = stored
        self.may_write = may_write

    def reader(self, between: torch.Tensor) -> VirtualReader:
        """What reads nothing."""
        return VirtualReader()

    def open(self) -> VirtualScratch:
        """New scratch files."""
        return VirtualScratch()

    def buffer(self, nbytes: int) -> torch.Tensor:
        """Memory that extents are read into."""
        return self._backend.host_buffer(nbytes, pinned=False)
