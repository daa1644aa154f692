"""A model of three layers, of whatever kind a test asks for."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

WIDTH = 16


class Stack(nn.Module):
    """A linear embedding, ``count`` layers that ``make`` makes, one after another, and a head or none."""

    def __init__(
        self, make: Callable[[], nn.Module], count: int = 3, *, width: int = WIDTH, head: bool = False
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


class Layer(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x))
