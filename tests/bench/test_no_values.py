"""``--no-values``: what goes on where a device computes nothing, and that such a device is known."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import streamer
from bench import no_values
from bench.no_values import go_on_without_values, has_values
from streamer.engine.layer import batch_check
from streamer.engine.paging.norms import Norms
from streamer.optim import adamw
from tests.reference import unwrapping


@pytest.fixture
def without_values(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # so that they are put back
    monkeypatch.setattr(batch_check, "_are_alike", batch_check._are_alike)
    monkeypatch.setattr(Norms, "is_finite", Norms.is_finite)
    monkeypatch.setattr(Norms, "total", Norms.total)
    monkeypatch.setattr(adamw, "all_finite", adamw.all_finite)
    go_on_without_values()
    yield


RUNS = itertools.count(1)


class Moody(nn.Module):
    """A layer that computes something else whenever it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # an attribute of the layer would be put back before the second run
        return torch.tanh(self.linear(x) * next(RUNS))


def train(*, gradient: float = 1.0) -> tuple[nn.Module, float]:
    """A step; what it made of a weight's mean."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(*(Moody() for _ in range(3))))
    with unwrapping(streamer.wrap(model, layers="1", device="cpu", host_threads=1)):
        optimizer = streamer.AdamW(model.parameters(), lr=0.1)
        before = model[1][0].linear.bias.detach().clone()
        (model(torch.ones(4, 8)).sum() * gradient).backward()
        optimizer.step()
        moved = float((model[1][0].linear.bias.detach() - before).abs().mean())
        return model, moved


@pytest.mark.usefixtures("without_values")
def test_without_values_gradients_are_finite_and_updates_made() -> None:
    # NaN gradients would be skipped with a warning, which is an error here
    train(gradient=float("nan"))


def test_a_device_that_computes_is_told_from_one_that_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    assert has_values("cpu")
    for left in (torch.zeros(8), torch.full((8,), float("nan")), torch.ones(8)):
        monkeypatch.setattr(no_values.torch, "arange", lambda *args, left=left, **options: left)
        assert not has_values("cpu")
