"""Weights on disk: on their way to the slots through a ring of host buffers, updated on the way.

Unit 3 goes forward in the step after its update, as its ops print (unit, kind, buffer of the ring or slot):

    3READ_WEIGHTS@1 3STEP@0 3WRITE_WEIGHTS@1 3UNSHARD@0

The update waits for the forward that needs it, so that the weights are read once for both: the bytes of a
step are two for each bf16 weight on its way to forward, two to backward, and two back to disk.

Ranks do not wait: each updates its share as soon as it can, and reads the whole when all have written theirs.
Of a unit that this rank updates a part of, in buffer 1, and then goes through as a whole, in buffer 2:

    3READ_WEIGHTS@1 3STEP@0 3WRITE_WEIGHTS@1 3AGREE 3READ_WEIGHTS@2 3UNSHARD@0

Where machines divide the state, what this rank writes has the other owners' parts of its share in it:

    3READ_WEIGHTS@1 3STEP@0 3GATHER@1 3WRITE_WEIGHTS@1 3AGREE 3READ_WEIGHTS@2 3UNSHARD@0

A buffer of the ring is free for other weights when the visit is over for which those in it were read: with
``update="backward"`` they are updated by then. The ring is filled as long as a buffer is free, in the order
in which the units are expected. As everywhere, what an op waits for follows from what it reads and writes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

import torch

from streamer.engine.disk.state import ShardUpdate, StatePager
from streamer.engine.schedule import op as ops
from streamer.engine.schedule.hazards import Issuer
from streamer.engine.schedule.op import Place
from streamer.engine.schedule.order import Phase
from streamer.store.host import HostStore
from streamer.store.weights_on_disk import WeightsOnDisk

#: Issues what brings the other owners' parts of this rank's share of a unit's weights into the tensor that is
#: given, which is in the buffer of that number.
Gather = Callable[[int, torch.Tensor, int], object]


class _Update(NamedTuple):
    """An update of a unit: what does it, the bytes of host memory that this moves, where the gradient is."""

    work: ShardUpdate
    nbytes: int
    source: Place


class WeightRing:
    """The ring of host buffers; it is empty where all weights are in memory."""

    def __init__(
        self, issuer: Issuer, store: HostStore, state: StatePager, gather: Gather | None = None
    ) -> None:
        """Machines that divide the state need ``gather``."""
        self._issuer = issuer
        self._store = store
        self._state = state
        self._buffers = store.weight_ring
        self._gather = gather
        #: the units whose weights are in the ring, each with its buffer
        self._held: dict[int, int] = {}
        #: buffers that may be used for others, the one that is free for longest first
        self._free = OrderedDict.fromkeys(range(len(self._buffers)))
        self._pending: dict[int, _Update] = {}
        #: the phase of the visits in which a unit's weights were last updated
        self._updated_in: dict[int, Phase] = {}

    def updated_in(self, unit: int) -> Phase | None:
        """The phase of the visits in which the unit's weights are updated, None if they never were."""
        return self._updated_in.get(unit)

    def passes(self, unit: int) -> bool:
        """Whether the unit's weights come from disk: those that are there and nowhere else. Of ranks also
        those of which one of them shows a copy to the user's code, which is that rank's own."""
        shard = self._store.shards[unit]
        return shard.is_out or (self._store.is_shared and not shard.weights_on_disk.is_empty)

    def source(self, unit: int) -> tuple[torch.Tensor, int]:
        """The unit's weights in the ring, up to date, and which buffer has them: until `release`."""
        place = self._hold(unit)
        return self._buffers[place][: self._store.shards[unit].layout.nbytes], place

    def release(self, unit: int) -> None:
        """A visit of the unit is over."""
        if (place := self._held.get(unit)) is not None:
            self._free[place] = None

    def fill(self, upcoming: Iterable[int]) -> None:
        """Read the weights of the units that are expected next, as long as there are free buffers."""
        for unit in upcoming if self._buffers else ():
            if self.passes(unit):
                if unit not in self._held and not self._free:
                    return
                self._hold(unit)

    def update(self, unit: int, work: ShardUpdate, nbytes: int, source: Place) -> None:
        """Update a unit by ``work``, which moves ``nbytes`` of host memory, from the gradient in ``source``.

        Where the gradient may stay there, that is when the unit's weights are next asked for, else now. Of
        ranks each updates its share now: what one of them puts off, the others would wait for.
        """
        assert unit not in self._pending, "what asks for an update has waited for the one before"
        update = _Update(work, nbytes, source)
        if self._store.is_shared:
            self._update_share(unit, update)
        elif source == ops.gradient(unit):
            self._updated_in[unit] = Phase.FORWARD
            self._pending[unit] = update
        else:
            self._updated_in[unit] = Phase.BACKWARD
            self._update(unit, self._hold(unit), update)

    def finish(self) -> None:
        """Issue the updates that wait."""
        for unit in [*self._pending]:
            self._hold(unit)
            self.release(unit)

    def begin_anew(self) -> None:
        """Forget what the ring holds, and the updates that wait: all weights are to be replaced."""
        self._pending.clear()
        for unit in [*self._held]:
            self.forget(unit)

    def forget(self, unit: int) -> None:
        """Others are to write the unit's weights on disk."""
        if (place := self._held.pop(unit, None)) is not None:
            self._let_go(place)

    def _update_share(self, unit: int, update: _Update) -> None:
        # what is in the ring has the others' shares as they were
        self.forget(unit)
        place = self._empty()
        disk, buffer = self._disk(unit), self._buffers[place]
        op = ops.read_weights(unit, place, disk.own_read_bytes)
        self._issuer.issue(op, partial(disk.fetch, buffer, own=True))
        self._update(unit, place, update)
        self._let_go(place)

    def _let_go(self, place: int) -> None:
        self._free[place] = None
        self._free.move_to_end(place, last=False)

    def _hold(self, unit: int) -> int:
        """Which buffer has, or is about to get, the weights of ``unit``."""
        place = self._held.get(unit)
        if place is not None:
            self._free.pop(place, None)
        else:
            place = self._empty()
            self._held[unit] = place
            disk, buffer = self._disk(unit), self._buffers[place]
            op = ops.read_weights(unit, place, disk.read_bytes)
            self._issuer.issue(op, partial(disk.fetch, buffer))
        if (pending := self._pending.pop(unit, None)) is not None:
            self._update(unit, place, pending)
        return place

    def _empty(self) -> int:
        if not self._free:
            # nobody has asked yet for what was read early: the last of it goes
            self.forget(next(reversed(self._held)))
        place, _ = self._free.popitem(last=False)
        for unit, held in self._held.items():
            if held == place:
                del self._held[unit]
                break
        return place

    def _update(self, unit: int, place: int, update: _Update) -> None:
        disk, buffer = self._disk(unit), self._buffers[place]
        weight = buffer[: self._store.shards[unit].layout.nbytes]
        op = ops.write_weights(unit, place, disk.own_written_bytes)

        # before the state, which is several times as long: the buffer is wanted for other weights, whose read
        # keeps those behind it in its lane
        def then() -> None:
            if self._gather is not None:
                self._gather(unit, weight, place)
            self._issuer.issue(op, partial(disk.store, buffer, own=True))

        self._state.update(unit, *update, weight=weight, place=place, then=then)

    def _disk(self, unit: int) -> WeightsOnDisk:
        return self._store.shards[unit].weights_on_disk
