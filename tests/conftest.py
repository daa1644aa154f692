"""What every test shares."""

from __future__ import annotations

import gc
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from streamer.backends.base import Event
from streamer.engine.schedule.hazards import Issuer
from streamer.engine.schedule.op import Op

# the tensors are tiny: teams of threads would only wait for one another
torch.set_num_threads(1)

for devices in (torch.cuda, torch.xpu, torch.mtia):
    if not devices.is_available():
        # `torch.manual_seed` would keep every seed for when there are any, each with the stack as a text
        devices.manual_seed_all = lambda seed: None

#: Files in memory, whose flushing costs nothing, and the bytes that have to be free there.
MEMORY, ROOM = Path("/dev/shm"), 2 << 30


@pytest.hookimpl(tryfirst=True)  # before pytest's own looks at the option
def pytest_configure(config: pytest.Config) -> None:
    """Let `tmp_path` be in memory where there is room: a checkpoint flushes each of its files."""
    if config.option.basetemp is None and MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > ROOM:
        config.option.basetemp = tempfile.mkdtemp(prefix="streamer-tests-", dir=MEMORY)
        config.add_cleanup(lambda: shutil.rmtree(config.option.basetemp, ignore_errors=True))


@pytest.fixture(scope="module", autouse=True)
def what_was_imported_stays() -> None:
    """So the garbage collector need not go through it again and again."""
    gc.collect()
    gc.freeze()


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
