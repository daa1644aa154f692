"""The arithmetic that a model needs by its size alone, by which machines are compared (MFU)."""

from __future__ import annotations

from typing import Any

from torch import nn

from streamer.quantized.parts import shape_of, values_in

#: FLOPs of a parameter and a token: forward, and in backward the gradient of what goes in. The third
#: product, of the parameter's own gradient, is for what is trained.
FROZEN, TRAINED = 4, 6

#: Names in configs of transformers for the number of experts, and of those that a token uses.
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_k")


def model_flops_per_token(model: nn.Module) -> float:
    """FLOPs of a training step for one token: 6 for each trained parameter that a token uses, 4 for a frozen
    one (Kaplan et al., 2020, arXiv:2001.08361, 2.1). A token uses few of the experts. The products of
    attention scores are not counted.
    """
    config = getattr(model, "config", None)
    share = _share_of_experts(config)
    flops = 0.0
    for name, param in model.named_parameters():
        used = share if _is_of_experts(name, param, config) else 1.0
        flops += used * values_in(param) * (TRAINED if param.requires_grad else FROZEN)
    return flops


def _number(config: Any, names: tuple[str, ...]) -> int | None:
    found = (getattr(config, name, None) for name in names)
    return next((value for value in found if isinstance(value, int) and value > 0), None)


def _share_of_experts(config: Any) -> float:
    experts, used = _number(config, EXPERTS), _number(config, PER_TOKEN)
    return 1.0 if experts is None or used is None else min(1.0, used / experts)


def _is_of_experts(name: str, param: nn.Parameter, config: Any) -> bool:
    """Whether a parameter is of experts of which a token uses some: all in one, or one by one."""
    if "expert" not in name or "shared" in name:
        return False
    shape = shape_of(param)
    stacked = len(shape) >= 3 and shape[0] == _number(config, EXPERTS)
    return stacked or any(part.isdigit() for part in name.partition("expert")[2].split("."))
