"""The table of `bench.residency`."""

from __future__ import annotations

from bench.markdown import Report, table

CYCLES = {"training": "a training step", "inference": "a forward alone"}


def residency_table(report: Report) -> list[str]:
    rows = [
        [CYCLES[name], f"{row['slots']}", *_amounts(row), f"{cycle['moved_with_all_layers']:.1f}"]
        for name, cycle in report["cycles"].items()
        for row in cycle["slots"]
    ]
    heads = ["", "slots", "moved", "least", "least if every copy can overlap", "moved with all layers"]
    return [
        f"What comes to the device of the weights of {report['layers']} equal layers, in layers.",
        "",
        *table(heads, rows),
    ]


def _amounts(row: Report) -> list[str]:
    amounts = [row["moved"], row["least"], row["least_overlapped"]]
    return ["" if amount is None else f"{amount:.1f}" for amount in amounts]
