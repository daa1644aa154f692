"""How fast is streamer beside the other ways to train the same model, and what does each hold?

    python -m bench.versus --device cpu    # half a minute, no GPU: checks that all of it works
    python -m bench.versus --device cuda --n-layer 48 --n-head 25 --n-embd 1600 --vocab-size 50257 \\
        --context 1024 --batch-size 32 --lr 1e-4 --groups streamer-2,streamer-48,fsdp2 torchao-fp32,deepspeed

*plain-bf16* is PyTorch with everything on the device in bf16: the fastest, whose rounded weights lose small
updates. *plain-fp32* holds fp32 weights under bf16 autocast, masters as exact as streamer's; with
``--dtype float32`` there is only this one. *streamer-K* has K slots: 2, and ``--slots`` or as many as there
are layers. *torchao-...* has moments and update on the host, in either precision. *fsdp2* and *deepspeed*
(ZeRO-3) have weights, moments and update there. All start from the same weights, take the same batches in
the same order, recompute each layer in backward and clip to norm 1, but for torchao, which cannot. Who is not
installed, cannot run here or fails is named with the reason; the others go on.

Each round runs a block of steps of each, in an order drawn anew. A block takes one step that is not timed,
then those that are; the clock starts and stops with the device idle. Queued host updates are counted as many
in as out: streamer's clock starts with an update just queued and stops with another just queued, so as many
are worked off while it runs as steps are taken. Nothing of a contender runs on into another's block. The
first block of each, which compiles and warms up, is not counted. Ratios are taken within a round.

Device bytes are those of PyTorch's allocator: *at rest* is what building and the first block leave behind,
*step* the most that a block takes above what it found, *peak* their sum; on the CPU only streamer tells its
own. Host bytes: *resident* is what building and the first block add to the process's resident set (inexact,
for libraries are loaded meanwhile and freed memory is used again; without a GPU the "device" is in it too),
*pinned* what they add to PyTorch's own pinned memory, *counted* what streamer holds, exactly.

Losses are of a batch that is not trained on. A contender whose losses are not those of the plain one with its
precision is refused, and the exit code is 1: `verdict` tells how far apart they may be. Contenders that do
not fit into memory side by side are put into ``--groups``, run one after the other, each beside the plain;
``--only`` names one group. ``--seconds`` ends the rounds of each group early. The JSON is written anew after
each group.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bench.common import RESULTS, load_average, provenance, write_json
from bench.no_values import add_option, go_on_without_values
from bench.versus_contenders import PLAIN, contenders
from bench.versus_measure import Builders, measure
from bench.versus_report import print_table, row
from bench.versus_task import Task


def run_group(builders: Builders, task: Task, options: argparse.Namespace) -> dict[str, Any]:
    """A row for each contender, in their order."""
    results, left_out = measure(
        builders, task, rounds=options.rounds, steps=options.steps, seconds=options.seconds
    )
    return {
        name: {"skipped": left_out[name]}
        if name in left_out
        else row(results[name], results, dtype=options.dtype, tokens_per_step=task.tokens_per_step)
        for name in builders
    }


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--device", choices=("cpu", "cuda"), help="CUDA where there is one")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), help="bfloat16 on CUDA, float32 on the CPU"
    )
    parser.add_argument("--n-layer", type=int, default=4)
    parser.add_argument("--n-head", type=int, default=4)
    parser.add_argument("--n-embd", type=int, default=128)
    parser.add_argument("--vocab-size", type=int, default=512)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--rounds", type=int, default=10, help="two or more (10)")
    parser.add_argument("--steps", type=int, default=3, help="timed steps of a block (3)")
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="after which a group begins no more rounds"
    )
    parser.add_argument("--slots", type=int, help="of the second streamer (as many as there are layers)")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="these, beside the plain ones")
    parser.add_argument("--groups", nargs="+", default=[], metavar="NAME,NAME", help="side by side; all")
    parser.add_argument("--json", type=Path, default=RESULTS / "versus.json")
    add_option(parser)
    options = parser.parse_args(arguments)
    if options.rounds < 2 or options.steps < 1:
        parser.error("quartiles need two --rounds, a block one of --steps")
    if options.only and options.groups:
        parser.error("--groups names its contenders, and takes no --only")
    options.device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    options.dtype = options.dtype or ("bfloat16" if options.device == "cuda" else "float32")
    options.slots = min(options.slots or options.n_layer, options.n_layer)
    return options


def chosen(options: argparse.Namespace, names: Sequence[str]) -> list[list[str]]:
    """The names of each group, the plain ones in all of them; ends the program at a name that is none."""
    asked = [group.split(",") for group in options.groups] or [options.only or list(names)]
    for name in (name for group in asked for name in group):
        if name not in names:
            sys.exit(f"there is no contender '{name}' here: choose among {', '.join(names)}")
    return [[name for name in names if name in PLAIN or name in group] for group in asked]


def start_cuda(device: torch.device) -> None:
    """Let CUDA and cuBLAS take what they need, forward and backward, before anybody is charged with it."""
    layer = torch.nn.Linear(64, 64, device=device)
    layer(torch.ones(64, 64, device=device)).sum().backward()
    torch.cuda.synchronize(device)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if options.no_values:
        go_on_without_values()
    load_before = load_average()
    device = torch.device(options.device)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
        start_cuda(device)
    sizes = {name: getattr(options, name) for name in ("n_layer", "n_head", "n_embd", "vocab_size")}
    with contextlib.ExitStack() as exits:
        task = Task(
            device=device,
            dtype=getattr(torch, options.dtype),
            sizes=sizes | {"block_size": options.context},
            batch_size=options.batch_size,
            lr=options.lr,
            exits=exits,
        )
        builders = contenders(task, num_slots=options.slots)
        groups = []
        for names in chosen(options, list(builders)):
            side_by_side = {name: builders[name] for name in names}
            groups.append(run_group(side_by_side, task, options))
            print_table(groups[-1])
            # after each group, for what comes may not end well
            report = {
                **provenance("bench/versus.py", load_before=load_before, device=device),
                "parameters": task.num_parameters,
                "tokens_per_step": task.tokens_per_step,
                "threads_of_pytorch": torch.get_num_threads(),
                "settings": {name: value for name, value in vars(options).items() if name != "json"},
                "groups": groups,
            }
            write_json(options.json, report)
    refused = any(row.get("refused") for group in groups for row in group.values())
    # without values there are no losses that could be compared
    return int(refused and not options.no_values)


if __name__ == "__main__":
    sys.exit(main())
