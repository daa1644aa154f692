"""How near is the host update to the speed of memory, and to PyTorch's own?

    python bench/adam.py [--parameters 40e6] [--rounds 31] [--json bench/results/adam.json]

Each round runs every contender once, in an order drawn anew, so that whatever else the machine does meets all
alike. Times are nanoseconds per parameter; the ratio is the median over rounds of baseline / contender within
a round, with its quartiles.
"""

import argparse
import datetime
import json
import os
import platform
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numba
import numpy as np
import torch

import streamer_native

HYPERPARAMETERS = {"lr": 1e-4, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1}
BASELINE = "torch fused fp32"
WHOLE_JOB = "torch widen, fused, narrow"


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "unknown")


@numba.njit(nogil=True)
def _flip_block(values):
    for i in range(values.size):
        values[i] = -values[i]


@numba.njit(parallel=True, nogil=True)
def _flip_in_place(streams):
    """Load and store every element of each row, block by block: a step's traffic and hardly any arithmetic.

    In place, as the step is: a copy to another array would also read the lines that it overwrites.
    """
    block = 16384
    for b in numba.prange((streams.shape[1] + block - 1) // block):
        for row in range(streams.shape[0]):
            _flip_block(streams[row, b * block : (b + 1) * block])


class TorchFused:
    """torch.optim.AdamW(fused=True) on one fp32 tensor."""

    def __init__(self, master: torch.Tensor, grad: torch.Tensor) -> None:
        self.parameter = torch.nn.Parameter(master.clone())
        self.parameter.grad = grad.clone()
        h = HYPERPARAMETERS
        self.optimizer = torch.optim.AdamW(
            [self.parameter], h["lr"], (h["beta1"], h["beta2"]), h["eps"], h["weight_decay"], fused=True
        )

    def step(self) -> None:
        self.optimizer.step()

    def whole_job(self, grad: torch.Tensor, weight: torch.Tensor) -> None:
        """What a bf16 run needs around it: the bf16 gradient widened, the new weight narrowed."""
        self.parameter.grad.copy_(grad)
        self.optimizer.step()
        weight.copy_(self.parameter.detach())


def contenders(size: int) -> dict[str, tuple[int, Callable[[int], object]]]:
    """Name -> (bytes of traffic per parameter, a function of the step number that runs one step)."""
    master = torch.randn(size)
    grad = torch.randn(size) * 0.01
    grad_bf16 = grad.bfloat16()
    weight_bf16 = master.bfloat16()
    fp32 = [t.numpy() for t in (master.clone(), grad.clone(), torch.zeros(size), torch.zeros(size))]
    weight, remainder = np.empty(size, np.uint16), np.empty(size, np.uint16)
    streamer_native.split(fp32[0], weight, remainder)
    moments = [np.zeros(size, np.float32) for _ in range(2)]
    split = [weight, remainder, grad_bf16.view(torch.uint16).numpy(), *moments]
    split_fp32_grad = [*(array.copy() for array in split[:2]), fp32[1], *(np.zeros_like(m) for m in moments)]
    plain, around = TorchFused(master, grad), TorchFused(master, grad)
    # 13 bytes read and 13 written per parameter, in three streams: as many as a split step.
    streams = np.ones((3, (size * 13 + 11) // 12), np.float32)
    h = HYPERPARAMETERS
    return {
        "adamw_fp32": (28, lambda step: streamer_native.adamw_fp32(*fp32, step=step, **h)),
        "adamw_split": (26, lambda step: streamer_native.adamw_split(*split, step=step, **h)),
        "adamw_split, fp32 grad": (
            28,
            lambda step: streamer_native.adamw_split(*split_fp32_grad, step=step, **h),
        ),
        BASELINE: (28, lambda step: plain.step()),
        # Widening reads 2 and writes 4, narrowing reads 4 and writes 2.
        WHOLE_JOB: (40, lambda step: around.whole_job(grad_bf16, weight_bf16)),
        "flip signs in place": (26, lambda step: _flip_in_place(streams)),
    }


def measure(size: int, rounds: int) -> dict[str, list[float]]:
    """Seconds per step of each contender, one per round; two rounds of warming up are not kept."""
    runs = contenders(size)
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    order = random.Random(0)
    for step in range(1, rounds + 3):
        for name in order.sample(list(runs), len(runs)):
            started = time.perf_counter()
            runs[name][1](step)
            seconds[name].append(time.perf_counter() - started)
    return {name: values[2:] for name, values in seconds.items()}


def ratio(baseline: list[float], contender: list[float]) -> dict[str, float]:
    quartiles = statistics.quantiles([b / c for b, c in zip(baseline, contender, strict=True)], n=4)
    return dict(zip(("lower_quartile", "median", "upper_quartile"), quartiles, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parameters", type=lambda text: int(float(text)), default=40_000_000)
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / "adam.json")
    options = parser.parse_args()
    size = options.parameters
    load_before = os.getloadavg()[0]
    seconds = measure(size, options.rounds)
    traffic = {name: count for name, (count, _) in contenders(1).items()}
    rows = {}
    for name, values in seconds.items():
        lower, median, upper = (q / size * 1e9 for q in statistics.quantiles(values, n=4))
        rows[name] = {
            "ns_per_parameter": {"lower_quartile": lower, "median": median, "upper_quartile": upper},
            "bytes_per_parameter": traffic[name],
            "gb_per_second": traffic[name] / median,
            "times_faster_than_torch_fused": ratio(seconds[BASELINE], values),
            "times_faster_than_whole_job": ratio(seconds[WHOLE_JOB], values),
        }
    report = {
        "script": "bench/adam.py",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "parameters": size,
        "rounds": options.rounds,
        "hardware": {
            "processor": processor(),
            "machine": platform.machine(),
            "cores": os.cpu_count(),
            "load_average_before": load_before,  # well above 0: others were using the cores and the memory
        },
        "threads": {
            "numba": numba.get_num_threads(),
            "torch": torch.get_num_threads(),
            "numba_threading_layer": numba.threading_layer(),
        },
        "versions": {
            "python": platform.python_version(),
            "numba": numba.__version__,
            "numpy": np.__version__,
            "torch": torch.__version__,
        },
        "contenders": rows,
    }
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(report, indent=2) + "\n")

    print(f"{size:,} parameters, {options.rounds} rounds; {processor()}; threads: {report['threads']}")
    print(f"{'':28}{'ns/param':>9}{'quartiles':>16}{'GB/s':>7}  {'vs ' + BASELINE:>20}  {'vs whole job':>20}")
    for name, row in rows.items():
        ns = row["ns_per_parameter"]
        compared = [
            f"{r['median']:.2f} ({r['lower_quartile']:.2f}-{r['upper_quartile']:.2f})"
            for r in (row["times_faster_than_torch_fused"], row["times_faster_than_whole_job"])
        ]
        spread = f"{ns['lower_quartile']:.3f}-{ns['upper_quartile']:.3f}"
        print(
            f"{name:28}{ns['median']:9.3f}{spread:>16}{row['gb_per_second']:7.1f}"
            f"  {compared[0]:>20}  {compared[1]:>20}"
        )
    print(f"written: {options.json}")


if __name__ == "__main__":
    main()
