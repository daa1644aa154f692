"""Muon for the matrices of layers, and AdamW for all other parameters, in one optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, ParamsT

from streamer.engine.handle import home_of
from streamer.optim.replay.shadow import original, plain_step


class Muon(torch.optim.Muon):
    """`torch.optim.Muon` for the matrices of streamed layers, AdamW for embeddings, heads and vectors.

    Muon is an optimizer for hidden layers (Jordan, kellerjordan.github.io/posts/muon, 2024). With
    ``adjust_lr_fn="match_rms_adamw"`` its updates are as large as AdamW's (Liu et al., Muon is Scalable for
    LLM Training, 2025), so that one ``lr`` and one ``weight_decay`` serve both. A parameter group may set
    ``use_muon``, a bool, for all of its parameters; other groups are split in two. The state has
    ``momentum_buffer`` for Muon, and ``step``, ``exp_avg`` and ``exp_avg_sq`` for AdamW, in fp32. Raises
    ValueError for ``use_muon=True`` with a parameter that is not a matrix.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = "match_rms_adamw",
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        matrix = torch.zeros(1, 1)
        defaults = torch.optim.Muon(
            [matrix],
            lr=lr,
            weight_decay=weight_decay,
            momentum=momentum,
            nesterov=nesterov,
            ns_steps=ns_steps,
            adjust_lr_fn=adjust_lr_fn,
        ).defaults
        defaults |= {"betas": betas, "adam_eps": eps, "use_muon": False}
        items: list[Any] = [params] if isinstance(params, torch.Tensor) else [*params]
        groups = items if items and isinstance(items[0], dict) else [{"params": items}]
        Optimizer.__init__(self, [part for group in groups for part in _in_two(group)], defaults)
        for group in self.param_groups:
            if group["use_muon"] and any(param.dim() != 2 for param in group["params"]):
                raise ValueError("a group with use_muon=True has a parameter that is not a matrix")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step; returns the result of ``closure``."""
        groups = self.param_groups
        self.param_groups = [group for group in groups if group["use_muon"]]
        try:
            loss = plain_step(torch.optim.Muon)(self, closure)
        finally:
            self.param_groups = groups
        for group in groups:
            for param in group["params"]:
                if param.grad is not None and not group["use_muon"]:
                    _adamw(param, self.state[param], group)
        return loss


def _in_two(group: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The group's parameters for Muon, and the others; the group itself if it sets ``use_muon``."""
    inside = group["params"]
    inside = [inside] if isinstance(inside, torch.Tensor) else [*inside]
    if "use_muon" in group:
        return [{**group, "params": inside}]
    by_muon, others = list[Any](), list[Any]()
    for item in inside:
        param = item if isinstance(item, torch.Tensor) else item[1]
        (by_muon if _is_hidden_matrix(param) else others).append(item)
    parts = [(by_muon, True), (others, False)]
    return [{**group, "params": params, "use_muon": use_muon} for params, use_muon in parts if params]


def _is_hidden_matrix(param: torch.Tensor) -> bool:
    home = home_of(original(param))
    return param.dim() == 2 and home is not None and home.unit is not home.executor.root


def _adamw(param: torch.Tensor, state: dict[str, Any], group: Mapping[str, Any]) -> None:
    """Algorithm 2 of Loshchilov & Hutter, Decoupled Weight Decay Regularization (ICLR 2019)."""
    assert param.grad is not None
    if not state:
        state["step"] = torch.zeros((), dtype=torch.float32)
        state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(param), torch.zeros_like(param)
    state["step"] += 1
    (beta1, beta2), lr, step = group["betas"], group["lr"], state["step"].item()
    state["exp_avg"].lerp_(param.grad, 1 - beta1)
    state["exp_avg_sq"].mul_(beta2).addcmul_(param.grad, param.grad, value=1 - beta2)
    root = (state["exp_avg_sq"] / (1 - beta2**step)).sqrt_().add_(group["adam_eps"])
    param.mul_(1 - lr * group["weight_decay"])
    param.addcdiv_(state["exp_avg"], root, value=-lr / (1 - beta1**step))
