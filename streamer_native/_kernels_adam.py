"""The kernels of AdamW with fp32 moments: fp32, fp16 and split masters.

Every layout, including those of the other kernel files, calls the same scalar function, so all compute
bitwise the same master from the same state. `adam.py` has the formula and the contracts.
"""

import numpy as np

from streamer_native._arrays import Float32Array, Int16Array, Uint16Array
from streamer_native._compile import inline, kernel
from streamer_native._llvm import (
    float32_from_bits,
    fused_multiply_add,
    narrow_half,
    to_float32,
)
from streamer_native._threads import Blocks, borrowed, claimed
from streamer_native.bfloat16 import join_bits, split_bits
from streamer_native.segments import Coefficients, Pieces, coefficients_of


@inline
def moments(
    grad: np.float32, exp_avg: np.float32, exp_avg_sq: np.float32, c: Coefficients
) -> tuple[np.float32, np.float32, np.float32]:
    """One element: the new (exp_avg, exp_avg_sq), and the square root of the latter."""
    grad = grad * c.grad_scale
    exp_avg = fused_multiply_add(c.one_minus_beta1, grad - exp_avg, exp_avg)
    exp_avg_sq = fused_multiply_add(c.one_minus_beta2 * grad, grad, c.beta2 * exp_avg_sq)
    return exp_avg, exp_avg_sq, np.sqrt(exp_avg_sq)


@inline
def moved(master: np.float32, exp_avg: np.float32, root: np.float32, c: Coefficients) -> np.float32:
    """One element: the new master, from the new moments."""
    denominator = fused_multiply_add(c.root_correction, root, c.eps)
    master = master - fused_multiply_add(c.decay, master, c.step_size * (exp_avg / denominator))
    # A GPU's own NaN, 0x7fffffff, would be split into a weight of -0 (see [Note: split master]), and the next
    # forward would run on zeros. The plain quiet NaN stays NaN when split.
    return float32_from_bits(np.uint32(0x7FC00000)) if master != master else master


@inline
def update(
    master: np.float32, grad: np.float32, exp_avg: np.float32, exp_avg_sq: np.float32, c: Coefficients
) -> tuple[np.float32, np.float32, np.float32]:
    """One element: the new (master, exp_avg, exp_avg_sq)."""
    exp_avg, exp_avg_sq, root = moments(grad, exp_avg, exp_avg_sq, c)
    return moved(master, exp_avg, root, c), exp_avg, exp_avg_sq


@inline
def _fp32_piece(
    master: Float32Array, grad: Float32Array, exp_avg: Float32Array, exp_avg_sq: Float32Array, c: Coefficients
) -> None:
    for i in range(master.size):
        master[i], exp_avg[i], exp_avg_sq[i] = update(master[i], grad[i], exp_avg[i], exp_avg_sq[i], c)


@kernel
def fp32(
    blocks: Blocks,
    master: Float32Array,
    grad: Float32Array,
    exp_avg: Float32Array,
    exp_avg_sq: Float32Array,
    pieces: Pieces,
) -> None:
    master, grad, exp_avg, exp_avg_sq, pieces = borrowed((master, grad, exp_avg, exp_avg_sq, pieces))
    for piece in claimed(blocks):
        lo, hi, segment, _ = pieces.bounds[piece]
        c = coefficients_of(pieces.coefficients[segment])
        _fp32_piece(master[lo:hi], grad[lo:hi], exp_avg[lo:hi], exp_avg_sq[lo:hi], c)


@inline
def _fp16_piece(
    weight: Int16Array,
    master: Float32Array,
    grad: Int16Array | Float32Array,
    exp_avg: Float32Array,
    exp_avg_sq: Float32Array,
    c: Coefficients,
) -> None:
    for i in range(master.size):
        # a weight that differs from its rounded master was written since the last update: it is the master
        exact = master[i] if narrow_half(master[i]) == weight[i] else to_float32(weight[i])
        master[i], exp_avg[i], exp_avg_sq[i] = update(
            exact, to_float32(grad[i]), exp_avg[i], exp_avg_sq[i], c
        )
        weight[i] = narrow_half(master[i])


@kernel
def fp16(
    blocks: Blocks,
    weight: Int16Array,
    master: Float32Array,
    grad: Int16Array | Float32Array,
    exp_avg: Float32Array,
    exp_avg_sq: Float32Array,
    pieces: Pieces,
) -> None:
    arrays = weight, master, grad, exp_avg, exp_avg_sq, pieces
    weight, master, grad, exp_avg, exp_avg_sq, pieces = borrowed(arrays)
    for piece in claimed(blocks):
        lo, hi, segment, _ = pieces.bounds[piece]
        c = coefficients_of(pieces.coefficients[segment])
        _fp16_piece(weight[lo:hi], master[lo:hi], grad[lo:hi], exp_avg[lo:hi], exp_avg_sq[lo:hi], c)


@inline
def _split_piece(
    weight: Uint16Array,
    remainder: Uint16Array,
    grad: Uint16Array | Float32Array,
    exp_avg: Float32Array,
    exp_avg_sq: Float32Array,
    c: Coefficients,
) -> None:
    for i in range(weight.size):
        master, exp_avg[i], exp_avg_sq[i] = update(
            join_bits(weight[i], remainder[i]), to_float32(grad[i]), exp_avg[i], exp_avg_sq[i], c
        )
        both = split_bits(master)
        weight[i] = np.uint16(both >> np.uint32(16))
        remainder[i] = np.uint16(both & np.uint32(0xFFFF))


@kernel
def split(
    blocks: Blocks,
    weight: Uint16Array,
    remainder: Uint16Array,
    grad: Uint16Array | Float32Array,
    exp_avg: Float32Array,
    exp_avg_sq: Float32Array,
    pieces: Pieces,
) -> None:
    arrays = weight, remainder, grad, exp_avg, exp_avg_sq, pieces
    weight, remainder, grad, exp_avg, exp_avg_sq, pieces = borrowed(arrays)
    for piece in claimed(blocks):
        lo, hi, segment, _ = pieces.bounds[piece]
        c = coefficients_of(pieces.coefficients[segment])
        _split_piece(weight[lo:hi], remainder[lo:hi], grad[lo:hi], exp_avg[lo:hi], exp_avg_sq[lo:hi], c)
