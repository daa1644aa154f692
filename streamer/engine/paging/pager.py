"""Weights on the device: the layers' in weight slots, the root unit's in a buffer of its own."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

from streamer.engine.paging.across_ranks import AcrossRanks
from streamer.engine.paging.disk_pager import DiskPager, ShardUpdate
from streamer.engine.paging.parameters import Parameters
from streamer.engine.paging.residency import Residency, Slot
from streamer.engine.schedule import op as ops
from streamer.engine.schedule.hazards import Issuer
from streamer.engine.schedule.op import ROOT, Place
from streamer.engine.schedule.order import LayerUse, Phase
from streamer.engine.unit import Unit
from streamer.store.host import HostStore

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
