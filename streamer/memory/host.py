"""What a unit keeps in host memory: the streamed weight, what makes it an exact fp32 master, its gradient.

One buffer per purpose for the whole model, each unit's shard a piece of it: a few large blocks are
pinned in no time, thousands of small ones are not.
"""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, Protocol

import torch

import streamer_native as native
from streamer.backends.stored_tensors import Pieces, between_bytes
from streamer.memory.layout import Layout, Slice, Stretch
from streamer.memory.on_disk import (
    RING,
    WEIGHT_BUFFERS,
    Chunk,
    Disk,
    Reader,
    StateOnDisk,
    WeightsInFiles,
    WeightsInScratch,
    WeightsOnDisk,
    chunks_of,
    stored_part,
)
from streamer.memory.purposes import (
    ALL_MOMENTS,
    DIVIDED,
    FILE_BLOCKS,
    GRADIENTS,
    MASTERING,
    MASTERS,
    MODEL,
    REMAINDERS,
    STAGING,
    STATE_RING,
    SUMS,
    WEIGHT_RING,
    WEIGHTS,
    Purpose,
)
from streamer.memory.shares import Division, Share, places_of, shares_of, within

#: What is added to the bits of a master before they are split: see streamer_native.bfloat16.
HALF_OF_LAST_PLACE = 0x8000


def streamed(masters: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """fp32 ``masters`` as they are streamed in ``dtype``: see [Note: split master] for bf16."""
    if dtype != torch.bfloat16:
        return masters.to(dtype)
    bits = masters.nan_to_num(math.nan, math.inf, -math.inf).contiguous().view(torch.int32)
    # wraps around, as the kernel's unsigned arithmetic does
    return (bits + HALF_OF_LAST_PLACE >> 16).to(torch.int16).view(torch.bfloat16)


class Allocate(Protocol):
    """What gives a `HostStore` its memory: see `Backend.host_buffer`."""

    def __call__(self, nbytes: int, *, pinned: bool) -> torch.Tensor: ...


class Disks(Protocol):
    """The folders that `wrap` was given, if it ``may_write`` anything, and frozen parameters that are
    ``stored`` in files, by name. `open`
    makes scratch files in the folders, `reader` reads what is stored by way of ``between``, and `buffer` is
    memory that both can read into."""

    stored: Mapping[str, Pieces]
    may_write: bool

    def open(self) -> Disk: ...

    def reader(self, between: torch.Tensor) -> Reader: ...

    def buffer(self, nbytes: int) -> torch.Tensor: ...


@cache
def _nothing(dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(0, dtype=dtype)


class HostShard:
    """All host buffers of one unit, as flat tensors by the name of their purpose. Ranks share them, and each
    updates its ``share``; one process updates all.

    [Note: masters]
    Every trained element has an fp32 master. It keeps its master while its streamed bits are what they were:
    no write of anything resets anything. Nobody has to notice a write, since the kernels, checkpoints and
    `unwrap` read the weight as it is:

    - bf16: the master is the weight and the remainder joined, whatever the weight is by then. See [Note:
      split master] in `streamer_native/bfloat16.py`;
    - fp16: the master stands where it rounds to the weight. Where it does not, the weight was written, and is
      the master;
    - fp32: the weight is the master.

    Values in fp32 that are copied into a parameter (``copy_``, ``load_state_dict``) are the masters exactly:
    `load`.

    Where several machines divide the state among them, each rank updates a part of its share. Of what is
    `DIVIDED` the machine holds the ``parts`` of its ranks, one after the other, and nothing else.

    ``weight`` and ``gradient`` are uint8, laid out by ``layout``; remainders (uint16, of bf16 weights),
    masters (fp32, of fp16 weights) and ``sums`` (fp32, of gradients in bf16 or fp16) have one element per
    trainable parameter element, padding included. What the unit does not hold has no elements.
    """

    def __init__(
        self, layout: Layout, share: Share | None = None, parts: Sequence[Share] = (), rank: int = 0
    ) -> None:
        """``rank`` is this one of those that have the ``parts``."""
        self.layout = layout
        self.share = share or shares_of(layout, 1)[0]
        self.parts = parts
        self._rank = rank
        self.held: dict[str, torch.Tensor] = {}
        #: the optimizer's state that is not held in memory, if any
        self.disk: StateOnDisk | None = None
        #: where the weights are that are not held in memory, or have been
        self.weights_on_disk: WeightsOnDisk | None = None
        #: called before what is held changes, by an update say
        self.before_change: Callable[[], None] | None = None

    def __getitem__(self, purpose: Purpose) -> torch.Tensor:
        """The piece for ``purpose`` in memory, empty if the unit holds none."""
        piece = self.held.get(purpose.name)
        assert piece is not None or not self.is_on_disk(purpose), "to be read by `part`"
        return _nothing(purpose.dtype) if piece is None else piece

    @property
    def weight(self) -> torch.Tensor:
        piece = self.held.get(WEIGHTS.name)
        assert piece is not None or self.weights_on_disk is None, "they are on disk"
        return _nothing(WEIGHTS.dtype) if piece is None else piece

    @property
    def uses_disk(self) -> bool:
        """Whether anything of the unit has its place on disk."""
        return self.disk is not None or self.weights_on_disk is not None

    @property
    def is_out(self) -> bool:
        """Whether the weights are on disk and nowhere else."""
        return self.weights_on_disk is not None and WEIGHTS.name not in self.held

    @property
    def is_divided(self) -> bool:
        """Whether other machines have parts of the state that this one has not."""
        return bool(self.parts)

    @property
    def held_parts(self) -> Sequence[Share]:
        """What this machine has of the state."""
        return self.parts or shares_of(self.layout, 1)

    @property
    def updated(self) -> Share:
        """What this rank updates."""
        return self.parts[self._rank] if self.parts else self.share

    @property
    def gradient(self) -> torch.Tensor:
        return self[GRADIENTS]

    @property
    def sums(self) -> torch.Tensor:
        return self[SUMS]

    def own(self, stretches: Iterable[Stretch]) -> list[Stretch]:
        """What of ``stretches`` is in the share."""
        return [own for stretch in stretches if (own := within(stretch, self.share.elements)).numel]

    def has(self, purpose: Purpose) -> bool:
        """Whether there is room for ``purpose``, in its dtype."""
        if self.disk is not None and (held := self.disk.find(purpose.name)) is not None:
            return held == purpose
        piece = self.held.get(purpose.name)
        return piece is not None and piece.dtype == purpose.dtype

    def is_on_disk(self, purpose: Purpose) -> bool:
        """Whether the unit's piece for ``purpose`` is on disk."""
        return self.disk is not None and self.disk.find(purpose.name) is not None

    def part(self, purpose: Purpose, slice: Slice) -> torch.Tensor:
        """A parameter's part of the piece for ``purpose``: a view, or a copy of what is on disk."""
        assert not (self.is_divided and purpose.name in DIVIDED), "to be read by way of all machines"
        if self.disk is None or self.disk.find(purpose.name) is None:
            return purpose.part(slice, self[purpose])
        values = self.disk.read(purpose, purpose.range(slice))
        return values if purpose.part is Slice.blocks else values.view(slice.param.shape)

    def set_part(self, purpose: Purpose, slice: Slice, values: torch.Tensor, *, alone: bool = False) -> None:
        """Set a parameter's part of the piece for ``purpose``, or what of it this machine holds. All ranks
        do so, unless this one does so ``alone`` on its machine; until they have met, others may find what was
        there before."""
        if self.disk is not None and self.disk.find(purpose.name) is not None:
            self.disk.write(purpose, purpose.range(slice), values.to(purpose.dtype), alone=alone)
        elif self.is_divided and purpose.name in DIVIDED:
            values = values.expand(purpose.shape(slice)).reshape(-1)
            for held, wanted in self.here(purpose, purpose.range(slice)):
                held.copy_(values[wanted])
        else:
            purpose.part(slice, self[purpose]).copy_(values)

    def here(self, purpose: Purpose, wanted: range) -> Iterator[tuple[torch.Tensor, slice]]:
        """What of the ``wanted`` elements (or blocks) of the unit is on this machine, of a state that is
        divided, and where it lies among those that are wanted: views, or copies of what is on disk."""
        disk = self.disk if self.is_on_disk(purpose) else None
        for start, stop, at in places_of(self.parts, purpose, wanted):
            if disk is None:
                held = self[purpose][at : at + stop - start]
            else:
                held = disk.read(purpose, range(start, stop))
            yield held, slice(start - wanted.start, stop - wanted.start)

    def weight_of(self, slice: Slice) -> torch.Tensor:
        """A parameter's weight: a view, or a copy of what is on disk."""
        if self.weights_on_disk is None or not self.is_out:
            return slice.view(self.weight)
        return self.weights_on_disk.read(slice)

    def bring_in(self, allocate: Callable[[int], torch.Tensor], *, read: bool = True) -> None:
        """Have weights on disk in memory of their own; without ``read`` all of them are to be set there."""
        assert self.weights_on_disk is not None, "they are in memory"
        buffer = allocate(self.weights_on_disk.padded_bytes)
        if read:
            self.weights_on_disk.fetch(buffer)
        self._brought = buffer
        self.held[WEIGHTS.name] = buffer[: self.layout.nbytes].data

    def read_again(self) -> None:
        """Others have written the weights on disk since `bring_in` has brought them."""
        assert self.weights_on_disk is not None, "they are in memory"
        self.weights_on_disk.fetch(self._brought)

    def write_back(self) -> None:
        """Write what `bring_in` has brought to disk, and keep it."""
        assert self.weights_on_disk is not None, "they are in memory"
        self.weights_on_disk.store(self._brought)

    def send_out(self, *, write: bool) -> None:
        """Let go of what `bring_in` has brought, written back to disk if ``write``."""
        assert self.weights_on_disk is not None, "they are in memory"
        if write:
            self.write_back()
        del self._brought, self.held[WEIGHTS.name]

    def unwritable(self) -> list[str]:
        """The names of parameters that `bring_in` has brought and that have other values now, which cannot be
        written."""
        assert self.weights_on_disk is not None, "they are in memory"
        return self.weights_on_disk.unwritable(self._brought)

    def load(self, slice: Slice, values: torch.Tensor) -> None:
        """Set the weight, and the exact fp32 master where the parameter is trained, from ``values``. One rank
        of each machine does so for all of them. [Note: masters]"""
        weight = slice.view(self.weight)
        if not slice.param.trainable or slice.dtype == torch.float32:
            weight.copy_(values)
            return
        if values.dtype == slice.dtype:
            # not by way of fp32, which would take the memory of all values again
            weight.copy_(values)
            self._be_own_master(slice)
            return
        exact = values.to(torch.float32).contiguous()
        if weight.dtype == torch.bfloat16:
            is_apart = self.is_on_disk(REMAINDERS) or self.is_divided
            remainder = (
                torch.empty(slice.param.shape, dtype=torch.uint16)
                if is_apart
                else slice.state(self[REMAINDERS])
            )
            native.split(array(exact), array(weight), array(remainder))
            if is_apart:
                self.set_part(REMAINDERS, slice, remainder, alone=True)
        else:
            self.set_part(MASTERS, slice, exact, alone=True)
            weight.copy_(exact)

    def _be_own_master(self, slice: Slice) -> None:
        """Make the master of a parameter equal to its weight."""
        if slice.dtype == torch.float16:
            self.set_part(MASTERS, slice, slice.view(self.weight), alone=True)
        elif self.is_on_disk(REMAINDERS) or self.is_divided:
            exact = torch.full(slice.param.shape, HALF_OF_LAST_PLACE, dtype=torch.int32).to(torch.uint16)
            self.set_part(REMAINDERS, slice, exact, alone=True)
        else:
            slice.state(self[REMAINDERS].view(torch.int16)).fill_(HALF_OF_LAST_PLACE - (1 << 16))

    def exact(self, slice: Slice) -> torch.Tensor:
        """A copy of the parameter in full precision: fp32 where it is trained, else as it is."""
        weight = self.weight_of(slice)
        if not slice.param.trainable or weight.dtype == torch.float32:
            return weight.clone()
        if weight.dtype == torch.float16:
            master = self.part(MASTERS, slice)
            is_kept = master.to(torch.float16).view(torch.int16) == weight.view(torch.int16)
            return torch.where(is_kept, master, weight.to(torch.float32))
        exact = torch.empty(slice.param.shape, dtype=torch.float32)
        native.join(array(weight), array(self.part(REMAINDERS, slice)), array(exact))
        return exact

    def joined(self, slice: Slice) -> torch.Tensor:
        """`exact` by PyTorch: on any thread, where kernels run on the HOST lane only, and slower."""
        if slice.dtype != torch.bfloat16 or not slice.param.trainable:
            return self.exact(slice)
        weight = self.weight_of(slice)
        high = weight.contiguous().view(torch.int16).to(torch.int32) << 16
        low = self.part(REMAINDERS, slice).view(torch.int16).to(torch.int32) & 0xFFFF
        # wraps around, as the kernel's unsigned arithmetic does
        master = ((high | low) - HALF_OF_LAST_PLACE).view(torch.float32)
        return torch.where(weight == 0, weight.to(torch.float32), master)

    def values(self, slice: Slice, dtype: torch.dtype) -> torch.Tensor:
        """A copy of the parameter in ``dtype``: the weight itself where it is streamed in that, else the
        master rounded."""
        exact = self.weight_of(slice).clone() if dtype == slice.dtype else self.exact(slice)
        return exact.to(dtype)

    def copy(self) -> HostShard:
        """The weights, what makes them masters and the optimizer's state, in memory of their own."""
        assert not self.uses_disk, "that would bring back what memory has no room for"
        copy = HostShard(self.layout, self.share, self.parts, self._rank)
        kept = {purpose.name for purpose in (*MODEL, *ALL_MOMENTS)}
        copy.held = {name: piece.clone() for name, piece in self.held.items() if name in kept}
        return copy

    def about_to_change(self) -> None:
        """Called before a write: a reader in the background (a checkpoint) finishes, or copies the shard."""
        if self.before_change is not None:
            self.before_change()

    @property
    def range(self) -> range:
        """The elements of the unit's state that an update of this shard is for."""
        return self.updated.elements

    def begin(self, purpose: Purpose) -> int:
        """The element (or block) of the unit with which the piece for ``purpose`` begins, where all that is
        updated lies as in the unit."""
        if not self.is_divided or purpose.name not in DIVIDED:
            return 0
        before = sum(len(part.range(purpose)) for part in self.parts[: self._rank])
        return self.updated.range(purpose).start - before


class Window(HostShard):
    """A shard of which some is on disk, as an update sees it: with ``pieces``, by the name of their purpose,
    that are in memory for now. Those of the state are of one ``chunk``. The rest is that of ``whole``."""

    def __init__(
        self, whole: HostShard, pieces: Mapping[str, torch.Tensor], chunk: Chunk | None = None
    ) -> None:
        super().__init__(whole.layout, whole.share, whole.parts, whole._rank)
        self.held = {**whole.held, **pieces}
        self._whole, self._chunk, self._pieces = whole, chunk, pieces

    def about_to_change(self) -> None:
        self._whole.about_to_change()

    @property
    def range(self) -> range:
        return super().range if self._chunk is None else range(self._chunk.start, self._chunk.stop)

    def begin(self, purpose: Purpose) -> int:
        if self._chunk is None or purpose.name not in self._pieces:
            return super().begin(purpose)
        return self._chunk.range(purpose).start


def with_own_storage(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous ``tensor`` in host memory, with a storage whose holders can be counted and a version
    counter, which tell who has it and whether it was written, that it shares with no other."""
    if tensor.numel() and tensor.device.type == "cpu":
        in_bytes = torch.from_numpy(tensor.view(-1).view(torch.uint8).numpy())
        return in_bytes.view(tensor.dtype).view(tensor.shape).data
    return tensor.data


def array(tensor: torch.Tensor) -> Any:
    """A contiguous tensor as the flat NumPy array that the kernels take: bf16 as its bits in uint16."""
    flat = tensor.view(-1)
    return flat.view(torch.uint16).numpy() if flat.dtype == torch.bfloat16 else flat.numpy()


class HostStore:
    """The host buffers of all units, by purpose, and what is on disk in their place."""

    def __init__(
        self,
        layouts: Sequence[Layout],
        allocate: Allocate,
        reserve: Callable[[int], torch.Tensor] | None = None,
        *,
        disks: Disks | None = None,
        on_disk: Collection[int] = (),
        weights_on_disk: Collection[int] = (),
        rank: int = 0,
        division: Division | None = None,
        machine: int = 0,
        private: Allocate | None = None,
        is_shared: bool = False,
    ) -> None:
        """With ``reserve`` (see `Backend.host_reserve`), what a model takes beside its gradients takes memory
        as it is written, and is to be pinned by `pin` when all of it is. What makes masters of their weights
        goes to ``disks`` for the units at the positions ``on_disk``, the weights for ``weights_on_disk``.

        ``rank`` is this one of its ``machine``, whose ranks share the store and each update a share of every
        unit, as ``division`` says. ``private`` gives memory that the others do not see. ``is_shared`` says
        that there are other ranks, if only on other machines.
        """
        self.division = division or Division()
        self._ranks = self.division.ranks
        self._machine = machine if self.is_divided else 0
        #: whether other ranks, of this machine or of others, take part in what is done to the store
        self.is_shared = is_shared or self.division != Division()
        self.shards = [
            HostShard(
                layout,
                shares_of(layout, self._ranks)[rank],
                self.division.parts(layout)[machine] if self.is_divided else (),
                rank,
            )
            for layout in layouts
        ]
        self._allocate = allocate
        self._private = private or allocate
        self._exchanged: list[tuple[HostShard, str, weakref.ref[Any], int]] = []
        self.disks = disks
        self._buffers: dict[str, torch.Tensor] = {}
        #: by purpose, the shards that have a buffer of their own, which may go to disk later
        self._apart: dict[str, list[HostShard]] = {}
        self._scratch: dict[str, Disk] = {}
        self._ring: list[torch.Tensor] | None = None
        self._reader: Reader | None = None
        self._reserve(MASTERING, [self.shards[index] for index in sorted(on_disk)])()
        #: buffers that weights on disk pass through
        self.weight_ring = self._put_weights_on_disk([self.shards[index] for index in weights_on_disk])
        for purpose in MODEL:
            elsewhere = weights_on_disk if purpose is WEIGHTS else on_disk
            shards = [shard for index, shard in enumerate(self.shards) if index not in elsewhere]
            nbytes = sum(self._nbytes(purpose, shard) for shard in shards)
            buffer = reserve(nbytes) if reserve else allocate(nbytes, pinned=purpose.pinned)
            self._deal(purpose, buffer, shards)

    def pin(self, pin: Callable[[torch.Tensor], None]) -> None:
        """Let ``pin`` make those of the model's buffers that are copied to the device ready for that."""
        for purpose in MODEL:
            if purpose.pinned:
                pin(self._buffers[purpose.name])
        if WEIGHT_RING in self._buffers:
            pin(self._buffers[WEIGHT_RING])

    def add(
        self,
        purposes: Iterable[Purpose],
        *,
        only: Sequence[HostShard] | None = None,
        on_disk: Collection[int] = (),
        in_place_of: Iterable[Purpose] = (),
    ) -> None:
        """Give every shard (or ``only`` these) a zeroed piece for each of ``purposes``: the shards at the
        positions ``on_disk`` there, the others in memory. What is held for ``in_place_of`` is dropped.

        Raises DiskError, before anything is changed, where a disk has no room beside what is dropped.
        """
        purposes = list(purposes)
        add_on_disk = self._reserve(purposes, [self.shards[index] for index in sorted(on_disk)])
        self.drop(in_place_of)
        add_on_disk()
        shards = [shard for index, shard in enumerate(self.shards) if index not in on_disk]
        for purpose in purposes:
            among = shards if only is None else only
            if self.can_move and not purpose.pinned:
                for shard in among:
                    buffer = self._allocate(self._nbytes(purpose, shard), pinned=False)
                    shard.held[purpose.name] = _piece(purpose, buffer, shard)
                self._apart[purpose.name] = [*among]
                continue
            nbytes = sum(self._nbytes(purpose, shard) for shard in among)
            self._deal(purpose, self._allocate(nbytes, pinned=purpose.pinned), among)

    @property
    def is_divided(self) -> bool:
        """Whether other machines have parts of the state that this one has not."""
        return self.division.machines > 1

    def _nbytes(self, purpose: Purpose, shard: HostShard) -> int:
        return self.division.nbytes(purpose, shard.layout)

    @property
    def can_move(self) -> bool:
        """Whether state may be on disk, and what is in memory may go there later."""
        return self.disks is not None and self.disks.may_write

    def movable(self, shard: HostShard) -> dict[Purpose, int]:
        """What a shard has in memory that may go to disk, with its bytes."""
        names = [name for name, shards in self._apart.items() if shard in shards]
        purposes = [purpose for purpose in ALL_MOMENTS if purpose.name in names and shard.has(purpose)]
        return {purpose: nbytes for purpose in purposes if (nbytes := self._nbytes(purpose, shard))}

    def move(self, shards: Sequence[HostShard]) -> None:
        """Let what is `movable` of ``shards`` go to disk. The caller sees to it that nobody uses it.

        Raises DiskError, and changes nothing, where the disk has no room or fails.
        """
        moved = {shard: self.movable(shard) for shard in shards}
        purposes = [*dict.fromkeys(purpose for movable in moved.values() for purpose in movable)]
        names = {purpose.name for purpose in purposes}
        were, scratch = {shard: shard.disk for shard in shards}, self._scratch.get(purposes[0].name)
        self._reserve(purposes, shards, into=scratch)()
        try:
            for shard, movable in moved.items():
                for purpose in movable:
                    piece = shard.held[purpose.name]
                    if shard.disk is None or piece.is_meta:
                        continue
                    whole = range(purpose.numel(shard.layout))
                    for start, stop, at in places_of(shard.held_parts, purpose, whole):
                        shard.disk.write(purpose, range(start, stop), piece[at : at + stop - start])
        except BaseException:
            for shard, was in were.items():
                for purpose in purposes:
                    if shard.disk is not None:
                        shard.disk.drop(purpose)
                shard.disk = was
            if scratch is None:
                self._close_unused([self._scratch.pop(name) for name in names][0])
            raise
        for shard in shards:
            for name in names & shard.held.keys():
                del shard.held[name]
        for name in names:
            self._apart[name] = [shard for shard in self._apart[name] if shard not in moved]

    def _reserve(
        self, purposes: Sequence[Purpose], shards: Sequence[HostShard], *, into: Disk | None = None
    ) -> Callable[[], None]:
        """Allocate room on disk, in new scratch files or more of those given; the returned function gives it
        to ``shards``."""
        if not shards:
            return lambda: None
        assert self.disks is not None, "no disk was given"
        scratch = into or self.disks.open()
        try:
            number = 0
            states: dict[HostShard, StateOnDisk] = {}
            for shard in self.shards:
                chunks = chunks_of(
                    shard.layout, first_number=number, division=self.division, machine=self._machine
                )
                number += len(chunks)
                if shard in shards:
                    given = shard.layout, chunks, self.disks.buffer, shard.range
                    states[shard] = shard.disk or StateOnDisk(*given)
            places = [
                (state, purpose, state.extents(purpose, scratch))
                for purpose in purposes
                for state in states.values()
            ]
            scratch.allocate()
        except BaseException:
            if into is None:
                scratch.close()
            raise

        def add() -> None:
            for shard, state in states.items():
                shard.disk = state
            for state, purpose, extents in places:
                state.add(purpose, scratch, extents)
            self._ring = None
            self._scratch |= {purpose.name: scratch for purpose in purposes}

        return add

    def _put_weights_on_disk(self, shards: Sequence[HostShard]) -> list[torch.Tensor]:
        if not shards:
            return []
        assert self.disks is not None, "no disk was given"
        in_files = [(shard, stored_part(shard.layout, self.disks.stored)) for shard in shards]
        self._read_in_place([(shard, stored) for shard, stored in in_files if stored])
        placed = [shard.weights_on_disk for shard in shards if shard.weights_on_disk is not None]
        if rest := [shard for shard, stored in in_files if not stored]:
            scratch = self.disks.open()
            try:
                for shard in rest:
                    on_disk = WeightsInScratch(
                        shard.layout, scratch, self.disks.buffer, share=shard.share, ranks=self._ranks
                    )
                    shard.weights_on_disk = on_disk
                    placed.append(on_disk)
                scratch.allocate()
            except BaseException:
                scratch.close()
                raise
            self._scratch[WEIGHTS.name] = scratch
        nbytes = max(on_disk.padded_bytes for on_disk in placed)
        self._buffers[WEIGHT_RING] = self.disks.buffer(WEIGHT_BUFFERS * nbytes)
        return list(self._buffers[WEIGHT_RING].split(nbytes))

    def _read_in_place(self, shards: Sequence[tuple[HostShard, Mapping[str, Pieces]]]) -> None:
        if not shards:
            return
        assert self.disks is not None, "no disk was given"
        places = [place for _, stored in shards for pieces in stored.values() for place in pieces]
        self._buffers[FILE_BLOCKS] = self.disks.buffer(between_bytes(places))
        self._reader = self.disks.reader(self._buffers[FILE_BLOCKS])
        self._reader.open({place.file for place in places})
        for shard, stored in shards:
            shard.weights_on_disk = WeightsInFiles(
                shard.layout,
                stored,
                self._reader,
                hold=partial(self._allocate, pinned=False),
                share=shard.share,
            )

    def _deal(self, purpose: Purpose, buffer: torch.Tensor, shards: Sequence[HostShard]) -> None:
        """Let each of ``shards`` have its piece of ``buffer``."""
        self._buffers[purpose.name] = buffer
        sizes = [self._nbytes(purpose, shard) for shard in shards]
        for shard, piece in zip(shards, buffer.split(sizes), strict=True):
            shard.held[purpose.name] = _piece(purpose, piece, shard)

    def holds(self, purposes: Iterable[Purpose]) -> bool:
        """Whether there is room for each of ``purposes``, in its dtype."""
        return all(shard.has(purpose) for purpose in purposes for shard in self.shards)

    def drop(self, purposes: Iterable[Purpose]) -> None:
        """Free the buffers for ``purposes``. Not for pinned buffers: the backend has them registered."""
        purposes = list(purposes)
        assert not any(purpose.pinned for purpose in purposes)
        for purpose in purposes:
            self._buffers.pop(purpose.name, None)
            self._apart.pop(purpose.name, None)
            for shard in self.shards:
                shard.held.pop(purpose.name, None)
                if shard.disk is not None:
                    shard.disk.drop(purpose)
            self._close_unused(self._scratch.pop(purpose.name, None))

    def _close_unused(self, scratch: Disk | None) -> None:
        if scratch is not None:
            self._ring = None
            if scratch not in self._scratch.values():
                scratch.close()

    def drop_all(self) -> None:
        """Give up every buffer, and what is on disk."""
        self._buffers.clear()
        self._apart.clear()
        self._ring = None
        for shard in self.shards:
            shard.held.clear()
            shard.disk = shard.weights_on_disk = None
        self.close_disks()

    @contextmanager
    def weights_in(self, shard: HostShard, *, read: bool = False) -> Iterator[None]:
        """Inside the block weights of ``shard`` that are on disk are in memory; they are written to disk at
        its end. Without ``read`` all of them are to be set there. One rank does so for all of them."""
        if not shard.is_out:
            yield
            if self.is_shared and shard.weights_on_disk is not None:
                shard.write_back()
            return
        shard.bring_in(self.disk_buffer, read=read)
        whole = False
        try:
            yield
            whole = True
        finally:
            shard.send_out(write=whole)

    def disk_buffer(self, nbytes: int) -> torch.Tensor:
        """Memory that can be read into from disk."""
        assert self.disks is not None, "no disk was given"
        return self.disks.buffer(nbytes)

    def close_disks(self) -> None:
        """Give up what is on disk, which nobody may read any more."""
        for scratch in self._scratch.values():
            scratch.close()
        self._scratch.clear()
        if self._reader is not None:
            self._reader.close()

    def staging(self, count: int, nbytes: int) -> list[torch.Tensor]:
        """``count`` buffers of ``nbytes`` for gradients that are used up when they have landed."""
        self._buffers[STAGING] = self._private(count * nbytes, pinned=True)
        return list(self._buffers[STAGING].split(nbytes)) if nbytes else []

    def exchange(self, shard: HostShard, purpose: Purpose, piece: torch.Tensor | None) -> torch.Tensor:
        """Let ``shard`` have another ``piece`` in memory for ``purpose``, or one that is made for it. Others
        may still need the one that it had."""
        if piece is None:
            # pinned memory stays until the backend is closed, and this may come and go
            memory: Any = self._private(self._nbytes(purpose, shard), pinned=False).numpy()
            self._exchanged.append((shard, purpose.name, weakref.ref(memory), memory.nbytes))
            piece = _piece(purpose, torch.from_numpy(memory), shard)
        shard.held[purpose.name] = piece
        return piece

    def exchanged(self) -> list[tuple[HostShard, str, int]]:
        """The pieces that `exchange` has made and somebody still needs: of which shard, for which purpose,
        and their bytes."""
        self._exchanged = [each for each in self._exchanged if each[2]() is not None]
        return [(shard, name, nbytes) for shard, name, _, nbytes in self._exchanged]

    def ring(self) -> list[torch.Tensor]:
        """The buffers that chunks of the state on disk pass through, made when they are first asked for and
        when what is on disk has changed."""
        if self._ring is None:
            self._buffers.pop(STATE_RING, None)
            sizes = [shard.disk.ring_bytes() for shard in self.shards if shard.disk is not None]
            assert sizes and self.disks is not None, "something is on disk"
            self._buffers[STATE_RING] = self.disks.buffer(RING * max(sizes))
            self._ring = list(self._buffers[STATE_RING].split(max(sizes)))
        return self._ring

    def bytes_by_purpose(self) -> dict[str, int]:
        """Bytes of host memory allocated, by purpose; purposes that take none are left out."""
        found = Counter({purpose: buffer.numel() for purpose, buffer in self._buffers.items()})
        for name, shards in self._apart.items():
            found[name] += sum(shard.held[name].nbytes for shard in shards)
        for shard in self.shards:
            if shard.weights_on_disk is not None:
                found[WEIGHTS.name] += shard.weights_on_disk.held_bytes
        for _, name, nbytes in self.exchanged():
            found[name] += nbytes
        return dict(+found)

    def on_disk(self) -> list[Purpose]:
        """The purposes of which some unit's piece is on disk."""
        found = {p for shard in self.shards if shard.disk is not None for p in shard.disk.purposes()}
        return [*found]

    def disk_bytes_by_purpose(self) -> dict[str, int]:
        """Bytes on disk, by purpose."""
        found: Counter[str] = Counter()
        for shard in self.shards:
            if shard.disk is not None:
                found += shard.disk.bytes_by_purpose()
            if shard.weights_on_disk is not None:
                found[WEIGHTS.name] += shard.weights_on_disk.disk_bytes
        return dict(+found)


def _piece(purpose: Purpose, buffer: torch.Tensor, shard: HostShard) -> torch.Tensor:
    return with_own_storage(buffer.view(purpose.dtype)[: purpose.numel(shard.layout)])
