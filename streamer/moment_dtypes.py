"""Moments of AdamW carried over from one way to hold them to another."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from streamer.memory.layout import num_blocks
from streamer.memory.purposes import BF16, FP32, INT8
from streamer_native import QUANTUM

#: A code of an 8-bit second moment counts steps of this many bits of a float32: [Note: 8-bit moments].
_CODE_SHIFT, _SQ_CODES, _CODES = 20, 255, 127


def convert(
    moments: Mapping[str, torch.Tensor], held_in: torch.dtype, wanted: torch.dtype
) -> dict[str, torch.Tensor]:
    """A parameter's ``moments``, held in one of fp32, bf16 and int8, as another of these holds them, rounded
    to nearest; the same tensors where that is the same. Shapes are those of `streamer.moments.moments_of`."""
    if held_in == wanted:
        return dict(moments)
    exp_avg, exp_avg_sq = _widened(moments, held_in)
    if wanted in (FP32, BF16):
        return {"exp_avg": exp_avg.to(wanted), "exp_avg_sq": exp_avg_sq.to(wanted)}
    assert wanted == INT8
    return _narrowed(exp_avg, exp_avg_sq)


def _widened(moments: Mapping[str, torch.Tensor], held_in: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    exp_avg, exp_avg_sq = moments["exp_avg"], moments["exp_avg_sq"]
    if held_in != INT8:
        return exp_avg.float(), exp_avg_sq.float()
    scale = _of_elements(moments["exp_avg_scale"], exp_avg)
    sq_bits = _of_elements(moments["exp_avg_sq_scale"], exp_avg).view(torch.int32)
    bits = sq_bits + (exp_avg_sq.to(torch.int32) << _CODE_SHIFT)
    return exp_avg.float() * scale, torch.where(exp_avg_sq == 0, 0.0, bits.view(FP32))


def _narrowed(exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor) -> dict[str, torch.Tensor]:
    scale = _in_blocks(exp_avg.abs()).amax(1) / _CODES
    codes = torch.round(exp_avg / _of_elements(scale, exp_avg).clamp(min=torch.finfo(FP32).tiny))
    largest = _in_blocks(exp_avg_sq).amax(1).view(torch.int32)
    sq_scale = (largest - (_SQ_CODES << _CODE_SHIFT)).clamp(min=0).view(FP32)
    above = exp_avg_sq.contiguous().view(torch.int32) - _of_elements(sq_scale, exp_avg).view(torch.int32)
    # what lies below the first code gets that one, lest an update have nothing to divide by
    sq_codes = ((above + (1 << (_CODE_SHIFT - 1))) >> _CODE_SHIFT).clamp(1, _SQ_CODES)
    return {
        "exp_avg": codes.clamp(-_CODES, _CODES).to(INT8),
        "exp_avg_sq": torch.where(exp_avg_sq == 0, 0, sq_codes).to(torch.uint8),
        "exp_avg_scale": scale,
        "exp_avg_sq_scale": sq_scale,
    }


def _in_blocks(values: torch.Tensor) -> torch.Tensor:
    """[blocks, 256], padded with zeros."""
    flat = values.reshape(-1)
    padded = torch.zeros(num_blocks(flat.numel()) * QUANTUM, dtype=flat.dtype)
    padded[: flat.numel()] = flat
    return padded.view(-1, QUANTUM)


def _of_elements(of_blocks: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Each block's value for each of its elements, in the shape of ``like``."""
    return of_blocks.repeat_interleave(QUANTUM)[: like.numel()].view(like.shape)
