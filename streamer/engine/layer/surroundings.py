"""The surroundings of a layer's forward: autocast, and checkpoints of the user's.

[Note: checkpointing]
A checkpoint (`torch.utils.checkpoint`) around several layers would drop all tensors saved inside, and run all
of it again before the first of those layers goes backward, only to recompute the inputs that the layer has
kept. So a layer's saved tensors bypass the hooks of the checkpoints around it. Hugging Face's layers
checkpoint themselves if their ``gradient_checkpointing`` is set; the flag is off while a layer runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import torch
from torch import nn

from streamer.torch_private import in_autocast, pop_saved_hooks, push_saved_hooks, top_saved_hooks

#: Shared by the blocks of all runs that have nothing to change: a generator for each takes longer.
_NOTHING = nullcontext()


def autocast_settings(device: torch.device) -> tuple[tuple[str, bool, torch.dtype], ...]:
    """Of the CPU and of ``device``: its type, whether autocast is on, and the dtype."""
    types = ("cpu",) if device.type in ("cpu", "meta") else ("cpu", device.type)
    return tuple((type, torch.is_autocast_enabled(type), torch.get_autocast_dtype(type)) for type in types)


def uncached_autocast(device: torch.device) -> AbstractContextManager[None]:
    """The block without autocast's cache of cast weights. The cache would keep a cast copy of every layer's
    weights on the device until autocast ends, and use it when the slot has other weights."""
    return _uncached_autocast(device) if in_autocast() else _NOTHING


@contextmanager
def _uncached_autocast(device: torch.device) -> Iterator[None]:
    with ExitStack() as stack:
        for type, enabled, dtype in autocast_settings(device):
            if enabled:
                stack.enter_context(torch.autocast(type, dtype=dtype, cache_enabled=False))
        yield


def past_checkpoints() -> AbstractContextManager[None]:
    """Save for backward as if no checkpoint were around the block. [Note: checkpointing]"""
    return _NOTHING if top_saved_hooks() is None else _past_checkpoints()


@contextmanager
def _past_checkpoints() -> Iterator[None]:
    hooks = []
    while (top := top_saved_hooks()) is not None:
        if getattr(top[0], "__module__", None) != torch.utils.checkpoint.__name__:
            break
        hooks.append(top)
        pop_saved_hooks()
    try:
        yield
    finally:
        for pack, unpack in reversed(hooks):
            push_saved_hooks(pack, unpack)


_FLAG = "gradient_checkpointing"


def without_own_checkpoint(layer: nn.Module) -> AbstractContextManager[None]:
    """Run the block with a layer of Hugging Face that does not checkpoint itself. [Note: checkpointing]"""
    is_set = layer.__dict__.get(_FLAG)
    return _without_own_checkpoint(layer, is_set) if is_set else _NOTHING


@contextmanager
def _without_own_checkpoint(layer: nn.Module, is_set: object) -> Iterator[None]:
    setattr(layer, _FLAG, False)
    try:
        yield
    finally:
        setattr(layer, _FLAG, is_set)
