"""Updates of units whose optimizer state is on disk: a chunk at a time, through a ring of host buffers.

Unit 3 has two chunks, 7 and 8, as its ops print (unit, kind, buffer of the ring):

    3READ_STATE@0 3STEP@0 3WRITE_STATE@0 3READ_STATE@1 3STEP@1 3WRITE_STATE@1

They are issued at once. What they wait for follows from what they read and write: a chunk is read while the
one before it is updated and the one before that is written, and no sooner than its own write of the last step
and the last use of its buffer are over. Of ranks, each has the ops of the chunks in its share.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from streamer.backends.base import Event
from streamer.engine.schedule import op as ops
from streamer.engine.schedule.hazards import Issuer
from streamer.engine.schedule.op import Place
from streamer.store.host import HostStore
from streamer.store.on_disk import Chunk, StateOnDisk
from streamer.store.purposes import WEIGHTS
from streamer.store.shard import HostShard, Window

#: The update of a unit, given its shard; of one on disk a `Window` for each chunk, one after the other.
ShardUpdate = Callable[[HostShard], None]


class StatePager:
    """Issues the updates of host shards, and what they need of the disk."""

    def __init__(self, issuer: Issuer, store: HostStore) -> None:
        self._issuer = issuer
        self._store = store
        self._next = 0

    def update(
        self,
        unit: int,
        work: ShardUpdate,
        nbytes: int,
        source: Place,
        *,
        weight: torch.Tensor | None = None,
        place: int | None = None,
        then: Callable[[], object] | None = None,
    ) -> None:
        """Queue ``work``, which moves ``nbytes`` of host memory, for the shard of ``unit``, from the gradient
        in ``source``. Its weights, if they are on disk, are ``weight``, in buffer ``place`` of their ring.
        ``then`` issues what is to follow the update at once, before the last of the state goes to disk."""
        shard = self._store.shards[unit]
        if not shard.disk.own:
            # with state on disk, a share without a chunk has no elements to update
            whole = shard if weight is None else Window(shard, {WEIGHTS.name: weight})
            self._issuer.issue(ops.step(unit, source, nbytes, None, place), partial(work, whole))
            if then is not None:
                then()
            return
        ring = self._store.ring()
        before: Event | None = None
        disk, issue, poison = shard.disk, self._issuer.issue, self._issuer.backend.poison
        for chunk in disk.own:
            mine, self._next = self._next, (self._next + 1) % len(ring)
            buffer = ring[mine]
            pieces = {**disk.pieces(chunk, buffer)}
            if weight is not None:
                pieces[WEIGHTS.name] = weight
            window = partial(Window, shard, pieces, chunk)
            part = nbytes * (chunk.stop - chunk.start) // len(shard.range)
            on_disk = unit, chunk.number, mine, disk.chunk_bytes(chunk)
            issue(ops.read_state(*on_disk), partial(disk.read_chunk, chunk, buffer))
            step = ops.step(unit, source, part, mine, place)
            before = issue(step, partial(_run, work, disk, chunk, window, before))
            if then is not None and chunk is disk.own[-1]:
                then()
            issue(ops.write_state(*on_disk), partial(_write, disk, chunk, buffer, poison=poison))


def _run(
    work: ShardUpdate,
    disk: StateOnDisk,
    chunk: Chunk,
    window: Callable[[], Window],
    before: Event | None,
) -> None:
    # who waits for the shard waits for the update of the last chunk, which is to fail with those before it
    if before is not None and before.failed():
        before.wait()
    # made when it runs: a shard may get sums of gradients meanwhile
    shard = window()
    shard.about_to_change()
    disk.begin_update(chunk)
    work(shard)


def _write(disk: StateOnDisk, chunk: Chunk, buffer: torch.Tensor, *, poison: bool) -> None:
    disk.write_chunk(chunk, buffer)
    if poison:
        # bytes of ones are NaN in every floating-point format
        buffer.fill_(255)


def masters_of(unit: int, shard: HostShard) -> tuple[Place, ...]:
    """What to wait for before the weights and the state of ``unit`` are read or written elsewhere."""
    on_disk = () if shard.weights_on_disk.is_empty else (ops.weights_on_disk(unit),)
    return (ops.shard(unit), *on_disk, *(ops.state(chunk.number) for chunk in shard.disk.chunks))
