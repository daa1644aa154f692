"""The command `streamer plot`: pictures of runs, from the files in their folders."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

from streamer.checkpoint.manifest import new_file
from streamer.cli.config import ConfigError

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402 - after the choice of a backend that needs no screen
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.ticker import EngFormatter, MaxNLocator  # noqa: E402

from streamer.cli.plan.timeline import draw, whole_steps  # noqa: E402

#: Folder of the pictures: in the run's folder, or in the first run's.
PLOTS = "plots"
#: Steps in the median of a run's speed, drawn over the single steps.
SMOOTHED = 21
#: Steps in a timeline.
STEPS = 2


@dataclass(frozen=True)
class Curve:
    """Values of a run by step."""

    steps: list[int]
    values: list[float]


@dataclass(frozen=True)
class Run:
    """A run's files: the lines of its ``metrics.jsonl`` and, once it has ended, its summary."""

    name: str
    folder: Path
    lines: list[dict[str, Any]]
    summary: dict[str, Any] | None

    def curve(self, key: str) -> Curve:
        """The values of ``key`` in the lines that have it."""
        found = [(line["step"], line[key]) for line in self.lines if line.get(key) is not None]
        return Curve([step for step, _ in found], [value for _, value in found])


def read(folder: Path) -> Run:
    """A run's files. Raises ConfigError for a folder that holds none."""
    path = folder / "metrics.jsonl"
    if not path.is_file():
        raise ConfigError(f"{folder} is not the folder of a run: it has no {path.name}")
    lines = []
    for line in path.read_text().splitlines():
        try:
            lines.append(json.loads(line))
        except ValueError:
            continue  # the run is writing this line now, or was killed while writing it
    if not lines:
        raise ConfigError(f"{path} is empty: plot the run after its first step")
    summary = folder / "summary.json"
    ended = json.loads(summary.read_text()) if summary.is_file() else None
    return Run(folder.resolve().name, folder, lines, ended)


def plot(folders: Sequence[Path], to: Path | None = None) -> list[Path]:
    """Draw the runs in ``folders`` into ``to`` (default: `PLOTS` in the first). Returns the pictures' paths.

    ``training.png``: loss, learning rate and tokens/s by step, all runs in one picture. For a single run that
    has ended also ``lanes.png``, seconds by lane, and ``timeline.png``, its last whole steps.

    Raises ConfigError for a folder without a run, and OSError if a picture cannot be written.
    """
    runs = [read(folder) for folder in folders]
    to = folders[0] / PLOTS if to is None else to
    to.mkdir(parents=True, exist_ok=True)
    written = [_training(runs, to / "training.png")]
    if len(runs) > 1:
        return written
    [run] = runs
    if run.summary is None:
        print(f"{run.folder} has not ended: lanes and the timeline need a finished run")
        return written
    written.append(_lanes(run.summary, to / "lanes.png"))
    trace = run.folder / "trace.json"
    steps = whole_steps(trace, most=STEPS) if trace.is_file() else 0
    if steps:
        draw(trace, to / "timeline.png", steps=steps)
        written.append(to / "timeline.png")
    else:
        print(f"no timeline: {trace} holds no two whole steps")
    return written


def _training(runs: Sequence[Run], picture: Path) -> Path:
    figure, (loss, rate, speed) = plt.subplots(
        3, 1, figsize=(9, 9), sharex=True, height_ratios=(3, 1, 1.5), layout="constrained"
    )
    several = len(runs) > 1
    for number, run in enumerate(runs):
        colour = f"C{number % 10}"
        before = f"{run.name}, " if several else ""
        trained, validated = run.curve("loss"), run.curve("val_loss")
        loss.plot(trained.steps, trained.values, color=colour, alpha=0.35, lw=1, label=f"{before}training")
        loss.plot(
            validated.steps, validated.values, "o-", color=colour, ms=5, lw=2, label=f"{before}validation"
        )
        rates = run.curve("lr")
        rate.plot(rates.steps, rates.values, color=colour, lw=2)
        seconds = run.curve("tokens_per_second")
        speed.plot(seconds.steps, seconds.values, color=colour, alpha=0.25, lw=1)
        speed.plot(seconds.steps, _smoothed(seconds.values), color=colour, lw=2)
    loss.set_ylabel("loss, nats per token")
    loss.legend(fontsize=11, frameon=False)
    _loss_limits(loss, runs)
    rate.set_ylabel("learning rate")
    rate.set_ylim(bottom=0)
    speed.set_ylabel(f"tokens/s, with the\nmedian of {SMOOTHED} steps")
    speed.set_ylim(bottom=0)
    speed.yaxis.set_major_formatter(EngFormatter(sep=""))
    speed.set_xlabel("step")
    speed.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    for axes in (loss, rate, speed):
        axes.grid(alpha=0.25)
        axes.yaxis.label.set_size(12)
        axes.tick_params(labelsize=11)
        axes.margins(x=0.01)
    speed.xaxis.label.set_size(12)
    return _written(figure, picture)


def _loss_limits(axes: Axes, runs: Sequence[Run]) -> None:
    """Cut off outliers, such as the loss of steps before a rollback."""
    values = sorted(value for run in runs for key in ("loss", "val_loss") for value in run.curve(key).values)
    if len(values) < 20:
        return
    low, high = values[0], values[int(0.99 * (len(values) - 1))]
    first = max((run.curve("val_loss").values or [high])[0] for run in runs)
    high = max(high, first)
    axes.set_ylim(low - 0.05 * (high - low), high + 0.05 * (high - low))


def _smoothed(values: Sequence[float]) -> list[float]:
    half = SMOOTHED // 2
    return [
        statistics.median(values[max(0, place - half) : place + half + 1]) for place in range(len(values))
    ]


def _lanes(summary: dict[str, Any], picture: Path) -> Path:
    """For each lane the seconds in which it was busy, and those in which compute waited for it."""
    busy = {lane: seconds for lane, seconds in summary["busy_seconds"].items() if seconds > 0}
    lanes = list(busy)[::-1]
    waited = [summary["exposed_seconds"].get(lane, 0.0) if lane != "compute" else 0.0 for lane in lanes]
    figure, axes = plt.subplots(figsize=(9, 1.6 + 0.6 * len(lanes)), layout="constrained")
    places = range(len(lanes))
    axes.barh(
        [place + 0.18 for place in places], list(busy.values())[::-1], height=0.34, color="#4878cf",
        label="busy",
    )  # fmt: skip
    axes.barh(
        [place - 0.18 for place in places], waited, height=0.34, color="#d65f5f",
        label="exposed: compute waited for it",
    )  # fmt: skip
    axes.set_yticks(list(places), lanes, fontsize=12)
    axes.set_xlabel("seconds in the run after its first step", fontsize=12)
    axes.tick_params(axis="x", labelsize=11)
    axes.grid(axis="x", alpha=0.25)
    figure.legend(loc="outside upper center", ncols=2, fontsize=11, frameon=False)
    return _written(figure, picture)


def _written(figure: Any, picture: Path) -> Path:
    with new_file(picture) as file:
        figure.savefig(file, dpi=110)
    plt.close(figure)
    return picture
