"""`from_deepspeed_config`: a config in DeepSpeed's JSON as arguments of `wrap`, `AdamW` and the loop.

The keys that decide the training of a model are mapped; one warning names all others. Names and
defaults are those of DeepSpeed 0.19 (docs/_pages/config-json.md, runtime/lr_schedules.py).
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from streamer.errors import warn
from streamer.model.options import DTYPE_NAMES

_OPTIMIZERS = ("Adam", "AdamW", "FusedAdam", "CPUAdam", "DeepSpeedCPUAdam")
_SCHEDULES = ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR")
_ADAM, _SCHEDULER = "optimizer.params.", "scheduler.params."
_MICRO, _ACCUMULATION = "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
_OFFLOADS = ("zero_optimization.offload_optimizer", "zero_optimization.offload_param")
#: The tables that have mapped keys.
_TABLES = {"optimizer", "optimizer.params", "scheduler", "scheduler.params", "fp16", "bf16"}
_TABLES |= {"zero_optimization", *_OFFLOADS}
#: Values of optimizer.params with other updates than AdamW's.
_VARIANTS = {"amsgrad": True, "maximize": True, "bias_correction": False, "adam_w_mode": False}


@dataclass(frozen=True)
class DeepSpeedConfig:
    """A DeepSpeed config as arguments of this library.

    ``wrap`` and ``adamw`` are keyword arguments of `streamer.wrap` and of `streamer.AdamW`.
    ``gradient_clipping`` is the largest norm of all gradients, None for no clipping. ``micro_batch_size`` is
    the number of samples of one backward, None if the config leaves it open.
    ``gradient_accumulation_steps`` is the number of backwards in a step, by which the loop divides each loss,
    as DeepSpeed's engine does. ``grad_scaler`` has keyword arguments of `torch.amp.GradScaler`, None unless
    fp16 is enabled; with a scaler, clip by ``grad_scale=scaler.get_scale()`` and step through it.
    ``schedule`` has the arguments of `warmup_schedule`, None without a scheduler section. ``not_honoured``
    has the dotted names of the keys without effect here. ::

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
    schedule: dict[str, Any] | None
    not_honoured: tuple[str, ...]

    def scheduler(self, optimizer: torch.optim.Optimizer) -> LambdaLR:
        """The config's schedule for ``optimizer``: call its ``step`` after each ``optimizer.step``. Without a
        scheduler section the learning rate does not change."""
        if self.schedule is None:
            return LambdaLR(optimizer, lambda done: 1.0)
        return warmup_schedule(optimizer, **self.schedule)


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
    """Read a config in DeepSpeed's JSON: the path of a file, or a dict.

    Optimizer and schedule, clipping, batch sizes, loss scale and dtype become arguments, and the folders of
    offloads to "nvme" become `wrap`'s ``disk``. One warning names every other key that is set.

    The keyword arguments are the values that the Hugging Face Trainer fills in: they replace ``"auto"`` and
    missing keys, and must not contradict the config. ``dtype`` replaces ``fp16.enabled`` and
    ``bf16.enabled``. Without a keyword argument, ``"auto"`` is DeepSpeed's default for betas (0.9, 0.999),
    eps (1e-8) and weight_decay (0), and the optimizer's lr for warmup_max_lr; two of the three batch sizes
    define the third.

    Raises:
        ValueError: in one line, for an ``"auto"`` without a keyword argument, batch sizes that contradict
            each other on one GPU, fp16 together with bf16, and an optimizer or a schedule that does not exist
            here: others than AdamW and those of `warmup_schedule`.
        OSError: for a file that cannot be read.
    """
    keys = _Keys(dict(_flat(_read(config))))
    wrap: dict[str, Any] = {}
    if (computed := _dtype(keys, dtype)) is not None:
        wrap["dtype"] = computed
    adamw = _adamw(keys, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
    if folders := _folders(keys):
        wrap["disk"] = folders[0] if len(folders) == 1 else folders
    micro, accumulation = _batch(keys, micro_batch_size, gradient_accumulation_steps)
    clipping = keys.take("gradient_clipping", "gradient_clipping", gradient_clipping)
    scaler, schedule = _scaler(keys), _schedule(keys, adamw.get("lr"), warmup_steps, total_steps)
    if left := tuple(key for key, value in keys.left.items() if value not in (None, False, "auto", {})):
        warn(f"keys of this DeepSpeed config that have no effect with streamer: {', '.join(left)}")
    return DeepSpeedConfig(
        wrap=wrap,
        adamw=adamw,
        gradient_clipping=clipping or None,
        micro_batch_size=micro,
        gradient_accumulation_steps=accumulation,
        grad_scaler=scaler if computed == torch.float16 else None,
        schedule=schedule,
        not_honoured=left,
    )


def warmup_schedule(
    optimizer: torch.optim.Optimizer,
    name: str,
    *,
    warmup_min_lr: float = 0.0,
    warmup_max_lr: float | None = None,
    warmup_num_steps: int = 1000,
    total_num_steps: int = 0,
    warmup_type: str = "log",
    warmup_min_ratio: float = 0.0,
    cos_min_ratio: float = 1e-4,
) -> LambdaLR:
    """DeepSpeed's ``WarmupLR``, ``WarmupDecayLR`` or ``WarmupCosineLR``.

    The learning rate rises from ``warmup_min_lr`` to ``warmup_max_lr`` (the group's own lr if that is None)
    and stays there (WarmupLR), or falls linearly to ``warmup_min_lr`` at ``total_num_steps`` (WarmupDecayLR).
    With WarmupCosineLR it rises from ``warmup_min_ratio`` times that rate, and falls as a cosine to
    ``cos_min_ratio`` times it. The first two steps run at the lowest rate, the very first of WarmupCosineLR
    at 0. Raises ValueError if the warm-up leads to an lr of 0.
    """
    warmup = max(2, warmup_num_steps)
    decay = max(1, total_num_steps - warmup)

    def factor(low: float, done: int) -> float:
        n = done - 1
        if n < 0:
            return 0.0 if name == "WarmupCosineLR" else low
        if n < warmup:
            return low + (1 - low) * (n / warmup if warmup_type == "linear" else math.log(n + 1, warmup))
        if name == "WarmupDecayLR":
            return low + (1 - low) * max(0.0, (total_num_steps - n) / decay)
        if name == "WarmupCosineLR":
            fall = (1 + math.cos(math.pi * min(1.0, (n - warmup + 1) / decay))) / 2
            return cos_min_ratio + (1 - cos_min_ratio) * fall
        return 1.0

    factors: list[Callable[[int], float]] = []
    for group in optimizer.param_groups:
        if warmup_max_lr is not None:
            group["lr"] = group["initial_lr"] = warmup_max_lr
        high = group.get("initial_lr", group["lr"])
        if warmup_min_lr and not high:
            raise ValueError(f"the warm-up begins at lr {warmup_min_lr} and leads to 0: set a higher lr")
        low = warmup_min_lr / high if warmup_min_lr else warmup_min_ratio
        factors.append(partial(factor, low))
    return LambdaLR(optimizer, factors)


def _read(config: Mapping[str, Any] | str | os.PathLike[str]) -> Mapping[str, Any]:
    if isinstance(config, Mapping):
        return config
    try:
        return dict(json.loads(Path(config).read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{os.fspath(config)} is not a DeepSpeed config in JSON: {error}") from None


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The dotted keys and their values. A table without mapped keys stays whole."""
    for name, value in table.items():
        key = f"{prefix}{'bf16' if name == 'bfloat16' else name}"
        is_off = isinstance(value, Mapping) and value.get("enabled") is False
        if key in _TABLES and isinstance(value, Mapping):
            yield from _flat({"enabled": False} if is_off else value, f"{key}.")
        elif not is_off:
            yield key, value


class _Keys:
    """The values of a config by dotted key. ``left`` are those that have not been taken."""

    def __init__(self, left: dict[str, Any]) -> None:
        self.left = left

    def take(self, key: str, name: str = "", answer: Any = None, **auto: Any) -> Any:
        """The config's value, else ``answer``, the keyword argument ``name``, else ``auto=`` if the config
        has "auto", or None. Raises ValueError for an answer that the config contradicts, and for an "auto"
        without either."""
        value = self.left.pop(key, None)
        if value == "auto" and answer is None and name and "auto" not in auto:
            raise ValueError(f'{key} is "auto": pass {name}=... to from_deepspeed_config')
        if value in (None, "auto"):
            return auto.get("auto") if answer is None and value else answer
        if isinstance(value, list):
            value = tuple(value)
        if answer not in (None, value):
            raise ValueError(
                f'{key} is {value} in the config, and {name} is {answer}: write "auto" in the config, or '
                "leave the argument out"
            )
        return value

    def count(self, key: str, name: str = "", answer: int | None = None, **auto: Any) -> int | None:
        """`take` for an integer, for which some write 1e5."""
        value = self.take(key, name, answer, **auto)
        return None if value is None else int(value)

    def one_of(self, key: str, known: tuple[str, ...]) -> Any:
        """The config's value, None if it has none. Raises ValueError unless it is ``known``."""
        value = self.take(key)
        if value not in (None, *known):
            raise ValueError(f"{key} must be one of {', '.join(known)}, not {value!r}")
        return value


def _dtype(keys: _Keys, dtype: torch.dtype | None) -> torch.dtype | None:
    """The dtype that parameters are computed in; None leaves it to the model."""
    enabled = [name for name in ("fp16", "bf16") if keys.left.get(f"{name}.enabled") is True]
    if len(enabled) > 1:
        raise ValueError("fp16.enabled and bf16.enabled are both true: set one to false")
    # an enabled one decides for the other
    auto = {} if dtype is None and not enabled else {"auto": None}
    for name in ("fp16", "bf16"):
        is_on = keys.take(f"{name}.enabled", "dtype", None, **auto)
        if None not in (is_on, dtype) and is_on != (dtype == DTYPE_NAMES[name]):
            raise ValueError(f"{name}.enabled is {is_on} in the config, and dtype is {dtype}: leave one out")
    return DTYPE_NAMES[enabled[0]] if enabled else dtype


def _adamw(keys: _Keys, **answers: Any) -> dict[str, Any]:
    kind = keys.one_of("optimizer.type", _OPTIMIZERS)
    for name, variant in _VARIANTS.items():
        if keys.take(f"{_ADAM}{name}") is variant:
            raise ValueError(f"{_ADAM}{name} is {variant}, which AdamW does not do: use another optimizer")
    found = {"lr": keys.take(f"{_ADAM}lr", "lr", answers.pop("lr"))}  # no lr suits every model
    found |= {name: keys.take(f"{_ADAM}{name}", name, answer, auto=None) for name, answer in answers.items()}
    if kind is not None and found["weight_decay"] is None:
        found["weight_decay"] = 0.0  # AdamW's own default is 0.01
    return {name: value for name, value in found.items() if value is not None}


def _folders(keys: _Keys) -> list[str]:
    """The folders of drives. The keys of stage and pinning count as honoured: both are so in any case."""
    found = []
    keys.take("zero_optimization.stage")
    for table in _OFFLOADS:
        keys.take(f"{table}.pin_memory")
        if keys.one_of(f"{table}.device", ("none", "cpu", "nvme")) == "nvme":
            found.append(keys.take(f"{table}.nvme_path"))
            if not found[-1]:
                raise ValueError(f'{table}.device is "nvme": set {table}.nvme_path to a folder of the drive')
    return list(dict.fromkeys(found))


def _batch(keys: _Keys, micro: int | None, accumulation: int | None) -> tuple[int | None, int]:
    """Samples of a backward, and backwards of a step: two of DeepSpeed's three numbers define the third."""
    total = keys.count("train_batch_size")
    follows = {} if total is None else {"auto": None}
    micro = keys.count(_MICRO, "micro_batch_size", micro, **follows)
    accumulation = keys.count(_ACCUMULATION, _ACCUMULATION, accumulation, auto=None)
    if total is None:
        return micro, accumulation or 1
    micro = micro or max(1, total // (accumulation or 1))
    accumulation = accumulation or max(1, total // micro)
    if micro * accumulation != total:
        raise ValueError(
            f"train_batch_size is {total}, but {_MICRO} {micro} x {_ACCUMULATION} {accumulation} x 1 GPU is "
            f'{micro * accumulation}: change one of them, or write "auto" for {_ACCUMULATION}'
        )
    return micro, accumulation


def _scaler(keys: _Keys) -> dict[str, Any]:
    """Arguments of GradScaler for DeepSpeed's dynamic scale, or for a constant one."""
    power = keys.count("fp16.initial_scale_power")
    interval = keys.count("fp16.loss_scale_window")
    if scale := keys.take("fp16.loss_scale"):
        # GradScaler refuses factors of 1; these are so close to 1 that a scale in fp32 does not change
        near = {"growth_factor": math.nextafter(1.0, 2.0), "backoff_factor": math.nextafter(1.0, 0.0)}
        return {"init_scale": scale, **near}
    return {"init_scale": 2.0 ** (16 if power is None else power), "growth_interval": interval or 1000}


def _schedule(keys: _Keys, lr: float | None, warmup: int | None, total: int | None) -> dict[str, Any] | None:
    """Arguments of `warmup_schedule`, None without a scheduler section. ``lr`` is AdamW's."""
    name = keys.one_of("scheduler.type", _SCHEDULES)
    if name is None:
        return None
    arguments = {
        "warmup_num_steps": keys.count(f"{_SCHEDULER}warmup_num_steps", "warmup_steps", warmup),
        "total_num_steps": keys.count(f"{_SCHEDULER}total_num_steps", "total_steps", total),
        "warmup_type": keys.one_of(f"{_SCHEDULER}warmup_type", ("log", "linear")),
    }
    if arguments["total_num_steps"] is None and name != "WarmupLR":
        raise ValueError(f"{_SCHEDULER}total_num_steps is missing: set it, or pass total_steps=...")
    for low in ("warmup_min_lr", "warmup_min_ratio", "cos_min_ratio"):
        arguments[low] = keys.take(f"{_SCHEDULER}{low}")
    highest = f"{_SCHEDULER}warmup_max_lr"
    if keys.left.get(highest) == "auto":
        arguments["warmup_max_lr"] = keys.take(highest, "lr", lr)
    else:
        default = 1e-3 if name == "WarmupDecayLR" else None
        arguments["warmup_max_lr"] = keys.take(highest) or default
    return {"name": name} | {key: value for key, value in arguments.items() if value is not None}
