"""The keys of DeepSpeed's JSON, dotted: what they may hold, and which values change nothing here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from streamer.deepspeed.reasons import REASONS
from streamer.kinds import BETAS, FLAG, NOT_NEGATIVE, Kind, number, string


@dataclass(frozen=True)
class Key:
    """What a key may hold (None: nobody looks), and why a value for which ``is_lost`` changes nothing."""

    kind: Kind | None = None
    reason: str = ""
    is_lost: Callable[[Any], bool] = lambda value: False


def _whole(low: int, high: int | None = None) -> Kind:
    """An integer, which may be written as 1e5."""

    def accepts(value: Any) -> bool:
        is_whole = type(value) is int or (type(value) is float and value.is_integer())
        return is_whole and value >= low and (high is None or value <= high)

    words = f"an integer of {low} or more" if high is None else f"an integer from {low} to {high}"
    return Kind(words, accepts, int)


WHOLE, WHOLE_OR_0 = _whole(1), _whole(0)
_TEXT = string("a string that is not empty", r"(?s).+")
_DEVICE = string('"cpu", "nvme" or "none"', "cpu|nvme|none")
_RATIO = number("from 0 to 1", lambda x: 0 <= x <= 1)
_DTYPES = {
    **dict.fromkeys(("fp32", "float32"), torch.float32),
    **dict.fromkeys(("bf16", "bfloat16"), torch.bfloat16),
    **dict.fromkeys(("fp16", "float16"), torch.float16),
}
_DTYPE = Kind('"fp32", "bf16" or "fp16"', lambda x: isinstance(x, str) and x in _DTYPES, _DTYPES.get)


def _is_false(value: Any) -> bool:
    return value is False


def _is_not_cpu(value: Any) -> bool:
    return bool(value != "cpu")


_OFFLOAD = "zero_optimization.offload_"

KEYS: dict[str, Key] = {
    "train_batch_size": Key(WHOLE),
    "train_micro_batch_size_per_gpu": Key(WHOLE),
    "gradient_accumulation_steps": Key(WHOLE),
    "gradient_clipping": Key(NOT_NEGATIVE),
    "optimizer.type": Key(_TEXT),
    "optimizer.params.lr": Key(NOT_NEGATIVE),
    "optimizer.params.betas": Key(BETAS),
    "optimizer.params.eps": Key(NOT_NEGATIVE),
    "optimizer.params.weight_decay": Key(NOT_NEGATIVE),
    "optimizer.params.adam_w_mode": Key(FLAG),
    "optimizer.params.adamw_mode": Key(FLAG),
    "optimizer.params.bias_correction": Key(FLAG),
    "optimizer.params.amsgrad": Key(FLAG),
    "optimizer.params.maximize": Key(FLAG),
    "optimizer.params.max_grad_norm": Key(NOT_NEGATIVE),
    "optimizer.params.fp32_optimizer_states": Key(
        FLAG, "moments are fp32; bf16.bf16_optimizer_states has them in bf16", _is_false
    ),
    "scheduler.type": Key(_TEXT),
    "scheduler.params.warmup_min_lr": Key(NOT_NEGATIVE),
    "scheduler.params.warmup_max_lr": Key(NOT_NEGATIVE),
    "scheduler.params.warmup_min_ratio": Key(NOT_NEGATIVE),
    "scheduler.params.cos_min_ratio": Key(NOT_NEGATIVE),
    "scheduler.params.warmup_num_steps": Key(WHOLE_OR_0),
    "scheduler.params.total_num_steps": Key(WHOLE),
    "scheduler.params.warmup_type": Key(string('"log" or "linear"', "log|linear")),
    "scheduler.params.last_batch_iteration": Key(
        _whole(-1), "a run goes on by the load_state_dict of its schedule", lambda value: bool(value != -1)
    ),
    "fp16.enabled": Key(FLAG),
    "fp16.loss_scale": Key(NOT_NEGATIVE),
    "fp16.initial_scale_power": Key(_whole(0, 127)),
    "fp16.loss_scale_window": Key(WHOLE),
    "fp16.hysteresis": Key(
        WHOLE, "GradScaler halves its scale at the first overflow", lambda value: bool(value > 1)
    ),
    "fp16.min_loss_scale": Key(
        NOT_NEGATIVE, "GradScaler halves its scale without end", lambda value: bool(value > 0)
    ),
    "bf16.enabled": Key(FLAG),
    "bf16.bf16_optimizer_states": Key(FLAG),
    **dict.fromkeys(
        ("bf16.check_grad_overflow", "bf16.check_overflow"),
        Key(FLAG, "AdamW makes no step with gradients that are not finite", _is_false),
    ),
    "data_types.grad_accum_dtype": Key(_DTYPE),
    "zero_optimization.stage": Key(
        _whole(0, 3),
        "layers are paged from host memory, as with stage 3 and offload_param; wrap(num_slots=<number of "
        "layers>) keeps all of them on the device",
        lambda value: bool(value < 3),
    ),
    "zero_optimization.contiguous_gradients": Key(FLAG, "a layer's gradients lie in one buffer", _is_false),
    "zero_optimization.ignore_unused_parameters": Key(
        FLAG, "a parameter without a gradient is left alone, as in PyTorch", _is_false
    ),
    f"{_OFFLOAD}param.device": Key(
        _DEVICE,
        "layers are in host memory: not on an NVMe drive, and on the device only as many as "
        "wrap(num_slots=...) says",
        _is_not_cpu,
    ),
    f"{_OFFLOAD}param.pin_memory": Key(FLAG, "layers are pinned always", _is_false),
    f"{_OFFLOAD}optimizer.device": Key(
        _DEVICE,
        "AdamW keeps its state in host memory and updates there: not on the device, nor on an NVMe drive",
        _is_not_cpu,
    ),
    f"{_OFFLOAD}optimizer.ratio": Key(
        _RATIO, "every parameter is updated on the host", lambda value: bool(value < 1)
    ),
    "zero_optimization.cpu_offload": Key(FLAG, "AdamW keeps its state in host memory", _is_false),
    **dict.fromkeys(
        ("zero_optimization.cpu_offload_param", "zero_optimization.cpu_offload_params"),
        Key(FLAG, "layers are in host memory", _is_false),
    ),
    "zero_optimization.cpu_offload_use_pin_memory": Key(FLAG, "layers are pinned always", _is_false),
    **{name: Key(None, reason, lambda value: value is not False) for name, reason in REASONS.items()},
}
