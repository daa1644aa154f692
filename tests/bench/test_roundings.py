"""The roundings of the moments study against a plain loop."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from bench.roundings import RoundedMoments, linear, second_moment_to_bf16, to_float_codes, to_linear_codes

SHAPES = [(1,), (255,), (256,), (257,), (3, 200)]


def linear_one_by_one(values: torch.Tensor, codes: int) -> torch.Tensor:
    """`linear` as a loop over blocks and elements, in fp32 throughout."""
    flat = values.flatten().numpy()
    result = np.zeros_like(flat)
    for begin in range(0, len(flat), 256):
        block = flat[begin : begin + 256]
        scale = np.abs(block).max() / np.float32(codes)
        for place, value in enumerate(block, begin):
            if scale > 0:
                result[place] = np.float32(round(float(value / scale))) * scale
    return torch.from_numpy(result).view_as(values)


def moments(shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Moments over many magnitudes, some of them zero."""
    draws = torch.Generator().manual_seed(math.prod(shape))
    exp_avg, exponent = torch.randn(shape, generator=draws), torch.randn(shape, generator=draws)
    zeros = torch.rand(shape, generator=draws) < 0.1
    exp_avg = (exp_avg * 10 ** (2 * exponent)).masked_fill(zeros, 0)
    return exp_avg, exp_avg.square() / 3


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("codes", [127, 255])
def test_linear_is_what_a_loop_does(shape, codes):
    values, _ = moments(shape)
    assert torch.equal(linear(values, codes=codes), linear_one_by_one(values, codes))


def test_zeros_stay_zeros():
    assert torch.equal(linear(torch.zeros(300), codes=255), torch.zeros(300))


@pytest.mark.parametrize("shape", SHAPES)
def test_no_second_moment_is_lost_as_a_float_and_many_are_in_evenly_spaced_codes(shape):
    exp_avg, exp_avg_sq = moments(shape)
    as_float, evenly = exp_avg_sq.clone(), exp_avg_sq.clone()
    to_float_codes(exp_avg.clone(), as_float)
    to_linear_codes(exp_avg.clone(), evenly)
    assert torch.equal(as_float > 0, exp_avg_sq > 0)
    assert ((as_float - exp_avg_sq).abs() <= exp_avg_sq / 16).all()
    # 255 codes: a second moment below 1/510 of the largest is nearer to 0 than to the first of them
    blocks = torch.nn.functional.pad(exp_avg_sq.flatten(), (0, -exp_avg_sq.numel() % 256)).view(-1, 256)
    lost = (blocks / blocks.amax(dim=1, keepdim=True) < 1 / 511).flatten()[: exp_avg_sq.numel()]
    assert not evenly.flatten()[lost].any()


def test_the_first_moment_is_left_when_the_second_goes_to_bf16():
    exp_avg, exp_avg_sq = moments((3, 200))
    first, second = exp_avg.clone(), exp_avg_sq.clone()
    second_moment_to_bf16(first, second)
    assert torch.equal(first, exp_avg)
    assert torch.equal(second, exp_avg_sq.bfloat16().float())


def test_rounded_moments_know_what_they_would_be_unrounded():
    params = [torch.nn.Parameter(torch.ones(300)) for _ in range(2)]
    optimizers = [torch.optim.AdamW([param], betas=(0.9, 0.99)) for param in params]
    moments = RoundedMoments(optimizers[0], second_moment_to_bf16)
    draws = torch.Generator().manual_seed(0)
    for _ in range(20):
        gradient = torch.randn(300, generator=draws)
        for param, optimizer in zip(params, optimizers, strict=True):
            param.grad = gradient.clone()
            optimizer.step()
        moments.after_step()
    rounded, exact = (optimizers[i].state[params[i]]["exp_avg_sq"] for i in range(2))
    assert torch.equal(rounded, rounded.bfloat16().float())
    assert not torch.allclose(rounded, exact, rtol=1e-3)
    percentiles = np.percentile((rounded / exact).numpy(), [5, 25, 50, 75, 95])
    assert list(moments.second_moment_ratios().values()) == pytest.approx(percentiles, rel=1e-4)
