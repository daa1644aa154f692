"""The folder of a run: its place, its checkpoints and which one a run resumes from, and its summary."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

import streamer
from streamer.app.config import Config, ConfigError, dump_config, load_config
from streamer.backends.base import DISKS
from streamer.checkpoint.manifest import Manifest, checkpoints, prune
from streamer.errors import CheckpointError


def numbered(wanted: Path) -> Iterator[Path]:
    """Names to try until one is free: ``name``, ``name-2``, ``name-3`` and so on."""
    return itertools.chain([wanted], (wanted.with_name(f"{wanted.name}-{n}") for n in itertools.count(2)))


def run_directory(config: Config) -> Path:
    """A new directory for the run with the resolved config in it. Raises ConfigError where there can be
    none."""
    wanted = Path(config.run.out) / config.run.name
    try:
        wanted.parent.mkdir(parents=True, exist_ok=True)
        for directory in numbered(wanted):
            with contextlib.suppress(FileExistsError):
                directory.mkdir()
                break
        (directory / "config.toml").write_text(dump_config(config))
    except OSError as error:
        raise ConfigError(f"cannot write to {wanted} ({error.strerror}): set run.out or run.name") from error
    return directory


def summary_of(model: nn.Module, **trained: float) -> dict[str, Any]:
    """What ``summary.json`` holds: bytes and seconds by lane of a wrapped model, beside the figures of its
    training (losses in nats per token). The overlap of an idle lane is None."""
    streamer.synchronize(model)
    stats = streamer.stats(model)
    params = list(model.parameters())
    parameters = sum(param.numel() for param in params)
    return {
        "parameters": parameters,
        "weight_bytes": sum(param.nbytes for param in params),
        "device_bytes_peak": stats.device_bytes_peak,
        "host_bytes_per_parameter": sum(stats.host_bytes.values()) / parameters,
        "disk_bytes_per_parameter": sum(stats.disk_bytes.values()) / parameters,
        **trained,
        "busy_seconds": dict(stats.busy_seconds),
        "exposed_seconds": dict(stats.exposed_seconds),
        "overlap": {lane: None if math.isnan(of) else of for lane, of in stats.overlap.items()},
    }


def summary_table(summary: Mapping[str, Any], *, unit: str = "byte") -> str:
    """The summary as a table for the terminal."""
    # a plain optimizer's two fp32 moments stand beside the weights and their gradients
    resident = 2 * summary["weight_bytes"] + 8 * summary["parameters"]
    held = summary["disk_bytes_per_parameter"]
    on_disk = [("disk bytes per parameter", f"{held:.2f}")] if held else []
    rows = [
        ("parameters", f"{summary['parameters']:,}"),
        ("weights", amount(summary["weight_bytes"])),
        ("peak on the device", f"{amount(summary['device_bytes_peak'])} with the layers' saved inputs"),
        ("if all were held there", f"{amount(resident)} of weights, gradients and moments"),
        ("host bytes per parameter", f"{summary['host_bytes_per_parameter']:.2f}"),
        *on_disk,
        ("tokens/s", f"{summary['tokens_per_second']:,.0f}"),
        ("validation loss before", f"{summary['first_val_loss']:.3f} nats per {unit}"),
        ("validation loss after", f"{summary['last_val_loss']:.3f}"),
        (f"{unit} frequencies alone", f"{summary['unigram_loss']:.3f}"),
    ]
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:{width}}  {value}" for name, value in rows]
    wide = 12 if on_disk else 8
    lines.append(f"\n{'lane':{wide}}{'busy s':>10}{'exposed s':>12}{'overlap':>10}")
    late = []
    for lane, busy in summary["busy_seconds"].items():
        if not (on_disk or busy) and lane in [each.value for each in DISKS]:
            continue
        part = summary["overlap"][lane]
        if part is not None and part < 0:
            late.append(lane)
        overlap = "-" if lane == "compute" or part is None else "none" if lane in late else f"{part:.1%}"
        exposed = "-" if lane == "compute" else f"{summary['exposed_seconds'][lane]:.2f}"
        lines.append(f"{lane:{wide}}{busy:>10.2f}{exposed:>12}{overlap:>10}")
    if late:
        lines.append(
            f"{', '.join(late)}: compute waited longer than the lane worked, whose work began late: other "
            "processes, or too few cores"
        )
    return "\n".join(lines)


def amount(nbytes: float) -> str:
    """Bytes in the largest binary unit that leaves a figure of 1 or more."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.2f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.2f} TiB"


#: Where checkpoints are in a run's directory.
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
    """Raise ConfigError if ``config`` would compute something else than the run in ``directory``."""
    path = directory / "config.toml"
    if not path.exists():
        return
    then = load_config(path)
    # what is reported, saved and streamed may change; what is computed may not
    changed = [
        f"[{name}]"
        for name in ("model", "lora", "data", "optimizer")
        if getattr(then, name) != getattr(config, name)
    ]
    if then.run.seed != config.run.seed or then.run.steps != config.run.steps:
        changed.append("run.seed or run.steps")
    if changed:
        raise ConfigError(f"the run was made with another {changed[0]}: resume it with {path}")


class Checkpoints:
    """The checkpoints of the run in ``directory``; `save` keeps the last ``keep``. They hold what is not
    trained if ``frozen`` says so."""

    def __init__(self, directory: Path, *, keep: int, frozen: bool = True) -> None:
        self.folder = directory / FOLDER
        self._keep = keep
        self._frozen = frozen

    def save(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, *, step: int, extra: dict[str, Any]
    ) -> Path:
        """Write the checkpoint of ``step``, unless it is there, and delete those beyond ``keep``; its path.

        A damaged one of the same step is put aside, under a hidden name.
        """
        path = self.folder / f"step-{step:07d}"
        if path.exists():
            try:
                Manifest.read(path).check(path)
            except CheckpointError:
                path.rename(path.with_name(f".{path.name}.damaged-{time.time_ns()}"))
            else:
                return path
        streamer.save(model, optimizer, path, step=step, extra=extra, frozen=self._frozen)
        prune(self.folder, self._keep)
        return path

    def latest(self) -> Path | None:
        """The last complete checkpoint."""
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
        remedy = "" if fall_back else "; --fall-back goes on from the one before"
        raise ConfigError(f"cannot resume: {damaged[0]}{remedy}")


def forget_after(metrics: Path, step: int) -> None:
    """Drop the lines of ``metrics.jsonl`` beyond ``step``, which will be written again, and an incomplete
    last line."""
    kept = []
    for line in metrics.read_text().splitlines() if metrics.exists() else ():
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line)
        except ValueError:
            continue  # the process was killed while it wrote this line
    metrics.write_text("".join(f"{line}\n" for line in kept))
