"""Weights as user code reads and writes them.

[Note: aliased parameters]
A write through ``param.data`` or a NumPy array leaves no trace. So, as long as a storage has more owners than
it had after `wrap`, and once more after that,

- a layer is copied to the device again for each forward and backward, because its copy there may be stale;
- a parameter of the root unit, which user code accesses on the device, is compared with its copy in host
  memory before that copy is used.

Masters need none of that: see [Note: masters].

A write through an alias during an update would be lost, so `step` waits for the updates of aliased
parameters. It also waits if only an autograd graph holds an alias, although a graph does not write.

[Note: copies of weights on disk]
A parameter whose weights are on disk holds NaN and takes no memory. When user code reads or writes it, its
unit's weights are read into a buffer. They stay there until a forward, a backward or a step finds that no
other code holds the buffer. Changes are then written to disk. With several ranks, each has a read-only copy.
The weights on disk are authoritative: the first rank of a machine writes them at once for all ranks there.
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
from streamer.engine.paging.host_memory import HostMemory
from streamer.engine.schedule import op as ops
from streamer.engine.schedule.hazards import Issuer
from streamer.engine.schedule.op import ROOT
from streamer.engine.unit import Unit
from streamer.store.host import HostStore
from streamer.store.layout import Slice
from streamer.store.ledger import host, require
from streamer.store.purposes import WEIGHT_COPIES
from streamer.store.shard import streamed
from streamer.torch_private import storage_owners


class Copy(enum.Enum):
    """The state of a unit's copy of weights on disk. [Note: copies of weights on disk]"""

    #: there is no copy, or the weights are not on disk
    NONE = enum.auto()
    #: the copy equals the weights on disk
    SAME = enum.auto()
    #: user code or an update has changed the copy
    CHANGED = enum.auto()
    #: the copy has changes that cannot be written, since these weights are in a file of the user: it stays
    KEPT = enum.auto()
    #: ranks have changed the weights on disk since the copy was read
    OLD = enum.auto()


@dataclass
class ParameterState:
    """The state of one unit's parameters that may change."""

    #: PyTorch's count of writes when the weights were last taken over
    written: int
    #: an update was issued and has not been waited for, or the weights are on disk alone
    in_flight: bool = False
    copy: Copy = Copy.NONE
    #: the number of owners of each parameter's storage when user code holds none
    owners: list[int] = field(default_factory=list)
    #: the positions of aliased parameters, and of those that an autograd graph reads
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
        memory: HostMemory,
        root_buffer: torch.Tensor,
        *,
        writes_masters: bool,
    ) -> None:
        """With several ranks, one rank of each machine ``writes_masters`` for all of them."""
        self._issuer = issuer
        self._units = units
        self._root = root
        self._store = store
        self._disk = disk
        self._memory = memory
        self._root_buffer = root_buffer
        self._writes_masters = writes_masters
        self.of = {unit.index: ParameterState(unit.written()) for unit in (*units, root)}
        #: the units that have copies, in the order of their first use
        self._copied: list[int] = []

    def guard(self) -> None:
        """Called once parameters are guarded and user code holds the memory of none."""
        for unit in (*self._units, self._root):
            self.of[unit.index].owners = self._owners(unit)
            if self.is_out(unit):
                self._hide(unit)

    @as_plain
    def _owners(self, unit: Unit) -> list[int]:
        """The number of owners of each parameter's storage."""
        return [*map(storage_owners, unit.params)]

    def release(self) -> None:
        """Release the root's buffer."""
        self._root_buffer = torch.empty(0, dtype=torch.uint8)

    # updates

    def begin_flight(self, unit: Unit) -> None:
        """An update of ``unit`` is about to be issued: from now on, reading or writing its parameters
        waits."""
        self.of[unit.index].in_flight = True

    def end_flight(self, unit: Unit) -> None:
        """The caller has waited for the update of ``unit``."""
        state = self.of[unit.index]
        if state.in_flight and not self.is_out(unit):
            if state.copy is Copy.OLD:
                self._read_again(unit)
            state.in_flight = False

    def changed(self, unit: Unit, params: Iterable[torch.Tensor]) -> None:
        """An update of these parameters of ``unit`` was issued, or a checkpoint was loaded into its shard."""
        state = self.of[unit.index]
        # for autograd, this writes the weights, as any optimizer does
        torch.autograd.graph.increment_version([*params])
        state.written = unit.written()
        if state.copy is not Copy.NONE:
            state.copy = Copy.OLD if self._store.is_shared else Copy.CHANGED
        state.in_flight = True

    def await_masters(self, unit: Unit) -> None:
        """Block until the weights of ``unit`` may be written, on the host and where user code accesses them,
        and also the bits that make masters of them."""
        on_device = (ops.weight_slot(ROOT),) if unit is self._root else ()
        masters = ops.masters_of(unit.index, self._store.shards[unit.index])
        self._issuer.wait((*on_device, *masters), to_write=True)

    # writes of user code

    def take_over(self, unit: Unit) -> bool:
        """Take over what user code has written to a layer's parameters. Returns whether the copy in its slot
        may be stale."""
        if self.is_out(unit):
            return False
        state, is_stale = self.of[unit.index], False
        if state.aliased:
            # with several ranks, an alias of weights on disk is of a rank's own copy, which no layer uses
            is_stale = not self._disk.passes(unit.index)
            state.aliased = self._still(unit, state.aliased)
        if unit.written() != state.written:
            is_stale = True
            self.await_masters(unit)
            self._note_writes(unit)
        if state.copy is Copy.OLD or (state.copy in (Copy.SAME, Copy.CHANGED) and not state.in_flight):
            self._write_out(unit)
        return is_stale

    def take_over_root(self) -> None:
        """Take over what user code has written to the root's parameters, on the device."""
        root, state = self._root, self.of[ROOT]
        if root.written() != state.written:
            self.await_masters(root)
            self._store.shards[ROOT].weight.copy_(self._root_buffer)
            self._note_writes(root)
        elif state.aliased:
            self.await_masters(root)
            weight = self._store.shards[ROOT].weight
            for position in state.aliased:
                slice = root.layout.slices[position]
                place = range(slice.offset, slice.offset + slice.nbytes)
                now = self._root_buffer[place.start : place.stop].cpu()
                if not torch.equal(now, weight[place.start : place.stop]):
                    weight[place.start : place.stop].copy_(now)
            state.aliased = self._still(root, state.aliased)

    def _note_writes(self, unit: Unit) -> None:
        state = self.of[unit.index]
        state.written = unit.written()
        if state.copy in (Copy.SAME, Copy.KEPT):
            state.copy = Copy.CHANGED

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
        """Raise ValueError if the memory of a parameter of ``unit`` was replaced, unless the parameter is in
        ``moved``."""
        for slice, param in self.elsewhere(unit):
            if param in moved:
                continue
            if param.dtype != slice.dtype:
                raise ValueError(
                    f"'{slice.param.name}' was cast from {slice.dtype} to {param.dtype} after streamer.wrap "
                    "(param.data = param.data.to(...), as TRL does to adapters of a quantized base) and "
                    f"would not be used: cast it before, or wrap with dtype={param.dtype}, or call "
                    "streamer.unwrap(model) first"
                )
            if param.shape != slice.param.shape:
                raise ValueError(
                    f"'{slice.param.name}' has shape {tuple(param.shape)} and had {tuple(slice.param.shape)} "
                    "in streamer.wrap (resize_token_embeddings changes it): resize before streamer.wrap, or "
                    "call streamer.unwrap(model), resize, and wrap again"
                )
            raise ValueError(
                f"the memory of '{slice.param.name}' was replaced after streamer.wrap (param.data = ..., "
                "param.set_, vector_to_parameters), and would not be used: write into it (param.copy_ under "
                "torch.no_grad), or call streamer.unwrap(model) first"
            )

    def elsewhere(self, unit: Unit) -> list[tuple[Slice, nn.Parameter]]:
        """The parameters of ``unit`` whose memory was replaced."""
        if self.is_out(unit):
            return []
        is_root = unit.index == ROOT
        return unit.elsewhere(self._root_buffer if is_root else self._store.shards[unit.index].weight)

    # aliases

    def alias(self, unit: Unit, position: int, *, to_read: bool) -> None:
        """User code got a tensor that shares memory with a parameter of ``unit``. Unless ``to_read``, it may
        write the parameter without a trace. [Note: aliased parameters]"""
        state = self.of[unit.index]
        if to_read:
            state.read.add(position)
            return
        if state.copy in (Copy.SAME, Copy.KEPT):
            state.copy = Copy.CHANGED
        state.aliased.add(position)

    def aliased(self) -> list[Unit]:
        """The units that are aliased, even if only to be read. A unit that no longer is stays noted until its
        next forward or backward, which copies it again."""
        found = []
        for unit in (*self._units, self._root):
            state = self.of[unit.index]
            if state.aliased or state.read:
                state.read = self._still(unit, state.read)
                if state.read or self._still(unit, state.aliased):
                    found.append(unit)
        return found

    def _still(self, unit: Unit, positions: set[int]) -> set[int]:
        """Those of these parameters that are still aliased."""
        now, owners = self._owners(unit), self.of[unit.index].owners
        return {position for position in positions if now[position] != owners[position]}

    # weights on disk

    def is_out(self, unit: Unit) -> bool:
        """Whether the weights of ``unit`` are on disk and nowhere else."""
        return self._store.shards[unit.index].is_out

    @as_plain
    def copy_in(self, unit: Unit) -> None:
        """User code reads or writes the weights of ``unit``, which are on disk: read them into a buffer.
        Raises MemoryError if there is no room. [Note: copies of weights on disk]"""
        shard, state = self._store.shards[unit.index], self.of[unit.index]
        self.await_masters(unit)
        self._disk.forget(unit.index)
        remedy = "release other parameters' memory, or save a checkpoint by streamer.save"
        require(
            f"the weights of '{unit.name}', which are on disk",
            host(unit.layout.nbytes, self._issuer.backend.host_available(), remedy),
        )
        shard.fetch_copy(self._store.disks.buffer)
        for slice, param in unit.placed():
            param.data = slice.own(shard.weight)
        unit.refresh_parts()
        state.copy, state.owners, state.in_flight = Copy.SAME, self._owners(unit), False
        self._copied.append(unit.index)
        self._note_copies()

    def beyond(self, keep: int) -> list[Unit]:
        """The units that have copies, except the last ``keep``."""
        return [self._units[index] for index in self._copied[: max(0, len(self._copied) - keep)]]

    def _note_copies(self) -> None:
        nbytes = sum(self._units[index].layout.nbytes for index in self._copied)
        self._memory.taken[WEIGHT_COPIES] = nbytes

    @as_plain
    def _write_out(self, unit: Unit) -> None:
        """Release the copy if no other code holds it, and write it to disk if it has changed."""
        shard, state = self._store.shards[unit.index], self.of[unit.index]
        if self._owners(unit) != state.owners:
            return
        self.await_masters(unit)
        has_changed = state.copy is Copy.CHANGED and not self._store.is_shared
        if has_changed and shard.weights_on_disk.unwritable(shard.weight_copy):
            state.copy = Copy.KEPT
            return
        state.copy, state.aliased = Copy.NONE, set()
        self._copied.remove(unit.index)
        self._note_copies()
        self._hide(unit)
        shard.release_copy(write=has_changed)

    @as_plain
    def _hide(self, unit: Unit) -> None:
        """Let the parameters of ``unit``, whose weights are on disk, hold NaN until user code accesses
        them."""
        self.of[unit.index].in_flight = True
        for slice, param in unit.placed():
            # one number, expanded to the shape: it takes no memory
            param.data = not_a_number(slice.dtype, param.device).expand(slice.param.shape)
        unit.refresh_parts()

    def write_copies(self, units: Iterable[Unit]) -> None:
        """Ranks have written parameters of ``units``. This rank writes for its machine: write those
        parameters that are on disk there. Raises RuntimeError for parameters in files of the user."""
        for unit in units:
            if self.of[unit.index].copy is not Copy.NONE:
                self.await_masters(unit)
                shard = self._store.shards[unit.index]
                if names := shard.weights_on_disk.unwritable(shard.weight_copy):
                    raise RuntimeError(
                        f"'{names[0]}' is frozen and read from its file at every use, so ranks cannot write "
                        "it: make the model without disk=True, which takes it into memory"
                    )
                shard.weights_on_disk.store(shard.weight_copy)

    def read_copy(self, unit: Unit) -> None:
        """Ranks have written ``unit``: take over the weights on disk."""
        if self.of[unit.index].copy is not Copy.NONE:
            self.await_masters(unit)
            self._disk.forget(unit.index)
            self._read_again(unit)

    def _read_again(self, unit: Unit) -> None:
        shard = self._store.shards[unit.index]
        shard.weights_on_disk.fetch(shard.weight_copy)
        self.of[unit.index].copy = Copy.SAME
