"""A limit of memory that is set from outside: a process on disk stays inside of it, page cache included."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from streamer.backends.host_memory import groups
from tests.on_disk import folder

__all__ = ["folder"]
HOME = Path(__file__).parent.parent.parent.parent
MIB = 1 << 20
#: Beside the model: PyTorch's temporaries of a layer, and Python's own.
BESIDE = 80 * MIB
BUDGET = 160 * MIB

#: Has the C library give back what a layer's temporaries took, the device being host memory here. By itself
#: it keeps freed blocks of some MiB for others, up to 190 MiB of them, as threads happen to come.
GIVEN_BACK = {"MALLOC_ARENA_MAX": "2", "MALLOC_MMAP_THRESHOLD_": str(1 << 20)}

#: Its argument: the control group, the folder on disk, and the budget. Ends with an error, without a disk.
PROGRAM = """
import json, os, sys
import torch, streamer
from torch import nn
from streamer.backends.host_memory import groups
from streamer.engine.handle import wrapped

group, folder, budget = json.loads(sys.argv[1])
torch.manual_seed(0)

def layer(width):
    return nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))

def initialise(module):
    for param in module.parameters(recurse=False):
        nn.init.normal_(param, std=0.01)

def train(width, layers, steps, **options):
    with torch.device("meta"):
        model = nn.Sequential(*(layer(width) for _ in range(layers)))
    model = nn.Sequential(model)
    streamer.wrap(model, layers="0", device="cpu", dtype=torch.bfloat16, init=initialise,
                  update="backward", **options)
    optimizer = streamer.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for number in range(steps):
        x = torch.randn(2, width, generator=torch.Generator().manual_seed(number)).bfloat16()
        loss = (model(x).float() - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    streamer.synchronize(model)
    executor = wrapped(model).executor
    found = sum(executor.host.bytes().values()), sum(executor.host.disk_bytes().values())
    wrapped(model).close()
    return losses, *found

train(640, 2, 1)  # compiles and loads what is needed
with open(os.path.join(group, "cgroup.procs"), "w") as file:
    file.write(str(os.getpid()))
groups.cache_clear()  # no process changes its group in the middle of a run
print(json.dumps(train(640, 20, 2, host_memory=budget, disk=folder)), flush=True)
train(640, 20, 2)
"""


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group of this process's own, with the limit."""
    for own in groups(Path("/proc/self")):
        made = own.folder / f"streamer-test-{os.getpid()}"
        limit = {1: "memory.limit_in_bytes", 2: "memory.max"}[own.version]
        try:
            made.mkdir()
        except OSError:
            continue
        try:
            (made / limit).write_text(str(BUDGET + BESIDE))
        except OSError:
            made.rmdir()
            continue
        yield made
        made.rmdir()
        return
    pytest.skip("this process may make no control group with a limit of memory")


def run(group: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    given = json.dumps([str(group), str(folder), BUDGET])
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, given],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"PYTHONPATH": str(HOME), "OMP_NUM_THREADS": "1", **GIVEN_BACK},
    )


def test_a_process_on_disk_stays_inside_of_a_limit(group: Path, folder: Path) -> None:
    ended = run(group, folder)
    assert ended.stdout, ended.stderr
    losses, host, disk = json.loads(ended.stdout)
    assert all(0 < loss < 1 for loss in losses)
    assert host <= BUDGET and disk > 2 * (BUDGET + BESIDE)
    # and without a disk it does not begin
    assert ended.returncode == 1
    assert "MemoryError: not enough memory for the model: " in ended.stderr
