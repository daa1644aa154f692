"""Weights on the device: which unit is in which slot, what is fetched early, what is given up."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import NamedTuple

import torch
from torch import nn

from streamer.engine.disk.state import ShardUpdate, StatePager, masters_of
from streamer.engine.disk.weights import Gather, WeightRing
from streamer.engine.guard import as_plain, not_a_number
from streamer.engine.paging.across_ranks import AcrossRanks
from streamer.engine.paging.slots import WeightSlots
from streamer.engine.paging.unit import Unit
from streamer.engine.schedule import op as ops
from streamer.engine.schedule.hazards import Issuer
from streamer.engine.schedule.op import ROOT, Place
from streamer.engine.schedule.order import Order, Phase, Visit, farthest
from streamer.store.host import HostStore
from streamer.store.layout import Slice
from streamer.store.ledger import host, require
from streamer.store.shard import streamed
from streamer.store.weights_on_disk import WEIGHT_BUFFERS
from streamer.torch_private import storage_owners


class _Before(NamedTuple):
    """The unit that each slot held, those that did not have their last update, and what was expected."""

    holder: list[int | None]
    outdated: set[int]
    order: Order


class Weights:
    """The weight slots of the layers, and the root unit's own buffer, which never holds anything else."""

    def __init__(
        self,
        issuer: Issuer,
        units: Sequence[Unit],
        root: Unit,
        store: HostStore,
        state: StatePager,
        *,
        num_slots: int,
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
        self._state = state
        #: what weights on disk pass through
        self._ring = WeightRing(issuer, store, state)
        issuer.before_wait = self._ring.finish
        #: by unit, that whose weights on disk the user's code has asked for, and has in memory; whether they
        #: have changed there
        self._brought: dict[int, bool] = {}
        #: those of them that have weights of the user's where somebody's files have others: they stay
        self._stays: set[int] = set()
        #: those of them that have other weights on disk since, which ranks have updated or loaded
        self._stale: set[int] = set()
        self._order, self._order_alone = Order(range(len(units))), Order(range(len(units)))
        #: whether the slots hold what `prefetch` has decided on, for visits as they have come since
        self._is_settled = False
        #: units in a slot that does not have their last update
        self._outdated: set[int] = set()
        #: given where each rank copies a part of a layer to its device and has the others' from there: [Note:
        #: gathered weights]
        self._across: AcrossRanks | None = None
        #: what was in the slots when this rank began to fill them for itself, None where it does not
        self._before: _Before | None = None
        #: units whose update was issued and that nobody has waited for since
        self.in_flight: set[int] = set()
        self._written = {unit.index: unit.written() for unit in (*units, root)}
        #: by unit, which of its parameters are aliased: [Note: aliased parameters]
        self._aliased: dict[int, set[int]] = {}
        self._read: dict[int, set[int]] = {}
        #: by unit, how many hold the storage of each parameter where it is not aliased
        self._holders: dict[int, list[int]] = {}

    @contextmanager
    def visited(self, unit: Unit, visit: Visit) -> Iterator[int]:
        """The slot that holds ``unit``, which stays there inside the block; what is expected next is
        unsharded as slots become free before and after it."""
        is_alone = visit.phase is Phase.INFERENCE
        self.fill_alone(is_alone)
        self._refresh_layer(unit)
        if not self._order.visit(visit):
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
            yield slot
            self.end_flight(unit)
        finally:
            self.slots.leave(slot)
            self._ring.release(unit.index)
        # not after an error, which an error in here would replace; the next visit does the same
        self.fill_alone(is_alone)
        self.prefetch()

    def fill_alone(self, is_alone: bool) -> None:
        """What is filled from here on is filled for this rank alone, or for all that gather.

        [Note: gathered weights]
        Ranks that gather decide alike on what is in their slots, since each brings a part of it: from the
        visits of a training step, which all make in the same order. A forward without gradients may be one
        rank's alone. For such ones a rank copies whole layers, by an order of their own. When its next step
        goes on it brings back what was in its slots before, by copies of its own too, as if nothing had been.
        """
        if self._across is None or is_alone is (self._before is not None):
            return
        self._is_settled = False
        if is_alone:
            self._before = _Before([*self.slots.holder], {*self._outdated}, self._order)
            self._order = self._order_alone
            return
        assert self._before is not None
        before = self._before
        changed = [slot for slot, unit in enumerate(before.holder) if unit != self.slots.holder[slot]]
        if busy := [slot for slot in changed if slot in self.slots.busy]:
            name = self._units[self.slots.holder[busy[0]] or 0].name
            raise RuntimeError(
                f"layer '{name}' runs without gradients, and calls another one with them, which ranks that "
                "gather weights cannot do: wrap with gather_weights=False"
            )
        for slot in changed:
            if (held := self.slots.holder[slot]) is not None:
                self._reshard(held)
        for slot in changed:
            if (index := before.holder[slot]) is not None:
                self._fill(slot, self._units[index])
        self._before, self._order, self._outdated = None, before.order, before.outdated

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
        visits = islice(self._order.upcoming_visits(), len(self.slots.buffers) + WEIGHT_BUFFERS)
        self._ring.fill(visit.unit for visit in visits if self._passes_ring(visit))
        self._is_settled = True

    def _passes_ring(self, visit: Visit) -> bool:
        """Whether a visit to come needs its unit's weights in the ring: for the slot, or to be updated."""
        index = visit.unit
        in_slot = index not in self._outdated and self.slots.find(index) is not None
        return not in_slot or self._ring.updated_in(index) is visit.phase

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
        self.fill_alone(False)
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
            for each in self._units:
                each.forget_leaves()
            self.slots.drop()
            self._issuer.backend.device_trim()

    def check_idle(self, unit: Unit) -> None:
        """Raise RuntimeError if ``unit`` is running, which would go on with the weights of before."""
        if self.slots.find(unit.index) in self.slots.busy:
            raise RuntimeError(
                f"optimizer.step() is called inside of layer '{unit.name}', whose weights it updates: call "
                "it when the layer has returned"
            )

    def release(self) -> None:
        """Give up the slots and the root's buffer."""
        self.slots.buffers.clear()
        self.root_buffer = torch.empty(0, dtype=torch.uint8)

    def update(self, unit: Unit, work: ShardUpdate, nbytes: int, source: Place) -> None:
        """Queue ``work``, which moves ``nbytes`` of host memory, for the shard of ``unit``, from the gradient
        in ``source``. Where its weights are on disk, it may be issued when they are read."""
        if self._ring.passes(unit.index):
            self._ring.update(unit.index, work, nbytes, source)
            if unit.index in self._brought:
                self._stale.add(unit.index)
            return
        self._state.update(unit.index, work, nbytes, source)
        if unit.index in self._brought:
            self._brought[unit.index] = True

    def _is_out(self, unit: Unit) -> bool:
        """Whether the weights of ``unit`` are on disk and nowhere else."""
        return self._store.shards[unit.index].is_out

    @as_plain
    def bring_in(self, unit: Unit) -> None:
        """The user's code asks for the weights of ``unit``, which are on disk: let its parameters show them,
        in memory of their own, until the next visit or step that finds nobody else to hold that memory.

        Of ranks each has a copy of its own, for the user alone: what is on disk is what runs. What all write
        is written there at once, by `write_through`.
        """
        shard = self._store.shards[unit.index]
        self._await_masters(unit)
        self._ring.forget(unit.index)
        nbytes = unit.layout.nbytes
        remedy = "let go of what holds other parameters' memory, or save a checkpoint by streamer.save"
        require(
            f"the weights of '{unit.name}', which are on disk",
            host(nbytes, self._issuer.backend.host_available(), remedy),
        )
        shard.bring_in(self._store.disks.buffer)
        self._brought[unit.index] = False
        for slice, param in unit.placed():
            param.data = slice.own(shard.weight)
        unit.show_parts()
        self._holders[unit.index] = self._holders_now(unit)
        self.in_flight.discard(unit.index)

    def send_back(self, *, keep: int) -> None:
        """Of the weights on disk that the user's code has asked for, let all but the last ``keep`` units' go
        where nobody holds their memory."""
        if len(self._brought) > keep:
            for index in [*self._brought][: len(self._brought) - keep]:
                self._refresh_layer(self._units[index])

    @as_plain
    def _send_out(self, unit: Unit) -> None:
        """Write the weights of ``unit`` back to disk if they have changed, and let them go. Unless somebody
        else than the parameters holds their memory, or the user has written what is in somebody's files."""
        index = unit.index
        if self._holders_now(unit) != self._holders[index]:
            return
        self._await_masters(unit)
        shard, has_changed = self._store.shards[index], self._brought[index] and not self._store.is_shared
        if has_changed and shard.weights_on_disk.unwritable(shard.brought):
            self._stays.add(index)
            return
        del self._brought[index]
        self._stale.discard(index)
        self._aliased.pop(index, None)
        self._hide_out(unit)
        shard.send_out(write=has_changed)

    def unshard_by(self, across: AcrossRanks) -> None:
        """Ranks copy a part of each layer from now on, and gather the others' on the device."""
        self._across = across

    def gather_by(self, gather: Gather) -> None:
        """Machines divide the state: ``gather`` completes weights on disk that this rank has updated."""
        self._ring.gather = gather

    def write_through(self, units: Iterable[Unit]) -> None:
        """The user's code has written parameters of ``units`` on this rank, the first one of its machine:
        write what of them is on disk there. Raises RuntimeError for what is in somebody's files."""
        for unit in units:
            if unit.index in self._brought:
                self._await_masters(unit)
                shard = self._store.shards[unit.index]
                if names := shard.weights_on_disk.unwritable(shard.brought):
                    raise RuntimeError(
                        f"'{names[0]}' is frozen and read from its file at every use, so ranks cannot write "
                        "it: make the model without disk=True, which takes it into memory"
                    )
                shard.weights_on_disk.store(shard.brought)

    def follow(self, units: Iterable[Unit]) -> None:
        """Ranks have written ``units``, all of them or the first one of each machine for all of it: take over
        what is on disk, and let there be on disk what follows from it."""
        self.fill_alone(False)
        for unit in units:
            if unit.index in self._brought:
                self._await_masters(unit)
                self._ring.forget(unit.index)
                shard = self._store.shards[unit.index]
                shard.weights_on_disk.fetch(shard.brought)
            if unit.index == ROOT:
                self.refresh_root()
            else:
                self._take_over_writes(unit)

    def begin_anew(self) -> None:
        """Take nothing for granted of the ring and of the slots, since something has failed."""
        if self._before is not None:
            self._order, self._before = self._before.order, None
        for unit in self._units:
            self._reshard(unit.index)
        self._ring.begin_anew()

    def brought_bytes(self) -> int:
        """Bytes of host memory of weights on disk that the user's code has asked for."""
        return sum(self._nbytes[index] for index in self._brought)

    @as_plain
    def _hide_out(self, unit: Unit) -> None:
        """Let the parameters of ``unit``, whose weights are on disk, show NaN until they are asked for."""
        self.in_flight.add(unit.index)
        for slice, param in unit.placed():
            # one number, of whatever shape: it takes no memory
            param.data = not_a_number(slice.dtype, param.device).expand(slice.param.shape)
        unit.show_parts()

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
        self.fill_alone(False)
        self._ring.forget(unit.index)
        if unit.index in self._brought:
            self._brought[unit.index] = True
            if self._store.is_shared:
                self._stale.add(unit.index)
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
        self.in_flight.add(unit.index)

    def end_flight(self, unit: Unit) -> None:
        """The caller has waited for the update of ``unit``."""
        if unit.index in self.in_flight and not self._is_out(unit):
            if unit.index in self._stale:
                shard = self._store.shards[unit.index]
                shard.weights_on_disk.fetch(shard.brought)
                self._stale.discard(unit.index)
            self.in_flight.discard(unit.index)

    def guard(self) -> None:
        """Parameters are guarded now, and user code holds the memory of none."""
        for unit in (*self._units, self._root):
            self._holders[unit.index] = self._holders_now(unit)
            if self._is_out(unit):
                self._hide_out(unit)

    @as_plain
    def _holders_now(self, unit: Unit) -> list[int]:
        """How many hold the storage of each parameter of ``unit``."""
        return [*map(storage_owners, unit.params)]

    def _unit(self, index: int) -> Unit:
        return self._root if index == ROOT else self._units[index]

    def alias(self, unit: Unit, position: int, *, to_read: bool) -> None:
        """User code got a tensor that shares memory with a parameter of ``unit``. Unless ``to_read``, it may
        write the parameter and nothing tells of that.

        [Note: aliased parameters]
        Nothing tells of a write through ``param.data`` or a NumPy array. So, as long as a storage has more
        holders than it had after `wrap`, and once more after that,

        - a layer is copied to the device anew for each visit, because its copies there may be old;
        - a parameter of the root unit, which the user sees on the device, is compared with its copy in host
          memory before that is used.

        Masters need none of that: see [Note: masters].

        A write through such an alias during an update would be lost, so `step` waits for updates of
        aliased parameters; also for views that an autograd graph holds, which only reads them.
        """
        if to_read:
            self._read.setdefault(unit.index, set()).add(position)
            return
        if unit.index in self._brought:
            self._brought[unit.index] = True
        self._aliased.setdefault(unit.index, set()).add(position)

    def copied_in(self, unit: Unit, position: int, values: torch.Tensor) -> None:
        """User code has copied ``values`` into a parameter, which holds them rounded. In fp32 they are its
        masters. [Note: masters]"""
        slice = unit.layout.slices[position]
        is_short = slice.param.trainable and slice.dtype in (torch.bfloat16, torch.float16)
        if not is_short or values.dtype not in (torch.float32, torch.float64):
            return
        values = values.detach().cpu().to(torch.float32).expand(slice.param.shape)
        if self._across is None or self._across.ranks.leads_machine:
            self._await_masters(unit)
            shard = self._store.shards[unit.index]
            shard.about_to_change()
            self._issuer.backend.on_host(partial(shard.load, slice, values))
        if unit.index == ROOT:  # on the device, too, rounded as masters are
            slice.view(self.root_buffer).copy_(streamed(values, slice.dtype))

    def aliased(self) -> list[Unit]:
        """The units that are aliased, if only to be read. What no longer is stays noted in `_aliased` until
        the next visit of its unit, which copies it anew."""
        if not self._aliased and not self._read:
            return []
        self._read = self._still_aliased(self._read)
        aliased = {*self._still_aliased(self._aliased), *self._read}
        return [unit for unit in (*self._units, self._root) if unit.index in aliased]

    def _still_aliased(self, noted: Mapping[int, set[int]]) -> dict[int, set[int]]:
        """What of ``noted`` is aliased still."""
        now = {index: self._holders_now(self._unit(index)) for index in noted}
        still = {
            index: {p for p in positions if now[index][p] != self._holders[index][p]}
            for index, positions in noted.items()
        }
        return {index: positions for index, positions in still.items() if positions}

    def _take_back(self, unit: Unit) -> None:
        """Forget that ``unit`` was aliased where it no longer is."""
        self._aliased |= self._still_aliased({unit.index: self._aliased.pop(unit.index)})

    def _await_masters(self, unit: Unit) -> None:
        """Block until the weights of ``unit``, on the host and where the user sees them, and what makes
        masters of them may be written."""
        on_device = (ops.weight_slot(ROOT),) if unit is self._root else ()
        masters = masters_of(unit.index, self._store.shards[unit.index])
        self._issuer.wait((*on_device, *masters), to_write=True)

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
            self._check_places(unit, moved)
            self._refresh_layer(unit)
        self.refresh_root(moved)

    def check_places(self) -> None:
        """Raise ValueError if somebody has given parameters of layers other memory."""
        for unit in self._units:
            self._check_places(unit)

    def elsewhere(self, unit: Unit) -> list[tuple[Slice, nn.Parameter]]:
        """The parameters of ``unit`` that somebody has given other memory."""
        if self._is_out(unit):
            return []
        is_root = unit.index == ROOT
        return unit.elsewhere(self.root_buffer if is_root else self._store.shards[unit.index].weight)

    def refresh_root(self, moved: Container[torch.Tensor] = ()) -> None:
        """`refresh` for the root alone."""
        self._check_places(self._root, moved)
        if self._root.written() != self._written[ROOT]:
            self._await_masters(self._root)
            self._store.shards[ROOT].weight.copy_(self.root_buffer)
            self._note_writes(self._root)
        elif ROOT in self._aliased:
            self._take_over_aliased_root()

    def _take_over_aliased_root(self) -> None:
        self._await_masters(self._root)
        shard = self._store.shards[ROOT]
        for position in self._aliased[ROOT]:
            slice = self._root.layout.slices[position]
            place = range(slice.offset, slice.offset + slice.nbytes)
            seen = self.root_buffer[place.start : place.stop].cpu()
            if not torch.equal(seen, shard.weight[place.start : place.stop]):
                shard.weight[place.start : place.stop].copy_(seen)
        self._take_back(self._root)

    def _refresh_layer(self, unit: Unit) -> None:
        if self._is_out(unit):
            return
        if unit.index in self._aliased:
            self._renew(unit, is_own=True)
            self._take_back(unit)
        self._take_over_writes(unit)
        if unit.index not in self._brought or unit.index in self._stays:
            return
        if unit.index in self._stale or unit.index not in self.in_flight:
            self._send_out(unit)

    def _take_over_writes(self, unit: Unit) -> None:
        if unit.written() != self._written[unit.index]:
            self._await_masters(unit)
            self._note_writes(unit)
            self._renew(unit)

    def _check_places(self, unit: Unit, moved: Container[torch.Tensor] = ()) -> None:
        for slice, param in self.elsewhere(unit):
            if param in moved:
                continue
            if param.dtype != slice.dtype:
                raise ValueError(
                    f"'{slice.param.name}' was cast from {slice.dtype} to {param.dtype} after streamer.wrap "
                    "(param.data = param.data.to(...), as TRL does to adapters of a quantized base), which "
                    f"is not what runs: cast it before, or give streamer.wrap dtype={param.dtype}, or call "
                    "streamer.unwrap(model) first"
                )
            if param.shape != slice.param.shape:
                raise ValueError(
                    f"'{slice.param.name}' has shape {tuple(param.shape)} and had {tuple(slice.param.shape)} "
                    "in streamer.wrap (resize_token_embeddings changes it): resize before streamer.wrap, or "
                    "call streamer.unwrap(model), resize, and wrap again"
                )
            raise ValueError(
                f"'{slice.param.name}' was given other memory after streamer.wrap (param.data = ..., "
                "param.set_, vector_to_parameters), which is not what runs: write into it (param.copy_ under "
                "torch.no_grad), or call streamer.unwrap(model) first"
            )

    def _note_writes(self, unit: Unit) -> None:
        """The user has written weights of ``unit``, which are what runs next."""
        self._written[unit.index] = unit.written()
        if unit.index in self._brought:
            self._brought[unit.index] = True
            self._stays.discard(unit.index)

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

    def _renew(self, unit: Unit, *, is_own: bool = False) -> None:
        """What is in the slot of ``unit`` may be old, which ranks that gather do not all find out at the same
        time: let it be new, and nothing else be changed. ``is_own`` says that it is not what runs, where that
        is on disk."""
        from_disk = self._ring.passes(unit.index)
        if self._across is None or self._before is not None or (from_disk and not is_own):
            self._reshard(unit.index)
        elif not from_disk and (slot := self.slots.find(unit.index)) is not None:
            self._fill(slot, unit, alone=True)

    def _fill(self, slot: int, unit: Unit, *, alone: bool = False) -> None:
        """Queue the copy of ``unit`` into a slot; what is trained is enough where it is there already, but
        outdated. Ranks that gather copy a part each, unless this one is to have it ``alone``."""
        place = None
        if self._ring.passes(unit.index):
            source, place = self._ring.source(unit.index)
        else:
            source = self._store.shards[unit.index].weight
        if self.slots.holder[slot] == unit.index and not alone:
            source = source[: unit.layout.grad_nbytes]
            self._outdated.discard(unit.index)
        copy, into = self._issuer.backend.copy, self.slots.buffers[slot]
        across = None if alone or self._before is not None else self._across
        parts, own = (
            (slice(0), [slice(0, source.numel())]) if across is None else across.parts(source.numel())
        )

        def work() -> None:
            for piece in own:
                copy(into[piece], source[piece])

        nbytes = sum(piece.stop - piece.start for piece in own)
        self._issuer.issue(ops.unshard(unit.index, slot, nbytes, place), work)
        if across is not None and parts.stop:
            across.all_gather(unit, slot, into.data[parts])
        self.slots.holder[slot] = unit.index
