"""Layers whose forward `torch.compile` has compiled."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from streamer.engine.unit import Unit

#: A backend of `torch.compile`: its name, or the function itself.
CompileBackend = str | Callable[..., Any]


def compiled(unit: Unit, backend: CompileBackend) -> Callable[..., Any]:
    """The forward of the unit's module, compiled.

    PyTorch caches compiled code by the code of the forward, and parameters are inputs of it. So layers of one
    class with parameters of the same shapes share one compilation. If it fails, the RuntimeError tells the
    remedy.
    """
    run = torch.compile(unit.module.forward, backend=backend)

    def forward(*args: Any, **kwargs: Any) -> Any:
        try:
            return run(*args, **kwargs)
        except RuntimeError as error:
            refuse_compiler_error(unit, error)
            raise

    return forward


def refuse_compiler_error(unit: Unit, error: RuntimeError) -> None:
    """Raise RuntimeError with the remedy if ``error`` was caused by compiling the layer ``unit``."""
    # the import takes a second; users who compile nothing need not wait
    dynamo: Any = sys.modules.get("torch._dynamo.exc")
    if dynamo is not None and isinstance(error, dynamo.TorchDynamoException):
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise RuntimeError(
            f"torch.compile fails on layer '{unit.name}', a {type(unit.module).__name__}: wrap with "
            f"compile=False ({reason})"
        ) from error
