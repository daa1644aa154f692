"""How many tokens does a weight meet while it is on the device, and what does that make of tokens per second?

    python -m bench.tokens_per_transfer plain       # beside plain PyTorch; ten minutes on two cores
    python -m bench.tokens_per_transfer bus         # a bus of 0.2 and 1 GB/s; eight minutes on two cores
    python -m bench.tokens_per_transfer machines    # 10 billion parameters on paper; minutes, no GPU
    python -m bench.tokens_per_transfer bus --device cuda --n-layer 3 --n-head 32 --n-embd 4096 \\
        --vocab-size 50257 --context 1024 --batch-sizes 4 16 --lr 1e-4 --rounds 3 --steps 1

Weights cross the bus twice a step, once for forward and once for backward, and gradients once. The more
tokens are in a step, the more arithmetic there is to hide that under; the device's memory limits them.

*plain* trains a GPT of 25 million parameters in fp32 with 16k, 2k and 256 tokens a step, streamed and as
plain PyTorch does with its layers checkpointed and its AdamW fused: what streaming costs where nothing is
gained, copies, threads and Python.

*bus* measures each of `bench.tokens_variants` alone, and what saves memory together, for several batches. On
the CPU the copies of the thread backend are slowed to a set bandwidth, and *as fast as memory* is the same
without that: the ceiling. Gradient accumulation, whose weights cross the bus twice for each part of a batch,
is the usual way to a large batch in little memory; micro-batches inside of the layers are ours.

Both take blocks of steps in turn, in an order drawn anew in each round, with the timer, the batches and the
verdict on losses of `bench.versus`, which says how bytes are counted.

*machines* runs the executor without data on the rates of `streamer.planner.machine`, for a config of ten
billion parameters: see `bench.tokens_machines`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import tokens_bus, tokens_machines, tokens_plain
from bench.common import RESULTS, load_average, provenance, write_json
from bench.no_values import add_option, go_on_without_values
from bench.tokens_report import draw

PARTS = {"plain": tokens_plain, "bus": tokens_bus, "machines": tokens_machines}


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parts = parser.add_subparsers(dest="part", required=True)
    for name, module in PARTS.items():
        part = parts.add_parser(name, help=module.__doc__)
        module.add_options(part)
        part.add_argument("--json", type=Path, default=RESULTS / f"tokens_{name}.json")
        part.add_argument("--png", type=Path, help="(that of the JSON)")
        add_option(part)
    options = parser.parse_args(arguments)
    if getattr(options, "rounds", None) is not None and options.rounds < 2:
        parser.error("quartiles need two --rounds")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    if options.no_values:
        go_on_without_values()
    load_before = load_average()
    settings = {
        name: value.name if isinstance(value, Path) else value
        for name, value in vars(options).items()
        if name not in ("json", "png", "part")
    }
    report: dict[str, Any] = {}
    for found in PARTS[options.part].run(options):
        report = {
            **provenance(
                "bench/tokens_per_transfer.py",
                load_before=load_before,
                device=getattr(options, "device", "cpu"),
            ),
            "part": options.part,
            "settings": settings,
            **found,
        }
        # each time, for what comes may not end well
        write_json(options.json, report)
    draw(report, options.png or options.json.with_suffix(".png"))


if __name__ == "__main__":
    sys.exit(main())
