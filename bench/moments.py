"""Does keeping Adam's moments in fewer bits change where training ends?

    python -m bench.moments    # some 25 minutes on two cores

Trains a small GPT on the bytes of the Python standard library, as `streamer train` does, in bf16 weights
with exact masters, once for each variant and seed. A seed is the same initial weights and the same data in
the same order, so that only the moments differ; fp32's spread over seeds is the yardstick.

    fp32           both moments in fp32
    bf16, int8     streamer.AdamW(state_dtype=...): stochastic rounding; in 8 bits the second is a float

beta2 is 0.999, where rounding has most to lose: a second moment falls by at most a thousandth in a step.

Losses are in nats per byte on fixed validation crops. Differences to fp32 are taken seed by seed, and their
mean is shown over what fp32's own seeds differ by: below 1, seeds matter more than how moments are kept.
Needs matplotlib (the extra [plot]).
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import statistics
import time
import warnings
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import streamer
from bench.common import RESULTS, load_average, mean_and_std, provenance, write_json
from bench.markdown import Report, table
from models.gpt2 import GPT
from streamer.cli.config import Config, ModelConfig, TrainConfig
from streamer.cli.loop import Text, load_text

VOCAB_SIZE, CONTEXT, BATCH_SIZE = 256, 64, 16
MODEL = {"n_layer": 4, "n_head": 4, "n_embd": 96}
OPTIMIZER = {"lr": 4e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
WARMUP, MAX_NORM = 0.1, 1.0  # the part of the steps in which the rate rises; clipping
EVALUATIONS, VAL_CROPS, VAL_BATCH_SIZE = 12, 1024, 64


#: Arguments of AdamW.
VARIANTS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"state_dtype": torch.bfloat16},
    "int8": {"state_dtype": "int8"},
}


@dataclass(frozen=True)
class Run:
    """The results of one training; ``losses`` are on validation text, by step."""

    variant: str
    seed: int
    losses: dict[int, float]
    skipped_steps: int
    seconds: float

    @property
    def final(self) -> float:
        return list(self.losses.values())[-1]


def schedule(step: int, steps: int) -> float:
    """The learning rate as a factor: a linear rise, then a cosine to 0 at ``steps``."""
    warmup = max(1, round(WARMUP * steps))
    if step < warmup:
        return (step + 1) / warmup
    return (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup))) / 2


def text() -> Text:
    """The bytes of the Python standard library's sources."""
    return load_text(Config(ModelConfig(factory="models.gpt2:GPT"), train=TrainConfig(max_length=CONTEXT)))


def loss_of(model: GPT, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1).float(), targets.flatten())


def train(variant: str, seed: int, steps: int, threads: int) -> Run:
    """Train from the weights and on the crops of ``seed``."""
    began = time.perf_counter()
    torch.set_num_threads(threads)
    warnings.filterwarnings("ignore", "(a|the) gradient .*is NaN or infinite")  # counted in skipped_steps
    data = text()
    val_batches = data.validation(VAL_CROPS // VAL_BATCH_SIZE, VAL_BATCH_SIZE, CONTEXT)
    crops = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = streamer.wrap(
        GPT(vocab_size=VOCAB_SIZE, block_size=CONTEXT, tied=False, **MODEL),
        layers="transformer.h",
        device="cpu",
        dtype=torch.bfloat16,
        activations="keep",
        host_threads=threads,
    )
    optimizer = streamer.AdamW(model.parameters(), **OPTIMIZER, **VARIANTS[variant])
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: schedule(step, steps))
    losses: dict[int, float] = {}
    evaluate_every = math.ceil(steps / EVALUATIONS)
    # PyTorch's fused bf16 attention spends half of a step in its backward on a CPU
    with sdpa_kernel(SDPBackend.MATH):
        for step in range(1, steps + 1):
            loss_of(model, *data.drawn(BATCH_SIZE, CONTEXT, crops)[:2]).backward()
            streamer.clip_grad_norm_(model, MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
            rates.step()
            if step % evaluate_every == 0 or step == steps:
                with torch.no_grad():
                    losses[step] = statistics.fmean(
                        loss_of(model, *batch[:2]).item() for batch in val_batches
                    )
    return Run(variant, seed, losses, streamer.stats(model).skipped_steps, time.perf_counter() - began)


def summary(runs: Sequence[Run]) -> dict[str, dict[str, Any]]:
    """By variant: its final losses over seeds, their spread, and the difference to fp32 of the same seeds."""
    finals: dict[str, dict[int, float]] = {}
    for run in runs:
        finals.setdefault(run.variant, {})[run.seed] = run.final
    rows: dict[str, dict[str, Any]] = {}
    for variant, by_seed in finals.items():
        losses = list(by_seed.values())
        rows[variant] = {"final": by_seed, "max_minus_min": max(losses) - min(losses), **mean_and_std(losses)}
        if (fp32 := finals.get("fp32")) is not None:
            rows[variant]["minus_fp32"] = mean_and_std([by_seed[seed] - fp32[seed] for seed in by_seed])
            spread = max(fp32.values()) - min(fp32.values())
            difference = abs(rows[variant]["minus_fp32"]["mean"])
            rows[variant]["over_spread"] = difference / spread if spread else math.nan
    return rows


def draw(runs: Sequence[Run], picture: Path, *, limit: float) -> None:
    """Losses by step, and where each seed ended; those above ``limit`` are beyond the axes, as numbers."""
    from matplotlib.figure import Figure

    variants = list(dict.fromkeys(run.variant for run in runs))
    figure = Figure(figsize=(11, 3.4), layout="constrained")
    curves, ends = figure.subplots(1, 2)
    shown = [loss for run in runs for loss in run.losses.values() if loss <= limit] or [limit]
    for number, variant in enumerate(variants):
        own = [run for run in runs if run.variant == variant]
        means = {step: statistics.fmean(run.losses[step] for run in own) for step in own[0].losses}
        curves.plot(means.keys(), means.values(), ".-", color=f"C{number}", label=variant, linewidth=1)
        inside = [run.final for run in own if run.final <= limit]
        ends.plot(inside, [number] * len(inside), "o", color=f"C{number}", alpha=0.7)
        if outside := [f"{run.final:.3g}" for run in own if not run.final <= limit]:
            far, at_edge = f"{', '.join(outside)} \N{RIGHTWARDS ARROW}", ends.get_yaxis_transform()
            ends.text(0.98, number, far, transform=at_edge, ha="right", va="center")
    if fp32 := [run.final for run in runs if run.variant == "fp32"]:
        ends.axvspan(min(fp32), max(fp32), color="0.9", zorder=0)
    curves.set(xlabel="step", ylabel="validation loss, nats per byte", title="mean over seeds")
    curves.set_ylim(min(shown) * 0.98, max(shown) * 1.02)
    curves.legend(frameon=False)
    ends.set(xlabel="final validation loss", title="a dot per seed; grey: from fp32's best to its worst")
    ends.set_yticks(range(len(variants)), variants)
    ends.set_ylim(len(variants) - 0.5, -0.5)
    figure.savefig(picture, dpi=130)


def report_table(report: Report) -> list[str]:
    rows = [
        [name, f"{row['mean']:.4f}", f"{row['std']:.4f}", f"{row['over_spread']:.2f}"]
        for name, row in report["variants"].items()
    ]
    heads = ["moments", "mean final loss", "standard deviation", "difference over the spread of fp32's seeds"]
    return [f"{report['steps']} steps.", "", *table(heads, rows)]


def readme_figure(report: Report) -> str:
    """The sentence of the project's pages."""
    bf16, int8 = (report["variants"][name]["over_spread"] for name in ("bf16", "int8"))
    return (
        "A small GPT was trained with each kind of moments from three seeds. Mean final validation losses "
        f"differ from fp32's by {bf16:.2f} (bf16) and {int8:.2f} (8 bits, with the lower losses) of the "
        "spread of fp32's own seeds."
    )


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--steps", type=int, default=1400)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="one has no spread (0 1 2)")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="runs at a time, cores shared out")
    parser.add_argument(
        "--json", type=Path, default=RESULTS / "moments.json", help="the picture is next to it"
    )
    options = parser.parse_args()
    load_before, began = load_average(), time.perf_counter()
    threads = max(1, (os.cpu_count() or 1) // options.jobs)
    asked = [(v, seed, options.steps, threads) for seed in options.seeds for v in options.variants]
    runs: list[Run] = []
    with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("spawn")) as pool:
        for run in pool.map(train, *zip(*asked, strict=True)):
            runs.append(run)
            print(f"{run.variant} {run.seed}: {run.final:.4f} in {run.seconds:.0f} s", flush=True)
    rows, alone = summary(runs), text().unigram_loss()
    report = {
        **provenance("bench/moments.py", load_before=load_before),
        "steps": options.steps,
        "tokens_per_step": BATCH_SIZE * CONTEXT,
        "model": MODEL,
        "optimizer": OPTIMIZER,
        "byte_frequencies_alone": alone,
        "seconds": time.perf_counter() - began,
        "threads_per_run": threads,
        "variants": rows,
        "runs": [vars(run) for run in runs],
    }
    print("\n".join(report_table(report)))
    write_json(options.json, report)
    draw(runs, options.json.with_suffix(".png"), limit=alone)


if __name__ == "__main__":
    main()
