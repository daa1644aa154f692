"""Rules with one value of state per element: SGD with momentum, Lion, RMSprop and Adagrad. Each is one fused
pass over host memory.

- `sgd`: as `torch.optim.SGD` (Sutskever et al., On the importance of initialization and momentum in deep
  learning, ICML 2013). ``grad += weight_decay * master``; ``momentum = momentum * decay + grad * gain``; then
  ``grad`` (with ``nesterov``, ``grad + momentum * decay``, else ``momentum``) times ``lr`` is subtracted from
  the master.
- `lion`: Algorithm 2 of Chen et al., Symbolic Discovery of Optimization Algorithms (NeurIPS 2023).
- `rms`: as `torch.optim.RMSprop` (Hinton, Neural Networks for Machine Learning, lecture 6, 2012) and
  `torch.optim.Adagrad` (Duchi et al., JMLR 2011). ``grad += weight_decay * master``; ``squares = squares *
  decay + grad ** 2 * gain``; then ``lr * grad / (sqrt(squares) + eps)`` is subtracted from the master.

Operations and their order are those of the PyTorch code, multiply-adds fused as in PyTorch's vector code.

A master is a float32 array; or the bfloat16 `weight` and the `remainder` of `bfloat16.split`, uint16 arrays;
or a float16 `weight` and its float32 master. All arrays are flat, [n]. The gradient is in the dtype of the
weight or float32; it is widened and multiplied by `grad_scale` first. Raises TypeError or ValueError, naming
the remedy, if arrays break this contract.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from streamer_native._arrays import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    Float16Array,
    Float32Array,
    Int16Array,
    Uint16Array,
    check,
    for_kernel,
)
from streamer_native._compile import BLOCK, inline, kernel
from streamer_native._llvm import float32_from_bits, fused_multiply_add, narrow_half, to_float32
from streamer_native._threads import Blocks, borrowed, claimed, num_blocks, share_out
from streamer_native.bfloat16 import join_bits, split_bits

SGD, LION, RMS = range(3)


class Rates(NamedTuple):
    """The factors of one step, the same for all elements. Lion: `gain` is 1 - beta2, `decay` beta2. In `rms`
    they are those of the squares."""

    lr: np.float32
    weight_decay: np.float32  # Lion: 1 - lr * weight_decay
    decay: np.float32  # of the momentum
    gain: np.float32  # of the gradient in the momentum
    ahead: np.float32  # SGD: the momentum's share with Nesterov, else -1; Lion: beta1; rms: eps
    grad_scale: np.float32


@inline
def _plain_nan(master: np.float32) -> np.float32:
    # see `_kernels_adam.moved`
    return float32_from_bits(np.uint32(0x7FC00000)) if master != master else master


@inline
def _sgd(
    master: np.float32, grad: np.float32, momentum: np.float32, r: Rates
) -> tuple[np.float32, np.float32]:
    grad = fused_multiply_add(master, r.weight_decay, grad * r.grad_scale)
    momentum = fused_multiply_add(grad, r.gain, momentum * r.decay)
    step = momentum if r.ahead < np.float32(0) else fused_multiply_add(momentum, r.ahead, grad)
    return _plain_nan(fused_multiply_add(step, -r.lr, master)), momentum


@inline
def _lion(
    master: np.float32, grad: np.float32, momentum: np.float32, r: Rates
) -> tuple[np.float32, np.float32]:
    grad = grad * r.grad_scale
    mixed = fused_multiply_add(grad, np.float32(1) - r.ahead, momentum * r.ahead)
    sign = np.float32(0) if mixed == np.float32(0) else np.copysign(np.float32(1), mixed)
    sign = mixed if mixed != mixed else sign
    master = fused_multiply_add(sign, -r.lr, master * r.weight_decay)
    return _plain_nan(master), fused_multiply_add(grad, r.gain, momentum * r.decay)


@inline
def _rms(
    master: np.float32, grad: np.float32, squares: np.float32, r: Rates
) -> tuple[np.float32, np.float32]:
    grad = fused_multiply_add(master, r.weight_decay, grad * r.grad_scale)
    squares = fused_multiply_add(grad * r.gain, grad, squares * r.decay)
    return _plain_nan(master + grad * -r.lr / (np.sqrt(squares) + r.ahead)), squares


@inline
def _step(
    rule: int, master: np.float32, grad: np.float32, state: np.float32, r: Rates
) -> tuple[np.float32, np.float32]:
    if rule == SGD:
        return _sgd(master, grad, state, r)
    return _lion(master, grad, state, r) if rule == LION else _rms(master, grad, state, r)


@inline
def _step_fp32(rule: int, master: Float32Array, grad: Any, state: Float32Array, r: Rates) -> None:
    for i in range(master.size):
        master[i], state[i] = _step(rule, master[i], to_float32(grad[i]), state[i], r)


@inline
def _step_split(
    rule: int, weight: Uint16Array, remainder: Uint16Array, grad: Any, state: Float32Array, r: Rates
) -> None:
    for i in range(weight.size):
        master, state[i] = _step(rule, join_bits(weight[i], remainder[i]), to_float32(grad[i]), state[i], r)
        both = split_bits(master)
        weight[i], remainder[i] = np.uint16(both >> np.uint32(16)), np.uint16(both & np.uint32(0xFFFF))


@inline
def _from_weights(weight: Int16Array, master: Float32Array) -> None:
    for i in range(master.size):
        # a weight that differs from its rounded master was written since the last update: it is the master
        master[i] = master[i] if narrow_half(master[i]) == weight[i] else to_float32(weight[i])


@inline
def _to_weights(weight: Int16Array, master: Float32Array) -> None:
    for i in range(master.size):
        weight[i] = narrow_half(master[i])


# each rule is a constant in a call of its own, so that the loop has no branch


@inline
def _any_fp32(rule: int, master: Float32Array, grad: Any, state: Float32Array, r: Rates) -> None:
    if rule == SGD:
        _step_fp32(SGD, master, grad, state, r)
    elif rule == LION:
        _step_fp32(LION, master, grad, state, r)
    else:
        _step_fp32(RMS, master, grad, state, r)


@kernel
def _fp32(blocks: Blocks, master: Float32Array, grad: Any, state: Float32Array, r: Rates, rule: int) -> None:
    master, grad, state = borrowed((master, grad, state))
    for block in claimed(blocks):
        lo, hi = block * BLOCK, (block + 1) * BLOCK
        _any_fp32(rule, master[lo:hi], grad[lo:hi], state[lo:hi], r)


@kernel
def _split(
    blocks: Blocks,
    weight: Uint16Array,
    remainder: Uint16Array,
    grad: Any,
    state: Float32Array,
    r: Rates,
    rule: int,
) -> None:
    weight, remainder, grad, state = borrowed((weight, remainder, grad, state))
    for block in claimed(blocks):
        lo, hi = block * BLOCK, (block + 1) * BLOCK
        if rule == SGD:
            _step_split(SGD, weight[lo:hi], remainder[lo:hi], grad[lo:hi], state[lo:hi], r)
        elif rule == LION:
            _step_split(LION, weight[lo:hi], remainder[lo:hi], grad[lo:hi], state[lo:hi], r)
        else:
            _step_split(RMS, weight[lo:hi], remainder[lo:hi], grad[lo:hi], state[lo:hi], r)


@kernel
def _fp16(
    blocks: Blocks,
    weight: Int16Array,
    master: Float32Array,
    grad: Any,
    state: Float32Array,
    r: Rates,
    rule: int,
) -> None:
    weight, master, grad, state = borrowed((weight, master, grad, state))
    for block in claimed(blocks):
        lo, hi = block * BLOCK, (block + 1) * BLOCK
        _from_weights(weight[lo:hi], master[lo:hi])
        _any_fp32(rule, master[lo:hi], grad[lo:hi], state[lo:hi], r)
        _to_weights(weight[lo:hi], master[lo:hi])


def sgd(
    weight: Float32Array | Uint16Array | Float16Array,
    master_data: Uint16Array | Float32Array | None,
    grad: Float32Array | Uint16Array | Float16Array,
    momentum: Float32Array,
    *,
    lr: float,
    weight_decay: float,
    decay: float,
    gain: float,
    nesterov: bool,
    grad_scale: float = 1.0,
) -> None:
    """One step of SGD with momentum in place. `master_data` is the remainder, or the master, of a 16-bit
    `weight`; None for a float32 master. `decay` is the share of the old momentum and `gain` the gradient's, 0
    and 1 in the first step. Traffic of a bfloat16 weight: 18 bytes per parameter.
    """
    ahead = decay if nesterov else -1.0
    rates = lr, weight_decay, decay, gain, ahead, grad_scale
    _launch(SGD, weight, master_data, grad, ("momentum", momentum), rates)


def lion(
    weight: Float32Array | Uint16Array | Float16Array,
    master_data: Uint16Array | Float32Array | None,
    grad: Float32Array | Uint16Array | Float16Array,
    momentum: Float32Array,
    *,
    lr: float,
    weight_decay: float,
    beta1: float,
    beta2: float,
    grad_scale: float = 1.0,
) -> None:
    """One step of Lion in place; arrays as in `sgd`."""
    rates = lr, 1 - lr * weight_decay, beta2, 1 - beta2, beta1, grad_scale
    _launch(LION, weight, master_data, grad, ("momentum", momentum), rates)


def rms(
    weight: Float32Array | Uint16Array | Float16Array,
    master_data: Uint16Array | Float32Array | None,
    grad: Float32Array | Uint16Array | Float16Array,
    squares: Float32Array,
    *,
    lr: float,
    weight_decay: float,
    decay: float,
    gain: float,
    eps: float,
    grad_scale: float = 1.0,
) -> None:
    """One step of RMSprop in place, of Adagrad with a `decay` and a `gain` of 1; other arrays as in `sgd`."""
    rates = lr, weight_decay, decay, gain, eps, grad_scale
    _launch(RMS, weight, master_data, grad, ("squares", squares), rates)


def _launch(
    rule: int,
    weight: Any,
    master_data: Any,
    grad: Any,
    state: tuple[str, Float32Array],
    rates: tuple[float, ...],
) -> None:
    size = check("weight", weight, FLOAT32, BFLOAT16, FLOAT16, written=True)
    check("grad", grad, weight.dtype, FLOAT32, size=size)
    check(*state, FLOAT32, size=size, written=True)
    arrays: tuple[Any, ...] = (weight, grad, state[1])
    launched: Callable[..., None] = _fp32
    if weight.dtype != FLOAT32:
        name, dtype = ("remainder", BFLOAT16) if weight.dtype == BFLOAT16 else ("master", FLOAT32)
        check(name, master_data, dtype, size=size, written=True)
        arrays = weight, master_data, grad, state[1]
        launched = _split if weight.dtype == BFLOAT16 else _fp16
    coefficients = Rates(*map(np.float32, rates))
    share_out(launched, num_blocks(size), *map(for_kernel, arrays), coefficients, rule)
