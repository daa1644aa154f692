"""How near is the host update to the speed of memory, and to PyTorch's own?

    python -m bench.adam [--parameters 40e6] [--rounds 31] [--json bench/results/adam.json]

Each round runs every contender once, in an order drawn anew, so that whatever else the machine does meets all
alike. Times are nanoseconds per parameter; the ratio is the median over rounds of baseline / contender within
a round, with its quartiles.
"""

import argparse
import random
import time
from collections.abc import Callable
from pathlib import Path

import torch

import streamer_native
from bench.adam_contenders import (
    ACCUMULATE,
    BASELINE,
    DEEPSPEED,
    LOOP,
    SUM_SQUARES,
    TORCH_ACCUMULATE,
    TORCH_SUM_SQUARES,
    TRAFFIC,
    WHOLE_JOB,
    contenders,
)
from bench.common import RESULTS, load_average, processor, provenance, quartiles, write_json


def measure(runs: dict[str, Callable[[int], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds per step of each contender, one per round; two rounds of warming up are not kept."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    order = random.Random(0)
    for step in range(1, rounds + 3):
        for name in order.sample(list(runs), len(runs)):
            started = time.perf_counter()
            runs[name](step)
            seconds[name].append(time.perf_counter() - started)
    return {name: values[2:] for name, values in seconds.items()}


def ratio(baseline: list[float], contender: list[float]) -> dict[str, float]:
    return quartiles(b / c for b, c in zip(baseline, contender, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parameters", type=lambda text: int(float(text)), default=40_000_000)
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--json", type=Path, default=RESULTS / "adam.json")
    options = parser.parse_args()
    size = options.parameters
    load_before = load_average()
    loop, runs = contenders(size)
    seconds = measure(runs, options.rounds)
    rows = {}
    for name, values in seconds.items():
        rows[name] = {"ns_per_parameter": (ns := quartiles(value / size * 1e9 for value in values))}
        layout = name.removesuffix(f": {LOOP}")
        if layout in TRAFFIC:
            changed, read = TRAFFIC[layout]
            rows[name]["bytes_per_parameter"] = 2 * changed + read
            rows[name]["gb_per_second"] = (2 * changed + read) / ns["median"]
        if name in (SUM_SQUARES, ACCUMULATE):
            theirs = {SUM_SQUARES: TORCH_SUM_SQUARES, ACCUMULATE: TORCH_ACCUMULATE}[name]
            rows[name]["times_faster_than"] = {theirs: ratio(seconds[theirs], values)}
        if name in TRAFFIC:
            baselines = {LOOP: f"{name}: {LOOP}", BASELINE: BASELINE}
            if name.startswith("split"):
                baselines |= {WHOLE_JOB: WHOLE_JOB, DEEPSPEED: DEEPSPEED}
            rows[name]["times_faster_than"] = {
                label: ratio(seconds[baseline], values)
                for label, baseline in baselines.items()
                if baseline in seconds
            }
    report = provenance("bench/adam.py", load_before=load_before) | {
        "parameters": size,
        "rounds": options.rounds,
        "threads": {
            "kernels": streamer_native.get_num_threads(),
            "torch": torch.get_num_threads(),
        },
        "same_traffic": loop,
        "contenders": rows,
    }

    print(f"{size:,} parameters, {options.rounds} rounds; {processor()}; threads: {report['threads']}")
    print(f"same traffic: {loop}; load average before {load_before:.1f}")
    for name, row in rows.items():
        ns = row["ns_per_parameter"]
        spread = f"({ns['lower_quartile']:.3f}-{ns['upper_quartile']:.3f})"
        print(f"{name:27}{ns['median']:7.3f} ns {spread:15}{row.get('gb_per_second', 0):6.1f} GB/s", end="")
        for label, r in row.get("times_faster_than", {}).items():
            print(
                f"  {label} x{r['median']:.2f} ({r['lower_quartile']:.2f}-{r['upper_quartile']:.2f})", end=""
            )
        print()
    write_json(options.json, report)


if __name__ == "__main__":
    main()
