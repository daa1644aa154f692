"""The options of a step that are "auto": a short list of combinations is planned, and the fastest that fits
is taken.

[Note: chosen options]
A plan takes as long as a step on meta tensors, so few are made. First two slots, the whole batch, every graph
kept: if that fits and compute does not wait for copies, it is chosen. Else up to three batch sizes (the
largest that fits, the smallest, one between), with inputs on the device or in host memory, are planned with
no graph kept and with all kept. A line between the two estimates how many layers can keep their graphs, and
the step's seconds.
The most promising combinations are planned with the most kept layers that fit, found by bisection along that
line. Where compute still waits for copies, all are planned with as many slots as fit, too. One slot in place
of two is tried only where nothing fits with two.

The fastest of the list that fits is chosen. Steps whose predicted seconds agree in three digits count as
equally fast: the one with the fewest micro-batches is chosen, of these the one that takes least memory. An
exhaustive search over all combinations finds steps that are 1 % shorter on average
(`tests/planner/test_choosing.py`).
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Literal, NamedTuple

import torch
from tqdm import tqdm

from streamer.backends.base import Lane
from streamer.engine.layer.micro_batches import AmbiguousBatchError
from streamer.planner.step_plan import StepPlan
from streamer.store.ledger import Room, lacks, verdict

AUTO: Literal["auto"] = "auto"
#: A number that `streamer.wrap` may be told to choose.
Number = int | Literal["auto"] | None
Policies = str | tuple[str, ...] | Callable[[int], str]

#: Slices of a batch that are tried at most: a plan takes time for each of them, and so does a step.
MOST_SLICES = 256
#: The share of a step that compute may wait for copies before more slots are tried.
WAITING = 0.01


class Choice(NamedTuple):
    """Options of `streamer.wrap`."""

    activations: Policies
    num_slots: int | None
    micro_batch_size: int | None

    def options(self) -> dict[str, Any]:
        """The options by name. A choice without micro-batches drops the user's ``batch_dims``."""
        return self._asdict() | ({"batch_dims": None} if self.micro_batch_size is None else {})

    def __str__(self) -> str:
        size = self.micro_batch_size
        batch = "" if size is None else f" and micro-batches of {size}"
        slots = "" if self.num_slots is None else f", {self.num_slots} slot{'s' * (self.num_slots > 1)}"
        return f"{_told(self.activations)}{slots}{batch}"


def may_be_auto(options: object) -> tuple[Any, Any, Any]:
    """Those of `streamer.wrap`'s ``options`` that it may be told to choose, in the order of a `Choice`."""
    return attrgetter(*Choice._fields)(options)


def _told(activations: Policies) -> str:
    if isinstance(activations, str):
        return f"'{activations}' in all layers"
    if not isinstance(activations, tuple):
        return "the given activations"
    runs = [(policy, len(list(of_one))) for policy, of_one in itertools.groupby(activations)]
    return ", then ".join(f"'{policy}' in {count} layer{'s' * (count > 1)}" for policy, count in runs)


@dataclass(frozen=True)
class Options:
    """What there is to choose from: activation policies, the most layers that may keep their graphs in their
    place (the last ones), rising numbers of slots, falling sizes of micro-batches (None: the whole batch)."""

    layers: int
    policies: tuple[Policies, ...]
    most_kept: int
    num_slots: tuple[int | None, ...]
    sizes: tuple[int | None, ...]

    @staticmethod
    def of(
        asked: tuple[str | Sequence[str] | Callable[[int], str], Number, Number],
        *,
        layers: int,
        batch: int,
    ) -> Options:
        """Everything that activations, num_slots and micro_batch_size may be where ``asked``, `may_be_auto`,
        has "auto" for them; the others stay as they are."""
        given, num_slots, micro_batch_size = asked
        activations = given if callable(given) or isinstance(given, str) else tuple(given)
        is_auto = activations == AUTO
        return Options(
            layers,
            ("recompute", "recompute+offload") if is_auto else (activations,),
            layers if is_auto else 0,
            tuple(range(1, layers + 1)) if num_slots == AUTO else (num_slots,),
            (None, *sizes_below(batch)) if micro_batch_size == AUTO else (micro_batch_size,),
        )

    @property
    def is_given(self) -> bool:
        """Whether there is nothing to choose."""
        counts = len(self.policies), len(self.num_slots), len(self.sizes)
        return self.most_kept == 0 and counts == (1, 1, 1)

    def choice(self, policy: Policies, kept: int, slots: int | None, size: int | None) -> Choice:
        """The last ``kept`` layers keep their graphs, the others run by ``policy``."""
        if kept == 0:
            return Choice(policy, slots, size)
        mixed = (str(policy),) * (self.layers - kept) + ("keep",) * kept
        return Choice("keep" if kept == self.layers else mixed, slots, size)


def sizes_below(batch: int) -> list[int]:
    """Micro-batch sizes worth a try, the largest first: the powers of two below ``batch`` of which it has
    `MOST_SLICES` or fewer."""
    powers = (1 << power for power in reversed(range((batch - 1).bit_length())))
    return [size for size in powers if batch <= size * MOST_SLICES]


PlanOf = Callable[[Choice], StepPlan]


@dataclass(frozen=True)
class Chosen:
    """What was chosen, its plan, why, and the short list: all that was planned for ``room``."""

    choice: Choice
    plan: StepPlan
    reason: str
    considered: Mapping[Choice, StepPlan]
    room: Room

    def lines(self) -> Iterator[str]:
        """The short list as a table, the fastest first."""
        yield f"{'step s':>8}{'device':>12}{'host':>12}"
        for choice, plan in sorted(self.considered.items(), key=lambda one: _rank(*one)):
            short = [tier for tier in plan.tiers(self.room) if tier.lacking]
            lacking = " and ".join(f"{tier.name} lacks {_gib(tier.lacking)}" for tier in short)
            told = f": {lacking}" if short else " (chosen)" if choice == self.choice else ""
            sizes = f"{_gib(plan.device_needed):>12}{_gib(plan.host_total):>12}"
            yield f"{_seconds(plan):>8.3g}{sizes}  {choice}{told}"


def _gib(nbytes: int) -> str:
    return f"{nbytes / (1 << 30):.2f} GiB"


def choose(plan_of: PlanOf, options: Options, room: Room) -> Chosen:
    """The fastest choice of a short list of ``options`` that fits into ``room``. [Note: chosen options]

    ``plan_of`` plans a choice with room for anything. Micro-batches are left out if AmbiguousBatchError is
    raised for them; it is raised where nothing else may be chosen. Raises MemoryError, with what the nearest
    choice needs and what there is, where nothing fits. Meanwhile a bar counts the plans, if stderr is a
    terminal.
    """
    # disable=None: unless it is a terminal
    with (
        tqdm(desc="'auto'", unit=" plans", disable=None, leave=False) as bar,
        torch.random.fork_rng(devices=()),
    ):
        found = _ShortList(plan_of, options, room, bar)
        found.fill()
    best = found.best()
    if best is None:
        raise MemoryError(found.nothing_fits())
    return Chosen(best, found.made[best], found.reason(best), found.made, room)


class _Start(NamedTuple):
    """A combination but for the layers that keep their graphs: the policy is that of the others."""

    policy: Policies
    num_slots: int | None
    size: int | None


@dataclass
class _ShortList:
    """Plans of combinations, each made once."""

    plan_of: PlanOf
    options: Options
    room: Room
    bar: tqdm[Any]
    made: dict[Choice, StepPlan] = field(default_factory=dict)
    ambiguous: AmbiguousBatchError | None = None

    def fill(self) -> None:
        """Make the plans of the short list. [Note: chosen options]"""
        try:
            self._fill(self.options.sizes)
        except AmbiguousBatchError as error:
            if None not in self.options.sizes:
                raise
            self.ambiguous = error
            self._fill((None,))

    def _fill(self, sizes: tuple[int | None, ...]) -> None:
        options = self.options
        # two slots, or the only number that there is; then one
        for slots in dict.fromkeys((options.num_slots[:2][-1], options.num_slots[0])):
            fastest = options.choice(options.policies[0], options.most_kept, slots, sizes[0])
            if not lacks(self._plan(fastest).tiers(self.room)) and not self._waits_for_copies(fastest):
                return
            starts = [
                _Start(policy, slots, size)
                for size in self._sizes_to_try(sizes, slots)
                for policy in options.policies
            ]
            starts = [start for start in starts if self._has_device(start, 0)]
            kept: dict[_Start, int] = {}
            for start in sorted(starts, key=self._estimate):
                best = self.best()
                if best is None or self._estimate(start) <= _seconds(self.made[best]):
                    kept[start] = self._most_kept(start)
            best = self.best()
            if best is None:
                continue
            if len(options.num_slots) > 1 and self._waits_for_copies(best):
                for start in starts:
                    for count in {0, kept.get(start, 0) // 2, kept.get(start, 0)}:
                        self._plan_most_slots(start, count)
            return

    def _plan(self, choice: Choice) -> StepPlan:
        if choice not in self.made:
            self.made[choice] = self.plan_of(choice)
            self.bar.update()
        return self.made[choice]

    def _plan_kept(self, start: _Start, kept: int) -> StepPlan:
        return self._plan(self.options.choice(start.policy, kept, start.num_slots, start.size))

    def _lack(self, start: _Start, kept: int) -> int:
        """Bytes that the device lacks, below 0 where it has room. Host memory does not count: layers that are
        kept save some of it."""
        plan = self._plan_kept(start, kept)
        tiers = plan.tiers(self.room) if self.room.shared else plan.device_tiers(self.room)
        return max(tier.needed - tier.available for tier in tiers)

    def _has_device(self, start: _Start, kept: int) -> bool:
        return self._lack(start, kept) <= 0

    def _sizes_to_try(self, sizes: tuple[int | None, ...], slots: int | None) -> list[int | None]:
        """The largest of ``sizes`` that fits with no graph kept, the smallest, and one between."""

        def fits(size: int | None) -> bool:
            starts = (_Start(policy, slots, size) for policy in self.options.policies)
            return any(self._has_device(start, 0) for start in starts)

        first = 0 if fits(sizes[0]) else bisect_left(sizes, True, lo=1, key=fits)
        last = len(sizes) - 1
        return [sizes[place] for place in sorted({first, (first + last) // 2, last}) if place <= last]

    def _share(self, start: _Start, low: int, high: int) -> float:
        """How far between ``low`` and ``high`` kept layers device memory runs out, by a line (0 to 1)."""
        has, lacks = -self._lack(start, low), self._lack(start, high)
        return 1.0 if lacks <= 0 else has / (has + lacks)

    def _estimate(self, start: _Start) -> float:
        """Seconds of a step with the most kept layers that fit, along a line from none to all."""
        most = self.options.most_kept
        none, every = (_seconds(self._plan_kept(start, kept)) for kept in (0, most))
        return none + self._share(start, 0, most) * (every - none)

    def _most_kept(self, start: _Start) -> int:
        """The most layers that can keep their graphs, found by bisection; all that it looks at is planned."""
        low, high = 0, self.options.most_kept
        if self._has_device(start, high):
            return high
        while high - low > 1:
            guess = low + int(self._share(start, low, high) * (high - low) + 1e-9)
            middle = min(max(low + 1, guess), high - 1)
            low, high = (middle, high) if self._has_device(start, middle) else (low, middle)
        return low

    def _waits_for_copies(self, choice: Choice) -> bool:
        prediction = self.made[choice].prediction
        return prediction.exposed_seconds[Lane.H2D] > WAITING * prediction.seconds

    def _plan_most_slots(self, start: _Start, kept: int) -> None:
        """Plan ``kept`` layers with as many slots as fit beside them."""
        plan = self._plan_kept(start, kept)
        fit = [slots for slots in self.options.num_slots if not lacks(plan.tiers(self.room, slots))]
        if fit:
            self._plan_kept(start._replace(num_slots=fit[-1]), kept)

    def best(self) -> Choice | None:
        """The fastest that fits."""
        fit = [choice for choice, plan in self.made.items() if not lacks(plan.tiers(self.room))]
        return min(fit, key=lambda choice: _rank(choice, self.made[choice]), default=None)

    def reason(self, choice: Choice) -> str:
        """Why ``choice`` was chosen, for the user."""
        plan = self.made[choice]
        told = f"{choice}: a step of {_seconds(plan):.3g} s is predicted"
        faster = [other for other in self.made.items() if _digits(other[1]) < _digits(plan)]
        if faster:
            # the slowest of them: it lacks least
            other, its_plan = max(faster, key=lambda one: (_seconds(one[1]), -_needed(one[1])))
            short = lacks(its_plan.tiers(self.room))
            told += f"; {other} would take {_seconds(its_plan):.3g} s, for which {short}"
        elif not self.options.is_given:
            told += f", and no other of {len(self.made)} combinations is faster"
        if self.ambiguous is not None:
            told += f". Micro-batches are left out: {self.ambiguous}"
        return told

    def nothing_fits(self) -> str:
        """What the nearest miss lacks."""
        tiers = {choice: plan.tiers(self.room) for choice, plan in self.made.items()}
        nearest = min(tiers, key=lambda choice: sum(tier.lacking for tier in tiers[choice]))
        if self.options.is_given:
            told = verdict(f"a step with {nearest} on a batch like the example", tiers[nearest])
            *names, last = Choice._fields
            return f"{told}: give 'auto' for {', '.join(names)} and {last}, or a smaller batch"
        told = verdict(f"any options that 'auto' may choose; the nearest are {nearest}", tiers[nearest])
        return (
            f"{told}: use a smaller batch or dtype=torch.bfloat16, freeze parameters, or stream parts of "
            "layers (wrap(layers=...) takes globs)"
        )


def _seconds(plan: StepPlan) -> float:
    return plan.prediction.seconds


def _digits(plan: StepPlan) -> float:
    """Its seconds in three digits."""
    return float(f"{_seconds(plan):.3g}")


def _needed(plan: StepPlan) -> int:
    return plan.device_needed + plan.host_total


def _rank(choice: Choice, plan: StepPlan) -> tuple[float, float, int]:
    """The faster is less; of those as fast the one with fewer micro-batches, then with less memory."""
    return _digits(plan), -(choice.micro_batch_size or math.inf), _needed(plan)
