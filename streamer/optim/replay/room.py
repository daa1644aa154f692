"""Bytes of the state that an optimizer will create for a parameter, before it creates any."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from streamer.optim.replay.probe import ready
from streamer.optim.replay.shadow import Values
from streamer.optim.replay.spill import leaves
from streamer.optim.replay.step import Call
from streamer.torch_private import storage_id, without_values


def state_bytes(optimizer: Optimizer, param: torch.Tensor, call: Call) -> int:
    """Bytes of host memory for the state of ``param`` after a step, in fp32. A step of the optimizer's class
    on a tensor without values decides, or on a tensor of ones if the class needs values."""
    try:
        with without_values():
            return _after_a_step(optimizer, param, call)
    except Exception:  # any error of an optimizer's own code: it reads values, which such tensors lack
        return _after_a_step(optimizer, param, call)


def needed_by(optimizer: Optimizer, is_counted: Callable[[nn.Parameter], bool], call: Call) -> dict[int, int]:
    """Bytes of the state of each parameter that ``is_counted`` selects, by the parameter's identity."""
    of_shape: dict[tuple[int, torch.Size], int] = {}
    needed = dict[int, int]()
    for number, group in enumerate(optimizer.param_groups):
        for param in filter(is_counted, group["params"]):
            key = number, param.shape
            if key not in of_shape:
                of_shape[key] = state_bytes(optimizer, param, call)
            needed[id(param)] = of_shape[key]
    return needed


def _after_a_step(optimizer: Optimizer, param: torch.Tensor, call: Call) -> int:
    stand_in = nn.Parameter(torch.ones(param.shape, dtype=torch.float32))
    stand_in.grad = torch.ones(param.shape, dtype=torch.float32)
    shadow = ready(Values.of(optimizer).shadow(optimizer, {id(param): stand_in}, {}))
    call.run(shadow)
    return held_bytes(shadow.state.get(stand_in, {}))


def held_bytes(state: Any) -> int:
    """Bytes of the tensors in ``state``, each storage once."""
    tensors = [leaf for leaf in leaves(state) if isinstance(leaf, torch.Tensor)]
    return sum({storage_id(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}.values())
