"""Combinations of options, and what a step takes with one of them beside what there is."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from streamer.memory.slots import GRAD_SLOTS, WEIGHT_SLOTS, num_grad_slots
from streamer.plan.ledger import amount
from streamer.plan.step_plan import BESIDE, GAPS, SAVED, WORKING_SET, StepPlan

#: Slices of a batch that are tried at most: a plan takes time for each of them, and so does a step.
MOST_SLICES = 256

Policies = str | tuple[str, ...] | Callable[[int], str]


class Choice(NamedTuple):
    """Options of `streamer.wrap`."""

    activations: Policies
    num_slots: int | None
    micro_batch_size: int | None

    def __str__(self) -> str:
        size = self.micro_batch_size
        batch = "" if size is None else f" and micro-batches of {size}"
        slots = "" if self.num_slots is None else f", {self.num_slots} slot{'s' * (self.num_slots > 1)}"
        return f"{_told(self.activations)}{slots}{batch}"


def _told(activations: Policies) -> str:
    if isinstance(activations, str):
        return f"'{activations}' in all layers"
    if not isinstance(activations, tuple):
        return "the given activations"
    runs = [(policy, len(list(of_one))) for policy, of_one in itertools.groupby(activations)]
    return ", then ".join(f"'{policy}' in {count} layer{'s' * (count > 1)}" for policy, count in runs)


@dataclass(frozen=True)
class Room:
    """Bytes that there are of the device and of host memory; of the device, ``budget`` bytes for tensors if
    that is not None. ``shared`` says that the device's memory is the host's."""

    device: int
    host: int
    budget: int | None = None
    shared: bool = False

    @property
    def tensors(self) -> int:
        """Bytes of the device that there are for tensors."""
        return self.device if self.budget is None else min(self.device, self.budget)


class Needs(NamedTuple):
    """Bytes that a step takes: of tensors on the device with the gaps between them, of the device in all, and
    of host memory."""

    tensors: int
    device: int
    host: int

    @property
    def all(self) -> int:
        return self.device + self.host

    def excess(self, room: Room) -> dict[str, int]:
        """By what there is too little of: how many bytes too few there are."""
        lacking = {
            "the device": self.device - room.device,
            "device_memory": 0 if room.budget is None else self.tensors - room.budget,
            "the host": (self.all if room.shared else self.host) - room.host,
        }
        return {name: nbytes for name, nbytes in lacking.items() if nbytes > 0}


@dataclass(frozen=True)
class Choices:
    """Each combination of one of ``activations``, of ``num_slots`` and of ``micro_batch_sizes``. Along each
    of them a step takes more memory and no more time. [Note: chosen options]"""

    activations: Sequence[Policies]
    num_slots: Sequence[int | None]
    micro_batch_sizes: Sequence[int | None]

    def __iter__(self) -> Iterator[Choice]:
        axes = (self.activations, self.num_slots, self.micro_batch_sizes)
        return itertools.starmap(Choice, itertools.product(*axes))


def kept_last(policy: str, count: int) -> list[Policies]:
    """``policy`` for all of ``count`` layers, then with "keep" for the last one, two, ... and all."""
    mixed = [(policy,) * (count - kept) + ("keep",) * kept for kept in range(1, count)]
    return [policy, *mixed, "keep"]


def sizes_below(batch: int) -> list[int]:
    """Micro-batch sizes worth a try: the powers of two below ``batch`` of which it has `MOST_SLICES` or
    fewer."""
    powers = (1 << power for power in range((batch - 1).bit_length()))
    return [size for size in powers if batch <= size * MOST_SLICES]


def needs(plan: StepPlan) -> Needs:
    """What ``plan`` takes, with what is to be left free."""
    device, reserve = plan.device_total, plan.reserve
    return Needs(device + reserve.get(GAPS, 0), device + sum(reserve.values()), plan.host_total)


def with_slots(plan: StepPlan, had: int, wanted: int) -> Needs:
    """What ``plan``, made with ``had`` slots, would take with ``wanted``."""
    more = _slots_more(plan, had, wanted)
    found = needs(plan)
    return Needs(found.tensors + more, found.device + more, found.host)


def buffers(plan: StepPlan, num_slots: int) -> int:
    """Bytes of the device that ``plan`` would take for good with ``num_slots``, in slots and beside them."""
    others = sum(plan.device_bytes.get(owner, 0) for owner in (SAVED, WORKING_SET, BESIDE))
    return plan.device_total - others + _slots_more(plan, plan.num_slots, num_slots)


def _slots_more(plan: StepPlan, had: int, wanted: int) -> int:
    """Bytes that ``wanted`` slots take on top of the ``had`` that there are."""
    of_weights, of_gradients = (plan.device_bytes.get(owner, 0) for owner in (WEIGHT_SLOTS, GRAD_SLOTS))
    more = (wanted - had) * (of_weights // had)
    return more + (num_grad_slots(wanted) - num_grad_slots(had)) * (of_gradients // num_grad_slots(had))


def missing(excess: Mapping[str, int]) -> str:
    """`Needs.excess` in words."""
    return " and ".join(f"{name} lacks {amount(nbytes)}" for name, nbytes in excess.items())
