"""State and weights on disk pass through host memory: state one chunk at a time, weights one unit at a time.

Unit 3 has two chunks of optimizer state on disk, 7 and 8. Its update, as its ops print (unit, kind, buffer of
the ring):

    3READ_STATE@0 3STEP@0 3WRITE_STATE@0 3READ_STATE@1 3STEP@1 3WRITE_STATE@1

All ops are issued at once. Their reads and writes determine their order: a chunk is read while the previous
chunk is updated and the one before that is written. The read also waits for the chunk's own write in the last
step and for the last use of its buffer. With several ranks, each has the ops of the chunks in its share.

If unit 3 has its weights on disk, its update and its next forward are (buffer of the ring, or slot):

    3READ_WEIGHTS@1 3STEP@0 3WRITE_WEIGHTS@1 3UNSHARD@0

The update waits for the forward that needs it, so that the weights are read once for both. A step moves two
bytes for each bf16 weight to forward, two to backward, and two back to disk.

Several ranks do not wait for the forward: each updates its share as soon as it can, and reads the whole unit
when all have written their shares. This rank updates its share in buffer 1 and then reads the whole unit into
buffer 2:

    3READ_WEIGHTS@1 3STEP@0 3WRITE_WEIGHTS@1 3AGREE 3READ_WEIGHTS@2 3UNSHARD@0

If machines divide the state, this rank also writes the other owners' parts of its share:

    3READ_WEIGHTS@1 3STEP@0 3GATHER@1 3WRITE_WEIGHTS@1 3AGREE 3READ_WEIGHTS@2 3UNSHARD@0

A buffer of the ring of weights is free when the forward or backward that needed its weights is over: with
``update="backward"`` they are updated by then. As long as a buffer is free, weights are read in the order in
which the units are expected.

The update of a unit in host memory is one STEP, and its weights pass through no ring.
"""

from __future__ import annotations

import abc
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch import nn

from streamer.backends.base import Event
from streamer.engine.paging.across_ranks import AcrossRanks
from streamer.engine.schedule import op as ops
from streamer.engine.schedule.hazards import Issuer
from streamer.engine.schedule.op import Place
from streamer.engine.schedule.order import Phase
from streamer.store.host import HostStore
from streamer.store.on_disk import Chunk, StateOnDisk
from streamer.store.purposes import WEIGHTS
from streamer.store.shard import HostShard, Window
from streamer.store.weights_on_disk import WeightsOnDisk

#: The update of a unit. It takes the unit's shard, or, for state on disk, a `Window` for each chunk in turn.
ShardUpdate = Callable[[HostShard], None]


class WholeUpdate(abc.ABC):
    """An update that processes its shard itself, one parameter at a time, even if state is on disk. With
    several ranks, each updates some parameters, from their whole gradients."""

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        #: the parameters of the shard to update, on one rank or another
        self.params = params

    @abc.abstractmethod
    def __call__(self, shard: HostShard) -> None:
        """Update ``shard``."""


class DiskPager:
    """Two rings of host buffers, for state and for weights. Both are empty if nothing is on disk."""

    def __init__(self, issuer: Issuer, store: HostStore, across: AcrossRanks) -> None:
        self._issuer = issuer
        self._store = store
        self._across = across
        #: the next buffer of the ring of state
        self._next = 0
        self._buffers = store.weight_ring
        #: the buffer of each unit whose weights are in the ring
        self._held: dict[int, int] = {}
        #: free buffers, the one that has been free the longest first
        self._free = OrderedDict.fromkeys(range(len(self._buffers)))
        #: the phase in which a unit's weights on disk were last updated
        self._updated_in: dict[int, Phase] = {}

    # weights

    def passes(self, unit: int) -> bool:
        """Whether the unit's weights come from disk. With several ranks, weights on disk do so even if a rank
        has a copy for user code, since that copy is the rank's own."""
        shard = self._store.shards[unit]
        return shard.is_out or (self._store.is_shared and not shard.weights_on_disk.is_empty)

    def updated_in(self, unit: int) -> Phase | None:
        """The phase in which the unit's weights on disk are updated, None if never yet."""
        return self._updated_in.get(unit)

    def source(self, unit: int) -> tuple[torch.Tensor, int | None]:
        """The unit's up-to-date weights, in the shard or, until `release`, in the ring; and the number of the
        ring's buffer, or None."""
        if not self.passes(unit):
            return self._store.shards[unit].weight, None
        place = self._read(unit)
        return self._buffers[place][: self._store.shards[unit].layout.nbytes], place

    def release(self, unit: int) -> None:
        """A run of the unit is over."""
        if (place := self._held.get(unit)) is not None:
            self._free[place] = None

    def fill(self, upcoming: Iterable[int]) -> None:
        """Read the weights of the units that are expected next, as long as there are free buffers."""
        for unit in upcoming if self._buffers else ():
            if self.passes(unit):
                if unit not in self._held and not self._free:
                    return
                self._read(unit)

    def forget(self, unit: int) -> None:
        """Other ranks are about to write the unit's weights on disk."""
        if (place := self._held.pop(unit, None)) is not None:
            self._let_go(place)

    def begin_anew(self) -> None:
        """Forget the contents of the ring and the updates that wait: all weights are about to be replaced."""
        self._issuer.deferred.clear()
        for unit in [*self._held]:
            self.forget(unit)

    def _read(self, unit: int) -> int:
        """The buffer with the weights of ``unit``, or about to get them. An update that was put off is issued
        now."""
        if (update := self._issuer.deferred.pop(unit, None)) is not None:
            update()
        return self._hold(unit)

    def _hold(self, unit: int) -> int:
        place = self._held.get(unit)
        if place is not None:
            self._free.pop(place, None)
            return place
        place = self._held[unit] = self._empty()
        disk, buffer = self._on_disk(unit), self._buffers[place]
        op = ops.read_weights(unit, place, disk.read_bytes)
        self._issuer.issue(op, partial(disk.fetch, buffer))
        return place

    def _empty(self) -> int:
        if not self._free:
            # evict the last of the weights that were prefetched and not used yet
            self.forget(next(reversed(self._held)))
        place, _ = self._free.popitem(last=False)
        self._held = {unit: held for unit, held in self._held.items() if held != place}
        return place

    def _let_go(self, place: int) -> None:
        self._free[place] = None
        self._free.move_to_end(place, last=False)

    def _on_disk(self, unit: int) -> WeightsOnDisk:
        return self._store.shards[unit].weights_on_disk

    # updates

    def update(self, unit: int, work: ShardUpdate, nbytes: int, source: Place) -> None:
        """Queue ``work``, which moves ``nbytes`` of host memory, for the shard of ``unit``, from the gradient
        in ``source``.

        If the weights are on disk and the gradient may stay in place, the update is issued when the weights
        are next needed, else now. With several ranks, each updates its share now: the other ranks would wait
        for an update that one of them puts off.
        """
        if not self.passes(unit):
            self._update(unit, work, nbytes, source)
        elif self._store.is_shared:
            self._update_share(unit, work, nbytes, source)
        elif source == ops.gradient(unit):
            assert unit not in self._issuer.deferred, "an update waits for the previous one"
            self._updated_in[unit] = Phase.FORWARD
            self._issuer.deferred[unit] = partial(self._update_in_ring, unit, work, nbytes, source)
        else:
            self._updated_in[unit] = Phase.BACKWARD
            self._update(unit, work, nbytes, source, self._hold(unit))

    def _update_in_ring(self, unit: int, work: ShardUpdate, nbytes: int, source: Place) -> None:
        self._update(unit, work, nbytes, source, self._hold(unit))
        self.release(unit)

    def _update_share(self, unit: int, work: ShardUpdate, nbytes: int, source: Place) -> None:
        # the weights in the ring have the other ranks' shares from before the update
        self.forget(unit)
        place = self._empty()
        disk, buffer = self._on_disk(unit), self._buffers[place]
        op = ops.read_weights(unit, place, disk.own_read_bytes)
        self._issuer.issue(op, partial(disk.fetch, buffer, own=True))
        self._update(unit, work, nbytes, source, place)
        self._let_go(place)

    def _update(
        self, unit: int, work: ShardUpdate, nbytes: int, source: Place, place: int | None = None
    ) -> None:
        """Update the shard of ``unit``, whose weights are in buffer ``place`` of the ring or in memory, one
        chunk of its state on disk at a time."""
        shard, issue = self._store.shards[unit], self._issuer.issue
        weights = {}
        if place is not None:
            weights = {WEIGHTS.name: self._buffers[place][: shard.layout.nbytes]}
        disk = shard.disk
        if isinstance(work, WholeUpdate):
            here = Window(shard, weights) if weights else shard
            chunks = tuple(chunk.number for chunk in disk.chunks)
            issue(ops.step(unit, source, nbytes, None, place, chunks), partial(work, here))
            self._write_weights(unit, place)
            return
        if not disk.own:
            # with state on disk, a share without a chunk has no elements to update
            whole = Window(shard, weights) if weights else shard
            issue(ops.step(unit, source, nbytes, None, place), partial(work, whole))
            self._write_weights(unit, place)
            return
        ring, before, poison = self._store.ring(), None, self._issuer.backend.poison
        for chunk in disk.own:
            mine, self._next = self._next, (self._next + 1) % len(ring)
            buffer = ring[mine]
            window = partial(Window, shard, {**disk.pieces(chunk, buffer), **weights}, chunk)
            part = nbytes * (chunk.stop - chunk.start) // len(shard.range)
            on_disk = unit, chunk.number, mine, disk.chunk_bytes(chunk)
            issue(ops.read_state(*on_disk), partial(disk.read_chunk, chunk, buffer))
            step = ops.step(unit, source, part, mine, place)
            before = issue(step, partial(_run, work, disk, chunk, window, before))
            if chunk is disk.own[-1]:
                # write the weights before the state, which is several times as large: other weights need the
                # buffer, and their read delays those behind it in its lane
                self._write_weights(unit, place)
            issue(ops.write_state(*on_disk), partial(_write, disk, chunk, buffer, poison=poison))

    def _write_weights(self, unit: int, place: int | None) -> None:
        """The weights of ``unit`` in buffer ``place`` were updated: write this rank's share to disk."""
        if place is None:
            return
        disk, buffer = self._on_disk(unit), self._buffers[place]
        if self._store.is_divided:
            self._across.gather(unit, buffer[: self._store.shards[unit].layout.nbytes], place)
        op = ops.write_weights(unit, place, disk.own_written_bytes)
        self._issuer.issue(op, partial(disk.store, buffer, own=True))


def _run(
    work: ShardUpdate,
    disk: StateOnDisk,
    chunk: Chunk,
    window: Callable[[], Window],
    before: Event | None,
) -> None:
    # waiting for the shard is waiting for the update of the last chunk, which must fail if an earlier chunk
    # failed
    if before is not None and before.failed():
        before.wait()
    # created only now: until it runs, the shard may get sums of gradients
    shard = window()
    shard.about_to_change()
    disk.begin_update(chunk)
    work(shard)


def _write(disk: StateOnDisk, chunk: Chunk, buffer: torch.Tensor, *, poison: bool) -> None:
    disk.write_chunk(chunk, buffer)
    if poison:
        # bytes of ones are NaN in every floating-point format
        buffer.fill_(255)
