"""Steps as a picture: a row per lane, and the moments that compute waited. Needs matplotlib."""

from __future__ import annotations

import json
import tempfile
from bisect import bisect_right
from collections.abc import Iterator
from operator import itemgetter
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402 - after the choice of a backend that needs no screen
from matplotlib.patches import Patch  # noqa: E402

from streamer.checkpoint.manifest import new_file  # noqa: E402
from streamer.engine.schedule.trace import Trace  # noqa: E402

COLOURS = {
    "F": ("#4878cf", "forward"),
    "B": ("#1b3a6b", "backward"),
    "UNSHARD": ("#6acc65", "unshard: weights to a slot"),
    "FETCH_INPUT": ("#2c7a3f", "fetch_input: saved input back to the device"),
    "OFFLOAD_GRAD": ("#d65f5f", "offload_grad: gradient to the host"),
    "OFFLOAD_INPUT": ("#e8a0b4", "offload_input: saved input to the host"),
    "STEP": ("#e8a33d", "step: update on the host"),
    "ACCUMULATE": ("#a0651a", "accumulate: add gradients up on the host"),
    "NORM": ("#b47cc7", "norm: for clipping"),
    "READ_STATE": ("#8c8c3c", "read_state: optimizer state from disk"),
    "WRITE_STATE": ("#c9c96b", "write_state: to disk"),
    "READ_WEIGHTS": ("#3c8c8c", "read_weights: from disk"),
    "WRITE_WEIGHTS": ("#7fd0d0", "write_weights: to disk"),
    "REDUCE": ("#8c4a6b", "reduce: average a gradient over the ranks"),
    "ALL_GATHER": ("#3fa34d", "all_gather: other ranks' parts of weights"),
    "GATHER": ("#5c8f00", "gather: weights that other machines have updated"),
    "AGREE": ("#555555", "agree: wait for other ranks"),
}
#: What is over at once: it marks a moment of the caller's thread, or fills what is given up.
NOT_SHOWN = {"COLLECT", "SYNC", "RESHARD"}
WAITING = "#d0d0d0"
#: Compute's gaps between ops, where it waits for no lane, are shown if they take this share of the picture.
GAP = 0.0025
OUTSIDE = "between ops: the loop's own work (loss, data, Python)"
#: The least share of the picture that an op takes, about a pixel.
PIXEL = 1 / 1200


def kind_of(name: str) -> str:
    """The kind of an op from how it prints: ``12UNSHARD@1`` or ``rootSTEP``."""
    return name.removeprefix("root").lstrip("0123456789").partition("@")[0]


def _updates(events: list[dict[str, Any]]) -> tuple[list[float], list[float]]:
    """When forwards began, and when updates did, in microseconds."""
    forwards = sorted(event["ts"] for event in events if event["name"] == "rootF")
    begun: dict[str, list[float]] = {}
    for event in events:
        if kind_of(event["name"]) == "STEP":
            begun.setdefault(event["name"].partition("STEP")[0], []).append(event["ts"])
    # the root's, or, where nothing of it is trained, those of the first layer that is
    of_one = sorted(begun.get("root") or begun[min(begun, key=int)] if begun else [])
    # of state on disk each chunk has an update of its own: the first of those between two forwards
    return forwards, sorted({bisect_right(forwards, ts): ts for ts in reversed(of_one)}.values())


def whole_steps(trace: Path, *, most: int) -> int:
    """How many of the last steps of ``trace`` can be drawn, ``most`` at most."""
    return max(0, min(most, len(_updates(boxes(trace))[1]) - 1))


def step_bounds(events: list[dict[str, Any]], steps: int) -> tuple[float, float]:
    """From the start of the forward ``steps`` steps before the last whole one, in microseconds."""
    forwards, updates = _updates(events)
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
    used = {event["tid"] for event in everything if event["ph"] == "X"}
    named = {event["tid"]: event["args"]["name"] for event in everything if event["ph"] == "M"}
    rows = {tid: name for tid, name in named.items() if tid in used}
    figure, axes = plt.subplots(figsize=(12, 1.2 + 0.4 * len(rows)), layout="constrained")
    order = {tid: len(rows) - 1 - row for row, tid in enumerate(rows)}
    # microseconds in a unit of the axis
    unit = 1e6 if end - begin > 5e6 else 1e3
    drawn: set[str] = set()
    for event in boxes(trace):
        if event["ts"] + event["dur"] < begin or event["ts"] > end:
            continue
        kind = kind_of(event["name"])
        waiting = "exposed" in event["args"]
        if not waiting and kind in NOT_SHOWN:
            continue
        drawn.add("waiting" if waiting else kind)
        axes.barh(
            order[event["tid"]],
            max(event["dur"], PIXEL * (end - begin)) / unit,
            left=(event["ts"] - begin) / unit,
            height=0.5 if waiting else 0.8,
            color=WAITING if waiting else COLOURS[kind][0],
            # an edge would hide an op that is shorter than a pixel
            edgecolor="white" if event["dur"] > (end - begin) / 500 else None,
            linewidth=0.3 if event["dur"] > (end - begin) / 500 else 0,
        )
    gaps = [
        (since, until) for since, until in _gaps(trace, begin, end) if until - since > GAP * (end - begin)
    ]
    for since, until in gaps:
        axes.barh(
            order[0],
            (until - since) / unit,
            left=(since - begin) / unit,
            height=0.5,
            facecolor="white",
            edgecolor=WAITING,
            hatch="////",
            linewidth=0.3,
        )
    axes.set_yticks([order[tid] for tid in rows], list(rows.values()), fontsize=11)
    axes.set_xlim(0, (end - begin) / unit)
    axes.set_xlabel("seconds" if unit > 1e3 else "milliseconds", fontsize=11)
    axes.tick_params(axis="x", labelsize=11)
    legend = [Patch(color=colour, label=label) for kind, (colour, label) in COLOURS.items() if kind in drawn]
    if "waiting" in drawn:
        legend.append(Patch(color=WAITING, label="compute waits"))
    if gaps:
        legend.append(Patch(facecolor="white", edgecolor=WAITING, hatch="////", label=OUTSIDE))
    figure.legend(handles=legend, loc="outside upper center", ncols=3, fontsize=10, frameon=False)
    picture.parent.mkdir(parents=True, exist_ok=True)
    with new_file(picture) as file:
        figure.savefig(file, dpi=130)
    plt.close(figure)


def _gaps(trace: Path, begin: float, end: float) -> Iterator[tuple[float, float]]:
    """When nothing ran on the lane of compute, and it waited for no other, from ``begin`` to ``end``."""
    free = begin
    for event in sorted((e for e in boxes(trace) if e["tid"] == 0), key=itemgetter("ts")):
        if event["ts"] > end:
            break
        if event["ts"] > free:
            yield free, event["ts"]
        free = max(free, event["ts"] + event["dur"])
    if free < end:
        yield free, end


def draw_trace(trace: Trace, picture: Path, *, seconds: float) -> None:
    """Draw the last step of ``trace``, which took ``seconds``."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        trace.save(path)
        end = max(event["ts"] + event["dur"] for event in boxes(path) if event["tid"] == 0)
        draw_between(path, picture, end - seconds * 1e6, end)
