"""The fastest of many ways to run a step that fits: what to keep, how many slots, how large a micro-batch.

[Note: chosen options]
A combination is planned, not calculated, and a plan takes as long as a step on meta tensors. So few are.
All combinations are boxes of chains along which a step takes more memory (give or take some scalars) and no
more time: layers that keep their graphs, from none to all, the last ones first; weight slots; samples in a
micro-batch. The corner of a box with the least of all is the smallest, that with the most the fastest. A box
whose smallest does not fit is dropped, and of all others the one with the fastest corner is looked at first:
if that corner fits, nothing is faster; if not, the box is cut. Of the combinations that are as fast the one
that takes least memory is found in the same way, from the other corner, among the boxes that are left.

Where to cut is guessed, and what is guessed is planned before anything is built on it. Nothing but slots
depends on how many there are, so the plan of one number gives the memory of all. Layers that are alike take
alike, so a straight line between the fewest and the most that keep their graphs says how many fit, and the
plan of one more that the others are not worth a look. The number that just fits is then a box of its own.

Whole batches, and inputs that wait in host memory, are boxes of their own: a micro-batch needs room to add up
gradients, so that it may take more than the whole, and what leaves the device comes to the host. Layers in
parts are looked for only where no whole ones fit, and each number of slots by itself: how far layers are cut
depends on it.
"""

from __future__ import annotations

import heapq
import itertools
import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from tqdm import tqdm

from streamer.engine.layer.micro_batches import AmbiguousBatchError
from streamer.plan.choice import Choice, Choices, Needs, Room, buffers, missing, needs, with_slots
from streamer.plan.ledger import amount
from streamer.plan.step_plan import StepPlan

#: The axes of a `Box`: layers that keep their graphs, weight slots, samples in a micro-batch.
KEPT, SLOTS, SIZES = range(3)


@dataclass(frozen=True)
class Box:
    """A part of ``choices``: along each axis the places from ``low`` to ``high``."""

    choices: Choices
    low: tuple[int, ...]
    high: tuple[int, ...]

    @staticmethod
    def all(choices: Choices) -> Box:
        axes = (choices.activations, choices.num_slots, choices.micro_batch_sizes)
        return Box(choices, (0, 0, 0), tuple(len(axis) - 1 for axis in axes))

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

    def is_one(self, axis: int) -> bool:
        """Whether there is only one place along ``axis``."""
        return self.low[axis] == self.high[axis]

    def up_to(self, axis: int, place: int) -> Box:
        """What of it is at ``place`` or below."""
        return Box(self.choices, self.low, moved(self.high, axis, place))

    def cut(self, axis: int, place: int) -> tuple[Box, Box]:
        """What is at ``place`` and above, and what is below."""
        upper = Box(self.choices, moved(self.low, axis, place), self.high)
        return upper, self.up_to(axis, place - 1)

    def halves(self) -> tuple[Box, Box]:
        """The box cut in two along its longest axis."""
        axis = max(range(3), key=lambda axis: self.high[axis] - self.low[axis])
        return self.cut(axis, (self.low[axis] + self.high[axis]) // 2 + 1)


class Queue:
    """Boxes, those of which the least is expected first."""

    def __init__(self, boxes: Sequence[Box]) -> None:
        self._order = itertools.count()
        self._heap = [(-math.inf, next(self._order), box) for box in boxes]

    def put(self, least: float, *boxes: Box) -> None:
        """Boxes in which nothing is less than ``least``; of equal ones the first."""
        for box in reversed(boxes):
            heapq.heappush(self._heap, (least, -next(self._order), box))

    def __iter__(self) -> Iterator[tuple[float, Box]]:
        while self._heap:
            known, _, box = heapq.heappop(self._heap)
            yield known, box

    def left(self) -> list[Box]:
        return [box for _, _, box in self._heap]


def moved(place: tuple[int, ...], axis: int, to: int) -> tuple[int, ...]:
    """``place`` with another along ``axis``."""
    return (*place[:axis], to, *place[axis + 1 :])


def first(low: int, last: int, is_true: Callable[[int], bool], *, near_last: bool) -> int:
    """The first place from ``low`` on where ``is_true``, as it is from there on; ``last`` if there is none
    before it. Places near ``low`` are looked at first, or, with ``near_last``, the one before ``last``."""
    if near_last and low < last and not is_true(last - 1):
        return last
    begin = probe = low
    while probe < last and not is_true(probe):
        low, probe = probe + 1, begin + 2 * (probe - begin) + 1
    return bisect_left(range(min(probe, last)), True, lo=low, key=is_true)


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


PlanOf = Callable[[Choice], StepPlan]

#: Bytes of the device by which a step may take less where a layer keeps its graph: a few small tensors of a
#: visit that is not recomputed, while the rest of the graph would be there in backward in any case.
SCALARS = 64

#: Slots that are tried where they hold parts of layers. Each number is a search of its own.
SLOTS_FOR_PARTS = (1, 2, 4)


@dataclass(frozen=True)
class Chosen:
    """What was chosen, its plan, why, and all that was planned on the way."""

    choice: Choice
    plan: StepPlan
    reason: str
    considered: Mapping[Choice, StepPlan]


def choose(plan_of: PlanOf, boxes: Sequence[Choices], room: Room, in_parts: PlanOf | None = None) -> Chosen:
    """The choice in ``boxes`` with the shortest predicted step among those that fit into ``room``; of those
    that are as fast (within `AS_FAST`) the one that takes the least memory of both sides (within `SCALARS`).

    ``plan_of`` plans a choice with room for anything, ``in_parts`` one of which the layers are cut to fit
    into ``room``; it is used where no whole ones fit. A box for which AmbiguousBatchError is raised is left
    out; it is raised where no other is left. Raises MemoryError, with what the nearest choice needs and what
    there is, where nothing fits. Meanwhile a bar counts the plans, if stderr is a terminal.
    """
    begin = [Box.all(choices) for choices in boxes]
    # disable=None: unless it is a terminal
    bar: tqdm[Any] = tqdm(desc="'auto'", unit=" plans", disable=None, leave=False)
    with bar:
        plans = Plans(plan_of, room, bar)
        search = _Search(plans)
        fastest, left = search.fastest(begin)
        if fastest is None:
            return _choose_in_parts(in_parts, boxes, plans)
        least = search.smallest(left, plans.seconds(fastest) * (1 + AS_FAST))
    choice = fastest if least is None else least
    return Chosen(choice, plans.made[choice], plans.reason(choice), plans.made)


def _choose_in_parts(plan_of: PlanOf | None, boxes: Sequence[Choices], whole: Plans) -> Chosen:
    """What to choose of ``boxes``, without micro-batches, where ``plan_of`` plans layers in parts. Raises
    what the plans of ``whole`` layers lack if nothing fits. [Note: split layers]"""
    lacking = whole.nothing_fits([Box.all(choices) for choices in boxes])
    among = [choices for choices in boxes if None in choices.micro_batch_sizes] or boxes
    given = among[0].num_slots
    counts = [slots for slots in (SLOTS_FOR_PARTS if len(given) > 1 else given) if whole.are_too_many(slots)]
    if plan_of is None or not counts:
        raise lacking
    found = []
    for slots in counts:
        with suppress(MemoryError):
            found.append(choose(plan_of, [replace(one, num_slots=[slots]) for one in among], whole.room))
    if not found:
        raise MemoryError(f"{lacking}. Layers that are streamed in parts do not fit either") from None
    best = min(found, key=lambda one: (one.plan.prediction.seconds, needs(one.plan).all))
    reason = f"{best.reason}. Whole layers do not fit: the largest are streamed in parts"
    considered = {choice: plan for one in found for choice, plan in one.considered.items()}
    return replace(best, reason=reason, considered=considered)


@dataclass(frozen=True)
class _Search:
    """The search for a choice. [Note: chosen options]"""

    plans: Plans

    def cannot_fit(self, box: Box) -> bool:
        """Whether there is nothing in ``box`` that fits."""
        return bool(self.least(box, box.smallest).excess(self.plans.room))

    def least(self, box: Box, choice: Choice) -> Needs:
        """What ``choice``, or one with more of anything, takes at least, with the least host memory in
        ``box``: what is kept on the device need not leave it."""
        needed = self.plans.needs(choice)
        needed = Needs(needed.tensors - SCALARS, needed.device - SCALARS, needed.host)
        room = self.plans.room
        if not needed.excess(room) or needed._replace(host=0).excess(room):
            return needed
        return needed._replace(host=min(needed.host, self.plans.needs(box.fastest).host))

    def without_misfits(self, box: Box) -> Box:
        """``box`` without numbers of kept layers, and of slots, that do not fit beside the least of all else;
        of kept layers some of them may be left."""

        def fits(axis: int, place: int) -> bool:
            return not self.least(box, box.at(moved(box.low, axis, place))).excess(self.plans.room)

        low, high = box.low[KEPT], box.high[KEPT]
        while low < high and (last := self.guess(box, low)) < high:
            if not fits(KEPT, last + 1):
                box = box.up_to(KEPT, last)
                break
            low = last + 1
        slots = range(box.high[SLOTS] + 1)
        too_many = bisect_left(slots, True, lo=box.low[SLOTS] + 1, key=lambda place: not fits(SLOTS, place))
        return box.up_to(SLOTS, too_many - 1)

    def guess(self, box: Box, low: int) -> int:
        """The last number of kept layers from ``low`` on that may fit beside the least of all else, if each
        layer takes as much as the next."""
        _, slots, size = box.low
        high = box.high[KEPT]
        least = self.least(box, box.at((low, slots, size)))
        most = self.plans.needs(box.at((high, slots, box.high[SIZES])))
        for place in range(high, low, -1):
            share = (place - low) / (high - low)
            between = Needs(*(int(a + share * (b - a)) for a, b in zip(least, most, strict=True)))
            if not between.excess(self.plans.room):
                return place
        return low

    def parts(self, box: Box) -> tuple[Box, Box]:
        """``box`` in two, those that are more likely to have the fastest choice that fits first."""
        kept, _, size = box.high
        if not box.is_one(KEPT) and self.is_last(box, kept):
            return box.cut(KEPT, kept)
        if box.is_one(KEPT) and not box.is_one(SIZES):
            return box.cut(SIZES, size)
        return box.halves()

    def is_last(self, box: Box, kept: int) -> bool:
        """Whether it is known that no more layers than ``kept`` can be kept."""
        if kept + 1 == len(box.choices.activations):
            return True
        more = box.at((kept + 1, *box.low[1:]))
        return self.plans.known(more) is not None and bool(self.plans.needs(more).excess(self.plans.room))

    def without_slow(self, box: Box, enough: float) -> Box:
        """``box`` without what takes more than ``enough`` seconds beside the most of all else."""
        low = list(box.low)
        for axis, (begin, last) in enumerate(zip(box.low, box.high, strict=True)):

            def is_fast(place: int, axis: int = axis) -> bool:
                return self.plans.seconds(box.at(moved(box.high, axis, place))) <= enough

            low[axis] = first(begin, last, is_fast, near_last=axis != SLOTS)
        return Box(box.choices, tuple(low), box.high)

    def fastest(self, boxes: Sequence[Box]) -> tuple[Choice | None, list[Box]]:
        """The fastest choice that fits, None if there is none, and all boxes where others may be as fast."""
        queue = Queue(boxes)
        for known, box in queue:
            with self.plans.leaving_out_ambiguous():
                seconds = self.plans.seconds(box.fastest)
                if seconds > known:
                    queue.put(seconds, box)
                elif self.cannot_fit(box):
                    continue
                elif (trimmed := self.without_misfits(box)) != box:
                    queue.put(seconds, trimmed)
                elif self.plans.fits(box.fastest):
                    return box.fastest, [box, *queue.left()]
                elif box.low != box.high:
                    queue.put(seconds, *self.parts(box))
        return None, []

    def smallest(self, boxes: Sequence[Box], enough: float) -> Choice | None:
        """The choice that takes the least memory of those that fit and take ``enough`` seconds or less."""
        queue = Queue(boxes)
        for known, box in queue:
            with self.plans.leaving_out_ambiguous():
                if self.plans.seconds(box.fastest) > enough or self.cannot_fit(box):
                    continue
                if (trimmed := self.without_misfits(box)) != box:
                    queue.put(known, trimmed)
                    continue
                box = self.without_slow(box, enough)
                nbytes = self.plans.needs(box.smallest).all
                if nbytes > known:
                    queue.put(nbytes, box)
                elif self.plans.fits(box.smallest) and self.plans.seconds(box.smallest) <= enough:
                    return box.smallest
                elif box.low != box.high:
                    queue.put(nbytes, *reversed(box.halves()))
        return None
