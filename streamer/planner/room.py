"""The memory that there is for a model, beside what a plan needs of it."""

from __future__ import annotations

from dataclasses import dataclass

from streamer.memory.slots import GRAD_SLOTS, WEIGHT_SLOTS, num_grad_slots
from streamer.memory.verdict import SHARED, Tier
from streamer.planner.step_plan import StepPlan


@dataclass(frozen=True)
class Room:
    """Bytes that there are of the device and of host memory; of the device, ``budget`` bytes for tensors if
    that is not None. ``shared`` says that the device's memory is the host's. ``device`` counts the bytes that
    CUDA itself takes, ``context``, as plans do. Of ``host``, ``given_back`` bytes are taken now and will be
    free; ``lockable`` bytes may be page-locked, None where no limit is known, and ``host_limit`` bytes are
    what `wrap` was told to take at most. The device's bytes are of each of ``ranks``, the host's of all."""

    device: int
    host: int
    budget: int | None = None
    shared: bool = False
    context: int = 0
    given_back: int = 0
    lockable: int | None = None
    host_limit: int | None = None
    ranks: int = 1

    def host_room(self, device: int = 0) -> int:
        """Bytes of host memory that the model may take, beside ``device`` bytes of the device where the
        device's memory is the host's."""
        there = max(0, self.host - device * self.shared * self.ranks)
        return there if self.host_limit is None else min(there, self.host_limit)

    @property
    def tensors(self) -> int:
        """Bytes of the device that there are for tensors."""
        there = self.device - self.context
        return there if self.budget is None else min(there, self.budget)

    def tiers(self, plan: StepPlan, num_slots: int | None = None) -> list[Tier]:
        """What ``plan`` needs beside what there is, with other ``num_slots`` than it was made with if given:
        nothing else depends on how many there are."""
        device = self.device_tiers(plan, num_slots)
        return [*device, *self.host_tiers(plan, device[0].needed)]

    def device_tiers(self, plan: StepPlan, num_slots: int | None = None) -> list[Tier]:
        """Those of `tiers` that are the device's."""
        more = 0 if num_slots is None else _slots_more(plan, num_slots)
        found = [Tier("the device", plan.device_needed + more, self.device)]
        if self.budget is not None:
            found.append(Tier("device_memory", plan.allocated + more, self.budget))
        return found

    def host_tiers(self, plan: StepPlan, device: int) -> list[Tier]:
        """Those of `tiers` that are the host's, with ``device`` bytes needed of the device."""
        found = [self.host_tier(plan.host_total, device)]
        if self.host_limit is not None:
            found.append(Tier("host_memory", plan.host_total, self.host_limit))
        return found

    def host_tier(self, needed: int, device: int, remedy: str = "") -> Tier:
        """What is needed of the host, with ``device`` bytes of the device where its memory is the host's."""
        return Tier(
            f"the host{SHARED * self.shared}", needed + device * self.shared * self.ranks, self.host, remedy
        )


def _slots_more(plan: StepPlan, wanted: int) -> int:
    """Bytes that ``wanted`` slots take on top of those that there are in ``plan``."""
    had = plan.num_slots
    of_weights, of_gradients = (plan.device_bytes.get(owner, 0) for owner in (WEIGHT_SLOTS, GRAD_SLOTS))
    more = (wanted - had) * (of_weights // had)
    return more + (num_grad_slots(wanted) - num_grad_slots(had)) * (of_gradients // num_grad_slots(had))
