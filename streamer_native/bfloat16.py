"""bfloat16 as the upper half of float32, and the split master: both as bit operations.

[Note: split master] The fp32 master is stored as the streamed bf16 weight and the 16 bits that rounding lost.
With `t = master_bits + 0x8000 (mod 2^32)`, weight = `t >> 16` and remainder = `t & 0xffff`; back,
`master_bits = ((weight << 16) | remainder) - 0x8000 (mod 2^32)`. Adding half of the last place before cutting
rounds to nearest, ties away from zero. Every number is restored exactly, with two exceptions: a NaN is split
as the plain quiet one, 0x7fc00000 (others would be cut to Inf, or carried into a zero of the other sign), and
a master whose weight is zero, below 5e-41, is zero.

User code may write the weight between two uses. The remainder stays, so an element that is written and then
restored has its old master, and a new value is the master to half a unit in its last place. Half of the
remainders stand for masters below their weight, which a zero does not have: hence the second exception.

Numba widens uint32 arithmetic to 64 bits, hence the cast after every operation.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from streamer_native._arrays import BFLOAT16, FLOAT32, Float32Array, Uint16Array, check
from streamer_native._compile import BLOCK, inline, kernel
from streamer_native._llvm import float32_bits, float32_from_bits, narrow_half, to_float32
from streamer_native._threads import Blocks, borrowed, claimed, num_blocks, share_out


@inline
def narrow_to_even(value: np.float32) -> np.uint16:
    """The bfloat16 bits nearest to a float32, ties to even, as PyTorch casts; any NaN becomes 0x7fc0."""
    bits = float32_bits(value)
    last_kept = np.uint32(np.uint32(bits >> np.uint32(16)) & np.uint32(1))
    rounded = np.uint32(bits + np.uint32(np.uint32(0x7FFF) + last_kept))
    # A NaN whose payload is in the lower half would be cut to Inf, or carried into the sign.
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
def master_of(both: np.uint32) -> np.float32:
    """The fp32 master, from `t` of [Note: split master]."""
    sign = np.uint32(both & np.uint32(0x80000000))
    is_zero = np.uint32(both & np.uint32(0x7FFF0000)) == np.uint32(0)
    return float32_from_bits(sign if is_zero else np.uint32(both - np.uint32(0x8000)))


@inline
def join_bits(weight: np.uint16, remainder: np.uint16) -> np.float32:
    """The fp32 master of [Note: split master]."""
    return master_of(np.uint32(np.uint32(np.uint32(weight) << np.uint32(16)) | np.uint32(remainder)))


@inline
def _split_block(master: Float32Array, weight: Uint16Array, remainder: Uint16Array) -> None:
    for i in range(master.size):
        # any NaN but the plain one could become another value in the weight
        value = float32_from_bits(np.uint32(0x7FC00000)) if master[i] != master[i] else master[i]
        both = split_bits(value)
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
    """Split an fp32 master into the streamed bf16 weight and the 16 bits that rounding lost.

    `master` [n] float32 is read; `weight` [n] and `remainder` [n], both uint16, are written. The weight is
    the master rounded to bfloat16, nearest, ties away from zero; `join` restores the master exactly, except
    as in [Note: split master] at the head of this file.

    Raises TypeError or ValueError, naming the remedy, if the arrays break this contract.
    """
    size = check("master", master, FLOAT32)
    check("weight", weight, BFLOAT16, size=size, written=True)
    check("remainder", remainder, BFLOAT16, size=size, written=True)
    share_out(_split, num_blocks(size), master, weight, remainder)


def join(weight: Uint16Array, remainder: Uint16Array, master: Float32Array) -> None:
    """Join the fp32 master again: the inverse of `split`, exact except as in [Note: split master].

    `weight` [n] and `remainder` [n], both uint16, are read; `master` [n] float32 is written.

    Raises TypeError or ValueError, naming the remedy, if the arrays do not fit this contract.
    """
    size = check("weight", weight, BFLOAT16)
    check("remainder", remainder, BFLOAT16, size=size)
    check("master", master, FLOAT32, size=size, written=True)
    share_out(_join, num_blocks(size), weight, remainder, master)


@inline
def _widen_block(source: Uint16Array, into: Float32Array, scale: np.float32) -> None:
    for i in range(into.size):
        into[i] = to_float32(source[i]) * scale


@kernel
def _widen(blocks: Blocks, source: Uint16Array, into: Float32Array, scale: np.float32) -> None:
    source, into = borrowed((source, into))
    for block in claimed(blocks):
        lo, hi = block * BLOCK, (block + 1) * BLOCK
        _widen_block(source[lo:hi], into[lo:hi], scale)


def widen(source: Uint16Array, into: Float32Array, scale: float = 1.0) -> None:
    """Widen bfloat16 values to fp32 and multiply them by `scale`, in fp32.

    `source` [n] uint16 (bfloat16 bits) is read; `into` [n] float32 is written.

    Raises TypeError or ValueError, naming the remedy, if the arrays do not fit this contract.
    """
    size = check("into", into, FLOAT32, written=True)
    check("source", source, BFLOAT16, size=size)
    share_out(_widen, num_blocks(size), source, into, np.float32(scale))
