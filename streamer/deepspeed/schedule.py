"""DeepSpeed's learning rate schedules with a warm-up, as PyTorch's LambdaLR."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.optim.lr_scheduler import LambdaLR

from streamer.deepspeed.values import Values, unanswered

_PARAMS = "scheduler.params."
_ALL = ("warmup_num_steps", "warmup_type", "last_batch_iteration")
#: The schedules that there are here, and the parameters of each.
SCHEDULES = {
    "WarmupLR": (*_ALL, "warmup_min_lr", "warmup_max_lr"),
    "WarmupDecayLR": (*_ALL, "warmup_min_lr", "warmup_max_lr", "total_num_steps"),
    "WarmupCosineLR": (*_ALL, "warmup_min_ratio", "cos_min_ratio", "total_num_steps"),
}


@dataclass(frozen=True)
class Schedule:
    """``WarmupLR``, ``WarmupDecayLR`` or ``WarmupCosineLR`` of DeepSpeed (runtime/lr_schedules.py, 0.19).

    With n the optimizer steps that are done less one, w the larger of 2 and ``warmup_steps``, and T
    ``total_steps``, the rate is

    - ``low + (high - low) * rise`` while 0 <= n < w, where rise is log(n + 1) / log(w), or n / w where
      ``warmup_type`` is ``"linear"``;
    - then ``high`` (WarmupLR), ``low + (high - low) * max(0, (T - n) / max(1, T - w))`` (WarmupDecayLR), or
      ``high * (c + (1 - c) * (1 + cos(pi * min(1, (n - w + 1) / max(1, T - w)))) / 2)`` (WarmupCosineLR),
      where c is ``cos_min_ratio``.

    Here ``high`` is ``max_lr``, or the group's own lr where that is None; ``low`` is ``min_lr``, for
    WarmupCosineLR ``min_ratio`` times high. The very first step (n = -1) is made with ``low``, with 0 for
    WarmupCosineLR, and the second (n = 0) with ``low``, as DeepSpeed's are since 0.15.3.
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
        """From optimizer steps that are done to the rate; it and ``low`` are parts of ``high``."""
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


def make_schedule(
    values: Values, *, lr: float | None, warmup_steps: int | None, total_steps: int | None
) -> Schedule | None:
    """The config's schedule, with DeepSpeed's defaults; None where it has none. ``lr`` is AdamW's."""
    if "scheduler.type" not in values.given:
        return None
    name = {name.lower(): name for name in SCHEDULES}[values.given["scheduler.type"].lower()]
    max_lr = values.get(f"{_PARAMS}warmup_max_lr", lr)
    if values.is_auto(f"{_PARAMS}warmup_max_lr"):
        if lr is None:
            raise unanswered(f"{_PARAMS}warmup_max_lr", "lr")
    elif f"{_PARAMS}warmup_max_lr" not in values.given:
        max_lr = 1e-3 if name == "WarmupDecayLR" else None
    total = None
    if name != "WarmupLR":
        total = values.pick(f"{_PARAMS}total_num_steps", "total_steps", total_steps, None)
        if total is None:
            raise ValueError(f"{_PARAMS}total_num_steps is missing: set it, or give total_steps=...")
    return Schedule(
        name,
        warmup_steps=values.pick(f"{_PARAMS}warmup_num_steps", "warmup_steps", warmup_steps, 1000),
        total_steps=total or 0,
        warmup_type=values.get(f"{_PARAMS}warmup_type", "log"),
        min_lr=values.get(f"{_PARAMS}warmup_min_lr", 0.0),
        max_lr=max_lr,
        min_ratio=values.get(f"{_PARAMS}warmup_min_ratio", 0.0),
        cos_min_ratio=values.get(f"{_PARAMS}cos_min_ratio", 1e-4),
    )
