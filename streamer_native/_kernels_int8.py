"""The kernel of AdamW on a split master with 8-bit moments.

[Note: 8-bit moments] A block of 256 elements has two fp32 scales. exp_avg is `code * scale`, code int8 in
[-127, 127]; exp_avg_sq is `(code * scale) ** 2`, code uint8: the square root halves the range of exponents.
Both scales are computed anew at every step, from the block's largest value: a bound that is carried on only
ever grows. (Blocks and absmax scales: Dettmers et al., 8-bit Optimizers via Block-wise Quantization, ICLR
2022; the linear code, the root and the rounding are ours.)

Rounding is stochastic and unbiased where the moments are averaged: exp_avg in its code, exp_avg_sq in the
square of it. From `x` between the codes k and k + 1, k + 1 is taken with probability
`(x^2 - k^2) / ((k + 1)^2 - k^2)`, so the mean of the squares is x^2; rounding the root itself without bias
would add its variance to the second moment at every step, and at beta2 = 0.999 that piles up a thousandfold.
Only a root below the first code breaks the rule: it gets code 1, unless it is zero. As 0 it would leave an
update with nothing to divide by; as 1 it takes too small a step, of a size its larger neighbours set.

An element whose master has become NaN counts for no scale, lest it spoil the block; a root that overflowed
counts as the largest there is.
"""

import numpy as np
from numba import prange

from streamer_native._arrays import Float32Array, Int8Array, Uint8Array, Uint16Array, Uint32Array
from streamer_native._compile import inline, kernel
from streamer_native._kernels_adam import update
from streamer_native._llvm import float32_bits, float32_from_bits, fused_multiply_add, to_float32
from streamer_native._rounding import TABLE, draw
from streamer_native.bfloat16 import join_bits, split_bits
from streamer_native.segments import QUANTUM, Coefficients, Pieces, coefficients_of

_LARGEST_ROOT = np.float32(1.8446743e19)  # its square is still finite
_SMALLEST_SCALE = np.float32(2.0**-126)  # the inverse of anything smaller may overflow
_EXP_AVG_CODES = np.float32(127)
_ROOT_CODES = np.float32(255)
_TWO_POWER_MINUS_15 = np.float32(2.0**-15)
_TWO_POWER_MINUS_16 = np.float32(2.0**-16)
_BITS_OF_128 = np.uint32(0x43000000)
_JUST_BELOW_1 = np.float32(1 - 2.0**-22)  # so that the largest value never rounds to a code that is not there


@inline
def _update_block(
    weight: Uint16Array,
    remainder: Uint16Array,
    grad: Uint16Array | Float32Array,
    exp_avg: Int8Array,
    root: Uint8Array,
    exp_avg_scale: np.float32,
    root_scale: np.float32,
    new_exp_avg: Float32Array,
    new_root: Float32Array,
    c: Coefficients,
) -> tuple[np.float32, np.float32]:
    """Update the masters of one block; leave its moments in full, and return the largest of each."""
    largest_exp_avg, largest_root = np.uint32(0), np.uint32(0)
    for i in range(weight.size):
        old_root = np.float32(root[i]) * root_scale
        master, m, _, r = update(
            join_bits(weight[i], remainder[i]),
            to_float32(grad[i]),
            np.float32(exp_avg[i]) * exp_avg_scale,
            old_root * old_root,
            c,
        )
        both = split_bits(master)
        weight[i] = np.uint16(both >> np.uint32(16))
        remainder[i] = np.uint16(both & np.uint32(0xFFFF))
        spoiled = master != master
        m = np.float32(0) if spoiled else m
        r = np.float32(0) if spoiled else min(r, _LARGEST_ROOT)
        new_exp_avg[i] = m
        new_root[i] = r
        # The bits of floats that are not negative are ordered as they are, and as integers they vectorise.
        largest_exp_avg = max(largest_exp_avg, np.uint32(float32_bits(m) & np.uint32(0x7FFFFFFF)))
        largest_root = max(largest_root, float32_bits(r))
    return float32_from_bits(largest_exp_avg), float32_from_bits(largest_root)


@inline
def _scale(largest: np.float32, codes: np.float32) -> tuple[np.float32, np.float32]:
    """The scale of a block and, a hair too small, its inverse; both 0 where the inverse might overflow."""
    scale = largest / codes
    if scale < _SMALLEST_SCALE:
        return np.float32(0), np.float32(0)
    return scale, _JUST_BELOW_1 / scale


@inline
def _quantize_block(
    new_exp_avg: Float32Array,
    new_root: Float32Array,
    exp_avg_inverse: np.float32,
    root_inverse: np.float32,
    exp_avg: Int8Array,
    root: Uint8Array,
    table: Uint32Array,
    shared: np.uint32,
) -> None:
    for i in range(exp_avg.size):
        random = np.uint32(table[i] ^ shared)
        # 128 plus 16 random bits of fraction: truncation of what is positive is the floor.
        offset = float32_from_bits(np.uint32(np.uint32(random & np.uint32(0xFFFF)) | _BITS_OF_128))
        shifted = fused_multiply_add(new_exp_avg[i], exp_avg_inverse, offset)
        exp_avg[i] = np.int8(np.int32(np.int32(shifted) - np.int32(128)))
        x = new_root[i] * root_inverse
        down = np.floor(x)
        fraction = np.float32(np.int32(random >> np.uint32(16)))
        gap = fused_multiply_add(down, _TWO_POWER_MINUS_15, _TWO_POWER_MINUS_16)  # (2 k + 1) / 2^16
        code = down + np.float32(x * x > fused_multiply_add(fraction, gap, down * down))
        code = max(code, np.float32(x > np.float32(0)))
        root[i] = np.uint8(np.int32(code))


@kernel
def split_int8(
    weight: Uint16Array,
    remainder: Uint16Array,
    grad: Uint16Array | Float32Array,
    exp_avg: Int8Array,
    root: Uint8Array,
    exp_avg_scales: Float32Array,
    root_scales: Float32Array,
    pieces: Pieces,
) -> None:
    for piece in prange(len(pieces.bounds)):
        start, stop, segment, scale = pieces.bounds[piece]
        c = coefficients_of(pieces.coefficients[segment])
        key = np.uint32(pieces.keys[segment])
        moments = np.empty(2 * QUANTUM, np.float32)
        for block in range((stop - start + QUANTUM - 1) // QUANTUM):
            lo = start + block * QUANTUM
            hi = min(lo + QUANTUM, stop)
            new_exp_avg, new_root = moments[: hi - lo], moments[QUANTUM : QUANTUM + hi - lo]
            largest_exp_avg, largest_root = _update_block(
                weight[lo:hi],
                remainder[lo:hi],
                grad[lo:hi],
                exp_avg[lo:hi],
                root[lo:hi],
                exp_avg_scales[scale + block],
                root_scales[scale + block],
                new_exp_avg,
                new_root,
                c,
            )
            exp_avg_scales[scale + block], exp_avg_inverse = _scale(largest_exp_avg, _EXP_AVG_CODES)
            root_scales[scale + block], root_inverse = _scale(largest_root, _ROOT_CODES)
            _quantize_block(
                new_exp_avg,
                new_root,
                exp_avg_inverse,
                root_inverse,
                exp_avg[lo:hi],
                root[lo:hi],
                TABLE,
                draw(np.uint32(lo), key),
            )
