"""The segments of one launch: the updated elements of a unit's flat arrays, and their hyperparameters.

Parameters of several groups, and parameters without a gradient, are adjacent in the arrays of a unit. A
kernel takes them as pieces of at most `BLOCK` elements, each with the row of coefficients of its segment. So
one launch divides all of them among the threads, and elements between segments are neither read nor written.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from streamer_native._arrays import Float32Array, Int64Array
from streamer_native._compile import BLOCK, inline
from streamer_native._rounding import key

#: Elements that share a scale if moments have 8 bits.
QUANTUM = 256


class Hyper(NamedTuple):
    """Hyperparameters of one update; `step` counts from 1."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int


class Segment(NamedTuple):
    """Elements `start` to `stop` (exclusive) of the flat arrays, and the hyperparameters of their update.

    `first_scale` matters to 8-bit moments only: the blocks of 256 elements are counted from `start`, and
    block k of the segment has its scales at `first_scale + k`. There a segment is always the same parameter,
    from its first element, independent of the other updates at that step.
    """

    start: int
    stop: int
    hyper: Hyper
    first_scale: int = 0


class Coefficients(NamedTuple):
    """The factors of one step, the same for all of a segment: computed in float64, then rounded once."""

    decay: np.float32  # lr * weight_decay
    one_minus_beta1: np.float32
    beta2: np.float32
    one_minus_beta2: np.float32
    root_correction: np.float32  # 1 / sqrt(1 - beta2 ** step)
    eps: np.float32
    step_size: np.float32  # lr / (1 - beta1 ** step)
    grad_scale: np.float32


class Pieces(NamedTuple):
    """The pieces that a kernel divides among its threads."""

    bounds: (
        Int64Array  # [pieces, 4]: first element, element after the last, segment, index of the first scale
    )
    coefficients: Float32Array  # [segments, 8]: the fields of Coefficients
    keys: Int64Array  # [segments]: a hash of (seed, step) in 32 bits


@inline
def coefficients_of(row: Float32Array) -> Coefficients:
    """The coefficients of one segment, inside a kernel."""
    return Coefficients(row[0], row[1], row[2], row[3], row[4], row[5], row[6], row[7])


def pieces_of(
    segments: Sequence[Segment], size: int, grad_scale: float, seed: int = 0, origin: int = 0
) -> Pieces:
    """Cut `segments` of arrays of `size` elements into pieces. The arrays begin at element `origin` of longer
    ones, and draw the random bits of those.

    Raises ValueError if a segment leaves the arrays, overlaps another, or has a hyperparameter out of range.
    """
    previous_stop = 0
    for segment in sorted(segments):
        if not previous_stop <= segment.start <= segment.stop <= size:
            raise ValueError(
                f"segment {segment.start} to {segment.stop} must lie within the {size} elements of the "
                f"arrays and begin at or after {previous_stop}, where the segment before it stops"
            )
        previous_stop = segment.stop
    bounds = [
        (lo, min(lo + BLOCK, segment.stop), number, segment.first_scale + (lo - segment.start) // QUANTUM)
        for number, segment in enumerate(segments)
        for lo in range(segment.start, segment.stop, BLOCK)
    ]
    rows = [_coefficients(segment.hyper, grad_scale) for segment in segments]
    # a run draws from its first element plus the key
    keys = [(key(seed, segment.hyper.step) + origin) & 0xFFFFFFFF for segment in segments]
    return Pieces(
        np.array(bounds, np.int64).reshape(-1, 4),
        np.array(rows, np.float32).reshape(-1, len(Coefficients._fields)),
        np.array(keys, np.int64),
    )


def check_scales(segments: Sequence[Segment], num_scales: int) -> None:
    """Raise ValueError if the scales of a segment leave their array, or belong to another segment too."""
    previous_stop = 0
    for segment in sorted(segments, key=lambda segment: segment.first_scale):
        if segment.start == segment.stop:
            continue
        stop = segment.first_scale + -(-(segment.stop - segment.start) // QUANTUM)
        if not previous_stop <= segment.first_scale <= stop <= num_scales:
            raise ValueError(
                f"segment {segment.start} to {segment.stop} has scales {segment.first_scale} to {stop}; they "
                f"must lie within the {num_scales} there are and begin at or after {previous_stop}, where "
                f"those of the segment before it stop: one for every {QUANTUM} elements begun"
            )
        previous_stop = stop


def _coefficients(hyper: Hyper, grad_scale: float) -> tuple[float, ...]:
    lr, beta1, beta2, eps, weight_decay, step = hyper
    if step < 1:
        raise ValueError(f"step={step} must count from 1: increase it before the update, not after")
    for name, beta in (("beta1", beta1), ("beta2", beta2)):
        if not 0.0 <= beta < 1.0:
            raise ValueError(f"{name}={beta} must lie in [0, 1); the usual value is 0.9 to 0.999")
    for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
        if not 0.0 <= value < math.inf:
            raise ValueError(f"{name}={value} must be finite and not negative")
    # in the order of `Coefficients`, rounded by the conversion to an array
    return (
        lr * weight_decay,
        1.0 - beta1,
        beta2,
        1.0 - beta2,
        1.0 / math.sqrt(1.0 - beta2**step),
        eps,
        lr / (1.0 - beta1**step),
        grad_scale,
    )
