"""How far is the predicted time of a step from the measured one?

    python -m bench.plan_time    # three minutes on two cores, no GPU

In every round this machine is measured as `streamer calibrate` does, once for all models and without their
configs, and models of different shapes train on the thread backend, a block of steps each, in a new random
order, so that other load on the machine affects all alike. Then each model is predicted by the executor on
the virtual backend, from the medians of the calibration. The ratio is predicted over measured: of the medians
over rounds, and by round.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import streamer
from bench.common import RESULTS, load_average, provenance, quartiles, write_json
from bench.markdown import Report, spread, table
from models.gpt2 import GPT
from streamer.backends.base import Backend, Lane
from streamer.backends.thread import ThreadBackend
from streamer.backends.virtual import VirtualBackend
from streamer.cli.calibrate.command import machine_of, print_table, sizes_of
from streamer.cli.calibrate.measure import Found, Measurements
from streamer.engine.handle import wrapped
from streamer.planner.machine import Machine
from streamer.planner.step import Prediction, predict_step


def report_table(report: Report) -> list[str]:
    rows = [
        [
            f"{name}: {row['shape']['n_layer']} layers of {row['shape']['n_embd']}, "
            f"{row['shape']['batch_size']} x {row['shape']['context']} tokens",
            f"{row['predicted_seconds'] * 1e3:.0f}",
            spread(row["measured_seconds"], ".0f", 1e3),
            f"{row['ratio']:.2f}",
            spread(row["ratio_by_rounds"]),
        ]
        for name, row in report["models"].items()
    ]
    heads = ["GPT-2", "predicted, ms", "measured, ms", "predicted over measured", "by rounds"]
    machine = report["machine"]
    return [
        f"A step, fp32, on the thread backend of {machine['name']}, predicted from what "
        "`streamer calibrate` measures.",
        "",
        *table(heads, rows),
    ]


VOCAB_SIZE = 256


@dataclass(frozen=True)
class Shape:
    """A GPT-2 and its batch."""

    n_layer: int
    n_head: int
    n_embd: int
    context: int
    batch_size: int


SHAPES = {
    "wide and short": Shape(n_layer=3, n_head=12, n_embd=768, context=128, batch_size=2),
    "deep and narrow": Shape(n_layer=16, n_head=4, n_embd=256, context=128, batch_size=2),
    "long context": Shape(n_layer=4, n_head=6, n_embd=384, context=1024, batch_size=1),
}


def step_of(shape: Shape, backend: Backend) -> tuple[Any, Callable[[], None]]:
    """The wrapped model, and a step of the plain loop on random tokens."""
    torch.manual_seed(0)
    with backend.device:
        model = GPT(
            vocab_size=VOCAB_SIZE,
            block_size=shape.context,
            n_layer=shape.n_layer,
            n_head=shape.n_head,
            n_embd=shape.n_embd,
            tied=False,
        )
    streamer.wrap(model, layers="transformer.h", backend=backend, num_slots=2)
    optimizer = streamer.AdamW(model.parameters(), lr=1e-6)
    tokens, targets = torch.randint(VOCAB_SIZE, (2, shape.batch_size, shape.context)).to(backend.device)

    def step() -> None:
        logits = model(tokens)
        F.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, step


def predict(shape: Shape, machine: Machine) -> Prediction:
    model, step = step_of(shape, VirtualBackend(machine))
    return predict_step(wrapped(model).executor, step)


@dataclass(frozen=True)
class Block:
    """Seconds of a step, and those that each lane is busy."""

    seconds: float
    busy: dict[str, float]


def block(model: Any, step: Callable[[], None], steps: int) -> Block:
    """The clock runs from an update just queued to another just queued; busy seconds are of all steps."""
    streamer.synchronize(model)
    idle = streamer.stats(model).busy_seconds
    step()
    began = time.perf_counter()
    for _ in range(steps):
        step()
    seconds = (time.perf_counter() - began) / steps
    streamer.synchronize(model)
    busy = streamer.stats(model).busy_seconds
    return Block(seconds, {lane: (busy[lane] - idle[lane]) / (steps + 1) for lane in busy})


def measure(rounds: int, steps: int) -> tuple[Machine, dict[str, list[Block]], Found]:
    """This machine, a block of each shape by rounds, and the machine's hardware."""
    backend = ThreadBackend()
    measurements = Measurements(backend, sizes_of("cpu"))
    loops = {name: step_of(shape, ThreadBackend()) for name, shape in SHAPES.items()}
    blocks: dict[str, list[Block]] = {name: [] for name in loops}
    found: Found = {}
    order = random.Random(0)
    for model, step in loops.values():
        block(model, step, 1)
    for _ in range(rounds):
        for name, value in measurements.round().items():
            found.setdefault(name, []).append(value)
        for name in order.sample(list(loops), len(loops)):
            blocks[name].append(block(*loops[name], steps))
    machine = machine_of(found, backend)
    measurements.close()
    backend.close()
    for model, _ in loops.values():
        streamer.unwrap(model)
    return machine, blocks, found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=12, help="two or more (12)")
    parser.add_argument("--steps", type=int, default=2, help="of a block (2)")
    parser.add_argument("--json", type=Path, default=RESULTS / "plan_time.json")
    options = parser.parse_args()
    load_before = load_average()
    machine, measured, found = measure(options.rounds, options.steps)
    print_table(found)
    rows = {}
    for name, shape in SHAPES.items():
        prediction = predict(shape, machine)
        seconds = [one.seconds for one in measured[name]]
        rows[name] = {
            "shape": asdict(shape),
            "predicted_seconds": prediction.seconds,
            "measured_seconds": quartiles(seconds),
            "ratio": prediction.seconds / statistics.median(seconds),
            "ratio_by_rounds": quartiles(prediction.seconds / value for value in seconds),
            "predicted_busy_seconds": {lane.value: prediction.busy_seconds[lane] for lane in Lane},
            "measured_busy_seconds": {
                lane.value: statistics.median(one.busy[lane.value] for one in measured[name]) for lane in Lane
            },
        }
        spread = rows[name]["ratio_by_rounds"]
        print(
            f"{name:16} predicted {prediction.seconds * 1e3:7.1f} ms, measured "
            f"{statistics.median(seconds) * 1e3:7.1f} ms: {rows[name]['ratio']:.2f} "
            f"({spread['lower_quartile']:.2f}-{spread['upper_quartile']:.2f})"
        )
        print(f"  busy, predicted {rows[name]['predicted_busy_seconds']}")
        print(f"  busy, measured  {rows[name]['measured_busy_seconds']}")
    report = provenance("bench/plan_time.py", load_before=load_before) | {
        "machine": asdict(machine),
        "calibrated": {name: quartiles(values) for name, values in found.items()},
        "compute_threads": torch.get_num_threads(),
        "rounds": options.rounds,
        "steps": options.steps,
        "models": rows,
    }
    write_json(options.json, report)


if __name__ == "__main__":
    main()
