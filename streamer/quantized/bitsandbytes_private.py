"""Undocumented internals of bitsandbytes for 4-bit weights: any release may change them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from math import prod
from typing import Any

import torch
import torch.nn.functional as F


@cache
def blocks_go_on_in_rows() -> bool:
    """Whether the CPU's kernel for 4-bit weights continues a block of scales across the end of a row, as
    quantization does: see `values_of_4_bits`."""
    library: Any = import_module("bitsandbytes")
    # three rows of one and a half blocks, whose scales are all different
    rows = torch.arange(1.0, 1 + 3 * 96).view(3, 96)
    codes, state = library.functional.quantize_4bit(rows, blocksize=64, quant_type="nf4")
    return torch.equal(library.functional.dequantize_4bit(codes, state), values_of_4_bits(codes, state))


def values_of_4_bits(codes: torch.Tensor, state: Any) -> torch.Tensor:
    """The values of ``codes`` by their QuantState, in its shape and dtype.

    Blocks continue from row to row. But the kernel of bitsandbytes 0.50 for CPUs with AVX-512 begins a block
    with each row, and takes wrong scales if a row is not a whole number of blocks. One row is right.
    """
    as_row = copy.copy(state)
    as_row.shape = torch.Size((1, prod(state.shape)))
    values: torch.Tensor = import_module("bitsandbytes").functional.dequantize_4bit(codes, as_row)
    return values.view(state.shape)


def product_with_4_bits(
    rows: torch.Tensor,
    codes: torch.Tensor,
    shape: Sequence[int],
    absmax: torch.Tensor,
    blocksize: int,
    quant_type: str,
    bias: torch.Tensor | None = None,
    absmax_8bit: torch.Tensor | None = None,
    absmax_code: torch.Tensor | None = None,
    absmax_offset: torch.Tensor | None = None,
) -> torch.Tensor:
    """The result of ``bitsandbytes::gemm_4bit`` for more than a few ``rows``: the weight dequantized, and a
    product with it."""
    ops: Any = torch.ops.bitsandbytes
    if absmax_8bit is not None and absmax_offset is not None:
        scales = ops.dequantize_blockwise.default(absmax_8bit, absmax, absmax_code, 256, torch.float32)
        absmax = scales + absmax_offset
    weight = ops.dequantize_4bit.default(codes, absmax, blocksize, quant_type, shape, rows.dtype)
    return F.linear(rows, weight, bias)
