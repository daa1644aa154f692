"""What a config asks for: the wrapped model, its optimizer, and the learning rates."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

import streamer
from streamer.app.config import Config, ConfigError, ModelConfig, OptimizerConfig, StreamConfig
from streamer.app.data import TokenData, load_bytes
from streamer.app.factory import import_factory
from streamer.app.pretrained import load_pretrained
from streamer.app.tokenized import load_tokenizer, load_tokens
from streamer.backends.base import Backend


def build_model(config: Config, *, backend: Backend | None = None) -> nn.Module:
    """The config's model, wrapped; on ``backend`` in place of that of ``stream.device``, if it is given.

    Raises ConfigError for what the factory or `streamer.wrap` refuses.
    """
    if config.model.pretrained is not None:
        return load_pretrained(config, {**stream_options(config.stream), "backend": backend})
    assert config.model.factory is not None, "load_config has looked"
    factory = import_factory(config.model.factory)
    # a virtual machine has no use for values
    on_meta = config.model.init is not None or (backend is not None and backend.device.type == "meta")
    try:
        with torch.device("meta") if on_meta else contextlib.nullcontext():
            model = factory(**config.model.args)
        if not isinstance(model, nn.Module):
            raise ValueError(f"it returns a {type(model).__name__}, not an nn.Module")
    except (TypeError, ValueError) as error:
        raise ConfigError(f"model.factory {config.model.factory} with these args: {error}") from error
    init = _init(config.model, model)
    try:
        return streamer.wrap(model, init=init, backend=backend, **stream_options(config.stream))
    except (ValueError, MemoryError) as error:
        raise ConfigError.of("[stream]", error) from error


def stream_options(config: StreamConfig) -> dict[str, Any]:
    """Keyword arguments of `streamer.wrap`."""
    dims: Mapping[str, Any] | None = config.batch_dims
    return vars(config) | {
        "dtype": None if config.dtype is None else getattr(torch, config.dtype),
        "batch_dims": dims and {name: None if dim == "none" else dim for name, dim in dims.items()},
    }


def load_data(config: Config) -> TokenData:
    """The config's data, in bytes or in the tokens of a tokenizer. Raises ConfigError for what is wrong."""
    tokenizer = config.data.tokenizer or config.model.pretrained
    if tokenizer is None:
        return load_bytes(config.data.paths, val_fraction=config.data.val_fraction)
    # found before text is read, and imports what takes seconds
    return load_tokens(config.data.paths, load_tokenizer(tokenizer), val_fraction=config.data.val_fraction)


def _init(config: ModelConfig, model: nn.Module) -> Callable[[nn.Module], object] | None:
    if config.init is None:
        return None
    init: Callable[[nn.Module], object] | None = getattr(model, config.init, None)
    if not callable(init):
        raise ConfigError(f"model.init = {config.init!r}: {type(model).__name__} has no such method")
    return init


def build_optimizer(
    config: OptimizerConfig, model: nn.Module, *, skip_nonfinite: bool = True
) -> streamer.AdamW:
    """The config's optimizer of the wrapped model; ``skip_nonfinite`` is `streamer.AdamW`'s."""
    try:
        return streamer.AdamW(
            model.parameters(),
            lr=config.lr,
            betas=config.betas,
            eps=config.eps,
            weight_decay=config.weight_decay,
            state_dtype=config.state_dtype,
            skip_nonfinite=skip_nonfinite,
        )
    except (ValueError, MemoryError) as error:
        raise ConfigError.of("[optimizer]", error) from error


def schedule(optimizer: OptimizerConfig, steps: int) -> Callable[[int], float]:
    """The learning rate as a factor of ``lr``: linear warm-up, then a cosine to ``min_lr`` at ``steps``."""

    def factor(step: int) -> float:
        if step < optimizer.warmup_steps:
            return (step + 1) / optimizer.warmup_steps
        progress = (step - optimizer.warmup_steps) / max(1, steps - optimizer.warmup_steps)
        least = optimizer.min_lr / optimizer.lr
        return least + (1 - least) * (1 + math.cos(math.pi * min(progress, 1.0))) / 2

    return factor
