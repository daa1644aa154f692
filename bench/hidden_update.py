"""How much of the host update is hidden under the next forward, and what would it cost in the open?

    python -m bench.hidden_update    # a minute and a half on two cores, no GPU
    python -m bench.hidden_update --device cuda --n-layer 24 --n-embd 2048 --batch-size 8 --context 1024 \\
        --dtype bfloat16 --compute-threads 8 --host-threads 8

One model takes steps in three ways: *queued*, the plain loop, whose update runs under the next forward;
*waited*, with `streamer.synchronize` after `optimizer.step`, as with an optimizer that blocks; *none*,
without a step: gradients are dropped. All three compute the norm and clip. Each round runs a block of steps
of each, in a new random order, so that other load on the machine affects all alike.

A block begins with nothing under way, takes one step that is not timed, and then those that are. In *queued*
the clock thus starts with an update just queued and stops with another just queued: as many updates are
worked off while it runs as steps are taken. The last one is left out because the first one is in.

`hidden` is 1 - (queued - none) / (waited - none) of the seconds per step: 1 where the update costs nothing, 0
where it costs what waiting does. It counts against the update all that comes with it: layers and the root
are fetched anew, and two threads share the way to memory. It is given for the medians over rounds of the two
differences, and as quartiles of what single rounds say, which on a busy machine is little: the differences
are a few percent of a step. `overlap` is what the trace says of *queued*, 1 - exposed / busy of the host
lane: it sees compute stand still, not slow down. Busy seconds are a lane's own (compute's are those of the
layers), exposed ones those in which compute stood still for it.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import streamer
from bench.common import RESULTS, load_average, provenance, quartiles, write_json
from bench.markdown import Report, spread, table
from bench.no_values import add_option, go_on_without_values
from models.gpt2 import GPT
from streamer.engine.handle import wrapped

QUEUED, WAITED, NONE = MODES = ("queued", "waited", "none")
VOCAB_SIZE = 256  # bytes, so that nearly all parameters are in layers, as in a large model
Seconds = Mapping[str, float]


@dataclass(frozen=True)
class Block:
    """Seconds per step of one block: the median by the clock, the mean by the lanes."""

    wall: float
    host_busy: float
    compute_busy: float
    exposed: Seconds  # by lane

    @property
    def overlap(self) -> float:
        return 1 - self.exposed["host"] / self.host_busy


class Loop:
    """A training loop on random tokens, a step at a time."""

    def __init__(self, options: argparse.Namespace) -> None:
        torch.manual_seed(0)
        sizes = {"n_layer": options.n_layer, "n_head": options.n_head, "n_embd": options.n_embd}
        with torch.device("meta"):
            model = GPT(vocab_size=VOCAB_SIZE, block_size=options.context, tied=False, **sizes)
        self.num_parameters = sum(parameter.numel() for parameter in model.parameters())
        self.model = streamer.wrap(
            model,
            layers="transformer.h",
            init=model.init_weights,  # drawn on the device, where a large model is made in no time
            device=options.device,
            dtype=getattr(torch, options.dtype),
            host_threads=options.host_threads,
        )
        # a rate so small that 200 steps on the same tokens leave the gradients what they are
        kind = getattr(streamer if hasattr(streamer, options.optimizer) else torch.optim, options.optimizer)
        self.optimizer = kind(self.model.parameters(), lr=1e-6)
        self.tokens, targets = torch.randint(VOCAB_SIZE, (2, options.batch_size, options.context))
        self.targets = targets.flatten().to(next(self.model.parameters()).device)

    def step(self, mode: str) -> None:
        """One step; on its return all of it is done but, in QUEUED, the update."""
        logits = self.model(self.tokens)
        F.cross_entropy(logits.flatten(0, 1).float(), self.targets).backward()
        streamer.clip_grad_norm_(self.model, 1.0)
        if mode != NONE:
            self.optimizer.step()
        if mode == WAITED:
            streamer.synchronize(self.model)
        self.optimizer.zero_grad()

    def block(self, mode: str, steps: int) -> Block:
        """One step without the clock, ``steps`` with it."""
        streamer.synchronize(self.model)
        idle = streamer.stats(self.model)
        self.step(mode)
        before = streamer.stats(self.model)
        ends = [time.perf_counter()]
        for _ in range(steps):
            self.step(mode)
            ends.append(time.perf_counter())
        after = streamer.stats(self.model)
        streamer.synchronize(self.model)
        done = streamer.stats(self.model)
        return Block(
            wall=statistics.median(end - begin for begin, end in itertools.pairwise(ends)),
            # an update is in the totals once it is done: all of the block's, over all of its steps
            host_busy=(done.busy_seconds["host"] - idle.busy_seconds["host"]) / (steps + 1),
            compute_busy=(after.busy_seconds["compute"] - before.busy_seconds["compute"]) / steps,
            exposed={
                lane: (after.exposed_seconds[lane] - before.exposed_seconds[lane]) / steps
                for lane in after.exposed_seconds
            },
        )

    def forward_seconds(self, steps: int) -> float:
        """Seconds of the median forward without gradients, without an update."""
        seconds = []
        with torch.no_grad():
            for _ in range(steps):
                streamer.synchronize(self.model)
                began = time.perf_counter()
                self.model(self.tokens).sum().item()
                seconds.append(time.perf_counter() - began)
        return quartiles(seconds)["median"]


def measure(loop: Loop, *, rounds: int, steps: int) -> list[dict[str, Block]]:
    """By round, a block of each mode; a first round, which compiles and warms up, is not kept."""
    order = random.Random(0)
    found: list[dict[str, Block]] = []
    try:
        for number in range(rounds + 1):
            found.append({mode: loop.block(mode, steps) for mode in order.sample(MODES, len(MODES))})
            took = ", ".join(f"{mode} {found[-1][mode].wall:.4g}" for mode in MODES)
            print(f"round {number}, seconds per step: {took}", flush=True)
    except KeyboardInterrupt:  # of a time limit: the rounds that are complete stand
        if len(found) < 3:
            raise
        print(f"interrupted in round {len(found)}", flush=True)
    return found[1:]


def summary(rounds: list[dict[str, Block]]) -> dict[str, Any]:
    """Quartiles over rounds of all that is measured."""
    modes = {
        mode: {
            "seconds_per_step": quartiles(blocks[mode].wall for blocks in rounds),
            "compute_busy_seconds": quartiles(blocks[mode].compute_busy for blocks in rounds),
            "host_busy_seconds": quartiles(blocks[mode].host_busy for blocks in rounds),
            "exposed_seconds": {
                lane: quartiles(blocks[mode].exposed[lane] for blocks in rounds)
                for lane in rounds[0][mode].exposed
            },
        }
        for mode in MODES
    }
    costs = {mode: [blocks[mode].wall - blocks[NONE].wall for blocks in rounds] for mode in (QUEUED, WAITED)}
    hidden = [1 - queued / waited for queued, waited in zip(costs[QUEUED], costs[WAITED], strict=True)]
    return {
        "modes": modes,
        "minus_none_seconds": {mode: quartiles(values) for mode, values in costs.items()},
        "hidden": 1 - statistics.median(costs[QUEUED]) / statistics.median(costs[WAITED]),
        "hidden_by_rounds": quartiles(hidden),
        "overlap": quartiles(blocks[QUEUED].overlap for blocks in rounds),
    }


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", help="cpu or cuda (CUDA where there is one)")
    parser.add_argument("--dtype", default="float32", help="of the weights (float32)")
    parser.add_argument("--n-layer", type=int, default=12)
    parser.add_argument("--n-head", type=int, default=6)
    parser.add_argument("--n-embd", type=int, default=384)
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--context", type=int, default=64, help="so that a forward outlasts an update (64)")
    parser.add_argument("--compute-threads", type=int, default=1, help="of PyTorch (1)")
    parser.add_argument("--host-threads", type=int, default=1, help="of the update (1)")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=4, help="timed steps of a block (4)")
    parser.add_argument("--optimizer", default="AdamW", help="of streamer, or of torch.optim (AdamW)")
    parser.add_argument("--json", type=Path, default=RESULTS / "hidden_update.json")
    add_option(parser)
    return parser.parse_args(arguments)


def report_table(report: Report) -> list[str]:
    rows = [
        [
            mode,
            spread(row["seconds_per_step"], ".1f", 1e3),
            spread(row["host_busy_seconds"], ".1f", 1e3),
            spread(row["exposed_seconds"]["host"], ".1f", 1e3),
        ]
        for mode, row in report["modes"].items()
    ]
    optimizer = report["settings"].get("optimizer", "AdamW")
    return [
        f"{optimizer}, {report['parameters']:,} parameters; {report['hidden']:.0%} of what waiting costs was "
        f"saved (round by round {spread(report['hidden_by_rounds'], '.0%')}).",
        "",
        *table(["updates", "step, ms", "update busy, ms", "compute waits for it, ms"], rows),
    ]


def readme_figure(report: Report) -> str:
    """The sentence of the project's pages."""
    queued = report["modes"]["queued"]
    waits = queued["exposed_seconds"]["host"]["median"] / queued["host_busy_seconds"]["median"]
    return (
        f"Compute waits for {waits:.0%} of the update's time. The update shares memory and cores with "
        f"compute: {report['hidden']:.0%} of the cost of waiting is saved."
    )


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    if options.no_values:
        go_on_without_values()
    load_before = load_average()
    torch.set_num_threads(options.compute_threads)
    loop = Loop(options)
    device = next(loop.model.parameters()).device
    try:
        rounds = measure(loop, rounds=options.rounds, steps=options.steps)
        # no more of a model that was interrupted in the middle of a step
        is_whole = len(rounds) == options.rounds
        forward = loop.forward_seconds(options.steps * 3) if is_whole else math.nan
    finally:
        wrapped(loop.model).close()
    found = summary(rounds)
    settings = {
        name: value for name, value in vars(options).items() if name not in ("json", "rounds", "steps")
    }
    report = {
        **provenance("bench/hidden_update.py", load_before=load_before, device=device),
        "rounds": len(rounds),
        "steps_per_block": options.steps,
        "parameters": loop.num_parameters,
        "settings": settings | {"device": str(device)},
        "forward_seconds": forward,
        **found,
    }
    what = f"{loop.num_parameters:,} parameters in {options.dtype}"
    print(
        f"{what}, {options.batch_size} x {options.context} tokens on {device}; load before {load_before:.1f}"
    )
    print(f"a forward without an update takes {forward * 1e3:.1f} ms")
    print("\n".join(report_table(report)))
    write_json(options.json, report)


if __name__ == "__main__":
    main()
