"""Replacements of a module's forward, and modules whose forward distinguishes guarded parameters from plain
ones."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

from torch import nn

from streamer.engine.guard import unguarded

Forward = Callable[..., Any]

#: A replacement of a module's ``forward`` has this attribute: the module's own forward that shadowed its
#: class's, or None.
HAD = "_streamer_had"

#: Modules that call `torch.overrides.has_torch_function`, and leave their fast path if a parameter's class
#: overrides PyTorch's functions, as the class of a wrapped model's parameters does.
_ASKING = (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention)


def plain_forwards(modules: Iterable[nn.Module]) -> Callable[[], None]:
    """Let those of ``modules``, which are outside of layers, compute by the operations that they would use
    with plain parameters; the returned function undoes that."""

    def plain(forward: Forward) -> Forward:
        def run(*args: Any, **kwargs: Any) -> Any:
            with unguarded():
                return forward(*args, **kwargs)

        return run

    with ExitStack() as stack:
        for module in modules:
            if isinstance(module, _ASKING):
                stack.callback(_stand_in(module, plain))
        return stack.pop_all().close


def _stand_in(module: nn.Module, make: Callable[[Forward], Forward]) -> Callable[[], None]:
    """Replace the forward of ``module`` by ``make(forward)``; the returned function undoes that."""
    had, forward = module.__dict__.get("forward"), module.forward
    # for inspect.signature
    instead = functools.update_wrapper(make(forward), forward, updated=())
    setattr(instead, HAD, had)
    module.__dict__["forward"] = instead

    def take_off() -> None:
        if had is None:
            module.__dict__.pop("forward", None)
        else:
            module.__dict__["forward"] = had

    return take_off
