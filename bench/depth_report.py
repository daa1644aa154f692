"""What `bench.depth` has measured: figures by depth, the lines through them, a table and a picture."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.common import quartiles


@dataclass(frozen=True)
class Block:
    """A block of steps: the median step's seconds, and bytes on the device."""

    seconds: float
    owned: Mapping[str, int]  # by purpose
    peak: int


def line_through(xs: Sequence[float], ys: Sequence[float]) -> dict[str, float]:
    """The straight line through two or more points by least squares, and how far they are from it.

    ``r_squared`` is NaN where all ``ys`` are equal; a residual is relative to its ``y``.
    """
    slope, intercept = statistics.linear_regression(xs, ys)
    residuals = [y - (slope * x + intercept) for x, y in zip(xs, ys, strict=True)]
    mean = statistics.fmean(ys)
    variation = math.fsum((y - mean) ** 2 for y in ys)
    return {
        "slope": slope,
        "intercept": intercept,
        "r_squared": 1 - math.fsum(r**2 for r in residuals) / variation if variation else math.nan,
        "largest_relative_residual": max(abs(r / y) for r, y in zip(residuals, ys, strict=True)),
    }


def summary(found: Mapping[int, Sequence[Block]]) -> dict[str, Any]:
    """Figures of each depth, and lines through those that may grow with it."""
    depths = [depth_figures(n_layer, found[n_layer]) for n_layer in sorted(found)]
    layers = [depth["n_layer"] for depth in depths]
    return {
        "depths": depths,
        "owned_bytes_are_equal": all(depth["owned_bytes"] == depths[0]["owned_bytes"] for depth in depths),
        "step_seconds_over_layers": line_through(
            layers, [depth["seconds_per_step"]["median"] for depth in depths]
        ),
        "peak_bytes_over_layers": line_through(layers, [depth["peak_bytes"] for depth in depths]),
    }


def depth_figures(n_layer: int, blocks: Sequence[Block]) -> dict[str, Any]:
    """Figures of one depth; the peak is the highest of all blocks."""
    seconds = quartiles(block.seconds for block in blocks)
    owned, peak = blocks[0].owned, max(block.peak for block in blocks)
    total = sum(owned.values())
    return {
        "n_layer": n_layer,
        "seconds_per_step": seconds,
        "seconds_per_layer": seconds["median"] / n_layer,
        "owned_bytes": dict(owned),
        "owned_bytes_total": total,
        "peak_bytes": peak,
        "beyond_owned_bytes_per_layer": (peak - total) / n_layer,
    }


def print_table(found: Mapping[str, Any]) -> None:
    print(f"{'':6}{'step, ms':>26}{'':>12}{'device, MB':>12}{'':>10}{'peak - owned,':>16}")
    print(
        f"{'layers':6}{'median (quartiles)':>26}{'a layer':>12}{'owned':>12}{'peak':>10}{'kB per layer':>16}"
    )
    for depth in found["depths"]:
        lower, median, upper = (value * 1e3 for value in depth["seconds_per_step"].values())
        spread = f"{median:.1f} ({lower:.1f}-{upper:.1f})"
        print(
            f"{depth['n_layer']:>6}{spread:>26}{depth['seconds_per_layer'] * 1e3:>12.2f}"
            f"{depth['owned_bytes_total'] / 1e6:>12.2f}{depth['peak_bytes'] / 1e6:>10.2f}"
            f"{depth['beyond_owned_bytes_per_layer'] / 1e3:>16.1f}"
        )
    time_line, peak_line = found["step_seconds_over_layers"], found["peak_bytes_over_layers"]
    print(
        f"step: {time_line['intercept'] * 1e3:.2f} ms + {time_line['slope'] * 1e3:.3f} ms per layer; R^2 "
        f"{time_line['r_squared']:.5f}, largest residual {time_line['largest_relative_residual']:.1%}"
    )
    print(f"peak: {peak_line['intercept'] / 1e6:.2f} MB + {peak_line['slope'] / 1e3:.1f} kB per layer")
    if found["owned_bytes_are_equal"]:
        print(f"owned: the same at every depth, {found['depths'][0]['owned_bytes_total']:,} bytes")
        return
    for depth in found["depths"]:
        print(f"owned: DIFFERS, with {depth['n_layer']} layers {depth['owned_bytes']}")


def draw(found: Mapping[str, Any], picture: Path, *, title: str) -> None:
    """Step time and device bytes over layers, if matplotlib is there."""
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        print(f"not drawn: {error}; matplotlib comes with the extra [plot]")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    depths, line = found["depths"], found["step_seconds_over_layers"]
    layers = [depth["n_layer"] for depth in depths]
    lower, median, upper = (
        [depth["seconds_per_step"][name] * 1e3 for depth in depths]
        for name in ("lower_quartile", "median", "upper_quartile")
    )
    figure, (times, sizes) = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    figure.suptitle(title, fontsize=10)
    fitted = [(line["intercept"] + line["slope"] * n_layer) * 1e3 for n_layer in (0, layers[-1])]
    label = f"{line['intercept'] * 1e3:.1f} ms + {line['slope'] * 1e3:.2f} ms per layer"
    times.plot((0, layers[-1]), fitted, color="#d65f5f", linewidth=1, label=label)
    spread = [
        [mid - low for mid, low in zip(median, lower, strict=True)],
        [up - mid for mid, up in zip(median, upper, strict=True)],
    ]
    label = "median of rounds, quartiles"
    times.errorbar(layers, median, yerr=spread, fmt="o", color="#4878cf", capsize=3, label=label)
    times.set_ylabel("milliseconds per step")
    for key, label, colour in (
        ("peak_bytes", "peak: with the layers' saved inputs", "#e8a33d"),
        ("owned_bytes_total", "owned: slots, root, gradients", "#4878cf"),
    ):
        sizes.plot(layers, [depth[key] / 1e6 for depth in depths], "o-", color=colour, label=label)
    sizes.set_ylabel("MB on the device")
    for axes in (times, sizes):
        axes.margins(y=0.15)
        axes.set(xlabel="layers", xlim=(0, None), ylim=(0, None), xticks=layers)
        axes.legend(frameon=False, fontsize=9)
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=130)
    print(f"written: {picture}")
