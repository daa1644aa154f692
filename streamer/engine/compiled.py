"""A layer's forward through `torch.compile`, for as long as that works."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

#: What names a backend of `torch.compile`.
CompileBackend = str | Callable[..., Any]


class Compiler:
    """Compiles the layers of one model.

    PyTorch keeps what it has compiled by the code of a forward and takes parameters as inputs, so layers of
    one class whose parameters are alike share one compilation. Where one fails, all layers of that class run
    as they are from then on, which is said once.
    """

    def __init__(self, backend: CompileBackend = "inductor") -> None:
        # takes a second to import, which others need not wait for
        from torch._dynamo.exc import TorchDynamoException

        self.failure: type[BaseException] = TorchDynamoException
        self.given_up: set[type[nn.Module]] = set()
        self._backend = backend

    def compile(self, module: nn.Module) -> CompiledForward:
        """What runs in place of ``module.forward``."""
        compiled = torch.compile(module.forward, backend=self._backend)
        return CompiledForward(self, type(module), module.forward, compiled)


class CompiledForward:
    """The forward of one layer, of class ``kind``."""

    def __init__(
        self,
        compiler: Compiler,
        kind: type[nn.Module],
        plain: Callable[..., Any],
        compiled: Callable[..., Any],
    ) -> None:
        self.failure = compiler.failure
        self._compiler = compiler
        self._kind = kind
        self._plain = plain
        self._compiled = compiled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._kind not in self._compiler.given_up:
            try:
                return self._compiled(*args, **kwargs)
            except self.failure as error:
                self.give_up(error)
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
