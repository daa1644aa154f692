"""Clipping by the global norm of all gradients of a wrapped model."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn

from streamer.engine.executor import Executor
from streamer.engine.guard import as_plain
from streamer.engine.handle import require_home, wrapped


@as_plain
def clip_grad_norm_(
    model: nn.Module | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
    grad_scale: float = 1.0,
) -> torch.Tensor:
    """Clip the gradients of a wrapped model so that their norm is at most ``max_norm``. ``model`` is the
    model, or all of its trainable parameters (``model.parameters()``).

    Returns the norm before clipping as an fp32 scalar on the CPU, as `torch.nn.utils.clip_grad_norm_` does.
    The coefficient ``max_norm / (norm + 1e-6)``, where it is below 1, is applied to layers by the next
    `AdamW.step`, in the pass that reads their gradients anyway, or before that, when your code reads the
    gradient of a layer. The 2-norm is known when backward ends; any other ``norm_type`` (``math.inf`` for
    the largest element) costs a pass over the gradients in host memory.

    ``grad_scale`` is the factor of the loss, for fp16 parameters whose gradients no `torch.amp.GradScaler`
    can unscale: ``grad_scale=scaler.get_scale()``.

    Raises RuntimeError for a norm that is NaN or infinite if ``error_if_nonfinite``, and for a model wrapped
    with ``update="backward"``. Raises ValueError for a model that is not wrapped, and for parameters that are
    not those of one model.
    """
    executor = wrapped(model).executor if isinstance(model, nn.Module) else _executor_of(model)
    if not executor.gradients.are_kept:
        raise RuntimeError(
            "clip_grad_norm_ needs all gradients before any update, and update='backward' updates each layer "
            "during backward: wrap with update='step' to clip"
        )
    executor.gradients.take_in()
    norm = _norm(executor, float(norm_type)) / grad_scale
    if error_if_nonfinite and not math.isfinite(norm):
        raise RuntimeError(
            f"the norm of the gradients is {norm}: look for the first layer whose gradient is not finite, "
            "or pass error_if_nonfinite=False"
        )
    coefficient = max_norm / (norm + 1e-6)
    if not coefficient >= 1:  # also true if the norm is NaN
        executor.gradients.rescale(coefficient)
    return torch.tensor(norm, dtype=torch.float32)


def _executor_of(parameters: Iterable[torch.Tensor]) -> Executor:
    """The executor of the model that has ``parameters``. Raises ValueError unless they are all of its
    trainable parameters: the norm is that of all gradients."""
    by_param = {id(param): require_home(param).executor for param in parameters}
    executors = {*by_param.values()}
    trained = [
        param
        for executor in executors
        for unit in (*executor.units, executor.root)
        for param in unit.trainable
        if param.requires_grad
    ]
    if len(executors) != 1 or any(id(param) not in by_param for param in trained):
        raise ValueError(
            "clip_grad_norm_ clips all gradients of one wrapped model: pass the model, or all of its "
            "parameters (model.parameters())"
        )
    return executors.pop()


def _norm(executor: Executor, norm_type: float) -> float:
    factor = executor.gradients.factor
    if norm_type == 2.0:
        return abs(factor) * math.sqrt(executor.gradients.norms.total())
    norms = []
    for unit in (*executor.units, executor.root):
        for param in unit.params:
            if param.grad is not None:
                dense = param.grad.to_dense() if param.grad.is_sparse else param.grad
                norm = torch.linalg.vector_norm(dense, norm_type, dtype=torch.float32)
                norms.append(norm.cpu() * abs(factor))
    return float(torch.linalg.vector_norm(torch.stack(norms), norm_type)) if norms else 0.0
