"""The kernel of AdamW on a split master with 8-bit moments.

[Note: 8-bit moments] Elements share two fp32 scales in blocks of 256. exp_avg is `code * scale`, code int8 in
[-127, 127]. exp_avg_sq is a float of eight bits, five of exponent and three of fraction: code 0 is 0, and any
other is the float32 whose bits are `bits of the scale + code * 2^20`. Such codes reach 2^32 down from the
largest of a block with steps of an eighth to a sixteenth; evenly spaced ones would leave most of a block
without a second moment. Both scales are computed again at every step, from the block's largest value: a bound
carried from step to step only ever grows. (Blocks and their scales: Dettmers et al., 8-bit Optimizers via
Block-wise Quantization, ICLR 2022; the codes and the rounding are ours.)

Both are rounded stochastically and without bias: rounded to the nearest code, a second moment at
beta2 = 0.999 would never move. Only values below the first code of exp_avg_sq are an exception: they get code
1, unless they are zero. With code 0 an update would divide by zero.

An element whose first moment is NaN or Inf counts for no scale, so that it does not spoil the block, and its
moments restart from zero; a second moment above 2^127 is treated alike.

[Note: three loops] A processor looks ahead a hundred or two instructions. Of the whole update of an element,
with its long chain of root, quotient and rounding, that is two vectors, and the processor would stall. The
same work as short loops over a scratch in the nearest cache takes a fifth less: new moments; masters; codes.
NaN and Inf are checked once in a block and handled outside the loops. (Pairs of elements, as for bfloat16,
slowed these loops by half.)
"""

import numpy as np

from streamer_native._arrays import Float32Array, Int8Array, Uint8Array, Uint16Array, Uint32Array
from streamer_native._compile import inline, kernel
from streamer_native._kernels_adam import moments, moved
from streamer_native._llvm import float32_bits, float32_from_bits, fused_multiply_add, to_float32
from streamer_native._rounding import TABLE, draw
from streamer_native._threads import Blocks, borrowed, claimed
from streamer_native.bfloat16 import join_bits, split_bits
from streamer_native.segments import QUANTUM, Coefficients, Pieces, coefficients_of

_INF = np.uint32(0x7F800000)
_LARGEST_SQ = np.uint32(0x7F000000)  # 2^127: one code up is still finite
_12 = np.uint32(12)
_15 = np.uint32(15)
_16 = np.uint32(16)
_20 = np.uint32(20)  # bits of a float32 below those that are a code of exp_avg_sq
_CODES = np.float32(127)
_SQ_CODES = np.int32(255)
_SMALLEST_SCALE = np.float32(2.0**-126)  # the inverse of anything smaller may overflow
_JUST_BELOW_1 = np.float32(1 - 2.0**-22)  # so that the largest value never rounds beyond the last code


@inline
def _size_bits(value: np.float32) -> np.uint32:
    """The bits of the absolute value. They have its order, NaN above all, and as integers they vectorise."""
    return np.uint32(float32_bits(value) & np.uint32(0x7FFFFFFF))


@inline
def _new_moments(
    grad: Uint16Array | Float32Array,
    exp_avg: Int8Array,
    exp_avg_sq: Uint8Array,
    scale: np.float32,
    sq_scale: np.float32,
    new_exp_avg: Float32Array,
    new_exp_avg_sq: Float32Array,
    root: Float32Array,
    c: Coefficients,
) -> tuple[np.uint32, np.uint32]:
    """The first of [Note: three loops]; returns the largest new moments, as bits."""
    largest, largest_sq = np.uint32(0), np.uint32(0)
    sq_scale_bits = float32_bits(sq_scale)
    for i in range(grad.size):
        sq_bits = np.uint32(sq_scale_bits + np.uint32(np.uint32(exp_avg_sq[i]) << _20))
        old_exp_avg_sq = float32_from_bits(sq_bits) if exp_avg_sq[i] != 0 else np.float32(0)
        m, v, r = moments(to_float32(grad[i]), np.float32(exp_avg[i]) * scale, old_exp_avg_sq, c)
        new_exp_avg[i], new_exp_avg_sq[i], root[i] = m, v, r
        largest = max(largest, _size_bits(m))
        largest_sq = max(largest_sq, _size_bits(v))
    return largest, largest_sq


@inline
def _move_masters(
    weight: Uint16Array,
    remainder: Uint16Array,
    new_exp_avg: Float32Array,
    root: Float32Array,
    c: Coefficients,
) -> None:
    """The second of [Note: three loops]."""
    for i in range(weight.size):
        both = split_bits(moved(join_bits(weight[i], remainder[i]), new_exp_avg[i], root[i], c))
        weight[i] = np.uint16(both >> _16)
        remainder[i] = np.uint16(both & np.uint32(0xFFFF))


@inline
def _without_non_finite(
    new_exp_avg: Float32Array, new_exp_avg_sq: Float32Array
) -> tuple[np.uint32, np.uint32]:
    """Clear the moments that are not finite, and return the largest of the others."""
    largest, largest_sq = np.uint32(0), np.uint32(0)
    for i in range(new_exp_avg.size):
        spoiled = _size_bits(new_exp_avg[i]) >= _INF
        new_exp_avg[i] = np.float32(0) if spoiled else new_exp_avg[i]
        limited = float32_from_bits(min(_size_bits(new_exp_avg_sq[i]), _LARGEST_SQ))
        new_exp_avg_sq[i] = np.float32(0) if spoiled else limited
        largest = max(largest, _size_bits(new_exp_avg[i]))
        largest_sq = max(largest_sq, _size_bits(new_exp_avg_sq[i]))
    return largest, largest_sq


@inline
def _scale(largest: np.uint32) -> tuple[np.float32, np.float32]:
    """The scale of exp_avg and its inverse, slightly too small; both 0 if the inverse might overflow."""
    scale = float32_from_bits(largest) / _CODES
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
        # the middle, and 128 (here 0x400000) more maps the code of 0 to 0, modulo 256.
        fixed = float32_bits(fused_multiply_add(new_exp_avg[i], inverse, np.float32(384)))
        noise = np.uint32(np.uint32(random & np.uint32(0x7FFF)) | np.uint32(0x400000))
        exp_avg[i] = np.uint8(np.uint32(np.uint32(fixed + noise) >> _15))


@inline
def _round_exp_avg_sq(
    new_exp_avg_sq: Float32Array,
    first: np.int32,
    exp_avg_sq: Uint8Array,
    table: Uint32Array,
    shared: np.uint32,
) -> None:
    """The other half, with the upper 17 random bits: added to the bits below a code, they carry into it with
    a probability equal to those bits. ``first`` is the start of the codes, as upper bits of a float32."""
    for i in range(exp_avg_sq.size):
        bits = float32_bits(new_exp_avg_sq[i])
        noise = np.uint32(np.uint32(np.uint32(table[i] ^ shared) >> _12) & np.uint32(0xFFFF8))
        code = np.int32(np.int32(np.uint32(bits + noise) >> _20) - first)
        code = max(code, np.int32(1))
        exp_avg_sq[i] = np.uint8(code) if bits != 0 else np.uint8(0)


@inline
def _update_block(
    weight: Uint16Array,
    remainder: Uint16Array,
    grad: Uint16Array | Float32Array,
    exp_avg: Int8Array,
    exp_avg_sq: Uint8Array,
    scale: np.float32,
    sq_scale: np.float32,
    scratch: Float32Array,
    c: Coefficients,
    shared: np.uint32,
) -> tuple[np.float32, np.float32]:
    """All of one block of at most 256 elements; returns its new scales."""
    size = weight.size
    m, v, root = scratch[:size], scratch[QUANTUM : QUANTUM + size], scratch[2 * QUANTUM : 2 * QUANTUM + size]
    largest, largest_sq = _new_moments(grad, exp_avg, exp_avg_sq, scale, sq_scale, m, v, root, c)
    _move_masters(weight, remainder, m, root, c)
    if largest >= _INF or largest_sq > _LARGEST_SQ:
        largest, largest_sq = _without_non_finite(m, v)
    scale, inverse = _scale(largest)
    # the largest may be rounded up by one
    first = max(np.int32(np.int32(largest_sq >> _20) + np.int32(1) - _SQ_CODES), np.int32(0))
    _round_exp_avg(m, inverse, exp_avg, TABLE, shared)
    _round_exp_avg_sq(v, first, exp_avg_sq, TABLE, shared)
    return scale, float32_from_bits(np.uint32(np.uint32(first) << _20))


@kernel
def split_int8(
    blocks: Blocks,
    weight: Uint16Array,
    remainder: Uint16Array,
    grad: Uint16Array | Float32Array,
    exp_avg: Int8Array,
    exp_avg_sq: Uint8Array,
    exp_avg_scales: Float32Array,
    exp_avg_sq_scales: Float32Array,
    pieces: Pieces,
) -> None:
    arrays = weight, remainder, grad, exp_avg, exp_avg_sq, exp_avg_scales, exp_avg_sq_scales, pieces
    weight, remainder, grad, exp_avg, exp_avg_sq, exp_avg_scales, exp_avg_sq_scales, pieces = borrowed(arrays)
    for piece in claimed(blocks):
        start, stop, segment, scale = pieces.bounds[piece]
        c = coefficients_of(pieces.coefficients[segment])
        key = np.uint32(pieces.keys[segment])
        scratch = np.empty(3 * QUANTUM, np.float32)
        for block in range((stop - start + QUANTUM - 1) // QUANTUM):
            lo = start + block * QUANTUM
            hi = min(lo + QUANTUM, stop)
            exp_avg_scales[scale + block], exp_avg_sq_scales[scale + block] = _update_block(
                weight[lo:hi],
                remainder[lo:hi],
                grad[lo:hi],
                exp_avg[lo:hi],
                exp_avg_sq[lo:hi],
                exp_avg_scales[scale + block],
                exp_avg_sq_scales[scale + block],
                scratch,
                c,
                draw(np.uint32(lo), key),
            )
