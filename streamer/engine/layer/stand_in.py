"""What stands in for the forward of a module, and modules whose forward tells guarded parameters from plain
ones."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

from torch import nn

from streamer.engine.guard import unguarded

Forward = Callable[..., Any]

#: What stands in for a module's ``forward`` has this attribute: what the module had of its own in place of
#: its class's forward, or None.
HAD = "_streamer_had"

#: Modules that ask `torch.overrides.has_torch_function`, and leave their fast path where a parameter's class
#: overrides PyTorch's functions, as those of a wrapped model do.
_ASKING = (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention)


def plain_forwards(modules: Iterable[nn.Module]) -> Callable[[], None]:
    """Let those of ``modules``, which are outside of layers, compute by the operations that they would use
    with plain parameters; the returned function ends that."""

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
    """Put ``make(forward)`` in place of the forward of ``module``; the returned function takes it off."""
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
