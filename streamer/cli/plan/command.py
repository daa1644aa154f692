"""The command `streamer plan`: what a config's run will take, before anything is allocated. `train` refuses
with the same words.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from streamer.backends.base import DISKS, SPECIAL, Lane
from streamer.cli.build import settle_fp16
from streamer.cli.calibrate import machine_file
from streamer.cli.config import Config, ConfigError, quoted, with_keys
from streamer.cli.plan.planning import Models, Plans, RunPlan, RunPlanOf, settle, this_machine
from streamer.cli.plan.variants import (
    FURTHEST,
    SHARES,
    Changed,
    batches,
    faster,
    find_remedies,
    is_furthest,
    largest_batch,
    least_batch_that_hides_disk,
    on_disk,
    waiting_for_disk,
)
from streamer.errors import amount
from streamer.planner.machine import BY_GPU, MACHINES, Machine
from streamer.store.ledger import UNLIMITED

#: The machine that is assumed where there is no GPU.
USUAL = "rtx-4090"


def check_memory(config: Config, ranks: int = 1, machines: int = 1) -> RunPlan | None:
    """Raise ConfigError, with the plan's bytes by owner and what would help, where a step of ``config`` on so
    many ``ranks``, of each of so many ``machines``, needs more than the device or the host has left. Returns
    the plan, None if none was needed.

    A model that cannot be planned (its forward needs values) is let through, which a line says.
    """
    try:
        machine, _ = this_machine(config.stream, ranks, machines)
        models = Models()
        model = models.plain(config)
    except (TypeError, ValueError):
        return None  # which building the model is about to refuse, in better words
    if not isinstance(model, nn.Module):
        return None
    parameters = sum(param.numel() for param in model.parameters())
    # tiny runs need no plan: a step allocates no more bytes than it has FLOPs, and holds 18 of each parameter
    at_most = parameters * (6 * config.train.batch_size * config.train.max_length + 18)
    leaves_room = config.stream.disk is not None and "offload" in str(config.stream.activations)
    if at_most < min(machine.device_bytes, machine.host_bytes) / 2 and not leaves_room:
        return None
    plan_of = Plans(machine, models)
    try:
        plan = plan_of(config)
    except ConfigError as error:
        print(f"not planned: {error}")
        return None
    if not plan.fits:
        line = remedy_line("this run", find_remedies(plan, plan_of), plan, on_disk(plan, plan_of))
        raise ConfigError(line, table="\n".join(ledger_lines(plan)))
    return plan


def machine_of(name: str | None, ranks: int, nodes: int) -> tuple[Machine, str]:
    """The machine of a ``name`` or a file, and in words why it is the one. None is the GPU that is here, with
    the memory of this machine, else `USUAL`."""
    if name is not None:
        found = machine_file.machine(name, ranks, nodes)
        return found, f"--machine {name}"
    if not torch.cuda.is_available():
        return machine_file.machine(USUAL, ranks, nodes), "the default, since no GPU is here: see --machine"
    device = torch.device("cuda")
    gpu = torch.cuda.get_device_name(device)
    device_bytes, host_bytes = machine_file.memory_bytes(device)
    found = BY_GPU.get(gpu, MACHINES[USUAL]).of_ranks(ranks, nodes)
    rates = "its rates" if gpu in BY_GPU else f"the rates of {found.name}"
    found = replace(found, name=gpu, device_bytes=device_bytes, host_bytes=host_bytes)
    return found, f"the GPU and the memory found here, with {rates} by its data sheet"


def plan(
    config: Config,
    machine_name: str | None,
    *,
    ranks: int = 1,
    nodes: int = 1,
    as_json: bool = False,
    timeline: str | None = None,
) -> bool:
    """Print the plan of a config on a machine with so many ``ranks``, `machine_of`; whether it fits.

    Raises ConfigError, in one line, for what cannot be planned.
    """
    machine, why = machine_of(machine_name, ranks, nodes)
    if timeline is not None:
        _check_timeline(Path(timeline))
    config, dtype_line = settle_fp16(config)
    if dtype_line is not None and not as_json:
        print(f"{dtype_line}\n")
    models = Models()
    config, chosen = settle(config, machine, models=models)
    plan_of = Plans(machine, models)
    if as_json:
        listed: dict[str, Any] = {"chosen": None, "considered": None}
        if chosen is not None:
            listed = {"chosen": chosen.reason, "considered": [*chosen.lines()]}
        print(json.dumps({"assumed": why, **plan_json(config, plan_of), **listed}, indent=2))
    else:
        if chosen is not None:
            print("\n".join((chosen.reason, *chosen.lines(), "")))
        for line in plan_lines(config, plan_of, why):
            print(line, flush=True)
    planned = plan_of(config)
    if timeline is not None:
        from streamer.cli.plan.timeline import draw_trace

        draw_trace(planned.trace, Path(timeline), seconds=planned.step.prediction.seconds)
    return planned.fits


def _check_timeline(path: Path) -> None:
    if path.suffix != ".png":
        raise ConfigError(f"--timeline {path}: give the name of a PNG file, such as timeline.png")
    if not path.parent.is_dir():
        raise ConfigError(f"--timeline {path}: there is no folder {path.parent}: create it first")
    try:
        import matplotlib  # noqa: F401 - before the seconds that a plan takes
    except ImportError:
        raise ConfigError("--timeline needs matplotlib: pip install 'layer-streamer[plot]'") from None


def plan_table(
    config: Config,
    machines: Sequence[str],
    sizes: Sequence[str],
    *,
    ranks: int = 1,
    nodes: int = 1,
    as_json: bool,
) -> bool:
    """Print a row for each machine, with so many ``ranks`` and as one of so many ``nodes``, and batch size;
    whether all fit. Raises ConfigError for what is no name of a machine, or no size."""
    names = [*MACHINES] if [*machines] == ["all"] else machines
    there = {name: machine_file.machine(name, ranks, nodes) for name in names}
    config, _ = settle_fp16(config)
    sizes_of_batches = [_batch_size(size) for size in sizes]
    width, rows, models = max(map(len, there)), [], Models()
    if not as_json:
        print(
            f"{'machine':{width}}{'batch':>8}{'device':>12}{'host':>12}{'disk':>12}{'step s':>10}"
            f"{'tokens/s':>12}{'MFU':>8}  bottleneck"
        )
    for name, machine in there.items():
        plan_of = Plans(machine, models)
        for size in sizes_of_batches:
            of_size = with_keys(config, train={"per_device_train_batch_size": size})
            of_row, _ = settle(of_size, machine, models=models)
            planned = plan_of(of_row)
            rows.append({"machine": name, **figures(planned)})
            if not as_json:
                print(_row(name, planned, width), flush=True)
    if as_json:
        print(json.dumps(rows, indent=2))
    return all(row["fits"] for row in rows)


def _batch_size(text: str) -> int:
    if not text.strip().isdigit() or not int(text):
        raise ConfigError(f"--batch-sizes: {text!r} is no batch size: give numbers of 1 or more, as 4,16,64")
    return int(text)


def _row(name: str, plan: RunPlan, width: int) -> str:
    disk = amount(plan.on_disk) if plan.on_disk else "-"
    return (
        f"{name:{width}}{plan.config.train.per_device_train_batch_size:>8}{amount(plan.device_needed):>12}"
        f"{amount(plan.host_needed):>12}{disk:>12}{plan.step.prediction.seconds:>10.3f}"
        f"{plan.tokens_per_second:>12,.0f}{plan.mfu:>8.1%}  {plan.step.prediction.binding_lane.value}"
        f"{'' if plan.fits else ', does not fit'}"
    )


# JSON


def plan_json(config: Config, plan_of: RunPlanOf) -> dict[str, Any]:
    """The whole plan in JSON values; bytes, seconds, FLOPs."""
    plan = plan_of(config)
    table = list(batches(config, plan_of))
    largest = largest_batch(plan, table, plan_of)
    remedy = None if plan.fits else find_remedies(plan, plan_of)
    of_disk = {}
    if plan.has_disk and plan.beyond_disk is None:
        least = least_batch_that_hides_disk(plan, plan_of)
        of_disk = {
            "waiting_for_disk": waiting_for_disk(plan, plan_of),
            "least_batch_that_hides_disk": None if least is None else figures(least),
        }
    return {
        "machine": asdict(plan.machine),
        "parameters": plan.parameters,
        **figures(plan),
        **of_disk,
        "batches": [figures(one) for one in table],
        "largest_batch": None
        if largest is None
        else {**figures(largest), "or_more": is_furthest(largest, table)},
        "mend": _changed(remedy if remedy is not None and remedy.plan.fits else None),
        "faster": [_changed(one) for one in (faster(plan, plan_of) if plan.fits else ())],
        "with_disk": _changed(on_disk(plan, plan_of)),
    }


def _changed(found: Changed | None) -> dict[str, Any] | None:
    return None if found is None else {"changes": dict(found.changes), **figures(found.plan)}


def figures(plan: RunPlan) -> dict[str, Any]:
    """A plan's bytes, seconds and FLOPs."""
    step, prediction = plan.step, plan.step.prediction
    of_disk = {}
    if plan.has_disk:
        read, written = plan.disk_moved
        of_disk = {
            "host_memory": None if plan.room.host_limit == UNLIMITED else plan.room.host_limit,
            "disk_bytes": dict(step.disk_bytes),
            "disk_read_bytes": read,
            "disk_written_bytes": written,
            "steps_per_1000_tb_written": _steps_per_1000_tb(plan),
            "beyond_disk": plan.beyond_disk,
        }
    return {
        "batch_size": plan.config.train.per_device_train_batch_size,
        "tokens_per_step": plan.tokens,
        "num_slots": step.num_slots,
        "fits": plan.fits,
        "fits_device": plan.fits_device,
        "fits_host": plan.fits_host,
        "is_tight": plan.is_tight,
        "device_bytes": dict(step.device_bytes),
        "device_reserve_bytes": dict(step.reserve),
        "device_needed": plan.device_needed,
        "device_memory": None if plan.room.budget == UNLIMITED else plan.room.budget,
        "host_bytes": dict(plan.host_bytes),
        "host_pinned": plan.host_pinned,
        "host_needed": plan.host_needed,
        **of_disk,
        "seconds": prediction.seconds,
        "busy_seconds": {lane.value: prediction.busy_seconds[lane] for lane in _lanes_of(plan)},
        "exposed_seconds": {lane.value: prediction.exposed_seconds[lane] for lane in _lanes_of(plan)},
        "binding_lane": prediction.binding_lane.value,
        "tokens_per_second": plan.tokens_per_second,
        "model_flops": plan.model_flops,
        "mfu": plan.mfu,
        "hours": plan.hours,
        "files": None if plan.space is None else {**vars(plan.space), "peak": plan.space.peak},
        "executed_flops": prediction.flops,
    }


def _steps_per_1000_tb(plan: RunPlan) -> int | None:
    """Steps until 1,000 TB are written. The makers of drives give a drive's endurance in TB written."""
    _, written = plan.disk_moved
    return 10**15 // written if written else None


def _lanes_of(plan: RunPlan) -> list[Lane]:
    """The lanes; those of the disk and between GPUs where there are such."""
    busy = plan.step.prediction.busy_seconds
    return [lane for lane in Lane if lane not in SPECIAL or busy[lane] or (plan.has_disk and lane in DISKS)]


# Text


def plan_lines(config: Config, plan_of: RunPlanOf, why: str) -> Iterator[str]:
    """The whole plan as text, each line as soon as it is known; ``why`` it is this machine."""
    plan = plan_of(config)
    machine = plan.machine
    name = machine.name if machine.ranks == 1 else f"{machine.ranks} x {machine.name}"
    name += f", one of {machine.machines} machines" if machine.machines > 1 else ""
    yield (
        f"{config.model.path or config.model.factory} on {name}: {plan.parameters:,} parameters, "
        f"{plan.tokens // config.train.max_length} x {config.train.max_length} = {plan.tokens:,} tokens a "
        "step"
    )
    yield f"machine: {why}; GPU {amount(machine.device_bytes)}, host {amount(machine.host_bytes)}"
    if machine.coherent:
        yield "CPU and GPU share one memory on this machine: streaming from host memory gains nothing there"
    if machine.ranks > 1:
        yield (
            "what follows is of one GPU; the host's bytes are for all, which copy and update at "
            f"{machine.host_bytes_per_second / 1e9:,.0f} GB/s together"
        )
    if machine.machines > 1:
        yield (
            f"and of one of {machine.machines} machines: each holds all weights and gradients, and of "
            f"the masters and moments the part that it updates, 1 of {machine.machines}"
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
        yield remedy_line("it", find_remedies(plan, plan_of), plan, on_disk(plan, plan_of))
        return
    unused = machine.device_bytes - plan.device_needed
    if not machine.has_one_memory and 2 * unused >= machine.device_bytes:
        yield (
            f"{amount(unused)} of the GPU's {amount(machine.device_bytes)} are not used: take a larger "
            "train.per_device_train_batch_size, or stream.device_memory, with which more layers stay there"
        )
    for found in faster(plan, plan_of):
        before, after = plan.tokens_per_second, found.plan.tokens_per_second
        yield f"faster: {_sets(found.changes)}: {after:,.0f} tokens/s in place of {before:,.0f}{found.but}"


def ledger_lines(plan: RunPlan) -> Iterator[str]:
    """Bytes by owner, what each side needs and has."""
    budget, machine, step = plan.room.budget, plan.machine, plan.step

    def line(name: str, nbytes: int) -> str:
        return f"  {name:38}{amount(nbytes):>12}{nbytes / plan.parameters:>14.2f} B"

    def side(title: str, held: Mapping[str, int]) -> Iterator[str]:
        yield f"{title:40}{'':>12}{'per parameter':>16}"
        yield from (line(name, nbytes) for name, nbytes in held.items())

    def verdict(fits: bool) -> str:
        return "fits" if fits else "DOES NOT FIT"

    slots = f"{step.num_slots} slot{'s' if step.num_slots > 1 else ''}"
    yield from side(f"device, {slots}, when it holds most", step.device_bytes)
    within = "" if budget == UNLIMITED else f" of {amount(budget)} (stream.device_memory)"
    if plan.refused or step.allocated > budget:
        within += f": {verdict(False)}"
    yield line("all tensors", step.device_total) + within
    yield from (line(name, nbytes) for name, nbytes in step.reserve.items())
    fits = verdict(plan.device_needed <= machine.device_bytes)
    yield line("needed", plan.device_needed) + f" of {amount(machine.device_bytes)}: {fits}"
    yield from side("host", plan.host_bytes)
    if plan.host_pinned:
        yield line("of these page-locked", plan.host_pinned)
    if (limit := plan.room.host_limit) < UNLIMITED:
        fits = verdict(step.host_total <= limit)
        yield line("all of the model", step.host_total) + f" of {amount(limit)} (stream.host_memory): {fits}"
    also = " (with the device, whose memory it is)" if plan.room.shared else ""
    fits = verdict(plan.host_needed <= machine.host_bytes)
    if plan.is_tight:
        fits += f", but tight: {amount(machine.host_bytes - plan.host_needed)} are left for the system"
    yield line("needed", plan.host_needed) + f" of {amount(machine.host_bytes)}{also}: {fits}"
    if step.disk_bytes:
        yield from side("disk", step.disk_bytes)
        yield line("needed", plan.on_disk)


def _lanes(plan: RunPlan) -> Iterator[str]:
    prediction = plan.step.prediction
    yield f"{'lane':10}{'busy s':>10}{'exposed s':>12}{'overlap':>10}"
    for lane in _lanes_of(plan):
        busy, exposed = prediction.busy_seconds[lane], prediction.exposed_seconds[lane]
        is_compute = lane is Lane.COMPUTE
        overlap = "-" if is_compute or not busy else f"{1 - exposed / busy:.1%}"
        if exposed > busy:  # compute waited for work that came late, such as an update behind a slow disk
            overlap = "none"
        yield f"{lane.value:10}{busy:>10.3f}{'-' if is_compute else f'{exposed:.3f}':>12}{overlap:>10}"
    rate = prediction.seconds * 1e12
    at_most = "" if plan.machine.calibrated else "at most "
    yield (
        f"step {prediction.seconds:.3f} s, bottleneck {prediction.binding_lane.value}: "
        f"{at_most}{plan.tokens_per_second:,.0f} tokens/s, {plan.model_flops / rate:.3g} TFLOP/s of the "
        f"model's own (MFU {plan.mfu:.1%}), {prediction.flops / rate:.3g} as executed"
    )
    if at_most:
        yield "times assume peaks of data sheets, which no machine reaches: streamer calibrate measures yours"
    if steps := plan.config.train.max_steps:
        hours = f"{plan.hours:.1f} hours" if plan.hours >= 1 else f"{60 * plan.hours:.1f} minutes"
        yield f"{steps:,} steps take {hours}, without validation"
    if plan.space is not None and plan.space.peak:
        yield f"in {plan.config.train.output_dir}: {plan.space.line()}"


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
    share = f"with all in host memory a step would take {waiting_for_disk(plan, plan_of):.1%} less; "
    if least is None:
        yield f"{share}no batch up to {FURTHEST} times this one hides the disk"
    else:
        size, but = least.config.train.per_device_train_batch_size, "" if least.fits else ", but does not fit"
        yield f"{share}a batch of {size} ({least.tokens:,} tokens) hides the disk{but}"


def _batches(plan: RunPlan, plan_of: RunPlanOf) -> Iterator[str]:
    wide = max(10, *(len(lane.value) for lane in _lanes_of(plan)))
    number = max(10, len(f"{int(SHARES[-1] * plan.tokens):,}") + 2)
    yield (
        f"{'batch':>8}{'tokens':>{number}}{'slots':>7}{'step s':>10}{'tokens/s':>12}  {'bottleneck':{wide}}"
        f"{'device':>12}{'host':>12}"
    )
    table: list[RunPlan] = []
    for one in batches(plan.config, plan_of):
        table.append(one)
        prediction = one.step.prediction
        yield (
            f"{one.config.train.per_device_train_batch_size:>8}{one.tokens:>{number},}{one.step.num_slots:>7}"
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
        yield f"largest batch that fits{slots}: {largest.config.train.per_device_train_batch_size}{more}"


def remedy_line(subject: str, found: Changed, plan: RunPlan, with_disk: Changed | None = None) -> str:
    """What would make ``plan`` fit, which is called ``subject``: the remedies ``found``, and a disk if it
    alone does."""
    sets = _sets(found.changes)
    misfit = f"{subject} does not fit on the {' and the '.join(plan.lacking) or 'device'}"
    disk = ""
    if with_disk is not None and "stream.disk" not in found.changes:
        disk = f", or with {_sets(with_disk.changes)}: {amount(with_disk.plan.on_disk)} would be on disk"
    if not found.plan.fits:
        lacks = " and ".join(f"the {side} lacks {amount(lack)}" for side, lack in found.plan.lacking.items())
        even = f"even with {sets}, " if sets else ""
        return f"{misfit}; {even}{lacks or found.plan.refused}: take a smaller model, or more memory{disk}"
    if "model.quantize" in found.changes:
        sets += " (the frozen base is rounded)"
    speed = f"at most {found.plan.tokens_per_second:,.0f} tokens/s"
    return (
        f"{misfit}; it would with {sets}: device {amount(found.plan.device_needed)}, host "
        f"{amount(found.plan.host_needed)}, {speed}{disk}"
    )


def _sets(changes: Mapping[str, Any]) -> str:
    """``changes`` as options of the command."""
    return " ".join(f"--set {quoted(key, value)}" for key, value in changes.items())
