"""Does a step take as much longer as there are more layers, and the device as much memory as for few?

    python -m bench.depth --compute-threads 1 --host-threads 1    # 150 s on two cores, no GPU
    python -m bench.depth --device cuda --dtype bfloat16 --n-embd 2048 --n-head 16 --batch-size 8 \\
        --context 1024 --one-at-a-time

GPT-2 of one width and several depths, two slots each. Every round runs a block of steps of each depth, in a
new random order, so that other load on the machine affects all alike. A block begins with idle lanes, with
one step that is not timed; its figure is the median of the timed steps. As in `bench.hidden_update`, the
clock starts just after an update is queued, and stops just after another one is. A line is fitted to the
medians over rounds by least squares: its slope is the time of a layer, its intercept the time outside of
layers. R^2 and the largest residual, as a share of the measured time, say how straight it is.

Of device memory there are two figures. *Owned* are the wrapped model's buffers: slots, gradient slots, and
all that is in no layer. They should not depend on depth, and the report says whether they do. *Peak* is the
most that was there during a block: on CUDA all tensors, as PyTorch counts them, less those of other models;
on the CPU the owned ones and what layers have saved for backward. It grows by each layer's saved inputs.

All depths are built at first and stay in memory, unless ``--one-at-a-time`` wraps each anew in every round.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import math
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import streamer
from bench.common import RESULTS, load_average, provenance, quartiles, write_json
from bench.markdown import Report, number, spread, table
from bench.no_values import add_option, go_on_without_values
from models.gpt2 import GPT
from streamer.engine.handle import wrapped


@dataclass(frozen=True)
class Block:
    """A block of steps: the median step's seconds, and bytes on the device."""

    seconds: float
    owned: Mapping[str, int]  # by purpose
    peak: int


def line_through(xs: Sequence[float], ys: Sequence[float]) -> dict[str, float]:
    """The straight line through two or more points by least squares, and how far they are from it.

    ``r_squared`` is NaN where all ``ys`` are equal; a residual is relative to its ``y``.
    """
    slope, intercept = statistics.linear_regression(xs, ys)
    residuals = [y - (slope * x + intercept) for x, y in zip(xs, ys, strict=True)]
    mean = statistics.fmean(ys)
    variation = math.fsum((y - mean) ** 2 for y in ys)
    return {
        "slope": slope,
        "intercept": intercept,
        "r_squared": 1 - math.fsum(r**2 for r in residuals) / variation if variation else math.nan,
        "largest_relative_residual": max(abs(r / y) for r, y in zip(residuals, ys, strict=True)),
    }


def summary(found: Mapping[int, Sequence[Block]]) -> dict[str, Any]:
    """Figures of each depth, and lines through those that may grow with it."""
    depths = [depth_figures(n_layer, found[n_layer]) for n_layer in sorted(found)]
    layers = [depth["n_layer"] for depth in depths]
    return {
        "depths": depths,
        "owned_bytes_are_equal": all(depth["owned_bytes"] == depths[0]["owned_bytes"] for depth in depths),
        "step_seconds_over_layers": line_through(
            layers, [depth["seconds_per_step"]["median"] for depth in depths]
        ),
        "peak_bytes_over_layers": line_through(layers, [depth["peak_bytes"] for depth in depths]),
    }


def depth_figures(n_layer: int, blocks: Sequence[Block]) -> dict[str, Any]:
    """Figures of one depth; the peak is the highest of all blocks."""
    seconds = quartiles(block.seconds for block in blocks)
    owned, peak = blocks[0].owned, max(block.peak for block in blocks)
    total = sum(owned.values())
    return {
        "n_layer": n_layer,
        "seconds_per_step": seconds,
        "seconds_per_layer": seconds["median"] / n_layer,
        "owned_bytes": dict(owned),
        "owned_bytes_total": total,
        "peak_bytes": peak,
        "beyond_owned_bytes_per_layer": (peak - total) / n_layer,
    }


def draw(found: Mapping[str, Any], picture: Path, *, title: str) -> None:
    """Step time and device bytes over layers, if matplotlib is there."""
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        print(f"not drawn: {error}; matplotlib comes with the extra [plot]")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    depths, line = found["depths"], found["step_seconds_over_layers"]
    layers = [depth["n_layer"] for depth in depths]
    lower, median, upper = (
        [depth["seconds_per_step"][name] * 1e3 for depth in depths]
        for name in ("lower_quartile", "median", "upper_quartile")
    )
    figure, (times, sizes) = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    figure.suptitle(title, fontsize=10)
    fitted = [(line["intercept"] + line["slope"] * n_layer) * 1e3 for n_layer in (0, layers[-1])]
    label = f"{line['intercept'] * 1e3:.1f} ms + {line['slope'] * 1e3:.2f} ms per layer"
    times.plot((0, layers[-1]), fitted, color="#d65f5f", linewidth=1, label=label)
    spread = [
        [mid - low for mid, low in zip(median, lower, strict=True)],
        [up - mid for mid, up in zip(median, upper, strict=True)],
    ]
    label = "median of rounds, quartiles"
    times.errorbar(layers, median, yerr=spread, fmt="o", color="#4878cf", capsize=3, label=label)
    times.set_ylabel("milliseconds per step")
    for key, label, colour in (
        ("peak_bytes", "peak: with the layers' saved inputs", "#e8a33d"),
        ("owned_bytes_total", "owned: slots, root, gradients", "#4878cf"),
    ):
        sizes.plot(layers, [depth[key] / 1e6 for depth in depths], "o-", color=colour, label=label)
    sizes.set_ylabel("MB on the device")
    for axes in (times, sizes):
        axes.margins(y=0.15)
        axes.set(xlabel="layers", xlim=(0, None), ylim=(0, None), xticks=layers)
        axes.legend(frameon=False, fontsize=9)
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=130)
    print(f"written: {picture}")


VOCAB_SIZE, NUM_SLOTS = 256, 2


class Loop:
    """A training loop of one depth on random tokens."""

    def __init__(self, options: argparse.Namespace, n_layer: int) -> None:
        torch.manual_seed(0)
        sizes = {"n_layer": n_layer, "n_head": options.n_head, "n_embd": options.n_embd}
        with torch.device("meta"):
            model = GPT(vocab_size=VOCAB_SIZE, block_size=options.context, tied=False, **sizes)
        self.model = streamer.wrap(
            model,
            layers="transformer.h",
            init=model.init_weights,  # drawn on the device, where a large model is made in no time
            device=options.device,
            dtype=getattr(torch, options.dtype),
            num_slots=NUM_SLOTS,
            host_threads=options.host_threads,
        )
        self.device = next(self.model.parameters()).device
        # a rate so small that hundreds of steps on the same tokens leave the gradients what they are
        self.optimizer = streamer.AdamW(self.model.parameters(), lr=1e-6)
        shape = (2, options.batch_size, options.context)
        self.tokens, self.targets = torch.randint(VOCAB_SIZE, shape).to(self.device)

    def step(self) -> None:
        logits = self.model(self.tokens)
        F.cross_entropy(logits.flatten(0, 1).float(), self.targets.flatten()).backward()
        streamer.clip_grad_norm_(self.model, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def block(self, steps: int) -> Block:
        """One step without the clock, ``steps`` with it."""
        streamer.synchronize(self.model)
        others = self._begin_peak()
        self.step()
        ends = [time.perf_counter()]
        for _ in range(steps):
            self.step()
            ends.append(time.perf_counter())
        streamer.synchronize(self.model)
        stats = streamer.stats(self.model)
        return Block(
            seconds=statistics.median(end - begin for begin, end in itertools.pairwise(ends)),
            owned=dict(stats.device_bytes),
            peak=stats.device_bytes_peak - others,
        )

    def _begin_peak(self) -> int:
        """Begin a new peak; bytes on the device that are not the model's own, nor made by its steps."""
        if self.device.type != "cuda":
            return 0  # counted by each model for itself
        torch.cuda.reset_peak_memory_stats(self.device)
        return torch.cuda.memory_allocated(self.device) - sum(
            streamer.stats(self.model).device_bytes.values()
        )

    def close(self) -> None:
        """End the lanes and free the memory; the weights are discarded."""
        wrapped(self.model).close()


def measure(options: argparse.Namespace) -> dict[int, list[Block]]:
    """By depth, a block of every round."""
    order = random.Random(0)
    found: dict[int, list[Block]] = {n_layer: [] for n_layer in options.layers}
    loops: dict[int, Loop] = {}
    try:
        for n_layer in () if options.one_at_a_time else options.layers:
            loops[n_layer] = Loop(options, n_layer)
            # the lanes of one model must be idle when the next is made: both run parallel kernels
            loops[n_layer].block(1)
        for number in range(options.rounds):
            for n_layer in order.sample(options.layers, len(options.layers)):
                block = loops[n_layer].block if loops else partial(block_of_new_loop, options, n_layer)
                found[n_layer].append(block(options.steps))
            took = ", ".join(f"{n_layer} {blocks[-1].seconds:.4g}" for n_layer, blocks in found.items())
            print(f"round {number + 1}, seconds per step by layers: {took}", flush=True)
    except KeyboardInterrupt:  # of a time limit: the rounds that are complete stand
        complete = min(map(len, found.values()))
        if complete < 2:
            raise
        print(f"interrupted in round {complete + 1}", flush=True)
        return {n_layer: blocks[:complete] for n_layer, blocks in found.items()}
    finally:
        for loop in loops.values():
            loop.close()
    return found


def block_of_new_loop(options: argparse.Namespace, n_layer: int, steps: int) -> Block:
    gc.collect()  # the last model is full of circles
    loop = Loop(options, n_layer)
    try:
        loop.block(1)
        return loop.block(steps)
    finally:
        loop.close()


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--layers", type=int, nargs="+", default=[4, 8, 16, 32, 64], help="two or more depths"
    )
    parser.add_argument("--n-embd", type=int, default=256)
    parser.add_argument("--n-head", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--dtype", default="float32", help="of the weights (float32)")
    parser.add_argument("--device", help="cpu or cuda (CUDA where there is one)")
    parser.add_argument("--compute-threads", type=int, help="of PyTorch (its own choice)")
    parser.add_argument("--host-threads", type=int, help="of the update (that of streamer.wrap)")
    parser.add_argument("--rounds", type=int, default=10, help="two or more (10)")
    parser.add_argument("--steps", type=int, default=3, help="timed steps of a block (3)")
    parser.add_argument("--one-at-a-time", action="store_true", help="where all depths do not fit together")
    parser.add_argument("--json", type=Path, default=RESULTS / "depth.json")
    parser.add_argument("--png", type=Path, default=RESULTS / "depth.png")
    add_option(parser)
    options = parser.parse_args(arguments)
    if len(set(options.layers)) != len(options.layers) or len(options.layers) < 2 or options.rounds < 2:
        parser.error("--layers must be two or more different depths, and --rounds 2 or more")
    options.device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    return options


def report_table(report: Report) -> list[str]:
    line = report["step_seconds_over_layers"]
    rows = [
        [
            str(row["n_layer"]),
            spread(row["seconds_per_step"], ".1f", 1e3),
            f"{row['owned_bytes_total'] / 1e6:.2f}",
            f"{row['peak_bytes'] / 1e6:.2f}",
        ]
        for row in report["depths"]
    ]
    equal = "the same at every depth" if report["owned_bytes_are_equal"] else "NOT the same at every depth"
    return [
        f"{line['intercept'] * 1e3:.1f} ms and {line['slope'] * 1e3:.2f} ms per layer, R² "
        f"{number(line['r_squared'], '.4f')}; owned device bytes are {equal}.",
        "",
        *table(["layers", "step, ms", "owned, MB", "peak with saved inputs, MB"], rows),
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    if options.no_values:
        go_on_without_values()
    load_before = load_average()
    if options.compute_threads is not None:
        torch.set_num_threads(options.compute_threads)
    try:
        blocks = measure(options)
    except MemoryError as error:
        raise SystemExit(f"{error}; --one-at-a-time holds one depth at a time") from None
    found = summary(blocks)
    settings = {name: value for name, value in vars(options).items() if name not in ("json", "png")}
    report = {
        **provenance("bench/depth.py", load_before=load_before, device=options.device),
        "rounds": len(blocks[options.layers[0]]),
        "settings": settings | {"num_slots": NUM_SLOTS, "vocab_size": VOCAB_SIZE},
        **found,
    }
    what = f"width {options.n_embd} in {options.dtype}, {options.batch_size} x {options.context} tokens"
    what += f", {NUM_SLOTS} slots on {options.device}"
    print(f"{what}; load before {load_before:.1f}")
    print("\n".join(report_table(report)))
    write_json(options.json, report)
    draw(found, options.png, title=what)


if __name__ == "__main__":
    main()
