"""What the keys of a run's config may hold, beyond what any config has."""

from __future__ import annotations

import sys
from typing import Any

from streamer.kinds import COUNT, Kind, array, string

TEXT = string("a string that is not empty", r"(?s).+")
FOLDER = string("a string that can name a folder", r"\w[\w.+-]*")
FACTORY = string('a module and a callable in it, such as "models.gpt2:GPT"', r"\w[\w.]*:\w+")
DTYPE = string('"float32", "bfloat16" or "float16"', "float32|bfloat16|float16")
TEXTS = array("an array of strings, none empty", TEXT, sizes=range(sys.maxsize))
LAYERS = Kind(
    "a string or an array of strings, none empty",
    lambda value: TEXT.accepts(value) or TEXTS.accepts(value),
    lambda value: value if isinstance(value, str) else tuple(value),
)
COUNT_OR_AUTO = Kind(
    'an integer of 1 or more, or "auto"', lambda value: value == "auto" or COUNT.accepts(value)
)
STATE_DTYPE = string('"float32", "bfloat16" or "int8"', "float32|bfloat16|int8")
SAVE_FAILURE = string('"stop" or "warn"', "stop|warn")
NONFINITE = string('"skip", "stop" or "back"', "skip|stop|back")
UPDATE = string('"step" or "backward"', "step|backward")
ACTIVATIONS = Kind("a string, or an array of one for each layer", LAYERS.accepts, LAYERS.convert)
BATCH_DIMS = Kind(
    'a table from names of arguments to integers, or "none"',
    lambda value: (
        isinstance(value, dict) and all(type(dim) is int or dim == "none" for dim in value.values())
    ),
)
METHOD = string("a string that can name a method", r"[A-Za-z_]\w*")
BYTES = string('a string of a number and its unit, such as "16GiB"', r"\d+(\.\d+)?\s*(k|[KMGT]i?)?B")

#: So deep may tables and arrays lie in one another: what Python reads and writes by recursion, it can.
MOST_LEVELS = 32


def unreadable(tables: dict[str, Any]) -> str:
    """Which value no key may hold, and why: one nested too deeply, or an integer beyond TOML's 64 bits.

    Empty if there is none.
    """
    left: list[tuple[str, Any, int]] = [("", tables, 0)]
    while left:
        name, value, level = left.pop()
        if isinstance(value, dict | list):
            if level > MOST_LEVELS:
                return f"{name} is nested in more than {MOST_LEVELS} tables and arrays: flatten it"
            items = value.items() if isinstance(value, dict) else enumerate(value)
            left += [(f"{name}.{key}" if name else str(key), item, level + 1) for key, item in items]
        elif isinstance(value, int) and not -(2**63) <= value < 2**63:
            return f"{name} is an integer of more than 64 bits: give a smaller one"
    return ""
