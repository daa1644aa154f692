"""Lion, whose step on a wrapped model is one pass over memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, ParamsT


class Lion(Optimizer):
    """Lion: Algorithm 2 of Chen et al., Symbolic Discovery of Optimization Algorithms (NeurIPS 2023).

    ``lr`` is usually 3 to 10 times smaller than AdamW's, and ``weight_decay`` larger by the same factor. The
    state of a parameter is ``exp_avg``, in its shape. Raises ValueError for a hyperparameter out of range.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        if lr < 0 or weight_decay < 0 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(
                f"lr={lr}, betas={betas}, weight_decay={weight_decay}: lr and weight_decay are 0 or more, "
                "betas in [0, 1)"
            )
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step; returns the result of ``closure``."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            lr, (beta1, beta2) = group["lr"], group["betas"]
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["exp_avg"] = torch.zeros_like(param)
                momentum = state["exp_avg"]
                update = momentum.mul(beta1).add_(param.grad, alpha=1 - beta1).sign_()
                param.mul_(1 - lr * group["weight_decay"]).add_(update, alpha=-lr)
                momentum.mul_(beta2).add_(param.grad, alpha=1 - beta2)
        return loss
