"""What user code sees of the weights, and what it does to them.

[Note: aliased parameters]
Nothing tells of a write through ``param.data`` or a NumPy array. So, as long as a storage has more owners
than it had after `wrap`, and once more after that,

- a layer is copied to the device anew for each visit, because its copies there may be old;
- a parameter of the root unit, which user code sees on the device, is compared with its copy in host memory
  before that is used.

Masters need none of that: see [Note: masters].

A write through such an alias during an update would be lost, so `step` waits for updates of aliased
parameters; also for views that an autograd graph holds, which only reads them.

[Note: copies of weights on disk]
A parameter whose weights are on disk shows NaN, and takes no memory. When user code touches it, its unit's
weights are read to a buffer, where they stay until a visit or a step finds nobody else to hold the buffer.
What has changed there is written to disk then. Ranks have a copy each, for reading alone: what runs is on
disk, where the first rank of a machine writes at once what all of them write.
"""

from __future__ import annotations

import enum
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import nn

from streamer.engine.guard import as_plain, not_a_number
from streamer.engine.paging.disk_pager import DiskPager
from streamer.engine.schedule import op as ops
from streamer.engine.schedule.hazards import Issuer
from streamer.engine.schedule.op import ROOT
from streamer.engine.unit import Unit
from streamer.store.host import HostStore
from streamer.store.layout import Slice
from streamer.store.ledger import host, require
from streamer.store.shard import streamed
from streamer.torch_private import storage_owners


class Copy(enum.Enum):
    """The copy of weights on disk that user code has asked for. [Note: copies of weights on disk]"""

    #: there is none, or the weights are not on disk
    NONE = enum.auto()
    #: it is as on disk
    SAME = enum.auto()
    #: user code or an update has changed it
    CHANGED = enum.auto()
    #: it has changes that cannot be written, since somebody else's file has these weights: it stays
    KEPT = enum.auto()
    #: ranks have changed what is on disk since it was read
    OLD = enum.auto()


class Changed(enum.Enum):
    """Whether user code has changed weights since they were last taken over."""

    NO = enum.auto()
    #: it has their memory
    MAYBE = enum.auto()
    YES = enum.auto()


@dataclass
class Seen:
    """What may change about the parameters of one unit."""

    #: how many writes PyTorch had counted when the weights were last taken over
    written: int
    #: an update was issued and nobody has waited for it since, or the weights are on disk alone
    in_flight: bool = False
    copy: Copy = Copy.NONE
    #: how many hold the storage of each parameter where user code holds none
    owners: list[int] = field(default_factory=list)
    #: the positions of parameters whose memory user code has got; of those that an autograd graph reads
    aliased: set[int] = field(default_factory=set)
    read: set[int] = field(default_factory=set)


class Parameters:
    """The parameters of all units: writes to them, aliases, and copies of weights on disk. The root's are in
    ``root_buffer``, on the device."""

    def __init__(
        self,
        issuer: Issuer,
        units: Sequence[Unit],
        root: Unit,
        store: HostStore,
        disk: DiskPager,
        root_buffer: torch.Tensor,
        *,
        writes_masters: bool,
    ) -> None:
        """Of ranks, one of each machine ``writes_masters`` for all of them."""
        self._issuer = issuer
        self._units = units
        self._root = root
        self._store = store
        self._disk = disk
        self._root_buffer = root_buffer
        self._writes_masters = writes_masters
        self.of = {unit.index: Seen(unit.written()) for unit in (*units, root)}
        #: the units of which there are copies, in the order in which they were asked for
        self._copied: list[int] = []

    def guard(self) -> None:
        """Parameters are guarded now, and user code holds the memory of none."""
        for unit in (*self._units, self._root):
            self.of[unit.index].owners = self._owners(unit)
            if self.is_out(unit):
                self._hide(unit)

    @as_plain
    def _owners(self, unit: Unit) -> list[int]:
        """How many hold the storage of each parameter."""
        return [*map(storage_owners, unit.params)]

    def release(self) -> None:
        """Hold nothing of the root's buffer any more."""
        self._root_buffer = torch.empty(0, dtype=torch.uint8)

    # updates

    def begin_flight(self, unit: Unit) -> None:
        """An update of ``unit`` is about to be issued: who touches its parameters from now on waits."""
        self.of[unit.index].in_flight = True

    def end_flight(self, unit: Unit) -> None:
        """The caller has waited for the update of ``unit``."""
        seen = self.of[unit.index]
        if seen.in_flight and not self.is_out(unit):
            if seen.copy is Copy.OLD:
                self._read_again(unit)
            seen.in_flight = False

    def changed(self, unit: Unit, params: Iterable[torch.Tensor]) -> None:
        """An update of these parameters of ``unit`` was issued, or a checkpoint loaded into its shard."""
        seen = self.of[unit.index]
        # for autograd the weights are written here, as by any optimizer
        torch.autograd.graph.increment_version([*params])
        seen.written = unit.written()
        if seen.copy is not Copy.NONE:
            seen.copy = Copy.OLD if self._store.is_shared else Copy.CHANGED
        seen.in_flight = True

    def await_masters(self, unit: Unit) -> None:
        """Block until the weights of ``unit``, on the host and where user code sees them, and what makes
        masters of them may be written."""
        on_device = (ops.weight_slot(ROOT),) if unit is self._root else ()
        masters = ops.masters_of(unit.index, self._store.shards[unit.index])
        self._issuer.wait((*on_device, *masters), to_write=True)

    # writes of user code

    def take_over(self, unit: Unit) -> Changed:
        """Take over what user code has written to a layer's parameters. Whether its slot may be outdated."""
        if self.is_out(unit):
            return Changed.NO
        seen, found = self.of[unit.index], Changed.NO
        if seen.aliased:
            found = Changed.MAYBE
            seen.aliased = self._still(unit, seen.aliased)
        if unit.written() != seen.written:
            found = Changed.YES
            self.await_masters(unit)
            self._note_writes(unit)
        if seen.copy is Copy.OLD or (seen.copy in (Copy.SAME, Copy.CHANGED) and not seen.in_flight):
            self._write_out(unit)
        return found

    def take_over_root(self, moved: Container[torch.Tensor] = ()) -> None:
        """Take over what user code has written to the root's parameters, on the device."""
        self.check_places(self._root, moved)
        root, seen = self._root, self.of[ROOT]
        if root.written() != seen.written:
            self.await_masters(root)
            self._store.shards[ROOT].weight.copy_(self._root_buffer)
            self._note_writes(root)
        elif seen.aliased:
            self.await_masters(root)
            weight = self._store.shards[ROOT].weight
            for position in seen.aliased:
                slice = root.layout.slices[position]
                place = range(slice.offset, slice.offset + slice.nbytes)
                now = self._root_buffer[place.start : place.stop].cpu()
                if not torch.equal(now, weight[place.start : place.stop]):
                    weight[place.start : place.stop].copy_(now)
            seen.aliased = self._still(root, seen.aliased)

    def _note_writes(self, unit: Unit) -> None:
        seen = self.of[unit.index]
        seen.written = unit.written()
        if seen.copy in (Copy.SAME, Copy.KEPT):
            seen.copy = Copy.CHANGED

    def copied_in(self, unit: Unit, position: int, values: torch.Tensor) -> None:
        """User code has copied ``values`` into a parameter, which holds them rounded. In fp32 they are its
        masters. [Note: masters]"""
        slice = unit.layout.slices[position]
        is_short = slice.param.trainable and slice.dtype in (torch.bfloat16, torch.float16)
        if not is_short or values.dtype not in (torch.float32, torch.float64):
            return
        values = values.detach().cpu().to(torch.float32).expand(slice.param.shape)
        if self._writes_masters:
            self.await_masters(unit)
            shard = self._store.shards[unit.index]
            shard.about_to_change()
            self._issuer.backend.on_host(partial(shard.load, slice, values))
        if unit.index == ROOT:  # on the device, too, rounded as masters are
            slice.view(self._root_buffer).copy_(streamed(values, slice.dtype))

    def check_places(self, unit: Unit, moved: Container[torch.Tensor] = ()) -> None:
        """Raise ValueError if somebody has given parameters of ``unit`` other memory, unless they are
        ``moved`` for good."""
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

    def elsewhere(self, unit: Unit) -> list[tuple[Slice, nn.Parameter]]:
        """The parameters of ``unit`` that somebody has given other memory."""
        if self.is_out(unit):
            return []
        is_root = unit.index == ROOT
        return unit.elsewhere(self._root_buffer if is_root else self._store.shards[unit.index].weight)

    # aliases

    def alias(self, unit: Unit, position: int, *, to_read: bool) -> None:
        """User code got a tensor that shares memory with a parameter of ``unit``. Unless ``to_read``, it may
        write the parameter and nothing tells of that. [Note: aliased parameters]"""
        seen = self.of[unit.index]
        if to_read:
            seen.read.add(position)
            return
        if seen.copy in (Copy.SAME, Copy.KEPT):
            seen.copy = Copy.CHANGED
        seen.aliased.add(position)

    def aliased(self) -> list[Unit]:
        """The units that are aliased, if only to be read. What no longer is stays noted until the next visit,
        which copies the unit anew."""
        found = []
        for unit in (*self._units, self._root):
            seen = self.of[unit.index]
            if seen.aliased or seen.read:
                seen.read = self._still(unit, seen.read)
                if seen.read or self._still(unit, seen.aliased):
                    found.append(unit)
        return found

    def _still(self, unit: Unit, positions: set[int]) -> set[int]:
        """Which of these parameters are aliased still."""
        now, owners = self._owners(unit), self.of[unit.index].owners
        return {position for position in positions if now[position] != owners[position]}

    # weights on disk

    def is_out(self, unit: Unit) -> bool:
        """Whether the weights of ``unit`` are on disk and nowhere else."""
        return self._store.shards[unit.index].is_out

    @as_plain
    def copy_in(self, unit: Unit) -> None:
        """User code asks for the weights of ``unit``, which are on disk: read them to a buffer. Raises
        MemoryError if there is no room. [Note: copies of weights on disk]"""
        shard, seen = self._store.shards[unit.index], self.of[unit.index]
        self.await_masters(unit)
        self._disk.forget(unit.index)
        remedy = "let go of what holds other parameters' memory, or save a checkpoint by streamer.save"
        require(
            f"the weights of '{unit.name}', which are on disk",
            host(unit.layout.nbytes, self._issuer.backend.host_available(), remedy),
        )
        shard.bring_in(self._store.disks.buffer)
        for slice, param in unit.placed():
            param.data = slice.own(shard.weight)
        unit.show_parts()
        seen.copy, seen.owners, seen.in_flight = Copy.SAME, self._owners(unit), False
        self._copied.append(unit.index)

    def beyond(self, keep: int) -> list[Unit]:
        """The units of which there are copies, but for the last ``keep``."""
        return [self._units[index] for index in self._copied[: max(0, len(self._copied) - keep)]]

    def copied_bytes(self) -> int:
        """Bytes of host memory of copies."""
        return sum(self._units[index].layout.nbytes for index in self._copied)

    @as_plain
    def _write_out(self, unit: Unit) -> None:
        """Let the copy go where nobody else holds it, and write it to disk if it has changed."""
        shard, seen = self._store.shards[unit.index], self.of[unit.index]
        if self._owners(unit) != seen.owners:
            return
        self.await_masters(unit)
        has_changed = seen.copy is Copy.CHANGED and not self._store.is_shared
        if has_changed and shard.weights_on_disk.unwritable(shard.brought):
            seen.copy = Copy.KEPT
            return
        seen.copy, seen.aliased = Copy.NONE, set()
        self._copied.remove(unit.index)
        self._hide(unit)
        shard.send_out(write=has_changed)

    @as_plain
    def _hide(self, unit: Unit) -> None:
        """Let the parameters of ``unit``, whose weights are on disk, show NaN until they are asked for."""
        self.of[unit.index].in_flight = True
        for slice, param in unit.placed():
            # one number, of whatever shape: it takes no memory
            param.data = not_a_number(slice.dtype, param.device).expand(slice.param.shape)
        unit.show_parts()

    def write_copies(self, units: Iterable[Unit]) -> None:
        """Ranks have written parameters of ``units``, and this rank does for its machine: write what of them
        is on disk there. Raises RuntimeError for what is in somebody's files."""
        for unit in units:
            if self.of[unit.index].copy is not Copy.NONE:
                self.await_masters(unit)
                shard = self._store.shards[unit.index]
                if names := shard.weights_on_disk.unwritable(shard.brought):
                    raise RuntimeError(
                        f"'{names[0]}' is frozen and read from its file at every use, so ranks cannot write "
                        "it: make the model without disk=True, which takes it into memory"
                    )
                shard.weights_on_disk.store(shard.brought)

    def read_copy(self, unit: Unit) -> None:
        """Ranks have written ``unit``: take over what is on disk."""
        if self.of[unit.index].copy is not Copy.NONE:
            self.await_masters(unit)
            self._disk.forget(unit.index)
            self._read_again(unit)

    def _read_again(self, unit: Unit) -> None:
        shard = self._store.shards[unit.index]
        shard.weights_on_disk.fetch(shard.brought)
        self.of[unit.index].copy = Copy.SAME
