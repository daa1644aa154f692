"""Ways to round Adam's moments that streamer_native does without, for `bench.moments` to show why.

Each rounds both moments of one parameter, fp32 tensors of any shape, in place.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

BLOCK = 256  # elements of a parameter that share a scale, as in streamer_native


def second_moment_to_bf16(exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor) -> None:
    """The second moment to the nearest bf16; the first stays as it is."""
    exp_avg_sq.copy_(exp_avg_sq.to(torch.bfloat16))


def to_root_codes(exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor) -> None:
    """The first moment and the root of the second to the nearest 8-bit code: those of streamer_native, where
    rounding is stochastic. As there, a root above 0 gets no code below 1."""
    exp_avg.copy_(linear(exp_avg, codes=127))
    exp_avg_sq.copy_(linear(exp_avg_sq.sqrt(), codes=255, least=1).square())


def to_linear_codes(exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor) -> None:
    """Both moments themselves, without a root, to the nearest 8-bit code."""
    exp_avg.copy_(linear(exp_avg, codes=127))
    exp_avg_sq.copy_(linear(exp_avg_sq, codes=255))


def linear(values: torch.Tensor, *, codes: int, least: int = 0) -> torch.Tensor:
    """``values`` as the nearest of -codes .. codes times a scale, the largest of each 256 over ``codes``.

    Values above 0 get no code below ``least``. A block whose scale would not be a normal number becomes 0.
    """
    flat = values.flatten()
    blocks = F.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)
    scales = blocks.abs().amax(dim=1, keepdim=True) / codes
    rounded = torch.where(scales >= torch.finfo(torch.float32).tiny, blocks / scales, 0).round_()
    rounded = torch.where((blocks > 0) & (rounded < least), least, rounded) * scales
    return rounded.flatten()[: len(flat)].view_as(values)
