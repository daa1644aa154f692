"""Clipping by the global norm of all gradients of a wrapped model."""

from __future__ import annotations

import math

import torch
from torch import nn

from streamer.handle import wrapped


def clip_grad_norm_(model: nn.Module, max_norm: float, *, error_if_nonfinite: bool = False) -> torch.Tensor:
    """Clip the gradients of a wrapped model so that their 2-norm is at most ``max_norm``.

    Returns the norm before clipping as an fp32 scalar on the CPU, as
    `torch.nn.utils.clip_grad_norm_` does. The coefficient ``max_norm / (norm + 1e-6)``, where it is below
    1, is applied to layers by the next `AdamW.step`, in the pass that reads their gradients anyway, so that
    their ``p.grad`` shows them unclipped until then.

    Raises RuntimeError for a norm that is NaN or infinite if ``error_if_nonfinite``, and ValueError for a
    model that is not wrapped.
    """
    executor = wrapped(model).executor
    executor.gradients.adopt_all()
    norm = math.sqrt(executor.norms.total(executor.gradients.scale))
    if error_if_nonfinite and not math.isfinite(norm):
        raise RuntimeError(
            f"the norm of the gradients is {norm}: look for the first layer whose gradient is not finite, "
            "or pass error_if_nonfinite=False"
        )
    coefficient = max_norm / (norm + 1e-6)
    if not coefficient >= 1:  # so also where the norm is not a number
        executor.gradients.rescale(coefficient)
    return torch.tensor(norm, dtype=torch.float32)
