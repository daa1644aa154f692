"""Sparse tensors as arguments, buffers and results of layers, and made of weights, as in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import streamer
from tests.reference import LossOf, assert_parity, assert_refused, streamed, train

WIDTH, NODES = 8, 6
ALL_POLICIES = pytest.mark.parametrize("activations", ["recompute", "keep", "recompute+offload"])
# PyTorch says so of all of them but the first
pytestmark = pytest.mark.filterwarnings("ignore:Sparse C.. tensor support is in beta state:UserWarning")

LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "coo": lambda dense: dense.to_sparse(),
    "coo, not coalesced": lambda dense: torch.sparse_coo_tensor(
        torch.tensor([[0, 1, 1], [1, 2, 2]]),
        torch.tensor([1.0, 2.0, 3.0]),
        dense.shape,
        check_invariants=True,
    ),
    "csr": lambda dense: dense.to_sparse_csr(),
    "csc": lambda dense: dense.to_sparse_csc(),
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


class Result(Argument):
    """Returns other edges, of which the next layer computes."""

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return super().forward(x, edges)[0], edges * 1.5


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


class _Keeps(torch.autograd.Function):
    """Keeps the matrix in its context, where no hook for saved tensors can exchange its values."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, places: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        size = (WIDTH, WIDTH)
        ctx.matrix = torch.sparse_coo_tensor(places, values, size, is_coalesced=True, check_invariants=True)
        return torch.sparse.mm(ctx.matrix, x.t()).t()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return None, None, torch.sparse.mm(ctx.matrix.t(), gradient.t()).t()


class InContext(Weight):
    def __init__(self) -> None:
        super().__init__(is_coalesced=True)

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.linear(x) + _Keeps.apply(self.values, self.places, x), edges


class Sample(Argument):
    """One graph for all samples of a batch."""

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x + torch.tanh(torch.stack([edges @ each for each in self.linear(x)])), edges


class SampleResult(Sample):
    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return super().forward(x, edges)[0], edges * 1.5


class Graph(nn.Module):
    """Three layers that are given sparse edges; with ``learned`` edges, their values are a parameter."""

    def __init__(
        self, make: Callable[[], nn.Module] = Argument, layout: str = "coo", *, learned: bool = False
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(make() for _ in range(3))
        self.register_buffer("edges", adjacency(layout))
        self.learned = nn.Parameter(torch.rand(3)) if learned else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        edges = self.edges
        if self.learned is not None:
            places = torch.tensor([[0, 1, 2], [1, 2, 3]])
            edges = torch.sparse_coo_tensor(places, self.learned, (NODES, NODES), check_invariants=True)
        x = self.embed(x)
        for layer in self.layers:
            x, edges = layer(x, edges)
        return x


def loss(model: nn.Module, step: int, size: int | None = None) -> torch.Tensor:
    """Of one graph, or of a batch of ``size``."""
    shape = (NODES, WIDTH) if size is None else (size, NODES, WIDTH)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(step))
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


@ALL_POLICIES
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", [Argument, Result, Buffer])
def test_each_layout(kind: Callable[..., nn.Module], layout: str, activations: str) -> None:
    make = partial(Buffer, layout) if kind is Buffer else kind
    assert_trains(partial(Graph, make, layout), activations=activations)


@ALL_POLICIES
@pytest.mark.parametrize("make", [Argument, Result])
def test_gradients_of_edges(make: Callable[[], nn.Module], activations: str) -> None:
    assert_trains(lambda: Graph(make, learned=True), activations=activations)


@ALL_POLICIES
@pytest.mark.parametrize("is_coalesced", [False, True])
def test_a_matrix_that_shows_a_weight(is_coalesced: bool, activations: str) -> None:
    """With one slot the weight of another layer would be in its place in backward."""
    make = partial(Graph, partial(Weight, is_coalesced))
    assert_trains(make, activations=activations, num_slots=1)


@pytest.mark.parametrize("grad", [False, True])
def test_a_matrix_without_a_graph(grad: bool) -> None:
    model = Graph(partial(Weight, True)).requires_grad_(grad)
    with torch.set_grad_enabled(grad), streamed(model, layers="layers", num_slots=1) as wrapped:
        assert torch.equal(loss(wrapped, 0), loss(model, 0))


SLICED = partial(loss, size=4)


def test_micro_batches_each_use_the_whole_matrix() -> None:
    model = Graph(Sample)
    with streamed(model, layers="layers", micro_batch_size=2) as wrapped:
        SLICED(wrapped, 0).backward()
        SLICED(model, 0).backward()
        for param, other in zip(wrapped.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(param.grad, other.grad)
        with torch.no_grad():
            torch.testing.assert_close(SLICED(wrapped, 1), SLICED(model, 1))


@pytest.mark.parametrize(
    ("make", "size", "match", "options"),
    [
        (
            Sample,
            NODES,
            r"'edges' .* is sparse, .*batch_dims=\{'edges': None\}",
            {"batch_dims": {"edges": 0}},
        ),
        (SampleResult, 4, "it returns a sparse tensor.*; wrap without micro_batch_size", {}),
    ],
)
def test_what_cannot_be_cut_or_joined_is_refused(
    make: Callable[[], nn.Module], size: int, match: str, options: dict[str, object]
) -> None:
    use = partial(loss, step=0, size=size)
    assert_refused(Graph(make), use, match, layers="layers", micro_batch_size=2, **options)


@pytest.mark.parametrize("make", [Argument, partial(Buffer, "csr"), partial(Weight, True)])
def test_a_step_that_cannot_be_planned_is_refused_with_a_way_out(make: Callable[[], nn.Module]) -> None:
    match = "planned without values, .* sparse .*: give activations, num_slots and micro_batch_size yourself"
    with pytest.raises(ValueError, match=match):
        streamer.wrap(Graph(make), device="cpu", layers="layers", example=torch.zeros(NODES, WIDTH))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_buffers_are_saved_and_loaded(layout: str, tmp_path: Path) -> None:
    saved, loaded = (Graph(partial(Buffer, layout), layout) for _ in range(2))
    for buffer in loaded.buffers():
        buffer.mul_(0.0)
    with wrapped(saved), wrapped(loaded):
        streamer.save(saved, streamer.AdamW(saved.parameters()), tmp_path / "a", step=1)
        streamer.load(loaded, streamer.AdamW(loaded.parameters()), tmp_path / "a")
        assert torch.equal(loss(loaded, 0), loss(saved, 0))
        for buffer, expected in zip(loaded.buffers(), saved.buffers(), strict=True):
            torch.testing.assert_close(buffer, expected, rtol=0, atol=0)


def test_buffers_take_the_bytes_of_indices_and_values() -> None:
    edges = adjacency()
    nbytes = edges.indices().nbytes + edges.values().nbytes
    with streamed(Graph(partial(Buffer, "coo")), layers="layers") as wrapped:
        assert streamer.stats(wrapped).device_bytes["buffers"] == 4 * nbytes
