"""The command `streamer plan`: what a config's run will take, told before anything is allocated. `train`
asks the same before it begins.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

from torch import nn

from streamer.app import machine_file
from streamer.app.config import Config, ConfigError, dump_config
from streamer.app.plan.planning import RunPlan, plan_run, settle, this_machine, with_options
from streamer.app.plan.remedies import find_remedies
from streamer.app.plan.report import (
    figures,
    ledger_lines,
    plan_json,
    plan_lines,
    remedy_line,
    table_lines,
)
from streamer.app.run.build import settle_fp16, without_values
from streamer.model.options import parse_bytes
from streamer.planner.recall import Recollection
from streamer.simulate.machine import MACHINES, Machine


def check_memory(config: Config, ranks: int = 1, machines: int = 1) -> RunPlan | None:
    """Raise ConfigError, with the plan's bytes by owner and what would help, where a step of ``config`` on so
    many ``ranks``, of each of so many ``machines``, needs more than the device or the host has left. Returns
    the plan, None if none was needed.

    A model that cannot be planned (its forward asks for values) is let through, which a line says.
    """
    try:
        machine, _ = this_machine(config.stream, ranks, machines)
        model = without_values(config.model, config.lora)
    except (TypeError, ValueError):
        return None  # which building the model is about to refuse, in better words
    if not isinstance(model, nn.Module):
        return None
    parameters = sum(param.numel() for param in model.parameters())
    # tiny runs need no plan: a step makes no more bytes than it has FLOPs, and holds 18 of each parameter
    at_most = parameters * (6 * config.data.batch_size * config.data.context + 18)
    leaves_room = config.memory.disk is not None and "offload" in str(config.stream.activations)
    if at_most < min(machine.device_bytes, machine.host_bytes) / 2 and not leaves_room:
        return None
    try:
        recollection = Recollection()
        plan = plan_run(config, machine, recollection)
    except ConfigError as error:
        print(f"not planned: {error}")
        return None
    if not plan.fits:
        found = find_remedies(plan, lambda changed: plan_run(changed, machine, recollection))
        line = remedy_line("this run", found, plan, with_speed=False)
        raise ConfigError(line, table="\n".join(ledger_lines(plan)))
    return plan


def plan(
    config: Config,
    machine_name: str,
    *,
    ranks: int = 1,
    nodes: int = 1,
    host_memory: str | None = None,
    as_json: bool = False,
    timeline: str | None = None,
) -> bool:
    """Print the plan of a config on a machine (with so many ``ranks``, and ``host_memory`` in place of its
    own), given by name or by file; whether it fits.

    Raises ConfigError, in one line, for what cannot be planned.
    """
    machine = machine_file.machine(machine_name, ranks, nodes)
    try:
        host_bytes = parse_bytes("--host-memory", host_memory)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if host_bytes is not None:
        machine = replace(machine, host_bytes=host_bytes)
    if timeline is not None:
        _check_timeline(Path(timeline))
    recollection = Recollection()
    config, told = settle_fp16(config)
    if told is not None and not as_json:
        print(f"{told}\n")
    config, chosen = settle(config, machine, recollection)
    plan_of = _remembering(machine, recollection)
    if as_json:
        report = plan_json(config, plan_of)
        told = None if chosen is None else chosen.reason
        listed = None if chosen is None else list(chosen.lines())
        print(json.dumps({**report, "chosen": told, "considered": listed}, indent=2))
    else:
        if chosen is not None:
            print("\n".join((chosen.reason, *chosen.lines(), "")))
        for line in plan_lines(config, plan_of):
            print(line, flush=True)
    planned = plan_of(config)
    if timeline is not None:
        _draw(planned, Path(timeline))
    return planned.fits


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
    batches = [_batch_size(size) for size in sizes]
    rows = []
    for name, machine in there.items():
        recollection = Recollection()
        for batch in batches:
            of_row, _ = settle(with_options(config, data={"batch_size": batch}), machine, recollection)
            planned = plan_run(of_row, machine, recollection)
            rows.append({"machine": name, **figures(planned)})
            if not as_json:
                for line in table_lines(name, planned, first=len(rows) == 1, width=max(map(len, there))):
                    print(line, flush=True)
    if as_json:
        print(json.dumps(rows, indent=2))
    return all(row["fits"] for row in rows)


def _batch_size(text: str) -> int:
    if not text.strip().isdigit() or not int(text):
        raise ConfigError(f"--batch-sizes: {text!r} is no batch size: give numbers of 1 or more, as 4,16,64")
    return int(text)


def _remembering(machine: Machine, recollection: Recollection) -> Callable[[Config], RunPlan]:
    """`plan_run`, which plans no config twice."""

    @cache
    def by_text(text: str) -> RunPlan:
        return plan_run(configs[text], machine, recollection)

    configs: dict[str, Config] = {}

    def plan_of(config: Config) -> RunPlan:
        text = dump_config(config)
        configs[text] = config
        return by_text(text)

    return plan_of


def _check_timeline(path: Path) -> None:
    if path.suffix != ".png":
        raise ConfigError(f"--timeline {path}: give the name of a PNG file, such as timeline.png")
    if not path.parent.is_dir():
        raise ConfigError(f"--timeline {path}: there is no folder {path.parent}: create it first")
    try:
        import matplotlib  # noqa: F401 - before the seconds that a plan takes
    except ImportError:
        raise ConfigError("--timeline needs matplotlib: pip install '.[plot]'") from None


def _draw(planned: RunPlan, path: Path) -> None:
    from streamer.app.plan.timeline import draw_trace

    draw_trace(planned.trace, path, seconds=planned.step.prediction.seconds)
