"""Weights on the device: the layers' in weight slots, the root unit's in a buffer of its own.

`Residency` decides which units are in a set of slots: which copies are prefetched, and which slots are
evicted. `Pager` has the residencies, the root unit, the rings of weights on disk, and user code's writes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import NamedTuple

import torch

from streamer.engine.paging.across_ranks import AcrossRanks
from streamer.engine.paging.disk_pager import DiskPager, ShardUpdate
from streamer.engine.paging.host_memory import HostMemory
from streamer.engine.paging.parameters import Parameters
from streamer.engine.schedule import op as ops
from streamer.engine.schedule.hazards import Issuer
from streamer.engine.schedule.op import ROOT, Place
from streamer.engine.schedule.order import LayerUse, Order, Phase, farthest
from streamer.engine.unit import Unit
from streamer.store.host import HostStore
from streamer.store.weights_on_disk import WEIGHT_BUFFERS


class WeightSlots:
    """``count`` device buffers of ``nbytes``, and which unit's weights each of them holds."""

    def __init__(self, count: int, nbytes: int, allocate: Callable[[int], torch.Tensor]) -> None:
        self.nbytes = nbytes
        self.buffers = [allocate(nbytes) for _ in range(count)]
        self.holder: list[int | None] = [None] * count
        #: the number of runs that read a slot now; such a slot keeps its weights
        self.busy: Counter[int] = Counter()
        self._allocate = allocate

    def find(self, unit: int) -> int | None:
        """The slot that holds ``unit``, or None."""
        return self.holder.index(unit) if unit in self.holder else None

    def empty(self) -> int | None:
        """A slot that holds nothing and is not busy, or None."""
        empty = (slot for slot, unit in enumerate(self.holder) if unit is None and slot not in self.busy)
        return next(empty, None)

    def idle(self) -> list[int]:
        """The units in slots that are not busy."""
        return [unit for slot, unit in enumerate(self.holder) if unit is not None and slot not in self.busy]

    def enter(self, slot: int) -> None:
        """A run of a unit begins that reads ``slot``."""
        self.busy[slot] += 1

    def leave(self, slot: int) -> None:
        """A run that has read ``slot`` ends."""
        self.busy[slot] -= 1
        if not self.busy[slot]:
            del self.busy[slot]

    def add(self) -> None:
        """Add a buffer, with the next number."""
        self.buffers.append(self._allocate(self.nbytes))
        self.holder.append(None)

    def drop(self) -> None:
        """Remove the last buffer, which nothing uses any more."""
        self.buffers.pop()
        self.holder.pop()


class Slot(NamedTuple):
    """A slot by its number in ops, and its memory (flat uint8)."""

    number: int
    weights: torch.Tensor


class Residency:
    """Weight slots, and the units that stay in them or are copied into them, in the order of their uses."""

    def __init__(
        self,
        issuer: Issuer,
        units: Sequence[Unit],
        disk: DiskPager,
        num_slots: int,
        *,
        first: int = 0,
        across: AcrossRanks | None = None,
    ) -> None:
        """In ops, slots are numbered from ``first`` on. With ``across`` ranks gather each layer: this one
        copies a part to its device and gets the other parts from the other ranks' devices."""
        self.prefetch_hits = 0
        self.prefetch_misses = 0
        self._nbytes = [unit.layout.nbytes for unit in units]
        self.slots = WeightSlots(num_slots, max(self._nbytes), issuer.backend.device_buffer)
        self._first = first
        self._issuer = issuer
        self._units = units
        self._disk = disk
        self._across = across
        self._order = Order(range(len(units)))
        #: whether the slots hold what `prefetch` has decided on, for the order known so far
        self._is_settled = False
        #: units in a slot without their last update
        self._outdated: set[int] = set()

    @contextmanager
    def resident(self, unit: Unit, use: LayerUse) -> Iterator[Slot]:
        """The slot that holds ``unit``, which stays there inside the block. Before and after the block, the
        units expected next are unsharded as slots become free."""
        if not self._order.advance(use):
            self._is_settled = False
        slot = self.slots.find(unit.index)
        if slot is not None and unit.index not in self._outdated:
            self.prefetch_hits += 1
        else:
            self.prefetch_misses += 1
            self._is_settled = False
            slot = self._slot_for(unit) if slot is None else slot
            self._fill(slot, unit)
        self.slots.enter(slot)
        try:
            if not self._is_settled:
                self.prefetch()
            yield Slot(self._first + slot, self.slots.buffers[slot])
        finally:
            self.slots.leave(slot)
            self._disk.release(unit.index)
        # not after an error, which an error in here would replace; the next run does the same
        self.prefetch()

    def prefetch(self) -> None:
        """Issue the copies that the next runs need, in their order, up to the first without a free slot.

        [Note: residency]
        Belady's algorithm: a unit that is in no slot evicts the unit whose next use, counted from the run
        that needs the copy, is farthest away (distance divided by bytes, where layers differ in size). The
        last unit to run is never evicted: the copy overlaps with its compute. If the chosen unit still has an
        earlier run, prefetching stops until that run is over: evicting another unit now would lose one that
        is needed sooner.
        """
        self._fetch_upcoming()
        uses = islice(self._order.upcoming_uses(), len(self.slots.buffers) + WEIGHT_BUFFERS)
        self._disk.fill(use.unit for use in uses if self._passes_ring(use))
        self._is_settled = True

    def _passes_ring(self, use: LayerUse) -> bool:
        """Whether a coming run needs its unit's weights in the ring: for the slot, or to be updated."""
        index = use.unit
        in_slot = index not in self._outdated and self.slots.find(index) is not None
        return not in_slot or self._disk.updated_in(index) is use.phase

    def _fetch_upcoming(self) -> None:
        slots, upcoming = self.slots, self._order.upcoming()
        # units in idle slots, except those with a run earlier than ``position`` in the loop
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
                # the slot is not in use: `Pager.check_idle` refuses updates of a layer that is running
                self._fill(slot, self._units[index])
            if index in unused:
                unused.remove(index)

    def resize(self, count: int) -> None:
        """Resize to ``count`` slots: fewer if the device has no memory for them, more if more are in use.

        The caller waits until nothing uses the slots to be removed.
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
                self.evict(unit)
            self._issuer.wait((ops.weight_slot(self._first + last),), to_write=True)
            for each in self._units:
                each.forget_leaves()
            self.slots.drop()
            self._issuer.backend.device_trim()

    def is_running(self, unit: Unit) -> bool:
        """Whether a run of ``unit`` reads its slot now."""
        return self.slots.find(unit.index) in self.slots.busy

    def updated(self, unit: Unit) -> None:
        """The trained weights of ``unit`` in its slot are stale."""
        if (slot := self.slots.find(unit.index)) is not None:
            self._outdated.add(unit.index)
            self._is_settled = False
            self._poison(unit.index, slot, unit.layout.grad_nbytes)

    def written(self, unit: Unit) -> None:
        """The weights of ``unit`` in its slot may be stale, frozen ones too, because of user code.

        Ranks that gather must agree on the contents of their slots, since each copies a part, and may not
        all notice at the same time. So a rank renews its own copy of a unit in place. Weights on disk are
        written by all ranks at once.
        """
        if self._across is None or self._disk.passes(unit.index):
            self.evict(unit.index)
        elif (slot := self.slots.find(unit.index)) is not None:
            self._fill(slot, unit, renew=True)

    def evict(self, unit: int) -> int | None:
        """Evict ``unit``; returns its slot, or None."""
        slot = self.slots.find(unit)
        if slot is not None:
            self._is_settled = False
            self.slots.holder[slot] = None
            self._outdated.discard(unit)
            self._poison(unit, slot)
        return slot

    def _slot_for(self, unit: Unit) -> int:
        idle = self.slots.idle()
        slot = self._make_room(idle, self._order.upcoming(), idle)
        if slot is None:
            raise RuntimeError(
                f"layer '{unit.name}' is called while every slot is in use by a layer around it: "
                f"wrap with num_slots={len(self.slots.buffers) + 1} or more"
            )
        return slot

    def _make_room(self, held: Iterable[int], upcoming: Iterable[int], may_go: Container[int]) -> int | None:
        """An empty slot, or else the slot of that unit of ``held`` whose next use is farthest, if it is in
        ``may_go``."""
        if (slot := self.slots.empty()) is not None:
            return slot
        unit = farthest(held, upcoming, self._nbytes)
        return self.evict(unit) if unit is not None and unit in may_go else None

    def _poison(self, unit: int, slot: int, nbytes: int | None = None) -> None:
        if self._issuer.backend.poison:
            buffer = self.slots.buffers[slot][:nbytes]
            # bytes of ones are NaN in every floating-point format
            self._issuer.issue(ops.reshard(unit, self._first + slot), lambda: buffer.fill_(255))

    def _fill(self, slot: int, unit: Unit, *, renew: bool = False) -> None:
        """Queue the copy of ``unit`` into a slot. If the unit is there but outdated, only the trained weights
        are copied. To ``renew`` a unit, a rank copies all of it, and stays outdated as the other ranks
        are."""
        source, place = self._disk.source(unit.index)
        if self.slots.holder[slot] == unit.index and not renew:
            source = source[: unit.layout.grad_nbytes]
            self._outdated.discard(unit.index)
        copy, into = self._issuer.backend.copy, self.slots.buffers[slot]
        across = None if renew else self._across
        parts, own = (
            (slice(0), [slice(0, source.numel())]) if across is None else across.parts(source.numel())
        )

        def work() -> None:
            for piece in own:
                copy(into[piece], source[piece])

        nbytes = sum(piece.stop - piece.start for piece in own)
        self._issuer.issue(ops.unshard(unit.index, self._first + slot, nbytes, place), work)
        if across is not None and parts.stop:
            across.all_gather(unit, self._first + slot, into.data[parts])
        self.slots.holder[slot] = unit.index


#: Weight slots at most of a rank that runs forwards without gradients while ranks gather weights.
INFERENCE_SLOTS = 2


class Pager:
    """The weights of the layers and of the root unit on the device.

    [Note: gathered weights]
    Ranks that gather must agree on the contents of their slots, since each copies a part of a layer. They
    derive them from the order of a training step, which is the same on all ranks. A single rank may run a
    forward without gradients. Such forwards have slots of their own, into which a rank copies whole layers.
    """

    def __init__(
        self,
        issuer: Issuer,
        units: Sequence[Unit],
        root: Unit,
        store: HostStore,
        across: AcrossRanks,
        memory: HostMemory,
        *,
        num_slots: int,
        gathers: bool,
    ) -> None:
        """With ``gathers`` each rank copies a part of a layer to its device and gets the other parts from the
        other ranks' devices."""
        self.root_buffer = issuer.backend.device_buffer(root.layout.nbytes)
        self._issuer = issuer
        self._units = units
        self._root = root
        self._store = store
        self._disk = DiskPager(issuer, store, across)
        self.parameters = Parameters(
            issuer,
            units,
            root,
            store,
            self._disk,
            memory,
            self.root_buffer,
            writes_masters=across.ranks.is_first_of_machine,
        )
        self.training = self.inference = Residency(
            issuer, units, self._disk, num_slots, across=across if gathers else None
        )
        if gathers:
            count, first = min(num_slots, INFERENCE_SLOTS), max(num_slots, len(units))
            self.inference = Residency(issuer, units, self._disk, count, first=first)
        self._residencies = [*dict.fromkeys((self.training, self.inference))]

    @property
    def prefetch_hits(self) -> int:
        """The number of runs that found their weights in a slot."""
        return sum(each.prefetch_hits for each in self._residencies)

    @property
    def prefetch_misses(self) -> int:
        """The number of runs that did not."""
        return sum(each.prefetch_misses for each in self._residencies)

    def slot_bytes(self) -> int:
        """Bytes of all weight slots."""
        return sum(buffer.nbytes for each in self._residencies for buffer in each.slots.buffers)

    @contextmanager
    def resident(self, unit: Unit, use: LayerUse) -> Iterator[Slot]:
        """The slot that holds ``unit``, which stays there inside the block."""
        self.refresh_unit(unit)
        residency = self.inference if use.phase is Phase.INFERENCE else self.training
        with residency.resident(unit, use) as slot:
            yield slot
            self.parameters.end_flight(unit)

    def check_idle(self, unit: Unit) -> None:
        """Raise RuntimeError if ``unit`` is running: it would continue with the weights from before the
        update."""
        if any(each.is_running(unit) for each in self._residencies):
            raise RuntimeError(
                f"optimizer.step() is called inside of layer '{unit.name}', whose weights it updates: call "
                "it when the layer has returned"
            )

    def release(self) -> None:
        """Release the slots and the root's buffer."""
        for each in self._residencies:
            each.slots.buffers.clear()
        self.parameters.release()
        self.root_buffer = torch.empty(0, dtype=torch.uint8)

    def update(self, unit: Unit, work: ShardUpdate, nbytes: int, source: Place) -> None:
        """Queue ``work``, which moves ``nbytes`` of host memory, for the shard of ``unit``, from the gradient
        in ``source``. If the weights are on disk, the update may wait until they are read."""
        self._disk.update(unit.index, work, nbytes, source)

    def update_issued(self, unit: Unit, params: Iterable[torch.Tensor]) -> None:
        """An update of these parameters in ``unit``'s host shard was issued: the trained weights in its slot
        are stale."""
        self.parameters.changed(unit, params)
        if unit.index == ROOT:
            self.unshard_root(unit.layout.grad_nbytes)
            return
        for each in self._residencies:
            each.updated(unit)

    def replaced(self, unit: Unit) -> None:
        """All of ``unit``'s host shard was replaced, including frozen weights."""
        self._disk.forget(unit.index)
        self.parameters.changed(unit, unit.params)
        if unit.index == ROOT:
            self.unshard_root()
            return
        for each in self._residencies:
            each.evict(unit.index)

    def begin_anew(self) -> None:
        """Discard the state of the ring and of the slots after a failure."""
        for each in self._residencies:
            for unit in self._units:
                each.evict(unit.index)
        self._disk.begin_anew()

    def unshard_root(self, nbytes: int | None = None) -> None:
        """Copy the root unit's host shard, or its first ``nbytes``, to its place on the device."""
        source = self._store.shards[ROOT].weight[:nbytes]
        into = self.root_buffer[: source.numel()]
        op = ops.unshard(ROOT, ROOT, source.numel())
        self._issuer.issue(op, lambda: self._issuer.backend.copy(into, source))

    def refresh(self, moved: Container[torch.Tensor] = ()) -> None:
        """Take over user code's writes to parameters: of layers on the host, of the root on the device.

        Raises ValueError for parameters whose memory was replaced, unless they are in ``moved``.
        """
        for unit in (*self._units, self._root):
            self.parameters.check_places(unit, moved)
            self.refresh_unit(unit)

    def refresh_unit(self, unit: Unit) -> None:
        """`refresh` for one unit, whose copy in a slot may then be stale."""
        if unit.index == ROOT:
            self.parameters.take_over_root()
        elif self.parameters.take_over(unit):
            for each in self._residencies:
                each.written(unit)
