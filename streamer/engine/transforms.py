"""What a streamed layer can be no part of."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.autograd import forward_ad
from torch.nn.parallel import DistributedDataParallel

from streamer.engine.call import Tensors


def check_transforms(layer: str, tensors: Iterable[torch.Tensor | None] = ()) -> None:
    """Raise RuntimeError inside of a transform of `torch.func`, for batched gradients among ``tensors``, and
    inside of another data parallel module."""
    is_batched = torch._C._functorch.is_legacy_batchedtensor
    batched = any(tensor is not None and is_batched(tensor) for tensor in tensors)
    if batched or torch._C._are_functorch_transforms_active():
        raise RuntimeError(
            "transforms of torch.func (grad, vjp, jvp, vmap) and batched gradients do not go through "
            f"streamed layer '{layer}': use torch.autograd.grad, or call streamer.unwrap(model) first"
        )
    if DistributedDataParallel._active_ddp_module is not None:
        raise RuntimeError(
            f"DistributedDataParallel does not see when the gradients of streamed layer '{layer}' have "
            "arrived: train in one process, without it"
        )


def check_dual(layer: str, inputs: Tensors) -> None:
    """Raise RuntimeError for inputs of forward-mode differentiation."""
    if forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(x).tangent is not None for x in inputs):
        raise RuntimeError(
            f"forward-mode differentiation goes through streamed layer '{layer}' only where backward does "
            "not: run it under torch.no_grad()"
        )
