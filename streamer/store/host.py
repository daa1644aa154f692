"""The host buffers of a model's units, and what is on disk in their place.

One buffer per purpose for the whole model, each unit's shard a piece of it: a few large blocks are
pinned in no time, thousands of small ones are not.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch

from streamer.backends.disk import Disks, Scratch
from streamer.backends.stored_tensors import Pieces, StoredTensors, between_bytes
from streamer.store.layout import Layout
from streamer.store.on_disk import RING, StateOnDisk, StatePart, chunks_of
from streamer.store.placement import Placement
from streamer.store.purposes import (
    ALL_MOMENTS,
    FILE_BLOCKS,
    MASTERING,
    MODEL,
    STAGING,
    STATE_RING,
    WEIGHT_RING,
    WEIGHTS,
    Purpose,
)
from streamer.store.shard import HostShard, with_own_storage
from streamer.store.shares import Division, Owned
from streamer.store.weights_on_disk import (
    WEIGHT_BUFFERS,
    WeightsInFiles,
    WeightsInScratch,
    stored_part,
)

#: Disks without a folder and without files.
NO_DISKS = Disks([])


class Allocate(Protocol):
    """Allocates memory for a `HostStore`: see `Backend.host_buffer`."""

    def __call__(self, nbytes: int, *, pinned: bool) -> torch.Tensor: ...


class HostStore:
    """The shards of all units. A unit has a number here, its position among them."""

    def __init__(
        self,
        layouts: Sequence[Layout],
        allocate: Allocate,
        reserve: Callable[[int], torch.Tensor] | None = None,
        *,
        disks: Disks = NO_DISKS,
        placement: Placement | None = None,
        rank: int = 0,
        division: Division | None = None,
        machine: int = 0,
        private: Allocate | None = None,
        is_shared: bool = False,
    ) -> None:
        """Allocate everything of a model except gradients: on ``disks`` the units that ``placement`` lists,
        the rest in memory. Memory is not pinned yet: ``reserve`` (see `Backend.host_reserve`) may allocate it
        as it is written; call `pin` once it is. ``rank`` is this rank's number on its ``machine``. The ranks
        of a machine share the store, and each updates a share of every unit, see ``division``. ``private``
        allocates memory that other ranks cannot access. ``is_shared`` says that there are other ranks, if
        only on other machines.
        """
        self.disks = disks
        self.division = division or Division()
        #: whether other ranks, of this machine or of others, use the same state
        self.is_shared = is_shared or self.division != Division()
        self._allocate = allocate
        self._private = private or allocate
        self._buffers: dict[str, torch.Tensor] = {}
        #: by purpose, the shards with a buffer of their own, which may move to disk later
        self._apart: dict[str, list[HostShard]] = {}
        #: pieces that `exchange` has allocated: their shards, purposes, memory and bytes
        self._exchanged: list[tuple[HostShard, str, weakref.ref[Any], int]] = []
        #: by purpose, its scratch files
        self.scratch: dict[str, Scratch] = {}
        self._readers: list[StoredTensors] = []
        self._ring: list[torch.Tensor] = []
        #: buffers that weights on disk pass through
        self.weight_ring: list[torch.Tensor] = []

        self._machine = machine if self.is_divided else 0
        self._rank = rank
        self.shards = [
            HostShard(layout, *owned) for layout, owned in zip(layouts, self._owned(layouts), strict=True)
        ]
        placement = placement or Placement()
        self._put_on_disk(self._reserve(MASTERING, self._at(placement.masters)))
        self._put_weights_on_disk(self._at(placement.weights))
        give = reserve or partial(allocate, pinned=False)
        for purpose in MODEL:
            elsewhere = self._at(placement.weights if purpose is WEIGHTS else placement.masters)
            shards = [shard for shard in self.shards if shard not in elsewhere]
            self._deal(purpose, give(sum(self._nbytes(purpose, shard) for shard in shards)), shards)

    def _at(self, positions: Collection[int]) -> list[HostShard]:
        return [self.shards[position] for position in sorted(positions)]

    def _owned(self, layouts: Iterable[Layout]) -> Iterator[tuple[Owned, StateOnDisk]]:
        """This rank's part of each unit, and a place for the unit's state on disk."""
        number = 0
        for layout in layouts:
            owned = self.division.owned(layout, machine=self._machine, rank=self._rank)
            updated = owned.parts[self._rank].elements
            chunks = chunks_of(layout, first_number=number, division=self.division, machine=self._machine)
            number += len(chunks)
            yield owned, StateOnDisk(layout, chunks, updated, self.disks.buffer)

    def divide_by_parameter(self, whole: Callable[[int, Purpose], torch.Tensor], *, writes: bool) -> None:
        """From now on, each rank updates whole parameters. ``whole`` returns the complete piece of a shard,
        by its position, for a purpose that machines divide; one rank of each machine ``writes`` it. No
        moments may exist where machines divide the state, and nothing may be on disk."""
        before = dict[tuple[HostShard, Purpose], torch.Tensor]()
        for purpose in MASTERING if self.is_divided else ():
            shards = [shard for shard in self.shards if purpose.name in shard.held]
            before |= {(shard, purpose): whole(self.shards.index(shard), purpose) for shard in shards}
        self.division = replace(self.division, by_parameter=True)
        layouts = [shard.layout for shard in self.shards]
        for shard, (owned, on_disk) in zip(self.shards, self._owned(layouts), strict=True):
            shard.owned, shard.disk = owned, on_disk
        for purpose in dict.fromkeys(purpose for _, purpose in before):
            shards = [shard for shard in self.shards if purpose.name in shard.held]
            nbytes = sum(self._nbytes(purpose, shard) for shard in shards)
            self._deal(purpose, self._allocate(nbytes, pinned=False), shards)
            for shard in shards if writes else ():
                for held, places in shard.here(purpose, range(purpose.numel(shard.layout))):
                    held.copy_(before[shard, purpose][places])

    @property
    def is_divided(self) -> bool:
        """Whether machines divide the state, so that this one has a part of it."""
        return self.division.machines > 1

    @property
    def has_disks(self) -> bool:
        """Whether anything may be on disk."""
        return self.disks.may_write or bool(self.disks.stored)

    @property
    def can_move(self) -> bool:
        """Whether state may be on disk, so that state in memory may move there later."""
        return self.disks.may_write

    def _nbytes(self, purpose: Purpose, shard: HostShard) -> int:
        return self.division.nbytes(purpose, shard.layout)

    def pin(self, pin: Callable[[torch.Tensor], None]) -> None:
        """Call ``pin`` for the model's buffers that are copied to the device."""
        for purpose in MODEL:
            if purpose.pinned:
                pin(self._buffers[purpose.name])
        if WEIGHT_RING in self._buffers:
            pin(self._buffers[WEIGHT_RING])

    # --- what is held ------------------------------------------------------------------------------------

    def add(
        self,
        purposes: Iterable[Purpose],
        *,
        only: Sequence[HostShard] | None = None,
        on_disk: Collection[int] = (),
        in_place_of: Iterable[Purpose] = (),
    ) -> None:
        """Allocate a zeroed piece for each of ``purposes`` in every shard (or ``only`` in these), on disk for
        the shards at the positions ``on_disk``. Pieces for ``in_place_of`` are dropped. Raises DiskError,
        before anything is changed, if a disk has no room for both.
        """
        purposes, outside = list(purposes), self._at(on_disk)
        reserved = self._reserve(purposes, outside)
        self.drop(in_place_of)
        self._put_on_disk(reserved)
        shards = [shard for shard in self.shards if shard not in outside] if only is None else only
        for purpose in purposes:
            if self.can_move and not purpose.pinned:
                for shard in shards:
                    buffer = self._allocate(self._nbytes(purpose, shard), pinned=False)
                    shard.held[purpose.name] = _piece(purpose, buffer, shard)
                self._apart[purpose.name] = [*shards]
            else:
                nbytes = sum(self._nbytes(purpose, shard) for shard in shards)
                self._deal(purpose, self._allocate(nbytes, pinned=purpose.pinned), shards)

    def _deal(self, purpose: Purpose, buffer: torch.Tensor, shards: Sequence[HostShard]) -> None:
        """Divide ``buffer`` among ``shards``."""
        self._buffers[purpose.name] = buffer
        sizes = [self._nbytes(purpose, shard) for shard in shards]
        for shard, piece in zip(shards, buffer.split(sizes), strict=True):
            shard.held[purpose.name] = _piece(purpose, piece, shard)

    def holds(self, purposes: Iterable[Purpose]) -> bool:
        """Whether all of ``purposes`` are allocated, in their dtypes."""
        return all(shard.has(purpose) for purpose in purposes for shard in self.shards)

    def holds_some(self, purposes: Iterable[Purpose]) -> bool:
        """Whether one of ``purposes`` is allocated."""
        return any(shard.has(purpose) for purpose in purposes for shard in self.shards)

    def drop(self, purposes: Iterable[Purpose]) -> None:
        """Free the pieces for ``purposes``. Not for pinned buffers, which stay registered with the
        backend."""
        for purpose in purposes:
            assert not purpose.pinned
            self._buffers.pop(purpose.name, None)
            self._apart.pop(purpose.name, None)
            for shard in self.shards:
                shard.held.pop(purpose.name, None)
            self._take_off_disk(purpose, self.shards)

    def drop_all(self) -> None:
        """Free all buffers, in memory and on disk."""
        self._buffers.clear()
        self._apart.clear()
        self._ring.clear()
        for shard in self.shards:
            shard.give_up()
        self.close_disks()

    def staging(self, count: int, nbytes: int) -> list[torch.Tensor]:
        """``count`` buffers of ``nbytes`` for gradients that are consumed as soon as they are on the host."""
        self._buffers[STAGING] = self._private(count * nbytes, pinned=True)
        return list(self._buffers[STAGING].split(nbytes)) if nbytes else []

    def exchange(self, shard: HostShard, purpose: Purpose, piece: torch.Tensor | None) -> torch.Tensor:
        """Replace the piece in memory of ``shard`` for ``purpose`` by ``piece``, or by a new one. The old one
        may still be in use."""
        if piece is None:
            # pinned memory stays until the backend is closed, and this may come and go
            memory: Any = self._private(self._nbytes(purpose, shard), pinned=False).numpy()
            self._exchanged.append((shard, purpose.name, weakref.ref(memory), memory.nbytes))
            piece = _piece(purpose, torch.from_numpy(memory), shard)
        shard.held[purpose.name] = piece
        return piece

    def exchanged(self) -> list[tuple[HostShard, str, int]]:
        """The pieces from `exchange` that are still in use: their shards, purposes and bytes."""
        self._exchanged = [each for each in self._exchanged if each[2]() is not None]
        return [(shard, name, nbytes) for shard, name, _, nbytes in self._exchanged]

    def bytes_by_purpose(self) -> dict[str, int]:
        """Bytes of host memory allocated, by purpose; purposes without any are left out."""
        found = Counter({purpose: buffer.numel() for purpose, buffer in self._buffers.items()})
        for name, shards in self._apart.items():
            found[name] += sum(shard.held[name].nbytes for shard in shards)
        for shard in self.shards:
            found[WEIGHTS.name] += shard.weights_on_disk.held_bytes
        for _, name, nbytes in self.exchanged():
            found[name] += nbytes
        return dict(+found)

    # --- what is on disk ---------------------------------------------------------------------------------

    def on_disk(self) -> list[Purpose]:
        """The purposes for which a unit has a piece on disk."""
        return [*dict.fromkeys(p for shard in self.shards for p in shard.disk.purposes().values())]

    def disk_bytes_by_purpose(self) -> dict[str, int]:
        """Bytes on disk, by purpose."""
        found: Counter[str] = Counter()
        for shard in self.shards:
            found += Counter(shard.disk.bytes_by_purpose())
            found[WEIGHTS.name] += shard.weights_on_disk.disk_bytes
        return dict(+found)

    def ring(self) -> list[torch.Tensor]:
        """The buffers that chunks of the state on disk pass through, allocated at the first call and
        again after state on disk was added or dropped."""
        if not self._ring:
            nbytes = max(shard.disk.ring_bytes() for shard in self.shards)
            self._buffers[STATE_RING] = self.disks.buffer(RING * nbytes)
            self._ring = list(self._buffers[STATE_RING].split(nbytes))
        return self._ring

    def _forget_ring(self) -> None:
        self._ring = []
        self._buffers.pop(STATE_RING, None)

    def movable(self, shard: HostShard) -> dict[Purpose, int]:
        """The pieces of a shard in memory that may move to disk, with their bytes."""
        names = [name for name, shards in self._apart.items() if shard in shards]
        purposes = [purpose for purpose in ALL_MOMENTS if purpose.name in names and shard.has(purpose)]
        return {purpose: nbytes for purpose in purposes if (nbytes := self._nbytes(purpose, shard))}

    def move(self, positions: Collection[int]) -> None:
        """Move the `movable` pieces of the shards at ``positions`` to disk. The caller makes sure that they
        are not in use. Raises DiskError, and changes nothing, if the disk has no room or fails.
        """
        shards = self._at(positions)
        purposes = [*dict.fromkeys(purpose for shard in shards for purpose in self.movable(shard))]
        before = {shard: self.movable(shard) for shard in shards}
        known = self.scratch.get(purposes[0].name)
        self._put_on_disk(self._reserve(purposes, shards, known))
        try:
            for shard, movable in before.items():
                for purpose in movable:
                    for held, places in shard.here(purpose, range(purpose.numel(shard.layout))):
                        if not held.is_meta:
                            shard.disk.write(purpose, range(places.start, places.stop), held)
        except BaseException:
            for purpose in purposes:
                self._take_off_disk(purpose, shards)
            raise
        for purpose in purposes:
            for shard in shards:
                shard.held.pop(purpose.name, None)
            self._apart[purpose.name] = [it for it in self._apart[purpose.name] if it not in before]

    def _reserve(
        self, purposes: Sequence[Purpose], shards: Sequence[HostShard], known: Scratch | None = None
    ) -> list[tuple[HostShard, StatePart]]:
        """Allocate room on disk for ``shards``, in new scratch files or by extending the ``known`` ones."""
        if not shards:
            return []
        scratch = known or self.disks.open()
        try:
            parts = [
                (shard, shard.disk.reserve(purpose, scratch)) for purpose in purposes for shard in shards
            ]
            scratch.allocate()
        except BaseException:
            if known is None:
                scratch.close()
            raise
        return parts

    def _put_on_disk(self, reserved: Iterable[tuple[HostShard, StatePart]]) -> None:
        for shard, part in reserved:
            shard.disk.add(part)
            self.scratch[part.purpose.name] = part.disk
            self._forget_ring()

    def _take_off_disk(self, purpose: Purpose, shards: Iterable[HostShard]) -> None:
        """Drop the pieces of ``shards`` on disk for ``purpose``, and close unused scratch files."""
        for shard in shards:
            shard.disk.drop(purpose)
        if not any(purpose.name in shard.disk.purposes() for shard in self.shards):
            scratch = self.scratch.pop(purpose.name, None)
            if scratch is not None:
                self._forget_ring()
                if scratch not in self.scratch.values():
                    scratch.close()

    def _put_weights_on_disk(self, shards: Sequence[HostShard]) -> None:
        if not shards:
            return
        in_files = {shard: stored_part(shard.layout, self.disks.stored) for shard in shards}
        self._read_in_place({shard: stored for shard, stored in in_files.items() if stored})
        self._write_to_scratch([shard for shard, stored in in_files.items() if not stored])
        nbytes = max(shard.weights_on_disk.padded_bytes for shard in shards)
        self._buffers[WEIGHT_RING] = self.disks.buffer(WEIGHT_BUFFERS * nbytes)
        self.weight_ring = list(self._buffers[WEIGHT_RING].split(nbytes))

    def _read_in_place(self, shards: Mapping[HostShard, Mapping[str, Pieces]]) -> None:
        places = [place for stored in shards.values() for pieces in stored.values() for place in pieces]
        if not places:
            return
        self._buffers[FILE_BLOCKS] = self.disks.buffer(between_bytes(places))
        reader = self.disks.reader(self._buffers[FILE_BLOCKS])
        self._readers.append(reader)
        reader.open({place.file for place in places})
        hold = partial(self._allocate, pinned=False)
        for shard, stored in shards.items():
            shard.weights_on_disk = WeightsInFiles(shard.layout, stored, reader, hold=hold, share=shard.share)

    def _write_to_scratch(self, shards: Sequence[HostShard]) -> None:
        if not shards:
            return
        scratch = self.disks.open()
        try:
            for shard in shards:
                shard.weights_on_disk = WeightsInScratch(
                    shard.layout, scratch, self.disks.buffer, share=shard.share, ranks=self.division.ranks
                )
            scratch.allocate()
        except BaseException:
            scratch.close()
            raise
        self.scratch[WEIGHTS.name] = scratch

    @contextmanager
    def weights_in(self, shard: HostShard, *, read: bool = False) -> Iterator[None]:
        """Inside the block, weights of ``shard`` that are on disk are in memory; at its end they are written
        to disk. Without ``read`` they are not read first: the block sets all of them. One rank does so for
        all."""
        if not shard.is_out:
            yield
            if self.is_shared and not shard.weights_on_disk.is_empty:
                shard.weights_on_disk.store(shard.weight_copy)
            return
        shard.fetch_copy(self.disks.buffer, read=read)
        whole = False
        try:
            yield
            whole = True
        finally:
            shard.release_copy(write=whole)

    def close_disks(self) -> None:
        """Close all scratch files. State on disk cannot be read any more."""
        for scratch in self.scratch.values():
            scratch.close()
        for reader in self._readers:
            reader.close()
        self.scratch.clear()
        self._readers.clear()


def _piece(purpose: Purpose, buffer: torch.Tensor, shard: HostShard) -> torch.Tensor:
    return with_own_storage(buffer.view(purpose.dtype)[: purpose.numel(shard.layout)])
