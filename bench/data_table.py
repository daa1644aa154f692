"""The table of `bench.data`."""

from __future__ import annotations

from bench.markdown import Report, spread, table

#: The ways by the words for them.
WAYS = {
    "streamer": "made and kept, as at a run's first start",
    "again": "found again",
    "plain": "the whole file at once",
}


def data_table(report: Report) -> list[str]:
    """A row for each size, kind of data and way."""
    heads = ["", "MB", "million tokens", "", "seconds", "MB of memory", "time beside the whole at once"]
    rows = []
    for row in report["rows"]:
        for way, found in row["ways"].items():
            ratio = spread(row["ratio"], ".2f") if way == "streamer" and "ratio" in row else ""
            rows.append(
                [
                    *(row["kind"], f"{row['bytes'] / 1e6:,.0f}", f"{found['tokens'] / 1e6:,.1f}", WAYS[way]),
                    *(spread(found["seconds"], ",.1f"), spread(found["bytes"], ",.0f", 1e-6), ratio),
                ]
            )
    before = max(found["bytes_before"] for row in report["rows"] for found in row["ways"].values())
    return [
        f"Python and the libraries hold {before / 1e6:,.0f} MB before; memory is what comes on top of that.",
        "",
        *table(heads, rows),
    ]
