"""The command `streamer plot`: pictures of runs, from the files in their folders."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

from streamer.checkpoint.manifest import new_file
from streamer.cli.config import ConfigError

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402 - after the choice of a backend that needs no screen
from matplotlib.ticker import EngFormatter, MaxNLocator  # noqa: E402

from streamer.cli.plan.timeline import draw, whole_steps  # noqa: E402
from streamer.cli.run import METRICS, SUMMARY, TRACE, Lines  # noqa: E402

#: Folder of the pictures: in the run's folder, or in the first run's.
PLOTS = "plots"
#: Steps in the median of a run's speed, drawn over the single steps.
SMOOTHED = 21
#: Steps in a timeline.
STEPS = 2


def read(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's ``metrics.jsonl``. Raises ConfigError for a folder that holds none."""
    path = folder / METRICS
    if not path.is_file():
        raise ConfigError(f"{folder} is not the folder of a run: it has no {path.name}")
    if not (lines := Lines(path).read()):
        raise ConfigError(f"{path} is empty: plot the run after its first step")
    return lines


def plot(folders: Sequence[Path], to: Path | None = None) -> list[Path]:
    """Draw the runs in ``folders`` into ``to`` (default: `PLOTS` in the first). Returns the pictures' paths.

    ``training.png``: loss, learning rate and tokens/s by step, all runs in one picture. For a single run that
    has ended also ``lanes.png``, seconds by lane, and ``timeline.png``, its last whole steps.

    Raises ConfigError for a folder without a run, and OSError if a picture cannot be written.
    """
    runs = {folder: read(folder) for folder in folders}
    to = folders[0] / PLOTS if to is None else to
    to.mkdir(parents=True, exist_ok=True)
    written = [_training(runs, to / "training.png")]
    summary, trace = folders[0] / SUMMARY, folders[0] / TRACE
    if len(runs) > 1 or not summary.is_file():
        return written
    written.append(_lanes(json.loads(summary.read_text()), to / "lanes.png"))
    if trace.is_file() and (steps := whole_steps(trace, most=STEPS)):
        draw(trace, to / "timeline.png", steps=steps)
        written.append(to / "timeline.png")
    return written


def _training(runs: Mapping[Path, list[dict[str, Any]]], picture: Path) -> Path:
    figure, (loss, rate, speed) = plt.subplots(
        3, 1, figsize=(9, 9), sharex=True, height_ratios=(3, 1, 1.5), layout="constrained"
    )
    for number, (folder, lines) in enumerate(runs.items()):
        colour, name = f"C{number % 10}", f"{folder.resolve().name}, " if len(runs) > 1 else ""
        loss.plot(*_curve(lines, "loss"), color=colour, alpha=0.35, lw=1, label=f"{name}training")
        loss.plot(*_curve(lines, "val_loss"), "o-", color=colour, ms=5, lw=2, label=f"{name}validation")
        rate.plot(*_curve(lines, "lr"), color=colour, lw=2)
        steps, values = _curve(lines, "tokens_per_second")
        speed.plot(steps, values, color=colour, alpha=0.25, lw=1)
        speed.plot(steps, _smoothed(values), color=colour, lw=2)
    loss.set_ylabel("loss, nats per token")
    loss.legend(fontsize=11, frameon=False)
    rate.set_ylabel("learning rate")
    rate.set_ylim(bottom=0)
    speed.set_ylabel(f"tokens/s, with the\nmedian of {SMOOTHED} steps")
    speed.set_ylim(bottom=0)
    speed.yaxis.set_major_formatter(EngFormatter(sep=""))
    speed.set_xlabel("step")
    speed.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    for axes in (loss, rate, speed):
        axes.grid(alpha=0.25)
        axes.margins(x=0.01)
    return _written(figure, picture)


def _curve(lines: Sequence[dict[str, Any]], key: str) -> tuple[list[int], list[float]]:
    """The steps at which ``key`` was written, and its values."""
    found = [line for line in lines if line.get(key) is not None]
    return [line["step"] for line in found], [line[key] for line in found]


def _smoothed(values: Sequence[float]) -> list[float]:
    half = SMOOTHED // 2
    return [
        statistics.median(values[max(0, place - half) : place + half + 1]) for place in range(len(values))
    ]


def _lanes(summary: dict[str, Any], picture: Path) -> Path:
    """For each lane the seconds in which it was busy, and those in which compute waited for it."""
    lanes = [lane for lane, seconds in summary["busy_seconds"].items() if seconds > 0][::-1]
    busy = [summary["busy_seconds"][lane] for lane in lanes]
    exposed = [0.0 if lane == "compute" else summary["exposed_seconds"][lane] for lane in lanes]
    figure, axes = plt.subplots(figsize=(9, 1.6 + 0.6 * len(lanes)), layout="constrained")
    places = range(len(lanes))
    above, below = ([place + shift for place in places] for shift in (0.18, -0.18))
    axes.barh(above, busy, height=0.34, color="#4878cf", label="busy")
    axes.barh(below, exposed, height=0.34, color="#d65f5f", label="exposed: compute waited for it")
    axes.set_yticks(list(places), lanes, fontsize=12)
    axes.set_xlabel("seconds in the run after its first step", fontsize=12)
    axes.grid(axis="x", alpha=0.25)
    figure.legend(loc="outside upper center", ncols=2, fontsize=11, frameon=False)
    return _written(figure, picture)


def _written(figure: Any, picture: Path) -> Path:
    with new_file(picture) as file:
        figure.savefig(file, dpi=110)
    plt.close(figure)
    return picture
