"""Values as TOML, which tomllib only reads."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any


def toml_pairs(table: Mapping[str, Any]) -> list[str]:
    keys = {key: key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else toml_value(key) for key in table}
    return [f"{keys[key]} = {toml_value(value)}" for key, value in table.items() if value is not None]


def toml_value(value: Any) -> str:
    """A value of a TOML file, as tomllib gives it, in TOML and on one line."""
    if isinstance(value, str):  # JSON's escapes are TOML's too, but JSON lets a DEL stand as it is
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, bool | int | float):
        return repr(value).lower()
    if isinstance(value, Mapping):
        return "{" + ", ".join(toml_pairs(value)) + "}"
    if isinstance(value, Sequence):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    return str(value.isoformat())  # a date, a time or both
