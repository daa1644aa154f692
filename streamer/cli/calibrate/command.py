"""`streamer calibrate`: measure this machine, and write its rates for the planner."""

from __future__ import annotations

import datetime
import statistics
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch

from streamer.backends.base import DISKS, Backend
from streamer.backends.disk import Scratch
from streamer.backends.select import backend_for
from streamer.cli.calibrate.machine_file import device_name, dump_machine, memory_bytes
from streamer.cli.calibrate.measure import Found, Measurements, Sizes, measure, transfers
from streamer.cli.config import ConfigError
from streamer.errors import DiskError
from streamer.planner.machine import CUDA, KeptRates, Machine, gpu_properties

#: Rounds at most, and the seconds after which no more begin.
ROUNDS, BUDGET_SECONDS = 9, 35.0
#: Units of the figures: by the ending of their names, the unit and its size.
_UNITS = {
    "flops_per_second": ("TFLOP/s", 1e12),
    "bytes_per_second": ("GB/s", 1e9),
    "per_op": ("us", 1e-6),
    "per_visit": ("us", 1e-6),
}


def calibrate(*, device: str | None, output: Path, disk: Sequence[str] = ()) -> Machine:
    """Measure this machine, and the drives of the folders ``disk`` if there are any, used together; print
    what was found and write it into ``output``.

    Raises ConfigError, before anything is measured, for a device that is missing, an output without a folder,
    and a drive without room.
    """
    if not output.parent.is_dir() or output.is_dir():
        raise ConfigError(f"--output {output}: it must be a file in a folder that exists")
    try:
        backend = backend_for(device)
    except ValueError as error:
        raise ConfigError(f"--device: {error}") from None
    with ExitStack() as opened:
        opened.enter_context(closing(backend))
        sizes = sizes_of(backend.device.type)
        try:
            works = transfers(opened.enter_context(closing(Scratch(disk))), sizes.disk_bytes) if disk else {}
        except DiskError as error:
            raise ConfigError(f"--disk: {error}") from error
        print(f"measuring {device_name(backend.device)}: {_described(sizes)}", flush=True)
        # kept until the backend is closed, which unregisters their page-locked memory
        with closing(Measurements(backend, sizes, works)) as measurements:
            found = measure(measurements, rounds=ROUNDS, budget_seconds=BUDGET_SECONDS)
        machine = machine_of(found, backend)
    print_table(found)
    if not disk:
        reads, writes = (f"{machine.bytes_per_second(lane) / 1e9:.3g}" for lane in DISKS)
        print(
            f"the disk was not measured, and is taken to read {reads} and to write {writes} GB/s: --disk DIR "
            "measures the drive of a folder"
        )
    output.write_text(dump_machine(machine, _measured(found, sizes)), encoding="utf-8")
    print(f"written: {output}")
    return machine


def sizes_of(kind: str) -> Sizes:
    """What is measured on a device of that kind: more tokens do not change a rate. A causal kernel skips a
    part of attention that grows with the context, so that it is long."""
    if kind == "cuda":
        return Sizes(torch.bfloat16, tokens=8192, hidden=4096, context=2048)
    return Sizes(torch.float32, tokens=256, hidden=512, context=1024)


def machine_of(found: Found, backend: Backend) -> Machine:
    """The medians of what was found, as a machine."""
    medians: dict[str, Any] = {name: statistics.median(values) for name, values in found.items()}
    shares = KeptRates(
        **{item.name: medians.pop(item.name) for item in fields(KeptRates) if item.name in medians}
    )
    device_bytes, host_bytes = memory_bytes(backend.device)
    machine = replace(
        Machine(device_name(backend.device), 1.0, 1.0, 1.0, 1.0, device_bytes, host_bytes),
        kind=backend.device.type,
        beside=shares,
        calibrated=True,
        **medians,
    )
    return gpu_properties(machine, backend.device) if machine.kind == CUDA else machine


def _measured(found: Found, sizes: Sizes) -> Mapping[str, object]:
    """The date, the versions and the spread, for the file's own table."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "torch": torch.__version__,
        "compute_threads": torch.get_num_threads(),
        "rounds": len(next(iter(found.values()))),
        "sizes": _described(sizes),
        "quartiles": {name: statistics.quantiles(values, n=4) for name, values in found.items()},
    }


def _described(sizes: Sizes) -> str:
    dtype = str(sizes.dtype).removeprefix("torch.")
    return (
        f"{dtype} products of {sizes.tokens} tokens with matrices of a GPT of {sizes.hidden} features; "
        f"attention over {sizes.context} tokens"
    )


def print_table(found: Found) -> None:
    """What was found, with its spread over rounds."""
    print(f"{'':30}{'median':>10}  quartiles")
    for name, values in found.items():
        unit, scale = next((scale for ending, scale in _UNITS.items() if name.endswith(ending)), ("", 1.0))
        low, median, high = (value / scale for value in statistics.quantiles(values, n=4))
        print(f"{name:30}{median:>10.3g}  {low:.3g} to {high:.3g} {unit}".rstrip())
