"""Attention on meta tensors by the kernel that a real device would choose.

On meta tensors ``torch.nn.functional.scaled_dot_product_attention`` is a chain of plain operations, which
holds a score for every pair of tokens. A device has kernels that never hold them; what a step takes there
is known only if those stand in the graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

_aten = torch.ops.aten
_HALVES = (torch.float16, torch.bfloat16)
#: What the flash kernel of a GPU can do, and what it rounds head dimensions up to.
MOST_HEAD_DIM, HEAD_DIMS = 256, 8


def _flops(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    flops: int = sdpa_flop_count(query.shape, key.shape, value.shape)
    return flops


def _backward_flops(gradient: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    flops: int = sdpa_backward_flop_count(gradient.shape, query.shape, key.shape, value.shape)
    return flops


#: Of the CPU's kernel, which PyTorch has no formula for: by its own formulas for attention.
CPU_FLOPS = {
    _aten._scaled_dot_product_flash_attention_for_cpu: _flops,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _backward_flops,
}


class FusedAttention(TorchFunctionMode):
    """Inside the block, attention on meta tensors is that of a device of ``kind``, "cpu" or "cuda"."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self._attend = _on_cpu if kind == "cpu" else _on_cuda

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            result = self._attend(*args, **kwargs)
            if result is not None:
                return result
        return func(*args, **kwargs)


def _on_cpu(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor | None:
    choice = torch._fused_sdp_choice(
        _of_one_row(query),
        _of_one_row(key),
        _of_one_row(value),
        None if attn_mask is None else _of_one_row(attn_mask),
        dropout_p,
        is_causal,
        scale=scale,
        enable_gqa=enable_gqa,
    )
    if choice != SDPBackend.FLASH_ATTENTION.value:
        return None
    result: torch.Tensor = _aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, dropout_p, is_causal, attn_mask=_added(attn_mask, query), scale=scale
    )[0]
    return result


def _on_cuda(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor | None:
    dim = query.shape[-1]
    if query.dim() != 4 or not dim == key.shape[-1] == value.shape[-1] or 0 in query.shape:
        return None
    if attn_mask is None and query.dtype in _HALVES and dim <= MOST_HEAD_DIM:
        more = -dim % HEAD_DIMS
        padded: Sequence[torch.Tensor] = [F.pad(t, (0, more)) if more else t for t in (query, key, value)]
        scale = dim**-0.5 if scale is None else scale
        out: torch.Tensor = _aten._scaled_dot_product_flash_attention(
            *padded, dropout_p, is_causal, False, scale=scale
        )[0]
        return out[..., :dim] if more else out
    if enable_gqa and key.shape[1] != query.shape[1]:
        return None
    bias = _added(attn_mask, query)
    if bias is not None:
        bias = bias.expand(*query.shape[:3], key.shape[2])
    needs_sums = query.requires_grad or key.requires_grad or value.requires_grad
    result: torch.Tensor = _aten._scaled_dot_product_efficient_attention(
        query, key, value, bias, needs_sums, dropout_p, is_causal, scale=scale
    )[0]
    return result


def _of_one_row(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU tensor of this shape, dtype and need of a gradient, all of whose rows are one."""
    row = torch.empty(tensor.shape[-1:] or (1,), dtype=tensor.dtype, device="cpu")
    strides = [0] * (tensor.dim() - 1) + [1] * min(tensor.dim(), 1)
    return row.as_strided(tensor.shape, strides).requires_grad_(tensor.requires_grad)


def _added(mask: torch.Tensor | None, query: torch.Tensor) -> torch.Tensor | None:
    """A mask in the form that kernels add to the scores."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), float("-inf"))
