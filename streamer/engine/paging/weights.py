"""Weights on the device: which unit is in which slot, what is fetched early, what is given up."""

from __future__ import annotations

import math
import zlib
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from torch import nn

from streamer.engine.paging.unit import Unit
from streamer.engine.schedule import op as ops
from streamer.engine.schedule.hazards import Issuer
from streamer.engine.schedule.op import ROOT
from streamer.engine.schedule.order import Order, Visit, farthest
from streamer.engine.tensors.guarded import Seen, hide, show
from streamer.memory.host import HostStore
from streamer.memory.layout import Slice
from streamer.memory.slots import MOST_GRAD_SLOTS, WeightSlots


class Weights:
    """The weight slots of the layers, and the root unit's own buffer, which never holds anything else."""

    def __init__(
        self, issuer: Issuer, units: Sequence[Unit], root: Unit, store: HostStore, *, num_slots: int
    ) -> None:
        self.prefetch_hits = 0
        self.prefetch_misses = 0
        self._nbytes = [unit.layout.nbytes for unit in units]
        self.slots = WeightSlots(num_slots, max(self._nbytes), issuer.backend.device_buffer)
        self.root_buffer = issuer.backend.device_buffer(root.layout.nbytes)
        self._issuer = issuer
        self._units = units
        self._root = root
        self._store = store
        self._order = Order(range(len(units)))
        #: whether the slots hold what `prefetch` has decided on, for visits as they have come since
        self._is_settled = False
        #: units in a slot that does not have their last update
        self._outdated: set[int] = set()
        #: units whose update was issued and that nobody has waited for since
        self.in_flight: set[int] = set()
        self._written = {unit.index: unit.written() for unit in (*units, root)}
        #: by unit, which of its parameters are lent: [Note: lent parameters]
        self._lent: dict[int, set[int]] = {}
        self._lent_to_read: dict[int, set[int]] = {}
        #: of those whose weight is not its own master, the checksum of the weight when it was lent
        self._checksums: dict[int, dict[int, int]] = {}
        #: by unit, what the user sees of its parameters, once they are guarded
        self._seen: dict[int, list[Seen]] = {}
        #: how many hold the storage of a parameter beside it where it is not lent
        self._holders: dict[int, list[int]] = {}

    @contextmanager
    def visited(self, unit: Unit, visit: Visit) -> Iterator[int]:
        """The slot that holds ``unit``, which stays there inside the block; what is expected next is
        unsharded as slots become free before and after it."""
        self._refresh_layer(unit)
        if not self._order.visit(visit):
            self._is_settled = False
        slot = self._unshard(unit)
        self.slots.enter(slot)
        try:
            if not self._is_settled:
                self.prefetch()
            yield slot
            self.end_flight(unit)
        finally:
            self.slots.leave(slot)
            self.prefetch()

    def prefetch(self) -> None:
        """Issue the copies that the coming visits need, in their order, up to the first that has no slot yet.

        [Note: residency]
        Belady's algorithm: a unit that is in no slot replaces the unit whose next use, counted from the visit
        that needs the copy, is farthest away (distance divided by bytes, where layers differ in size). The
        unit visited just before is never replaced: the copy overlaps with its compute. If the chosen unit
        still has an earlier visit, prefetching stops until that visit is over: to replace another unit now
        would give up one that is needed sooner.
        """
        self._fetch_upcoming()
        self._is_settled = True

    def _fetch_upcoming(self) -> None:
        slots, upcoming = self.slots, self._order.upcoming()
        # units in idle slots, less those with a visit earlier than ``position`` in the loop
        unused = slots.idle()
        for position, index in enumerate(upcoming):
            if not unused and slots.empty() is None:
                return
            slot = slots.find(index)
            if slot is None:
                before = upcoming[position - 1] if position else None
                held = [unit for unit in slots.holder if unit not in (None, before)] if position else unused
                slot = self._make_room(held, islice(upcoming, position + 1, None), unused)
                if slot is None:
                    return
                self._fill(slot, self._units[index])
            elif index in self._outdated:
                # not in use: `check_idle` refuses updates of a layer that is running
                self._fill(slot, self._units[index])
            if index in unused:
                unused.remove(index)

    def resize(self, count: int) -> None:
        """Have ``count`` slots, or as many fewer as the device has memory for, or more as are in use.

        The caller waits until nothing uses the slots that go.
        """
        while len(self.slots.buffers) < count:
            try:
                self._is_settled = False
                self.slots.add()
            except torch.OutOfMemoryError:
                return
        while (last := len(self.slots.buffers) - 1) >= count and last not in self.slots.busy:
            unit = self.slots.holder[last]
            if unit is not None:
                self._reshard(unit)
            self._issuer.wait((ops.weight_slot(last),), to_write=True)
            self.slots.drop()
            self._issuer.backend.device_trim()

    def check_slot(self, unit: Unit, slot: int) -> None:
        """Raise ValueError if ``unit`` has written its weights in its first forward, by ``param.data``, which
        nothing tells of."""
        weight = self._store.shards[unit.index].weight
        if weight.is_meta or torch.equal(self.slots.buffers[slot][: weight.numel()].cpu(), weight):
            return
        raise ValueError(
            f"layer '{unit.name}' writes its own weights in its forward, which would be lost: write them "
            "between steps"
        )

    def check_depth(self, unit: Unit) -> None:
        """Raise RuntimeError if ``unit`` is called inside of so many others that its backward would find no
        gradient slot."""
        if (depth := self.slots.busy.total()) >= MOST_GRAD_SLOTS:
            raise RuntimeError(
                f"layer '{unit.name}' is called inside of {depth} others, and gradients of no more than "
                f"{MOST_GRAD_SLOTS} layers are made at a time: call it outside of them"
            )

    def check_idle(self, unit: Unit) -> None:
        """Raise RuntimeError if ``unit`` is running, which would go on with the weights of before."""
        if self.slots.find(unit.index) in self.slots.busy:
            raise RuntimeError(
                f"optimizer.step() is called inside of layer '{unit.name}', whose weights it updates: call "
                "it when the layer has returned"
            )

    def release(self) -> None:
        """Give up the slots, the root's buffer and what is shown of the weights."""
        self.slots.buffers.clear()
        self._seen.clear()
        self.root_buffer = torch.empty(0, dtype=torch.uint8)

    def update_issued(self, unit: Unit) -> None:
        """The update of ``unit``'s host shard was issued: the trained weights in its slot are stale."""
        self._changed(unit)
        if unit.index == ROOT:
            self.unshard_root(unit.layout.grad_nbytes)
        elif (slot := self.slots.find(unit.index)) is not None:
            self._outdated.add(unit.index)
            self._is_settled = False
            self._poison(unit.index, slot, unit.layout.grad_nbytes)

    def replaced(self, unit: Unit) -> None:
        """All of ``unit``'s host shard was exchanged, what is frozen too."""
        self._checksums.pop(unit.index, None)
        self._changed(unit)
        if unit.index == ROOT:
            self.unshard_root()
        else:
            self._reshard(unit.index)

    def _changed(self, unit: Unit) -> None:
        # for autograd the weights are written here, as by any optimizer
        torch.autograd.graph.increment_version(unit.params)
        self._written[unit.index] = unit.written()
        self.begin_flight(unit)

    def begin_flight(self, unit: Unit) -> None:
        """An update of ``unit`` is about to be issued: who touches its parameters from now on waits."""
        if unit.index not in self.in_flight:
            self.in_flight.add(unit.index)
            hide(self._seen.get(unit.index, ()))

    def end_flight(self, unit: Unit) -> None:
        """The caller has waited for the update of ``unit``."""
        if unit.index in self.in_flight:
            show(self._seen.get(unit.index, ()))
            self.in_flight.discard(unit.index)

    def guard(self) -> None:
        """Parameters are guarded now, and nobody has been lent one."""
        units = (*self._units, self._root)
        kinds = {(param.dtype, param.device) for unit in units for param in unit.params}
        nans = {kind: torch.tensor(math.nan, dtype=kind[0], device=kind[1]) for kind in kinds}
        for unit in units:
            self._seen[unit.index] = [Seen(param, nans[param.dtype, param.device]) for param in unit.params]
        self._holders = {index: [each.holders() for each in seen] for index, seen in self._seen.items()}

    def lend(self, unit: Unit, position: int, *, to_read: bool) -> None:
        """User code got a tensor that shares memory with a parameter of ``unit``. Unless ``to_read``, it may
        write the parameter and nothing tells of that.

        [Note: lent parameters]
        Nothing tells of a write through ``param.data`` or a NumPy array. So, as long as a storage has more
        holders than it had after `wrap`, and once more after that,

        - a layer is copied to the device anew for each visit, because its copies there may be old;
        - a parameter of the root unit, which the user sees on the device, is compared with its copy in host
          memory before that is used;
        - a weight of 16 bits, which has an fp32 master beside it, is compared by a checksum before the master
          is used (by an update, a checkpoint, `unwrap`). The master of one that was written becomes the
          weight, of others it stays: weights that are exchanged for others and put back lose nothing.

        A write through such an alias during an update would be lost, so `step` waits for updates of lent
        parameters; also for views that an autograd graph holds, which are lent to be read.
        """
        if to_read:
            self._lent_to_read.setdefault(unit.index, set()).add(position)
            return
        self._lent.setdefault(unit.index, set()).add(position)
        self._take_checksum(unit, position)

    def still_lent(self) -> list[Unit]:
        """The units that are still lent, if only to be read. What has come back stays noted in `_lent` until
        the next visit of its unit, which copies it anew."""
        if not self._lent and not self._lent_to_read:
            return []
        self._lent_to_read = self._still_lent(self._lent_to_read)
        lent = {*self._still_lent(self._lent), *self._lent_to_read}
        return [unit for unit in (*self._units, self._root) if unit.index in lent]

    def take_checksums(self, unit: Unit) -> None:
        """The update of a lent unit is done."""
        for position in self._lent.get(unit.index, ()):
            self._take_checksum(unit, position)

    def _still_lent(self, lent: Mapping[int, set[int]]) -> dict[int, set[int]]:
        """What of ``lent`` has not come back."""
        still = {
            index: {p for p in positions if self._seen[index][p].holders() != self._holders[index][p]}
            for index, positions in lent.items()
        }
        return {index: positions for index, positions in still.items() if positions}

    def _take_back(self, unit: Unit) -> None:
        """Forget that ``unit`` was lent where it has come back."""
        self._lent |= self._still_lent({unit.index: self._lent.pop(unit.index)})

    def _take_checksum(self, unit: Unit, position: int) -> None:
        slice = unit.layout.slices[position]
        if unit.index == ROOT or not slice.param.trainable or slice.param.dtype == torch.float32:
            return
        taken = self._checksums.setdefault(unit.index, {})
        if position not in taken:
            taken[position] = self._checksum(unit, slice)

    def _checksum(self, unit: Unit, slice: Slice) -> int:
        weight = self._store.shards[unit.index].weight
        place: Any = weight[slice.offset : slice.offset + slice.nbytes].numpy()
        return zlib.crc32(place)

    def settle_masters(self, unit: Unit) -> None:
        """The masters of ``unit`` are about to be used: make those of weights that were written unseen equal
        to the weights."""
        taken = self._checksums.pop(unit.index, None)
        if taken is None:
            return
        self._issuer.wait((ops.shard(unit.index),), to_write=True)
        for position, before in taken.items():
            slice = unit.layout.slices[position]
            if self._checksum(unit, slice) != before:
                self._store.shards[unit.index].rebase(slice)

    def unshard_root(self, nbytes: int | None = None) -> None:
        """Copy the root unit's host shard, or its first ``nbytes``, to its place on the device."""
        source = self._store.shards[ROOT].weight[:nbytes]
        into = self.root_buffer[: source.numel()]
        op = ops.unshard(ROOT, ROOT, source.numel())
        self._issuer.issue(op, lambda: self._issuer.backend.copy(into, source))

    def refresh(self, moved: Container[torch.Tensor] = ()) -> None:
        """Take over what the user has written into parameters: layers on the host, the root on the device.

        Raises ValueError for those that were given other memory, unless they are ``moved`` for good.
        """
        for unit in self._units:
            self._refresh_layer(unit, moved)
            self.settle_masters(unit)
        self.refresh_root(moved)

    def elsewhere(self, unit: Unit) -> list[tuple[Slice, nn.Parameter]]:
        """The parameters of ``unit`` that somebody has given other memory."""
        is_root = unit.index == ROOT
        return unit.elsewhere(self.root_buffer if is_root else self._store.shards[unit.index].weight)

    def refresh_root(self, moved: Container[torch.Tensor] = ()) -> None:
        """`refresh` for the root alone."""
        self._check_places(self._root, moved)
        if self._root.written() != self._written[ROOT]:
            self._issuer.wait((ops.weight_slot(ROOT), ops.shard(ROOT)), to_write=True)
            self._store.shards[ROOT].weight.copy_(self.root_buffer)
            self._rebase(self._root)
        elif ROOT in self._lent:
            self._take_over_lent_root()

    def _take_over_lent_root(self) -> None:
        self._issuer.wait((ops.weight_slot(ROOT), ops.shard(ROOT)), to_write=True)
        shard = self._store.shards[ROOT]
        for position in self._lent[ROOT]:
            slice = self._root.layout.slices[position]
            place = range(slice.offset, slice.offset + slice.nbytes)
            seen = self.root_buffer[place.start : place.stop].cpu()
            if not torch.equal(seen, shard.weight[place.start : place.stop]):
                shard.weight[place.start : place.stop].copy_(seen)
                shard.rebase(slice)
        self._take_back(self._root)

    def _refresh_layer(self, unit: Unit, moved: Container[torch.Tensor] = ()) -> None:
        self._check_places(unit, moved)
        if unit.index in self._lent:
            self._reshard(unit.index)
            self._take_back(unit)
        if unit.written() != self._written[unit.index]:
            self._issuer.wait((ops.shard(unit.index),), to_write=True)
            self._rebase(unit)
            self._reshard(unit.index)

    def _check_places(self, unit: Unit, moved: Container[torch.Tensor]) -> None:
        # what is in flight was seen to be in its place, and is hidden now
        for slice, param in self.elsewhere(unit) if unit.index not in self.in_flight else ():
            if param in moved:
                continue
            raise ValueError(
                f"'{slice.param.name}' was given other memory after streamer.wrap (param.data = ..., "
                "param.set_, vector_to_parameters), which is not what runs: write into it (param.copy_ under "
                "torch.no_grad), or call streamer.unwrap(model) first"
            )

    def _rebase(self, unit: Unit) -> None:
        """Make the masters of ``unit`` equal to the weights that the user has written."""
        self._written[unit.index] = unit.written()
        self._checksums.pop(unit.index, None)
        if unit.index in self.in_flight:
            # said once for all units; then the weights are what the updates leave
            self._written |= {u.index: u.written() for u in (*self._units, self._root)}
            raise RuntimeError(
                f"weights of '{unit.name}' were written while their update was still running, and are lost: "
                "call streamer.synchronize(model) between optimizer.step() and writing weights"
            )
        for slice in unit.layout.slices:
            self._store.shards[unit.index].rebase(slice)

    def _unshard(self, unit: Unit) -> int:
        slot = self.slots.find(unit.index)
        if slot is not None and unit.index not in self._outdated:
            self.prefetch_hits += 1
            return slot
        self.prefetch_misses += 1
        self._is_settled = False
        if slot is None:
            idle = self.slots.idle()
            slot = self._make_room(idle, self._order.upcoming(), idle)
        if slot is None:
            raise RuntimeError(
                f"layer '{unit.name}' is called while every slot is in use by a layer around it: "
                f"wrap with num_slots={len(self.slots.buffers) + 1} or more"
            )
        self._fill(slot, unit)
        return slot

    def _make_room(self, held: Iterable[int], upcoming: Iterable[int], may_go: Container[int]) -> int | None:
        """An empty slot, or else that of the unit of ``held`` whose next use is farthest, if it may go."""
        if (slot := self.slots.empty()) is not None:
            return slot
        unit = farthest(held, upcoming, self._nbytes)
        return self._reshard(unit) if unit is not None and unit in may_go else None

    def _reshard(self, unit: int) -> int | None:
        """Give up the slot that holds ``unit``; which one it was."""
        slot = self.slots.find(unit)
        if slot is not None:
            self._is_settled = False
            self.slots.holder[slot] = None
            self._outdated.discard(unit)
            self._poison(unit, slot)
        return slot

    def _poison(self, unit: int, slot: int, nbytes: int | None = None) -> None:
        if self._issuer.backend.poison:
            buffer = self.slots.buffers[slot][:nbytes]
            # bytes of ones are NaN in every floating-point format
            self._issuer.issue(ops.reshard(unit, slot), lambda: buffer.fill_(255))

    def _fill(self, slot: int, unit: Unit) -> None:
        """Copy ``unit`` into a slot; what is trained is enough where it is there already, but outdated."""
        source = self._store.shards[unit.index].weight
        if self.slots.holder[slot] == unit.index:
            source = source[: unit.layout.grad_nbytes]
            self._outdated.discard(unit.index)
        into = self.slots.buffers[slot][: source.numel()]
        op = ops.unshard(unit.index, slot, source.numel())
        self._issuer.issue(op, lambda: self._issuer.backend.copy(into, source))
        self.slots.holder[slot] = unit.index
