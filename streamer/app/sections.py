"""Tables of a TOML file, checked key by key."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, get_type_hints

from streamer.app.toml import toml_value
from streamer.kinds import Kind, nearest


class ConfigError(ValueError):
    """A config that cannot be used: one line with the file, the key and the mend, and the ``table`` below it
    if there is one."""

    def __init__(self, message: str, *, table: str = "") -> None:
        line = " ".join(message.splitlines())  # names and overrides may hold line breaks
        super().__init__("\n".join([line, table] if table else [line]))

    @staticmethod
    def of(section: str, error: Exception) -> ConfigError:
        """What streamer has refused of what ``section`` says."""
        if isinstance(error, MemoryError):
            line, _, table = str(error).partition("\n")
            return ConfigError(f"{section}: {line}", table=table)
        return ConfigError(f"{section}: {error}")


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file. Raises ConfigError for one that cannot be read or is not TOML."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        folder, where = (path, "it") if path.is_dir() else (path.parent, "its folder")
        there = ", ".join(sorted(map(str, folder.glob("*.toml")))) or "none"
        raise ConfigError(f"{path}: {error.strerror}; TOML files in {where}: {there}") from None
    except ValueError as error:
        raise ConfigError(f"{path}: not TOML in UTF-8, mend it there: {error}") from None
    except RecursionError:
        raise ConfigError(f"{path}: tables or arrays are nested too deeply: flatten them") from None


def section(
    made: type[Any],
    name: str,
    table: Mapping[str, Any],
    where: str,
    *,
    kinds: Mapping[str, Kind] | None = None,
) -> Any:
    """The dataclass ``made`` of the table ``name``, whose keys are checked one by one.

    What a key may hold is its annotation's `Kind`, or that of ``kinds``. Raises ConfigError, ``where`` first,
    for a key that is unknown or missing, and for a value of another kind.
    """
    if kinds is None:
        hints = get_type_hints(made, include_extras=True)
        kinds = {key: hint.__metadata__[0] for key, hint in hints.items()}
    values = {}
    for key, value in table.items():
        if key not in kinds:
            raise ConfigError(f"{where}: unknown key {key!r} in [{name}]; {nearest(key, kinds)}")
        if not kinds[key].accepts(value):
            raise ConfigError(f"{where}: {name}.{key} must be {kinds[key].words}, not {toml_value(value)}")
        values[key] = kinds[key].convert(value)
    for item in fields(made):
        if item.default is MISSING and item.default_factory is MISSING and item.name not in values:
            raise ConfigError(f"{where}: {name}.{item.name} is missing: give {kinds[item.name].words}")
    return made(**values)
