"""bfloat16 as the upper half of float32, and the split master: both as bit operations.

[Note: split master] The fp32 master is kept as the bf16 weight that is streamed and the 16 bits that rounding
lost. With `t = master_bits + 0x8000 (mod 2^32)`, weight = `t >> 16` and remainder = `t & 0xffff`; back,
`master_bits = ((weight << 16) | remainder) - 0x8000 (mod 2^32)`. Adding half of the last place before cutting
rounds to nearest, ties away from zero; every one of the 2^32 patterns comes back, so nothing is approximated.
The one surprise is an unusual NaN: from 0x7fff8000 up (with either sign) its weight wraps to a zero of the
other sign, below 0x7f808000 it is cut to Inf, and whoever looks at weights alone would not see the NaN.
`adam.py` never leaves such a one in a master.

Numba widens uint32 arithmetic to 64 bits, hence the cast after every operation.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from streamer_native._arrays import BFLOAT16, FLOAT32, Float32Array, Uint16Array, check
from streamer_native._compile import BLOCK, inline, kernel
from streamer_native._llvm import float32_bits, float32_from_bits, narrow_half
from streamer_native._threads import Blocks, borrowed, claimed, num_blocks, share_out


@inline
def narrow_to_even(value: np.float32) -> np.uint16:
    """The bfloat16 bits nearest to a float32, ties to even, as PyTorch casts; any NaN becomes 0x7fc0."""
    bits = float32_bits(value)
    last_kept = np.uint32(np.uint32(bits >> np.uint32(16)) & np.uint32(1))
    rounded = np.uint32(bits + np.uint32(np.uint32(0x7FFF) + last_kept))
    # A NaN whose payload lies in the lower half would be cut to Inf, or carried into the sign.
    return np.uint16(0x7FC0) if value != value else np.uint16(rounded >> np.uint32(16))


def narrow_like(value: np.float32, like: np.float32 | np.uint16 | np.int16) -> Any:
    """In a kernel: `value` in the dtype of `like`, the inverse of `to_float32`; ties to even."""
    raise NotImplementedError("only for compiled code")


@overload(narrow_like, strict=False)  # strictly, even the annotations would have to be the same
def _narrow_like(value: Any, like: Any) -> Callable[..., Any]:
    if like == types.float32:
        return lambda value, like: value
    if like == types.int16:
        return lambda value, like: narrow_half(value)
    return lambda value, like: narrow_to_even(value)


@inline
def split_bits(master: np.float32) -> np.uint32:
    """`t` of [Note: split master]: the weight in the upper 16 bits, the remainder in the lower."""
    return np.uint32(float32_bits(master) + np.uint32(0x8000))


@inline
def join_bits(weight: np.uint16, remainder: np.uint16) -> np.float32:
    """The fp32 master of [Note: split master]."""
    both = np.uint32(np.uint32(np.uint32(weight) << np.uint32(16)) | np.uint32(remainder))
    return float32_from_bits(np.uint32(both - np.uint32(0x8000)))


@inline
def _split_block(master: Float32Array, weight: Uint16Array, remainder: Uint16Array) -> None:
    for i in range(master.size):
        both = split_bits(master[i])
        weight[i] = np.uint16(both >> np.uint32(16))
        remainder[i] = np.uint16(both & np.uint32(0xFFFF))


@kernel
def _split(blocks: Blocks, master: Float32Array, weight: Uint16Array, remainder: Uint16Array) -> None:
    master, weight, remainder = borrowed((master, weight, remainder))
    for block in claimed(blocks):
        lo, hi = block * BLOCK, (block + 1) * BLOCK
        _split_block(master[lo:hi], weight[lo:hi], remainder[lo:hi])


@inline
def _join_block(weight: Uint16Array, remainder: Uint16Array, master: Float32Array) -> None:
    for i in range(master.size):
        master[i] = join_bits(weight[i], remainder[i])


@kernel
def _join(blocks: Blocks, weight: Uint16Array, remainder: Uint16Array, master: Float32Array) -> None:
    weight, remainder, master = borrowed((weight, remainder, master))
    for block in claimed(blocks):
        lo, hi = block * BLOCK, (block + 1) * BLOCK
        _join_block(weight[lo:hi], remainder[lo:hi], master[lo:hi])


def split(master: Float32Array, weight: Uint16Array, remainder: Uint16Array) -> None:
    """Split an fp32 master into the bf16 weight that is streamed and the 16 bits that rounding lost.

    `master` [n] float32 is read; `weight` [n] and `remainder` [n], both uint16, are written. The weight is
    the master rounded to bfloat16, nearest, ties away from zero; `join` gives every pattern back exactly, NaN
    and Inf included. See [Note: split master] at the head of this file.

    Raises TypeError or ValueError, naming the remedy, if the arrays do not fit this contract.
    """
    size = check("master", master, FLOAT32)
    check("weight", weight, BFLOAT16, size=size, written=True)
    check("remainder", remainder, BFLOAT16, size=size, written=True)
    share_out(_split, num_blocks(size), master, weight, remainder)


def join(weight: Uint16Array, remainder: Uint16Array, master: Float32Array) -> None:
    """Put the fp32 master together again: the inverse of `split`, exact for every bit pattern.

    `weight` [n] and `remainder` [n], both uint16, are read; `master` [n] float32 is written.

    Raises TypeError or ValueError, naming the remedy, if the arrays do not fit this contract.
    """
    size = check("weight", weight, BFLOAT16)
    check("remainder", remainder, BFLOAT16, size=size)
    check("master", master, FLOAT32, size=size, written=True)
    share_out(_join, num_blocks(size), weight, remainder, master)
