"""Weights on the device: which unit is in which slot, what is fetched early, what is given up."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice

import torch
from torch import nn

from streamer.engine import op as ops
from streamer.engine.issuer import Issuer
from streamer.engine.op import ROOT
from streamer.engine.order import Order, Visit, farthest
from streamer.engine.unit import Unit
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
        #: units in a slot that does not have their last update
        self._outdated: set[int] = set()
        #: units whose update was issued and that nobody has waited for since
        self.in_flight: set[int] = set()
        self._written = {unit.index: unit.written() for unit in (*units, root)}

    @contextmanager
    def visited(self, unit: Unit, visit: Visit) -> Iterator[int]:
        """The slot that holds ``unit``, which stays there inside the block; what is expected next is
        unsharded as slots become free before and after it."""
        self._refresh_layer(unit)
        self._order.visit(visit)
        slot = self._unshard(unit)
        self.in_flight.discard(unit.index)
        self.slots.enter(slot)
        try:
            self.prefetch()
            yield slot
        finally:
            self.slots.leave(slot)
            self.prefetch()

    def prefetch(self) -> None:
        """Issue the copies that the coming visits need, in their order, up to the first that has no slot yet.

        [Note: residency]
        A unit that is in no slot takes the place of the one whose next use is farthest away, as in Belady's
        algorithm (for each of its bytes, where layers differ: a large one is dear to bring again), but not of
        the one that is visited just before it: under that visit the copy shall run. Which one is seen from
        the visit that needs the copy, and the copy is issued when the other's last visit before it is over;
        to fill all slots with what comes next is to give up what would have been used sooner.
        """
        slots, upcoming = self.slots, self._order.upcoming()
        # of those that may give way now, who is not visited before the visit that is looked at
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
            elif index in self._outdated and slot not in slots.busy:
                self._fill(slot, self._units[index])
            if index in unused:
                unused.remove(index)

    def resize(self, count: int) -> None:
        """Have ``count`` slots, or as many fewer as the device has memory for, or more as are in use.

        The caller waits until nothing uses the slots that go.
        """
        while len(self.slots.buffers) < count:
            try:
                self.slots.add()
            except torch.OutOfMemoryError:
                return
        while (last := len(self.slots.buffers) - 1) >= count and last not in self.slots.busy:
            unit = self.slots.holder[last]
            if unit is not None:
                self._reshard(unit)
            self._issuer.wait((ops.weight_slot(last),), to_write=True)
            self.slots.drop()

    def check_depth(self, unit: Unit) -> None:
        """Raise RuntimeError if ``unit`` is called inside of so many others that its backward would find no
        gradient slot."""
        if (depth := self.slots.busy.total()) >= MOST_GRAD_SLOTS:
            raise RuntimeError(
                f"layer '{unit.name}' is called inside of {depth} others, and gradients of no more than "
                f"{MOST_GRAD_SLOTS} layers are made at a time: call it outside of them"
            )

    def release(self) -> None:
        """Give up the slots and the root's buffer."""
        self.slots.buffers.clear()
        self.root_buffer = torch.empty(0, dtype=torch.uint8)

    def updated(self, unit: Unit) -> None:
        """The update of ``unit``'s host shard was issued: what it trains is old on the device."""
        self._changed(unit)
        if unit.index == ROOT:
            self.unshard_root(unit.layout.grad_nbytes)
        elif (slot := self.slots.find(unit.index)) is not None:
            self._outdated.add(unit.index)
            self._poison(unit.index, slot, unit.layout.grad_nbytes)

    def replaced(self, unit: Unit) -> None:
        """All of ``unit``'s host shard was exchanged, what is frozen too."""
        self._changed(unit)
        if unit.index == ROOT:
            self.unshard_root()
        else:
            self._reshard(unit.index)

    def _changed(self, unit: Unit) -> None:
        # for autograd the weights are written here, as by any optimizer
        torch.autograd.graph.increment_version(unit.params)
        self._written[unit.index] = unit.written()
        self.in_flight.add(unit.index)

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

    def _refresh_layer(self, unit: Unit, moved: Container[torch.Tensor] = ()) -> None:
        self._check_places(unit, moved)
        if unit.written() != self._written[unit.index]:
            self._issuer.wait((ops.shard(unit.index),), to_write=True)
            self._rebase(unit)
            self._reshard(unit.index)

    def _check_places(self, unit: Unit, moved: Container[torch.Tensor]) -> None:
        for slice, param in self.elsewhere(unit):
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
