"""Random bits for stochastic rounding, a function of the rounded elements and not of earlier calls.

The bits of an element are those of a fixed table at its place in its run of `RUN` elements, xored with a hash
of (seed, step, first element of the run): a counter-based generator (Salmon et al., Parallel random numbers:
as easy as 1, 2, 3, SC 2011) with one draw for each run. Over the steps, and over the runs, each element's
bits are uniform and independent, as an unbiased moment needs; two elements of one run are correlated. A hash
for each element would cost as much as the update itself. Nothing depends on the number of threads or on
earlier calls, and a resumed run draws the same bits again.

Numba widens uint32 arithmetic to 64 bits, hence the cast after every operation.
"""

import numpy as np

from streamer_native._compile import inline
from streamer_native._llvm import float32_bits

#: Elements that share a draw, two to an entry of the table (4 KB).
RUN = 2048

_MASK = (1 << 64) - 1


def key(seed: int, step: int) -> int:
    """A hash of (seed, step) in 32 bits: each 64-bit half goes through the mixer of splitmix64.

    (Steele, Lea & Flood, Fast splittable pseudorandom number generators, OOPSLA 2014.)
    """
    mixed = 0
    for value in (seed, step):
        mixed = (mixed + value + 0x9E3779B97F4A7C15) & _MASK
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
        mixed ^= mixed >> 31
    return mixed >> 32


@inline
def draw(first: np.uint32, key: np.uint32) -> np.uint32:
    """The 32 random bits that a run shares at one step.

    The least biased known finaliser with two multiplications (C. Wellons, hash-prospector: lowbias32).
    """
    x = np.uint32(first + key)
    x = np.uint32(x ^ np.uint32(x >> np.uint32(16)))
    x = np.uint32(x * np.uint32(0x7FEB352D))
    x = np.uint32(x ^ np.uint32(x >> np.uint32(15)))
    x = np.uint32(x * np.uint32(0x846CA68B))
    return np.uint32(x ^ np.uint32(x >> np.uint32(16)))


@inline
def narrow_randomly(value: np.float32, random: np.uint32) -> np.uint16:
    """One of the two bfloat16 around a float32, as bits: the farther the rarer, so the mean is `value`.

    `random` are 32 random bits, of which the lower 16 are used. Any NaN becomes 0x7fc0, Inf stays.
    """
    raised = np.uint32(float32_bits(value) + np.uint32(random & np.uint32(0xFFFF)))
    return np.uint16(0x7FC0) if value != value else np.uint16(raised >> np.uint32(16))


#: The bits by place in the run, 16 for an element; any uniform bits will do, such as splitmix64's.
TABLE = np.array([key(place, RUN) for place in range(RUN // 2)], np.uint32)
