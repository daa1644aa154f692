"""A layer's forward through `torch.compile`, for as long as that works; and what is kept from the user's own
`torch.compile`."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn
from torch._C._dynamo import eval_frame

from streamer.engine.ambient import Ambient
from streamer.engine.unit import Unit

#: What names a backend of `torch.compile`.
CompileBackend = str | Callable[..., Any]

F = TypeVar("F", bound=Callable[..., Any])


def never_traced(function: F) -> F:
    """Let ``function``, and all that it calls, run as it is where the user compiles what calls it.

    `torch.compiler.disable` does so with a wrapper, and imports the compiler, which takes seconds. It is the
    code of the function that is marked: it must not be a wrapper, whose code others have too.
    """
    assert not hasattr(function, "__wrapped__")
    skip = eval_frame._FrameAction.SKIP
    eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(skip, skip))
    vars(function).update(
        _torchdynamo_disable=True,
        _torchdynamo_disable_msg="streamer pages weights in it; streamer.wrap(compile=True) compiles layers",
    )
    return function


class Compiler:
    """Compiles the layers of one model, which run on ``device``.

    PyTorch keeps what it has compiled by the code of a forward and takes parameters as inputs, so layers of
    one class whose parameters are alike share one compilation. Where one fails, all layers of that class run
    as they are from then on, which is said once.
    """

    def __init__(self, device: torch.device, backend: CompileBackend) -> None:
        # takes a second to import, which others need not wait for
        from torch._dynamo.exc import TorchDynamoException

        self.device = device
        self.failure: type[BaseException] = TorchDynamoException
        self.given_up: set[type[nn.Module]] = set()
        self._backend = backend

    def compile(self, unit: Unit) -> CompiledForward:
        """What runs in place of the forward of the unit's module."""
        return CompiledForward(self, unit, torch.compile(unit.module.forward, backend=self._backend))


class CompiledForward:
    """The forward of one layer."""

    def __init__(self, compiler: Compiler, unit: Unit, compiled: Callable[..., Any]) -> None:
        self.failure = compiler.failure
        self._compiler = compiler
        self._unit = unit
        self._kind = type(unit.module)
        self._plain: Callable[..., Any] = unit.module.forward
        self._compiled = compiled

    @property
    def works(self) -> bool:
        """Whether the compiled forward is what runs."""
        return self._kind not in self._compiler.given_up

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.works:
            before, buffers = Ambient.now(self._compiler.device), self._unit.buffers_now()
            try:
                return self._compiled(*args, **kwargs)
            except self.failure as error:
                self.give_up(error)
            # a part of the forward may have run
            before.rewind()
            self._unit.put_back(buffers)
        return self._plain(*args, **kwargs)

    def give_up(self, error: BaseException) -> None:
        """Run all layers of this class as they are from now on, because compiling ended in ``error``."""
        self._compiler.given_up.add(self._kind)
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        warnings.warn(
            f"torch.compile fails on {self._kind.__name__}, whose layers run as they are from now on (give "
            f"compile=False to be spared this): {reason}",
            stacklevel=2,
        )
