"""Models whose optimizer state goes to disk, in chunks as small as they may be."""

from __future__ import annotations

import re
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import streamer
from streamer.backends.disk import Disks, Scratch
from streamer.memory import on_disk

VOCAB, WIDTH = 41, 64
#: Elements of a chunk: no fewer draw the random bits of the whole. A layer of `Model` has three or four.
CHUNK = 1 << 14


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """For all tests of a file that imports it."""
    monkeypatch.setattr(on_disk, "CHUNK_ELEMENTS", CHUNK)


class Layer(nn.Module):
    """Two matrices, one of them larger than a chunk. Now and then the second branch is left out, and so there
    is no gradient of its parameters. With ``tied`` the matrix of the first branch is used twice."""

    def __init__(self, hidden: int, *, tied: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)
        self.side = nn.Linear(WIDTH, hidden)
        if tied:
            self.side.weight = self.up.weight
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.without = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(self.norm(x)).tanh()
        if not self.without:
            y = y + self.scale * self.side(x).sigmoid()
        return x + self.down(y)


class Model(nn.Module):
    def __init__(self, *, layers: int = 4, tied: bool = False, frozen: bool = False) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.embedding = nn.Embedding(VOCAB, WIDTH)
            self.layers = nn.ModuleList(Layer(280 + 9 * index, tied=tied) for index in range(layers))
            self.head = nn.Linear(WIDTH, VOCAB)
        if tied:
            self.head.weight = self.embedding.weight
        if frozen:
            self.embedding.weight.requires_grad_(False)
            self.layers[1].up.weight.requires_grad_(False)
            self.layers[2].requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def loss_of(model: nn.Module, seed: int) -> torch.Tensor:
    tokens = torch.randint(VOCAB, (4, 6), generator=torch.Generator().manual_seed(seed))
    return F.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.roll(1).flatten())


def disks(folder: Path, count: int = 1, **options: Any) -> Disks:
    """``count`` folders in ``folder``, through the page cache: it may be in memory."""
    folders = [folder / f"disk{number}" for number in range(count)]
    for each in folders:
        each.mkdir(exist_ok=True)
    return Disks(folders, partial(Scratch, **({"direct_io": "off", "in_flight": 2} | options)))


def least_budget(model: nn.Module, **options: Any) -> int:
    """The least ``host_memory`` that ``model`` can be wrapped with, as the error of too small a one says."""
    with tempfile.TemporaryDirectory() as folder, pytest.raises(MemoryError) as refused:
        streamer.wrap(model, host_memory=1, disk=disks(Path(folder)), **options)
    least = re.search(r"host_memory needs ([0-9]+) bytes", str(refused.value))
    assert least is not None
    return int(least[1])


def copied(value: Any) -> Any:
    """Copies of tensors in dicts, as their bits: NaN is equal to itself."""
    if isinstance(value, dict):
        return {key: copied(each) for key, each in value.items()}
    return torch.as_tensor(value).detach().clone().contiguous().reshape(-1).view(torch.uint8)
