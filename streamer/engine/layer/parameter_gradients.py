"""The gradients of a layer's parameters: what the backward that is running asks for, and their way into the
gradient slot.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import Node

from streamer.engine.paging.unit import Unit
from streamer.engine.tensors.guarded import as_plain, never_traced
from streamer.engine.tensors.param_hooks import hooks_of_all, shield
from streamer.memory.purposes import FP32
from streamer.torch_private import comes_to, keeps_graph


class Asked(enum.Enum):
    """What becomes of a parameter's gradient."""

    NOTHING = "nothing"  # nobody wants it
    ADDED = "added"  # to p.grad, as by backward()
    RETURNED = "returned"  # as by torch.autograd.grad


def asked_of(accumulator: Any) -> Asked:
    """What becomes of the gradient of the parameter that ``accumulator`` stands for in the graph; None stands
    for a parameter that is not trained."""
    if accumulator is None:
        return Asked.NOTHING
    try:
        return Asked.ADDED if comes_to(accumulator) else Asked.NOTHING
    except RuntimeError as error:
        # there is no other way to tell what torch.autograd.grad was given
        if "running autograd.grad()" not in str(error):
            raise
        return Asked.RETURNED


class InGraph(torch.autograd.Function):
    """The trainable parameters of a layer in the user's graph: parameters in, a tensor without elements out,
    which a call of the layer is given.

    [Note: parameters in the graph]
    A layer's own backward takes the gradients of its parameters to the host. The parameters are in the user's
    graph too, for ``backward(inputs=...)`` and `torch.autograd.grad`, which look for them there. One edge
    leads from a call of the layer to all of them, by way of this function's node. Were there an edge for each
    parameter, the layer's backward would hand as many tasks to the thread that has called backward: it runs
    what is on the CPU, such as these parameters, and on a GPU it would be woken for each of them.

    The node brings the ``gradients`` that the layer's backward has set for `torch.autograd.grad`, else None.
    """

    @staticmethod
    def forward(ctx: Any, *params: nn.Parameter) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.gradients = ctx.nothing = (None,) * len(params)
        return torch.empty(0, device="cpu")

    @staticmethod
    @never_traced
    def backward(ctx: Any, _: None) -> Any:
        gradients, ctx.gradients = ctx.gradients, ctx.nothing
        return gradients

    @staticmethod
    def accumulators(node: Node | None, count: int) -> list[Node | None]:
        """Of each of the ``count`` parameters of a node, None if none of them is trained, what adds to its
        gradient; None of one that is not trained."""
        return [None] * count if node is None else [before for before, _ in node.next_functions]


@as_plain
def asked_for(params: Iterable[nn.Parameter]) -> list[tuple[nn.Parameter, Asked]]:
    """Those of ``params`` whose gradients are asked for, and what becomes of them."""
    edge = torch.autograd.graph.get_gradient_edge
    asked = [(param, asked_of(edge(param).node)) for param in params if param.requires_grad]
    return [(param, what) for param, what in asked if what is not Asked.NOTHING]


def graph_is_retained() -> bool:
    """Whether the backward that is running was told to keep its graph."""
    return bool(keeps_graph())


#: Bytes of a gradient that waits for others of its size (of biases and norms), to be copied in one launch.
SMALL_BYTES = 1 << 16


class Collector:
    """Takes the gradients of ``unit`` to the gradient slot ``into`` (flat uint8) as autograd brings them, one
    slice of the batch after another. Where ``in_fp32``, gradients of a shorter dtype are added up in fp32
    first, which takes 4 bytes per element until `finish`.

    ``asked`` says for each trainable parameter what becomes of its gradient; gradients that are to be
    RETURNED are in ``returned``.
    """

    def __init__(self, unit: Unit, asked: Sequence[Asked], into: torch.Tensor, *, in_fp32: bool) -> None:
        self.used = [False] * len(asked)
        self.returned: list[torch.Tensor | None] = [None] * len(asked)
        self.asked = asked
        self._unit = unit
        self._into = into
        self._in_fp32 = in_fp32
        self._sums: torch.Tensor | None = None
        self._places = unit.layout.views(into)
        #: small gradients and where they are to go
        self._waiting: list[tuple[torch.Tensor, torch.Tensor]] = []
        if in_fp32 and any(map(self._is_summed, range(len(asked)))):
            self._sums = torch.empty(unit.layout.state_numel, dtype=FP32, device=into.device)

    def take(self, index: int, leaf: torch.Tensor) -> None:
        """Autograd has set the gradient of ``leaf``, which stands for trainable parameter ``index``."""
        if self.asked[index] is not Asked.ADDED:
            return
        gradient = leaf.grad
        assert gradient is not None, "called after autograd has set it"
        if gradient.is_sparse:
            gradient = gradient.to_dense()
        place = self._place(index)
        if self.used[index]:
            self._copy_waiting()
            place.add_(gradient)
        elif gradient.nbytes <= SMALL_BYTES:
            self._waiting.append((place, gradient))
        else:
            place.copy_(gradient)
        self.used[index] = True
        leaf.grad = None

    def _copy_waiting(self) -> None:
        if self._waiting:
            places, gradients = zip(*self._waiting, strict=True)
            self._waiting.clear()
            torch._foreach_copy_(places, gradients)

    def end_slice(self, leaves: Sequence[torch.Tensor]) -> None:
        """Autograd has gone through a slice of the batch: take over the gradients that are left with the
        leaves."""
        self._copy_waiting()
        for index, leaf in enumerate(leaves[: len(self.asked)]):
            if leaf.grad is not None:
                total = self.returned[index]
                self.returned[index] = leaf.grad if total is None else total + leaf.grad
                leaf.grad = None

    def finish(self) -> list[bool]:
        """Returns, after all slices, which of the trainable parameters have a gradient in the slot.

        The user's hooks see it here. [Note: parameter hooks]
        """
        all_hooks = hooks_of_all(self._unit.trainable)
        if any(all_hooks):
            shield(self._unit.trainable)
        elif self._sums is None:
            return self.used
        for index, (slice, hooks) in enumerate(zip(self._unit.layout.trainable, all_hooks, strict=True)):
            if not self.used[index]:
                continue
            if hooks or self._is_summed(index):
                view = slice.view(self._into)
                # hooks may keep what they are given
                gradient = self._place(index).to(view.dtype, copy=True)
                for hook in hooks:
                    changed = hook(gradient)
                    gradient = gradient if changed is None else changed
                if gradient.shape != view.shape:
                    raise RuntimeError(
                        f"a hook on '{slice.param.name}' has changed the shape of its gradient from "
                        f"{tuple(view.shape)} to {tuple(gradient.shape)}"
                    )
                view.copy_(gradient)
        self._sums = None
        return self.used

    def _place(self, index: int) -> torch.Tensor:
        if self._sums is not None and self._is_summed(index):
            return self._unit.layout.trainable[index].state(self._sums)
        return self._places[index]

    def _is_summed(self, index: int) -> bool:
        is_short = self._unit.layout.trainable[index].param.dtype != FP32
        return self._in_fp32 and is_short and self.asked[index] is Asked.ADDED
