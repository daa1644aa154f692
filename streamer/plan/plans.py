"""Plans as a choice needs them, what they take, and what is told of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tqdm import tqdm

from streamer.engine.micro_batches import AmbiguousBatchError
from streamer.plan.box import Box
from streamer.plan.choices import Choice, Needs, Room, buffers, missing, needs, with_slots
from streamer.plan.ledger import amount
from streamer.plan.step_plan import StepPlan

#: Steps whose predictions differ by less are as fast as one another: what sums of the same seconds in other
#: orders may differ by.
AS_FAST = 1e-6


@dataclass
class Plans:
    """What ``plan_of`` has planned, each choice once, for ``room``. A bar on a terminal counts them."""

    plan_of: Callable[[Choice], StepPlan]
    room: Room
    bar: tqdm[Any]
    made: dict[Choice, StepPlan] = field(default_factory=dict)
    ambiguous: AmbiguousBatchError | None = None

    def plan(self, choice: Choice) -> StepPlan:
        if choice not in self.made:
            self.made[choice] = self.plan_of(choice)
            self.bar.update()
        return self.made[choice]

    def seconds(self, choice: Choice) -> float:
        return self.plan(choice).prediction.seconds

    def needs(self, choice: Choice) -> Needs:
        """What ``choice`` takes, from the plan of any number of slots: nothing else depends on that."""
        known = self.known(choice)
        return needs(self.plan(choice)) if known is None else known

    def known(self, choice: Choice) -> Needs | None:
        """`needs`, where no plan has to be made for it."""
        if choice in self.made:
            return needs(self.made[choice])
        if choice.num_slots is None:
            return None
        for other, plan in self.made.items():
            if other.num_slots is not None and other._replace(num_slots=choice.num_slots) == choice:
                return with_slots(plan, other.num_slots, choice.num_slots)
        return None

    def fits(self, choice: Choice) -> bool:
        return not self.needs(choice).excess(self.room)

    @contextmanager
    def leaving_out_ambiguous(self) -> Iterator[None]:
        """A box for which AmbiguousBatchError is raised inside the block is left out."""
        try:
            yield
        except AmbiguousBatchError as error:
            self.ambiguous = error

    def reason(self, choice: Choice) -> str:
        """Why it is this one."""
        seconds = self.seconds(choice)
        told = [f"{choice}: a step of {_time(seconds)} is predicted"]
        faster = {
            other: plan
            for other, plan in self.made.items()
            if plan.prediction.seconds * (1 + AS_FAST) < seconds and needs(plan).excess(self.room)
        }
        if faster:
            other = max(faster, key=lambda other: (self.seconds(other), -self.needs(other).all))
            told[0] += (
                f"; {other} would take {_time(self.seconds(other))}, for which "
                f"{missing(self.needs(other).excess(self.room))}"
            )
        else:
            told[0] += ", and no other combination is faster"
        if self.ambiguous is not None:
            told.append(f"Micro-batches are left out: {self.ambiguous}")
        return ". ".join(told)

    def are_too_many(self, slots: int | None) -> bool:
        """Whether so many slots (where None is told: two) for whole layers are more than the device has room
        for, even if nothing else is there."""
        return bool(self.made) and all(
            buffers(plan, slots or 2) > self.room.tensors for plan in self.made.values()
        )

    def nothing_fits(self, boxes: Sequence[Box]) -> Exception:
        """What to raise: the nearest miss, or, where nothing could be planned, what was in the way."""
        if self.ambiguous is not None and not self.made:
            return self.ambiguous
        corners = [corner for box in boxes for corner in (box.smallest, box.fastest)]
        planned = [corner for corner in corners if corner in self.made] or list(self.made)
        nearest = min(planned, key=lambda choice: sum(self.needs(choice).excess(self.room).values()))
        needed, room = self.needs(nearest), self.room
        budget = "" if room.budget is None else f", of which device_memory gives {amount(room.budget)}"
        return MemoryError(
            f"nothing that 'auto' may choose fits; the nearest is {nearest}: the device needs "
            f"{amount(needed.device)} and has {amount(room.device)}{budget}, the host needs "
            f"{amount(needed.host)} and has {amount(room.host)}"
            f"{' (the same memory as the device)' if room.shared else ''}: "
            f"{missing(needed.excess(room))}; use a smaller batch, dtype=torch.bfloat16, or freeze parameters"
        )


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s"
