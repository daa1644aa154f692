"""The user's function that makes the model."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

from streamer.app.config import ConfigError
from streamer.app.kinds import FACTORY
from streamer.kinds import nearest


def import_factory(spec: str) -> Callable[..., Any]:
    """The callable named by ``spec``, ``module:callable``, found with the working directory importable.

    Raises ConfigError where there is no such module, no such attribute, or it cannot be called. Any other
    exception of the module while it is imported is the module's own, and comes through as it is.
    """
    if not FACTORY.accepts(spec):
        raise ConfigError(f"the factory must be {FACTORY.words}, not {spec!r}")
    module_name, _, attribute = spec.partition(":")
    # In front, as `python -m` has it, and for good: a module may import its neighbours later.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise ConfigError(f"{spec}: no module {error.name!r} in {os.getcwd()} or installed") from None
    factory: Callable[..., Any] | None = getattr(module, attribute, None)
    if not callable(factory):
        mend = nearest(attribute, [name for name, value in vars(module).items() if callable(value)])
        raise ConfigError(f"{spec}: {module_name} has no callable {attribute!r}; {mend}")
    return factory
