"""What the backward that is running asks for."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from streamer.engine.guarded import as_plain


class Asked(enum.Enum):
    """What becomes of a parameter's gradient."""

    NOTHING = "nothing"  # nobody wants it
    ADDED = "added"  # to p.grad, as by backward()
    RETURNED = "returned"  # as by torch.autograd.grad


def asked_of(accumulator: Any) -> Asked:
    """What is asked of the parameter that ``accumulator`` stands for in the graph; None stands for none that
    is trained."""
    if accumulator is None:
        return Asked.NOTHING
    try:
        return Asked.ADDED if torch._C._will_engine_execute_node(accumulator) else Asked.NOTHING
    except RuntimeError as error:
        # there is no other way to tell what torch.autograd.grad was given
        if "running autograd.grad()" not in str(error):
            raise
        return Asked.RETURNED


@as_plain
def asked_for(params: Iterable[nn.Parameter]) -> list[tuple[nn.Parameter, Asked]]:
    """Those of ``params`` whose gradients are asked for, and what becomes of them."""
    edge = torch.autograd.graph.get_gradient_edge
    asked = [(param, asked_of(edge(param).node)) for param in params if param.requires_grad]
    return [(param, what) for param, what in asked if what is not Asked.NOTHING]


def graph_is_retained() -> bool:
    """Whether it was told to keep its graph."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())
