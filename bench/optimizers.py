"""What does a step of an optimizer of PyTorch cost on bf16 weights with exact masters?

    python -m bench.optimizers [--width 1024] [--layers 4] [--rounds 9] [--json bench/results/optimizers.json]

For each optimizer three contenders take a step per round, in a new random order: PyTorch's class on fp32
parameters in place (*fp32*), on bf16 parameters in place as PyTorch alone has them, without masters (*bf16*),
and on a wrapped model's bf16 weights with masters (*masters*), from `step()` until the last update is done.
Times are nanoseconds per parameter, with quartiles over rounds; *more* is masters minus fp32 within a round.
Muon is missing: on a CPU its matrix products take nearly all of the time.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import streamer
from bench.common import RESULTS, load_average, provenance, quartiles, write_json
from bench.markdown import Report, spread, table
from models.gpt2 import GPT

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-4, fused=True),
    "SGD with momentum": lambda params: torch.optim.SGD(params, lr=1e-4, momentum=0.9),
    "Lion": lambda params: streamer.Lion(params, lr=1e-5),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=1e-4),
    "Adafactor": lambda params: torch.optim.Adafactor(params, lr=1e-4),
}
CONTENDERS = ("fp32", "bf16", "masters")


def with_gradients(params: list[nn.Parameter]) -> list[nn.Parameter]:
    for param in params:
        param.grad = torch.randn(param.shape).to(param.dtype) * 1e-3
    return params


def measure(
    make: Callable[[Any], torch.optim.Optimizer], model: nn.Module, rounds: int
) -> dict[str, list[float]]:
    """Seconds of a step of each contender, one per round; the first two rounds are not kept."""
    wrapped = streamer.wrap(model, layers="transformer.h", device="cpu", dtype=torch.bfloat16)
    ours = with_gradients([*wrapped.parameters()])
    steps: dict[str, Callable[[], object]] = {}
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        copies = with_gradients([nn.Parameter(torch.randn(param.shape).to(dtype) * 0.02) for param in ours])
        steps[name] = make(copies).step
    optimizer = make(ours)

    def step() -> None:
        optimizer.step()
        streamer.synchronize(wrapped)

    steps["masters"] = step
    seconds: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    order = random.Random(0)
    for _ in range(rounds + 2):
        for name in order.sample(CONTENDERS, len(CONTENDERS)):
            started = time.perf_counter()
            steps[name]()
            seconds[name].append(time.perf_counter() - started)
    streamer.unwrap(wrapped)
    return {name: values[2:] for name, values in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path, default=RESULTS / "optimizers.json")
    options = parser.parse_args()
    load_before = load_average()
    rows = {}
    for name, make in OPTIMIZERS.items():
        torch.manual_seed(0)
        model = GPT(vocab_size=256, block_size=64, n_layer=options.layers, n_head=8, n_embd=options.width)
        size = sum(param.numel() for param in model.parameters())
        seconds = measure(make, model, options.rounds)
        nanoseconds = {each: [value / size * 1e9 for value in values] for each, values in seconds.items()}
        both = zip(nanoseconds["masters"], nanoseconds["fp32"], strict=True)
        rows[name] = {each: quartiles(values) for each, values in nanoseconds.items()}
        rows[name]["more"] = quartiles(masters - fp32 for masters, fp32 in both)
        print(name, *(f"{each} {found['median']:.2f}" for each, found in rows[name].items()), flush=True)
    report = provenance("bench/optimizers.py", load_before=load_before) | {
        "parameters": size,
        "rounds": options.rounds,
        "torch_threads": torch.get_num_threads(),
        "optimizers": rows,
    }
    write_json(options.json, report)


def report_table(report: Report) -> list[str]:
    """Nanoseconds per parameter of a step of each optimizer."""
    heads = ["optimizer", "fp32 in place", "bf16 in place, no masters", "bf16 with masters", "more than fp32"]
    rows = [
        [name, *(f"{found[each]['median']:.2f}" for each in CONTENDERS), spread(found["more"], "+.2f")]
        for name, found in report["optimizers"].items()
    ]
    return table(heads, rows)


#: The figure of docs/benchmarks.md is the same table.
readme_figure = report_table


if __name__ == "__main__":
    main()
