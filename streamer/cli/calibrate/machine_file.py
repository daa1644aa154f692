"""A machine as a TOML file, which `streamer calibrate` writes: its name, its memory and its rates."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import psutil
import torch

from streamer.cli.config import TEXT, ConfigError, dump_tables, read_tables, section
from streamer.config_values import COUNT, FLAG, NOT_NEGATIVE, POSITIVE, number, one_of
from streamer.planner.machine import CPU, CUDA, INTERCONNECTS, KeptRates, Machine, named_machine


def processor() -> str:
    """The processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "unknown")


def device_name(device: torch.device) -> str:
    """The name of the GPU, or of the processor where there is none."""
    return str(torch.cuda.get_device_name(device)) if device.type == "cuda" else processor()


def memory_bytes(device: torch.device) -> tuple[int, int]:
    """All of the device's memory, and all of the host's, in bytes."""
    host = int(psutil.virtual_memory().total)
    if device.type != "cuda":
        return host, host
    return int(torch.cuda.get_device_properties(device).total_memory), host


MACHINE, BESIDE, MEASURED = "machine", "beside", "measured"

_SHARE = number("above 0 and at most 1", lambda value: 0 < value <= 1)
_OTHERS = {
    "name": TEXT,
    "kind": one_of(CUDA, CPU),
    "device_bytes": COUNT,
    "host_bytes": COUNT,
    "seconds_per_op": NOT_NEGATIVE,
    "seconds_per_visit": NOT_NEGATIVE,
    "ranks": COUNT,
    "machines": COUNT,
    "interconnect": one_of(*INTERCONNECTS),
    "coherent": FLAG,
    "calibrated": FLAG,
}
_MACHINE = {item.name: _OTHERS.get(item.name, POSITIVE) for item in fields(Machine) if item.name != BESIDE}
_BESIDE = {item.name: _SHARE for item in fields(KeptRates)}


def load_machine(path: str | os.PathLike[str]) -> Machine:
    """The machine in the TOML file ``path``: ``[machine]`` and ``[beside]``; ``[measured]`` is not read.

    Raises ConfigError, in one line that names the remedy, for a file that cannot be read or is not TOML, an
    unknown or missing section or key, and a value of the wrong type or out of range.
    """
    path = Path(path)
    tables = read_tables(path, (MACHINE, BESIDE, MEASURED))
    if MACHINE not in tables:
        raise ConfigError(f"{path}: there is no [{MACHINE}]: use a file of streamer calibrate")
    beside = section(KeptRates, BESIDE, tables.get(BESIDE, {}), str(path), kinds=_BESIDE)
    found: Machine = section(Machine, MACHINE, tables[MACHINE], str(path), kinds=_MACHINE)
    return replace(found, beside=beside)


def dump_machine(machine: Machine, measured: Mapping[str, Any] | None = None) -> str:
    """``machine`` as TOML that `load_machine` reads back to an equal one; ``measured`` goes with it."""
    values = {key: value for key, value in vars(machine).items() if key != BESIDE}
    tables = {MACHINE: values, BESIDE: vars(machine.beside)}
    return dump_tables(tables | ({MEASURED: measured} if measured else {}))


def machine(name_or_path: str, ranks: int = 1, machines: int = 1) -> Machine:
    """A machine by its name, see `streamer.planner.machine`, or from a TOML file; with so many ``ranks``, if
    they are several, and as one of so many ``machines`` that divide a state. The host's rate and size are
    then those that the file says.

    An argument that ends in ``.toml`` or has a path's separator in it is a file. Raises ConfigError for an
    unknown name, with the known ones, and as `load_machine` does.
    """
    if name_or_path.endswith(".toml") or os.sep in name_or_path:
        counts = {name: count for name, count in (("ranks", ranks), ("machines", machines)) if count != 1}
        return replace(load_machine(name_or_path), **counts)  # type: ignore[arg-type]
    try:
        return named_machine(name_or_path).of_ranks(ranks, machines)
    except ValueError as error:
        raise ConfigError(
            f"{error}; or use a file ending in .toml, which streamer calibrate writes"
        ) from None
