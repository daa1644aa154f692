"""A piece of work: its lane, the places that it reads, and those that it writes. `hazards` derives from these
when it may run. All steps have the same ops, so each op is created once.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, lru_cache, partial
from typing import NamedTuple

from streamer.backends.base import Lane
from streamer.store.shard import HostShard

#: The unit of all parameters outside of layers: embeddings, final norm, head. It stays on the device.
ROOT = -1


class Place(NamedTuple):
    """Memory that ops read and write: its kind, and the number of a slot, a buffer, a unit or a chunk."""

    kind: str
    number: int


def _kind(name: str) -> Callable[[int], Place]:
    """A function from a number to the place of this kind, which is created once."""
    return cache(partial(Place, name))


weight_slot = _kind("weight slot")  # a unit's weights on the device
grad_slot = _kind("gradient slot")  # a unit's gradient on the device
shard = _kind("shard")  # a unit's weights and optimizer state on the host
gradient = _kind("gradient")  # a unit's gradient on the host
weights_on_disk = _kind("weights on disk")  # a unit's
weight_ring = _kind(
    "weight ring"
)  # the same in host memory on their way to a slot, or while they are updated
state = _kind("state")  # a chunk of a unit's optimizer state on disk
state_ring = _kind("state ring")  # the same in host memory while it is updated
staging = _kind("staging")  # a gradient on the host that an update consumes at once
squares = _kind("squares")  # the sum of squares of a unit's gradient
saved_input = _kind("saved input")  # an input of a layer that waits for backward, on the device
host_input = _kind("host input")  # the same in host memory
fetched = _kind("fetched input")  # the same on the device again


class OpKind(enum.StrEnum):
    """The kinds of ops: the printed name, and the lane."""

    UNSHARD = "UNSHARD", Lane.H2D  # host shard -> slot
    RESHARD = "RESHARD", Lane.H2D  # fill a released slot with NaN (if the backend poisons slots)
    FORWARD = "F", Lane.COMPUTE
    BACKWARD = "B", Lane.COMPUTE
    COLLECT = "COLLECT", Lane.COMPUTE  # copy the root unit's gradients into their buffer
    SYNC = "SYNC", Lane.COMPUTE  # let the caller's thread wait for places
    OFFLOAD_GRAD = "OFFLOAD_GRAD", Lane.D2H  # gradient slot -> host gradient, or -> staging
    ACCUMULATE = "ACCUMULATE", Lane.HOST  # host gradient += staging
    NORM = "NORM", Lane.HOST  # sum of squares of a host gradient
    STEP = "STEP", Lane.HOST  # update a host shard from its gradient
    REDUCE = "REDUCE", Lane.COLLECTIVE  # average a gradient slot over the ranks
    ALL_GATHER = "ALL_GATHER", Lane.COLLECTIVE  # each rank's part -> the slots of all ranks
    GATHER = "GATHER", Lane.COLLECTIVE  # copy weights that other machines have updated into the shard
    AGREE = "AGREE", Lane.BARRIER  # wait until all ranks have read, or updated, their shares of shards
    READ_WEIGHTS = "READ_WEIGHTS", Lane.DISK_READ  # a unit's weights -> ring
    WRITE_WEIGHTS = "WRITE_WEIGHTS", Lane.DISK_WRITE  # ring -> disk
    READ_STATE = "READ_STATE", Lane.DISK_READ  # a chunk of a unit's state -> ring
    WRITE_STATE = "WRITE_STATE", Lane.DISK_WRITE  # ring -> disk
    OFFLOAD_INPUT = "OFFLOAD_INPUT", Lane.D2H  # saved input -> host
    FETCH_INPUT = "FETCH_INPUT", Lane.H2D  # host -> fetched input

    lane: Lane

    def __new__(cls, name: str, lane: Lane) -> OpKind:
        kind = str.__new__(cls, name)
        kind._value_ = name
        kind.lane = lane
        return kind


@dataclass(frozen=True)
class Op:
    """Work for one unit. ``slot`` is the weight slot; for copies of gradients it is the gradient slot, for
    state or weights on disk their buffer of the ring, for saved inputs their place in host memory."""

    kind: OpKind
    unit: int
    slot: int | None = None
    reads: tuple[Place, ...] = ()
    writes: tuple[Place, ...] = ()
    nbytes: int = field(default=0, compare=False)
    #: the lane that runs it
    lane: Lane = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "lane", self.kind.lane)

    def __str__(self) -> str:
        if self.kind is OpKind.SYNC:
            return "SYNC"
        unit = "root" if self.unit == ROOT else str(self.unit)
        slot = "" if self.slot in (None, ROOT) else f"@{self.slot}"
        return f"{unit}{self.kind.value}{slot}"


#: A bounded cache: sizes of saved inputs may differ from step to step.
_cached = lru_cache(maxsize=1 << 14)


@_cached
def unshard(unit: int, slot: int, nbytes: int, place: int | None = None) -> Op:
    """Copy a unit's weights into a slot; weights on disk from buffer ``place`` of their ring."""
    source = shard(unit) if place is None else weight_ring(place)
    return Op(OpKind.UNSHARD, unit, slot, (source,), (weight_slot(slot),), nbytes)


@_cached
def read_weights(unit: int, place: int, nbytes: int) -> Op:
    """Read a unit's weights from disk."""
    return Op(OpKind.READ_WEIGHTS, unit, place, (weights_on_disk(unit),), (weight_ring(place),), nbytes)


@_cached
def write_weights(unit: int, place: int, nbytes: int) -> Op:
    """Write a unit's weights to disk."""
    return Op(OpKind.WRITE_WEIGHTS, unit, place, (weight_ring(place),), (weights_on_disk(unit),), nbytes)


@_cached
def reshard(unit: int, slot: int) -> Op:
    """Overwrite a released slot."""
    return Op(OpKind.RESHARD, unit, slot, (), (weight_slot(slot),))


@_cached
def forward(unit: int, slot: int) -> Op:
    """Run a unit's forward from a slot."""
    return Op(OpKind.FORWARD, unit, slot, (weight_slot(slot),))


@_cached
def root_forward() -> Op:
    """The start of a forward: from here on, forward and backward read the root unit's weights and write its
    gradients."""
    return Op(OpKind.FORWARD, ROOT, None, (weight_slot(ROOT),), (grad_slot(ROOT),))


@_cached
def backward(unit: int, slot: int, into: int | None, inputs: tuple[Place, ...] = ()) -> Op:
    """Run a unit's backward from a slot and ``inputs``, its gradient going into gradient slot ``into``."""
    writes = () if into is None else (grad_slot(into),)
    return Op(OpKind.BACKWARD, unit, slot, (weight_slot(slot), *inputs), writes)


@_cached
def collect() -> Op:
    """Copy the root unit's gradients into their buffer. No earlier work reads its weights after this."""
    return Op(OpKind.COLLECT, ROOT, None, (weight_slot(ROOT),), (grad_slot(ROOT),))


@_cached
def offload_grad(unit: int, slot: int, into: Place, nbytes: int) -> Op:
    """Copy a gradient slot to host memory: the unit's gradient, or a staging buffer."""
    return Op(OpKind.OFFLOAD_GRAD, unit, slot, (grad_slot(slot),), (into,), nbytes)


@_cached
def accumulate(unit: int, slot: int, nbytes: int) -> Op:
    """Add a staged gradient to the unit's host gradient."""
    reads = (staging(slot), gradient(unit))
    return Op(OpKind.ACCUMULATE, unit, slot, reads, (gradient(unit),), nbytes)


@_cached
def offload_input(place: int, nbytes: int) -> Op:
    """Copy a saved input to its place on the host."""
    return Op(OpKind.OFFLOAD_INPUT, ROOT, place, (saved_input(place),), (host_input(place),), nbytes)


@_cached
def fetch_input(place: int, nbytes: int) -> Op:
    """Copy a saved input from its place on the host to device memory that COMPUTE has freed."""
    reads = (host_input(place), saved_input(place))
    return Op(OpKind.FETCH_INPUT, ROOT, place, reads, (fetched(place),), nbytes)


@_cached
def norm(unit: int, nbytes: int) -> Op:
    """Compute the sum of squares of a unit's host gradient."""
    return Op(OpKind.NORM, unit, None, (gradient(unit),), (squares(unit),), nbytes)


@_cached
def step(
    unit: int,
    source: Place,
    nbytes: int,
    ring: int | None = None,
    weights: int | None = None,
    chunks: tuple[int, ...] = (),
) -> Op:
    """Update a unit's host shard from its gradient in ``source``. State on disk is in buffer ``ring`` of its
    ring, or read and written by the op itself (``chunks``); weights on disk are in buffer ``weights`` of
    theirs."""
    here = (*map(state, chunks), *(() if ring is None else (state_ring(ring),)))
    here = here if weights is None else (*here, weight_ring(weights))
    return Op(OpKind.STEP, unit, ring, (source, *here), (shard(unit), *here), nbytes)


@_cached
def reduce(unit: int, slot: int, nbytes: int) -> Op:
    """Average gradient slot ``slot`` over the ranks, and compute its sum of squares."""
    return Op(OpKind.REDUCE, unit, slot, (grad_slot(slot),), (grad_slot(slot),), nbytes)


@_cached
def all_gather(unit: int, slot: int, nbytes: int) -> Op:
    """Gather the parts of a unit's weights that other ranks have copied into their slots."""
    return Op(OpKind.ALL_GATHER, unit, slot, (weight_slot(slot),), (weight_slot(slot),), nbytes)


@_cached
def gather(unit: int, nbytes: int, weights: int | None = None) -> Op:
    """Gather a unit's weights that ranks of other machines have updated into its host shard or, for weights
    on disk, into buffer ``weights`` of their ring."""
    places = (shard(unit),) if weights is None else (shard(unit), weight_ring(weights))
    return Op(OpKind.GATHER, unit, weights, places, places, nbytes)


@_cached
def agree(units: tuple[int, ...], masters: tuple[Place, ...]) -> Op:
    """Wait until all ranks have reached this point for ``units``: their gradients, and the places ``masters``
    of their weights and state."""
    places = (*(gradient(unit) for unit in units), *masters)
    return Op(OpKind.AGREE, units[0] if len(units) == 1 else ROOT, None, places, places)


def masters_of(unit: int, held: HostShard) -> tuple[Place, ...]:
    """The places of the weights and the state of ``unit``, in host memory and on disk. Wait for them before
    reading or writing these outside of ops."""
    on_disk = () if held.weights_on_disk.is_empty else (weights_on_disk(unit),)
    return (shard(unit), *on_disk, *(state(chunk.number) for chunk in held.disk.chunks))


@_cached
def read_state(unit: int, chunk: int, ring: int, nbytes: int) -> Op:
    """Read a chunk of a unit's state from disk."""
    return Op(OpKind.READ_STATE, unit, ring, (state(chunk),), (state_ring(ring),), nbytes)


@_cached
def write_state(unit: int, chunk: int, ring: int, nbytes: int) -> Op:
    """Write a chunk of a unit's state to disk."""
    return Op(OpKind.WRITE_STATE, unit, ring, (state_ring(ring),), (state(chunk),), nbytes)


@_cached
def sync(places: tuple[Place, ...], *, to_write: bool = False) -> Op:
    """Wait until ``places`` may be read, or written, by the caller's thread."""
    return Op(OpKind.SYNC, ROOT, None, places, places if to_write else ())
