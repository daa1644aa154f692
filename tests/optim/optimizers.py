"""Optimizers that look at all parameters."""

from __future__ import annotations

from typing import Any

import torch


class Sum(torch.optim.SGD):
    """Divides by the norm of all gradients, silently."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([grad.square().sum() for grad in grads]).sum().sqrt()
        for grad in grads:
            grad /= norm
        return super().step(closure)
