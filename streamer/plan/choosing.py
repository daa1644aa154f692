"""The fastest of many ways to run a step that fits: what to keep, how many slots, how large a micro-batch.

[Note: chosen options]
A combination is planned, not calculated, and a plan takes as long as a step on meta tensors. So few are.
All combinations are boxes of chains along which a step takes more memory and no more time: layers that keep
their graphs, from none to all, the last ones first; weight slots; samples in a micro-batch. The corner of a
box with the least of all is the smallest, that with the most the fastest. A box whose smallest does not fit
is dropped, and of all others the one with the fastest corner is looked at first: if that corner fits, nothing
is faster; if not, the box is halved. Of the combinations that are as fast the one that takes least memory is
found in the same way, from the other corner.

Whole batches, and inputs that wait in host memory, are boxes of their own: a micro-batch needs room to add up
gradients, so that it may take more than the whole, and what leaves the device comes to the host.
"""

from __future__ import annotations

import heapq
import itertools
import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from streamer.engine.micro_batches import AmbiguousBatchError
from streamer.plan.choices import Choice, Choices, Needs, Room, missing, needs, with_slots
from streamer.plan.ledger import amount
from streamer.plan.step_plan import StepPlan

#: Steps whose predictions differ by less are as fast as one another: what sums of the same seconds in other
#: orders may differ by.
AS_FAST = 1e-6


@dataclass(frozen=True)
class Chosen:
    """What was chosen, its plan, why, and all that was planned on the way."""

    choice: Choice
    plan: StepPlan
    reason: str
    considered: Mapping[Choice, StepPlan]


def choose(plan_of: Callable[[Choice], StepPlan], boxes: Sequence[Choices], room: Room) -> Chosen:
    """The choice in ``boxes`` with the shortest predicted step among those that fit into ``room``; of those
    that are as fast (within `AS_FAST`) the one that takes the least memory of both sides.

    ``plan_of`` plans a choice with room for anything. A box for which it raises AmbiguousBatchError is left
    out. Raises MemoryError, with what the nearest choice needs and what there is, where nothing fits.
    """
    search = _Search(plan_of, room)
    begin = [_Box.all(choices) for choices in boxes]
    fastest = search.best(
        begin, lambda box: box.fastest, search.seconds, search.cannot_fit, search.without_misfits
    )
    if fastest is None:
        raise search.nothing_fits(begin)
    enough = search.seconds(fastest) * (1 + AS_FAST)
    least = search.best(
        begin,
        lambda box: box.smallest,
        lambda choice: search.needs(choice).all,
        lambda box: search.cannot_fit(box) or search.seconds(box.fastest) > enough,
        lambda box: search.without_slow(search.without_misfits(box), enough),
        lambda choice: search.seconds(choice) <= enough,
    )
    choice = fastest if least is None else least
    return Chosen(choice, search.plans[choice], search.reason(choice), search.plans)


@dataclass(frozen=True)
class _Box:
    """A part of ``choices``: along each axis the places from ``low`` to ``high``."""

    choices: Choices
    low: tuple[int, ...]
    high: tuple[int, ...]

    @staticmethod
    def all(choices: Choices) -> _Box:
        axes = (choices.activations, choices.num_slots, choices.micro_batch_sizes)
        return _Box(choices, (0, 0, 0), tuple(len(axis) - 1 for axis in axes))

    @property
    def smallest(self) -> Choice:
        return self.at(self.low)

    @property
    def fastest(self) -> Choice:
        return self.at(self.high)

    def at(self, place: tuple[int, ...]) -> Choice:
        """The choice at a place along each axis."""
        kept, slots, size = place
        choices = self.choices
        return Choice(choices.activations[kept], choices.num_slots[slots], choices.micro_batch_sizes[size])

    def halves(self) -> tuple[_Box, _Box]:
        """It, cut in two along its longest axis."""
        axis = max(range(3), key=lambda axis: self.high[axis] - self.low[axis])
        middle = (self.low[axis] + self.high[axis]) // 2
        low, high = list(self.low), list(self.high)
        low[axis], high[axis] = middle + 1, middle
        return _Box(self.choices, self.low, tuple(high)), _Box(self.choices, tuple(low), self.high)


@dataclass
class _Search:
    """Plans as they are needed. [Note: chosen options]"""

    plan_of: Callable[[Choice], StepPlan]
    room: Room
    plans: dict[Choice, StepPlan] = field(default_factory=dict)
    ambiguous: str | None = None

    def plan(self, choice: Choice) -> StepPlan:
        if choice not in self.plans:
            self.plans[choice] = self.plan_of(choice)
        return self.plans[choice]

    def seconds(self, choice: Choice) -> float:
        return self.plan(choice).prediction.seconds

    def needs(self, choice: Choice) -> Needs:
        """What ``choice`` takes, from the plan of any number of slots: nothing else depends on that."""
        if choice in self.plans or choice.num_slots is None:
            return needs(self.plan(choice))
        others = (other for other in self.plans if other._replace(num_slots=choice.num_slots) == choice)
        other = next(others, None)
        if other is None:
            return needs(self.plan(choice))
        assert other.num_slots is not None, "as the choice has a number"
        return with_slots(self.plans[other], other.num_slots, choice.num_slots)

    def fits(self, choice: Choice) -> bool:
        return not self.needs(choice).excess(self.room)

    def cannot_fit(self, box: _Box) -> bool:
        """Whether there is nothing in ``box`` that fits."""
        least = self.needs(box.smallest)
        if not least.excess(self.room):
            return False
        if least._replace(host=0).excess(self.room):
            return True
        # what is kept on the device need not leave it
        host = self.needs(box.fastest).host
        return bool(least._replace(host=min(least.host, host)).excess(self.room))

    def without_misfits(self, box: _Box) -> _Box:
        """``box`` without the numbers of slots that do not fit beside the least of all else."""

        def is_too_many(place: int) -> bool:
            needed = self.needs(box.at((box.low[0], place, box.low[2])))
            return bool(needed._replace(host=0).excess(self.room))

        kept, slots, size = box.high
        slots = bisect_left(range(slots + 1), True, lo=box.low[1] + 1, key=is_too_many) - 1
        return _Box(box.choices, box.low, (kept, slots, size))

    def without_slow(self, box: _Box, enough: float) -> _Box:
        """``box`` without what takes more than ``enough`` seconds beside the most of all else."""
        low = list(box.low)
        for axis, (first, last) in enumerate(zip(box.low, box.high, strict=True)):

            def is_fast(place: int, axis: int = axis) -> bool:
                corner = (*box.high[:axis], place, *box.high[axis + 1 :])
                return self.seconds(box.at(corner)) <= enough

            low[axis] = bisect_left(range(last), True, lo=first, key=is_fast)
        return _Box(box.choices, tuple(low), box.high)

    def best(
        self,
        boxes: Sequence[_Box],
        corner: Callable[[_Box], Choice],
        rank: Callable[[Choice], float],
        is_hopeless: Callable[[_Box], bool],
        trimmed: Callable[[_Box], _Box],
        is_enough: Callable[[Choice], bool] = lambda choice: True,
    ) -> Choice | None:
        """The choice with the least ``rank`` that fits and is ``is_enough``, where the ``corner`` of a box
        has the least in it; None if there is none."""
        # of equal ones the latest, and of two halves the smaller, which fits sooner
        order = itertools.count(step=-1)
        # the rank of a box that it was cut out of does until it is first in line
        heap = [(-math.inf, next(order), box) for box in boxes]
        heapq.heapify(heap)
        while heap:
            known, _, box = heapq.heappop(heap)
            try:
                if is_hopeless(box):
                    continue
                box = trimmed(box)
                found = rank(corner(box))
                if found > known:
                    heapq.heappush(heap, (found, next(order), box))
                    continue
            except AmbiguousBatchError as error:
                self.ambiguous = str(error)
                continue
            if self.fits(corner(box)) and is_enough(corner(box)):
                return corner(box)
            if box.low != box.high:
                for half in reversed(box.halves()):
                    heapq.heappush(heap, (found, next(order), half))
        return None

    def reason(self, choice: Choice) -> str:
        """Why it is this one."""
        seconds = self.seconds(choice)
        told = [f"{choice}: a step of {_time(seconds)} is predicted"]
        faster = {
            other: plan
            for other, plan in self.plans.items()
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

    def nothing_fits(self, boxes: Sequence[_Box]) -> MemoryError:
        """What to raise: the nearest miss."""
        corners = [corner for box in boxes for corner in (box.smallest, box.fastest)]
        planned = [corner for corner in corners if corner in self.plans] or list(self.plans)
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
