"""Kinds of values in config files, and the remedy for an unknown name."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass
from sys import float_info
from typing import Any


@dataclass(frozen=True)
class Kind:
    """The values that a key accepts: a description for errors, the test, and the conversion of the value."""

    words: str
    accepts: Callable[[Any], bool]
    convert: Callable[[Any], Any] = lambda value: value


def integer(low: int) -> Kind:
    return Kind(f"an integer of {low} or more", lambda x: type(x) is int and x >= low)  # True is an int


def number(words: str, within: Callable[[float], bool]) -> Kind:
    return Kind(f"a number {words}", lambda value: type(value) in (int, float) and within(value), float)


def string(words: str, pattern: str) -> Kind:
    return Kind(words, lambda value: isinstance(value, str) and bool(re.fullmatch(pattern, value)))


def one_of(*values: str) -> Kind:
    """One of ``values``, which the words quote."""
    *others, last = (f'"{value}"' for value in values)
    words = " or ".join([", ".join(others), last] if others else [last])
    return Kind(words, lambda value: isinstance(value, str) and value in values)


def either(words: str, one: Kind, other: Kind) -> Kind:
    """The values that ``one`` or ``other`` accepts."""
    return Kind(
        words,
        lambda value: one.accepts(value) or other.accepts(value),
        lambda value: (one if one.accepts(value) else other).convert(value),
    )


def array(words: str, of: Kind, sizes: Container[int]) -> Kind:
    def accepts(value: Any) -> bool:
        return isinstance(value, list) and len(value) in sizes and all(map(of.accepts, value))

    return Kind(words, accepts, lambda value: tuple(map(of.convert, value)))


COUNT, COUNT_OR_0 = integer(1), integer(0)
POSITIVE = number("above 0", lambda x: 0 < x <= float_info.max)
NOT_NEGATIVE = number("of 0 or more", lambda x: 0 <= x <= float_info.max)
FRACTION, BETA = number("in (0, 1)", lambda x: 0 < x < 1), number("in [0, 1)", lambda x: 0 <= x < 1)
BETAS = array("an array of two numbers in [0, 1)", BETA, sizes=[2])
FLAG = Kind("true or false", lambda value: isinstance(value, bool))
TABLE = Kind("a table", lambda value: isinstance(value, dict))

#: The most names that an error lists.
_MOST_NAMED = 20


def nearest(name: str, known: Iterable[str]) -> str:
    """The remedy for an unknown name: the nearest known one, or the list of known ones."""
    known = list(known)
    if near := difflib.get_close_matches(name, known, n=1):
        return f"did you mean {near[0]!r}?"
    if len(known) > _MOST_NAMED:
        return f"the nearest is {difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]!r}"
    return f"there are: {', '.join(known)}"
