"""How many bytes of weights come to the device in a step, against the least that so many slots allow?

    python -m bench.residency    # seconds, no GPU: the executor on the virtual backend

A stack of equal layers, in fp32 and all of them trained, for several numbers of slots. *Moved* is what the
copies to the device add up to, in a training step (forward, backward, update) and in a forward without
gradients, once the executor has learned their order; the mean over so many of them that no rest is left.
*Least* and *least overlapped* are those of `bench.least_bytes`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from torch import nn

import streamer
from bench.common import RESULTS, load_average, provenance, write_json
from bench.least_bytes import Cycle, inference, least_bytes, training
from bench.residency_table import residency_table
from streamer.backends.virtual import VirtualBackend
from streamer.engine.handle import wrapped
from streamer.engine.schedule.op import OpKind
from streamer.planner.machine import H200

WIDTH = 32


class Stack(nn.Module):
    """``layers`` matrices of WIDTH x WIDTH, and nothing else."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def moved_in_training(layers: int, slots: int, *, backwards: int = 1, update: str = "step") -> Fraction:
    """Layers copied to the device in a training step of ``backwards`` forwards and backwards."""
    with torch.device("meta"):
        model, inputs = Stack(layers), torch.empty(4, WIDTH)
    streamer.wrap(model, layers="layers", num_slots=slots, update=update, backend=VirtualBackend(H200))
    optimizer = streamer.AdamW(model.parameters())

    def step() -> None:
        for _ in range(backwards):
            model(inputs).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return _mean_moved(model, step, warmup=2, count=1)


def moved_in_inference(layers: int, slots: int) -> Fraction:
    """Layers copied to the device in a forward without gradients."""
    with torch.device("meta"):
        model, inputs = Stack(layers), torch.empty(4, WIDTH)
    streamer.wrap(model, layers="layers", num_slots=slots, backend=VirtualBackend(H200))

    @torch.no_grad()
    def infer() -> None:
        model(inputs)

    # what is copied in a pass repeats after layers - 2 passes
    return _mean_moved(model, infer, warmup=layers, count=max(1, layers - 2))


def _mean_moved(model: nn.Module, run: Callable[[], None], *, warmup: int, count: int) -> Fraction:
    executor = wrapped(model).executor
    moved = []
    for repetitions in (warmup, count):
        for _ in range(repetitions):
            run()
        copies = (record.op for record in executor.issuer.trace.records())
        moved.append(sum(op.nbytes for op in copies if op.kind is OpKind.UNSHARD))
    return Fraction(moved[1] - moved[0], count * executor.units[0].layout.nbytes)


def compare(cycle: Cycle, moved: Callable[[int, int], Fraction], slots: Sequence[int]) -> dict[str, Any]:
    """For each number of slots what is moved in ``cycle``, and the least, in layers."""
    layers = len(cycle.whole)
    return {
        "moved_with_all_layers": float(moved(layers, layers)),
        "slots": [
            {
                "slots": count,
                "moved": float(moved(layers, count)),
                "least": float(least_bytes(cycle, count)),
                "least_overlapped": float(least_bytes(cycle, count, overlapped=True)) if count > 1 else None,
            }
            for count in slots
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--slots", type=int, nargs="+", default=[1, 2, 3, 6, 12])
    parser.add_argument("--json", type=Path, default=RESULTS / "residency.json")
    options = parser.parse_args()
    load_before = load_average()
    report = {
        **provenance("bench/residency.py", load_before=load_before),
        "layers": options.layers,
        "layer_bytes": 4 * WIDTH * WIDTH,
        "cycles": {
            "training": compare(training(options.layers), moved_in_training, options.slots),
            "inference": compare(inference(options.layers), moved_in_inference, options.slots),
        },
    }
    print("\n".join(residency_table(report)))
    write_json(options.json, report)


if __name__ == "__main__":
    main()
