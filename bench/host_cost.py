"""How much host time does streaming a layer take, compared with recomputing one by PyTorch's own checkpoint?

    python -m bench.host_cost                      # two minutes on two cores, no GPU
    python -m bench.host_cost --device cuda
    NULLGPU_SHORT_COPIES=128K python -m bench.host_cost --device cuda --no-values    # on tests/nullgpu

The layers are so small that nearly all of a step is the host's own work. The same model trains in three ways,
in one process and one PyTorch thread: plain, with `torch.utils.checkpoint` around each layer, and streamed
with ``activations="recompute"``. A round has some steps of each, one of each way in turn, in a new random
order. A step is forward, backward, `optimizer.step` (PyTorch's AdamW, fused; ours) and `zero_grad`; "passes"
are the same without the update.

`checkpoint_adds` is what a layer takes in a step above plain, in microseconds, `streaming_adds` what a
streamed one takes above a checkpointed one; `ratio` is the second by the first, of the medians of one round.
Microseconds are of wall-clock time, and in `cpu` of all threads of the process together.

tests/nullgpu stands in for a GPU whose kernels compute nothing. Launches are over at once there, but each
copy wakes a thread, which no driver does when it enqueues one, and of these three ways streaming alone
copies. With NULLGPU_SHORT_COPIES the copies of these tiny layers are over at once too. The result says which
it was.
"""

from __future__ import annotations

import argparse
import copy
import os
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import streamer
from bench.common import RESULTS, load_average, provenance, quartiles, write_json
from bench.markdown import Report, spread, table
from bench.no_values import add_option, go_on_without_values
from models.gpt2 import GPT

LAYERS = 12
BATCH = (2, 16)
#: tests/nullgpu: up to how many bytes a copy is done when it is submitted
SHORT_COPIES = "NULLGPU_SHORT_COPIES"
WAYS = ("plain", "checkpoint", "streamed")
CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}


class Checkpointed(torch.nn.Module):
    """A layer whose activations are recomputed by PyTorch."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = checkpoint(self.layer, x, use_reentrant=False)
        return output


def trainers(device: str, *, is_updated: bool) -> dict[str, Callable[[], None]]:
    """A training step of each of the `WAYS`."""
    torch.manual_seed(0)
    original = GPT(vocab_size=256, block_size=BATCH[1], tied=False, n_layer=LAYERS, n_head=2, n_embd=32)
    tokens, targets = torch.randint(256, (2, *BATCH), device=device)
    found: dict[str, Callable[[], None]] = {}
    for way in WAYS:
        model: torch.nn.Module = copy.deepcopy(original)
        optimizer: torch.optim.Optimizer
        if way == "streamed":
            model = streamer.wrap(model, layers="transformer.h", device=device, host_threads=1)
            optimizer = streamer.AdamW(model.parameters(), lr=1e-6)
        else:
            if way == "checkpoint":
                model.transformer.h = torch.nn.ModuleList(map(Checkpointed, model.transformer.h))
            optimizer = torch.optim.AdamW(model.to(device).parameters(), lr=1e-6, fused=True)

        def step(model: torch.nn.Module = model, optimizer: torch.optim.Optimizer = optimizer) -> None:
            F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()).backward()
            if is_updated:
                optimizer.step()
            optimizer.zero_grad()

        found[way] = step
    return found


def measure(device: str, rounds: int, steps: int, *, is_updated: bool) -> dict[str, Any]:
    """Quartiles over rounds of the time that checkpoint and streaming add to a layer, and of their ratio."""
    step = trainers(device, is_updated=is_updated)
    order = random.Random(0)
    seconds: dict[tuple[str, str], list[float]] = {(clock, way): [] for clock in CLOCKS for way in WAYS}
    for _ in range(rounds + 1):
        found_in_round: dict[tuple[str, str], list[float]] = {key: [] for key in seconds}
        # a step of each way in turn: a machine that others use too is faster now and slower then
        for way in (way for _ in range(steps) for way in order.sample(WAYS, len(WAYS))):
            began = {name: clock() for name, clock in CLOCKS.items()}
            step[way]()
            for name, clock in CLOCKS.items():
                found_in_round[name, way].append(clock() - began[name])
        for key, values in found_in_round.items():
            seconds[key].append(statistics.median(values))
    found: dict[str, Any] = {}
    for clock in CLOCKS:
        # the first round compiles and warms up
        plain, checkpointed, streamed = (seconds[clock, way][1:] for way in WAYS)
        add = {
            "plain": [1e6 * p / LAYERS for p in plain],
            "checkpoint_adds": [1e6 * (c - p) / LAYERS for p, c in zip(plain, checkpointed, strict=True)],
            "streaming_adds": [1e6 * (s - c) / LAYERS for c, s in zip(checkpointed, streamed, strict=True)],
        }
        add["ratio"] = [s / c for c, s in zip(add["checkpoint_adds"], add["streaming_adds"], strict=True)]
        found[clock] = {name: quartiles(values) for name, values in add.items()}
    return found


def report_table(report: Report) -> list[str]:
    rows = [
        [
            {"passes": "forward and backward", "step": "with the update"}[name],
            {"wall": "wall clock", "cpu": "CPU of all threads"}[clock],
            *(spread(row[column], ".0f") for column in ("plain", "checkpoint_adds", "streaming_adds")),
            spread(row["ratio"], ".2f"),
        ]
        for name, clocks in report["tasks"].items()
        for clock, row in clocks.items()
    ]
    heads = ["", "", "plain", "checkpoint adds", "streaming adds to that", "ratio of the last two"]
    what = "Microseconds per layer and step, one thread."
    if not report.get("has_values", True):
        short = report.get("short_copies", "0")
        copies = (
            f"and which does copies of up to {short} bytes at once"
            if short != "0"
            else "and which wakes a thread for each copy"
        )
        what += f" Of the host alone: the stand-in for a GPU runs no kernels {copies}."
    return [what, "", *table(heads, rows)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    add_option(parser)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--json", type=Path, help="bench/results/host_cost.json")
    options = parser.parse_args()

    if options.no_values:
        go_on_without_values()
    load_before = load_average()
    torch.set_num_threads(1)
    tasks = {
        name: measure(options.device, options.rounds, options.steps, is_updated=is_updated)
        for name, is_updated in (("passes", False), ("step", True))
    }
    for name, clocks in tasks.items():
        for clock, row in clocks.items():
            print(
                f"{name:7}{clock:5}: plain {row['plain']['median']:7.0f} us a layer and step, "
                f"checkpoint adds {row['checkpoint_adds']['median']:6.0f}, "
                f"streaming adds to that {row['streaming_adds']['median']:6.0f}; "
                f"ratio {row['ratio']['median']:.2f} "
                f"({row['ratio']['lower_quartile']:.2f} to {row['ratio']['upper_quartile']:.2f})"
            )
    report = provenance("bench/host_cost.py", load_before=load_before, device=options.device)
    report |= {"layers": LAYERS, "rounds": options.rounds, "steps": options.steps, "tasks": tasks}
    if options.no_values:
        report["short_copies"] = os.environ.get(SHORT_COPIES, "0")
    write_json(options.json or RESULTS / "host_cost.json", report)


if __name__ == "__main__":
    main()
