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

An element whose first moment is NaN or Inf counts for no scale, lest it spoil the block, and its moments
begin again from zero; a root that overflowed counts as the largest there is.

[Note: three loops] A processor looks ahead a hundred or two instructions, and of the whole update of an
element, with its long chain of root, quotient and rounding, that is two vectors: it would stand and wait. The
same work as short loops over a scratch in the nearest cache takes a fifth less: new moments; masters; codes.
NaN and Inf are looked for once in a block and seen to outside the loops. (Pairs of elements, as bfloat16 has
them, made these loops half as slow again.)
"""

import numpy as np
from numba import prange

from streamer_native._arrays import Float32Array, Int8Array, Uint8Array, Uint16Array, Uint32Array
from streamer_native._compile import inline, kernel
from streamer_native._kernels_adam import moments, moved
from streamer_native._llvm import float32_bits, float32_from_bits, fused_multiply_add, to_float32
from streamer_native._rounding import TABLE, draw
from streamer_native.bfloat16 import join_bits, split_bits
from streamer_native.segments import QUANTUM, Coefficients, Pieces, coefficients_of

_INF = np.uint32(0x7F800000)
_15 = np.uint32(15)
_16 = np.uint32(16)
_LARGEST_ROOT = np.float32(1.8446743e19)  # its square is still finite
_SMALLEST_SCALE = np.float32(2.0**-126)  # the inverse of anything smaller may overflow
_EXP_AVG_CODES = np.float32(127)
_ROOT_CODES = np.float32(255)
_TWO_POWER_MINUS_15 = np.float32(2.0**-15)
_TWO_POWER_MINUS_16 = np.float32(2.0**-16)
_JUST_BELOW_1 = np.float32(1 - 2.0**-22)  # so that the largest value never rounds to a code that is not there


@inline
def _size_bits(value: np.float32) -> np.uint32:
    """The bits of the absolute value: ordered as it is, NaN above all, and as integers they vectorise."""
    return np.uint32(float32_bits(value) & np.uint32(0x7FFFFFFF))


@inline
def _new_moments(
    grad: Uint16Array | Float32Array,
    exp_avg: Int8Array,
    root: Uint8Array,
    exp_avg_scale: np.float32,
    root_scale: np.float32,
    new_exp_avg: Float32Array,
    new_root: Float32Array,
    c: Coefficients,
) -> tuple[np.uint32, np.uint32]:
    """The first of [Note: three loops]; returns the largest new exp_avg and root, as bits."""
    largest_exp_avg, largest_root = np.uint32(0), np.uint32(0)
    for i in range(grad.size):
        old_root = np.float32(root[i]) * root_scale
        m, _, r = moments(to_float32(grad[i]), np.float32(exp_avg[i]) * exp_avg_scale, old_root * old_root, c)
        new_exp_avg[i], new_root[i] = m, r
        largest_exp_avg = max(largest_exp_avg, _size_bits(m))
        largest_root = max(largest_root, _size_bits(r))
    return largest_exp_avg, largest_root


@inline
def _move_masters(
    weight: Uint16Array,
    remainder: Uint16Array,
    new_exp_avg: Float32Array,
    new_root: Float32Array,
    c: Coefficients,
) -> None:
    """The second of [Note: three loops]."""
    for i in range(weight.size):
        both = split_bits(moved(join_bits(weight[i], remainder[i]), new_exp_avg[i], new_root[i], c))
        weight[i] = np.uint16(both >> _16)
        remainder[i] = np.uint16(both & np.uint32(0xFFFF))


@inline
def _without_non_finite(new_exp_avg: Float32Array, new_root: Float32Array) -> tuple[np.uint32, np.uint32]:
    """Clear the moments that are not finite, and return the largest again."""
    largest_exp_avg, largest_root = np.uint32(0), np.uint32(0)
    for i in range(new_root.size):
        spoiled = _size_bits(new_exp_avg[i]) >= _INF
        new_exp_avg[i] = np.float32(0) if spoiled else new_exp_avg[i]
        new_root[i] = np.float32(0) if spoiled else min(new_root[i], _LARGEST_ROOT)
        largest_exp_avg = max(largest_exp_avg, _size_bits(new_exp_avg[i]))
        largest_root = max(largest_root, _size_bits(new_root[i]))
    return largest_exp_avg, largest_root


@inline
def _scale(largest: np.uint32, codes: np.float32) -> tuple[np.float32, np.float32]:
    """The scale of a block and, a hair too small, its inverse; both 0 where the inverse might overflow."""
    scale = float32_from_bits(largest) / codes
    if scale < _SMALLEST_SCALE:
        return np.float32(0), np.float32(0)
    return scale, _JUST_BELOW_1 / scale


@inline
def _round_exp_avg(
    new_exp_avg: Float32Array, inverse: np.float32, exp_avg: Int8Array, table: Uint32Array, shared: np.uint32
) -> None:
    """Half of the third of [Note: three loops]: stochastic rounding with the lower 15 random bits."""
    for i in range(exp_avg.size):
        random = np.uint32(table[i] ^ shared)
        # Between 256 and 512 the last place of a float32 is 2^-15: its bits are a fixed-point number. 384 is
        # the middle, and 128 (here 0x400000) more brings the code of 0 to 0, modulo 256.
        fixed = float32_bits(fused_multiply_add(new_exp_avg[i], inverse, np.float32(384)))
        noise = np.uint32(np.uint32(random & np.uint32(0x7FFF)) | np.uint32(0x400000))
        exp_avg[i] = np.uint8(np.uint32(np.uint32(fixed + noise) >> _15))


@inline
def _round_root(
    new_root: Float32Array, inverse: np.float32, root: Uint8Array, table: Uint32Array, shared: np.uint32
) -> None:
    """The other half: as [Note: 8-bit moments] says, with the upper 16 random bits."""
    for i in range(root.size):
        random = np.uint32(np.uint32(table[i] ^ shared) >> _16)
        x = new_root[i] * inverse
        x = max(x, np.float32(1)) if new_root[i] > np.float32(0) else np.float32(0)
        down = np.floor(x)
        gap = fused_multiply_add(down, _TWO_POWER_MINUS_15, _TWO_POWER_MINUS_16)  # (2 k + 1) / 2^16
        code = np.int32(down)
        up = (x - down) * (x + down) > np.float32(np.int32(random)) * gap
        root[i] = np.uint8(np.int32(code + np.int32(1)) if up else code)


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
    shared: np.uint32,
) -> tuple[np.float32, np.float32]:
    """All of one block of at most 256 elements; returns its new scales."""
    largest_exp_avg, largest_root = _new_moments(
        grad, exp_avg, root, exp_avg_scale, root_scale, new_exp_avg, new_root, c
    )
    _move_masters(weight, remainder, new_exp_avg, new_root, c)
    if max(largest_exp_avg, largest_root) >= _INF:
        largest_exp_avg, largest_root = _without_non_finite(new_exp_avg, new_root)
    exp_avg_scale, exp_avg_inverse = _scale(largest_exp_avg, _EXP_AVG_CODES)
    root_scale, root_inverse = _scale(largest_root, _ROOT_CODES)
    _round_exp_avg(new_exp_avg, exp_avg_inverse, exp_avg, TABLE, shared)
    _round_root(new_root, root_inverse, root, TABLE, shared)
    return exp_avg_scale, root_scale


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
        scratch = np.empty(2 * QUANTUM, np.float32)
        for block in range((stop - start + QUANTUM - 1) // QUANTUM):
            lo = start + block * QUANTUM
            hi = min(lo + QUANTUM, stop)
            exp_avg_scales[scale + block], root_scales[scale + block] = _update_block(
                weight[lo:hi],
                remainder[lo:hi],
                grad[lo:hi],
                exp_avg[lo:hi],
                root[lo:hi],
                exp_avg_scales[scale + block],
                root_scales[scale + block],
                scratch[: hi - lo],
                scratch[QUANTUM : QUANTUM + hi - lo],
                c,
                draw(np.uint32(lo), key),
            )
