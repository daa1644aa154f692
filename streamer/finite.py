"""Whether a step is made: not with gradients that are NaN or infinite."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch

from streamer.engine.executor import Executor
from streamer.files.errors import shortened

#: Where a warning about a step points: the line that called `optimizer.step()`.
_CALLER = 6


class NonFiniteError(RuntimeError):
    """A step that was refused, since a gradient is NaN or infinite; ``what`` names the first unit, in the
    order of backward, whose gradient is not finite."""

    def __init__(self, what: str, mend: str) -> None:
        super().__init__(what + mend)
        self.what = what


def take_step(executors: Sequence[Executor], *, skip_nonfinite: bool, found_inf: torch.Tensor | None) -> bool:
    """Whether the gradients of these models are all finite; if not, count and warn, or raise RuntimeError.
    That is also raised for a model that was unwrapped.

    ``found_inf`` is what a GradScaler has found, None where there is none. It looks for the scale at which
    steps overflow and expects some to, so those are counted without a warning.
    """
    if any(executor.released for executor in executors):
        raise RuntimeError(
            "the model that this optimizer updates was unwrapped: make a new optimizer, of torch.optim for a "
            "plain model"
        )
    not_updated = _not_updated_on_landing(executors, skip_nonfinite, found_inf)
    for executor in executors:
        executor.gradients.adopt_all()
    # meta tensors have no values
    real = [executor for executor in executors if executor.backend.device.type != "meta"]
    if found_inf is not None:
        finite = not found_inf.item()
    else:
        finite = all([executor.norms.is_finite(executor.gradients.scale) for executor in real])
    if finite and not not_updated:
        return True
    if not_updated or any(executor.landing is not None for executor in executors):
        names = [*not_updated, *(() if finite else ("what is in no layer",))]
        what = f"the gradient of {', '.join(names)} is NaN or infinite"
        skipped, mend = ": not updated", ": not updated: AdamW(skip_nonfinite=True) goes on without"
    else:
        what = "a gradient is NaN or infinite, or the square of the norm of all is beyond fp32"
        if found_inf is None and (names := [name for e in real for name in e.norms.not_finite()]):
            what = f"the gradient of {shortened(names, most=1)} is NaN or infinite, or its square beyond fp32"
        skipped = ": this step is skipped, nothing was updated"
        mend = ": nothing was updated; AdamW(skip_nonfinite=True) skips such steps"
    if not skip_nonfinite and found_inf is None:
        raise NonFiniteError(what, mend)
    for executor in real:
        executor.skipped_steps += 1
    if found_inf is None:
        warnings.warn(what + skipped, stacklevel=_CALLER)
    return finite


def _not_updated_on_landing(
    executors: Sequence[Executor], skip_nonfinite: bool, found_inf: torch.Tensor | None
) -> list[str]:
    """Begin the next step, and name the layers not updated since the last. [Note: landing]"""
    names = []
    for executor in executors:
        if executor.landing is not None:
            if found_inf is None:
                executor.landing.check_unwritten()
            if not skip_nonfinite:
                executor.synchronize()
            names += executor.landing.next_step()
            if found_inf is not None:
                raise RuntimeError(
                    "update='backward' has updated the layers before GradScaler could take its scale out: "
                    "wrap with update='step', or train in bfloat16 without a scaler"
                )
    return names
