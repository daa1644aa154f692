"""``run.report``: what ``metrics.jsonl`` has, also for TensorBoard and for Weights & Biases, by their own
libraries.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

from streamer.app.config import Config, ConfigError
from streamer.checkpoint.tensors import in_a_line

#: The folder of TensorBoard's files in a run's directory, and the file with the id of a run of wandb.
TENSORBOARD, WANDB_ID = "tensorboard", ".wandb-id"
#: wandb's project, unless the environment has WANDB_PROJECT.
PROJECT = "streamer"


class Report(NamedTuple):
    """Somewhere that values of a step are written to: ``log`` gets the step and the values, by name."""

    log: Callable[[int, Mapping[str, float]], object]
    close: Callable[[], object]


def check_reports(names: Collection[str]) -> None:
    """Raise ConfigError for a library that is not installed."""
    for name in names:
        try:
            _library(name)
        except ImportError as error:
            raise ConfigError(
                f"run.report: {name} cannot be imported ({error}): pip install '.[{name}]'"
            ) from error


def _library(name: str) -> Any:
    return import_module("torch.utils.tensorboard" if name == "tensorboard" else name)


def open_reports(config: Config, directory: Path, step: int, tell: Callable[[str], object]) -> list[Report]:
    """The reports of ``run.report``, for the run in ``directory`` that goes on after ``step``. Once they are
    open no error of theirs ends the run: ``tell`` gets a line for the first of each."""
    made = {"tensorboard": _tensorboard, "wandb": _wandb}
    return [
        _lasting(name, made[name](_library(name), config, directory, step), tell)
        for name in config.run.report
    ]


def _lasting(name: str, report: Report, tell: Callable[[str], object]) -> Report:
    has_told = False

    def tried(work: Callable[..., object], *arguments: Any) -> None:
        nonlocal has_told
        try:
            work(*arguments)
        except Exception as error:  # whatever the library raises: a full disk, a connection that is gone
            if not has_told:
                tell(f"run.report: {name}: {in_a_line(error)}; the run goes on, and metrics.jsonl has all")
            has_told = True

    return Report(partial(tried, report.log), partial(tried, report.close))


def _tensorboard(library: Any, config: Config, directory: Path, step: int) -> Report:
    # what an earlier try has written beyond the step is not shown
    writer = library.SummaryWriter(str(directory / TENSORBOARD), purge_step=step + 1 if step else None)

    def log(step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return Report(log, writer.close)


def _wandb(library: Any, config: Config, directory: Path, step: int) -> Report:
    note = directory / WANDB_ID
    made = ""
    if step:
        with suppress(FileNotFoundError):
            made = note.read_text()
    if not made:
        made = uuid4().hex[:8]
        note.write_text(made)
    run = library.init(
        project=os.environ.get("WANDB_PROJECT", PROJECT),
        name=directory.name,
        id=made,
        resume="allow",
        dir=str(directory),
        config=asdict(config),
    )
    # steps that are made again after a checkpoint would be dropped if they were wandb's own
    run.define_metric("*", step_metric="step")
    return Report(lambda step, values: run.log({"step": step, **values}), run.finish)
