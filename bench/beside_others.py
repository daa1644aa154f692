"""What does a training step of a tiny model take where other processes use the cores?

    python -m bench.beside_others                      # this checkout
    python -m bench.beside_others --against ../before  # interleaved with another checkout, for comparison

The model is a Llama of four layers, so small that its step is hops from thread to thread with microseconds of
work in each. Threads that spin while they have nothing to do show here: they hold the cores that the next
thread needs. Each round trains the model in a process of its own for each checkout, alone and beside one
process per core that does nothing but use it, in an order drawn anew. PyTorch has one thread, or as many as
it takes by itself: those spin as they do without streamer, so plain PyTorch takes its turns too. Gradients
are clipped by PyTorch's own function, as other people's trainers do. No variable of OpenMP is set.

Written are milliseconds per step, quartiles over all steps of all rounds after the warm-up, and the ratio,
round by round, of the other checkout's median step to this one's. The kernels are in Numba's cache before the
first round.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch

import streamer
from bench.common import RESULTS, load_average, provenance, quartiles, write_json

HOME = Path(__file__).resolve().parents[1]
WARM_UP = 3
ALONE, BESIDE = "alone", "beside others"
#: PyTorch's threads, 0 for its own choice.
TORCH_THREADS = {"1 thread": 1, "default threads": 0}
#: The model as it is, with PyTorch's own optimizer.
PLAIN = "plain PyTorch"
CHILD = """
import json, runpy, sys
steps = runpy.run_path(sys.argv[1])["steps"]
print(json.dumps(steps(*map(int, sys.argv[2:]))))
"""


def steps(count: int, torch_threads: int, is_streamed: int) -> list[float]:
    """Seconds of each of ``count`` training steps of the tiny model, in this process."""
    from transformers import LlamaConfig, LlamaForCausalLM

    if torch_threads:
        torch.set_num_threads(torch_threads)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=1000, max_position_embeddings=64, **sizes))
    optimizer: torch.optim.Optimizer
    if is_streamed:
        model = streamer.wrap(model, layers="model.layers", device="cpu")
        optimizer = streamer.AdamW(model.parameters(), lr=1e-3)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.randint(0, 1000, (2, 32))
    seconds = []
    for _ in range(WARM_UP + count):
        started = time.perf_counter()
        model(input_ids=tokens, labels=tokens).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if is_streamed:
            streamer.synchronize(model)
        seconds.append(time.perf_counter() - started)
    return seconds[WARM_UP:]


@contextlib.contextmanager
def others(number: int) -> Iterator[None]:
    """So many processes that use a core each."""
    running = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(number)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def measure(checkout: Path, count: int, torch_threads: int, *, is_streamed: bool) -> list[float]:
    """`steps` in a new process that imports streamer from ``checkout``."""
    environment = {name: value for name, value in os.environ.items() if "OMP_" not in name}
    finished = subprocess.run(
        [sys.executable, "-c", CHILD, __file__, str(count), str(torch_threads), str(int(is_streamed))],
        env=environment | {"PYTHONPATH": os.pathsep.join((str(checkout), str(HOME)))},
        cwd=checkout,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    seconds: list[float] = json.loads(finished.stdout.splitlines()[-1])
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--against", type=Path, help="another checkout of the project")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--json", type=Path, default=RESULTS / "beside_others.json")
    options = parser.parse_args()
    load_before = load_average()
    checkouts = {"this": HOME, PLAIN: HOME}
    if options.against:
        checkouts["against"] = options.against.resolve()
    kinds = list(product(TORCH_THREADS, (ALONE, BESIDE)))
    seconds: dict[tuple[str, tuple[str, str]], list[list[float]]] = {
        run: [] for run in product(checkouts, kinds)
    }
    for checkout in set(checkouts.values()):
        measure(checkout, 1, 1, is_streamed=True)
    order = random.Random(0)
    for _ in range(options.rounds):
        for name, kind in order.sample(list(seconds), len(seconds)):
            with others((os.cpu_count() or 1) if kind[1] == BESIDE else 0):
                threads = TORCH_THREADS[kind[0]]
                found = measure(checkouts[name], options.steps, threads, is_streamed=name != PLAIN)
            seconds[name, kind].append(found)
    rows: dict[str, dict[str, Any]] = {name: {} for name in checkouts}
    for (name, kind), rounds in seconds.items():
        ms = quartiles(1e3 * step for found in rounds for step in found)
        row = rows[name][", ".join(kind)] = {"milliseconds_per_step": ms}
        print(f"{name:15}{', '.join(kind):32}{ms['median']:8.1f} ms", end="")
        print(f" ({ms['lower_quartile']:.1f}-{ms['upper_quartile']:.1f})", end="")
        if name == "this" and options.against:
            both = zip(seconds["against", kind], rounds, strict=True)
            ratio = quartiles(statistics.median(theirs) / statistics.median(ours) for theirs, ours in both)
            row["times_faster_than_against"] = ratio
            spread = f"({ratio['lower_quartile']:.2f}-{ratio['upper_quartile']:.2f})"
            print(f"  x{ratio['median']:.2f} {spread}", end="")
        print()
    report = provenance("bench/beside_others.py", load_before=load_before)
    report |= {"rounds": options.rounds, "steps": options.steps, "others": os.cpu_count(), "checkouts": rows}
    write_json(options.json, report)


if __name__ == "__main__":
    main()
