"""`from_deepspeed_config`: a config in DeepSpeed's JSON as arguments of `wrap`, `AdamW` and the loop."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from streamer.config_values import nearest
from streamer.deepspeed.keys import (
    CHANGE_RESULT,
    Values,
    contradiction,
    read_json,
    shown,
    unanswered,
    walk,
)
from streamer.errors import warn

ADAMS = ("Adam", "AdamW", "FusedAdam", "CPUAdam", "DeepSpeedCPUAdam")
#: The parameters of each schedule beside warmup_num_steps, warmup_type and last_batch_iteration.
SCHEDULES = {
    "WarmupLR": ("warmup_min_lr", "warmup_max_lr"),
    "WarmupDecayLR": ("warmup_min_lr", "warmup_max_lr", "total_num_steps"),
    "WarmupCosineLR": ("warmup_min_ratio", "cos_min_ratio", "total_num_steps"),
}
#: What to do about an optimizer that AdamW is not.
_OWN = "leave the optimizer section out and make a streamer.AdamW of the wrapped model"
#: The types of each section, and what to do about others.
_TYPES = {
    "optimizer": (ADAMS, f'write "AdamW", or {_OWN}'),
    "scheduler": (tuple(SCHEDULES), "leave the section out and make one of torch.optim.lr_scheduler"),
}
_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
_ADAM, _SCHEDULER = "optimizer.params.", "scheduler.params."


@dataclass(frozen=True)
class Schedule:
    """``WarmupLR``, ``WarmupDecayLR`` or ``WarmupCosineLR`` of DeepSpeed (runtime/lr_schedules.py, 0.19).

    The learning rate rises from ``min_lr`` to ``max_lr`` within ``warmup_steps`` and stays there (WarmupLR),
    or falls in a line to ``min_lr`` at ``total_steps`` (WarmupDecayLR). That of WarmupCosineLR rises from
    ``min_ratio`` of ``max_lr``, and falls as a cosine to ``cos_min_ratio`` of ``max_lr``. If ``max_lr`` is
    None, the group's own lr stands for it. The first two steps are made with the lowest rate, the very first
    of WarmupCosineLR with 0, as DeepSpeed's are since 0.15.3.
    """

    name: str
    warmup_steps: int
    total_steps: int
    warmup_type: str
    min_lr: float
    max_lr: float | None
    min_ratio: float
    cos_min_ratio: float

    def attach(self, optimizer: torch.optim.Optimizer) -> LambdaLR:
        """The schedule of ``optimizer``'s groups, to be stepped after each of its steps. Raises ValueError
        for an lr of 0 under a ``min_lr`` above it."""
        factors = []
        for group in optimizer.param_groups:
            if self.max_lr is not None:
                group["lr"] = group["initial_lr"] = self.max_lr
            high = group.get("initial_lr", group["lr"])
            if self.min_lr and not high:
                raise ValueError(f"the warm-up begins at lr {self.min_lr} and leads to 0: set a higher lr")
            factors.append(self._factor(self.min_lr / high if self.min_lr else self.min_ratio))
        return LambdaLR(optimizer, factors)

    def _factor(self, low: float) -> Callable[[int], float]:
        """The rate after so many optimizer steps; the rate and ``low`` are fractions of the highest rate."""
        warmup = max(2, self.warmup_steps)
        decay = max(1, self.total_steps - warmup)

        def factor(done: int) -> float:
            n = done - 1
            if n < 0:
                return 0.0 if self.name == "WarmupCosineLR" else low
            if n < warmup:
                rise = n / warmup if self.warmup_type == "linear" else math.log(n + 1) / math.log(warmup)
                return low + (1 - low) * rise
            if self.name == "WarmupDecayLR":
                return low + (1 - low) * max(0.0, (self.total_steps - n) / decay)
            if self.name == "WarmupCosineLR":
                fall = (1 + math.cos(math.pi * min(1.0, (n - warmup + 1) / decay))) / 2
                return self.cos_min_ratio + (1 - self.cos_min_ratio) * fall
            return 1.0

        return factor


@dataclass(frozen=True)
class DeepSpeedConfig:
    """What a DeepSpeed config says, in the words of this library.

    ``wrap`` and ``adamw`` are keyword arguments of `streamer.wrap` (beside ``layers`` and ``device``) and of
    `streamer.AdamW`. ``gradient_clipping`` is the largest norm of all gradients, None for no clipping.
    ``micro_batch_size`` is the samples of one backward, None where the config does not say;
    ``gradient_accumulation_steps`` the backwards of one step, by which the loop divides each loss, as
    DeepSpeed's engine does. ``grad_scaler`` are keyword arguments of `torch.amp.GradScaler`, None unless fp16
    is enabled; with a scaler, clip by ``grad_scale=scaler.get_scale()`` and step through it. ``not_honoured``
    has the dotted name of every key that is given and changes nothing here. ::

        config = streamer.from_deepspeed_config("ds_config.json", lr=3e-4, micro_batch_size=4, ...)
        model = streamer.wrap(model, **config.wrap)
        optimizer = streamer.AdamW(model.parameters(), **config.adamw)
        schedule = config.scheduler(optimizer)
        ...
            (loss / config.gradient_accumulation_steps).backward()  # of each micro batch
        if config.gradient_clipping is not None:
            streamer.clip_grad_norm_(model, config.gradient_clipping)
        optimizer.step()
        schedule.step()
    """

    wrap: dict[str, Any]
    adamw: dict[str, Any]
    gradient_clipping: float | None
    micro_batch_size: int | None
    gradient_accumulation_steps: int
    grad_scaler: dict[str, Any] | None
    schedule: Schedule | None
    not_honoured: tuple[str, ...]

    def scheduler(self, optimizer: torch.optim.Optimizer) -> LambdaLR:
        """The config's schedule for ``optimizer``: call its ``step`` after each ``optimizer.step``. Without a
        scheduler section the learning rate stays as it is. `Schedule` says how the rate moves."""
        if self.schedule is None:
            return LambdaLR(optimizer, lambda done: 1.0)
        return self.schedule.attach(optimizer)


def from_deepspeed_config(
    config: Mapping[str, Any] | str | os.PathLike[str],
    *,
    lr: float | None = None,
    betas: tuple[float, float] | None = None,
    eps: float | None = None,
    weight_decay: float | None = None,
    warmup_steps: int | None = None,
    total_steps: int | None = None,
    gradient_clipping: float | None = None,
    micro_batch_size: int | None = None,
    gradient_accumulation_steps: int | None = None,
    dtype: torch.dtype | None = None,
) -> DeepSpeedConfig:
    """Read a config in DeepSpeed's JSON: a file or a dict.

    Optimizer and schedule, clipping, batch sizes, loss scale and dtype become arguments. Parameters and
    optimizer state are in host memory, as with ``offload_param`` and ``offload_optimizer``. Where one of the
    two has ``device`` "nvme", its ``nvme_path`` becomes `wrap`'s ``disk``, for what host memory has no room
    for (or ``host_memory``, which no config says: give it to `wrap`); of two paths, both. Every other key
    that asks for something is named in a warning of one line: first those that may change the result, then
    those that have no effect here.

    The keyword arguments are what the training loop knows and the Hugging Face Trainer fills in: they stand
    for ``"auto"`` and for what the config leaves open, and must not contradict what it says. ``dtype``
    answers for ``fp16.enabled`` and ``bf16.enabled``, ``warmup_steps`` and ``total_steps`` for the keys of a
    scheduler section. Without an answer ``"auto"`` is DeepSpeed's default for betas (0.9, 0.999), eps (1e-8),
    weight_decay (0) and warmup_min_lr (0), and the optimizer's lr for warmup_max_lr; batch sizes follow from
    one another. What is left open altogether is DeepSpeed's default, AdamW's without an optimizer section.

    Raises:
        ValueError: in one line, for a key that looks misspelt or is in another table than DeepSpeed's, a key
            that is there twice, a value of a wrong type or out of range, an ``"auto"`` without an answer,
            batch sizes that contradict each other on one GPU, fp16 beside bf16, and an optimizer or a
            schedule that does not exist here: any but the Adam family and those of `Schedule`, and Adam with
            weight decay in the gradient.
        OSError: for a file that cannot be read.
    """
    values = _read(config)
    computed = _dtype(values, dtype)
    micro, accumulation = _batch(values, micro_batch_size, gradient_accumulation_steps)
    max_norm = values.pick("gradient_clipping", "gradient_clipping", gradient_clipping, 0.0)
    adamw = _adamw_arguments(values, computed, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
    schedule = _make_schedule(values, lr=adamw.get("lr"), warmup_steps=warmup_steps, total_steps=total_steps)
    not_honoured = tuple(
        key
        for key in values.not_honoured()
        # a table that is not enabled asks for nothing
        if _DTYPES.get(key.partition(".")[0], computed) == computed
    )
    _warn_not_honoured(not_honoured)
    return DeepSpeedConfig(
        wrap=_wrap_arguments(values, computed),
        adamw=adamw,
        gradient_clipping=max_norm or None,
        micro_batch_size=micro,
        gradient_accumulation_steps=accumulation,
        grad_scaler=_scaler_arguments(values) if computed == torch.float16 else None,
        schedule=schedule,
        not_honoured=not_honoured,
    )


def _read(config: Mapping[str, Any] | str | os.PathLike[str]) -> Values:
    """The config's values. Raises ValueError for them, and for an unknown type of optimizer or schedule."""
    given = read_json(config)
    if "bfloat16" in given and "bf16" in given:
        raise ValueError("bf16 and bfloat16 are the same: leave one out")
    given = {"bf16" if name == "bfloat16" else name: value for name, value in given.items()}
    for section, (known, fix) in _TYPES.items():
        table = given.get(section)
        if not isinstance(table, Mapping) or not table:
            continue
        kind = table.get("type")
        if not isinstance(kind, str) or kind.lower() not in map(str.lower, known):
            near = nearest(kind, known) if isinstance(kind, str) else ""
            fix = near if near.startswith("did you mean") else fix
            raise ValueError(f"{section}.type must be one of {', '.join(known)}, not {shown(kind)}: {fix}")
    return Values(dict(walk(given)))


def _warn_not_honoured(keys: tuple[str, ...]) -> None:
    changing = ", ".join(key for key in keys if key in CHANGE_RESULT)
    others = ", ".join(key for key in keys if key not in CHANGE_RESULT)
    parts = [f"not honoured, which may change the result: {changing}"] if changing else []
    parts += [f"with no effect here: {others}"] if others else []
    if parts:
        warn(f"keys of this DeepSpeed config that are {'; '.join(parts)}")


def _adamw_arguments(values: Values, dtype: torch.dtype | None, **answers: Any) -> dict[str, Any]:
    """Arguments of AdamW: the config's, and DeepSpeed's defaults, where it has an optimizer section, beside
    ``answers``, the keyword arguments of `from_deepspeed_config`; without an optimizer section these alone.

    Raises ValueError for a variant of Adam that AdamW is not.
    """
    has_section = "optimizer.type" in values.given
    decays_gradient = ""
    if values.get("optimizer.type", "AdamW").lower() != "adamw":  # DeepSpeed's AdamW ignores these keys
        names = [name for name in ("adam_w_mode", "adamw_mode") if values.get(f"{_ADAM}{name}") is False]
        decays_gradient = names[0] if names else ""
    # PyTorch's default, or DeepSpeed's
    decay = 0.01 if values.get(f"{_ADAM}torch_adam") and not decays_gradient else 0.0
    arguments = {}
    for name, default in {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": decay}.items():
        absent = default if has_section else None
        auto = {} if name == "lr" else {"auto": default}  # no default of lr suits every model
        arguments[name] = values.pick(f"{_ADAM}{name}", name, answers[name], absent, **auto)
    if decays_gradient and arguments["weight_decay"]:
        raise ValueError(
            f"{_ADAM}{decays_gradient} is false and weight_decay {arguments['weight_decay']}: AdamW does "
            f"not add decay to the gradient; write true, or weight_decay 0, or {_OWN}"
        )
    for name, has in {"amsgrad": False, "maximize": False, "bias_correction": True}.items():
        if values.get(f"{_ADAM}{name}", has) is not has:
            raise ValueError(
                f"{_ADAM}{name} is {shown(not has)}, which AdamW does not know: leave it out, or {_OWN}"
            )
    if f"{_ADAM}max_grad_norm" in values.given:
        raise ValueError(f"{_ADAM}max_grad_norm: write it as gradient_clipping, beside optimizer")
    if values.get("bf16.bf16_optimizer_states") and dtype == torch.bfloat16:
        arguments["state_dtype"] = torch.bfloat16
    return {name: value for name, value in arguments.items() if value is not None}


def _make_schedule(
    values: Values, *, lr: float | None, warmup_steps: int | None, total_steps: int | None
) -> Schedule | None:
    """The config's schedule, with DeepSpeed's defaults; None where it has none. ``lr`` is AdamW's."""
    if "scheduler.type" not in values.given:
        return None
    name = {name.lower(): name for name in SCHEDULES}[values.given["scheduler.type"].lower()]
    for param in sorted({p for params in SCHEDULES.values() for p in params} - {*SCHEDULES[name]}):
        if f"{_SCHEDULER}{param}" in values.given:
            owners = ", ".join(other for other, params in SCHEDULES.items() if param in params)
            raise ValueError(f"{_SCHEDULER}{param} is no parameter of {name}; it is one of {owners}")
    max_lr = values.get(f"{_SCHEDULER}warmup_max_lr", lr)
    if values.is_auto(f"{_SCHEDULER}warmup_max_lr"):
        if lr is None:
            raise unanswered(f"{_SCHEDULER}warmup_max_lr", "lr")
    elif f"{_SCHEDULER}warmup_max_lr" not in values.given:
        max_lr = 1e-3 if name == "WarmupDecayLR" else None
    total = None
    if name != "WarmupLR":
        total = values.pick(f"{_SCHEDULER}total_num_steps", "total_steps", total_steps, None)
        if total is None:
            raise ValueError(f"{_SCHEDULER}total_num_steps is missing: set it, or give total_steps=...")
    return Schedule(
        name,
        warmup_steps=values.pick(f"{_SCHEDULER}warmup_num_steps", "warmup_steps", warmup_steps, 1000),
        total_steps=total or 0,
        warmup_type=values.get(f"{_SCHEDULER}warmup_type", "log"),
        min_lr=values.get(f"{_SCHEDULER}warmup_min_lr", 0.0),
        max_lr=max_lr,
        min_ratio=values.get(f"{_SCHEDULER}warmup_min_ratio", 0.0),
        cos_min_ratio=values.get(f"{_SCHEDULER}cos_min_ratio", 1e-4),
    )


def _dtype(values: Values, dtype: torch.dtype | None) -> torch.dtype | None:
    """What fp16.enabled and bf16.enabled say that parameters are computed in, or ``dtype``."""
    if dtype not in (None, torch.float32, *_DTYPES.values()):
        raise ValueError(f"dtype={dtype!r}: use torch.float32, torch.bfloat16 or torch.float16")
    enabled = [of for table, of in _DTYPES.items() if values.get(f"{table}.enabled")]
    if len(enabled) > 1:
        raise ValueError("fp16.enabled and bf16.enabled are both true: set one to false")
    for table, of in _DTYPES.items():
        key = f"{table}.enabled"
        if dtype is None and values.is_auto(key) and not enabled:
            raise unanswered(key, "dtype")
        if dtype is not None and values.get(key, dtype == of) != (dtype == of):
            raise contradiction(key, values.given[key], "dtype", dtype)
    return enabled[0] if enabled else dtype


def _batch(values: Values, micro: int | None, accumulation: int | None) -> tuple[int | None, int]:
    """Samples of a backward, and backwards of a step: two of DeepSpeed's three numbers give the third."""
    micro_key, accumulation_key = "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
    total = values.get("train_batch_size")
    micro = values.pick(micro_key, "micro_batch_size", micro, None, auto=None)
    accumulation = values.pick(accumulation_key, accumulation_key, accumulation, None, auto=None)
    if total is None:
        if micro is None and values.is_auto(micro_key):
            raise unanswered(micro_key, "micro_batch_size")
        return micro, accumulation or 1
    micro = micro or max(1, total // (accumulation or 1))
    accumulation = accumulation or max(1, total // micro)
    if micro * accumulation != total:
        raise ValueError(
            f"train_batch_size is {total}, but {micro_key} {micro} x {accumulation_key} {accumulation} x 1 "
            f'GPU is {micro * accumulation}: change one of them, or write "auto" for {accumulation_key}'
        )
    return micro, accumulation


def _wrap_arguments(values: Values, dtype: torch.dtype | None) -> dict[str, Any]:
    arguments: dict[str, Any] = {} if dtype is None else {"dtype": dtype}
    folders = values.folders()
    if folders:
        arguments["disk"] = folders[0] if len(folders) == 1 else folders
    summed = values.get("data_types.grad_accum_dtype")
    if summed is None:
        return arguments
    if summed not in (torch.float32, dtype):
        raise ValueError(
            f"data_types.grad_accum_dtype is {summed}, and parameters are in {dtype or 'their own dtype'}: "
            "gradients are added up in fp32 or in the dtype that fp16 or bf16 enables"
        )
    return {**arguments, "grad_dtype": torch.float32 if summed == torch.float32 else None}


def _scaler_arguments(values: Values) -> dict[str, Any]:
    """Arguments of GradScaler for DeepSpeed's dynamic scale, or for one that stays."""
    if scale := values.get("fp16.loss_scale", 0.0):
        # factors must not be 1, and fp32 rounds these away
        return {
            "init_scale": scale,
            "growth_factor": math.nextafter(1.0, 2.0),
            "backoff_factor": math.nextafter(1.0, 0.0),
        }
    return {
        "init_scale": 2.0 ** values.get("fp16.initial_scale_power", 16),
        "growth_interval": values.get("fp16.loss_scale_window", 1000),
    }
