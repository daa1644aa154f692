"""Clipping by the global norm of all gradients of a wrapped model."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import nn

import streamer_native as native
from streamer.engine import op as ops
from streamer.engine.executor import Executor
from streamer.engine.unit import Unit
from streamer.handle import wrapped
from streamer.memory.host import array


def clip_grad_norm_(model: nn.Module, max_norm: float, *, error_if_nonfinite: bool = False) -> torch.Tensor:
    """Clip the gradients of a wrapped model so that their 2-norm is at most ``max_norm``.

    Returns the norm before clipping as an fp32 scalar on the CPU, as
    `torch.nn.utils.clip_grad_norm_` does. The gradients themselves are not rewritten: the coefficient
    ``max_norm / (norm + 1e-6)``, where it is below 1, is applied by the next `AdamW.step`, in the pass that
    reads them anyway.

    Raises RuntimeError for a norm that is NaN or infinite if ``error_if_nonfinite``, and ValueError for a
    model that is not wrapped.
    """
    executor = wrapped(model).executor
    norm = math.sqrt(_sum_squares(executor)) * executor.gradients.scale
    if error_if_nonfinite and not math.isfinite(norm):
        raise RuntimeError(
            f"the norm of the gradients is {norm}: look for the first layer whose gradient is not finite, "
            "or pass error_if_nonfinite=False"
        )
    coefficient = max_norm / (norm + 1e-6)
    # a norm that is not a number must not be hidden by min()
    executor.gradients.scale *= coefficient if not coefficient >= 1 else 1.0
    return torch.tensor(norm, dtype=torch.float32)


def _sum_squares(executor: Executor) -> float:
    totals: dict[int, float] = {}

    def take(unit: Unit, gradients: list[torch.Tensor]) -> None:
        totals[unit.index] = sum(_sum_squares_of(gradient) for gradient in gradients)

    for unit in executor.units:
        executor.gradients.adopt(unit)
        gradients = [param.grad for param in unit.params if param.grad is not None]
        if gradients:
            nbytes = sum(gradient.nbytes for gradient in gradients)
            executor.issuer.issue(ops.norm(unit.index, nbytes), partial(take, unit, gradients))
    root = [param.grad for param in executor.root.params if param.grad is not None]
    norms = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in root]
    executor.issuer.wait(ops.squares(unit.index) for unit in executor.units)
    return math.fsum(totals.values()) + math.fsum(float(norm) ** 2 for norm in norms)


def _sum_squares_of(gradient: torch.Tensor) -> float:
    return native.sum_squares(array(gradient.float() if gradient.dtype == torch.float16 else gradient))
