"""The command `streamer plan`: what a config's run will take, told before anything is allocated."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

from streamer.app import machine_file
from streamer.app.auto import settle
from streamer.app.config import Config, ConfigError, dump_config
from streamer.app.plan_report import plan_json, plan_lines
from streamer.app.planning import RunPlan, plan_run
from streamer.backends.machine import Machine
from streamer.options import parse_bytes
from streamer.plan.recalling import Recollection

#: Where none is given.
MACHINE = "rtx-4090"


def plan(
    config: Config,
    machine_name: str | None,
    *,
    host_memory: str | None = None,
    as_json: bool = False,
    timeline: str | None = None,
) -> bool:
    """Print the plan of a config on a machine (with ``host_memory`` in place of its own), given by name or by
    file; whether it fits.

    Raises ConfigError, in one line, for what cannot be planned.
    """
    machine = machine_file.machine(machine_name or MACHINE)
    try:
        host_bytes = parse_bytes("--host-memory", host_memory)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if host_bytes is not None:
        machine = replace(machine, host_bytes=host_bytes)
    if timeline is not None:
        _check_timeline(Path(timeline))
    recollection = Recollection()
    config, chosen = settle(config, machine, recollection)
    plan_of = _remembering(machine, recollection)
    if as_json:
        report = plan_json(config, plan_of)
        print(json.dumps({**report, "chosen": None if chosen is None else chosen.reason}, indent=2))
    else:
        if chosen is not None:
            print(f"{chosen.reason}\n")
        for line in plan_lines(config, plan_of):
            print(line, flush=True)
    planned = plan_of(config)
    if timeline is not None:
        _draw(planned, Path(timeline))
    return planned.fits


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
        raise ConfigError('--timeline needs matplotlib: pip install "streamer[plot]"') from None


def _draw(planned: RunPlan, path: Path) -> None:
    from streamer.app.timeline import draw_trace

    draw_trace(planned.trace, path, seconds=planned.step.prediction.seconds)
