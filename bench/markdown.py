"""Tables in Markdown."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

#: The JSON that a script has written.
Report = Mapping[str, Any]


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [_line(heads), _line(["---"] * len(heads)), *map(_line, rows)]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def number(value: float | None, form: str) -> str:
    """A figure; JSON has null for a value that is no number."""
    return "no number" if value is None else format(value, form)


def spread(values: Mapping[str, float] | None, form: str = ".2f", unit: float = 1.0) -> str:
    """The median and the quartiles."""
    if values is None:
        return ""
    lower, median, upper = (values[key] for key in ("lower_quartile", "median", "upper_quartile"))
    if lower is None or median is None or upper is None:
        return "no number"
    return f"{median * unit:{form}} ({lower * unit:{form}} to {upper * unit:{form}})"


def share(part: float | None) -> str:
    """The overlap of a lane in percent; nothing for one that was idle (None or NaN), and no percentage where
    compute waited for longer than the lane worked."""
    if part is None or math.isnan(part):
        return ""
    return f"{part:.1%}" if part >= 0 else "none"


def config_of(report: Report) -> str:
    """The config of the run, and its changed options."""
    file, changed = report["config"]["file"], report["config"]["set"]
    return f"{file} ({', '.join(changed)})" if changed else str(file)
