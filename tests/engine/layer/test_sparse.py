"""Sparse tensors as arguments, buffers and results of layers, and made of weights, as in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import streamer
from tests.reference import LossOf, assert_parity, in_turn, train

WIDTH, NODES = 8, 6
POLICIES = ["recompute", "keep", "recompute+offload"]
# PyTorch says so of all of them but the first
pytestmark = pytest.mark.filterwarnings("ignore:Sparse C.. tensor support is in beta state:UserWarning")

LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "coo": lambda dense: dense.to_sparse(),
    "csr": lambda dense: dense.to_sparse_csr(),
}


def adjacency(layout: str = "coo") -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    numbers = torch.rand(NODES, NODES, generator=generator)
    return LAYOUTS[layout](numbers * (numbers > 0.5))


class Argument(nn.Module):
    """Averages nodes over their neighbours."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x + torch.tanh(edges @ self.linear(x)), edges


class Buffer(Argument):
    def __init__(self, layout: str) -> None:
        super().__init__()
        self.register_buffer("own", adjacency(layout))

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return super().forward(x, self.own)[0], edges


class Weight(nn.Module):
    """The values of a sparse matrix are a parameter, which the matrix shows where nothing is to be sorted."""

    def __init__(self, is_coalesced: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.values = nn.Parameter(torch.randn(WIDTH))
        self.places = torch.stack([torch.arange(WIDTH), torch.arange(WIDTH).roll(3)])
        self.is_coalesced = is_coalesced

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        matrix = torch.sparse_coo_tensor(
            self.places,
            self.values,
            (WIDTH, WIDTH),
            is_coalesced=self.is_coalesced,
            check_invariants=True,
        )
        return self.linear(x) + torch.sparse.mm(matrix, x.t()).t(), edges


class Graph(nn.Module):
    """Three layers that are given sparse edges."""

    def __init__(self, make: Callable[[], nn.Module] = Argument, layout: str = "coo") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(make() for _ in range(3))
        self.register_buffer("edges", adjacency(layout))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, edges = self.embed(x), self.edges
        for layer in self.layers:
            x, edges = layer(x, edges)
        return x


def loss(model: nn.Module, step: int) -> torch.Tensor:
    x = torch.randn(NODES, WIDTH, generator=torch.Generator().manual_seed(step))
    return (model(x) - 1).square().mean()


@contextmanager
def wrapped(model: nn.Module, **options: Any) -> Iterator[nn.Module]:
    """Not a copy of ``model``: PyTorch copies not all sparse tensors."""
    try:
        yield streamer.wrap(model, device="cpu", layers="layers", **options)
    finally:
        streamer.unwrap(model)


def assert_trains(make: Callable[[], nn.Module], loss_of: LossOf = loss, **options: object) -> None:
    """Three steps equal plain PyTorch's. The model is made twice: PyTorch copies not all sparse tensors."""
    plain = make()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    clip = partial(torch.nn.utils.clip_grad_norm_, list(plain.parameters()), 1.0)
    expected = train(plain, optimizer, clip, steps=3, loss_of=loss_of)
    with wrapped(make(), **options) as model:
        updates = streamer.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
        clip = partial(streamer.clip_grad_norm_, model, 1.0)
        actual = train(model, updates, clip, steps=3, loss_of=loss_of)
    assert_parity(actual, expected)


@pytest.mark.parametrize(
    ("kind", "layout", "activations"), in_turn(2 * [Argument, Buffer], ["coo", "csr", "csr", "coo"], POLICIES)
)
def test_each_layout(kind: Callable[..., nn.Module], layout: str, activations: str) -> None:
    make = partial(Buffer, layout) if kind is Buffer else kind
    assert_trains(partial(Graph, make, layout), activations=activations)


@pytest.mark.parametrize(("is_coalesced", "activations"), in_turn([False, True], POLICIES))
def test_a_matrix_that_shows_a_weight(is_coalesced: bool, activations: str) -> None:
    """With one slot the weight of another layer would be in its place in backward."""
    make = partial(Graph, partial(Weight, is_coalesced))
    assert_trains(make, activations=activations, num_slots=1)


@pytest.mark.parametrize("make", [Argument, partial(Weight, True)])
def test_a_step_that_cannot_be_planned_is_refused_with_a_way_out(make: Callable[[], nn.Module]) -> None:
    match = "planned without values, .* sparse .*: set activations, num_slots and micro_batch_size yourself"
    with pytest.raises(ValueError, match=match):
        streamer.wrap(Graph(make), device="cpu", layers="layers", example=torch.zeros(NODES, WIDTH))
