"""How near is the host update to the speed of memory, and to PyTorch's own?

    python -m bench.adam [--parameters 40e6] [--rounds 31] [--json bench/results/adam.json]

Each round runs every contender once, in a new random order, so that other load on the machine affects all
alike. Times are nanoseconds per parameter; the ratio is the median over rounds of baseline / contender within
a round, with its quartiles.
"""

from __future__ import annotations

import argparse
import ctypes
import random
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numba
import numpy as np
import torch

import streamer_native
from bench.common import RESULTS, load_average, processor, provenance, quartiles, write_json
from bench.markdown import Report, spread, table
from streamer.backends.host_memory import mapped
from streamer_native import adam

HYPERPARAMETERS = {"lr": 1e-4, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1}
BASELINE = "torch fused fp32"
WHOLE_JOB = "torch widen, fused, narrow"
DEEPSPEED = "widen, DeepSpeed, narrow"
LOOP = "same traffic"
SUM_SQUARES, TORCH_SUM_SQUARES = "sum_squares of bf16", "torch vector_norm of bf16"
ACCUMULATE, TORCH_ACCUMULATE = "accumulate fp32 += bf16", "torch fp32.add_(bf16)"


C_LOOP = """
#include <stddef.h>
#include <stdint.h>
uint64_t move(uint64_t *changed, size_t num_changed, const uint64_t *read, size_t num_read) {
    /* block by block, as a step does; every word of one array loaded and stored, of the other loaded */
    uint64_t sum = 0;
    const size_t block = 4096;
    size_t blocks = (num_changed + block - 1) / block;
    for (size_t b = 0; b < blocks; b++) {
        size_t end = (b + 1) * block < num_changed ? (b + 1) * block : num_changed;
        for (size_t i = b * block; i < end; i++) changed[i] += 0x0101010101010101u;
        for (size_t i = num_read * b / blocks; i < num_read * (b + 1) / blocks; i++) sum += read[i];
    }
    return sum;
}
"""


@numba.njit(nogil=True)
def _move(changed, read):
    total = np.uint64(0)
    for i in range(changed.size):
        changed[i] += np.uint64(1)
    for i in range(read.size):
        total += read[i]
    return total


def compile_mover() -> tuple[str, Callable[[np.ndarray, np.ndarray], object]]:
    """The loop that moves a step's bytes with hardly any arithmetic: in C, or in Numba without a compiler."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        return "Numba loop (no C compiler)", _move
    folder = Path(tempfile.mkdtemp())
    (folder / "move.c").write_text(C_LOOP)
    flags = ["-O3", "-march=native", "-shared", "-fPIC"]
    subprocess.run([compiler, *flags, "-o", str(folder / "move.so"), str(folder / "move.c")], check=True)
    function = ctypes.CDLL(str(folder / "move.so")).move
    function.restype = ctypes.c_uint64
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t] * 2

    def move(changed: np.ndarray, read: np.ndarray) -> None:
        function(changed.ctypes.data, changed.size, read.ctypes.data, read.size)

    return f"C loop ({Path(compiler).name} {' '.join(flags[:2])})", move


class Mover:
    """A step's traffic on all cores: `changed` bytes per parameter loaded and stored, `read` bytes loaded."""

    def __init__(self, size: int, changed: int, read: int, move: Callable[..., object]) -> None:
        self.pool = ThreadPoolExecutor(streamer_native.get_num_threads())
        arrays = [mapped(size * count // 8 * 8, in_forks=True).numpy() for count in (changed, read)]
        parts = [np.array_split(array.view(np.uint64), streamer_native.get_num_threads()) for array in arrays]
        self.parts = list(zip(*parts, strict=True))
        self.move = move

    def step(self, _: int) -> None:
        list(self.pool.map(lambda part: self.move(*part), self.parts))


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
        """The conversions of a bf16 run: the bf16 gradient widened, the new weight narrowed."""
        self.parameter.grad.copy_(grad)
        self.optimizer.step()
        weight.copy_(self.parameter.detach())


class DeepSpeed:
    """The complete update with DeepSpeed's CPU Adam. Raises ImportError if it is not installed."""

    def __init__(self, master: torch.Tensor) -> None:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        self.parameter = torch.nn.Parameter(master.clone())
        self.parameter.grad = torch.zeros_like(master)
        h = HYPERPARAMETERS
        self.optimizer = DeepSpeedCPUAdam(
            [self.parameter],
            h["lr"],
            betas=(h["beta1"], h["beta2"]),
            eps=h["eps"],
            weight_decay=h["weight_decay"],
            adamw_mode=True,
        )

    def whole_job(self, grad: torch.Tensor, weight: torch.Tensor) -> None:
        self.parameter.grad.copy_(grad)
        self.optimizer.step()
        weight.copy_(self.parameter.detach())


# Bytes per parameter that a step loads and stores, and that it only loads.
TRAFFIC = {"fp32": (12, 4), "fp16": (13, 2), "split": (12, 2), "split + bf16": (8, 2), "split + int8": (6, 2)}


def layouts(size: int, master: torch.Tensor, grad: torch.Tensor) -> dict[str, Callable[[int], object]]:
    """A function of the step number for each state layout, one step of it, in memory as the backends have."""

    def held(values: torch.Tensor) -> np.ndarray:
        block = mapped(values.nbytes, in_forks=True).view(values.dtype)
        return block.copy_(values).numpy()

    def zeros(dtype: torch.dtype, count: int = size) -> np.ndarray:
        return mapped(count * dtype.itemsize, in_forks=True).view(dtype).numpy()

    def masters() -> tuple[np.ndarray, np.ndarray]:
        weight, remainder = zeros(torch.uint16), zeros(torch.uint16)
        streamer_native.split(master.numpy(), weight, remainder)
        return weight, remainder

    def moments(dtype: torch.dtype) -> tuple[np.ndarray, np.ndarray]:
        return zeros(dtype), zeros(dtype)

    floats, halves = torch.float32, torch.uint16
    bits = held(grad.bfloat16().view(torch.uint16))
    scales = -(-size // streamer_native.QUANTUM)
    eight_bits = zeros(torch.int8), zeros(torch.uint8), zeros(floats, scales), zeros(floats, scales)
    arrays = {
        "fp32": (adam.adamw_fp32, (held(master), held(grad), *moments(floats))),
        "fp16": (
            adam.adamw_fp16,
            (zeros(torch.float16), held(master), held(grad.half()), *moments(floats)),
        ),
        "split": (adam.adamw_split, (*masters(), bits, *moments(floats))),
        "split + bf16": (adam.adamw_split_bf16, (*masters(), bits, *moments(halves))),
        "split + int8": (adam.adamw_split_int8, (*masters(), bits, *eight_bits)),
    }

    def stepper(function: Callable[..., None], state: tuple[np.ndarray, ...]) -> Callable[[int], object]:
        def step(number: int) -> None:
            hyper = streamer_native.Hyper(**HYPERPARAMETERS, step=number)
            function(*state, [streamer_native.Segment(0, size, hyper)])

        return step

    return {name: stepper(*entry) for name, entry in arrays.items()}


def reductions(master: torch.Tensor, grad: torch.Tensor) -> dict[str, Callable[[int], object]]:
    """The norm of a bf16 gradient and its addition to an fp32 one, here and in PyTorch."""
    bits, into, torch_into = grad.view(torch.uint16).numpy(), master.clone().numpy(), master.clone()
    return {
        SUM_SQUARES: lambda _: streamer_native.sum_squares(bits),
        TORCH_SUM_SQUARES: lambda _: torch.linalg.vector_norm(grad),
        # accumulate also returns the sum of squares, which PyTorch's addition does not
        ACCUMULATE: lambda _: streamer_native.accumulate(into, bits),
        TORCH_ACCUMULATE: lambda _: torch_into.add_(grad),
    }


def contenders(size: int) -> tuple[str, dict[str, Callable[[int], object]]]:
    """The name of the loop, and for each contender a function of the step number that runs one step."""
    torch.manual_seed(0)
    master, grad = torch.randn(size), torch.randn(size) * 0.01
    grad_bf16, weight_bf16 = grad.bfloat16(), master.bfloat16()
    loop, move = compile_mover()
    plain, around = TorchFused(master, grad), TorchFused(master, grad)
    runs = layouts(size, master, grad)
    runs |= {f"{name}: {LOOP}": Mover(size, *TRAFFIC[name], move).step for name in TRAFFIC}
    runs[BASELINE] = lambda _: plain.step()
    runs[WHOLE_JOB] = lambda _: around.whole_job(grad_bf16, weight_bf16)
    runs |= reductions(master, grad_bf16)
    try:
        deepspeed = DeepSpeed(master)
        runs[DEEPSPEED] = lambda _: deepspeed.whole_job(grad_bf16, weight_bf16)
    except ImportError as error:
        print(f"DeepSpeed is left out: {error} (pip install deepspeed ninja, DS_ACCELERATOR=cpu)")
    return loop, runs


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


#: The layouts of `bench.adam` as the README calls them: dtype of the model, of the moments.
LAYOUTS = {
    "fp32": "fp32, fp32",
    "fp16": "fp16, fp32",
    "split": "bf16, fp32",
    "split + bf16": "bf16, bf16",
    "split + int8": "bf16, 8 bits",
}


def median(values: Mapping[str, float] | None) -> str:
    return "" if values is None else f"{values['median']:.2f}"


def readme_figure(report: Report) -> list[str]:
    """The update against others, medians only."""
    heads = [
        "model, moments",
        "ns per parameter",
        "against `torch.optim.AdamW(fused=True)` in fp32",
        "against widening a bf16 gradient, that step, narrowing the weight",
        "the same around DeepSpeed's CPU Adam",
    ]
    than = ("torch fused fp32", "torch widen, fused, narrow", "widen, DeepSpeed, narrow")
    rows = []
    for name in ("fp32", "split", "split + bf16", "split + int8"):
        row = report["contenders"][name]
        faster = row["times_faster_than"]
        rows.append([LAYOUTS[name], median(row["ns_per_parameter"]), *(median(faster.get(o)) for o in than)])
    return table(heads, rows)


def report_table(report: Report) -> list[str]:
    rows = [
        [
            LAYOUTS.get(name, name),
            spread(row["ns_per_parameter"]),
            "; ".join(f"{spread(times)} x {other}" for other, times in row["times_faster_than"].items()),
        ]
        for name, row in report["contenders"].items()
        if "times_faster_than" in row
    ]
    about = f"{report['parameters']:,} parameters, {report['threads']['numba']} threads; above 1 is faster."
    return [about, "", *table(["", "ns per parameter", "speed, in multiples of that of"], rows)]


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
