"""Ways to round Adam's moments that streamer_native does without, for `bench.moments` to show why.

Each rounds both moments of one parameter, fp32 tensors of any shape, in place.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F

BLOCK = 256  # elements of a parameter that share a scale, as in streamer_native
PERCENTILES = (5, 25, 50, 75, 95)

Rounding = Callable[[torch.Tensor, torch.Tensor], None]


class RoundedMoments:
    """Rounds the fp32 moments in the state of ``optimizer``, and keeps the second as it were without that."""

    def __init__(self, optimizer: torch.optim.Optimizer, rounding: Rounding) -> None:
        self._optimizer = optimizer
        self._rounding = rounding
        self._stored: dict[torch.Tensor, torch.Tensor] = {}
        self._exact: dict[torch.Tensor, torch.Tensor] = {}

    def after_step(self) -> None:
        """To be called once the updates of a step are done."""
        for group in self._optimizer.param_groups:
            beta2 = group["betas"][1]
            for param in group["params"]:
                state = self._optimizer.state[param]
                exp_avg_sq = state["exp_avg_sq"]
                # what the step has added to what was stored: (1 - beta2) * gradient^2
                added = exp_avg_sq - beta2 * self._stored.get(param, torch.zeros(()))
                self._exact[param] = beta2 * self._exact.get(param, torch.zeros(())) + added
                self._rounding(state["exp_avg"], exp_avg_sq)
                self._stored[param] = exp_avg_sq.clone()

    def second_moment_ratios(self) -> dict[str, float]:
        """Percentiles, over all elements, of the second moment as it is over what it would be."""
        stored, exact = (
            torch.cat([moment.flatten() for moment in moments.values()]).numpy()
            for moments in (self._stored, self._exact)
        )
        values = np.percentile(stored[exact > 0] / exact[exact > 0], PERCENTILES)
        return {f"{percent} %": float(value) for percent, value in zip(PERCENTILES, values, strict=True)}


def second_moment_to_bf16(exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor) -> None:
    """The second moment to the nearest bf16; the first stays as it is."""
    exp_avg_sq.copy_(exp_avg_sq.to(torch.bfloat16))


def to_float_codes(exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor) -> None:
    """Both moments to the nearest 8-bit code of those that streamer_native has, where rounding is stochastic:
    evenly spaced for the first, five bits of exponent and three of fraction for the second."""
    exp_avg.copy_(linear(exp_avg, codes=127))
    bits = (exp_avg_sq.view(torch.int32) + (1 << 19)) >> 20 << 20
    exp_avg_sq.copy_(bits.view(torch.float32))


def to_linear_codes(exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor) -> None:
    """Both moments to the nearest of evenly spaced 8-bit codes."""
    exp_avg.copy_(linear(exp_avg, codes=127))
    exp_avg_sq.copy_(linear(exp_avg_sq, codes=255))


def linear(values: torch.Tensor, *, codes: int) -> torch.Tensor:
    """``values`` as the nearest of -codes .. codes times a scale, the largest of each 256 over ``codes``.

    A block whose scale would not be a normal number becomes 0.
    """
    flat = values.flatten()
    blocks = F.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)
    scales = blocks.abs().amax(dim=1, keepdim=True) / codes
    rounded = torch.where(scales >= torch.finfo(torch.float32).tiny, blocks / scales, 0).round_() * scales
    return rounded.flatten()[: len(flat)].view_as(values)
