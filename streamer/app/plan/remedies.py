"""What would make a run fit that does not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from streamer.app.config import Config, ConfigError
from streamer.app.plan.planning import RunPlan, RunPlanOf, with_options
from streamer.store.ledger import UNLIMITED

#: How many sizes of micro-batches are tried, each a quarter of the one before.
MICRO_BATCHES = 3


@dataclass(frozen=True)
class Remedies:
    """Keys of the config (``section.key``) to be changed, and the plan with them, which fits if anything
    does; and those to be changed where there is a disk as well, if it fits with that. The base of adapters is
    quantized only where nothing exact fits into memory."""

    changes: Mapping[str, Any]
    plan: RunPlan
    on_disk: Remedies | None


@dataclass(frozen=True)
class Faster:
    """Keys of the config to be changed, the plan with them, which fits and is faster, and at what cost
    (``but``)."""

    changes: Mapping[str, Any]
    plan: RunPlan
    but: str = ""


#: What is worth to be told: so much more tokens/s.
GAIN = 1.05
#: Of a GPU's memory for stream.device_memory: the rest is the desktop's, and other processes'.
SHARE_OF_DEVICE = 0.94


def faster(plan: RunPlan, plan_of: RunPlanOf) -> list[Faster]:
    """What would make a run of ``plan``, which fits, faster by a twentieth or more: each change alone, the
    best first."""
    found = []
    for changes, but in _changes(plan):
        try:
            tried = plan_of(_with_all(plan.config, changes))
        except ConfigError:
            continue  # not for this model
        if tried.fits and tried.tokens_per_second > GAIN * plan.tokens_per_second:
            found.append(Faster(changes, tried, but))
    return sorted(found, key=lambda one: -one.plan.tokens_per_second)


def _changes(plan: RunPlan) -> Iterator[tuple[Mapping[str, Any], str]]:
    config, machine = plan.config, plan.machine
    in_one_pass = {} if config.data.accumulate == 1 else {"data.accumulate": 1}
    if config.stream.update == "step":
        changes = {"stream.update": "backward", "optimizer.grad_clip": 0.0, **in_one_pass}
        yield changes, ", but without clipping"
    if in_one_pass:
        yield in_one_pass, ""
    # only where slots are not given are there more of them
    if config.stream.device_memory is None and config.stream.num_slots is None and not plan.room.shared:
        yield {"stream.device_memory": f"{int(SHARE_OF_DEVICE * machine.device_bytes) >> 20}MiB"}, ""
    if machine.ranks > 1 and not config.stream.gather_weights:
        yield {"stream.gather_weights": True}, ""
    if config.stream.activations != "keep":
        yield {"stream.activations": "keep"}, ""
    if config.stream.activations == "recompute+offload":
        yield {"stream.activations": "recompute"}, ""
    size = config.stream.micro_batch_size
    if isinstance(size, int) and size < config.data.batch_size:
        yield {"stream.micro_batch_size": min(2 * size, config.data.batch_size)}, ""
    yield {"data.batch_size": 2 * config.data.batch_size}, ", with twice the batch"


def _with_all(config: Config, changes: Mapping[str, Any]) -> Config:
    for key, value in changes.items():
        config = _with(config, key, value)
    return config


@dataclass(frozen=True)
class _Remedy:
    """A key to change: which side of the memory that helps, and the values to try, the mildest first."""

    key: str
    helps_device: bool
    helps_host: bool
    values: Callable[[RunPlan], Iterator[Any]]

    def helps(self, plan: RunPlan) -> bool:
        """Whether it gives what ``plan`` lacks."""
        helps_host = self.helps_host or (plan.room.shared and self.helps_device)
        return self.helps_device and not plan.fits_device or helps_host and not plan.fits_host


def find_remedies(plan: RunPlan, plan_of: RunPlanOf) -> Remedies:
    """The changes that make ``plan`` fit: tried in the order of what they cost and added up until it does,
    then each made as mild as the others allow. Where it does not fit with all of them, those that help."""
    exact = _find_exact(plan, plan_of)
    config = plan.config
    if exact.plan.fits or not config.lora.rank or config.model.quantize != "none":
        return exact
    for word in ("int8", "nf4"):
        tried = _tried(plan, {"model.quantize": word}, plan_of)
        if tried is None:
            continue
        found = Remedies({}, tried, None) if tried.fits else _find_exact(tried, plan_of)
        if found.plan.fits:
            changes = {"model.quantize": word, **found.changes}
            return replace(found, changes=changes, on_disk=exact.on_disk)
    return exact


def _find_exact(plan: RunPlan, plan_of: RunPlanOf) -> Remedies:
    changes: dict[str, Any] = {}
    best = plan
    for remedy in _REMEDIES:
        for value in remedy.values(best):
            if not remedy.helps(best):
                break
            tried = _tried(best, {remedy.key: value}, plan_of)
            if tried is not None and _is_better(tried, best):
                changes[remedy.key], best = value, tried
    on_disk = None if plan.fits_host and best.fits_host else _on_disk(plan, changes, plan_of)
    best = _mildest(changes, best, plan, plan_of)
    return Remedies(changes, best, on_disk)


def _on_disk(plan: RunPlan, changes: Mapping[str, Any], plan_of: RunPlanOf) -> Remedies | None:
    """What makes ``plan`` fit with a disk, if anything does: nothing else, or those of ``changes`` that help
    the device, which a disk does not."""
    # a plan opens no folder
    tried = None if plan.has_disk else _tried(plan, {"memory.disk": "a folder"}, plan_of)
    if tried is None or tried.fits:
        return None if tried is None else Remedies({}, tried, None)
    helping = {each.key: changes[each.key] for each in _REMEDIES if each.helps_device and each.key in changes}
    best = _tried(tried, helping, plan_of)
    if best is None or not best.fits:
        return None
    best = _mildest(helping, best, tried, plan_of)
    return Remedies(helping, best, None)


def _mildest(changes: dict[str, Any], best: RunPlan, plan: RunPlan, plan_of: RunPlanOf) -> RunPlan:
    """``best``, that is ``plan`` with ``changes``, with each as mild as the others allow, if it fits."""
    for remedy in reversed(_REMEDIES):
        if best.fits and remedy.key in changes:
            best = _milder(remedy, changes, best, plan, plan_of)
    return best


def _milder(
    remedy: _Remedy, changes: dict[str, Any], best: RunPlan, plan: RunPlan, plan_of: RunPlanOf
) -> RunPlan:
    """``best`` with less of a remedy, or none, if it still fits; ``changes`` are made those of it."""
    key, given = remedy.key, _value(plan.config, remedy.key)
    for value in (given, *remedy.values(replace(best, config=_with(best.config, key, given)))):
        if value == changes[key]:
            return best
        tried = _tried(best, {key: value}, plan_of)
        if tried is not None and tried.fits:
            changes[key] = value
            if value == given:
                del changes[key]
            return tried
    return best


def _tried(plan: RunPlan, changes: Mapping[str, Any], plan_of: RunPlanOf) -> RunPlan | None:
    try:
        return plan_of(_with_all(plan.config, changes))
    except ConfigError:
        return None  # not for this model (moments in 8 bits of fp32 parameters)


def _is_better(tried: RunPlan, plan: RunPlan) -> bool:
    """Whether it needs less of what does not suffice."""
    device = not plan.fits_device and (tried.fits_device or tried.device_needed < plan.device_needed)
    host = not plan.fits_host and (tried.fits_host or tried.host_needed < plan.host_needed)
    return device or host


def _budgets(plan: RunPlan) -> Iterator[str]:
    budget, there = plan.room.budget, plan.room.device - plan.room.context
    if UNLIMITED > budget > there > 0:
        yield f"{there >> 20}MiB"


def _micro_batches(plan: RunPlan) -> Iterator[int]:
    given = plan.config.stream.micro_batch_size
    size = given if isinstance(given, int) else plan.config.data.batch_size
    for _ in range(MICRO_BATCHES):
        if size > 1:
            size = max(1, size // 4)
            yield size


def _activations(plan: RunPlan) -> Iterator[str]:
    if plan.config.stream.activations != "recompute+offload":
        yield "recompute+offload"


def _passes(plan: RunPlan) -> Iterator[int]:
    passes = plan.config.data.accumulate
    while plan.config.stream.update == "step" and passes < plan.config.data.batch_size:
        passes = min(2 * passes, plan.config.data.batch_size)
        yield passes


def _batches(plan: RunPlan) -> Iterator[int]:
    size = plan.config.data.batch_size
    while size > 1:
        size //= 2
        yield size


def _moments(plan: RunPlan) -> Iterator[str]:
    shorter = {"float32": ["bfloat16", "int8"], "bfloat16": ["int8"]}
    yield from shorter.get(plan.config.optimizer.state_dtype, [])


def _slots(plan: RunPlan) -> Iterator[int]:
    if plan.config.stream.num_slots != 1:
        yield 1


_REMEDIES = (
    _Remedy("stream.device_memory", helps_device=True, helps_host=False, values=_budgets),
    _Remedy("stream.micro_batch_size", helps_device=True, helps_host=False, values=_micro_batches),
    _Remedy("stream.activations", helps_device=True, helps_host=False, values=_activations),
    _Remedy("data.accumulate", helps_device=True, helps_host=True, values=_passes),
    _Remedy("data.batch_size", helps_device=True, helps_host=True, values=_batches),
    _Remedy("optimizer.state_dtype", helps_device=False, helps_host=True, values=_moments),
    _Remedy("stream.num_slots", helps_device=True, helps_host=False, values=_slots),
)


def _value(config: Config, key: str) -> Any:
    section, name = key.split(".")
    return getattr(getattr(config, section), name)


def _with(config: Config, key: str, value: Any) -> Config:
    section, name = key.split(".")
    return with_options(config, **{section: {name: value}})
