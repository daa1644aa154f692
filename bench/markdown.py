"""Tables in Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

#: The JSON that a script has written.
Report = Mapping[str, Any]


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [_line(heads), _line(["---"] * len(heads)), *map(_line, rows)]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def spread(values: Mapping[str, float] | None, form: str = ".2f", unit: float = 1.0) -> str:
    """The median and the quartiles."""
    if values is None:
        return ""
    lower, median, upper = (values[key] for key in ("lower_quartile", "median", "upper_quartile"))
    return f"{median * unit:{form}} ({lower * unit:{form}} to {upper * unit:{form}})"
