"""What is kept from the user's own `torch.compile`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch._C._dynamo import eval_frame

F = TypeVar("F", bound=Callable[..., Any])


def never_traced(function: F) -> F:
    """Let ``function``, and all that it calls, run as it is where the user compiles what calls it.

    `torch.compiler.disable` does so with a wrapper, and imports the compiler, which takes seconds. It is the
    code of the function that is marked: it must not be a wrapper, whose code others have too.
    """
    run_as_it_is(function)
    vars(function).update(
        _torchdynamo_disable=True,
        _torchdynamo_disable_msg="streamer pages weights in it; streamer.wrap(compile=True) compiles layers",
    )
    return function


def run_as_it_is(function: F) -> F:
    """Let ``function`` run as it is where what calls it was not compiled; what is compiled may take it in."""
    assert not hasattr(function, "__wrapped__")
    skip = eval_frame._FrameAction.SKIP
    eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(skip, skip))
    return function
