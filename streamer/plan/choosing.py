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

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from tqdm import tqdm

from streamer.plan.box import KEPT, SIZES, SLOTS, Box, Queue, first, moved
from streamer.plan.choices import Choice, Choices, Needs, Room, needs
from streamer.plan.plans import AS_FAST, Plans
from streamer.plan.step_plan import StepPlan

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
