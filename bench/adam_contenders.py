"""What bench/adam.py measures: each contender is a function of the step number that runs one step."""

import ctypes
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numba
import numpy as np
import torch

import streamer_native
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
        """What a bf16 run needs around it: the bf16 gradient widened, the new weight narrowed."""
        self.parameter.grad.copy_(grad)
        self.optimizer.step()
        weight.copy_(self.parameter.detach())


class DeepSpeed:
    """The whole job around DeepSpeed's CPU Adam. Raises ImportError where it is not installed."""

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
        # The sum of squares that accumulate returns beside the addition is a gift.
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
