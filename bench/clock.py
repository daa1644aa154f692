"""Does the clock of a plan keep the time that the executor takes on a GPU whose kernels and copies take as
long as the plan says?

    tests/nullgpu/run.sh PYTHON -m bench.clock     # two minutes on two cores, no GPU

On the stand-in for a GPU (tests/nullgpu) kernels compute nothing and take a set time, and copies have a set
rate, all in stream order. So what is compared is everything else: order, prefetching, waits, and in the last
setting, where kernels take next to no time, the host. A layer multiplies its input with ten weights in turn;
every operation is one kernel. In the last setting the plan has what the host takes to launch an operation and
what the library takes per visit (`streamer.cli.calibrate.measure.VisitCosts`), measured anew in every round.

A round has some steps in each setting, in an order drawn anew. ``ratio`` is the step's time by the plan's of
the same round, ``exposed`` what compute has waited for copies, by the executor's trace and by the plan, as
shares of the step.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

import streamer
from bench.common import RESULTS, load_average, provenance, quartiles, write_json
from bench.no_values import go_on_without_values
from streamer.backends.base import COPIES, Backend
from streamer.backends.cuda import CudaBackend
from streamer.backends.virtual import VirtualBackend
from streamer.cli.calibrate.measure import VisitCosts
from streamer.engine.handle import wrapped
from streamer.engine.paging.executor import Executor
from streamer.planner.machine import Machine
from streamer.planner.step import Prediction, predict_step
from tests.nullgpu import device as nullgpu

LAYERS, WEIGHTS, NUMBERS = 6, 10, 1 << 18
HOST = "the host"
#: What binds: microseconds of a kernel, and GB/s of a copy.
SETTINGS = {
    "compute": (500.0, 10.0),
    "compute and copies": (300.0, 0.5),
    "copies": (300.0, 0.2),
    HOST: (1.0, 100.0),
}
LAUNCHES = 1000


class Layer(nn.Module):
    """Operations that are a kernel each."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.empty(NUMBERS)) for _ in range(WEIGHTS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = torch.sigmoid(torch.sigmoid(torch.sigmoid(x * weight)))
        return x


def begin(backend: Backend) -> tuple[Executor, Callable[[], None]]:
    """A model on ``backend``, and its forward and backward: an update waits for the host's memory."""
    with torch.device("meta") if backend.device.type == "meta" else nullcontext():
        model = nn.Sequential(nn.Sequential(*(Layer() for _ in range(LAYERS))))
    streamer.wrap(model, layers="0", backend=backend)
    x = torch.zeros(NUMBERS, device=backend.device)

    def step() -> None:
        model(x).backward(x)
        model.zero_grad()

    return wrapped(model).executor, step


def predict(machine: Machine) -> Prediction:
    return predict_step(*begin(VirtualBackend(machine)))


def launch_seconds() -> float:
    """What the host takes to launch an operation, forward or backward."""
    x = torch.zeros(NUMBERS, device="cuda", requires_grad=True)
    began = time.perf_counter()
    y = x
    for _ in range(LAUNCHES // 2):
        y = torch.sigmoid(y)
    torch.autograd.grad(y, x, x.detach())
    return (time.perf_counter() - began) / LAUNCHES


def measure(rounds: int, steps: int) -> dict[str, Any]:
    """By setting, quartiles over rounds of seconds, of their ratio to the plan's, and of what is exposed."""
    executor, step = begin(CudaBackend(torch.device("cuda")))
    costs = VisitCosts(torch.device("cuda"))
    trace, order = executor.issuer.trace, random.Random(0)
    found: dict[str, dict[str, list[float]]] = {name: {} for name in SETTINGS}
    for number in range(rounds + 1):
        for name in order.sample(list(SETTINGS), len(SETTINGS)):
            kernel_us, copy_gbps = SETTINGS[name]
            nullgpu.change(kernel_us=kernel_us, copy_gbps=copy_gbps)
            per_op, per_visit = 1e-6 * kernel_us, 0.0
            if name == HOST:
                per_op = max(per_op, launch_seconds())
                per_visit = costs.seconds(per_op)
            rate = 1e9 * copy_gbps
            host = {"seconds_per_op": per_op, "seconds_per_visit": per_visit}
            plan = predict(Machine(name, 1e30, rate, rate, 1e30, 1 << 50, 1 << 50, **host))
            step()
            executor.synchronize()
            torch.cuda.synchronize()
            exposed = sum(trace.exposed_seconds[lane] for lane in COPIES)
            began = time.perf_counter()
            for _ in range(steps):
                step()
            torch.cuda.synchronize()
            seconds = (time.perf_counter() - began) / steps
            executor.synchronize()
            exposed = (sum(trace.exposed_seconds[lane] for lane in COPIES) - exposed) / steps
            if number:  # the first warms up
                values = {
                    "seconds": seconds,
                    "ratio": seconds / plan.seconds,
                    "exposed": exposed / seconds,
                    "planned_exposed": sum(plan.exposed_seconds[lane] for lane in COPIES) / plan.seconds,
                }
                for key, value in values.items():
                    found[name].setdefault(key, []).append(value)
    costs.close()
    executor.backend.close()
    return {name: {key: quartiles(values) for key, values in rows.items()} for name, rows in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--json", type=Path, default=RESULTS / "clock_no_kernels.json")
    options = parser.parse_args()
    if not nullgpu.IS_LOADED:
        parser.error("kernels take a set time only on tests/nullgpu: run it by tests/nullgpu/run.sh")
    go_on_without_values()
    load_before = load_average()
    tasks = measure(options.rounds, options.steps)
    for name, row in tasks.items():
        ratio, exposed, planned = row["ratio"], row["exposed"], row["planned_exposed"]
        print(
            f"{name:20} step {1e3 * row['seconds']['median']:6.1f} ms, by the plan's {ratio['median']:.3f} "
            f"({ratio['lower_quartile']:.3f} to {ratio['upper_quartile']:.3f}); exposed "
            f"{exposed['median']:.1%}, planned {planned['median']:.1%}"
        )
    report = provenance("bench/clock.py", load_before=load_before, device="cuda")
    report |= {"rounds": options.rounds, "steps": options.steps, "settings": SETTINGS, "tasks": tasks}
    write_json(options.json, report)


if __name__ == "__main__":
    main()
