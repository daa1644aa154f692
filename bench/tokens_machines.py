"""Part *machines* of `bench.tokens_per_transfer`: ten billion parameters at the rates of several machines.

Each variant and batch runs once without data (`bench.replay`): the executor, with meta tensors, takes two
steps and the second one counts. Compute time is that of the FLOPs of matrix products and attention, in
layers, head and loss, at the machine's rate for dense products; nothing else on the device takes time.
Attention counts as if it had no mask. The update moves its bytes of weights, gradients and moments at the
rate of host memory, which copies do not slow. *The ceiling* of a step is its tokens over the time of the
FLOPs that it executes, those of layers that run again included.

Device bytes: the slots and the root unit with their gradients, and the most that all other tensors of a
step take together, by their storages: saved inputs, the working set of a layer (of a slice, with micro-
batches), logits and loss. What an allocator loses and what kernels take for themselves is not in it. Host
bytes: what streamer holds there (weights, masters, moments, gradients, offloaded inputs). A batch fits
where both do.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import streamer
from bench.replay import UNIT, Recording, replay
from bench.tokens_variants import Variant, chunked_loss, give_hidden, variants
from streamer.backends.base import Lane
from streamer.backends.virtual import VirtualBackend
from streamer.cli.build import build_optimizer, import_factory
from streamer.cli.config import Config, load_config
from streamer.engine.handle import wrapped
from streamer.planner.machine import A100_PCIE_4, H100_PCIE_5, RTX_4090, RTX_4090_PCIE_3, Machine
from streamer.planner.measure import Tracker

MACHINES = (RTX_4090, RTX_4090_PCIE_3, A100_PCIE_4, H100_PCIE_5)
CONFIG = Path(__file__).parent.parent / "configs" / "gpt2-10b.toml"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, default=CONFIG)
    parser.add_argument("--set", action="append", default=[], metavar="TABLE.KEY=VALUE", dest="overrides")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[2, 8, 16, 32, 64], help="(2 to 64)")
    parser.add_argument("--micro", type=int, default=8, help="sequences of a part of a batch (8)")
    parser.add_argument("--slots", type=int, default=6, help="where there are more than two (6)")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these variants (all)")


def run(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row for each variant and batch."""
    config = load_config(options.config, options.overrides)
    rows = []
    for batch_size in options.batch_sizes:
        known = variants(slots=options.slots, parts=-(-batch_size // options.micro))
        if unknown := set(options.only or known) - set(known):
            raise SystemExit(
                f"there is no {', '.join(sorted(unknown))} here: choose among {', '.join(known)}"
            )
        for name in options.only or known:
            began = time.perf_counter()
            row = {"variant": name, **measure(config, known[name], batch_size)}
            rows.append(row)
            print(f"{line(row)}  [{time.perf_counter() - began:.0f} s]", flush=True)
    yield {
        "config": str(options.config.name),
        "machines": {machine.name: asdict(machine) for machine in MACHINES},
        "rows": rows,
    }


def measure(config: Config, variant: Variant, batch_size: int) -> dict[str, Any]:
    """Bytes of a variant with this batch, and its figures on each machine."""
    backend = VirtualBackend(UNIT)
    with torch.device("meta"):
        model = import_factory(config.model.factory or "")(**config.model.args)
    streamer.wrap(
        model,
        layers=config.stream.layers,
        dtype=getattr(torch, config.stream.dtype),
        backend=backend,
        **variant.options(batch_size=batch_size, n_layer=config.model.args["n_layer"]),
    )
    if variant.chunked:
        give_hidden(model)
    optimizer = build_optimizer(config, model)
    executor = wrapped(model).executor
    recording = executor.issuer.trace = Recording()
    tokens = torch.zeros(batch_size, config.train.max_length, dtype=torch.long, device="meta")

    def loss(part: torch.Tensor) -> torch.Tensor:
        if variant.chunked:
            return chunked_loss(model, part, part)
        return F.cross_entropy(model(part).flatten(0, 1).float(), part.flatten())

    def step() -> None:
        for part in variant.split(tokens):
            loss(part).backward()
        optimizer.step()
        optimizer.zero_grad()

    with backend.counting_caller():
        step()
        first = len(recording.work)
        with Tracker() as beside:
            step()
    held = streamer.stats(model)
    device = sum(held.device_bytes.values()) + beside.peak
    host = sum(held.host_bytes.values())
    return {
        "tokens_per_step": tokens.numel(),
        "device_bytes": {**held.device_bytes, "all others": beside.peak},
        "host_bytes": dict(held.host_bytes),
        "on": {
            machine.name: figures(recording, first, machine, tokens.numel(), device=device, host=host)
            for machine in MACHINES
        },
    }


def figures(
    recording: Recording, first: int, machine: Machine, tokens: int, *, device: int, host: int
) -> dict[str, Any]:
    times = replay(recording.work, first, machine)
    ceiling = tokens / times.busy_seconds[Lane.COMPUTE]
    return {
        "tokens_per_second": tokens / times.seconds,
        "ceiling": ceiling,
        "of_ceiling": times.busy_seconds[Lane.COMPUTE] / times.seconds,
        "busy_seconds": {lane.value: seconds for lane, seconds in times.busy_seconds.items()},
        "fits": device <= machine.device_bytes and host <= machine.host_bytes,
    }


def line(row: Mapping[str, Any]) -> str:
    device, host = (sum(row[where].values()) / 2**30 for where in ("device_bytes", "host_bytes"))
    cells = [
        f"{name} {on['tokens_per_second']:,.0f}/s {on['of_ceiling']:.1%}"
        + ("" if on["fits"] else " (does not fit)")
        for name, on in row["on"].items()
    ]
    held = f"device {device:.1f}, host {host:.1f} GiB"
    return f"{row['tokens_per_step']:>6} {row['variant']:15} {held}: {'; '.join(cells)}"
