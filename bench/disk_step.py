"""What does a step cost when optimizer state, or weights too, are on disk, and does the plan say so?

    python -m bench.disk_step --folder /nvme/scratch      # 10 minutes, 2 GiB of memory, 3 GiB of disk

A GPT in bf16 trains on the CPU in every placement in turn: all in host memory; the optimizer's state on disk;
weights too. The last two run on the disk as it is, and throttled to constant rates, so that plans can be
compared. A turn is some steps in a plain loop (forward, cross-entropy, backward, AdamW); its first step, with
an idle pipeline, is not counted. Losses are equal to the bit in all placements, or the script fails.

``slower`` is a placement's step by the one in host memory of the same round, ``planned`` the same of plans:
for this machine as `streamer calibrate` measures it at the start, with the throttle's rates for its disk, and
a compute rate with which the plan of the step in host memory takes as long as that step. ``bound`` is the
longer of the step in host memory and of the bytes of a disk lane at its rate: no order of the work can be
faster. With ``update="step"`` the disk has nothing to do in backward, with "backward" little in forward, so
no step on a slow disk is as fast as that.
``state_over_budget`` is how many times the budget of host memory the optimizer's state is.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import streamer
from bench.common import RESULTS, load_average, provenance, quartiles, write_json
from bench.markdown import Report, spread, table
from bench.slow import SlowDisk
from models.gpt2 import GPT
from streamer.backends.base import DISKS, Backend
from streamer.backends.disk import Direction, Disks, Scratch
from streamer.backends.virtual import VirtualBackend
from streamer.cli.calibrate.command import calibrate
from streamer.engine.handle import wrapped
from streamer.planner.machine import Machine
from streamer.planner.step import Prediction, predict_step
from streamer.store.purposes import MASTERING, MOMENTS


def report_table(report: Report) -> list[str]:
    """The table of `bench.disk_step`."""
    rows = [
        [
            row["placement"],
            _rate(row) if "slower" in row else "",
            f"{row['budget'] / 1e6:.0f} MB" if row["budget"] else "none",
            f"{row['state_over_budget']:.1f}" if "slower" in row else "",
            f"{row['bytes_per_parameter']:.1f}" if "moved_bytes" in row else "",
            spread(row["seconds"]),
            spread(row["tokens_per_second"], ".0f"),
            spread(row.get("slower")),
            f"{row['planned']:.2f}" if "planned" in row else "",
            spread(row.get("of_planned")),
            spread(row.get("of_bound")),
        ]
        for row in report["placements"]
    ]
    heads = [
        "",
        "disk, each way",
        "budget",
        "state over it",
        "bytes a parameter",
        "seconds of a step",
        "tokens/s",
        "by host memory",
        "planned",
        "of planned",
        "of the bound",
    ]
    return [
        f"A GPT of {report['parameters'] / 1e6:.1f} million parameters in bf16, {report['layers']} layers of "
        f'width {report["width"]}, update="{report.get("update", "step")}", '
        f"{report['tokens_per_step']} tokens a step, "
        f"{report['rounds']} rounds of {report['steps']} steps; losses are equal to the bit:",
        "",
        *table(heads, rows),
    ]


def _rate(row: Report) -> str:
    rate = row["throttle_bytes_per_second"]
    return "as it is" if rate is None else f"{rate / 1e6:.0f} MB/s"


def readme_figure(report: Report) -> str:
    """The results of `bench.disk_step`, in sentences."""
    slow = [row for row in report["placements"] if row["throttle_bytes_per_second"] is not None]
    ratios = [
        f"{row['slower']['median']:.2f} times as long with {row['placement']} at {_rate(row)} each way "
        f"(planned: {row['planned']:.2f})"
        for row in slow
    ]
    return (
        f"A step of {report['parameters'] / 1e6:.0f} million parameters in bf16, of "
        f"{report['tokens_per_step']} tokens on {report['hardware']['cores']} cores, takes, compared with "
        f"one in host memory, {', '.join(ratios)}."
    )


FP32 = torch.float32
STATE = {purpose.name for purpose in (*MASTERING, *MOMENTS[FP32])}
#: Names of placements.
MEMORY, ON_DISK, WEIGHTS_TOO = "host memory", "state on disk", "state and weights on disk"


def model_of(options: argparse.Namespace) -> nn.Module:
    torch.manual_seed(0)
    return GPT(
        vocab_size=options.vocab,
        block_size=options.context,
        n_layer=options.layers,
        n_head=8,
        n_embd=options.width,
    )


class Placement:
    """A model with its budget, and its training steps."""

    def __init__(
        self, options: argparse.Namespace, budget: int | None, disk: Any, backend: Backend | None = None
    ) -> None:
        virtual = backend is not None
        with torch.device("meta" if virtual else "cpu"):
            model = model_of(options)
        where: dict[str, Any] = {} if budget is None else {"host_memory": budget, "disk": disk}
        on: dict[str, Any] = {"backend": backend} if virtual else {"device": "cpu"}
        self.model = streamer.wrap(
            model, layers="transformer.h", dtype=torch.bfloat16, update=options.update, **where, **on
        )
        self.executor = wrapped(self.model).executor
        self.optimizer = streamer.AdamW(self.model.parameters(), lr=1e-4)
        shape = options.batch, options.context + 1
        tokens = torch.randint(options.vocab, shape, generator=torch.Generator().manual_seed(1))
        self._tokens = tokens.to("meta") if virtual else tokens

    def step(self) -> torch.Tensor:
        """One step; the loss."""
        logits = self.model(self._tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), self._tokens[:, 1:].flatten())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def turn(self, steps: int) -> tuple[float, list[float]]:
        """Seconds of a step, and the losses."""
        losses = [self.step().item()]
        began = time.perf_counter()
        losses += [self.step().item() for _ in range(steps)]
        seconds = (time.perf_counter() - began) / steps
        streamer.synchronize(self.model)
        return seconds, losses

    def bytes_held(self) -> dict[str, Any]:
        host, disk = self.executor.host.bytes(), self.executor.host.disk_bytes()
        return {"host_bytes": host, "disk_bytes": disk}


def predict(
    options: argparse.Namespace, machine: Machine, budget: int | None
) -> tuple[Prediction, Placement]:
    placement = Placement(options, budget, "planned", VirtualBackend(machine))
    return predict_step(placement.executor, placement.step, warmup=2), placement


def least_budget(options: argparse.Namespace, machine: Machine, *, weights: bool) -> int:
    """The least host memory with the state on disk and, with ``weights``, those of layers too."""
    held = predict(options, machine, None)[1].executor.host.bytes()
    fits = sum(held.values())
    low, high = 1, fits
    while high - low > 1 << 16:
        middle = (low + high) // 2
        try:
            on_disk = predict(options, machine, middle)[1].executor.host.disk_bytes()
            is_there = bool(on_disk) and (weights or "weights" not in on_disk)
        except MemoryError:
            is_there = False
        low, high = (low, middle) if is_there else (middle, high)
    return high


def measured_machine() -> Machine:
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        return calibrate(device="cpu", output=Path(folder) / "machine.toml")


def as_fast_as(seconds: float, options: argparse.Namespace, machine: Machine) -> Machine:
    """``machine`` with a compute rate with which a planned step in host memory takes as many seconds."""
    low, high = machine.flops_per_second / 16, machine.flops_per_second * 16
    while high / low > 1.005:
        middle = math.sqrt(low * high)
        found = replace(machine, flops_per_second=middle, fp32_flops_per_second=middle)
        low, high = (middle, high) if predict(options, found, None)[0].seconds > seconds else (low, middle)
    return replace(machine, flops_per_second=high, fp32_flops_per_second=high)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    machine = measured_machine()
    roomy = machine.with_room()
    budgets = {
        ON_DISK: least_budget(options, roomy, weights=False),
        WEIGHTS_TOO: least_budget(options, roomy, weights=True),
    }
    rates: list[float | None] = [None, *(1e6 * rate for rate in options.throttle)]
    contenders: dict[tuple[str, float | None], Placement] = {(MEMORY, None): Placement(options, None, None)}
    for rate in rates:
        rates_of = {} if rate is None else dict.fromkeys(Direction, rate)
        scratch: Callable[..., Scratch] = partial(SlowDisk, rates=rates_of)
        for name, budget in budgets.items():
            contenders[name, rate] = Placement(options, budget, Disks([options.folder], scratch))
    seconds: dict[tuple[str, float | None], list[float]] = {key: [] for key in contenders}
    draw = random.Random(0)
    for number in range(options.rounds + 1):
        losses = []
        for key in draw.sample(list(contenders), len(contenders)):
            taken, found = contenders[key].turn(options.steps)
            losses.append(found)
            if number:  # the first warms up
                seconds[key].append(taken)
        if any(each != losses[0] for each in losses):
            raise RuntimeError(f"losses differ between placements: {losses}")
    if options.trace is not None:
        streamer.save_trace(contenders[WEIGHTS_TOO, rates[1]].model, options.trace)
    in_memory = seconds[MEMORY, None]
    roomy = as_fast_as(statistics.median(in_memory), options, roomy)
    plan_in_memory = predict(options, roomy, None)[0]
    parameters = sum(param.numel() for param in contenders[MEMORY, None].model.parameters())
    rows = []
    for (name, rate), taken in seconds.items():
        placement, row = contenders[name, rate], dict[str, Any]()
        row |= {"placement": name, "throttle_bytes_per_second": rate, "seconds": quartiles(taken)}
        row |= placement.bytes_held() | {"budget": budgets.get(name)}
        tokens = options.batch * options.context
        row["tokens_per_second"] = quartiles(tokens / value for value in taken)
        if name != MEMORY:
            row["slower"] = quartiles(own / other for own, other in zip(taken, in_memory, strict=True))
            row["state_over_budget"] = sum(
                nbytes
                for purpose, nbytes in contenders[MEMORY, None].executor.host.bytes().items()
                if purpose in STATE
            ) / (budgets[name] or 1)
        if rate is not None:
            with_disk = replace(roomy, disk_read_bytes_per_second=rate, disk_write_bytes_per_second=rate)
            plan = predict(options, with_disk, budgets[name])[0]
            moved = {lane.value: plan.moved_bytes[lane] for lane in DISKS}
            longest = max(moved.values()) / rate
            row["moved_bytes"] = moved
            row["bytes_per_parameter"] = sum(moved.values()) / parameters
            row["planned"] = plan.seconds / plan_in_memory.seconds
            row["of_planned"] = quartiles(
                own / other / row["planned"] for own, other in zip(taken, in_memory, strict=True)
            )
            row["of_bound"] = quartiles(
                own / max(other, longest) for own, other in zip(taken, in_memory, strict=True)
            )
        rows.append(row)
    for placement in contenders.values():
        wrapped(placement.model).close()
    return {
        "parameters": parameters,
        "tokens_per_step": options.batch * options.context,
        "planned_seconds_in_memory": plan_in_memory.seconds,
        "flops_per_second": {"calibrated": machine.flops_per_second, "planned": roomy.flops_per_second},
        "placements": rows,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--folder", type=Path, default=Path(tempfile.gettempdir()), help="on the disk to train on"
    )
    parser.add_argument("--throttle", type=float, nargs="*", default=[800.0, 200.0], help="MB/s each way")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--vocab", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--update", choices=("step", "backward"), default="step")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="in a turn (3)")
    parser.add_argument("--trace", type=Path, help="where the Chrome trace of the first throttled run goes")
    parser.add_argument("--json", type=Path, default=RESULTS / "disk_step.json")
    options = parser.parse_args(arguments)
    load_before = load_average()
    report = provenance("bench/disk_step.py", load_before=load_before)
    report |= {
        name: getattr(options, name) for name in ("layers", "width", "vocab", "batch", "context", "update")
    }
    report |= {"rounds": options.rounds, "steps": options.steps, **measure(options)}
    print("\n".join(report_table(report)))
    write_json(options.json, report)


if __name__ == "__main__":
    main()
