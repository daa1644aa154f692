"""What a step will take, bytes by owner and seconds by lane, found by running it without data: the executor
on the virtual backend is the plan.

Nothing here knows how much anything takes: a `Tracker` counts what operations hold, and the buffers that the
executor owns are those that a real run would allocate.
"""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from streamer.backends.base import Lane, gaps
from streamer.backends.virtual import VirtualBackend
from streamer.engine.paging.executor import Executor
from streamer.planner.layers import measure_kinds
from streamer.planner.machine import CUDA, Machine, context_bytes
from streamer.planner.measure import Tracker
from streamer.store.ledger import GRAD_SLOTS, UNLIMITED, WEIGHT_SLOTS, Room, Tier, num_grad_slots
from streamer.store.purposes import of_all_ranks
from streamer.torch_private import import_compiler


@dataclass(frozen=True)
class Prediction:
    """One step in seconds: all of it, and by lane how long it works and how long compute waits for it; the
    FLOPs that it executes, by PyTorch's formulas; and the bytes that each lane moves."""

    seconds: float
    flops: int
    busy_seconds: Mapping[Lane, float]
    exposed_seconds: Mapping[Lane, float]
    moved_bytes: Mapping[Lane, int] = field(default_factory=dict)

    @property
    def binding_lane(self) -> Lane:
        """The lane that works longest: no order of the same work could make the step shorter than that."""
        return max(Lane, key=lambda lane: self.busy_seconds[lane])


def predict_step(
    executor: Executor, step: Callable[[], object], *, warmup: int = 2, memory: Tracker | None = None
) -> Prediction:
    """Run ``step`` (forward, backward, update) on the virtual backend of ``executor`` and time one of them;
    ``memory`` counts what they hold.

    The ``warmup`` steps before it let the executor learn its order. Compute time is that of the operations of
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
        step()
        after = busy_seconds()
    return Prediction(
        seconds=backend.now() - before,
        flops=backend.flops - flops,
        busy_seconds={lane: after[lane] - busy[lane] for lane in Lane},
        exposed_seconds={lane: trace.exposed_seconds[lane] - exposed[lane] for lane in Lane},
        moved_bytes={lane: backend.moved[lane] - moved[lane] for lane in Lane},
    )


#: Owners of device memory beside the buffers: see `streamer.store.ledger` for those.
SAVED, WORKING_SET, BESIDE = "saved layer inputs", "working set of one layer", "logits and loss"
#: What PyTorch holds for products of matrices from the first one on.
WORKSPACES = "workspaces of cuBLAS"
#: What is free on purpose: gaps between what comes and goes, and what CUDA itself takes.
GAPS, CONTEXT = "gaps in the allocator", "CUDA itself"
#: By which the allocator rounds tensors up to blocks.
ROUNDING = "rounded up by the allocator"


def workspace_bytes(machine: Machine) -> int:
    """Bytes that PyTorch takes for cuBLAS at the first products of matrices: as much (CUDABlas:
    ``getChosenWorkspaceSize``) for each of two threads, the caller's and autograd's."""
    if machine.kind != CUDA:
        return 0
    return 2 * (8320 << 10 if (machine.compute_capability or 9) < 9 else 32 << 20)


class StepTracker(Tracker):
    """A `Tracker` that tells what a layer makes from what is made beside the layers, and both from what is
    saved for backward."""

    def __init__(self, executor: Executor) -> None:
        assert isinstance(executor.backend, VirtualBackend), "others do not tell when a layer computes"
        machine = executor.backend.machine
        super().__init__(on_gpu=machine.kind == CUDA)
        self._workspaces = self.now = self.peak = workspace_bytes(machine)
        self._executor = executor
        self._backend = executor.backend
        self._saved_at_peak = 0

    def owner(self) -> str:
        return WORKING_SET if self._backend.is_computing else BESIDE

    def _note_peak(self) -> None:
        super()._note_peak()
        self._saved_at_peak = self._executor.saved.now

    def at_peak(self) -> dict[str, int]:
        """Bytes by owner when there were most; together `peak` and its rounding."""
        held = Counter(self.owned_at_peak)
        # what is saved was made by layers, but for the input of the first and what all are given
        from_layers = min(self._saved_at_peak, held[WORKING_SET])
        held[WORKING_SET] -= from_layers
        held[BESIDE] -= self._saved_at_peak - from_layers
        held[SAVED] = self._saved_at_peak
        held[WORKSPACES] = self._workspaces
        held[ROUNDING] = self.taken[1] - self.peak
        owners = (SAVED, WORKING_SET, BESIDE, WORKSPACES, ROUNDING)
        return {owner: held[owner] for owner in owners if held[owner]}

    @property
    def comes_and_goes(self) -> int:
        """The most bytes that a step allocates and frees again."""
        return self.peak - self._workspaces


@dataclass(frozen=True)
class StepPlan:
    """One step of a wrapped model: bytes by owner (of the device when it holds most) and `Prediction`.

    ``num_slots`` are the weight slots that there are in the end, ``reserve`` what is to be left free.
    """

    device_bytes: Mapping[str, int]
    reserve: Mapping[str, int]
    host_bytes: Mapping[str, int]
    prediction: Prediction
    num_slots: int
    disk_bytes: Mapping[str, int] = field(default_factory=dict)
    #: bytes of host memory that the step takes beside what has its place before: layer inputs that wait
    #: there, and the sums of several backwards
    host_beside: int = 0

    @property
    def device_total(self) -> int:
        """Bytes that tensors take of the device at most."""
        return sum(self.device_bytes.values())

    @property
    def device_needed(self) -> int:
        """Bytes of the device, those that are to be left free with them."""
        return self.device_total + sum(self.reserve.values())

    @property
    def allocated(self) -> int:
        """What counts towards ``device_memory``, in bytes: all that PyTorch's allocator takes of a GPU; where
        the host stands in for one, which has no such count, buffers and saved inputs."""
        if GAPS in self.reserve:
            return self.device_total + self.reserve[GAPS]
        return sum(
            nbytes for owner, nbytes in self.device_bytes.items() if owner not in (WORKING_SET, BESIDE)
        )

    @property
    def host_total(self) -> int:
        """Bytes of host memory at most."""
        return sum(self.host_bytes.values())

    def tiers(self, room: Room, num_slots: int | None = None) -> list[Tier]:
        """What is needed beside what there is, with other ``num_slots`` than it was made with if given:
        nothing else depends on how many there are. Tiers without a limit are left out."""
        device = self.device_tiers(room, num_slots)
        return [*device, *self.host_tiers(room, device[0].needed)]

    def device_tiers(self, room: Room, num_slots: int | None = None) -> list[Tier]:
        """Those of `tiers` that are the device's."""
        more = 0 if num_slots is None else self._slots_more(num_slots)
        tiers = [
            Tier("the device", self.device_needed + more, room.device),
            Tier("device_memory", self.allocated + more, room.budget),
        ]
        return [tier for tier in tiers if tier.available < UNLIMITED]

    def host_tiers(self, room: Room, device: int) -> list[Tier]:
        """Those of `tiers` that are the host's, with ``device`` bytes needed of the device."""
        tiers = [
            room.host_tier(self.host_total, device),
            Tier("host_memory", self.host_total, room.host_limit),
        ]
        return [tier for tier in tiers if tier.available < UNLIMITED]

    def _slots_more(self, wanted: int) -> int:
        """Bytes that ``wanted`` slots take on top of those that there are."""
        had = self.num_slots
        of_weights, of_gradients = (self.device_bytes.get(owner, 0) for owner in (WEIGHT_SLOTS, GRAD_SLOTS))
        more = (wanted - had) * (of_weights // had)
        return more + (num_grad_slots(wanted) - num_grad_slots(had)) * (of_gradients // num_grad_slots(had))


@contextmanager
def uncollected() -> Iterator[None]:
    """Let Python not look for garbage inside the block: a plan makes many objects, which stay until its end,
    and to look at them again and again takes a third of its time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@uncollected()
def plan_step(executor: Executor, step: Callable[[], object]) -> StepPlan:
    """Plan ``step`` (forward, backward, update) of a model on the virtual backend. One layer of each kind
    runs: [Note: kinds of layers]."""
    backend = executor.backend
    assert isinstance(backend, VirtualBackend), "elsewhere a step would have to be run"
    import_compiler()
    tracker = StepTracker(executor)
    before = sum(of_all_ranks(executor.host_bytes(), backend.machine.ranks).values())
    measure_kinds(executor, tracker)
    with one_sequence_a_row():
        # a step to learn the order, and one more where slots are added at its end
        warmup = 1 if executor.budget.is_fixed else 2
        prediction = predict_step(executor, step, warmup=warmup, memory=tracker)
    kind = backend.machine.kind
    reserve = {GAPS: gaps(tracker.comes_and_goes), CONTEXT: context_bytes(kind)} if kind == CUDA else {}
    on_host = of_all_ranks(executor.host_bytes(), backend.machine.ranks)
    return StepPlan(
        executor.device_bytes() | tracker.at_peak(),
        reserve,
        on_host,
        prediction,
        len(executor.pager.slots.buffers),
        executor.disk_bytes(),
        sum(on_host.values()) - before,
    )


@contextmanager
def one_sequence_a_row() -> Iterator[None]:
    """Inside the block models of transformers do not look at the values of position ids, which a plan has
    not: to see whether a row holds several sequences, they do so wherever there is no cache."""
    masks: Any = sys.modules.get("transformers.masking_utils")
    finds = "find_packed_sequence_indices"
    if (find := getattr(masks, finds, None)) is None:
        yield
        return
    setattr(masks, finds, lambda positions: None if positions.is_meta else find(positions))
    try:
        yield
    finally:
        setattr(masks, finds, find)
