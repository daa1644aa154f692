"""What is done to gradients besides the update: the sum of their squares, and adding one to another."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from numba import prange

from streamer_native._arrays import BFLOAT16, FLOAT32, Float32Array, Uint16Array, check
from streamer_native._compile import BLOCK, exclusive, inline, kernel, reduction
from streamer_native._llvm import to_float32
from streamer_native.bfloat16 import narrow_to_even


@reduction
def _sum_squares_block(grad: Uint16Array | Float32Array) -> float:
    total = 0.0
    for i in range(grad.size):
        # The square of a finite float32 never overflows a float64, and memory is still the limit.
        value = np.float64(to_float32(grad[i]))
        total += value * value
    return total


@kernel
def _sum_squares(grad: Uint16Array | Float32Array, partial: npt.NDArray[np.float64]) -> None:
    for block in prange(partial.size):
        partial[block] = _sum_squares_block(grad[block * BLOCK : (block + 1) * BLOCK])


@inline
def _accumulate_fp32_block(into: Float32Array, grad: Uint16Array | Float32Array) -> None:
    for i in range(into.size):
        into[i] = into[i] + to_float32(grad[i])


@kernel
def _accumulate_fp32(into: Float32Array, grad: Uint16Array | Float32Array) -> None:
    for block in prange((into.size + BLOCK - 1) // BLOCK):
        lo, hi = block * BLOCK, (block + 1) * BLOCK
        _accumulate_fp32_block(into[lo:hi], grad[lo:hi])


@inline
def _accumulate_bf16_block(into: Uint16Array, grad: Uint16Array) -> None:
    for i in range(into.size):
        into[i] = narrow_to_even(to_float32(into[i]) + to_float32(grad[i]))


@kernel
def _accumulate_bf16(into: Uint16Array, grad: Uint16Array) -> None:
    for block in prange((into.size + BLOCK - 1) // BLOCK):
        lo, hi = block * BLOCK, (block + 1) * BLOCK
        _accumulate_bf16_block(into[lo:hi], grad[lo:hi])


def sum_squares(grad: Uint16Array | Float32Array) -> float:
    """The sum of the squares of a gradient, in float64.

    `grad` [n] is float32 or uint16 (bfloat16 bits), read once. The result is finite exactly when every
    element is: a NaN or Inf gives NaN or Inf, and finite float32 cannot overflow the float64 sum. It does not
    depend on the number of threads.

    Raises TypeError or ValueError, naming the mend, if `grad` does not fit this contract.
    """
    size = check("grad", grad, FLOAT32, BFLOAT16)
    partial = np.empty((size + BLOCK - 1) // BLOCK, dtype=np.float64)
    with exclusive():
        _sum_squares(grad, partial)
    return float(partial.sum())


def accumulate(into: Uint16Array | Float32Array, grad: Uint16Array | Float32Array) -> None:
    """Add a gradient to another, in place: `into += grad`.

    `into` [n] and `grad` [n] are float32 or uint16 (bfloat16 bits); into bfloat16 only bfloat16 can be added.
    Two bfloat16 are widened, added in float32 and rounded to nearest, ties to even, as PyTorch adds them; a
    NaN becomes 0x7fc0 (PyTorch's own NaN bits differ between its vectorised loop and the rest).

    Raises TypeError or ValueError, naming the mend, if the arrays do not fit this contract.
    """
    size = check("into", into, FLOAT32, BFLOAT16, written=True)
    into_fp32 = into.dtype == FLOAT32
    check("grad", grad, *((FLOAT32, BFLOAT16) if into_fp32 else (BFLOAT16,)), size=size)
    add: Callable[..., None] = _accumulate_fp32 if into_fp32 else _accumulate_bf16
    with exclusive():
        add(into, grad)
