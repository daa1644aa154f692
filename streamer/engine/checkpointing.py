"""Checkpoints of PyTorch (`torch.utils.checkpoint`) around layers and inside of them.

[Note: checkpointing]
A streamed layer decides itself what it keeps until backward. A checkpoint around one would have it run
forward a third time, only to find the inputs that it has kept: so what the layer saves goes past the
checkpoints around it, and does not count in them. Inside of a layer a checkpoint runs a part of it again in
the middle of its backward, when the layer's modules must see the weights that are in the slot (`Visit`).
Hugging Face's layers checkpoint the whole of themselves where their ``gradient_checkpointing`` is set; a
layer that runs again anyway need not do that twice.

The older kind of checkpoint (``use_reentrant=True``) runs its first forward without gradients, so nothing
tells it from inference: with that one around it, a layer runs once more than it would have to.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

_FLAG = "gradient_checkpointing"


@contextmanager
def past_checkpoints() -> Iterator[None]:
    """Save for backward as if no checkpoint were around the block. [Note: checkpointing]"""
    autograd = torch._C._autograd
    hooks = []
    while (top := autograd._top_saved_tensors_default_hooks(True)) is not None:
        if getattr(top[0], "__module__", None) != torch.utils.checkpoint.__name__:
            break
        hooks.append(top)
        autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pack, unpack in reversed(hooks):
            autograd._push_saved_tensors_default_hooks(pack, unpack)


@contextmanager
def without_own_checkpoint(layer: nn.Module) -> Iterator[None]:
    """Run the block with a layer of Hugging Face that does not checkpoint itself. [Note: checkpointing]"""
    is_set = layer.__dict__.get(_FLAG)
    if not is_set:
        yield
        return
    setattr(layer, _FLAG, False)
    try:
        yield
    finally:
        setattr(layer, _FLAG, is_set)
