"""[Note: pairs] Arrays of 16-bit elements are updated two elements at a time, read and written as one uint32.

Each store that narrows sixteen 32-bit lanes to 16 bits costs AVX-512 several cycles (Zen 4: 0.07 ns for each
element); shifting two results into one lane costs next to nothing. With four such arrays, weight, remainder
and both moments, that is a quarter of the time. The element with the even index is the lower half, on any
little-endian machine.

An odd last element is copied out to buffers with a neighbour of zero bits, updated there, and copied back.

Numba widens uint32 arithmetic to 64 bits, hence the cast after every operation.
"""

import sys

import numpy as np

from streamer_native._arrays import Uint16Array, Uint32Array
from streamer_native._compile import inline
from streamer_native._llvm import float32_from_bits

if sys.byteorder != "little":
    raise ImportError("streamer_native needs a little-endian machine: see [Note: pairs] in _pairs.py")


@inline
def pair_of(even: np.uint32, odd: np.uint32) -> np.uint32:
    """Two elements of 16 bits each as one."""
    return np.uint32(even | np.uint32(odd << np.uint32(16)))


@inline
def even_of(pair: np.uint32) -> np.float32:
    """Of a pair of bfloat16, the element with the even index, widened."""
    return float32_from_bits(np.uint32(pair << np.uint32(16)))


@inline
def odd_of(pair: np.uint32) -> np.float32:
    """Of a pair of bfloat16, the element with the odd index, widened."""
    return float32_from_bits(np.uint32(pair & np.uint32(0xFFFF0000)))


@inline
def join_even(weights: np.uint32, remainders: np.uint32) -> np.uint32:
    """Weight and remainder of the even element as `t` of [Note: split master]."""
    return np.uint32(np.uint32(weights << np.uint32(16)) | np.uint32(remainders & np.uint32(0xFFFF)))


@inline
def join_odd(weights: np.uint32, remainders: np.uint32) -> np.uint32:
    """Weight and remainder of the odd element as `t` of [Note: split master]."""
    return np.uint32(np.uint32(weights & np.uint32(0xFFFF0000)) | np.uint32(remainders >> np.uint32(16)))


@inline
def pairs(array: Uint16Array) -> Uint32Array:
    """An array of 16-bit elements, an even number of them, as pairs; it may begin at any element."""
    return array.view(np.uint32)
