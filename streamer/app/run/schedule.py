"""How the learning rate moves over a run: a linear warm-up, and then one of the usual shapes."""

from __future__ import annotations

import math
from collections.abc import Callable

from streamer.app.config import OptimizerConfig, steps_of

#: WSD's decay where the config does not say how long it is, as a share of the run's steps.
DECAY = 0.1


def schedule(optimizer: OptimizerConfig, steps: int) -> Callable[[int], float]:
    """The learning rate of each step as a factor of ``lr``. It rises in a line during ``warmup_steps``. After
    them it stays ("constant"), or falls to ``min_lr`` at the last of ``steps``: in a line ("linear"), as half
    a cosine ("cosine"; Loshchilov and Hutter, 2017, arXiv:1608.03983), or in a line of ``decay_steps`` alone,
    before which it stays ("wsd": warmup, stable, decay; Hu et al., 2024, arXiv:2404.06395).
    """
    warmup = steps_of(optimizer.warmup_steps, steps)
    least = optimizer.min_lr / optimizer.lr
    begins = warmup
    if optimizer.schedule == "wsd":
        decay = DECAY if optimizer.decay_steps is None else optimizer.decay_steps
        begins = max(warmup, steps - steps_of(decay, steps))

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        if optimizer.schedule == "constant" or step < begins:
            return 1.0
        progress = min((step - begins) / max(1, steps - begins), 1.0)
        left = (1 + math.cos(math.pi * progress)) / 2 if optimizer.schedule == "cosine" else 1 - progress
        return least + (1 - least) * left

    return factor
