"""A run that is killed: nothing is left on the disk, and the one that goes on ends the same."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.reference import assert_equal

HOME = Path(__file__).parents[3]
STEPS = 9

#: Forks, for each folder that it reads, a process that trains there from the last checkpoint on. It saves one
#: after every third step, and prints each step.
TRAINS = f"""
import os, sys
from pathlib import Path
import torch, streamer
from streamer.store import on_disk
from tests.on_disk import CHUNK, Model, disks, least_budget, loss_of

torch.set_num_threads(1)
on_disk.CHUNK_ELEMENTS = CHUNK
options = {{"layers": "layers", "dtype": torch.bfloat16, "device": "cpu"}}
# a step loads, before there are children, what takes long to load
model = streamer.wrap(Model(), **options)
optimizer = streamer.AdamW(model.parameters())
loss_of(model, 0).backward()
optimizer.step()
streamer.unwrap(model)
budget = least_budget(Model(), **options)

def train(folder):
    model = Model()
    streamer.wrap(model, host_memory=budget, disk=disks(folder, 2), **options)
    optimizer = streamer.AdamW(model.parameters(), lr=1e-2)
    saved = sorted(folder.glob("step-*"), key=lambda path: int(path.name[5:]))
    first = streamer.load(model, optimizer, saved[-1]).step if saved else 0
    print(os.getpid(), first, flush=True)
    for number in range(first, {STEPS}):
        loss_of(model, number).backward()
        optimizer.step()
        optimizer.zero_grad()
        print("step", number, flush=True)
        after = number + 1
        if after % 3 == 0:
            streamer.save(model, optimizer, folder / f"step-{{after}}", step=after, block=after % 2 == 1)
    state = {{name: dict(optimizer.state[param]) for name, param in model.named_parameters()}}
    model = streamer.unwrap(model)
    torch.save({{"weights": dict(model.named_parameters()), "state": state}}, folder / "end")

for line in sys.stdin:
    child = os.fork()
    if not child:
        try:
            train(Path(line.strip()))
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    print("ended", os.waitstatus_to_exitcode(status), flush=True)
"""


@pytest.fixture(scope="module")
def forks() -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-W", "ignore", "-c", TRAINS]
    with subprocess.Popen(
        command, cwd=HOME, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(60) == 0


def run(forks: subprocess.Popen[str], folder: Path, kill: tuple[int, float] | None = None) -> int:
    """The first step that it takes; with ``kill`` it is killed so many steps and seconds later."""
    assert forks.stdin is not None
    assert forks.stdout is not None
    folder.mkdir(exist_ok=True)
    forks.stdin.write(f"{folder}\n")
    forks.stdin.flush()
    pid, first = map(int, forks.stdout.readline().split())
    if kill is not None:
        for _ in range(kill[0]):
            assert forks.stdout.readline().startswith("step")
        time.sleep(kill[1])
        os.kill(pid, signal.SIGKILL)
    while not (line := forks.stdout.readline()).startswith("ended"):
        assert line.startswith("step")
    assert int(line.split()[1]) == (0 if kill is None else -signal.SIGKILL)
    assert [list((folder / f"disk{number}").iterdir()) for number in range(2)] == [[], []]
    return first


@pytest.fixture(scope="module")
def uninterrupted(forks: subprocess.Popen[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("uninterrupted")
    assert run(forks, folder) == 0
    return folder / "end"


@pytest.mark.parametrize("seed", range(1))
def test_a_killed_run_leaves_nothing_and_goes_on(
    forks: subprocess.Popen[str], tmp_path: Path, uninterrupted: Path, seed: int
) -> None:
    moments = random.Random(seed)
    run(forks, tmp_path, (moments.randint(0, 4), moments.uniform(0, 0.01)))
    # far enough for a checkpoint that it waits for
    run(forks, tmp_path, (moments.randint(4, 5), moments.uniform(0, 0.01)))
    assert run(forks, tmp_path) >= 3
    ends = [torch.load(path, weights_only=True) for path in (tmp_path / "end", uninterrupted)]
    assert ends[0]["state"]
    assert_equal(ends[0], ends[1])
