"""The weights of a unit that are on disk: in a scratch file, or in the user's files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain, pairwise

import torch

from streamer.backends.direct_io import ALIGNMENT
from streamer.backends.disk import Scratch
from streamer.backends.stored_tensors import Pieces, StoredTensors, read_into
from streamer.store.layout import Layout, Slice
from streamer.store.on_disk import Allocate, Piece, read_bytes, write_together
from streamer.store.shares import Share, shares_of

#: Bytes of a unit's weights in one piece, a multiple of any alignment.
WEIGHTS_PIECE = 64 << 20
#: Buffers of the ring of weights: for the unit in use, for the next one, and for one that is being read.
WEIGHT_BUFFERS = 3


class WeightsOnDisk:
    """The weights of one unit that are on disk, laid out as in memory. This base class is for a unit with all
    weights in memory, and moves nothing. Callers make sure that only one thread uses the disk. A rank's *own*
    weights are those it updates; a single process updates all."""

    #: whether the unit has none of its weights on disk
    is_empty = True
    #: bytes of a buffer for all of the weights
    padded_bytes = 0
    #: bytes of scratch files
    disk_bytes = 0
    #: bytes that `fetch` moves from disk
    read_bytes = 0
    #: bytes of own weights that `fetch` and `store` move
    own_read_bytes = 0
    own_written_bytes = 0
    #: bytes of weights that stay in host memory
    held_bytes = 0

    def fetch(self, buffer: torch.Tensor, *, own: bool = False) -> None:
        """Read the weights into ``buffer``, flat uint8. With ``own`` the others may be left undefined."""

    def store(self, buffer: torch.Tensor, *, own: bool = False) -> None:
        """Write the weights in ``buffer``, flat uint8, or the ``own`` ones, except those that are
        `unwritable`. If that fails, they are lost."""

    def read(self, slice: Slice) -> torch.Tensor:
        """A copy of a parameter."""
        raise AssertionError("the weights are in memory")

    def is_stored(self, slice: Slice) -> bool:
        """Whether a parameter is in a file of the user, which is never written."""
        return False

    def unwritable(self, buffer: torch.Tensor) -> list[str]:
        """The names of parameters in files of the user whose values in ``buffer`` differ: `store` does not
        write them."""
        return []


def weights_edges(layout: Layout, ranks: int) -> list[int]:
    """The first bytes of the parts of a unit's weights that are written separately (the ranks' shares, and
    the frozen weights), and the end of the last part."""
    if ranks == 1:
        return [0, layout.nbytes]
    begins = {share.first_byte for share in shares_of(layout, ranks)} | {layout.grad_nbytes}
    return sorted({0, *begins, layout.nbytes})


class WeightsInScratch(WeightsOnDisk):
    """The weights of one unit in a scratch file.

    The shares of ranks begin and end anywhere, but a disk moves whole blocks. So a block with the end of one
    share and the start of the next is on disk twice, once for each rank.
    """

    is_empty = False

    def __init__(
        self, layout: Layout, disk: Scratch, allocate: Allocate, *, share: Share, ranks: int = 1
    ) -> None:
        """This one of ``ranks`` updates ``share``."""
        self._allocate = allocate
        self._pieces: list[Piece] = []
        for first, stop in pairwise(weights_edges(layout, ranks)):
            is_own = ranks == 1 or share.first_byte <= first < share.stop_byte
            for start in range(first - first % disk.padded(1), stop, WEIGHTS_PIECE):
                end = min(start + WEIGHTS_PIECE, stop)
                extent = disk.extent(end - start)
                self._pieces.append(Piece("weights", disk, extent, start, max(first, start), end, is_own))
        self._own = [piece for piece in self._pieces if piece.is_own]
        self.padded_bytes = disk.padded(layout.nbytes)
        self.disk_bytes = self.read_bytes = sum(piece.nbytes for piece in self._pieces)
        self.own_read_bytes = self.own_written_bytes = sum(piece.nbytes for piece in self._own)

    def fetch(self, buffer: torch.Tensor, *, own: bool = False) -> None:
        for piece in self._own if own else self._pieces:
            # the first block of this piece may also be the last block of the piece before, which was just
            # read
            before = buffer[piece.start : piece.first].clone()
            piece.read(buffer[piece.moved])
            buffer[piece.start : piece.first] = before

    def store(self, buffer: torch.Tensor, *, own: bool = False) -> None:
        write_together([(piece, buffer[piece.moved]) for piece in (self._own if own else self._pieces)])

    def read(self, slice: Slice) -> torch.Tensor:
        values = read_bytes(self._pieces, slice.bytes, self._allocate)
        return values.view(slice.dtype).view(slice.param.shape)


class WeightsInFiles(WeightsOnDisk):
    """The weights of one unit if most of them are frozen and in files of the user, where they are read. The
    others stay in memory, which ranks share."""

    is_empty = False

    def __init__(
        self,
        layout: Layout,
        stored: Mapping[str, Pieces],
        reader: StoredTensors,
        *,
        hold: Allocate,
        share: Share,
    ) -> None:
        """``stored`` are those in files, by name; ``hold`` allocates memory for the others. This rank updates
        ``share``."""
        self._reader = reader
        self._stored = {slice: stored[slice.param.name] for slice in layout.slices if _is_in(slice, stored)}
        held = [slice for slice in layout.slices if slice not in self._stored]
        self.held_bytes = bytes_in_memory(layout, stored)
        pieces: Sequence[torch.Tensor] = hold(self.held_bytes).split([slice.nbytes for slice in held])
        self._held = dict(zip(held, pieces, strict=True))
        self._all, self._own = range(layout.nbytes), range(share.first_byte, share.stop_byte)
        self.padded_bytes = -(-layout.nbytes // ALIGNMENT) * ALIGNMENT
        self.read_bytes = sum(piece.nbytes for pieces in self._stored.values() for piece in pieces)

    def fetch(self, buffer: torch.Tensor, *, own: bool = False) -> None:
        if not own:
            wanted = (read_into(pieces, slice.view(buffer)) for slice, pieces in self._stored.items())
            self._reader.read(chain.from_iterable(wanted))
        for slice, values in self._held.items():
            _bytes_of(slice, buffer).copy_(values)

    def store(self, buffer: torch.Tensor, *, own: bool = False) -> None:
        written = self._own if own else self._all
        for slice, values in self._held.items():
            start = max(written.start, slice.offset)
            if (stop := min(written.stop, slice.offset + slice.nbytes)) > start:
                values[start - slice.offset : stop - slice.offset].copy_(buffer[start:stop])

    def read(self, slice: Slice) -> torch.Tensor:
        if slice in self._held:
            return self._held[slice].clone().view(slice.dtype).view(slice.param.shape)
        values = torch.empty(slice.param.shape, dtype=slice.dtype)
        self._reader.read(read_into(self._stored[slice], values))
        return values

    def is_stored(self, slice: Slice) -> bool:
        return slice in self._stored

    def unwritable(self, buffer: torch.Tensor) -> list[str]:
        differing = (
            slice.param.name
            for slice in self._stored
            # bytes, since no NaN is equal to itself
            if not torch.equal(self.read(slice).view(-1).view(torch.uint8), _bytes_of(slice, buffer))
        )
        return [*differing]


def stored_part(layout: Layout, stored: Mapping[str, Pieces]) -> dict[str, Pieces]:
    """The ``stored`` tensors that a unit of this layout reads from their files: its frozen parameters, if
    they have most of its bytes."""
    found = [slice for slice in layout.slices if _is_in(slice, stored)]
    if 2 * sum(slice.nbytes for slice in found) <= layout.nbytes:
        return {}
    return {slice.param.name: stored[slice.param.name] for slice in found}


def bytes_in_memory(layout: Layout, stored: Mapping[str, Pieces]) -> int:
    """Bytes of a unit's weights that stay in memory while the ``stored`` ones are in files."""
    return sum(slice.nbytes for slice in layout.slices if not _is_in(slice, stored))


def _is_in(slice: Slice, stored: Mapping[str, Pieces]) -> bool:
    return not slice.param.trainable and slice.param.name in stored


def _bytes_of(slice: Slice, buffer: torch.Tensor) -> torch.Tensor:
    return buffer[slice.offset : slice.offset + slice.nbytes]
