"""A config in DeepSpeed's JSON, checked, as values by dotted key."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streamer.deepspeed.keys import KEYS
from streamer.deepspeed.reasons import SECTIONS
from streamer.kinds import Kind, nearest

#: Stands in a config for what the training loop knows.
AUTO = "auto"
_NOBODY = object()
#: So many characters of a value are read in an error.
_MOST_SHOWN = 60

#: The tables that have keys of their own.
_TABLES = {name.rpartition(".")[0] for name in KEYS if "." in name} | {"optimizer", "scheduler"}

#: Looks at a table, by its dotted name, before its keys are looked at.
CheckTable = Callable[[str, Mapping[str, Any]], None]


@dataclass(frozen=True)
class Values:
    """A config's values by dotted key, a whole table for those of `SECTIONS`, without nulls and tables that
    are off; and what stands in for those that are "auto" or not there."""

    given: Mapping[str, Any]

    def get(self, key: str, default: Any = None) -> Any:
        value = self.given.get(key, AUTO)
        return default if value == AUTO else value

    def is_auto(self, key: str) -> bool:
        return bool(self.given.get(key) == AUTO)

    def pick(self, key: str, name: str, answer: Any, absent: Any, *, auto: Any = _NOBODY) -> Any:
        """The config's value, else the keyword argument ``name``, else ``auto`` or ``absent``."""
        if answer is not None:
            kind = KEYS[key].kind
            assert kind is not None, "somebody looks at it"
            answer = _converted(kind, name, answer)
            if self.get(key, answer) != answer:
                raise contradiction(key, self.given[key], name, answer)
            return answer
        if not self.is_auto(key):
            return self.given.get(key, absent)
        if auto is _NOBODY:
            raise unanswered(key, name)
        return auto

    def lost(self) -> dict[str, str]:
        """The keys that change nothing here, and why."""
        reasons = {}
        for key, value in self.given.items():
            if key in SECTIONS:
                reasons[key] = SECTIONS[key].reason
            # for a key that somebody looks at, "auto" is what there is here
            elif KEYS[key].is_lost(value) and (KEYS[key].kind is None or value != AUTO):
                reasons[key] = KEYS[key].reason
        return reasons


def unanswered(key: str, name: str) -> ValueError:
    return ValueError(f'{key} is "auto": give {name}=... to from_deepspeed_config')


def contradiction(key: str, value: Any, name: str, answer: Any) -> ValueError:
    return ValueError(
        f'{key} is {shown(value)} in the config, and {name}={answer} was given: write "auto" there, or leave '
        "the argument out"
    )


def shown(value: Any) -> str:
    """``value`` in JSON, cut short."""
    text = json.dumps(value, default=repr)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def read(source: Mapping[str, Any] | str | os.PathLike[str], check_table: CheckTable) -> Values:
    """The config of a JSON file, or ``source`` itself.

    Raises ValueError for what is not an object in JSON, a key that is there twice or is not known, and a
    value that its key cannot have; OSError for a file that cannot be read.
    """
    config = _read_json(source)
    if "bfloat16" in config and "bf16" in config:
        raise ValueError("bf16 and bfloat16 are the same: leave one out")
    renamed = {"bf16" if name == "bfloat16" else name: value for name, value in config.items()}
    return Values(dict(_walk(renamed, "", check_table)))


def _read_json(source: Mapping[str, Any] | str | os.PathLike[str]) -> Mapping[str, Any]:
    if isinstance(source, Mapping):
        return source
    if not isinstance(source, str | os.PathLike):
        raise ValueError(f"give a DeepSpeed config as a dict or as a path, not a {type(source).__name__}")
    try:
        config = json.loads(Path(source).read_text(encoding="utf-8"), object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{os.fspath(source)}: not a config in JSON, mend it there: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{os.fspath(source)}: not a config in JSON: it must be an object, in braces")
    return config


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
        raise ValueError(f"the key {twice[0]!r} is there twice in one object")
    return dict(pairs)


def _walk(table: Mapping[str, Any], prefix: str, check_table: CheckTable) -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        key = f"{prefix}{name}"
        if key in _TABLES or key in SECTIONS:
            if value is None or value is False:
                continue
            if not isinstance(value, Mapping):
                raise ValueError(f"{key} must be an object, in braces, not {shown(value)}")
            check_table(key, value)
            if key in _TABLES:
                yield from _walk(value, f"{key}.", check_table)
            elif _is_on(key, value):
                yield key, value
        elif key not in KEYS:
            raise _unknown(key, name, prefix)
        elif value is not None:
            kind = KEYS[key].kind
            yield key, value if kind is None or value == AUTO else _converted(kind, key, value)


def _is_on(key: str, table: Mapping[str, Any]) -> bool:
    """Whether a table of which nothing is honoured asks for anything."""
    names = SECTIONS[key].names
    for name in table:
        if names is not None and name not in names:
            raise ValueError(
                f"unknown key '{key}.{name}' in this config; {nearest(str(name), sorted(names))}"
            )
    return bool(table) and table.get("enabled") is not False


def _unknown(key: str, name: str, prefix: str) -> ValueError:
    known = [*KEYS, *SECTIONS, *sorted(_TABLES)]
    if elsewhere := [other for other in known if other.rpartition(".")[2] == name]:
        mend = f"did you mean {elsewhere[0]!r}?"
    else:
        beside = (other.removeprefix(prefix) for other in known if other.startswith(prefix))
        mend = nearest(str(name), dict.fromkeys(other.split(".")[0] for other in beside))
    return ValueError(f"unknown key {key!r} in this config; {mend}")


def _converted(kind: Kind, name: str, value: Any) -> Any:
    value = list(value) if isinstance(value, tuple) else value
    if not kind.accepts(value):
        raise ValueError(f"{name} must be {kind.words}, not {shown(value)}")
    return kind.convert(value)
