"""Plans of a config with other batches, and with changes that would make it fit or speed it up."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from streamer.cli.config import Config, ConfigError, with_keys
from streamer.cli.plan.planning import RunPlan, RunPlanOf, with_changes

#: The batches of the table, as shares of the config's.
SHARES = (0.25, 0.5, 1, 2, 4)
#: How often a batch that turned out to be too large is reduced by a twentieth.
TRIES = 8
#: The largest batch that is tried is so many times the largest of the table.
FURTHEST = 16
#: The share of a step that compute may wait for a disk that counts as hidden.
WAITING = 0.01


def batches(config: Config, plan_of: RunPlanOf) -> Iterator[RunPlan]:
    """Plans of ``config`` with smaller and larger batches, and with its own, in the order of their sizes."""
    own = config.train.per_device_train_batch_size
    for size in sorted({max(1, int(own * share)) for share in SHARES}):
        yield plan_of(config if size == own else with_batch(config, size))


def with_batch(config: Config, batch_size: int) -> Config:
    """``config`` with another batch and no more slots than it has a number for, else two."""
    slots = config.stream.num_slots or 2
    return with_keys(config, train={"per_device_train_batch_size": batch_size}, stream={"num_slots": slots})


def largest_batch(plan: RunPlan, table: Sequence[RunPlan], plan_of: RunPlanOf) -> RunPlan | None:
    """The plan of the largest batch that fits, give or take a twentieth; None where not even one sequence
    does. Bytes grow evenly with the batch: a line through two plans of ``table`` says where one runs out."""
    alike = [one for one in table if one.config.stream.num_slots is not None]
    fitting = sum(one.fits for one in alike)
    # the last that fits and the first that does not
    small, large = alike[max(0, min(fitting, len(alike) - 1) - 1) :][:2]
    sizes = small.config.train.per_device_train_batch_size, large.config.train.per_device_train_batch_size
    batch = FURTHEST * sizes[1]
    for low, high in zip(small.tiers, large.tiers, strict=True):
        if high.needed > low.needed:
            each = (high.needed - low.needed) / (sizes[1] - sizes[0])
            batch = min(batch, int(sizes[0] + (low.available - low.needed) / each))
        elif low.lacking:
            return None
    for _ in range(TRIES):
        if batch < 1:
            return None
        found = plan_of(with_batch(plan.config, batch))
        if found.fits:
            return found
        batch -= max(1, batch // 20)
    return None


def is_furthest(plan: RunPlan, table: Sequence[RunPlan]) -> bool:
    """Whether no larger batch was tried."""
    return (
        plan.config.train.per_device_train_batch_size
        >= FURTHEST * table[-1].config.train.per_device_train_batch_size
    )


def waiting_for_disk(plan: RunPlan, plan_of: RunPlanOf) -> float:
    """How much shorter a step would be with all in host memory, as a share of it. Exposed seconds do not say
    this: they count an update that waits behind one that waits for the disk as its own lane's."""
    in_memory = plan_of(with_keys(plan.config, stream={"host_memory": None, "disk": None}))
    return 1 - in_memory.step.prediction.seconds / plan.step.prediction.seconds


def least_batch_that_hides_disk(plan: RunPlan, plan_of: RunPlanOf) -> RunPlan | None:
    """``plan`` if its step takes as long as one with all in host memory, else the plan of the smallest larger
    batch, give or take a tenth, whose step does; None where no batch up to `FURTHEST` times as large does. A
    larger batch computes longer, and moves no more to and from disk."""

    def is_hidden(one: RunPlan) -> bool:
        return one.beyond_disk is None and waiting_for_disk(one, plan_of) <= WAITING

    if plan.beyond_disk is not None:
        return None
    if is_hidden(plan):
        return plan
    low = high = plan.config.train.per_device_train_batch_size
    while not is_hidden(found := plan_of(with_batch(plan.config, high := 2 * high))):
        low = high
        if high >= FURTHEST * plan.config.train.per_device_train_batch_size:
            return None
    while high - low > max(1, high // 10):
        middle = (low + high) // 2
        if is_hidden(tried := plan_of(with_batch(plan.config, middle))):
            found, high = tried, middle
        else:
            low = middle
    return found


@dataclass(frozen=True)
class Changed:
    """Keys of the config to change, ``section.key``, the plan with them, and what they cost (``but``)."""

    changes: Mapping[str, Any]
    plan: RunPlan
    but: str = ""


#: A plan opens no folder.
DISK: Mapping[str, Any] = {"stream.disk": "DIR"}


def remedies(config: Config) -> Iterator[Mapping[str, Any]]:
    """Changes that save memory, the cheapest first."""
    size = config.stream.micro_batch_size
    size = size if isinstance(size, int) else config.train.per_device_train_batch_size
    for smaller in sorted({max(1, size // 4), 1}, reverse=True):
        if smaller < size:
            yield {"stream.micro_batch_size": smaller}
    if config.stream.activations != "recompute+offload":
        yield {"stream.activations": "recompute+offload"}
    shorter = {"float32": ("bfloat16", "int8"), "bfloat16": ("int8",)}
    for dtype in shorter.get(config.optimizer.state_dtype, ()):
        yield {"optimizer.state_dtype": dtype}
    if config.stream.disk is None:
        yield DISK
    if config.model.path is not None and not config.lora:
        yield {"lora.r": 16}
    if config.model.path is not None and config.model.quantize == "none":
        # which needs adapters: by now there are some, or they cannot be
        for kind in ("int8", "nf4"):
            yield {"model.quantize": kind}


def find_remedies(plan: RunPlan, plan_of: RunPlanOf) -> Changed:
    """The `remedies` that help ``plan``, added up until it fits, without those that it fits without; all that
    help if it does not fit with them."""
    best = Changed({}, plan)
    for changes in remedies(plan.config):
        tried = _tried(plan, {**best.changes, **changes}, plan_of)
        if tried is not None and tried.lack < best.plan.lack:
            best = Changed({**best.changes, **changes}, tried)
            if tried.fits:
                break
    for key in [*best.changes] if best.plan.fits else ():
        fewer = {other: value for other, value in best.changes.items() if other != key}
        if (tried := _tried(plan, fewer, plan_of)) is not None and tried.fits:
            best = Changed(fewer, tried)
    return best


def on_disk(plan: RunPlan, plan_of: RunPlanOf) -> Changed | None:
    """``plan`` with a disk, if it fits with it and nothing else."""
    tried = None if plan.has_disk or plan.fits_host else _tried(plan, DISK, plan_of)
    return Changed(DISK, tried) if tried is not None and tried.fits else None


def _tried(plan: RunPlan, changes: Mapping[str, Any], plan_of: RunPlanOf) -> RunPlan | None:
    try:
        return plan_of(with_changes(plan.config, changes))
    except ConfigError:
        return None  # not for this model: moments in 8 bits of fp32 parameters, say


#: The least gain that is worth a line.
GAIN = 1.05
#: Of a GPU's memory for stream.device_memory: the rest is the desktop's, and other processes'.
SHARE_OF_DEVICE = 0.94


def faster(plan: RunPlan, plan_of: RunPlanOf) -> list[Changed]:
    """Changes that speed ``plan``, which fits, up by a twentieth or more: each alone, the best first."""
    config, stream, ranks = plan.config, plan.config.stream, plan.machine.ranks
    prediction = plan.step.prediction
    # at most what a step waits for: these changes leave its computation as it is
    can_gain = prediction.seconds > GAIN * prediction.compute_seconds
    in_one_pass = _one_pass(config)
    budget = f"{int(SHARE_OF_DEVICE * plan.machine.device_bytes) >> 20}MiB"
    without_clipping = {"stream.update": "backward", "train.max_grad_norm": 0.0, **in_one_pass}
    has_room = stream.device_memory is None and stream.num_slots is None and not plan.room.shared
    size, batch = stream.micro_batch_size, config.train.per_device_train_batch_size
    larger = {}
    if isinstance(size, int) and size < batch:
        larger = {"stream.micro_batch_size": min(2 * size, batch)}
    changes: list[tuple[Mapping[str, Any], bool, str]] = [
        (without_clipping, can_gain and stream.update == "step", ", but without clipping"),
        (in_one_pass, can_gain, ""),
        ({"stream.device_memory": budget}, can_gain and has_room, ""),
        ({"stream.gather_weights": True}, can_gain and ranks > 1 and not stream.gather_weights, ""),
        ({"stream.activations": "keep"}, stream.activations != "keep", ""),
        ({"stream.activations": "recompute"}, can_gain and stream.activations == "recompute+offload", ""),
        (larger, can_gain, ""),
        ({"train.per_device_train_batch_size": 2 * batch}, can_gain, ", with twice the batch"),
    ]
    found = [
        Changed(change, tried, but)
        for change, applies, but in changes
        if change and applies and (tried := _tried(plan, change, plan_of)) is not None
        if tried.fits and tried.tokens_per_second > GAIN * plan.tokens_per_second
    ]
    return sorted(found, key=lambda one: -one.plan.tokens_per_second)


def _one_pass(config: Config) -> Mapping[str, Any]:
    """The changes that run all sequences of a step in one forward and backward; none if they do."""
    if config.train.gradient_accumulation_steps == 1:
        return {}
    size = {"train.per_device_train_batch_size": config.train.batch_size}
    return {**size, "train.gradient_accumulation_steps": 1}
