"""Who may go back through a layer's private graph: its own backward, and nobody else."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager

from streamer.engine.call import Tensors
from streamer.engine.param_hooks import OWN_HOOK


class Gate:
    """Refuses gradients that come to a layer's private graph from anywhere but the layer's own backward.

    A tensor that leaves a layer through an attribute, a hook or a recorder is not connected to the user's
    graph: what flows back through it would be lost.
    """

    def __init__(self, layer: str) -> None:
        self._layer = layer
        self._is_open = False

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Let gradients through inside the block."""
        self._is_open = True
        try:
            yield
        finally:
            self._is_open = False

    def check(self, *_: object) -> None:
        """Raise RuntimeError unless open."""
        if not self._is_open:
            raise RuntimeError(
                f"a tensor that layer '{self._layer}' computed reached the loss by another way than the "
                "layer's return value (an attribute, a hook, a cache, recorded outputs such as router "
                "logits, or torch.autograd.grad in the layer itself), where its gradient would be lost: "
                "return it, detach it, or do not stream this list of layers"
            )

    def guard(self, tensors: Tensors) -> None:
        """Check whenever a gradient comes to one of these leaves."""
        for tensor in tensors:
            if tensor.requires_grad:
                # as `register_hook` does, without a handle to take it off by, which takes longer to make
                tensor._backward_hooks = OrderedDict(gate=self.check)


setattr(Gate.check, OWN_HOOK, True)
