"""The optimizer state of a unit on disk: a piece for each chunk and purpose.

A chunk is a range of the unit's elements, small enough for a ring of a few buffers whatever the model's size.
Each chunk has a separate piece for each purpose, so that only wanted bytes are read.

While a chunk is updated, the disk has the old state and memory has the new weights. If the following write
fails, the chunk is lost: reading it raises DiskError until it is written again. If a checkpoint then sets a
part of it, the rest becomes NaN. Weights on disk are lost in the same way.

The ranks of a machine share its disk. Each chunk is in the share of one rank, which writes it; all ranks may
read it. If machines divide the state, each has on its disk the chunks that its ranks update, and all of the
weights. [Note: ranks]
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch

from streamer.backends.disk import Extent, Scratch
from streamer.errors import DiskError
from streamer.store.layout import Layout, Slice
from streamer.store.purposes import Purpose
from streamer.store.shares import Division
from streamer_native import QUANTUM

#: The largest number of elements of a chunk: a multiple of the elements that share a draw of random bits.
CHUNK_ELEMENTS = 1 << 23
#: Buffers of the ring that chunks pass through: one is read, one is updated, one is written.
RING = 3

#: Allocates memory for transfers, flat uint8.
Allocate = Callable[[int], torch.Tensor]


@dataclass(eq=False)
class Piece:
    """Bytes ``first`` to ``stop`` of a buffer of ``what``, in an extent of ``disk``. Transfers move whole
    blocks, from byte ``start`` on. The rest of the first and last block belongs to pieces of other ranks."""

    what: str

    disk: Scratch
    extent: Extent
    start: int
    first: int
    stop: int
    is_own: bool
    #: a write has failed: the values are not on disk
    is_lost: bool = False
    _is_written: bool = False

    @property
    def is_written(self) -> bool:
        """Whether it may hold other values than zeros. Other ranks may have written it."""
        return self._is_written or self.disk.is_shared

    @property
    def nbytes(self) -> int:
        """Bytes that move."""
        return self.extent.padded_bytes

    @property
    def moved(self) -> slice:
        """The part of the buffer that moves."""
        return slice(self.start, self.start + self.nbytes)

    def read(self, into: torch.Tensor, part: range | None = None) -> None:
        """Read it, or ``part`` of its bytes, into ``into``, flat uint8. A piece that was never written is
        zero, and is not read from disk. Raises DiskError if it is lost."""
        if self.is_lost:
            raise DiskError(
                f"a part of {self.what} on disk ({self.extent.nbytes} bytes) is lost: it could not be "
                "written after an update; load a checkpoint"
            )
        if self.is_written:
            self.disk.read(self.extent, into, part)
        else:
            into.zero_()

    def write(self, source: torch.Tensor, part: range | None = None) -> None:
        """Write it, or ``part`` of its bytes, from ``source``, flat uint8; it is lost if that fails."""
        self.is_lost = True
        self.disk.write(self.extent, source, part)
        self.is_lost, self._is_written = False, True


def write_together(pieces: Sequence[tuple[Piece, torch.Tensor]]) -> None:
    """Write each of ``pieces`` from its buffer, flat uint8. All of them are lost if one write fails."""
    for piece, _ in pieces:
        piece.is_lost = True
    for piece, source in pieces:
        piece.write(source)
        piece.is_lost = True  # until the others are there too
    for piece, _ in pieces:
        piece.is_lost = False


def read_bytes(pieces: Iterable[Piece], wanted: range, allocate: Allocate) -> torch.Tensor:
    """A copy, flat uint8, of the bytes ``wanted`` of a buffer that is in ``pieces``."""
    values = torch.empty(len(wanted), dtype=torch.uint8)
    for piece, common in _overlapping(pieces, wanted):
        moved = _blocks(piece, common)
        buffer = allocate(len(moved))
        piece.read(buffer, moved)
        values[_within(common, wanted.start)] = buffer[_within(common, piece.start + moved.start)]
    return values


def write_bytes(pieces: Iterable[Piece], wanted: range, values: torch.Tensor, allocate: Allocate) -> None:
    """Set the bytes ``wanted`` of a buffer that is in ``pieces`` to ``values``, flat uint8. The other bytes
    of a piece stay as they are; in a lost piece they become NaN."""
    for piece, common in _overlapping(pieces, wanted):
        is_there = piece.is_written and not piece.is_lost
        moved = _blocks(piece, common) if is_there else range(piece.nbytes)
        buffer = allocate(len(moved))
        if piece.is_lost:
            # bytes of ones are NaN in every floating-point format
            buffer.fill_(255)
        elif len(common) < piece.stop - piece.first:
            piece.read(buffer, moved)
        buffer[_within(common, piece.start + moved.start)] = values[_within(common, wanted.start)]
        piece.write(buffer, moved)


def _overlapping(pieces: Iterable[Piece], wanted: range) -> Iterator[tuple[Piece, range]]:
    """The pieces that hold some of the bytes ``wanted``, and the range of these bytes in each."""
    for piece in pieces:
        common = range(max(piece.first, wanted.start), min(piece.stop, wanted.stop))
        if common:
            yield piece, common


def _blocks(piece: Piece, wanted: range) -> range:
    """The bytes of the piece that must move so that these bytes of the buffer are read or written."""
    first, stop, padded = wanted.start - piece.start, wanted.stop - piece.start, piece.disk.padded
    return range(first - first % padded(1), padded(stop))


def _within(places: range, begin: int) -> slice:
    """``places`` as indices of a buffer that starts at the place ``begin``."""
    return slice(places.start - begin, places.stop - begin)


@dataclass(frozen=True)
class Chunk:
    """Elements ``start`` to ``stop`` of a unit's flat state, and their blocks of 256 elements. ``number`` is
    unique in the model."""

    number: int
    start: int
    stop: int
    first_block: int
    stop_block: int

    def bytes(self, purpose: Purpose) -> range:
        """The bytes of `range`."""
        return purpose.bytes(self.range(purpose))

    def range(self, purpose: Purpose) -> range:
        """The chunk's range in a unit's flat buffer for ``purpose``."""
        if purpose.part is Slice.blocks:
            return range(self.first_block, self.stop_block)
        return range(self.start, self.stop)


def chunks_of(
    layout: Layout,
    *,
    first_number: int = 0,
    most: int | None = None,
    division: Division | None = None,
    machine: int | None = None,
) -> tuple[Chunk, ...]:
    """Cut a unit's state into chunks of at most ``most`` elements (`CHUNK_ELEMENTS` if None), each in the
    share of one rank, see ``division``. If machines divide the state: the chunks of one ``machine``, or of
    all if None.

    A chunk starts at a parameter or at a rank's share, or a multiple of ``most`` elements after that. So an
    update by chunks draws the same random bits as an update of the whole.
    """
    most = most or CHUNK_ELEMENTS
    parts = (division or Division()).parts(layout)
    edges = {part.start for of_machine in parts for part in of_machine}
    begins: list[tuple[int, int]] = []  # elements and blocks
    filled = most
    for slice in layout.trainable:
        inside = sorted(edge - slice.index for edge in edges if 0 < edge - slice.index < slice.padded)
        for start, stop in pairwise([0, *inside, slice.padded]):
            if filled + stop - start > most or slice.index + start in edges:
                places = range(start, min(stop, slice.numel), most)
                begins += [(slice.index + at, slice.block + at // QUANTUM) for at in places]
                filled = stop - places[-1] if places else filled
            else:
                filled += stop - start
    ends = [*begins[1:], (layout.state_numel, layout.state_blocks)][: len(begins)]
    found = (
        (start, stop, first_block, stop_block)
        for (start, first_block), (stop, stop_block) in zip(begins, ends, strict=True)
        if machine is None or any(start in part.elements for part in parts[machine])
    )
    return tuple(Chunk(first_number + number, *each) for number, each in enumerate(found))


class StatePart(NamedTuple):
    """The pieces of a unit on ``disk`` for one purpose, one for each chunk; none if the unit has nothing for
    ``purpose``, or this machine has no part of it."""

    purpose: Purpose
    disk: Scratch
    pieces: tuple[Piece, ...]


class StateOnDisk:
    """The optimizer state of one unit on disk. Callers make sure that no chunk is used by two threads at
    once."""

    def __init__(self, layout: Layout, chunks: Sequence[Chunk], updated: range, allocate: Allocate) -> None:
        """``chunks`` are those of this machine; this rank updates and writes the elements ``updated``."""
        self._layout = layout
        self._chunks = tuple(chunks)
        self._own = tuple(chunk for chunk in chunks if chunk.start in updated)
        self._allocate = allocate
        self._parts: dict[str, StatePart] = {}

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        """The chunks that are on disk."""
        return self._chunks if self._parts else ()

    @property
    def own(self) -> tuple[Chunk, ...]:
        """Those that this rank updates and writes."""
        return self._own if self._parts else ()

    def reserve(self, purpose: Purpose, disk: Scratch) -> StatePart:
        """A place on ``disk`` for ``purpose``. Pass it to `add` once the disk is allocated."""
        chunks = self._chunks if purpose.numel(self._layout) else ()
        what, pieces = f"optimizer state ({purpose.name})", list[Piece]()
        for chunk in chunks:
            place, is_own = chunk.bytes(purpose), chunk in self._own
            extent = disk.extent(len(place))
            pieces.append(Piece(what, disk, extent, place.start, place.start, place.stop, is_own))
        return StatePart(purpose, disk, tuple(pieces))

    def add(self, part: StatePart) -> None:
        """Add ``part``, which is zero, if it has pieces."""
        if part.purpose.numel(self._layout):
            self._parts[part.purpose.name] = part

    def drop(self, purpose: Purpose) -> None:
        """Drop the pieces for ``purpose``."""
        self._parts.pop(purpose.name, None)

    def drop_all(self) -> None:
        """Drop all pieces."""
        self._parts.clear()

    def purposes(self) -> dict[str, Purpose]:
        """The purposes that are on disk, by name."""
        return {name: part.purpose for name, part in self._parts.items()}

    def bytes_by_purpose(self) -> dict[str, int]:
        """Bytes on disk, by purpose."""
        return {name: sum(piece.nbytes for piece in part.pieces) for name, part in self._parts.items()}

    def ring_bytes(self) -> int:
        """Bytes of a buffer for the largest chunk."""
        return max(map(self.chunk_bytes, self.chunks), default=0)

    def chunk_bytes(self, chunk: Chunk) -> int:
        """Bytes that a chunk takes on disk."""
        return sum(piece.nbytes for _, piece, _ in self._of(chunk))

    def _of(self, chunk: Chunk) -> Iterator[tuple[Purpose, Piece, slice]]:
        """A chunk's piece for each purpose, and its place in a buffer of all of them."""
        at = 0
        for part in self._parts.values():
            piece = part.pieces[chunk.number - self._chunks[0].number]
            yield part.purpose, piece, slice(at, at + piece.nbytes)
            at += piece.nbytes

    def pieces(self, chunk: Chunk, buffer: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """The chunk's part for each purpose as it lies in ``buffer``, flat uint8."""
        return {
            purpose.name: buffer[place][: piece.extent.nbytes].view(purpose.dtype)
            for purpose, piece, place in self._of(chunk)
        }

    def read_chunk(self, chunk: Chunk, buffer: torch.Tensor) -> None:
        """Read a chunk into ``buffer``."""
        for _, piece, place in self._of(chunk):
            piece.read(buffer[place])

    def begin_update(self, chunk: Chunk) -> None:
        """Called before the chunk that `read_chunk` has read is changed: it is lost until it is written."""
        for _, piece, _ in self._of(chunk):
            piece.is_lost = True

    def write_chunk(self, chunk: Chunk, buffer: torch.Tensor) -> None:
        """Write a chunk from ``buffer``."""
        write_together([(piece, buffer[place]) for _, piece, place in self._of(chunk)])

    def read(self, purpose: Purpose, elements: range) -> torch.Tensor:
        """A copy of these elements (or blocks) of the unit's flat buffer for ``purpose``."""
        pieces = self._parts[purpose.name].pieces
        return read_bytes(pieces, purpose.bytes(elements), self._allocate).view(purpose.dtype)

    def write(self, purpose: Purpose, elements: range, values: torch.Tensor, *, alone: bool = False) -> None:
        """Set these elements of the unit's flat buffer for ``purpose`` to ``values``, in its dtype. All ranks
        call it, and each writes its own chunks, unless this one writes ``alone``."""
        pieces = [piece for piece in self._parts[purpose.name].pieces if alone or piece.is_own]
        values = values.contiguous().view(-1).view(torch.uint8)
        write_bytes(pieces, purpose.bytes(elements), values, self._allocate)
