"""Host memory and disk of a wrapped model: bytes by purpose, room for more, places of optimizer state."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import wait
from contextlib import contextmanager
from functools import partial

import torch

from streamer.backends.base import Background, Lock
from streamer.backends.ranks import Ranks
from streamer.engine.schedule import op as ops
from streamer.engine.schedule.hazards import Issuer
from streamer.engine.unit import Unit
from streamer.store.host import HostStore
from streamer.store.ledger import Tier, host
from streamer.store.placement import make_room, place_moments, ring_bytes
from streamer.store.purposes import (
    FP32,
    OPTIMIZER_STATE,
    SAVED_INPUTS,
    STATE_RING,
    UPDATE_SCRATCH,
    Purpose,
    of_all_ranks,
)


class HostMemory:
    """The host memory that a wrapped model takes, at most ``limit`` bytes. State that may be on disk leaves
    ``for_inputs`` of these bytes to saved layer inputs. ``lock`` is the executor's."""

    def __init__(
        self,
        issuer: Issuer,
        units: Sequence[Unit],
        root: Unit,
        store: HostStore,
        ranks: Ranks,
        lock: Lock,
        *,
        limit: int,
        for_inputs: int,
    ) -> None:
        self.limit = limit
        #: by purpose, the bytes outside of the store that their holders have noted
        self.taken: Counter[str] = Counter()
        #: bytes of the state of PyTorch optimizers, which hold it themselves
        self.optimizer_state: weakref.WeakKeyDictionary[object, int] = weakref.WeakKeyDictionary()
        #: the part of these bytes that is on disk
        self.optimizer_state_on_disk: weakref.WeakKeyDictionary[object, int] = weakref.WeakKeyDictionary()
        #: the checkpoint that is, or was last, written in the background
        self.saving: Background | None = None
        self._issuer = issuer
        self._backend = issuer.backend
        self._units = units
        self._root = root
        self._store = store
        self._ranks = ranks
        self._lock = lock
        self._for_inputs = for_inputs
        self._scratch = torch.empty(2, 0)

    def bytes(self) -> dict[str, int]:
        """Bytes that the wrapped model holds in host memory, by purpose."""
        others = {
            **self.taken,
            OPTIMIZER_STATE: sum(self.optimizer_state.values()),
            UPDATE_SCRATCH: self.scratch_bytes(),
        }
        return self._store.bytes_by_purpose() | {name: nbytes for name, nbytes in others.items() if nbytes}

    def disk_bytes(self) -> dict[str, int]:
        """Bytes that the wrapped model holds on disk, by purpose."""
        of_optimizers = sum(self.optimizer_state_on_disk.values())
        return self._store.disk_bytes_by_purpose() | (
            {OPTIMIZER_STATE: of_optimizers} if of_optimizers else {}
        )

    # room for more

    def available(self) -> int:
        """Bytes of host memory that are still available."""
        return min(self._backend.host_available(), self._left_of_limit())

    def _left_of_limit(self) -> int:
        held = of_all_ranks(self.bytes(), self._store.division.ranks)
        return max(0, self.limit - sum(held.values()))

    def room(self, needed: int, remedy: str, *, by_all: bool = False) -> Tier:
        """The host memory, or its part that `wrap` may take, for ``needed`` more bytes. If there are too few,
        moments are moved to disk if that is allowed. Several ranks move them only if this is called
        ``by_all`` of them, since all ranks write them."""
        if self._store.can_move and (by_all or self._ranks.is_alone):
            lacking = self._ranks.on_first("room in host memory", lambda: needed - self.available())
            if lacking > 0:
                with self._ranks.together("moving optimizer state to disk"):
                    self._move_to_disk(lacking)
        free, left = self._backend.host_available(), self._left_of_limit()
        if left >= free:
            return host(needed, free, remedy)
        return Tier("host_memory", needed, left, f"{remedy}, or wrap with a larger host_memory")

    def room_of_all(self, wanted: Mapping[str, int], remedy: str) -> Tier:
        """`room` for the bytes, by purpose, that all ranks are about to take."""
        needed = sum(of_all_ranks(wanted, self._store.division.ranks).values())
        return self.room(needed, remedy, by_all=True)

    def scratch(self, numel: int) -> torch.Tensor:
        """Memory shared by the updates in the HOST lane, one at a time: [2, ``numel`` or more] in fp32."""
        if self._scratch.shape[1] < numel:
            # a block of the backend has huge pages: kernels and the optimizer pass over it several times
            block = self._backend.host_buffer(2 * numel * FP32.itemsize, pinned=False)
            self._scratch = block.view(FP32).view(2, numel)
        return self._scratch

    def scratch_bytes(self) -> int:
        """Bytes of `scratch`."""
        return self._scratch.nbytes

    def release(self) -> None:
        """Release all memory outside of the store."""
        self._scratch = torch.empty(2, 0)

    # optimizer state

    def place_moments(self, purposes: Sequence[Purpose], dropped: Sequence[Purpose]) -> frozenset[int]:
        """The positions of the units whose optimizer state for ``purposes`` goes to disk and replaces that
        for ``dropped``. The first rank decides for all.

        Raises MemoryError if there is too little memory for the rings that state on disk passes through.
        """
        decide = partial(self._place_moments, purposes, dropped)
        return self._ranks.on_first("a place for the moments", decide)

    def _place_moments(self, purposes: Sequence[Purpose], dropped: Sequence[Purpose]) -> frozenset[int]:
        store, ranks = self._store, self._store.division.ranks
        goes = {purpose.name for purpose in dropped} | {STATE_RING}
        held = of_all_ranks(store.bytes_by_purpose(), ranks)
        room = self.available() + sum(held[name] for name in goes & held.keys())
        room -= max(0, self._for_inputs - self.taken[SAVED_INPUTS] * ranks)
        return place_moments(
            [shard.layout for shard in store.shards],
            purposes,
            room,
            on_disk=[purpose for purpose in store.on_disk() if purpose.name not in goes],
            may_write=store.can_move,
            division=store.division,
        )

    def add_moments(
        self, purposes: Sequence[Purpose], on_disk: Collection[int], in_place_of: Sequence[Purpose]
    ) -> None:
        """Allocate zeroed optimizer state, on disk for the units at the positions ``on_disk``, and drop the
        state for ``in_place_of``. Raises DiskError, before anything is changed, if the disk has no room."""
        self._store.add(purposes, on_disk=on_disk, in_place_of=in_place_of)
        if self._store.on_disk():
            self._store.ring()

    def _move_to_disk(self, lacking: int) -> None:
        """Move moments of the units that are needed last to disk, until ``lacking`` more bytes are free or no
        moments are left. [Note: placement]"""
        store, ranks, every = self._store, self._store.division.ranks, (*self._units, self._root)
        movable = {at: store.movable(store.shards[at]) for at in (len(every) - 1, *range(len(every) - 1))}
        purposes = {purpose for found in movable.values() for purpose in found} | {*store.on_disk()}
        layouts = [shard.layout for shard in store.shards]
        positions = make_room(
            {at: sum(found.values()) for at, found in movable.items()},
            lacking,
            ring=ring_bytes(layouts, [*purposes], store.division) * ranks,
            ring_now=store.bytes_by_purpose().get(STATE_RING, 0) * ranks,
        )
        if not positions:
            return
        self.wait_for_saving()
        for position in positions:
            self.await_state(every[position])
        store.move(positions)
        store.ring()

    def await_state(self, unit: Unit) -> None:
        """Block until user code may read and write the optimizer state of ``unit`` on disk."""
        with self._lock:
            self._issuer.wait(ops.masters_of(unit.index, self._store.shards[unit.index]), to_write=True)

    @contextmanager
    def writing_state(self, words: str) -> Iterator[None]:
        """All ranks write optimizer state in the block: each its share if the state is on disk, or the part
        of its machine if machines divide the state. Before the block no rank reads the old state; after it
        each rank reads the new state of all."""
        if not (self._store.can_move or self._store.is_divided):
            yield
            return
        self._ranks.exchange(f"before {words}")
        with self._ranks.together(words):
            yield

    def wait_for_saving(self) -> None:
        """Block until no checkpoint is being written. Raises nothing: an error stays in `saving`."""
        if self.saving is not None:
            wait([self.saving])
