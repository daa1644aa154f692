"""Part *plain* of `bench.tokens_per_transfer`: streamed training beside plain PyTorch on this machine."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from bench.tokens_variants import Streamed, Variant, plain_bytes
from bench.versus_contenders import PLAIN_FP32, Plain
from bench.versus_measure import measure
from bench.versus_report import print_table, row
from bench.versus_task import Task

STREAMED = "streamed"

#: By tokens a step: rounds, the timed steps of a block, and those before them; the share of the time.
#: A step of 16k tokens takes so long that one before it would take all the time there is.
PLANS = {16384: (5, 1, 0, 0.6), 2048: (10, 1, 1, 0.2), 256: (30, 3, 1, 0.2)}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, nargs="+", choices=PLANS, default=list(PLANS), help="(all)")
    parser.add_argument("--n-layer", type=int, default=8)
    parser.add_argument("--n-head", type=int, default=8)
    parser.add_argument("--n-embd", type=int, default=512)
    parser.add_argument("--vocab-size", type=int, default=256)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--rounds", type=int, help="two or more (30, 10 and 5)")
    parser.add_argument("--seconds", type=float, default=500.0, help="after which no rounds begin (500)")


def run(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A group of two rows for each number of tokens; what there is so far after each of them."""
    groups = []
    sizes = {name: getattr(options, name) for name in ("n_layer", "n_head", "n_embd", "vocab_size")}
    for tokens in options.tokens:
        rounds, steps, untimed, share = PLANS[tokens]
        with contextlib.ExitStack() as exits:
            task = Task(
                torch.device("cpu"),
                torch.float32,
                sizes | {"block_size": options.context},
                batch_size=max(1, tokens // options.context),
                lr=options.lr,
                exits=exits,
            )
            results, left_out = measure(
                {PLAIN_FP32: partial(Plain, task, exact=True), STREAMED: partial(Streamed, task, Variant())},
                task,
                rounds=options.rounds or rounds,
                steps=steps,
                untimed=untimed,
                seconds=share * options.seconds,
            )
        if left_out:
            raise SystemExit(f"left out: {left_out}")
        rows = {
            name: row(result, results, dtype="float32", tokens_per_step=task.tokens_per_step)
            for name, result in results.items()
        }
        print_table(rows)
        groups.append(
            {
                "tokens_per_step": task.tokens_per_step,
                "plain_bytes": plain_bytes(
                    parameters=task.num_parameters,
                    tokens=task.tokens_per_step,
                    n_layer=options.n_layer,
                    n_embd=options.n_embd,
                ),
                "contenders": rows,
            }
        )
        yield {"parameters": task.num_parameters, "groups": groups}
