"""What every test shares."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType

import pytest
import torch

from streamer.backends import thread as lanes
from streamer.backends.base import Event
from streamer.engine.paging.norms import Norms
from streamer.engine.schedule.hazards import Issuer
from streamer.engine.schedule.op import Op
from tests.nullgpu import device as nullgpu_device

# the tensors are tiny: teams of threads would only wait for one another, also those of processes started here
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")

for devices in (torch.cuda, torch.xpu, torch.mtia):
    if not devices.is_available():
        # `torch.manual_seed` would keep every seed for when there are any, each with the stack as a text
        devices.manual_seed_all = lambda seed: None

# the layers are tiny: their copies shall race with what else runs, as those of larger layers do
SHORT_COPY, lanes.SHORT_COPY = lanes.SHORT_COPY, -1

# what tests import are millions of objects, none of them garbage: `what_was_imported_stays` goes on with it
gc.disable()

# a shell has them ignored by what it starts in the background, and nohup too: tests send them
for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)

#: Files in memory, whose flushing costs nothing, and the bytes that have to be free there.
MEMORY, ROOM = Path("/dev/shm"), 2 << 30


@pytest.hookimpl(tryfirst=True)  # before pytest's own looks at the option
def pytest_configure(config: pytest.Config) -> None:
    """Let `tmp_path` be in memory where there is room: a checkpoint flushes each of its files."""
    if config.option.basetemp is None and MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > ROOM:
        config.option.basetemp = tempfile.mkdtemp(prefix="streamer-tests-", dir=MEMORY)
        config.add_cleanup(lambda: shutil.rmtree(config.option.basetemp, ignore_errors=True))
    if nullgpu_device.IS_LOADED:
        chosen = f"({config.option.markexpr}) and " if config.option.markexpr else ""
        config.option.markexpr = f"{chosen}not cuda_values"
        # PyTorch would take it from compute capability 9.0 on, and it is not there
        torch.backends.cuda.enable_cudnn_sdp(False)


@pytest.fixture(scope="module", autouse=True)
def what_was_imported_stays() -> None:
    """So the garbage collector need not go through it again and again."""
    gc.collect()
    gc.freeze()
    gc.enable()


#: What a test needs of CUDA: streams, memory and their order, or the numbers that kernels compute too.
KINDS = ("cuda_api", "cuda_values")


@pytest.hookimpl(tryfirst=True)  # before marks select
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test of one of the `KINDS` is a `cuda` test, and each `cuda` test is of one. Tests of several ranks,
    which wait much, come first: one process of the tests has them, while the others use the processors."""
    items.sort(key=lambda item: "ranks" not in item.location[0])
    is_there = torch.cuda.is_available()
    skip = pytest.mark.skip(reason="needs a CUDA GPU, and PyTorch finds none here")
    for item in items:
        kinds = [kind for kind in KINDS if item.get_closest_marker(kind)]
        if not kinds and not item.get_closest_marker("cuda"):
            continue
        if len(kinds) != 1:
            raise pytest.UsageError(f"{item.nodeid} needs a GPU: mark it as one of {' and '.join(KINDS)}")
        item.add_marker("cuda")
        if not is_there:
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def values_do_not_count(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """On nullgpu what a kernel should have written is whatever was there: streamer must not judge it there.
    What is asked of CUDA is checked there instead."""
    if not nullgpu_device.IS_LOADED or not request.node.get_closest_marker("cuda_api"):
        yield
        return
    monkeypatch.setattr("streamer.engine.layer.batch_check._are_alike", lambda *_: True)
    monkeypatch.setattr("streamer.engine.paging.norms.Norms.is_finite", lambda norms: True)
    total = Norms.total
    # a sum of squares that nobody has computed may be negative
    monkeypatch.setattr(Norms, "total", lambda *args, **options: abs(total(*args, **options)))
    monkeypatch.setattr("streamer.optim.adamw.all_finite", lambda gradient, stretches: True)
    before = nullgpu_device.report()["misuses"]
    yield
    assert nullgpu_device.report()["misuses"] == before, "see the lines 'nullgpu: MISUSE'"


@pytest.fixture
def nullgpu() -> Iterator[ModuleType]:
    """The stand-in for a GPU, whose settings a test may change."""
    if not nullgpu_device.IS_LOADED:
        pytest.skip("changes what CUDA does: runs in 'make test-nullgpu' only")
    yield nullgpu_device
    nullgpu_device.change(**nullgpu_device.SETTINGS)


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    """A test that leaves a lane's thread behind has not closed its backend."""
    before = set(threading.enumerate())
    yield
    left = [each for each in set(threading.enumerate()) - before if each.name.startswith("streamer-")]
    until = time.monotonic() + 10
    for thread in left:
        # one whose work is done, as its future says, is about to end
        thread.join(timeout=max(0.0, until - time.monotonic()))
    assert [thread.name for thread in left if thread.is_alive()] == []


@pytest.fixture
def issued(monkeypatch: pytest.MonkeyPatch) -> list[Op]:
    """Every op as it is issued."""
    ops: list[Op] = []
    begin = Issuer._begin

    def record(self: Issuer, op: Op) -> Sequence[Event]:
        ops.append(op)
        return begin(self, op)

    monkeypatch.setattr(Issuer, "_begin", record)
    return ops
