"""Optimizer state that lies on disk: a unit's flat buffers of it, in chunks.

A chunk is a range of the unit's elements, small enough for a ring of a few buffers whatever the model's size.
Each purpose has an extent of its own for each chunk, so that what is read is what is wanted. What was never
written is zero, as memory would be, and is not read.

While a chunk is updated the disk has its state of before, and memory the weights of after. If the write that
follows fails, the chunk is lost: reading it raises DiskError until it is written. Where only a part of it is,
by a checkpoint that is loaded, the rest is NaN from then on.

The ranks of a machine share what is on its disk. No chunk is in two ranks' shares: what all ranks write is
written by the one that owns the chunk, and any of them may read it. Where machines divide the state each has
on its disk the chunks that its ranks update, and all of the weights. [Note: ranks]
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import Protocol

import torch

from streamer.backends.direct_io import ALIGNMENT
from streamer.backends.disk import Extent
from streamer.backends.stored_tensors import Pieces, StoredTensor, read_into
from streamer.errors import DiskError
from streamer.memory.layout import Layout, Slice
from streamer.memory.purposes import Purpose
from streamer.memory.shares import Division, Share, shares_of
from streamer_native import QUANTUM

#: Elements of a chunk at most. A multiple of the runs that share a draw of random bits.
CHUNK_ELEMENTS = 1 << 23
#: Buffers of the ring that chunks pass through: one is read, one is updated, one is written.
RING = 3
#: Buffers of the ring of weights: of the unit that is visited, of the next one, and of one that is read.
WEIGHT_BUFFERS = 3


class Disk(Protocol):
    """Where extents lie, which come into being together: see `streamer.backends.disk.Scratch`."""

    @property
    def is_shared(self) -> bool: ...

    def padded(self, nbytes: int) -> int: ...

    def extent(self, nbytes: int) -> Extent: ...

    def allocate(self) -> None: ...

    def close(self) -> None: ...

    def read(self, extent: Extent, into: torch.Tensor, part: range | None = None) -> None: ...

    def write(self, extent: Extent, source: torch.Tensor, part: range | None = None) -> None: ...


@dataclass(frozen=True)
class Chunk:
    """Elements ``start`` to ``stop`` of a unit's flat state, and their blocks of 256 elements. ``number`` is
    another one for every chunk of a model."""

    number: int
    start: int
    stop: int
    first_block: int
    stop_block: int

    def range(self, purpose: Purpose) -> range:
        """What the chunk has of a unit's flat buffer for ``purpose``."""
        if purpose.part is Slice.blocks:
            return range(self.first_block, self.stop_block)
        return range(self.start, self.stop)

    def nbytes(self, purpose: Purpose) -> int:
        """Bytes of the chunk's part for ``purpose``."""
        return len(self.range(purpose)) * purpose.dtype.itemsize


def chunks_of(
    layout: Layout,
    *,
    first_number: int = 0,
    most: int | None = None,
    division: Division | None = None,
    machine: int | None = None,
) -> tuple[Chunk, ...]:
    """Cut a unit's state into chunks of at most ``most`` elements (`CHUNK_ELEMENTS` if None), each of which
    one rank updates, as ``division`` says; of a state that machines divide those of one ``machine``, or of
    all of them if None.

    A chunk begins where a parameter or what a rank updates begins, or a multiple of ``most`` elements after
    that, so that an update of chunks draws the random bits of an update of the whole.
    """
    most = CHUNK_ELEMENTS if most is None else most
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


@dataclass(frozen=True)
class _Held:
    """What a unit has on disk for one purpose: an extent of ``disk`` for each chunk, by its number."""

    purpose: Purpose
    disk: Disk
    extents: Mapping[int, Extent]


class StateOnDisk:
    """What one unit keeps on disk. Callers see to it that nobody reads or writes a chunk meanwhile."""

    def __init__(
        self,
        layout: Layout,
        chunks: Sequence[Chunk],
        allocate: Callable[[int], torch.Tensor],
        share: range | None = None,
    ) -> None:
        """``allocate`` gives memory for transfers, flat uint8; the elements in ``share`` are those that this
        rank updates, None for all."""
        self.chunks = chunks
        #: those that this rank updates and writes
        self.own = tuple(chunk for chunk in chunks if share is None or chunk.start in share)
        self._layout = layout
        self._allocate = allocate
        self._held: dict[str, _Held] = {}
        self._written: set[Extent] = set()
        self._lost: set[Extent] = set()

    def extents(self, purpose: Purpose, disk: Disk) -> list[Extent]:
        """Places for `add`, one for each chunk; none where the unit has nothing of ``purpose``, or this
        machine has no part of it."""
        if not purpose.numel(self._layout):
            return []
        return [disk.extent(chunk.nbytes(purpose)) for chunk in self.chunks]

    def add(self, purpose: Purpose, disk: Disk, extents: Sequence[Extent]) -> None:
        """Have room for ``purpose``, which is zero, at ``extents``, if the unit has anything of it."""
        if not purpose.numel(self._layout):
            return
        by_chunk = {chunk.number: extent for chunk, extent in zip(self.chunks, extents, strict=True)}
        self._held[purpose.name] = _Held(purpose, disk, by_chunk)

    def drop(self, purpose: Purpose) -> None:
        """Forget what is held for ``purpose``."""
        if (held := self._held.pop(purpose.name, None)) is not None:
            self._written.difference_update(held.extents.values())
            self._lost.difference_update(held.extents.values())

    def find(self, name: str) -> Purpose | None:
        """The purpose of this name, if there is room for it."""
        held = self._held.get(name)
        return None if held is None else held.purpose

    def purposes(self) -> list[Purpose]:
        """All purposes that there is room for."""
        return [held.purpose for held in self._held.values()]

    def bytes_by_purpose(self) -> dict[str, int]:
        """Bytes on disk, by purpose."""
        return {
            name: sum(extent.padded_bytes for extent in held.extents.values())
            for name, held in self._held.items()
        }

    def ring_bytes(self) -> int:
        """Bytes of a buffer that any of the chunks can pass through."""
        return max((self.chunk_bytes(chunk) for chunk in self.chunks), default=0)

    def chunk_bytes(self, chunk: Chunk) -> int:
        """Bytes that a chunk takes on disk."""
        return sum(extent.padded_bytes for _, extent, _ in self._of(chunk))

    def _of(self, chunk: Chunk) -> Iterator[tuple[Purpose, Extent, int]]:
        """A chunk's extent for each purpose, and the byte at which it begins in a buffer of all of them."""
        at = 0
        for held in self._held.values():
            extent = held.extents[chunk.number]
            yield held.purpose, extent, at
            at += extent.padded_bytes

    def pieces(self, chunk: Chunk, buffer: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """The chunk's part for each purpose as it lies in ``buffer``, flat uint8."""
        return {
            purpose.name: buffer[at : at + chunk.nbytes(purpose)].view(purpose.dtype)
            for purpose, _, at in self._of(chunk)
        }

    def read_chunk(self, chunk: Chunk, buffer: torch.Tensor) -> None:
        """Bring a chunk to ``buffer``."""
        for purpose, extent, at in self._of(chunk):
            self._read(purpose, extent, buffer[at : at + extent.padded_bytes])

    def begin_update(self, chunk: Chunk) -> None:
        """What `read_chunk` has brought is about to be changed: the chunk is lost if it is not written."""
        self._lost.update(extent for _, extent, _ in self._of(chunk))

    def write_chunk(self, chunk: Chunk, buffer: torch.Tensor) -> None:
        """Write what `read_chunk` has brought."""
        self.begin_update(chunk)
        for purpose, extent, at in self._of(chunk):
            self._write(purpose, extent, buffer[at : at + extent.padded_bytes])
        self._lost.difference_update(extent for _, extent, _ in self._of(chunk))

    def read(self, purpose: Purpose, elements: range) -> torch.Tensor:
        """A copy of these elements (or blocks) of the unit's flat buffer for ``purpose``."""
        values = torch.empty(len(elements), dtype=purpose.dtype)
        for chunk, extent, common in self._overlapping(purpose, elements):
            buffer, part, here = self._around(purpose, chunk, extent, common)
            self._read(purpose, extent, buffer, part)
            values[_within(common, elements.start)] = here
        return values

    def write(self, purpose: Purpose, elements: range, values: torch.Tensor, *, alone: bool = False) -> None:
        """Set these elements of the unit's flat buffer for ``purpose``. All ranks do so, each in its own
        chunks, unless this one does so ``alone``."""
        values = values.reshape(-1)
        for chunk, extent, common in self._overlapping(purpose, elements):
            if not (alone or chunk in self.own):
                continue
            is_there = extent not in self._lost and self._is_written(purpose, extent)
            buffer, part, here = self._around(purpose, chunk, extent, common, whole=not is_there)
            if extent in self._lost:
                # bytes of ones are NaN in every floating-point format
                buffer.fill_(255)
            elif common != chunk.range(purpose):
                self._read(purpose, extent, buffer, part)
            here.copy_(values[_within(common, elements.start)])
            self._lost.add(extent)
            self._write(purpose, extent, buffer, part)
            self._lost.discard(extent)

    def _around(
        self, purpose: Purpose, chunk: Chunk, extent: Extent, wanted: range, *, whole: bool = False
    ) -> tuple[torch.Tensor, range, torch.Tensor]:
        """A buffer for the blocks of a chunk that its ``wanted`` elements lie in, or for the ``whole`` of it;
        which bytes of the extent those are; and where in the buffer the wanted elements lie."""
        begin, size = chunk.range(purpose).start, purpose.dtype.itemsize
        first, stop = (wanted.start - begin) * size, (wanted.stop - begin) * size
        padded = self._held[purpose.name].disk.padded
        part = range(extent.padded_bytes) if whole else range(first - first % padded(1), padded(stop))
        buffer = self._allocate(len(part))
        return buffer, part, buffer[first - part.start : stop - part.start].view(purpose.dtype)

    def _overlapping(self, purpose: Purpose, elements: range) -> Iterator[tuple[Chunk, Extent, range]]:
        """The chunks that hold some of ``elements``, each with its extent and which ones those are."""
        for chunk in self.chunks:
            held = chunk.range(purpose)
            common = range(max(held.start, elements.start), min(held.stop, elements.stop))
            if common:
                yield chunk, self._held[purpose.name].extents[chunk.number], common

    def _is_written(self, purpose: Purpose, extent: Extent) -> bool:
        """Whether the extent may have other values than zeros."""
        return extent in self._written or self._held[purpose.name].disk.is_shared

    def _read(self, purpose: Purpose, extent: Extent, into: torch.Tensor, part: range | None = None) -> None:
        if extent in self._lost:
            raise DiskError(
                f"optimizer state on disk ({purpose.name}, {extent.nbytes} bytes) is lost: it could not "
                "be written after an update; load a checkpoint"
            )
        if self._is_written(purpose, extent):
            self._held[purpose.name].disk.read(extent, into, part)
        else:
            into.zero_()

    def _write(
        self, purpose: Purpose, extent: Extent, source: torch.Tensor, part: range | None = None
    ) -> None:
        self._held[purpose.name].disk.write(extent, source, part)
        self._written.add(extent)


def _within(elements: range, begin: int) -> slice:
    """Where ``elements`` lie in a buffer that begins with element ``begin``."""
    return slice(elements.start - begin, elements.stop - begin)


#: Bytes of a unit's weights in one extent, a multiple of any alignment.
WEIGHTS_PIECE = 64 << 20


class WeightsOnDisk(abc.ABC):
    """The weights of one unit that are not in host memory, laid out as there. Callers see to it that nobody
    reads or writes them meanwhile. What is this rank's *own* is what it updates; one process updates all."""

    #: bytes of a buffer for all of the weights
    padded_bytes: int
    #: bytes of scratch files
    disk_bytes = 0
    #: bytes that `fetch` moves from disk
    read_bytes: int
    #: those of what is own, and the bytes that `store` moves there of it
    own_read_bytes = 0
    own_written_bytes = 0
    #: bytes of host memory that are held all the same
    held_bytes = 0

    @abc.abstractmethod
    def fetch(self, buffer: torch.Tensor, *, own: bool = False) -> None:
        """Bring the weights to ``buffer``, flat uint8. With ``own`` it may hold anything in place of the
        others."""

    @abc.abstractmethod
    def store(self, buffer: torch.Tensor, *, own: bool = False) -> None:
        """Write the weights, or those that are ``own``, which are in ``buffer``, flat uint8, but for what is
        `unwritable`. If that fails they are lost."""

    @abc.abstractmethod
    def read(self, slice: Slice) -> torch.Tensor:
        """A copy of a parameter."""

    def is_stored(self, slice: Slice) -> bool:
        """Whether a parameter lies in somebody else's file, which is never written."""
        return False

    def unwritable(self, buffer: torch.Tensor) -> list[str]:
        """The names of parameters that have other values in ``buffer`` and that `store` leaves alone."""
        return []


@dataclass(frozen=True)
class _Piece:
    """Bytes ``first`` to ``stop`` of a unit's weights in an extent. What moves begins with byte ``start``,
    where a block begins, and ends with a block: neighbours of other ranks have the rest of both blocks."""

    start: int
    first: int
    stop: int
    extent: Extent
    is_own: bool

    @property
    def moved(self) -> slice:
        """What moves of a buffer for all of the weights."""
        return slice(self.start, self.start + self.extent.padded_bytes)


def weights_edges(layout: Layout, ranks: int) -> list[int]:
    """The bytes with which the parts of a unit's weights begin that are written apart from each other: the
    ranks' shares, and what nobody updates; and the byte where the last part ends."""
    if ranks == 1:
        return [0, layout.nbytes]
    begins = {share.first_byte for share in shares_of(layout, ranks)} | {layout.grad_nbytes}
    return sorted({0, *begins, layout.nbytes})


class WeightsInScratch(WeightsOnDisk):
    """The weights of one unit in a scratch file.

    The ranks' shares of them begin and end anywhere, and a disk moves whole blocks. So a block in which one
    share ends and the next one begins is on disk twice, once for either rank.
    """

    def __init__(
        self,
        layout: Layout,
        disk: Disk,
        allocate: Callable[[int], torch.Tensor],
        *,
        share: Share | None = None,
        ranks: int = 1,
    ) -> None:
        """``allocate`` gives memory for transfers, flat uint8; of ``ranks`` this one updates ``share``."""
        self._disk = disk
        self._allocate = allocate
        self._nbytes = layout.nbytes
        self._pieces: list[_Piece] = []
        for first, stop in pairwise(weights_edges(layout, ranks)):
            is_own = ranks == 1 or (share is not None and share.first_byte <= first < share.stop_byte)
            begin = first - first % disk.padded(1)
            for start in range(begin, stop, WEIGHTS_PIECE):
                end = min(start + WEIGHTS_PIECE, stop)
                extent = disk.extent(end - start)
                self._pieces.append(_Piece(start, max(first, start), end, extent, is_own))
        self._own = [piece for piece in self._pieces if piece.is_own]
        self._is_lost = False

        self.padded_bytes = disk.padded(self._nbytes)
        self.disk_bytes = self.read_bytes = sum(piece.extent.padded_bytes for piece in self._pieces)
        self.own_read_bytes = self.own_written_bytes = sum(piece.extent.padded_bytes for piece in self._own)

    def fetch(self, buffer: torch.Tensor, *, own: bool = False) -> None:
        self._check()
        for piece in self._own if own else self._pieces:
            # the block with which this piece begins may end the piece before, which was read a moment ago
            before = buffer[piece.start : piece.first].clone()
            self._disk.read(piece.extent, buffer[piece.moved])
            buffer[piece.start : piece.first] = before

    def store(self, buffer: torch.Tensor, *, own: bool = False) -> None:
        self._is_lost = True
        for piece in self._own if own else self._pieces:
            self._disk.write(piece.extent, buffer[piece.moved])
        self._is_lost = False

    def read(self, slice: Slice) -> torch.Tensor:
        self._check()
        wanted = range(slice.offset, slice.offset + slice.nbytes)
        values = torch.empty(len(wanted), dtype=torch.uint8)
        for piece in self._pieces:
            common = range(max(piece.first, wanted.start), min(piece.stop, wanted.stop))
            if common:
                first, stop = common.start - piece.start, common.stop - piece.start
                part = range(first - first % self._disk.padded(1), self._disk.padded(stop))
                buffer = self._allocate(len(part))
                self._disk.read(piece.extent, buffer, part)
                values[_within(common, wanted.start)] = buffer[first - part.start : stop - part.start]
        return values.view(slice.dtype).view(slice.param.shape)

    def _check(self) -> None:
        if self._is_lost:
            raise DiskError(
                f"weights on disk ({self._nbytes} bytes) are lost: they could not be written after an "
                "update; load a checkpoint"
            )


class Reader(Protocol):
    """What reads tensors of files: see `streamer.backends.stored_tensors.StoredTensors`."""

    def open(self, files: Iterable[Path]) -> None: ...

    def read(self, wanted: Iterable[tuple[StoredTensor, torch.Tensor]]) -> None: ...

    def close(self) -> None: ...


class WeightsInFiles(WeightsOnDisk):
    """The weights of one unit of which most lie, frozen, in somebody else's files, and are read where they
    are. The others are held in memory, which ranks share."""

    def __init__(
        self,
        layout: Layout,
        stored: Mapping[str, Pieces],
        reader: Reader,
        *,
        hold: Callable[[int], torch.Tensor],
        share: Share,
    ) -> None:
        """``stored`` are those in files, by name; ``hold`` gives memory, flat uint8, for the others, of which
        this rank updates ``share``."""
        self._reader = reader
        self._stored = [(slice, stored[slice.param.name]) for slice in layout.slices if _is_in(slice, stored)]
        held = [slice for slice in layout.slices if not _is_in(slice, stored)]
        self.held_bytes = held_beside(layout, stored)
        pieces: Sequence[torch.Tensor] = hold(self.held_bytes).split([slice.nbytes for slice in held])
        self._held = [*zip(held, pieces, strict=True)]
        self._all, self._own = range(layout.nbytes), range(share.first_byte, share.stop_byte)
        self.padded_bytes = -(-layout.nbytes // ALIGNMENT) * ALIGNMENT
        self.read_bytes = sum(piece.nbytes for _, pieces in self._stored for piece in pieces)

    def fetch(self, buffer: torch.Tensor, *, own: bool = False) -> None:
        if not own:
            self._reader.read(
                chain.from_iterable(read_into(pieces, slice.view(buffer)) for slice, pieces in self._stored)
            )
        for slice, values in self._held:
            _bytes_of(slice, buffer).copy_(values)

    def store(self, buffer: torch.Tensor, *, own: bool = False) -> None:
        written = self._own if own else self._all
        for slice, values in self._held:
            start = max(written.start, slice.offset)
            if (stop := min(written.stop, slice.offset + slice.nbytes)) > start:
                values[start - slice.offset : stop - slice.offset].copy_(buffer[start:stop])

    def read(self, slice: Slice) -> torch.Tensor:
        for known, values in self._held:
            if known is slice:
                return values.clone().view(slice.dtype).view(slice.param.shape)
        values = torch.empty(slice.param.shape, dtype=slice.dtype)
        for known, pieces in self._stored:
            if known is slice:
                self._reader.read(read_into(pieces, values))
        return values

    def is_stored(self, slice: Slice) -> bool:
        return any(slice is known for known, _ in self._stored)

    def unwritable(self, buffer: torch.Tensor) -> list[str]:
        differing = (
            slice.param.name
            for slice, _ in self._stored
            # bytes, since no NaN is equal to itself
            if not torch.equal(self.read(slice).view(-1).view(torch.uint8), _bytes_of(slice, buffer))
        )
        return [*differing]


def stored_part(layout: Layout, stored: Mapping[str, Pieces]) -> dict[str, Pieces]:
    """Those of the ``stored`` tensors that a unit of this layout reads where they are: its frozen parameters,
    if they have most of its bytes."""
    found = [slice for slice in layout.slices if _is_in(slice, stored)]
    if 2 * sum(slice.nbytes for slice in found) <= layout.nbytes:
        return {}
    return {slice.param.name: stored[slice.param.name] for slice in found}


def held_beside(layout: Layout, stored: Mapping[str, Pieces]) -> int:
    """Bytes of the weights of a unit that are held in memory while those ``stored`` are not."""
    return sum(slice.nbytes for slice in layout.slices if not _is_in(slice, stored))


def _is_in(slice: Slice, stored: Mapping[str, Pieces]) -> bool:
    return not slice.param.trainable and slice.param.name in stored


def _bytes_of(slice: Slice, buffer: torch.Tensor) -> torch.Tensor:
    return buffer[slice.offset : slice.offset + slice.nbytes]
