"""Weights on disk: the same numbers as in host memory, to the bit, whatever the user's code does to them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import streamer
from streamer.backends.disk import Disks, Scratch
from streamer.engine.handle import wrapped
from streamer.engine.paging.executor import Executor
from streamer.store import on_disk
from tests.on_disk import least_of

VOCABULARY, WIDTH, LAYERS = 97, 64, 5


def layer() -> nn.Module:
    mlp = (nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
    return nn.Sequential(nn.LayerNorm(WIDTH), *mlp)


class Net(nn.Module):
    """Alike layers between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_disk, "CHUNK_ELEMENTS", 1 << 14)


@pytest.fixture
def disks(tmp_path: Path) -> Disks:
    # the tests' folder may be in memory, where there is no direct I/O
    return Disks([tmp_path], partial(Scratch, direct_io="off"))


_wrapped: list[Net] = []


@pytest.fixture(autouse=True)
def unwrapped() -> Iterator[None]:
    yield
    while _wrapped:
        model = _wrapped.pop()
        if "_streamer" in vars(model):
            streamer.unwrap(model)


def net(*, trained: Collection[int] = range(LAYERS), **options: Any) -> Net:
    """With the layers of the numbers ``trained``, and the rest if those are all, trained."""
    torch.manual_seed(0)
    model = Net()
    if len(trained) < LAYERS:
        model.requires_grad_(False)
        for number in trained:
            model.layers[number].requires_grad_(True)
    options = {"dtype": torch.bfloat16, **({} if "backend" in options else {"device": "cpu"}), **options}
    streamer.wrap(model, layers="layers", **options)
    _wrapped.append(model)
    return model


def least_memory(disks: Disks, **options: Any) -> int:
    """The bytes that the error asks for where there are too few."""
    with pytest.raises(MemoryError) as refused:
        net(host_memory=1, disk=disks, **options)
    return least_of(refused.value)


def executor_of(model: nn.Module) -> Executor:
    return wrapped(model).executor


def batch(step: int) -> torch.Tensor:
    return torch.randint(VOCABULARY, (4, 16), generator=torch.Generator().manual_seed(step))


def train(
    model: Net,
    optimizer: streamer.AdamW,
    steps: range,
    *,
    clip: bool = True,
    between: Callable[[int], object] = lambda step: None,
) -> list[float]:
    losses = []
    for step in steps:
        tokens = batch(step)
        loss = F.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten())
        loss.backward()
        if clip:
            streamer.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        between(step)
    return losses


def assert_equal(model: Net, other: Net) -> None:
    for (name, mine), theirs in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs), name


#: Of all on disk `test_state` has more.
CASES: dict[str, tuple[bool, dict[str, Any]]] = {
    "all on disk, kept activations": (True, {"activations": "keep"}),
    "some on disk, update in backward": (False, {"update": "backward"}),
    "some on disk, one slot": (False, {"num_slots": 1}),
    "some on disk, a slot for every layer": (False, {"num_slots": LAYERS}),
}


@pytest.mark.parametrize(("all_on_disk", "options"), CASES.values(), ids=CASES)
def test_training_is_the_same_to_the_bit(all_on_disk: bool, options: dict[str, Any], disks: Disks) -> None:
    more = 0 if all_on_disk else 100_000
    models = net(**options), net(**options, host_memory=least_memory(disks, **options) + more, disk=disks)
    there = executor_of(models[1]).disk_bytes()
    of_layers = sum(unit.layout.nbytes for unit in executor_of(models[1]).units)
    assert there["weights"] >= of_layers if all_on_disk else 0 < there["weights"] < of_layers
    optimizers = [streamer.AdamW(model.parameters(), lr=1e-2) for model in models]
    clip = options.get("update") != "backward"
    losses = [train(*pair, range(4), clip=clip) for pair in zip(models, optimizers, strict=True)]
    assert losses[0] == losses[1]
    assert_equal(*models)
    for param, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        mine, theirs = (o.state[p] for o, p in zip(optimizers, (param, other), strict=True))
        assert {key: value.tolist() for key, value in mine.items()} == {
            key: value.tolist() for key, value in theirs.items()
        }
    assert_equal(*map(streamer.unwrap, models))


@pytest.fixture
def pair(disks: Disks) -> Iterator[tuple[Net, Net]]:
    """A model in memory, and the same with all that can be on disk there."""
    yield net(), net(host_memory=least_memory(disks), disk=disks)


def write_one(model: Net) -> None:
    with torch.no_grad():
        model.layers[3][1].weight[2].add_(1.0)


def write_by_data(model: Net) -> None:
    model.layers[1][3].weight.data.add_(0.25)


def write_what_is_held(model: Net) -> None:
    weight = model.layers[2][1].weight.detach()
    model.layers[0][1].weight.sum()  # another layer is asked for meanwhile
    weight.sub_(0.125)


@pytest.mark.parametrize(
    ("write", "reads"),
    [
        *[(write, False) for write in (write_one, write_by_data, write_what_is_held)],
        (write_by_data, True),
    ],
)
def test_what_the_user_writes_is_what_runs(
    pair: tuple[Net, Net], write: Callable[[Net], None], reads: bool
) -> None:
    losses = []
    for model in pair:
        optimizer = streamer.AdamW(model.parameters(), lr=1e-2)
        losses.append(train(model, optimizer, range(2)))
        if reads:
            sum(param.float().sum() for param in model.parameters())
        write(model)
        losses[-1] += train(model, optimizer, range(2, 4))
    assert losses[0] == losses[1]
    assert_equal(*pair)
