"""What this library itself takes of the caller's time, where the host's cores also compute."""

from __future__ import annotations

import statistics
import time

import torch
from torch import nn

import streamer
from streamer.backends.operations import Operations
from streamer.backends.thread import ThreadBackend

LAYERS, HIDDEN, TOKENS = 8, 64, 16
#: Steps of a round.
STEPS = 3


class Visits:
    """Trains layers that are so small that a step takes as long as it takes to issue it; as many parameters
    in each as in one of GPT-2, since each has its views and its hooks."""

    def __init__(self) -> None:
        layers = nn.Sequential(*(_layer() for _ in range(LAYERS)))
        self._model = streamer.wrap(nn.Sequential(layers), layers="0", backend=ThreadBackend(), num_slots=2)
        self._optimizer = streamer.AdamW(self._model.parameters(), lr=1e-6)
        self._inputs = torch.randn(TOKENS, HIDDEN)
        self._step()  # learns the order
        with Operations() as operations:
            self._step()
        self._ops = operations.ops

    def seconds(self, per_op: float) -> float:
        """Seconds per visit, beside its operations, each of which takes ``per_op`` seconds."""
        steps: list[float] = []
        for _ in range(STEPS):
            began = time.perf_counter()
            self._step()
            steps.append(time.perf_counter() - began)
        of_library: float = statistics.median(steps) - per_op * self._ops
        # each layer's forward and its backward
        return max(0.0, of_library) / (2 * LAYERS)

    def close(self) -> None:
        """Give back what it holds."""
        streamer.unwrap(self._model)

    def _step(self) -> None:
        self._model(self._inputs).square().mean().backward()
        self._optimizer.step()
        self._optimizer.zero_grad()


def _layer() -> nn.Module:
    attention = [nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)]
    mlp = [nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, HIDDEN)]
    return nn.Sequential(*attention, *mlp)
