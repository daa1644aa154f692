"""A plan as a person reads it, and as a program does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from streamer.app.config import Config, quoted
from streamer.app.plan.planning import (
    FURTHEST,
    RunPlan,
    RunPlanOf,
    batches,
    is_furthest,
    largest_batch,
    least_batch_that_hides_disk,
    waiting_for_disk,
)
from streamer.app.plan.remedies import Faster, Remedies, faster, find_remedies
from streamer.backends.base import DISKS, SPECIAL, Lane
from streamer.errors import amount
from streamer.simulate.machine import Machine
from streamer.store.ledger import UNLIMITED


def plan_lines(config: Config, plan_of: RunPlanOf) -> Iterator[str]:
    """The whole plan as text, each line as soon as it is known."""
    plan = plan_of(config)
    yield (
        f"{config.run.name} on {_machine(plan.machine)}: {plan.parameters:,} parameters, "
        f"{config.data.batch_size} x {config.data.context} = {plan.tokens:,} tokens a step"
    )
    if plan.machine.coherent:
        yield "CPU and GPU share one memory on this machine: streaming from host memory gains nothing there"
    if plan.machine.ranks > 1:
        yield (
            "what follows is of one GPU; the host's bytes are for all, which copy and update at "
            f"{plan.machine.host_bytes_per_second / 1e9:,.0f} GB/s together"
        )
    if plan.machine.machines > 1:
        yield (
            f"and of one of {plan.machine.machines} machines: each holds all weights and gradients, and of "
            f"the masters and moments the part that it updates, 1 of {plan.machine.machines}; "
            f"data.batch_size is its part of the batch"
        )
    yield ""
    yield from ledger_lines(plan)
    yield ""
    yield from _lanes(plan)
    if plan.has_disk:
        yield from _disk(plan, plan_of)
    yield ""
    yield from _batches(plan, plan_of)
    yield ""
    if not plan.fits:
        yield remedy_line("it", find_remedies(plan, plan_of), plan)
        return
    yield from _idle(plan)
    for found in faster(plan, plan_of):
        yield _faster_line(found, plan)


def plan_json(config: Config, plan_of: RunPlanOf) -> dict[str, Any]:
    """The whole plan in JSON values; bytes, seconds, FLOPs."""
    plan = plan_of(config)
    table = list(batches(config, plan_of))
    largest = largest_batch(plan, table, plan_of)
    found = None if plan.fits else find_remedies(plan, plan_of)
    return {
        "machine": asdict(plan.machine),
        "parameters": plan.parameters,
        **figures(plan),
        **(_beside_disk(plan, plan_of) if plan.has_disk and plan.beyond_disk is None else {}),
        "batches": [figures(one) for one in table],
        "largest_batch": None
        if largest is None
        else {**figures(largest), "or_more": is_furthest(largest, table)},
        "mend": None if found is None or not found.plan.fits else _changed(found),
        "faster": [_changed(one) for one in (faster(plan, plan_of) if plan.fits else ())],
        "with_disk": None if found is None else _changed(found.on_disk),
    }


def _changed(found: Remedies | Faster | None) -> dict[str, Any] | None:
    return None if found is None else {"changes": dict(found.changes), **figures(found.plan)}


def figures(plan: RunPlan) -> dict[str, Any]:
    """A plan's bytes, seconds and FLOPs."""
    step, prediction = plan.step, plan.step.prediction
    return {
        "batch_size": plan.config.data.batch_size,
        "tokens_per_step": plan.tokens,
        "num_slots": step.num_slots,
        "fits": plan.fits,
        "fits_device": plan.fits_device,
        "fits_host": plan.fits_host,
        "device_bytes": dict(step.device_bytes),
        "device_reserve_bytes": dict(step.reserve),
        "device_needed": plan.device_needed,
        "device_memory": None if plan.room.budget == UNLIMITED else plan.room.budget,
        "host_bytes": dict(plan.host_bytes),
        "host_pinned": plan.host_pinned,
        "host_needed": plan.host_needed,
        **(_disk_figures(plan) if plan.has_disk else {}),
        "seconds": prediction.seconds,
        "busy_seconds": {lane.value: prediction.busy_seconds[lane] for lane in _shown(plan)},
        "exposed_seconds": {lane.value: prediction.exposed_seconds[lane] for lane in _shown(plan)},
        "binding_lane": plan.step.prediction.binding_lane.value,
        "tokens_per_second": plan.tokens_per_second,
        "model_flops": plan.model_flops,
        "mfu": plan.mfu,
        "hours": plan.hours,
        "files": None if plan.space is None else {**vars(plan.space), "peak": plan.space.peak},
        "executed_flops": prediction.flops,
    }


def _disk_figures(plan: RunPlan) -> dict[str, Any]:
    read, written = plan.disk_moved
    return {
        "host_memory": None if plan.room.host_limit == UNLIMITED else plan.room.host_limit,
        "disk_bytes": dict(plan.step.disk_bytes),
        "disk_read_bytes": read,
        "disk_written_bytes": written,
        "steps_per_1000_tb_written": _steps_per_1000_tb(plan),
        "beyond_disk": plan.beyond_disk,
    }


def _beside_disk(plan: RunPlan, plan_of: RunPlanOf) -> dict[str, Any]:
    least = least_batch_that_hides_disk(plan, plan_of)
    return {
        "waiting_for_disk": waiting_for_disk(plan, plan_of),
        "least_batch_that_hides_disk": None if least is None else figures(least),
    }


def _steps_per_1000_tb(plan: RunPlan) -> int | None:
    """Steps until 1,000 TB are written. The makers of drives give a drive's endurance in TB written."""
    _, written = plan.disk_moved
    return 10**15 // written if written else None


def _shown(plan: RunPlan) -> list[Lane]:
    """The lanes, those of the disk and between GPUs where there are such."""
    busy = plan.step.prediction.busy_seconds
    return [lane for lane in Lane if lane not in SPECIAL or busy[lane] or (plan.has_disk and lane in DISKS)]


def _machine(machine: Machine) -> str:
    name = machine.name if machine.ranks == 1 else f"{machine.ranks} x {machine.name}"
    return name if machine.machines == 1 else f"{name}, one of {machine.machines} machines"


def ledger_lines(plan: RunPlan) -> Iterator[str]:
    """Bytes by owner, what each side needs and has."""
    budget, machine = plan.room.budget, plan.machine
    slots = f"{plan.step.num_slots} slot{'s' if plan.step.num_slots > 1 else ''}"
    held = plan.step.device_bytes
    yield from _side(f"device, {slots}, when it holds most", held, plan.parameters)
    within = "" if budget == UNLIMITED else f" of {amount(budget)} (stream.device_memory)"
    if plan.refused or plan.step.allocated > budget:
        within += f": {_verdict(False)}"
    yield _line("  all tensors", plan.step.device_total, plan.parameters) + within
    for name, nbytes in plan.step.reserve.items():
        yield _line(f"  {name}", nbytes, plan.parameters)
    yield (
        _line("  needed", plan.device_needed, plan.parameters)
        + f" of {amount(machine.device_bytes)}: {_verdict(plan.device_needed <= machine.device_bytes)}"
    )
    yield from _side("host", plan.host_bytes, plan.parameters)
    if plan.host_pinned:
        yield _line("  of these page-locked", plan.host_pinned, plan.parameters)
    limit = plan.room.host_limit
    if limit < UNLIMITED:
        total = plan.step.host_total
        yield (
            _line("  all of the model", total, plan.parameters)
            + f" of {amount(limit)} (memory.host): {_verdict(total <= limit)}"
        )
    also = " (with the device, whose memory it is)" if plan.room.shared else ""
    yield (
        _line("  needed", plan.host_needed, plan.parameters)
        + f" of {amount(machine.host_bytes)}{also}: {_verdict(plan.host_needed <= machine.host_bytes)}"
    )
    if plan.step.disk_bytes:
        yield from _side("disk", plan.step.disk_bytes, plan.parameters)
        yield _line("  needed", plan.on_disk, plan.parameters)


def _side(title: str, held: Mapping[str, int], parameters: int) -> Iterator[str]:
    yield f"{title:40}{'':>12}{'per parameter':>16}"
    for name, nbytes in held.items():
        yield _line(f"  {name}", nbytes, parameters)


def _line(name: str, nbytes: int, parameters: int) -> str:
    return f"{name:40}{amount(nbytes):>12}{nbytes / parameters:>14.2f} B"


def _verdict(fits: bool) -> str:
    return "fits" if fits else "DOES NOT FIT"


def _lanes(plan: RunPlan) -> Iterator[str]:
    prediction = plan.step.prediction
    yield f"{'lane':10}{'busy s':>10}{'exposed s':>12}{'overlap':>10}"
    for lane in _shown(plan):
        busy, exposed = prediction.busy_seconds[lane], prediction.exposed_seconds[lane]
        is_compute = lane is Lane.COMPUTE
        overlap = "-" if is_compute or not busy else f"{1 - exposed / busy:.1%}"
        if exposed > busy:  # compute waited for work that came late, such as an update behind a slow disk
            overlap = "none"
        yield f"{lane.value:10}{busy:>10.3f}{'-' if is_compute else f'{exposed:.3f}':>12}{overlap:>10}"
    rate = prediction.seconds * 1e12
    yield (
        f"step {prediction.seconds:.3f} s, {prediction.binding_lane.value} binds: "
        f"{plan.tokens_per_second:,.0f} tokens/s, {plan.model_flops / rate:.3g} TFLOP/s of the model's own "
        f"(MFU {plan.mfu:.1%}), {prediction.flops / rate:.3g} as executed"
    )
    run = plan.config.run
    if run.steps:
        fewer = f" ({run.epochs} epochs of the data may be fewer)" if run.epochs else ""
        yield f"{run.steps:,} steps{fewer} take {_time(plan.hours)}, without validation"
    if plan.space is not None and plan.space.peak:
        yield f"in {plan.config.run.out} {plan.space.line()}"


def _time(hours: float) -> str:
    return f"{hours:.1f} hours" if hours >= 1 else f"{60 * hours:.1f} minutes"


def _idle(plan: RunPlan) -> Iterator[str]:
    """Where half of a GPU or more is not used: that it is."""
    unused = plan.machine.device_bytes - plan.device_needed
    if not plan.machine.has_one_memory and 2 * unused >= plan.machine.device_bytes:
        yield (
            f"{amount(unused)} of the GPU's {amount(plan.machine.device_bytes)} are not used: take a larger "
            "data.batch_size, or stream.device_memory, with which more layers stay there"
        )


def _faster_line(found: Faster, plan: RunPlan) -> str:
    before, after = plan.tokens_per_second, found.plan.tokens_per_second
    return f"faster: {_sets(found.changes)}: {after:,.0f} tokens/s in place of {before:,.0f}{found.but}"


def _disk(plan: RunPlan, plan_of: RunPlanOf) -> Iterator[str]:
    if plan.beyond_disk is not None:
        yield f"the disk does not help: {plan.beyond_disk}"
        return
    if not plan.on_disk:
        yield "the disk is not needed: all fits into host memory"
        return
    read, written = plan.disk_moved
    yield (
        f"the disk: {amount(read)} read and {amount(written)} written a step, "
        f"{_steps_per_1000_tb(plan):,} steps per 1,000 TB written"
    )
    least = least_batch_that_hides_disk(plan, plan_of)
    if least is plan:
        yield "compute hides the disk: with all in host memory a step would take as long"
        return
    told = f"with all in host memory a step would take {waiting_for_disk(plan, plan_of):.1%} less; "
    if least is None:
        yield f"{told}no batch up to {FURTHEST} times this one hides the disk"
    else:
        size = least.config.data.batch_size
        yield (
            f"{told}a batch of {size} ({least.tokens:,} tokens) hides the disk"
            f"{'' if least.fits else ', but does not fit'}"
        )


def _batches(plan: RunPlan, plan_of: RunPlanOf) -> Iterator[str]:
    wide = max(9, *(len(lane.value) for lane in _shown(plan)))
    yield (
        f"{'batch':>8}{'tokens':>10}{'slots':>7}{'step s':>10}{'tokens/s':>12}  {'binds':{wide}}"
        f"{'device':>12}{'host':>12}"
    )
    table: list[RunPlan] = []
    for one in batches(plan.config, plan_of):
        table.append(one)
        prediction = one.step.prediction
        yield (
            f"{one.config.data.batch_size:>8}{one.tokens:>10,}{one.step.num_slots:>7}"
            f"{prediction.seconds:>10.3f}{one.tokens_per_second:>12,.0f}  "
            f"{prediction.binding_lane.value:{wide}}{amount(one.device_needed):>12}{amount(one.host_needed):>12}"
            f"{'' if one.fits else '  does not fit'}"
        )
    largest = largest_batch(plan, table, plan_of)
    if largest is None:
        yield "not even a batch of one sequence fits"
    else:
        slots = "" if plan.config.stream.num_slots else " (with two slots)"
        more = " or more" if is_furthest(largest, table) else ""
        yield f"largest batch that fits{slots}: {largest.config.data.batch_size}{more}"


def table_lines(name: str, plan: RunPlan, *, first: bool, width: int) -> Iterator[str]:
    """A row of a table of machines and batch sizes, after its head if it is the ``first``."""
    if first:
        yield (
            f"{'machine':{width}}{'batch':>8}{'device':>12}{'host':>12}{'disk':>12}{'step s':>10}"
            f"{'tokens/s':>12}{'MFU':>8}  binds"
        )
    prediction = plan.step.prediction
    fits = "" if plan.fits else ", does not fit"
    yield (
        f"{name:{width}}{plan.config.data.batch_size:>8}{amount(plan.device_needed):>12}"
        f"{amount(plan.host_needed):>12}{amount(plan.on_disk) if plan.on_disk else '-':>12}"
        f"{prediction.seconds:>10.3f}{plan.tokens_per_second:>12,.0f}{plan.mfu:>8.1%}  "
        f"{prediction.binding_lane.value}{fits}"
    )


def remedy_line(subject: str, found: Remedies, plan: RunPlan, *, with_speed: bool = True) -> str:
    """What would make a plan fit that does not; ``subject`` is what it is called."""
    sets = _sets(found.changes)
    misfit = f"{subject} does not fit on the {' and the '.join(plan.lacking) or 'device'}"
    disk = "" if found.on_disk is None else f", or {_with_disk(found.on_disk, with_speed=with_speed)}"
    if not found.plan.fits:
        lacks = " and ".join(f"the {side} lacks {amount(lack)}" for side, lack in found.plan.lacking.items())
        even = f"even with {sets}, " if sets else ""
        return f"{misfit}; {even}{lacks or found.plan.refused}: take a smaller model, or more memory{disk}"
    speed = f", {found.plan.tokens_per_second:,.0f} tokens/s" if with_speed else ""
    if "model.quantize" in found.changes:
        misfit += ", and nothing exact does in memory"
        sets += " (the frozen base is rounded)"
    return (
        f"{misfit}; it would with {sets}: device {amount(found.plan.device_needed)}, host "
        f"{amount(found.plan.host_needed)}{speed}{disk}"
    )


def _with_disk(found: Remedies, *, with_speed: bool) -> str:
    speed = f", {found.plan.tokens_per_second:,.0f} tokens/s" if with_speed else ""
    also = f" with {_sets(found.changes)}" if found.changes else ""
    return f"set memory.disk to a folder{also}: {amount(found.plan.on_disk)} would be on disk{speed}"


def _sets(changes: Mapping[str, Any]) -> str:
    """``changes`` as options of the command."""
    return " ".join(f"--set {quoted(key, value)}" for key, value in changes.items())
