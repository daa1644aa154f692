"""The kernel of AdamW on a split master with bfloat16 moments. `adam.py` has the contract."""

import numpy as np

from streamer_native._arrays import Float32Array, Uint16Array, Uint32Array
from streamer_native._compile import inline, kernel
from streamer_native._kernels_adam import update
from streamer_native._llvm import to_float32
from streamer_native._pairs import even_of, join_even, join_odd, odd_of, pair_of, pairs
from streamer_native._rounding import RUN, TABLE, draw, narrow_randomly
from streamer_native._threads import Blocks, borrowed, claimed
from streamer_native.bfloat16 import master_of, narrow_to_even, split_bits
from streamer_native.segments import Coefficients, Pieces, coefficients_of

_16 = np.uint32(16)


@inline
def _update_pairs(
    weight: Uint32Array,
    remainder: Uint32Array,
    grad: Uint16Array | Float32Array,
    exp_avg: Uint32Array,
    exp_avg_sq: Uint32Array,
    c: Coefficients,
    shared: np.uint32,
) -> None:
    for i in range(weight.size):
        master0, m0, v0 = update(
            master_of(join_even(weight[i], remainder[i])),
            to_float32(grad[2 * i]),
            even_of(exp_avg[i]),
            even_of(exp_avg_sq[i]),
            c,
        )
        master1, m1, v1 = update(
            master_of(join_odd(weight[i], remainder[i])),
            to_float32(grad[2 * i + 1]),
            odd_of(exp_avg[i]),
            odd_of(exp_avg_sq[i]),
            c,
        )
        exp_avg[i] = pair_of(np.uint32(narrow_to_even(m0)), np.uint32(narrow_to_even(m1)))
        random = np.uint32(TABLE[i] ^ shared)
        exp_avg_sq[i] = pair_of(
            np.uint32(narrow_randomly(v0, random)),
            np.uint32(narrow_randomly(v1, np.uint32(random >> _16))),
        )
        both0, both1 = split_bits(master0), split_bits(master1)
        weight[i] = pair_of(np.uint32(both0 >> _16), np.uint32(both1 >> _16))
        remainder[i] = pair_of(np.uint32(both0 & np.uint32(0xFFFF)), np.uint32(both1 & np.uint32(0xFFFF)))


@inline
def _update_last(
    weight: Uint16Array,
    remainder: Uint16Array,
    grad: Uint16Array | Float32Array,
    exp_avg: Uint16Array,
    exp_avg_sq: Uint16Array,
    c: Coefficients,
    shared: np.uint32,
) -> None:
    """Arrays of one element each: see [Note: pairs]."""
    both = np.zeros((4, 2), np.uint16)
    gradients = np.zeros(2, grad.dtype)
    both[0, 0], both[1, 0], both[2, 0], both[3, 0] = weight[0], remainder[0], exp_avg[0], exp_avg_sq[0]
    gradients[0] = grad[0]
    _update_pairs(pairs(both[0]), pairs(both[1]), gradients, pairs(both[2]), pairs(both[3]), c, shared)
    weight[0], remainder[0], exp_avg[0], exp_avg_sq[0] = both[0, 0], both[1, 0], both[2, 0], both[3, 0]


@kernel
def split_bf16(
    blocks: Blocks,
    weight: Uint16Array,
    remainder: Uint16Array,
    grad: Uint16Array | Float32Array,
    exp_avg: Uint16Array,
    exp_avg_sq: Uint16Array,
    pieces: Pieces,
) -> None:
    arrays = weight, remainder, grad, exp_avg, exp_avg_sq, pieces
    weight, remainder, grad, exp_avg, exp_avg_sq, pieces = borrowed(arrays)
    for piece in claimed(blocks):
        start, stop, segment, _ = pieces.bounds[piece]
        c = coefficients_of(pieces.coefficients[segment])
        key = np.uint32(pieces.keys[segment])
        even_stop = stop - (stop - start) % 2
        for lo in range(start, even_stop, RUN):
            hi = min(lo + RUN, even_stop)
            _update_pairs(
                pairs(weight[lo:hi]),
                pairs(remainder[lo:hi]),
                grad[lo:hi],
                pairs(exp_avg[lo:hi]),
                pairs(exp_avg_sq[lo:hi]),
                c,
                draw(np.uint32(lo), key),
            )
        if even_stop < stop:
            _update_last(
                weight[even_stop:stop],
                remainder[even_stop:stop],
                grad[even_stop:stop],
                exp_avg[even_stop:stop],
                exp_avg_sq[even_stop:stop],
                c,
                draw(np.uint32(even_stop), key),
            )
