"""What `bench.overlap` has found, as tables for the terminal."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.by_layer import FOR_BACKWARD, FOR_FORWARD, GRADIENT, UNUSED
from bench.markdown import share

#: Layers that are shown one by one; of more, those at either end and a summary of all.
MOST_ROWS, ROWS_AT_EITHER_END = 12, 3

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Column:
    """One figure of a row. ``worst`` chooses the worst of several."""

    group: str
    header: str
    width: int
    of: Callable[[Row], float | None]
    worst: Callable[[Sequence[float]], float] = max


def _copy(purpose: str, key: str, unit: float) -> Callable[[Row], float | None]:
    def of(row: Row) -> float | None:
        return row[purpose][key] / unit if key in row[purpose] else None

    return of


def _weight_megabytes(row: Row) -> float | None:
    return next(
        (row[copy]["bytes"] / 1e6 for copy in (FOR_FORWARD, FOR_BACKWARD) if row[copy]["copies"]), None
    )


def _milliseconds(key: str) -> Callable[[Row], float | None]:
    return lambda row: None if row[key] is None else row[key] * 1e3


def _waited(lane: str) -> Callable[[Row], float | None]:
    return lambda row: row["exposed_seconds"][lane] * 1e3


def _columns() -> list[Column]:
    columns = [Column("weights", "MB", 8, _weight_megabytes)]
    for group, purpose in (("for forward", FOR_FORWARD), ("for backward", FOR_BACKWARD)):
        columns += _columns_of_copies(group, purpose)
    columns.append(Column("gradient", "MB", 9, _copy(GRADIENT, "bytes", 1e6)))
    columns += _columns_of_copies("out", GRADIENT)
    columns += [
        Column("compute", "F ms", 9, _milliseconds("forward_seconds")),
        Column("compute", "B ms", 8, _milliseconds("backward_seconds")),
    ]
    columns += [Column("ms waited for", lane, 7, _waited(lane)) for lane in ("h2d", "d2h", "host")]
    return columns


def _columns_of_copies(group: str, purpose: str) -> list[Column]:
    return [
        Column(group, "ms", 7, _copy(purpose, "seconds", 1e-3)),
        Column(group, "GB/s", 7, _copy(purpose, "bytes_per_second", 1e9), min),
        Column(group, "/raw", 6, _copy(purpose, "of_raw", 1), min),
    ]


COLUMNS = _columns()


def figure(value: float | None) -> str:
    """About three digits; "0" is exactly 0, and a dash is what there is not."""
    if value is None or not math.isfinite(value):
        return "-"
    if not value:
        return "0"
    if not 1e-3 <= abs(value) < 1e5:  # beyond a column's width
        return f"{value:.0e}"
    digits = 3 if abs(value) < 1 else 2 if abs(value) < 10 else 1 if abs(value) < 1000 else 0
    return f"{value:.{digits}f}"


def table(found: Row) -> list[str]:
    """The lines of the table: a row per layer, or some and a summary of all; the root; the caller."""
    lines = [_groups(), f"{'layer':8}" + "".join(f"{column.header:>{column.width}}" for column in COLUMNS)]
    layers = found["layers"]
    if len(layers) <= MOST_ROWS:
        lines += [_line(str(row["unit"]), row) for row in layers]
    else:
        lines += [_line(str(row["unit"]), row) for row in layers[:ROWS_AT_EITHER_END]]
        lines.append("...")
        lines += [_line(str(row["unit"]), row) for row in layers[-ROWS_AT_EITHER_END:]]
        lines.append(_summary("median", layers, lambda column: statistics.median))
        lines.append(_summary("worst", layers, lambda column: column.worst))
    return [*lines, _line("root", found["root"]), _line("caller", found["caller"])]


def _groups() -> str:
    """The headers above those of the columns, each over all of its columns."""
    widths: dict[str, int] = {}
    for column in COLUMNS:
        widths[column.group] = widths.get(column.group, 0) + column.width
    return " " * 8 + "".join(f"{group:>{width}}" for group, width in widths.items())


def _line(name: str, row: Row) -> str:
    return f"{name:8}" + "".join(f"{figure(column.of(row)):>{column.width}}" for column in COLUMNS)


def _summary(
    name: str, layers: Sequence[Row], of: Callable[[Column], Callable[[Sequence[float]], float]]
) -> str:
    cells = []
    for column in COLUMNS:
        values = [value for row in layers if (value := column.of(row)) is not None]
        cells.append(f"{figure(of(column)(values) if values else None):>{column.width}}")
    return f"{name:8}" + "".join(cells)


def print_report(report: Row) -> None:
    """The table of layers, the raw copies, and what all of it comes to."""
    load = report["hardware"]["load_average_before"]
    print(
        f"{report['config']['file']} on the {report['backend']} backend: {report['parameters']:,} parameters,"
        f" {report['tokens_per_step']:,} tokens/step, {report['steps']} steps; load before {load:.1f}"
    )
    print("\n".join(["", *table(report), ""]))
    unused = sum(row[UNUSED]["copies"] for row in (*report["layers"], report["root"]))
    if unused:
        print(f"copies of weights that nobody came for: {unused} in {report['steps']} steps")
    for raw in report["raw_copies"]:
        print(_raw_line(raw))
    print("\n".join(["", *_lanes(report["totals"]), "", *_conclusion(report["totals"])]))


def _lanes(every: Row) -> list[str]:
    """A row per lane, and what is left of a step."""
    lines = [f"{'lane':8}{'busy ms':>10}{'exposed ms':>12}{'overlap':>10}{'MB':>10}   per step"]
    for lane, busy in every["busy_seconds"].items():
        moved, overlap = every["bytes_per_step"].get(lane), share(every["overlap"].get(lane))
        lines.append(
            f"{lane:8}{figure(busy * 1e3):>10}{figure(every['exposed_seconds'][lane] * 1e3):>12}"
            f"{overlap or '-':>10}"
            f"{figure(None if moved is None else moved / 1e6):>10}"
        )
    other = figure(every["other_seconds"] * 1e3)
    return [*lines, f"{'other':8}{other:>10}   what is in no layer: embeddings, head, loss, Python"]


def _conclusion(every: Row) -> list[str]:
    lower, median, upper = (value * 1e3 for value in every["step_seconds"].values())
    mean, exposed = every["mean_step_seconds"] * 1e3, every["exposed_transfer_of_step"]
    return [
        f"a step takes {median:.2f} ms ({lower:.2f}-{upper:.2f}), {mean:.2f} on average; copies are exposed "
        f"for {exposed:.2%} of it, {share(every['transfer_overlap']) or 'none'} of their time is overlapped",
        f"{every['tokens_per_second']:,.0f} tokens/s, {every['flops_per_second'] / 1e12:.3g} TFLOP/s at "
        "6 FLOP per parameter and token",
    ]


def _raw_line(raw: Row) -> str:
    alone, beside = (
        [f"{raw['bytes'] / raw[key] / 1e9:.1f}" for key in keys]
        for keys in (
            ("h2d_seconds", "d2h_seconds"),
            ("h2d_beside_d2h_seconds", "d2h_beside_h2d_seconds"),
        )
    )
    return (
        f"raw copy of {raw['bytes'] / 1e6:.2f} MB: {alone[0]} GB/s in, {alone[1]} out; "
        f"both at once {beside[0]} and {beside[1]}"
    )
