"""Kernels for gradients other than the update: the sum of their squares, and the addition of two.

A kernel that writes a gradient returns the sum of the squares of its elements: they are in registers, and
reading them again would cost as much as adding them. Sums are computed block by block in float64, and then
over the blocks, so they do not depend on the number of threads. The square of a finite float32 never
overflows a float64: a sum is finite exactly if every element is. bfloat16 is read in pairs: see
[Note: pairs].
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from streamer_native._arrays import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    Float16Array,
    Float32Array,
    Int16Array,
    Uint16Array,
    Uint32Array,
    check,
    for_kernel,
)
from streamer_native._compile import BLOCK, kernel, reduction
from streamer_native._llvm import to_float32
from streamer_native._pairs import even_of, odd_of, pair_of, pairs
from streamer_native._threads import Blocks, borrowed, claimed, num_blocks, share_out
from streamer_native.bfloat16 import narrow_like, narrow_to_even

Gradient = Float32Array | Uint16Array | Float16Array
_InKernel = Float32Array | Uint16Array | Int16Array
_Sums = npt.NDArray[np.float64]


@reduction
def _sum_squares_block(grad: _InKernel) -> float:
    total = 0.0
    for i in range(grad.size):
        value = np.float64(to_float32(grad[i]))
        total += value * value
    return total


@kernel
def _sum_squares(blocks: Blocks, grad: _InKernel, sums: _Sums) -> None:
    grad, sums = borrowed((grad, sums))
    for block in claimed(blocks):
        sums[block] = _sum_squares_block(grad[block * BLOCK : (block + 1) * BLOCK])


@reduction
def _sum_squares_pairs(grad: Uint32Array) -> float:
    total = 0.0
    for i in range(grad.size):
        even, odd = np.float64(even_of(grad[i])), np.float64(odd_of(grad[i]))
        total += even * even + odd * odd
    return total


@kernel
def _sum_squares_bf16(blocks: Blocks, grad: Uint16Array, sums: _Sums) -> None:
    grad, sums = borrowed((grad, sums))
    for block in claimed(blocks):
        part = grad[block * BLOCK : (block + 1) * BLOCK]
        even = part.size - part.size % 2
        sums[block] = _sum_squares_pairs(pairs(part[:even])) + _sum_squares_block(part[even:])


@reduction
def _accumulate_block(into: _InKernel, grad: _InKernel) -> float:
    total = 0.0
    for i in range(into.size):
        new = narrow_like(to_float32(into[i]) + to_float32(grad[i]), into[i])
        into[i] = new
        value = np.float64(to_float32(new))
        total += value * value
    return total


@kernel
def _accumulate(blocks: Blocks, into: _InKernel, grad: _InKernel, sums: _Sums) -> None:
    into, grad, sums = borrowed((into, grad, sums))
    for block in claimed(blocks):
        lo, hi = block * BLOCK, (block + 1) * BLOCK
        sums[block] = _accumulate_block(into[lo:hi], grad[lo:hi])


@reduction
def _accumulate_pairs(into: Uint32Array, grad: Uint32Array) -> float:
    total = 0.0
    for i in range(into.size):
        new = pair_of(
            np.uint32(narrow_to_even(even_of(into[i]) + even_of(grad[i]))),
            np.uint32(narrow_to_even(odd_of(into[i]) + odd_of(grad[i]))),
        )
        into[i] = new
        even, odd = np.float64(even_of(new)), np.float64(odd_of(new))
        total += even * even + odd * odd
    return total


@kernel
def _accumulate_bf16(blocks: Blocks, into: Uint16Array, grad: Uint16Array, sums: _Sums) -> None:
    into, grad, sums = borrowed((into, grad, sums))
    for block in claimed(blocks):
        lo, hi = block * BLOCK, min((block + 1) * BLOCK, into.size)
        even = hi - (hi - lo) % 2
        sums[block] = _accumulate_pairs(pairs(into[lo:even]), pairs(grad[lo:even]))
        sums[block] += _accumulate_block(into[even:hi], grad[even:hi])


@reduction
def _add_block(into: Float32Array, first: _InKernel, second: _InKernel) -> float:
    total = 0.0
    for i in range(into.size):
        new = to_float32(first[i]) + to_float32(second[i])
        into[i] = new
        total += np.float64(new) * np.float64(new)
    return total


@kernel
def _add(blocks: Blocks, into: Float32Array, first: _InKernel, second: _InKernel, sums: _Sums) -> None:
    into, first, second, sums = borrowed((into, first, second, sums))
    for block in claimed(blocks):
        lo, hi = block * BLOCK, (block + 1) * BLOCK
        sums[block] = _add_block(into[lo:hi], first[lo:hi], second[lo:hi])


def sum_squares(grad: Gradient) -> float:
    """The sum of the squares of a gradient, in float64: finite exactly if every element is.

    `grad` [n] is float32, uint16 (bfloat16 bits) or float16, and is read once. The result does not depend on
    the number of threads.

    Raises TypeError or ValueError, naming the remedy, if `grad` does not fit this contract.
    """
    sums = _sums(check("grad", grad, FLOAT32, BFLOAT16, FLOAT16))
    add_up: Callable[..., None] = _sum_squares_bf16 if grad.dtype == BFLOAT16 else _sum_squares
    share_out(add_up, sums.size, for_kernel(grad), sums)
    return float(sums.sum())


def accumulate(into: Gradient, grad: Gradient) -> float:
    """Add a gradient to another, in place, `into += grad`; return the sum of the squares of the new `into`.

    `into` [n] and `grad` [n] are float32, uint16 (bfloat16 bits) or float16; a 16-bit `into` needs a `grad`
    of its dtype. These two are widened, added in float32 and rounded to nearest, ties to even, as in PyTorch;
    a NaN in bfloat16 becomes 0x7fc0 (PyTorch's own NaN bits differ between its vectorised loop and the rest).
    The sum does not depend on the number of threads.

    Raises TypeError or ValueError, naming the remedy, if the arrays do not fit this contract.
    """
    size = check("into", into, FLOAT32, BFLOAT16, FLOAT16, written=True)
    check(
        "grad", grad, *((FLOAT32, BFLOAT16, FLOAT16) if into.dtype == FLOAT32 else (into.dtype,)), size=size
    )
    sums = _sums(size)
    run: Callable[..., None] = _accumulate_bf16 if into.dtype == BFLOAT16 else _accumulate
    share_out(run, sums.size, for_kernel(into), for_kernel(grad), sums)
    return float(sums.sum())


def add(into: Float32Array, first: Uint16Array | Float16Array, second: Uint16Array | Float16Array) -> float:
    """Begin an fp32 gradient with two of 16 bits, `into = first + second`; return the sum of its squares.

    `into` [n] float32 is written and never read. `first` [n] and `second` [n], both uint16 (bfloat16 bits) or
    both float16, are widened and added in float32. The sum does not depend on the number of threads.

    Raises TypeError or ValueError, naming the remedy, if the arrays do not fit this contract.
    """
    size = check("into", into, FLOAT32, written=True)
    check("first", first, BFLOAT16, FLOAT16, size=size)
    check("second", second, first.dtype, size=size)
    sums = _sums(size)
    share_out(_add, sums.size, into, for_kernel(first), for_kernel(second), sums)
    return float(sums.sum())


def _sums(size: int) -> _Sums:
    return np.empty(num_blocks(size), dtype=np.float64)
