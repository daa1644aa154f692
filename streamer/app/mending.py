"""What would make a run fit that does not, and the largest batch that does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from streamer.app.config import Config, ConfigError
from streamer.app.planning import RunPlan, with_options

PlanOf = Callable[[Config], RunPlan]

#: How many sizes of micro-batches are tried, each a quarter of the one before.
MICRO_BATCHES = 3
#: How often a batch that turned out to be too large is made smaller by a twentieth.
TRIES = 8
#: The largest batch that is looked for is so many times the largest of the table.
FURTHEST = 16


@dataclass(frozen=True)
class Mend:
    """Keys of the config (``section.key``) to be changed, and the plan with them."""

    changes: Mapping[str, Any]
    plan: RunPlan


@dataclass(frozen=True)
class _Remedy:
    """One kind of change: which side of the memory it helps, and the configs to try, the mildest first."""

    helps_device: bool
    helps_host: bool
    configs: Callable[[Config], Iterator[tuple[dict[str, Any], Config]]]


def mend(plan: RunPlan, plan_of: PlanOf) -> Mend | None:
    """The changes that make ``plan`` fit, tried in the order of what they cost and added up; None where all
    of them together do not."""
    changes: dict[str, Any] = {}
    is_shared = plan.machine.kind == "cpu"
    for remedy in _REMEDIES:
        for changed, config in remedy.configs(plan.config):
            helps_host = remedy.helps_host or (is_shared and remedy.helps_device)
            if not (remedy.helps_device and not plan.fits_device or helps_host and not plan.fits_host):
                break
            try:
                tried = plan_of(config)
            except ConfigError:
                continue  # not for this model (moments in 8 bits of fp32 parameters)
            if _is_better(tried, plan):
                changes, plan = changes | changed, tried
    return Mend(changes, plan) if plan.fits and changes else None


def _is_better(tried: RunPlan, plan: RunPlan) -> bool:
    """Whether it needs less of what does not suffice."""
    device = not plan.fits_device and (tried.fits_device or tried.device_needed < plan.device_needed)
    host = not plan.fits_host and (tried.fits_host or tried.host_needed < plan.host_needed)
    return device or host


def _micro_batches(config: Config) -> Iterator[tuple[dict[str, Any], Config]]:
    given = config.stream.micro_batch_size
    size = given if isinstance(given, int) else config.data.batch_size
    for _ in range(MICRO_BATCHES):
        if size > 1:
            size = max(1, size // 4)
            yield _changed(config, "stream", micro_batch_size=size)


def _offload(config: Config) -> Iterator[tuple[dict[str, Any], Config]]:
    if config.stream.activations != "recompute+offload":
        yield _changed(config, "stream", activations="recompute+offload")


def _batches(config: Config) -> Iterator[tuple[dict[str, Any], Config]]:
    size = config.data.batch_size
    while size > 1:
        size //= 2
        yield _changed(config, "data", batch_size=size)


def _moments(state_dtype: str) -> Callable[[Config], Iterator[tuple[dict[str, Any], Config]]]:
    def configs(config: Config) -> Iterator[tuple[dict[str, Any], Config]]:
        if config.optimizer.state_dtype != state_dtype:
            yield _changed(config, "optimizer", state_dtype=state_dtype)

    return configs


def _one_slot(config: Config) -> Iterator[tuple[dict[str, Any], Config]]:
    if config.stream.num_slots != 1:
        yield _changed(config, "stream", num_slots=1)


_REMEDIES = (
    _Remedy(helps_device=True, helps_host=False, configs=_micro_batches),
    _Remedy(helps_device=True, helps_host=False, configs=_offload),
    _Remedy(helps_device=True, helps_host=True, configs=_batches),
    _Remedy(helps_device=False, helps_host=True, configs=_moments("bfloat16")),
    _Remedy(helps_device=False, helps_host=True, configs=_moments("int8")),
    _Remedy(helps_device=True, helps_host=False, configs=_one_slot),
)


def _changed(config: Config, section: str, **keys: Any) -> tuple[dict[str, Any], Config]:
    return {f"{section}.{key}": value for key, value in keys.items()}, with_options(config, **{section: keys})


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
