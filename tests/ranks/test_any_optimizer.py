"""Optimizers of PyTorch on several ranks: each updates whole parameters, as one process would update all."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import streamer
from streamer.engine.handle import wrapped
from tests.on_disk import disks
from tests.optim.masters import master
from tests.optim.optimizers import Sum
from tests.ranks.common import run_ranks
from tests.ranks.programs import everyone
from tests.reference import language_loss, tiny_gpt

Arrays = list[Any]


def optimizer_for(name: str, model: nn.Module) -> torch.optim.Optimizer:
    if name == "Muon":
        return streamer.Muon(model.parameters(), lr=1e-3)
    if name == "Sum":
        return Sum(model.parameters(), lr=0.1, momentum=0.9)
    return torch.optim.RMSprop(model.parameters(), lr=1e-3, momentum=0.9)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, count: int) -> None:
    """The same batch on every rank, so that the mean of the gradients is one process's gradient."""
    for step in range(first, first + count):
        torch.manual_seed(step)
        language_loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()


def results(model: nn.Module, optimizer: torch.optim.Optimizer) -> Arrays:
    state = optimizer.state_dict()["state"]
    numbers = [
        value.numpy()
        for number in sorted(state)
        for _, value in sorted(state[number].items())
        if isinstance(value, torch.Tensor)
    ]
    return [*(master(param).numpy() for param in model.parameters()), *copy.deepcopy(numbers)]


def train(
    rank: int, name: str, folder: str, machines: int | str | None = None, update: str = "step"
) -> tuple[Arrays, int]:
    model = streamer.wrap(
        tiny_gpt(layers=2),
        layers="transformer.h",
        device="cpu",
        dtype=torch.bfloat16,
        update=update,
        process_group=everyone(machines),
    )
    optimizer = optimizer_for(name, model)
    steps(model, optimizer, 0, 2)
    streamer.save(model, optimizer, Path(folder, "saved"), step=2)
    steps(model, optimizer, 2, 1)
    again = optimizer_for(name, model)
    streamer.load(model, again, Path(folder, "saved"))
    steps(model, again, 2, 2)
    held = sum(len(dict.get(again.state, param, ())) > 0 for param in model.parameters())
    found = results(model, again), held
    streamer.unwrap(model)
    return found


@cache
def train_alone(name: str, layers: int = 2, width: int = 32) -> Arrays:
    plain = tiny_gpt(layers=layers, width=width)
    model = streamer.wrap(plain, layers="transformer.h", device="cpu", dtype=torch.bfloat16)
    optimizer = optimizer_for(name, model)
    steps(model, optimizer, 0, 4)
    found = results(model, optimizer)
    streamer.unwrap(model)
    return found


#: Optimizers, so many ranks, their machines (see `everyone`), where layers are updated.
CASES = {
    "three ranks": ("Muon", 3, None, "step"),
    "all parameters together": ("Sum", 2, None, "step"),
    "in backward": ("RMSprop", 2, None, "backward"),
    "replicas": ("RMSprop", 2, 2, "step"),
    "machines that divide the state, in backward": ("RMSprop", 2, "ab", "backward"),
    "two ranks on each of two machines": ("Muon", 4, "aabb", "step"),
}


@pytest.mark.parametrize("case", CASES)
def test_ranks_share_parameters_and_equal_one_process(case: str, tmp_path: Path) -> None:
    """To the bit, by way of a checkpoint; each has the state of its own parameters."""
    name, size, machines, update = CASES[case]
    found = run_ranks(size, train, name, str(tmp_path), machines, update)
    alone = train_alone(name)
    for arrays, _ in found:
        assert len(arrays) == len(alone)
        assert all((one == other).all() for one, other in zip(arrays, alone, strict=True))
    held = [count for _, count in found]
    copies = machines if isinstance(machines, int) else 1
    assert sum(held) == copies * len([*tiny_gpt(layers=2).parameters()])
    assert min(held) > 0 or name == "Sum"


#: A model whose state has tensors large enough for the disk.
WIDE = {"layers": 8, "width": 128}


def train_on_disk(rank: int, folder: str, machines: int | None) -> tuple[Arrays, dict[str, int]]:
    model = streamer.wrap(
        tiny_gpt(**WIDE),
        layers="transformer.h",
        device="cpu",
        dtype=torch.bfloat16,
        process_group=everyone(machines),
        disk=disks(Path(folder)),
    )
    executor = wrapped(model).executor
    # room for three parts of each rank on this machine, and some of the state
    executor.host.limit = sum(executor.host.bytes().values()) + 9_000_000
    optimizer = optimizer_for("RMSprop", model)
    steps(model, optimizer, 0, 2)
    streamer.save(model, optimizer, Path(folder, "saved"), step=2)
    steps(model, optimizer, 2, 1)
    streamer.load(model, optimizer, Path(folder, "saved"))
    steps(model, optimizer, 2, 2)
    found = results(model, optimizer), streamer.stats(model).disk_bytes
    streamer.unwrap(model)
    return found


@pytest.mark.parametrize("machines", [None, 2])
def test_each_rank_has_a_part_of_the_state_on_its_disk(machines: int | None, tmp_path: Path) -> None:
    found = run_ranks(2, train_on_disk, str(tmp_path), machines)
    alone = train_alone("RMSprop", **WIDE)
    for arrays, disk_bytes in found:
        assert disk_bytes["optimizer state"] > 0
        assert len(arrays) == len(alone)
        assert all((one == other).all() for one, other in zip(arrays, alone, strict=True))


def train_by_two(folder: str | None) -> tuple[Arrays, dict[str, int]]:
    """Half of the parameters by another optimizer than `streamer.AdamW`; with a ``folder``, part of both
    optimizers' state is on disk."""
    options: dict[str, Any] = {}
    if folder is not None:
        options = {"disk": disks(Path(folder)), "process_group": everyone()}
    model = streamer.wrap(
        tiny_gpt(**WIDE), layers="transformer.h", device="cpu", dtype=torch.bfloat16, **options
    )
    executor, params = wrapped(model).executor, [*model.parameters()]
    optimizers: list[torch.optim.Optimizer] = [torch.optim.RMSprop(params[::2], lr=1e-3, momentum=0.9)]
    if folder is not None:
        executor.host.limit = sum(executor.host.bytes().values()) + 10_500_000
    optimizers.append(streamer.AdamW(params[1::2], lr=1e-3))
    executor.host.limit += 5_000_000  # for three parts of each rank
    for step in range(3):
        torch.manual_seed(step)
        language_loss(model, step).backward()
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()
    found = [master(param).numpy() for param in params], streamer.stats(model).disk_bytes
    streamer.unwrap(model)
    return found


def on_each_rank(rank: int, folder: str) -> tuple[Arrays, dict[str, int]]:
    return train_by_two(folder)


def test_two_optimizers_of_ranks_have_state_on_disk(tmp_path: Path) -> None:
    alone, _ = train_by_two(None)
    for arrays, disk_bytes in run_ranks(2, on_each_rank, str(tmp_path)):
        assert {*disk_bytes} == {"exp_avg", "exp_avg_sq", "optimizer state"}
        assert all((one == other).all() for one, other in zip(arrays, alone, strict=True))


def refused(rank: int, machines: str | None, disk: str | None) -> str:
    model = streamer.wrap(
        tiny_gpt(**WIDE),
        layers="transformer.h",
        device="cpu",
        dtype=torch.bfloat16,
        process_group=everyone(machines),
        disk=disk and disks(Path(disk)),
        host_memory=disk and 13_000_000,
    )
    try:
        optimizer = Sum(model.parameters(), lr=0.1)
        language_loss(model, 0).backward()
        optimizer.step()
    except RuntimeError as error:
        return str(error)
    return ""


def test_machines_that_divide_what_an_optimizer_looks_at_together_are_refused() -> None:
    for line in run_ranks(2, refused, "ab", None):
        assert "Sum looks at all parameters together, which machines divide: use a process group" in line


def test_ranks_with_masters_on_disk_are_refused(tmp_path: Path) -> None:
    for line in run_ranks(2, refused, None, str(tmp_path)):
        assert "Sum on several ranks needs weights and masters in host memory, and some are on disk" in line
