"""`streamer calibrate`: measure this machine, and write its rates for the planner."""

from __future__ import annotations

import datetime
import os
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch

import streamer
from streamer.backends.base import DISKS, Backend
from streamer.backends.disk import Scratch
from streamer.backends.select import backend_for
from streamer.backends.virtual import VirtualBackend
from streamer.cli.build import without_values, wrap_options
from streamer.cli.calibrate.machine_file import device_name, dump_machine, memory_bytes
from streamer.cli.calibrate.measure import Found, Measurements, Sizes, Transfers, measure
from streamer.cli.config import Config, ConfigError
from streamer.cli.plan.planning import without_auto
from streamer.engine.handle import wrapped
from streamer.errors import DiskError
from streamer.planner.machine import CUDA, RTX_4090, Beside, Machine, gpu_properties
from streamer.store.layout import Param

#: Rounds at most, and the seconds after which no more begin.
ROUNDS, BUDGET_SECONDS = 9, 35.0
#: The most tokens that are measured, by kind of device: more do not change a rate, and take long.
MOST_TOKENS = {"cuda": 8192, "cpu": 256}
#: The longest attention that is measured.
MOST_CONTEXT = 2048
#: The width of the layers that are measured where there is no config, by kind of device.
USUAL_WIDTH = {"cuda": 4096, "cpu": 512}
#: The number of shapes of weights that are measured, the commonest first.
MOST_WEIGHTS = 4

#: How a figure is shown: its unit, and what it is divided by.
_UNITS = {
    "flops_per_second": ("TFLOP/s", 1e12),
    "bytes_per_second": ("GB/s", 1e9),
    "per_op": ("us", 1e-6),
    "per_visit": ("us", 1e-6),
}


def calibrate(
    config: Config | None, *, device: str | None, output: Path, disk: Sequence[str] = ()
) -> Machine:
    """Measure this machine, at the shapes and in the dtype of ``config`` if there is one, and the drives of
    the folders ``disk`` if there are any, used together; print what was found and write it into ``output``.

    Raises ConfigError for a device that is not there, a config whose model cannot be built, and, before
    anything is measured, an output that cannot be written and a folder without room.
    """
    if not output.parent.is_dir():
        raise ConfigError(f"--output {output}: there is no folder {output.parent}; make it first")
    if output.is_dir():
        raise ConfigError(
            f"--output {output}: it is a folder; give a file in it, such as {output / 'machine.toml'}"
        )
    if not os.access(output if output.exists() else output.parent, os.W_OK):
        raise ConfigError(f"--output {output}: it cannot be written; give a file elsewhere")
    try:
        backend = backend_for(device)
    except ValueError as error:
        raise ConfigError(f"--device: {error}") from None
    with ExitStack() as opened:
        opened.enter_context(closing(backend))
        sizes = sizes_of(config, backend.device.type)
        transfers = None
        if disk:
            try:
                transfers = Transfers(opened.enter_context(Scratch(disk)), sizes.disk_bytes)
            except DiskError as error:
                raise ConfigError(f"--disk: {error}") from error
        print(f"measuring {device_name(backend.device)}: {_described(sizes)}", flush=True)
        # kept until the backend is closed, which unregisters their page-locked memory
        with closing(Measurements(backend, sizes, transfers)) as measurements:
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


def sizes_of(config: Config | None, kind: str) -> Sizes:
    """What is measured for ``config`` on a device of that kind."""
    most = MOST_TOKENS[kind]
    if config is None:
        dtype, width = (torch.bfloat16 if kind == "cuda" else torch.float32), USUAL_WIDTH[kind]
        usual = ((3 * width, width), (width, width), (4 * width, width), (width, 4 * width))
        # long, as where attention takes time: a causal kernel skips a part that grows with the context
        context = min(4 * most, MOST_CONTEXT)
        return Sizes(dtype, tokens=most, weights=usual, hidden=width, context=context)
    matrices = _matrices(config)
    if not matrices:
        raise ConfigError("the layers of this config have no matrices: calibrate without it")
    shapes = Counter((param.shape[0], param.shape[1]) for param in matrices)
    weights = tuple(shape for shape, _ in shapes.most_common(MOST_WEIGHTS))
    size = config.stream.micro_batch_size
    batch = size if isinstance(size, int) else config.train.per_device_train_batch_size
    return Sizes(
        dtype=matrices[0].dtype,
        tokens=min(most, batch * config.train.max_length),
        weights=weights,
        hidden=statistics.mode(in_ for _, in_ in weights),
        context=min(MOST_CONTEXT, config.train.max_length),
    )


def _matrices(config: Config) -> list[Param]:
    """The matrices of the layers, in the dtype that is streamed."""
    try:
        options = wrap_options(without_auto(config)) | {
            "device_memory": None,
            "host_memory": None,
            "disk": None,
        }
        model = without_values(config)
        # any machine: only the shapes are read
        streamer.wrap(model, **options, backend=VirtualBackend(RTX_4090.with_room()))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"the model of this config cannot be built: {error}") from error
    params = [slice.param for unit in wrapped(model).executor.units for slice in unit.layout.slices]
    return [param for param in params if len(param.shape) == 2]


def machine_of(found: Found, backend: Backend) -> Machine:
    """The medians of what was found, as a machine."""
    medians: dict[str, Any] = {name: statistics.median(values) for name, values in found.items()}
    beside = Beside(**{item.name: medians.pop(item.name) for item in fields(Beside) if item.name in medians})
    device_bytes, host_bytes = memory_bytes(backend.device)
    machine = replace(
        Machine(device_name(backend.device), 1.0, 1.0, 1.0, 1.0, device_bytes, host_bytes),
        kind=backend.device.type,
        beside=beside,
        calibrated=True,
        **medians,
    )
    return gpu_properties(machine, backend.device) if machine.kind == CUDA else machine


def _measured(found: Found, sizes: Sizes) -> Mapping[str, object]:
    """When, with what and how widely spread: goes into the file beside the machine."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "torch": torch.__version__,
        "compute_threads": torch.get_num_threads(),
        "rounds": len(next(iter(found.values()))),
        "sizes": _described(sizes),
        "quartiles": {name: statistics.quantiles(values, n=4) for name, values in found.items()},
    }


def _described(sizes: Sizes) -> str:
    weights = ", ".join(f"{out}x{in_}" for out, in_ in sizes.weights)
    dtype = str(sizes.dtype).removeprefix("torch.")
    return f"{dtype} products of {sizes.tokens} tokens with {weights}; attention over {sizes.context} tokens"


def print_table(found: Found) -> None:
    """What was found, with its spread over rounds."""
    print(f"{'':30}{'median':>10}  quartiles")
    for name, values in found.items():
        unit, scale = next((shown for ending, shown in _UNITS.items() if name.endswith(ending)), ("", 1.0))
        low, median, high = (value / scale for value in statistics.quantiles(values, n=4))
        print(f"{name:30}{median:>10.3g}  {low:.3g} to {high:.3g} {unit}".rstrip())
