"""A machine as a TOML file, which `streamer calibrate` writes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from streamer.app.kinds import TEXT, unreadable
from streamer.app.sections import ConfigError, read_toml, section
from streamer.app.toml import toml_pairs
from streamer.backends.machine import CPU, CUDA, Beside, Machine
from streamer.backends.machines import named_machine
from streamer.kinds import COUNT, NOT_NEGATIVE, POSITIVE, nearest, number, string

MACHINE, BESIDE, MEASURED = "machine", "beside", "measured"

_SHARE = number("above 0 and at most 1", lambda value: 0 < value <= 1)
_OTHERS = {
    "name": TEXT,
    "kind": string(f'"{CUDA}" or "{CPU}"', f"{CUDA}|{CPU}"),
    "device_bytes": COUNT,
    "host_bytes": COUNT,
    "seconds_per_op": NOT_NEGATIVE,
    "seconds_per_visit": NOT_NEGATIVE,
}
_MACHINE = {item.name: _OTHERS.get(item.name, POSITIVE) for item in fields(Machine) if item.name != BESIDE}
_BESIDE = {item.name: _SHARE for item in fields(Beside)}


def load_machine(path: str | os.PathLike[str]) -> Machine:
    """The machine in the TOML file ``path``: ``[machine]``, ``[beside]`` and, which is not looked at,
    ``[measured]``.

    Raises ConfigError, in one line that names the mend, for a file that cannot be read or is not TOML, an
    unknown or missing section or key, and a value of the wrong type or out of range.
    """
    path = Path(path)
    tables = read_toml(path)
    if fault := unreadable(tables):
        raise ConfigError(f"{path}: {fault}")
    for name, table in tables.items():
        if name not in (MACHINE, BESIDE, MEASURED):
            known = (MACHINE, BESIDE, MEASURED)
            raise ConfigError(f"{path}: unknown section [{name}]; {nearest(name, known)}")
        if not isinstance(table, dict):
            raise ConfigError(f"{path}: {name} must be a section: write [{name}] and its keys below")
    if MACHINE not in tables:
        raise ConfigError(f"{path}: there is no [{MACHINE}]: give a file that streamer calibrate has written")
    beside = section(Beside, BESIDE, tables.get(BESIDE, {}), str(path), kinds=_BESIDE)
    made: Any = section(Machine, MACHINE, tables[MACHINE], str(path), kinds=_MACHINE)
    assert isinstance(made, Machine)
    return Machine(**{**vars(made), BESIDE: beside})


def dump_machine(machine: Machine, measured: Mapping[str, Any] | None = None) -> str:
    """``machine`` as TOML that `load_machine` reads back to an equal one; ``measured`` goes with it."""
    values = {key: value for key, value in vars(machine).items() if key != BESIDE}
    tables = {MACHINE: values, BESIDE: vars(machine.beside), **({MEASURED: measured} if measured else {})}
    return "\n".join("\n".join([f"[{name}]", *toml_pairs(table), ""]) for name, table in tables.items())


def machine(name_or_path: str) -> Machine:
    """A machine by its name, see `streamer.backends.machines`, or from a TOML file.

    What ends in ``.toml`` or holds a path's separator is a file. Raises ConfigError for a name that is not
    known, with those that are, and as `load_machine` does.
    """
    if name_or_path.endswith(".toml") or os.sep in name_or_path:
        return load_machine(name_or_path)
    try:
        return named_machine(name_or_path)
    except ValueError as error:
        raise ConfigError(
            f"{error}; or give a file ending in .toml, which streamer calibrate writes"
        ) from None
