"""The needs of a step, bytes by owner and seconds by lane, found by running it without data: the executor on
the virtual backend is the plan.

This module holds no estimates of its own: a `Tracker` counts the bytes that operations hold, and the buffers
that the executor owns are those that a real run would allocate.
"""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from streamer.backends.base import Lane, gaps
from streamer.backends.virtual import VirtualBackend
from streamer.engine.executor import Executor
from streamer.planner.layers import measure_kinds
from streamer.planner.machine import CUDA, Machine, context_bytes
from streamer.planner.measure import Tracker
from streamer.store.ledger import GRAD_SLOTS, UNLIMITED, WEIGHT_SLOTS, Room, Tier, num_grad_slots
from streamer.store.purposes import of_all_ranks
from streamer.torch_private import import_compiler


@dataclass(frozen=True)
class Prediction:
    """One step: its seconds, each lane's seconds of work, and the seconds that compute waits for the lane;
    the FLOPs that it executes, by PyTorch's formulas; and the bytes that each lane moves."""

    seconds: float
    flops: int
    busy_seconds: Mapping[Lane, float]
    exposed_seconds: Mapping[Lane, float]
    moved_bytes: Mapping[Lane, int] = field(default_factory=dict)
    #: of compute while no other lane works: no order of the work and no faster copy makes a step shorter
    compute_seconds: float = 0.0

    @property
    def binding_lane(self) -> Lane:
        """The bottleneck: the lane that works longest. No order of the same work makes the step shorter."""
        return max(Lane, key=lambda lane: self.busy_seconds[lane])


def predict_step(
    executor: Executor, step: Callable[[], object], *, warmup: int = 2, memory: Tracker | None = None
) -> Prediction:
    """Run ``step`` (forward, backward, update) on the virtual backend of ``executor`` and time one of them;
    ``memory`` counts the bytes held.

    In the ``warmup`` steps before it the executor learns its order. Compute time is that of the operations of
    the layers, the head and the loss: see `streamer.planner.cost`.
    """
    backend, trace = executor.backend, executor.issuer.trace
    assert isinstance(backend, VirtualBackend), "another has a clock of its own"

    def busy_seconds() -> dict[Lane, float]:
        backend.let_caller_compute()
        return trace.busy_seconds | {Lane.COMPUTE: trace.busy_seconds[Lane.COMPUTE] + backend.caller_seconds}

    with backend.counting_caller(memory):
        for _ in range(warmup):
            step()
        busy, exposed = busy_seconds(), dict(trace.exposed_seconds)
        before, flops, moved = backend.now(), backend.flops, dict(backend.moved)
        computed = backend.compute_seconds
        step()
        after = busy_seconds()
    return Prediction(
        seconds=backend.now() - before,
        flops=backend.flops - flops,
        busy_seconds={lane: after[lane] - busy[lane] for lane in Lane},
        exposed_seconds={lane: trace.exposed_seconds[lane] - exposed[lane] for lane in Lane},
        moved_bytes={lane: backend.moved[lane] - moved[lane] for lane in Lane},
        compute_seconds=backend.compute_seconds - computed,
    )


#: Owners of device memory besides the buffers: see `streamer.store.ledger` for those.
SAVED, WORKING_SET, OUTSIDE = "saved layer inputs", "working set of one layer", "logits and loss"
#: Memory that PyTorch holds from the first matrix product on.
WORKSPACES = "workspaces of cuBLAS"
#: Memory that no tensor uses: gaps between allocations, and CUDA's own memory.
GAPS, CONTEXT = "gaps in the allocator", "CUDA itself"
#: Bytes by which the allocator rounds tensors up to blocks.
ROUNDING = "rounded up by the allocator"


def workspace_bytes(machine: Machine) -> int:
    """Bytes that PyTorch takes for cuBLAS at the first matrix products: the same size (CUDABlas:
    ``getChosenWorkspaceSize``) for each of two threads, the caller's and autograd's."""
    if machine.kind != CUDA:
        return 0
    return 2 * (8320 << 10 if (machine.compute_capability or 9) < 9 else 32 << 20)


class StepTracker(Tracker):
    """A `Tracker` that separates memory of layers, memory outside of layers, and tensors saved for
    backward."""

    def __init__(self, executor: Executor) -> None:
        assert isinstance(executor.backend, VirtualBackend), "others do not tell when a layer computes"
        machine = executor.backend.machine
        super().__init__(on_gpu=machine.kind == CUDA)
        self._workspaces = self.now = self.peak = workspace_bytes(machine)
        # not the executor: buffers that it holds until they are freed hold this tracker
        self._saved = executor.saved
        self._backend = executor.backend
        self._saved_at_peak = 0

    def owner(self) -> str:
        return WORKING_SET if self._backend.is_computing else OUTSIDE

    def _note_peak(self) -> None:
        super()._note_peak()
        self._saved_at_peak = self._saved.now

    def at_peak(self) -> dict[str, int]:
        """Bytes by owner when there were most; together `peak` and its rounding."""
        held = Counter(self.owned_at_peak)
        # layers created the saved tensors, except the input of the first layer and shared inputs
        from_layers = min(self._saved_at_peak, held[WORKING_SET])
        held[WORKING_SET] -= from_layers
        held[OUTSIDE] -= self._saved_at_peak - from_layers
        held[SAVED] = self._saved_at_peak
        held[WORKSPACES] = self._workspaces
        held[ROUNDING] = self.taken[1] - self.peak
        owners = (SAVED, WORKING_SET, OUTSIDE, WORKSPACES, ROUNDING)
        return {owner: held[owner] for owner in owners if held[owner]}

    @property
    def comes_and_goes(self) -> int:
        """The most bytes that a step allocates and frees again."""
        return self.peak - self._workspaces


@dataclass(frozen=True)
class StepPlan:
    """One step of a wrapped model: bytes by owner (of the device when it holds most) and `Prediction`.

    ``num_slots`` is the final number of weight slots, ``reserve`` the bytes to leave free.
    """

    device_bytes: Mapping[str, int]
    reserve: Mapping[str, int]
    host_bytes: Mapping[str, int]
    prediction: Prediction
    num_slots: int
    disk_bytes: Mapping[str, int] = field(default_factory=dict)
    #: bytes of host memory that the step takes on top of its permanent buffers: layer inputs that wait there,
    #: and the sums of several backwards
    host_of_step: int = 0

    @property
    def device_total(self) -> int:
        """The most bytes of the device that tensors take."""
        return sum(self.device_bytes.values())

    @property
    def device_needed(self) -> int:
        """Bytes of the device, including those to leave free."""
        return self.device_total + sum(self.reserve.values())

    @property
    def allocated(self) -> int:
        """The bytes that count towards ``device_memory``: all that PyTorch's allocator takes of a GPU. If the
        host stands in for a GPU, which has no such count: buffers and saved inputs."""
        if GAPS in self.reserve:
            return self.device_total + self.reserve[GAPS]
        return sum(
            nbytes for owner, nbytes in self.device_bytes.items() if owner not in (WORKING_SET, OUTSIDE)
        )

    @property
    def host_total(self) -> int:
        """The most bytes of host memory."""
        return sum(self.host_bytes.values())

    def tiers(self, room: Room, num_slots: int | None = None) -> list[Tier]:
        """Bytes needed and available, with ``num_slots`` in place of the plan's number if set: nothing else
        depends on it. Tiers without a limit are left out."""
        device = self.device_tiers(room, num_slots)
        return [*device, *self.host_tiers(room, device[0].needed)]

    def device_tiers(self, room: Room, num_slots: int | None = None) -> list[Tier]:
        """The `tiers` of the device."""
        more = 0 if num_slots is None else self._slots_more(num_slots)
        tiers = [
            Tier("the device", self.device_needed + more, room.device),
            Tier("device_memory", self.allocated + more, room.budget),
        ]
        return [tier for tier in tiers if tier.available < UNLIMITED]

    def host_tiers(self, room: Room, device: int) -> list[Tier]:
        """The `tiers` of the host, with ``device`` bytes needed of the device."""
        tiers = [
            room.host_tier(self.host_total, device),
            Tier("host_memory", self.host_total, room.host_limit),
        ]
        return [tier for tier in tiers if tier.available < UNLIMITED]

    def _slots_more(self, wanted: int) -> int:
        """Bytes that ``wanted`` slots take on top of the plan's slots."""
        had = self.num_slots
        of_weights, of_gradients = (self.device_bytes.get(owner, 0) for owner in (WEIGHT_SLOTS, GRAD_SLOTS))
        more = (wanted - had) * (of_weights // had)
        return more + (num_grad_slots(wanted) - num_grad_slots(had)) * (of_gradients // num_grad_slots(had))


@contextmanager
def uncollected() -> Iterator[None]:
    """Turn off Python's garbage collection inside the block: a plan creates many objects, which stay until
    its end, and scanning them again and again takes a third of its time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@uncollected()
def plan_step(executor: Executor, step: Callable[[], object], *, packed: bool = False) -> StepPlan:
    """Plan ``step`` (forward, backward, update) of a model on the virtual backend, for rows of one text each,
    or of several where they are ``packed``. One layer of each kind runs: [Note: kinds of layers]."""
    backend = executor.backend
    assert isinstance(backend, VirtualBackend), "elsewhere a step would have to be run"
    import_compiler()
    tracker = StepTracker(executor)
    before = sum(of_all_ranks(executor.host.bytes(), backend.machine.ranks).values())
    measure_kinds(executor, tracker)
    with positions_without_values(packed=packed):
        # a step to learn the order, and one more if slots are added at its end
        warmup = 1 if executor.budget.is_fixed else 2
        prediction = predict_step(executor, step, warmup=warmup, memory=tracker)
    kind = backend.machine.kind
    reserve = {GAPS: gaps(tracker.comes_and_goes), CONTEXT: context_bytes(kind)} if kind == CUDA else {}
    on_host = of_all_ranks(executor.host.bytes(), backend.machine.ranks)
    return StepPlan(
        executor.device_bytes() | tracker.at_peak(),
        reserve,
        on_host,
        prediction,
        len(executor.pager.training.slots.buffers),
        executor.host.disk_bytes(),
        sum(on_host.values()) - before,
    )


@contextmanager
def positions_without_values(*, packed: bool) -> Iterator[None]:
    """Inside the block models of transformers do not read the values of position ids, which a plan does not
    have. Without a cache they read them to find rows with several texts. If the rows are ``packed``, each
    has several, and attention gets a mask of [rows, 1, time, time]; else none has."""
    masks: Any = sys.modules.get("transformers.masking_utils")
    finds = "find_packed_sequence_indices"
    if (find := getattr(masks, finds, None)) is None:
        yield
        return

    def texts_of(positions: torch.Tensor) -> torch.Tensor | None:
        if positions.is_meta:
            return torch.empty_like(positions) if packed else None
        found: torch.Tensor | None = find(positions)
        return found

    setattr(masks, finds, texts_of)
    try:
        yield
    finally:
        setattr(masks, finds, find)
