"""A plan as a person reads it, and as a program does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from streamer.app.mending import Mend
from streamer.app.planning import RunPlan
from streamer.app.report import amount
from streamer.app.toml import toml_value
from streamer.backends.base import Lane


def plan_text(plan: RunPlan, batches: Sequence[RunPlan], largest: RunPlan | None, mend: Mend | None) -> str:
    """The whole plan as text."""
    config, machine = plan.config, plan.machine
    lines = [
        f"{config.run.name} on {machine.name}: {plan.parameters:,} parameters, "
        f"{config.data.batch_size} x {config.data.context} = {plan.tokens:,} tokens a step",
        "",
        *ledger_lines(plan),
        "",
        *_lanes(plan),
        "",
        *_batches(plan, batches, largest),
    ]
    if not plan.fits:
        lines += ["", *mend_lines(plan, mend)]
    return "\n".join(lines)


def plan_json(
    plan: RunPlan, batches: Sequence[RunPlan], largest: RunPlan | None, mend: Mend | None
) -> dict[str, Any]:
    """The whole plan in JSON values; bytes, seconds, FLOPs."""
    return {
        "machine": asdict(plan.machine),
        "parameters": plan.parameters,
        **_figures(plan),
        "batches": [_figures(one) for one in batches],
        "largest_batch": None if largest is None else _figures(largest),
        "mend": None if mend is None else {"changes": dict(mend.changes), **_figures(mend.plan)},
    }


def _figures(plan: RunPlan) -> dict[str, Any]:
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
        "device_memory": plan.device_budget,
        "host_bytes": dict(plan.host_bytes),
        "host_needed": plan.host_needed,
        "seconds": prediction.seconds,
        "busy_seconds": {lane.value: prediction.busy_seconds[lane] for lane in Lane},
        "exposed_seconds": {lane.value: prediction.exposed_seconds[lane] for lane in Lane},
        "binding_lane": plan.binding_lane.value,
        "tokens_per_second": plan.tokens_per_second,
        "model_flops": plan.model_flops,
        "executed_flops": prediction.flops,
    }


def ledger_lines(plan: RunPlan) -> Iterator[str]:
    """Bytes by owner, what each side needs and has."""
    budget, machine = plan.device_budget, plan.machine
    slots = f"{plan.step.num_slots} slot{'s' if plan.step.num_slots > 1 else ''}"
    held = plan.step.device_bytes
    yield from _side(f"device, {slots}, when it holds most", held, plan.parameters)
    within = "" if budget is None else f" of {amount(budget)} (device_memory)"
    yield _line("  all tensors", plan.step.device_total, plan.parameters) + within
    for name, nbytes in plan.step.reserve.items():
        yield _line(f"  {name}", nbytes, plan.parameters)
    yield (
        _line("  needed", plan.device_needed, plan.parameters)
        + f" of {amount(machine.device_bytes)}: {_verdict(plan.fits_device)}"
    )
    yield from _side("host", plan.host_bytes, plan.parameters)
    also = " (with the device, whose memory it is)" if machine.kind == "cpu" else ""
    yield (
        _line("  needed", plan.host_needed, plan.parameters)
        + f" of {amount(machine.host_bytes)}{also}: {_verdict(plan.fits_host)}"
    )


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
    for lane in Lane:
        busy, exposed = prediction.busy_seconds[lane], prediction.exposed_seconds[lane]
        is_compute = lane is Lane.COMPUTE
        overlap = "-" if is_compute or not busy else f"{1 - exposed / busy:.1%}"
        yield f"{lane.value:10}{busy:>10.3f}{'-' if is_compute else f'{exposed:.3f}':>12}{overlap:>10}"
    rate = prediction.seconds * 1e12
    yield (
        f"step {prediction.seconds:.3f} s, {plan.binding_lane.value} binds: "
        f"{plan.tokens_per_second:,.0f} tokens/s, {plan.model_flops / rate:.3g} TFLOP/s by 6 FLOP per "
        f"parameter and token, {prediction.flops / rate:.3g} as executed"
    )


def _batches(plan: RunPlan, batches: Sequence[RunPlan], largest: RunPlan | None) -> Iterator[str]:
    yield f"{'batch':>8}{'tokens':>10}{'step s':>10}{'tokens/s':>12}  {'binds':9}{'device':>12}{'host':>12}"
    for one in batches:
        yield (
            f"{one.config.data.batch_size:>8}{one.tokens:>10,}{one.step.prediction.seconds:>10.3f}"
            f"{one.tokens_per_second:>12,.0f}  {one.binding_lane.value:9}{amount(one.device_needed):>12}"
            f"{amount(one.host_needed):>12}{'' if one.fits else '  does not fit'}"
        )
    if largest is None:
        yield "not even a batch of one sequence fits"
    else:
        slots = "" if plan.config.stream.num_slots else " (with two slots)"
        yield f"largest batch that fits{slots}: {largest.config.data.batch_size}"


def mend_lines(plan: RunPlan, mend: Mend | None, *, with_speed: bool = True) -> Iterator[str]:
    """What would make a plan fit that does not."""
    if mend is None:
        sides = [name for name, fits in (("device", plan.fits_device), ("host", plan.fits_host)) if not fits]
        yield (
            f"it does not fit on the {' and the '.join(sides)}, and smaller micro-batches, offloaded inputs, "
            "a smaller batch, shorter moments and one slot do not make it fit: take a smaller model, or more "
            "memory"
        )
        return
    sets = " ".join(f"--set {key}={toml_value(value)}" for key, value in mend.changes.items())
    speed = f", {mend.plan.tokens_per_second:,.0f} tokens/s" if with_speed else ""
    yield (
        f"it would fit with {sets}: device {amount(mend.plan.device_needed)}, host "
        f"{amount(mend.plan.host_needed)}{speed}"
    )
