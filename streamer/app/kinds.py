"""What the keys of a config may hold."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Container
from dataclasses import dataclass
from math import inf
from typing import Any


@dataclass(frozen=True)
class Kind:
    """What a key may hold: the words for it in an error, the test, and how it leaves TOML's types."""

    words: str
    accepts: Callable[[Any], bool]
    convert: Callable[[Any], Any] = lambda value: value


def _integer(low: int) -> Kind:
    return Kind(f"an integer of {low} or more", lambda x: type(x) is int and x >= low)  # a bool is no int


def _number(words: str, within: Callable[[float], bool]) -> Kind:
    return Kind(f"a number {words}", lambda value: type(value) in (int, float) and within(value), float)


def _string(words: str, pattern: str) -> Kind:
    return Kind(words, lambda value: isinstance(value, str) and bool(re.fullmatch(pattern, value)))


def _array(words: str, of: Kind, sizes: Container[int]) -> Kind:
    def accepts(value: Any) -> bool:
        return isinstance(value, list) and len(value) in sizes and all(map(of.accepts, value))

    return Kind(words, accepts, lambda value: tuple(map(of.convert, value)))


COUNT, COUNT_OR_0 = _integer(1), _integer(0)
POSITIVE = _number("above 0", lambda x: 0 < x < inf)
NOT_NEGATIVE = _number("of 0 or more", lambda x: 0 <= x < inf)
FRACTION, BETA = _number("in (0, 1)", lambda x: 0 < x < 1), _number("in [0, 1)", lambda x: 0 <= x < 1)
BETAS = _array("an array of two numbers in [0, 1)", BETA, sizes=[2])
TEXT = _string("a string that is not empty", r"(?s).+")
FOLDER = _string("a string that can name a folder", r"\w[\w.+-]*")
FACTORY = _string('a module and a callable in it, such as "models.gpt2:GPT"', r"\w[\w.]*:\w+")
DTYPE = _string('"float32", "bfloat16" or "float16"', "float32|bfloat16|float16")
TEXTS = _array("an array of strings, none empty", TEXT, sizes=range(sys.maxsize))
LAYERS = Kind(
    "a string or an array of strings, none empty",
    lambda value: TEXT.accepts(value) or TEXTS.accepts(value),
    lambda value: value if isinstance(value, str) else tuple(value),
)
STATE_DTYPE = _string('"float32", "bfloat16" or "int8"', "float32|bfloat16|int8")
SAVE_FAILURE = _string('"stop" or "warn"', "stop|warn")
NONFINITE = _string('"skip", "stop" or "back"', "skip|stop|back")
UPDATE = _string('"step" or "backward"', "step|backward")
METHOD = _string("a string that can name a method", r"[A-Za-z_]\w*")
BYTES = _string('a string such as "16GiB"', r"\d+(\.\d+)?\s*(k|[KMGT]i?)?B")
FLAG = Kind("true or false", lambda value: isinstance(value, bool))
TABLE = Kind("a table", lambda value: isinstance(value, dict))

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
