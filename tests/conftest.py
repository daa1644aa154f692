"""What every test shares."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator

# the update's threads would spin while they wait, on cores that the lanes' own threads want; read once, when
# torch is imported
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest
import torch

from streamer.backends.base import Event
from streamer.engine.issuer import Issuer
from streamer.engine.op import Op

# the tensors are tiny: teams of threads would only wait for one another
torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="needs a CUDA GPU, and PyTorch finds none here")
        for item in items:
            if item.get_closest_marker("cuda"):
                item.add_marker(skip)


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    """A test that leaves a lane's thread behind has not closed its backend."""
    before = set(threading.enumerate())
    yield
    left = [
        thread.name for thread in set(threading.enumerate()) - before if thread.name.startswith("streamer-")
    ]
    assert left == []


@pytest.fixture
def issued(monkeypatch: pytest.MonkeyPatch) -> list[Op]:
    """Every op as it is issued."""
    ops: list[Op] = []
    issue = Issuer.issue

    def record(self: Issuer, op: Op, work: Callable[[], object]) -> Event:
        ops.append(op)
        return issue(self, op, work)

    monkeypatch.setattr(Issuer, "issue", record)
    return ops
