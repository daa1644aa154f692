"""The optimizer of a DeepSpeed config as arguments of `streamer.AdamW`."""

from __future__ import annotations

from typing import Any

import torch

from streamer.deepspeed.values import Values, shown

ADAMS = ("Adam", "AdamW", "FusedAdam", "CPUAdam", "DeepSpeedCPUAdam")
#: What to do about an optimizer that AdamW is not.
OWN = "leave the optimizer section out and make one of torch.optim on the wrapped model"
_PARAMS = "optimizer.params."
#: Variants that AdamW has not: the value that asks for one, and the mend.
_VARIANTS = {
    "amsgrad": (True, f"leave it out, or {OWN}"),
    "maximize": (True, f"change the sign of the loss, or {OWN}"),
    "bias_correction": (False, f"leave it out, or {OWN}"),
}


def adamw_arguments(values: Values, dtype: torch.dtype | None, **answers: Any) -> dict[str, Any]:
    """Arguments of AdamW: the config's, and DeepSpeed's defaults, where it has an optimizer section, beside
    ``answers``, the keyword arguments of `from_deepspeed_config`; without one these alone.

    Raises ValueError for a variant of Adam that AdamW is not.
    """
    has_section = "optimizer.type" in values.given
    decays_gradient = _decays_gradient(values)
    # PyTorch's default, or DeepSpeed's
    decay = 0.01 if values.get(f"{_PARAMS}torch_adam") and not decays_gradient else 0.0
    defaults = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": decay}
    arguments = {}
    for name, default in defaults.items():
        absent = default if has_section else None
        auto = {} if name == "lr" else {"auto": default}  # DeepSpeed's lr is a guess
        arguments[name] = values.pick(f"{_PARAMS}{name}", name, answers[name], absent, **auto)
    if decays_gradient and arguments["weight_decay"]:
        raise ValueError(
            f"{_PARAMS}{decays_gradient} is false and weight_decay {arguments['weight_decay']}: AdamW does "
            f"not add decay to the gradient; write true, or weight_decay 0, or {OWN}"
        )
    _refuse_variants(values)
    if values.get("bf16.bf16_optimizer_states") and dtype == torch.bfloat16:
        arguments["state_dtype"] = torch.bfloat16
    return {name: value for name, value in arguments.items() if value is not None}


def _decays_gradient(values: Values) -> str:
    """The key by which weight decay is added to the gradient, as in Adam, and not taken from the weight, as
    in AdamW; empty where there is none. DeepSpeed heeds it only for another type than AdamW."""
    if values.get("optimizer.type", "AdamW").lower() == "adamw":
        return ""
    names = (name for name in ("adam_w_mode", "adamw_mode") if values.get(f"{_PARAMS}{name}") is False)
    return next(names, "")


def _refuse_variants(values: Values) -> None:
    for name, (asked, mend) in _VARIANTS.items():
        if values.get(f"{_PARAMS}{name}") is asked:
            raise ValueError(f"{_PARAMS}{name} is {shown(asked)}, which AdamW does not know: {mend}")
    if f"{_PARAMS}max_grad_norm" in values.given:
        raise ValueError(f"{_PARAMS}max_grad_norm: write it as gradient_clipping, beside optimizer")
