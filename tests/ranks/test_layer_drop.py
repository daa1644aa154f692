"""Layers that are skipped at random (LayerDrop): the same on all ranks, or an error with the line to add."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import streamer
from streamer.errors import RanksError
from tests.ranks.common import run_ranks
from tests.ranks.programs import Model, arrays, part
from tests.reference import assert_equal

STEPS = 4


class Dropping(Model):
    def forward(self, x: torch.Tensor, spare: bool = False) -> torch.Tensor:
        x = self.embedding(x)
        for layer in self.layers:
            if torch.rand(()) > 0.5:
                x = layer(x, spare)
        return self.norm(x) @ self.embedding.weight.T


def dropping() -> Dropping:
    torch.manual_seed(0)
    return Dropping(4)


def loss(model: nn.Module, step: int, rank: int, *, seed: int) -> torch.Tensor:
    tokens = part(step, rank)
    torch.manual_seed(seed)
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def trained(rank: int, *, alike: bool, options: dict[str, object]) -> dict[str, np.ndarray] | str:
    """The weights after some steps, or the error. ``alike`` ranks have one seed for each forward."""
    group = dist.group.WORLD
    model = streamer.wrap(dropping(), layers="layers", device="cpu", process_group=group, **options)
    optimizer = streamer.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    try:
        for step in range(STEPS):
            loss(model, step, rank, seed=step if alike else 10 * step + rank).backward()
            optimizer.step()
            optimizer.zero_grad()
    except RanksError as error:
        return str(error)
    return arrays(streamer.unwrap(model).state_dict())


def with_one_seed(rank: int) -> dict[str, np.ndarray] | str:
    return trained(rank, alike=True, options={})


def with_two_seeds(rank: int, gathers: bool) -> dict[str, np.ndarray] | str:
    return trained(rank, alike=False, options={"gather_weights": gathers})


def test_with_one_seed_ranks_equal_plain_pytorch() -> None:
    plain = dropping()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.0)
    for step in range(STEPS):
        for rank in range(2):
            (loss(plain, step, rank, seed=step) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    for found in run_ranks(2, with_one_seed):
        assert_equal(found, plain.state_dict(), atol=1e-6)


@pytest.mark.parametrize("gathers", [False, True])
def test_with_two_seeds_the_error_has_the_line_to_add(gathers: bool) -> None:
    for error in run_ranks(2, with_two_seeds, gathers):
        assert error.startswith("the ranks do not do the same. Last came rank 0 to: ")
        assert "'layers." in error
        assert "all ranks need one seed for that, so add torch.manual_seed(step) before each forward" in error
        assert "\n" not in error
