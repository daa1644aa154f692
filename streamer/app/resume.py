"""The checkpoints of a run: where they are, and how a run goes on from one."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import streamer
from streamer.app.config import Config, ConfigError, load_config
from streamer.files.errors import CheckpointError
from streamer.files.folder import checkpoints, prune
from streamer.files.manifest import Manifest

#: In a run's directory.
FOLDER = "checkpoints"


def checkpoint_to_resume(config: Config, given: str | None) -> Path:
    """The checkpoint that ``--resume`` means: ``given`` itself, or the latest one of the run's directory
    ``given``, or of the last run of the config's name.

    Raises ConfigError where there is none, or where the run was made with another config.
    """
    if given is not None:
        path = Path(given)
        found = checkpoints(path / FOLDER) or ([path] if path.is_dir() else [])
    else:
        out = Path(config.run.out)
        runs = [out / config.run.name, *out.glob(f"{config.run.name}-[0-9]*")]
        of_runs = [of_run for run in runs if (of_run := checkpoints(run / FOLDER))]
        found = max(of_runs, key=lambda of_run: of_run[-1].stat().st_mtime) if of_runs else []
    if not found:
        where = given or f"{config.run.out}/{config.run.name}"
        raise ConfigError(
            f"{where} holds no complete checkpoint: train with run.save_every, or without --resume"
        )
    _check_config(config, found[-1].parent.parent)
    return found[-1]


def _check_config(config: Config, directory: Path) -> None:
    """Raise ConfigError if what a run in ``directory`` ends in would not be what its config says."""
    path = directory / "config.toml"
    if not path.exists():
        return
    then = load_config(path)
    # how long it is, what is looked at, and how it is streamed may change; what is computed may not
    for section in ("model", "data", "optimizer"):
        if getattr(then, section) != getattr(config, section):
            raise ConfigError(f"the run was made with another [{section}]: resume it with {path}")
    if then.run.seed != config.run.seed or then.run.steps != config.run.steps:
        raise ConfigError(f"the run was made with another run.seed or run.steps: resume it with {path}")


class Checkpoints:
    """Those of the run in ``directory``, of which the last ``keep`` are kept."""

    def __init__(self, directory: Path, *, keep: int) -> None:
        self.folder = directory / FOLDER
        self._keep = keep

    def save(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, *, step: int, extra: dict[str, Any]
    ) -> Path:
        """Write one for ``step``, unless it is there, and delete those that it replaces; where it is.

        One that is there and damaged is put aside, under a hidden name.
        """
        path = self.folder / f"step-{step:07d}"
        if path.exists():
            try:
                Manifest.read(path).check(path)
            except CheckpointError:
                path.rename(path.with_name(f".{path.name}.damaged-{time.time_ns()}"))
            else:
                return path
        streamer.save(model, optimizer, path, step=step, extra=extra)
        prune(self.folder, self._keep)
        return path

    def latest(self) -> Path | None:
        """The last complete one."""
        return next(reversed(checkpoints(self.folder)), None)

    def load(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, path: Path, *, fall_back: bool
    ) -> streamer.Loaded:
        """Go on from the checkpoint ``path`` or, if it is damaged and ``fall_back`` says so, from the latest
        one before it that is not. Raises ConfigError where there is none."""
        before = [other for other in checkpoints(path.parent) if other < path] if fall_back else []
        damaged = []
        for candidate in (path, *reversed(before)):
            try:
                return streamer.load(model, optimizer, candidate)
            except CheckpointError as error:
                damaged.append(str(error))
                print(f"not usable: {error}")
        mend = "" if fall_back else "; --fall-back goes on from the one before"
        raise ConfigError(f"cannot resume: {damaged[0]}{mend}")


def forget_after(metrics: Path, step: int) -> None:
    """Drop the lines of ``metrics.jsonl`` beyond ``step``, which will be written again, and a torn one."""
    kept = []
    for line in metrics.read_text().splitlines() if metrics.exists() else ():
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line)
        except ValueError:
            continue  # the process was killed in the middle of it
    metrics.write_text("".join(f"{line}\n" for line in kept))
