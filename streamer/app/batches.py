"""How a plan moves with the batch, and the largest batch that fits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from streamer.app.config import Config
from streamer.app.planning import PlanOf, RunPlan, with_options

#: What the batches of the table are of the config's.
SHARES = (0.25, 0.5, 1, 2, 4)
#: How often a batch that turned out to be too large is made smaller by a twentieth.
TRIES = 8
#: The largest batch that is looked for is so many times the largest of the table.
FURTHEST = 16


def batches(config: Config, plan_of: PlanOf) -> Iterator[RunPlan]:
    """Plans of ``config`` with smaller and larger batches, and with its own, in the order of their sizes."""
    own = config.data.batch_size
    for size in sorted({max(1, int(own * share)) for share in SHARES}):
        yield plan_of(config if size == own else with_batch(config, size))


def with_batch(config: Config, batch_size: int) -> Config:
    """``config`` with another batch, and no more slots than it asks for: more of them than two give way to a
    larger batch."""
    return replace(
        with_options(config, data={"batch_size": batch_size}),
        stream=replace(config.stream, num_slots=config.stream.num_slots or 2),
    )


def largest_batch(plan: RunPlan, batches: Sequence[RunPlan], plan_of: PlanOf) -> RunPlan | None:
    """The plan of the largest batch that fits, give or take a twentieth; None where not even one sequence
    does. What a batch takes grows evenly with it, so two of ``batches``, of rising sizes, tell it, and one
    more plan is held against it.
    """
    alike = [one for one in batches if one.config.stream.num_slots is not None]
    fitting = sum(one.fits for one in alike)
    # the last that fits and the first that does not
    small, large = alike[max(0, min(fitting, len(alike) - 1) - 1) :][:2]
    batch = _estimate(small, large)
    for _ in range(TRIES):
        if batch < 1:
            return None
        found = plan_of(with_batch(plan.config, batch))
        if found.fits:
            return found
        batch -= max(1, batch // 20)
    return None


def is_furthest(plan: RunPlan, batches: Sequence[RunPlan]) -> bool:
    """Whether no larger one was looked for."""
    return plan.config.data.batch_size >= FURTHEST * batches[-1].config.data.batch_size


def _estimate(small: RunPlan, large: RunPlan) -> int:
    """The batch at which the line through both meets what there is of the device or of the host."""
    sizes = small.config.data.batch_size, large.config.data.batch_size
    budget = small.device_budget or small.machine.device_bytes
    sides = [
        (small.device_allocated, large.device_allocated, budget),
        (small.device_needed, large.device_needed, small.machine.device_bytes),
        (small.host_needed, large.host_needed, small.machine.host_bytes),
    ]
    most = FURTHEST * sizes[1]
    for low, high, room in sides:
        each = (high - low) / (sizes[1] - sizes[0])
        if each > 0:
            most = min(most, int(sizes[0] + (room - low) / each))
        elif low > room:
            return 0
    return most
