"""Part *bus* of `bench.tokens_per_transfer`: each way to stream, on a bus of a set bandwidth or on a GPU."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch

from bench.tokens_variants import Streamed, Variant, variants
from bench.versus import start_cuda
from bench.versus_contenders import PLAIN_BF16, PLAIN_FP32, Contender, Plain
from bench.versus_measure import Builders, measure
from bench.versus_report import print_table, row
from bench.versus_task import Task
from streamer.backends.base import Lane
from streamer.backends.thread import ThreadBackend

#: The whole batch on a bus as fast as memory: what arithmetic and the host leave.
CEILING = "as fast as memory"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="(bfloat16 on CUDA, else float32)")
    parser.add_argument(
        "--gb-per-second", type=float, nargs="+", default=[0.2, 1.0], help="of the bus of the CPU (0.2 1)"
    )
    parser.add_argument("--n-layer", type=int, default=6)
    parser.add_argument("--n-head", type=int, default=6)
    parser.add_argument("--n-embd", type=int, default=384)
    parser.add_argument("--vocab-size", type=int, default=256)
    parser.add_argument("--context", type=int, default=32)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[4, 16, 64], help="(4 16 64)")
    parser.add_argument("--parts", type=int, default=4, help="that a batch is cut into (4)")
    parser.add_argument("--slots", type=int, default=4, help="where there are more than two (4)")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these variants (all)")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--rounds", type=int, default=5, help="two or more (5)")
    parser.add_argument("--steps", type=int, default=2, help="timed steps of a block (2)")
    parser.add_argument("--seconds", type=float, default=420.0, help="all groups together, about (420)")


def bus(gb_per_second: float | None) -> ThreadBackend:
    """Threads, whose copies are as slow each way; as fast as memory for None."""
    if gb_per_second is None:
        return ThreadBackend()
    rate = gb_per_second * 1e9
    return ThreadBackend(bytes_per_second={Lane.H2D: rate, Lane.D2H: rate})


def builders(task: Task, options: argparse.Namespace, gb_per_second: float | None) -> Builders:
    """The plain ones, the ceiling where the bus is slowed, and the variants."""
    found: dict[str, Callable[[], Contender]] = {PLAIN_FP32: partial(Plain, task, exact=True)}
    if not task.is_fp32:
        found[PLAIN_BF16] = partial(Plain, task, exact=False)
    if gb_per_second is not None:
        found[CEILING] = lambda: Streamed(task, Variant(), backend=bus(None))

    def build(variant: Variant) -> Contender:
        return Streamed(task, variant, backend=None if gb_per_second is None else bus(gb_per_second))

    known = variants(slots=options.slots, parts=options.parts)
    if unknown := set(options.only or known) - set(known):
        raise SystemExit(f"there is no {', '.join(sorted(unknown))} here: choose among {', '.join(known)}")
    return found | {name: partial(build, known[name]) for name in options.only or known}


def run(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A group of rows for each bandwidth and batch; what there is so far after each of them."""
    device = torch.device(options.device)
    rates: list[float | None] = [None] if device.type == "cuda" else options.gb_per_second
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
        start_cuda(device)
    dtype = options.dtype or ("bfloat16" if device.type == "cuda" else "float32")
    sizes = {name: getattr(options, name) for name in ("n_layer", "n_head", "n_embd", "vocab_size")}
    groups = []
    for rate in rates:
        for batch_size in options.batch_sizes:
            with contextlib.ExitStack() as exits:
                task = Task(
                    device,
                    getattr(torch, dtype),
                    sizes | {"block_size": options.context},
                    batch_size=batch_size,
                    lr=options.lr,
                    exits=exits,
                )
                results, left_out = measure(
                    builders(task, options, rate),
                    task,
                    rounds=options.rounds,
                    steps=options.steps,
                    seconds=options.seconds * batch_size / sum(options.batch_sizes) / len(rates),
                )
            rows: Mapping[str, dict[str, Any]] = {
                name: row(result, results, dtype=dtype, tokens_per_step=task.tokens_per_step)
                for name, result in results.items()
            } | {name: {"skipped": reason} for name, reason in left_out.items()}
            of_bus = "" if rate is None else f", bus of {rate} GB/s each way"
            print(f"{task.tokens_per_step:,} tokens a step{of_bus}")
            print_table(rows)
            groups.append(
                {
                    "gb_per_second": rate,
                    "tokens_per_step": task.tokens_per_step,
                    "contenders": rows,
                }
            )
            yield {"parameters": task.num_parameters, "groups": groups}
