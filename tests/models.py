"""Models of a few layers, of whatever kind a test needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

WIDTH = 16


def numbers(*shape: int, seed: int = 7) -> torch.Tensor:
    """The same random numbers for one seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Layer(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x))


class Stack(nn.Module):
    """A linear embedding, ``count`` layers that ``make`` makes, one after another, and a head or none."""

    def __init__(
        self, make: Callable[[], nn.Module] = Layer, count: int = 3, *, width: int = WIDTH, head: bool = False
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(width, width)
        self.blocks = nn.ModuleList(make() for _ in range(count))
        self.head = nn.Linear(width, width) if head else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Layers(nn.Module):
    """Layers alone, called one after another with ``args`` and ``kwargs`` after the hidden states. Of a layer
    that returns several values the first one goes on."""

    def __init__(
        self, make: Callable[[], nn.Module] = Layer, *args: Any, count: int = 3, **kwargs: Any
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(make() for _ in range(count))
        self.args, self.kwargs = args, kwargs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, *self.args, **self.kwargs)
            x = x[0] if isinstance(x, tuple) else x
        return x
