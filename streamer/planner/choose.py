"""Options that are "auto": the planner plans three candidates and takes the fastest that fits.

[Note: chosen options]
The candidates are: all graphs kept, with the whole batch; recompute, with the whole batch; recompute with
inputs in host memory, and the largest micro-batches that fit. An option that is not "auto" is the same in
all. If ``num_slots`` is "auto", a candidate is planned with two slots, and again with as many as fit with the
rest of its step, at least one. Steps whose seconds agree to three digits count as equally fast; the one that
needs the least memory wins.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from streamer.engine.layer.micro_batches import AmbiguousBatchError
from streamer.model.options import AUTO
from streamer.planner.step import StepPlan
from streamer.store.ledger import Room, lacks, verdict

Policies = str | tuple[str, ...] | Callable[[int], str]

#: The most slices of a batch to try: each slice costs time in a step.
MOST_SLICES = 256


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
        return f"{_in_words(self.activations)}{slots}{batch}"


def may_be_auto(options: object) -> tuple[Any, Any, Any]:
    """Those of `streamer.wrap`'s ``options`` that may be "auto", in the order of `Choice`."""
    return attrgetter(*Choice._fields)(options)


def _in_words(activations: Policies) -> str:
    if isinstance(activations, str):
        return f"'{activations}' in all layers"
    if not isinstance(activations, tuple):
        return "the function for activations"
    runs = [(policy, len(list(of_one))) for policy, of_one in itertools.groupby(activations)]
    return ", then ".join(f"'{policy}' in {count} layer{'s' * (count > 1)}" for policy, count in runs)


@dataclass(frozen=True)
class Chosen:
    """The choice, its plan, the reason, and all plans considered for ``room``."""

    choice: Choice
    plan: StepPlan
    reason: str
    considered: Mapping[Choice, StepPlan]
    room: Room

    def lines(self) -> Iterator[str]:
        """The candidates as a table, the fastest first."""
        yield f"{'step s':>8}{'device':>12}{'host':>12}"
        for choice, plan in sorted(self.considered.items(), key=lambda one: _rank(one[1])):
            short = [tier for tier in plan.tiers(self.room) if tier.lacking]
            lacking = " and ".join(f"{tier.name} lacks {_gib(tier.lacking)}" for tier in short)
            verdict = f": {lacking}" if short else " (chosen)" if choice == self.choice else ""
            sizes = f"{_gib(plan.device_needed):>12}{_gib(plan.host_total):>12}"
            yield f"{plan.prediction.seconds:>8.3g}{sizes}  {choice}{verdict}"


def _gib(nbytes: int) -> str:
    return f"{nbytes / (1 << 30):.2f} GiB"


PlanOf = Callable[[Choice], StepPlan]


def choose(
    plan_of: PlanOf,
    options: tuple[str | Sequence[str] | Callable[[int], str], Any, Any],
    room: Room,
    *,
    layers: int,
    batch: int,
) -> Chosen:
    """The fastest candidate that fits into ``room``, for those of ``options`` (from `may_be_auto`) that are
    "auto". [Note: chosen options]

    ``plan_of`` plans a choice with unlimited memory. Micro-batches are left out if it raises
    AmbiguousBatchError for them; the error propagates if there is no other choice. Raises MemoryError, with
    the needs of the nearest candidate, if none fits. A bar counts the plans, if stderr is a terminal.
    """
    planned: dict[Choice, StepPlan] = {}
    ambiguous = ""
    is_auto = AUTO in options
    # disable=None: only on a terminal
    with (
        tqdm(desc="'auto'", unit=" plans", disable=None, leave=False) as bar,
        torch.random.fork_rng(devices=()),
    ):

        def fits(choice: Choice) -> bool:
            if choice not in planned:
                planned[choice] = plan_of(choice)
                bar.update()
            return not lacks(planned[choice].tiers(room))

        for candidate in _candidates(options, layers, batch):
            try:
                # sizes of micro-batches, the largest first
                choice = next((one for one in candidate if fits(one)), candidate[-1])
            except AmbiguousBatchError as error:
                if options[2] != AUTO:
                    raise
                ambiguous = f". Micro-batches are left out: {error}"
                continue
            for one in candidate[: candidate.index(choice)]:
                del planned[one]
            slots = _most_slots(planned[choice], room, layers) if options[1] == AUTO else 0
            if slots not in (0, choice.num_slots) and fits(choice._replace(num_slots=slots)):
                del planned[choice]
    fitting = {choice: plan for choice, plan in planned.items() if not lacks(plan.tiers(room))}
    if not fitting:
        raise MemoryError(_nothing_fits(planned, room, is_auto=is_auto))
    best = min(fitting, key=lambda choice: _rank(fitting[choice]))
    reason = _reason(best, planned, room, is_auto=is_auto)
    return Chosen(best, planned[best], reason + ambiguous, planned, room)


def _candidates(options: tuple[Any, Any, Any], layers: int, batch: int) -> list[list[Choice]]:
    """The candidates; the one with micro-batches has one entry for each size, the largest first."""
    activations, num_slots, size = options
    if not (callable(activations) or isinstance(activations, str)):
        activations = tuple(activations)
    slots = min(2, layers) if num_slots == AUTO else num_slots
    whole = None if size == AUTO else size
    sizes: list[int | None] = [*sizes_below(batch)] if size == AUTO else [size]
    if activations == AUTO:
        candidates = [
            [Choice("keep", slots, whole)],
            [Choice("recompute", slots, whole)],
            [Choice("recompute+offload", slots, each) for each in sizes or [None]],
        ]
    else:
        in_slices = [Choice(activations, slots, each) for each in sizes or [None]]
        candidates = [[Choice(activations, slots, whole)], in_slices]
    return candidates


def sizes_below(batch: int) -> list[int]:
    """Micro-batch sizes to try, the largest first: the powers of two below ``batch`` that cut it into at most
    `MOST_SLICES`."""
    powers = (1 << power for power in reversed(range((batch - 1).bit_length())))
    return [size for size in powers if batch <= size * MOST_SLICES]


def _most_slots(plan: StepPlan, room: Room, layers: int) -> int:
    """The most slots that fit with the rest of ``plan``, 0 if the plan itself does not fit."""
    return max((slots for slots in range(1, layers + 1) if not lacks(plan.tiers(room, slots))), default=0)


def _digits(plan: StepPlan) -> float:
    """The plan's seconds to three digits."""
    return float(f"{plan.prediction.seconds:.3g}")


def _rank(plan: StepPlan) -> tuple[float, int]:
    """Less is better: seconds, then bytes among equally fast plans."""
    return _digits(plan), plan.device_needed + plan.host_total


def _reason(choice: Choice, planned: Mapping[Choice, StepPlan], room: Room, *, is_auto: bool) -> str:
    plan = planned[choice]
    words = f"{choice}: a step of {plan.prediction.seconds:.3g} s is predicted"
    faster = {other: found for other, found in planned.items() if _digits(found) < _digits(plan)}
    if faster:
        # the slowest of them lacks the least
        other = max(faster, key=lambda one: faster[one].prediction.seconds)
        short = lacks(faster[other].tiers(room))
        return f"{words}; {other} would take {faster[other].prediction.seconds:.3g} s, for which {short}"
    return f"{words}, and no other of {len(planned)} candidates is faster" if is_auto else words


def _nothing_fits(planned: Mapping[Choice, StepPlan], room: Room, *, is_auto: bool) -> str:
    """An error message with the lack of the nearest candidate."""
    tiers = {choice: plan.tiers(room) for choice, plan in planned.items()}
    nearest = min(tiers, key=lambda choice: sum(tier.lacking for tier in tiers[choice]))
    if not is_auto:
        words = verdict(f"a step with {nearest} on a batch like the example", tiers[nearest])
        *names, last = Choice._fields
        return f"{words}: set {', '.join(names)} and {last} to 'auto', or use a smaller batch"
    words = verdict(f"any options that 'auto' may choose; the nearest are {nearest}", tiers[nearest])
    return (
        f"{words}: use a smaller batch or dtype=torch.bfloat16, freeze parameters, or stream parts of "
        "layers (wrap(layers=...) takes globs)"
    )
