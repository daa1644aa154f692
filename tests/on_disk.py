"""Models whose optimizer state goes to disk, in chunks as small as they may be."""

from __future__ import annotations

import copy
import os
import re
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import streamer
from streamer.backends.direct_io import ScratchFile, System
from streamer.backends.disk import Disks, Scratch
from streamer.engine.handle import wrapped
from streamer.store import on_disk

VOCAB, WIDTH = 41, 64
#: Elements of a chunk: no fewer draw the random bits of the whole. A layer of `Model` has three or four.
CHUNK = 1 << 14


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """For all tests of a file that imports it."""
    monkeypatch.setattr(on_disk, "CHUNK_ELEMENTS", CHUNK)


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """On a file system with direct I/O, where the temporary files are or in the repository."""
    why_not = []
    for parent in (None, Path(__file__).parents[1]):
        with tempfile.TemporaryDirectory(dir=parent) as name:
            file = ScratchFile(name, system=System())
            file.close()
            if not file.why_not:
                yield Path(name)
                return
            why_not.append(f"{file}: {file.why_not}")
    pytest.skip("; ".join(why_not))


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
    return Disks(folders, partial(Scratch, **({"direct_io": False, "in_flight": 2} | options)))


def least_budget(model: nn.Module, **options: Any) -> int:
    """The least ``host_memory`` that ``model`` can be wrapped with, as the error of too small a one says."""
    with tempfile.TemporaryDirectory() as folder, pytest.raises(MemoryError) as refused:
        streamer.wrap(model, host_memory=1, disk=disks(Path(folder)), **options)
    return least_of(refused.value)


def least_of(refused: BaseException) -> int:
    """The least ``host_memory``, as the error of too small a one says."""
    least = re.search(r"host_memory needs ([0-9]+) bytes", str(refused))
    assert least is not None, refused
    return int(least[1])


def adamw(model: nn.Module, state_dtype: torch.dtype | str = torch.float32) -> streamer.AdamW:
    return streamer.AdamW(model.parameters(), lr=1e-2, state_dtype=state_dtype)


def a_step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> float:
    """The loss of a step, in which gradients are clipped unless they are used up in backward."""
    loss = loss_of(model, number)
    loss.backward()
    if wrapped(model).executor.gradients.are_kept:
        streamer.clip_grad_norm_(model, 0.5)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def end_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """All that a run has left: streamed weights, masters, moments."""
    named = dict(model.named_parameters())
    trained = {name: param for name, param in named.items() if param.requires_grad}
    return {
        "weights": copied({name: param.data for name, param in named.items()}),
        "masters": copied(dict(copy.deepcopy(model).named_parameters())),
        "state": {name: copied(dict(optimizer.state[param])) for name, param in trained.items()},
    }


class Faults:
    """The calls of the system that move bytes: ``number`` of them later, in one direction or both, one fails
    with ``error``, and with ``for_good`` all after it."""

    def __init__(self) -> None:
        self.left = -1
        self.verbs: tuple[str, ...] = ()
        self.error = 0
        self.for_good = False
        self.calls = self.raised = 0
        self._lock = threading.Lock()

    def arm(self, number: int, verbs: Sequence[str], error: int, *, for_good: bool = False) -> None:
        self.left, self.verbs, self.error, self.for_good = number, tuple(verbs), error, for_good

    def disarm(self) -> None:
        self.left = -1

    def system(self) -> System:
        return System(
            preadv=partial(self._call, "reading", os.preadv),
            pwritev=partial(self._call, "writing", os.pwritev),
        )

    def _call(self, verb: str, call: Callable[..., int], *args: Any) -> int:
        with self._lock:
            self.calls += 1
            if self.left >= 0 and verb in self.verbs:
                if self.left == 0:
                    self.raised += 1
                    if not self.for_good:
                        self.left = -1
                    raise OSError(self.error, os.strerror(self.error))
                self.left -= 1
        return call(*args)


def copied(value: Any) -> Any:
    """Copies of tensors in dicts, as their bits: NaN is equal to itself."""
    if isinstance(value, dict):
        return {key: copied(each) for key, each in value.items()}
    return torch.as_tensor(value).detach().clone().contiguous().reshape(-1).view(torch.uint8)
