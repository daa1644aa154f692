"""Does a training step take as long as it did before a change?

    git worktree add /tmp/before COMMIT
    python -m bench.two_checkouts --before /tmp/before      # three minutes on two cores, no GPU

Two processes train the same models in the same loop, one with this checkout and one with the other. They take
turns, a block of steps each, in an order drawn anew for each round, so that whatever else the machine does
meets both; the one whose turn it is not stands still. `ratio` is seconds per step now over seconds per step
before, of the blocks of one round: below 1 is faster. `hidden` is how much of the update ran under the next
forward, by the trace: 1 - exposed / busy of the host lane.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

# a worker imports the library of either checkout, and nothing else of this one
WORKER = """
import json, sys, time, torch, streamer
import torch.nn.functional as F
from models.gpt2 import GPT

torch.set_num_threads(1)
sizes, batch, own_clip = json.loads(sys.argv[1])
torch.manual_seed(0)
model = GPT(vocab_size=256, block_size=batch[1], tied=False, **sizes)
streamer.wrap(model, layers="transformer.h", device="cpu", host_threads=1)
optimizer = streamer.AdamW(model.parameters(), lr=1e-6)
tokens, targets = torch.randint(256, (2, *batch))
clip = streamer.clip_grad_norm_ if own_clip else None

def step():
    loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
    loss.backward()
    if clip:
        clip(model, 1.0)
    else:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()

for line in sys.stdin:
    step()
    streamer.synchronize(model)
    before, seconds = streamer.stats(model), []
    for _ in range(int(line)):
        began = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - began)
    streamer.synchronize(model)
    after = streamer.stats(model)
    busy = after.busy_seconds["host"] - before.busy_seconds["host"]
    exposed = after.exposed_seconds["host"] - before.exposed_seconds["host"]
    print(json.dumps({"seconds": seconds, "hidden": 1 - exposed / busy}), flush=True)
streamer.unwrap(model)
"""

#: By name: the model's sizes, its batch, whether the library's own clipping is called, steps of a block.
TASKS: dict[str, tuple[dict[str, int], tuple[int, int], bool, int]] = {
    "tiny layers": ({"n_layer": 12, "n_head": 2, "n_embd": 32}, (2, 16), True, 20),
    "tiny layers, PyTorch's clipping": ({"n_layer": 12, "n_head": 2, "n_embd": 32}, (2, 16), False, 20),
    "small layers": ({"n_layer": 8, "n_head": 6, "n_embd": 384}, (2, 64), True, 4),
}


class Worker:
    """A process that trains with one checkout when it is told to."""

    def __init__(self, checkout: Path, task: tuple[Any, ...]) -> None:
        environment = os.environ | {"PYTHONPATH": str(checkout)}
        self._process = subprocess.Popen(
            [sys.executable, "-c", WORKER, json.dumps(task[:3])],
            cwd=checkout,
            env=environment,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def block(self, steps: int) -> dict[str, Any]:
        """What it has measured in ``steps`` steps."""
        assert self._process.stdin is not None and self._process.stdout is not None
        print(steps, file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the worker has ended with exit code {self._process.wait()}")
        found: dict[str, Any] = json.loads(line)
        return found

    def close(self) -> None:
        """Let it end."""
        self._process.communicate()


def revision(checkout: Path) -> str:
    """The commit of a checkout."""
    command = ["git", "-C", str(checkout), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def measure(checkouts: dict[str, Path], task: tuple[Any, ...], rounds: int) -> dict[str, Any]:
    """Quartiles over rounds for one task."""
    from bench.common import quartiles

    workers = {name: Worker(checkout, task) for name, checkout in checkouts.items()}
    order = random.Random(0)
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in workers}
    for _ in range(rounds + 1):
        for name in order.sample(list(workers), len(workers)):
            found[name].append(workers[name].block(task[3]))
    for worker in workers.values():
        worker.close()
    # the first round compiles and warms up
    kept = {name: blocks[1:] for name, blocks in found.items()}
    medians = {
        name: [statistics.median(block["seconds"]) for block in blocks] for name, blocks in kept.items()
    }
    ratios = [now / before for now, before in zip(medians["now"], medians["before"], strict=True)]
    return {
        "seconds_per_step": {name: quartiles(values) for name, values in medians.items()},
        "ratio": quartiles(ratios),
        "hidden": {name: quartiles(block["hidden"] for block in blocks) for name, blocks in kept.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--before", type=Path, required=True, help="another checkout of this project")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--json", type=Path, help="bench/results/two_checkouts.json")
    options = parser.parse_args()

    from bench.common import RESULTS, load_average, provenance, write_json

    load_before, now = load_average(), Path(__file__).parent.parent
    checkouts = {"now": now, "before": options.before.resolve()}
    tasks = {name: measure(checkouts, task, options.rounds) for name, task in TASKS.items()}
    for name, row in tasks.items():
        spread = {side: row["seconds_per_step"][side]["median"] * 1e3 for side in checkouts}
        ratio = row["ratio"]
        print(
            f"{name}: {spread['now']:.2f} ms a step, {spread['before']:.2f} before; "
            f"ratio {ratio['median']:.3f} "
            f"({ratio['lower_quartile']:.3f} to {ratio['upper_quartile']:.3f}); update hidden "
            f"{row['hidden']['now']['median']:.2f}, {row['hidden']['before']['median']:.2f} before"
        )
    report = provenance("bench/two_checkouts.py", load_before=load_before) | {
        "commits": {name: revision(checkout) for name, checkout in checkouts.items()},
        "rounds": options.rounds,
        "tasks": tasks,
    }
    write_json(options.json or RESULTS / "two_checkouts.json", report)


if __name__ == "__main__":
    main()
