"""Optimizers with a step on one parameter that is one of our kernels: Adam and AdamW, SGD with momentum,
RMSprop, Adagrad, Lion, the AdamW in Muon.

A rule creates and updates the same state as the optimizer's class. SGD and Lion are bitwise equal. The others
differ in the last places. Adam and AdamW round less often (`streamer_native.adam`), RMSprop and Adagrad round
square roots correctly, which PyTorch does not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch.optim import SGD, Adagrad, Adam, AdamW, RMSprop
from torch.optim.optimizer import Optimizer

import streamer_native as native
from streamer.optim.lion import Lion
from streamer.optim.muon import Muon
from streamer.store.purposes import FP16, FP32
from streamer.store.shard import array


class Memory(NamedTuple):
    """One parameter's ``weight`` and ``gradient``, flat. ``master_data`` completes a 16-bit weight to a
    master: it is the remainder of a bf16 weight, the fp32 master of an fp16 one. The gradient is multiplied
    by ``scale`` first. The state is in the parameter's ``shape``."""

    weight: torch.Tensor
    master_data: torch.Tensor
    gradient: torch.Tensor
    scale: float
    shape: torch.Size

    def arrays(self) -> tuple[Any, Any, Any]:
        """Weight, `master_data` (None for an fp32 weight) and gradient, in the form that the kernels take."""
        master_data = None if self.weight.dtype == FP32 else array(self.master_data)
        return array(self.weight), master_data, array(self.gradient)


#: Updates a parameter and its state with the options of its group.
Rule = Callable[[Memory, dict[str, Any], Mapping[str, Any]], None]


def rule_of(kind: type[Optimizer], group: Mapping[str, Any], dtype: torch.dtype) -> Rule | None:
    """The rule of an optimizer's class with the options of ``group`` for weights of ``dtype``, None if no
    kernel matches. AdamW's own code updates fp32 weights, so these are bitwise equal."""
    unlike = ("amsgrad", "maximize", "differentiable", "capturable")
    if any(group.get(option) for option in unlike):
        return None
    if dtype != FP32 and (kind is AdamW or (kind is Adam and _decays_apart(group))):
        return _adamw
    if kind is SGD and group["momentum"]:
        return _sgd
    if dtype != FP32 and kind is RMSprop and not (group["momentum"] or group["centered"]):
        return _rmsprop
    if dtype != FP32 and kind is Adagrad:
        return _adagrad
    if dtype != FP32 and kind is Muon and not group["use_muon"]:
        return _adamw
    return _lion if kind is Lion else None


def _decays_apart(group: Mapping[str, Any]) -> bool:
    return not group["weight_decay"] or bool(group.get("decoupled_weight_decay"))


def _adamw(memory: Memory, state: dict[str, Any], group: Mapping[str, Any]) -> None:
    if not state:
        state["step"] = torch.zeros((), dtype=FP32)
        state["exp_avg"] = torch.zeros(memory.shape, dtype=FP32)
        state["exp_avg_sq"] = torch.zeros(memory.shape, dtype=FP32)
    state["step"] += 1
    beta1, beta2 = map(float, group["betas"])
    step = int(state["step"].item())
    hyper = native.Hyper(
        float(group["lr"]), beta1, beta2, group.get("adam_eps", group["eps"]), group["weight_decay"], step
    )
    weight, master_data, gradient = memory.arrays()
    segments = [native.Segment(0, len(weight), hyper)]
    moments = array(state["exp_avg"]), array(state["exp_avg_sq"])
    kernel = native.adamw_fp16 if memory.weight.dtype == FP16 else native.adamw_split
    kernel(weight, master_data, gradient, *moments, segments, grad_scale=memory.scale)


def _sgd(memory: Memory, state: dict[str, Any], group: Mapping[str, Any]) -> None:
    is_first = state.get("momentum_buffer") is None
    if is_first:
        state["momentum_buffer"] = torch.zeros(memory.shape, dtype=FP32)
    native.sgd(
        *memory.arrays(),
        array(state["momentum_buffer"]),
        lr=float(group["lr"]),
        weight_decay=group["weight_decay"],
        decay=group["momentum"],
        gain=1.0 if is_first else 1 - group["dampening"],
        nesterov=group["nesterov"],
        grad_scale=memory.scale,
    )


def _lion(memory: Memory, state: dict[str, Any], group: Mapping[str, Any]) -> None:
    if not state:
        state["exp_avg"] = torch.zeros(memory.shape, dtype=FP32)
    beta1, beta2 = group["betas"]
    native.lion(
        *memory.arrays(),
        array(state["exp_avg"]),
        lr=float(group["lr"]),
        weight_decay=group["weight_decay"],
        beta1=beta1,
        beta2=beta2,
        grad_scale=memory.scale,
    )


def _rmsprop(memory: Memory, state: dict[str, Any], group: Mapping[str, Any]) -> None:
    if not state:
        state["step"] = torch.zeros((), dtype=FP32)
        state["square_avg"] = torch.zeros(memory.shape, dtype=FP32)
    state["step"] += 1
    _rms(memory, state["square_avg"], group, float(group["lr"]), group["alpha"], 1 - group["alpha"])


def _adagrad(memory: Memory, state: dict[str, Any], group: Mapping[str, Any]) -> None:
    rate = float(group["lr"]) / (1 + state["step"].item() * group["lr_decay"])
    state["step"] += 1
    _rms(memory, state["sum"], group, rate, 1.0, 1.0)


def _rms(
    memory: Memory, squares: torch.Tensor, group: Mapping[str, Any], lr: float, decay: float, gain: float
) -> None:
    options = {"lr": lr, "weight_decay": group["weight_decay"], "decay": decay, "gain": gain}
    native.rms(*memory.arrays(), array(squares), **options, eps=group["eps"], grad_scale=memory.scale)
