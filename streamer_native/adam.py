"""AdamW with decoupled weight decay on the host: one fused pass over memory per state layout.

The formula is Algorithm 2 of Loshchilov & Hutter, Decoupled Weight Decay Regularization (ICLR 2019), with
epsilon added after the bias correction, as `torch.optim.AdamW` does.

One step is written differently, for accuracy. `p *= 1 - lr * weight_decay` rounds that factor to fp32, whose
last place near 1 is 6e-8: at lr 1e-5 and weight_decay 0.1 the decay is 3% off, in the same direction at every
step. Here decay and update are added first, and the master is rounded once; over 1,000 steps that is 20 to 30
times nearer to float64 than PyTorch's fp32.

Contract of all functions: arrays are flat, [n]; only the elements of `segments` are read or written, and each
segment has its own hyperparameters. The gradient is widened and multiplied by `grad_scale` first. Arithmetic
is fp32 throughout, with fused multiply-adds. A NaN or Inf, in the gradient or in the master, results in a NaN
master. Raises TypeError or ValueError, naming the remedy, if arrays or segments break their contract. `seed`
(any integer) chooses the random bits of stochastic rounding: they depend only on it, the segment's step and
start, and the element's index. Arrays that are a part of longer ones, from element `origin` on, draw the bits
of the whole, if each segment begins a multiple of `BLOCK` elements after its start in the whole.
"""

from collections.abc import Sequence

from streamer_native import _kernels_adam as kernels
from streamer_native._arrays import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    INT8,
    UINT8,
    Float16Array,
    Float32Array,
    Int8Array,
    Uint8Array,
    Uint16Array,
    check,
    for_kernel,
)
from streamer_native._kernels_bf16 import split_bf16
from streamer_native._kernels_int8 import split_int8
from streamer_native._threads import share_out
from streamer_native.segments import Segment, check_scales, pieces_of


def adamw_fp32(
    master: Float32Array,
    grad: Float32Array,
    exp_avg: Float32Array,
    exp_avg_sq: Float32Array,
    segments: Sequence[Segment],
    *,
    grad_scale: float = 1.0,
) -> None:
    """One AdamW step on an fp32 master, in place.

    `master`, `exp_avg` and `exp_avg_sq`, [n] float32, are updated; `grad` [n] float32 is read.
    Held: 12 bytes per parameter besides the gradient. Traffic: 28 bytes.
    """
    size = check("master", master, FLOAT32, written=True)
    check("grad", grad, FLOAT32, size=size)
    check("exp_avg", exp_avg, FLOAT32, size=size, written=True)
    check("exp_avg_sq", exp_avg_sq, FLOAT32, size=size, written=True)
    pieces = pieces_of(segments, size, grad_scale)
    share_out(kernels.fp32, len(pieces.bounds), master, grad, exp_avg, exp_avg_sq, pieces)


def adamw_fp16(
    weight: Float16Array,
    master: Float32Array,
    grad: Float16Array | Float32Array,
    exp_avg: Float32Array,
    exp_avg_sq: Float32Array,
    segments: Sequence[Segment],
    *,
    grad_scale: float = 1.0,
) -> None:
    """One AdamW step on an fp32 master and its streamed fp16 weight, in place.

    `master`, `exp_avg` and `exp_avg_sq`, [n] float32, are updated as by `adamw_fp32`, bitwise; `weight` [n]
    float16 is read and written: the master rounded to nearest, ties to even, Inf beyond 65,504. A weight that
    differs from its rounded master was written by other code, and becomes the master. `grad` [n] is float16
    or float32, and is read.
    Held: 14 bytes per parameter besides the gradient. Traffic: 30 bytes, 32 with an fp32 gradient.
    """
    size = check("weight", weight, FLOAT16, written=True)
    check("master", master, FLOAT32, size=size, written=True)
    check("grad", grad, FLOAT16, FLOAT32, size=size)
    check("exp_avg", exp_avg, FLOAT32, size=size, written=True)
    check("exp_avg_sq", exp_avg_sq, FLOAT32, size=size, written=True)
    pieces = pieces_of(segments, size, grad_scale)
    half = for_kernel(weight), master, for_kernel(grad)
    share_out(kernels.fp16, len(pieces.bounds), *half, exp_avg, exp_avg_sq, pieces)


def adamw_split(
    weight: Uint16Array,
    remainder: Uint16Array,
    grad: Uint16Array | Float32Array,
    exp_avg: Float32Array,
    exp_avg_sq: Float32Array,
    segments: Sequence[Segment],
    *,
    grad_scale: float = 1.0,
) -> None:
    """One AdamW step on a split master, in place: bitwise equal to `adamw_fp32` on the joined master.

    `weight` [n] uint16 (bfloat16 bits) and `remainder` [n] uint16 together are the fp32 master (see
    `bfloat16.split`); they, `exp_avg` and `exp_avg_sq` ([n] float32) are updated. `grad` [n] is uint16
    (bfloat16 bits) or float32, and is read.
    Held: 12 bytes per parameter besides the gradient. Traffic: 26 bytes, 28 with an fp32 gradient.
    """
    size = _check_split(weight, remainder, grad)
    check("exp_avg", exp_avg, FLOAT32, size=size, written=True)
    check("exp_avg_sq", exp_avg_sq, FLOAT32, size=size, written=True)
    pieces = pieces_of(segments, size, grad_scale)
    share_out(kernels.split, len(pieces.bounds), weight, remainder, grad, exp_avg, exp_avg_sq, pieces)


def adamw_split_bf16(
    weight: Uint16Array,
    remainder: Uint16Array,
    grad: Uint16Array | Float32Array,
    exp_avg: Uint16Array,
    exp_avg_sq: Uint16Array,
    segments: Sequence[Segment],
    *,
    grad_scale: float = 1.0,
    seed: int = 0,
    origin: int = 0,
) -> None:
    """One AdamW step on a split master with bfloat16 moments, in place.

    As `adamw_split`, with `exp_avg` and `exp_avg_sq` [n] uint16 (bfloat16 bits). The update uses the new
    moments before they are rounded: the first to nearest, ties to even, the second with stochastic rounding.
    (Rounded to nearest, a second moment at beta2 = 0.999 could move by less than half its last place at a
    step, and would never change.) Held: 8 bytes per parameter besides the gradient. Traffic: 18 bytes, 20
    with an fp32 gradient.
    """
    size = _check_split(weight, remainder, grad)
    check("exp_avg", exp_avg, BFLOAT16, size=size, written=True)
    check("exp_avg_sq", exp_avg_sq, BFLOAT16, size=size, written=True)
    pieces = pieces_of(segments, size, grad_scale, seed, origin)
    share_out(split_bf16, len(pieces.bounds), weight, remainder, grad, exp_avg, exp_avg_sq, pieces)


def adamw_split_int8(
    weight: Uint16Array,
    remainder: Uint16Array,
    grad: Uint16Array | Float32Array,
    exp_avg: Int8Array,
    exp_avg_sq: Uint8Array,
    exp_avg_scales: Float32Array,
    exp_avg_sq_scales: Float32Array,
    segments: Sequence[Segment],
    *,
    grad_scale: float = 1.0,
    seed: int = 0,
    origin: int = 0,
) -> None:
    """One AdamW step on a split master with 8-bit moments in blocks of 256, in place.

    As `adamw_split`, with the codes `exp_avg` [n] int8 and `exp_avg_sq` [n] uint8, and the scales of both
    [number of blocks] float32 (their meaning: [Note: 8-bit moments]). All are zero at first. Blocks are
    counted from the start of each segment, the last may be short, and `Segment.first_scale` is the index of
    the segment's first scale. The update uses the new moments before they are rounded.
    Held: 6.03 bytes per parameter besides the gradient. Traffic: 14 bytes, 16 with an fp32 gradient.
    """
    size = _check_split(weight, remainder, grad)
    check("exp_avg", exp_avg, INT8, size=size, written=True)
    check("exp_avg_sq", exp_avg_sq, UINT8, size=size, written=True)
    scales = check("exp_avg_scales", exp_avg_scales, FLOAT32, written=True)
    check("exp_avg_sq_scales", exp_avg_sq_scales, FLOAT32, size=scales, written=True)
    check_scales(segments, scales)
    pieces = pieces_of(segments, size, grad_scale, seed, origin)
    state = exp_avg, exp_avg_sq, exp_avg_scales, exp_avg_sq_scales
    share_out(split_int8, len(pieces.bounds), weight, remainder, grad, *state, pieces)


def _check_split(weight: Uint16Array, remainder: Uint16Array, grad: Uint16Array | Float32Array) -> int:
    size = check("weight", weight, BFLOAT16, written=True)
    check("remainder", remainder, BFLOAT16, size=size, written=True)
    check("grad", grad, BFLOAT16, FLOAT32, size=size)
    return size
