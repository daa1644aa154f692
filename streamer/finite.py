"""Whether a step is made: not with gradients that are NaN or infinite."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence

import torch

from streamer.engine.executor import Executor

#: Where a warning about a step points: the line that called `optimizer.step()`.
_CALLER = 5


def may_step(executors: Sequence[Executor], *, skip_nonfinite: bool, found_inf: torch.Tensor | None) -> bool:
    """Whether all gradients of these models are finite; if not, count and warn, or raise RuntimeError.

    ``found_inf`` is what a GradScaler has found, None where there is none. It looks for the scale at which
    steps overflow and expects some to, so those are counted without a warning.
    """
    for executor in executors:
        if executor.landing is not None:
            _tell_of_landings(executor, skip_nonfinite, found_inf)
        executor.gradients.adopt_all()
    # meta tensors have no values
    real = [executor for executor in executors if executor.backend.device.type != "meta"]
    if found_inf is not None:
        finite = not found_inf.item()
    else:
        finite = all(math.isfinite(executor.norms.total(executor.gradients.scale)) for executor in real)
    if finite:
        return True
    message = "a gradient is NaN or infinite, or the square of the norm of all is beyond fp32"
    if not skip_nonfinite and found_inf is None:
        raise RuntimeError(f"{message}: nothing was updated; AdamW(skip_nonfinite=True) skips such steps")
    for executor in real:
        executor.skipped_steps += 1
    if found_inf is None:
        warnings.warn(f"{message}: this step is skipped, nothing was updated", stacklevel=_CALLER)
    return False


def _tell_of_landings(executor: Executor, skip_nonfinite: bool, found_inf: torch.Tensor | None) -> None:
    """Say which layers were not updated when their gradients landed. [Note: landing]"""
    assert executor.landing is not None
    if found_inf is not None:
        raise RuntimeError(
            "update='backward' has updated the layers before GradScaler could take its scale out: wrap with "
            "update='step', or train in bfloat16 without a scaler"
        )
    if not skip_nonfinite:
        executor.synchronize()
    names = executor.landing.next_step()
    if names:
        message = f"the gradient of {', '.join(names)} is NaN or infinite: not updated"
        if not skip_nonfinite:
            raise RuntimeError(f"{message}; AdamW(skip_nonfinite=True) goes on")
        executor.skipped_steps += 1
        warnings.warn(message, stacklevel=_CALLER + 1)
