"""Draw some steps of a run as a timeline: a row per lane, and the moments that compute waited.

    python bench/timeline.py runs/gpt2-demo/trace.json timeline.png --steps 2

Reads the Chrome trace that `streamer train` writes; needs matplotlib (the extra [plot]). The picture in the
README is of layers wide enough for their copies to be seen:

    streamer train configs/gpt2-demo.toml --set 'run.name="wide"' --set run.steps=6 \\
        --set run.sample_tokens=0 --set model.args.n_embd=1024 --set model.args.n_head=16 \\
        --set data.batch_size=2 --set optimizer.lr=1e-4 --set optimizer.warmup_steps=0
    python bench/timeline.py runs/wide/trace.json bench/results/timeline.png
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402 - after the choice of a backend that needs no screen
from matplotlib.patches import Patch  # noqa: E402

COLOURS = {
    "F": ("#4878cf", "forward"),
    "B": ("#1b3a6b", "backward"),
    "UNSHARD": ("#6acc65", "unshard: weights to a slot"),
    "OFFLOAD_GRAD": ("#d65f5f", "offload_grad: gradient to the host"),
    "STEP": ("#e8a33d", "step: update on the host"),
    "NORM": ("#b47cc7", "norm: for clipping"),
}
WAITING = "#d0d0d0"


def kind_of(name: str) -> str:
    """The kind of an op from how it prints: ``12UNSHARD@1`` or ``rootSTEP``."""
    return name.removeprefix("root").lstrip("0123456789").partition("@")[0]


def step_bounds(events: list[dict[str, Any]], steps: int) -> tuple[float, float]:
    """From the start of the forward ``steps`` steps before the last whole one, in microseconds."""
    updates = sorted(event["ts"] for event in events if event["name"] == "rootSTEP")
    forwards = sorted(event["ts"] for event in events if event["name"] == "rootF")
    if len(updates) < steps + 1:
        raise SystemExit(f"the trace holds {len(updates)} steps: {steps + 1} are needed to show {steps}")
    begin = max(ts for ts in forwards if ts < updates[-steps])
    return begin, next((ts for ts in forwards if ts > updates[-1]), max(e["ts"] + e["dur"] for e in events))


def boxes(trace: Path) -> list[dict[str, Any]]:
    """What has run, and what has waited, in ``trace``."""
    return [event for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"]


def forwards(trace: Path) -> list[float]:
    """When each forward in ``trace`` began, in microseconds."""
    return sorted(event["ts"] for event in boxes(trace) if event["name"] == "rootF")


def draw(trace: Path, picture: Path, *, steps: int) -> None:
    """Draw the last ``steps`` steps of ``trace``."""
    draw_between(trace, picture, *step_bounds(boxes(trace), steps))


def draw_between(trace: Path, picture: Path, begin: float, end: float) -> None:
    """Draw what ``trace`` shows from ``begin`` to ``end``, in microseconds."""
    everything = json.loads(trace.read_text())["traceEvents"]
    rows = {event["tid"]: event["args"]["name"] for event in everything if event["ph"] == "M"}
    figure, axes = plt.subplots(figsize=(12, 2.8), layout="constrained")
    order = {tid: len(rows) - 1 - row for row, tid in enumerate(rows)}
    seen: set[str] = set()
    for event in boxes(trace):
        if event["ts"] + event["dur"] < begin or event["ts"] > end:
            continue
        kind = kind_of(event["name"])
        waiting = "exposed" in event["args"]
        if not waiting and kind not in COLOURS:
            continue
        seen.add("waiting" if waiting else kind)
        axes.barh(
            order[event["tid"]],
            event["dur"] / 1e3,
            left=(event["ts"] - begin) / 1e3,
            height=0.5 if waiting else 0.8,
            color=WAITING if waiting else COLOURS[kind][0],
            # an edge would hide an op that is shorter than a pixel
            edgecolor="white" if event["dur"] > (end - begin) / 500 else None,
            linewidth=0.3 if event["dur"] > (end - begin) / 500 else 0,
        )
    axes.set_yticks([order[tid] for tid in rows], list(rows.values()))
    axes.set_xlim(0, (end - begin) / 1e3)
    axes.set_xlabel("milliseconds")
    legend = [Patch(color=colour, label=label) for kind, (colour, label) in COLOURS.items() if kind in seen]
    if "waiting" in seen:
        legend.append(Patch(color=WAITING, label="compute waits"))
    figure.legend(handles=legend, loc="outside upper center", ncols=4, fontsize=8, frameon=False)
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--steps", type=int, default=2, help="how many of the last steps to show (2)")
    arguments = parser.parse_args()
    draw(arguments.trace, arguments.picture, steps=arguments.steps)


if __name__ == "__main__":
    main()
