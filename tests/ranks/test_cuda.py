"""Ranks with a GPU each: a group of one on one GPU, of two where there are two."""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import multiprocessing

import streamer
from streamer.engine.handle import wrapped
from streamer.engine.schedule.op import OpKind
from streamer.store.layout import ALIGN_BYTES
from tests.ranks.common import run_ranks
from tests.ranks.programs import Arrays, Case, a_step, model, train, train_alone

CASES: dict[str, Case] = {
    "fp32": (1, {"device": "cuda"}, {}),
    "bf16": (1, {"device": "cuda", "dtype": torch.bfloat16}, {"state_dtype": "int8"}),
}


@pytest.fixture
def group(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Any]:
    """A group of one: of gloo, or of the backend that the test is given."""
    kind = getattr(request, "param", "gloo")
    dist.init_process_group(kind, store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def gather_on(rank: int, store: str, answers: Any) -> None:
    """Three steps with weights that are copied, and that are gathered: how many ops there are between ranks,
    the bytes that come over this rank's bus, and those that the device holds after it."""
    torch.cuda.set_device(rank)
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    found = []
    for gathers in (False, True, True):
        made = streamer.wrap(
            model(),
            layers="layers",
            device=f"cuda:{rank}",
            process_group=dist.group.WORLD,
            gather_weights=gathers,
        )
        optimizer = streamer.AdamW(made.parameters(), lr=1e-2)
        for step in range(3):
            a_step(made, optimizer, step, rank)
        streamer.synchronize(made)
        records = [record.op for record in wrapped(made).executor.issuer.trace.records()]
        moved = sum(op.nbytes for op in records if op.kind is OpKind.UNSHARD and op.unit >= 0)
        kinds = Counter(op.kind.value for op in records)
        streamer.unwrap(made)
        del made, optimizer
        gc.collect()
        between = kinds["ALL_GATHER"], kinds["REDUCE"], kinds["AGREE"]
        found.append((between, moved, torch.cuda.memory_allocated()))
    answers.put(found)
    dist.barrier()
    os._exit(0)


@pytest.mark.cuda_api
def test_two_devices_gather_what_each_has_a_part_of(tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    context = multiprocessing.get_context("spawn")
    answers = context.SimpleQueue()
    given = str(tmp_path / "store"), answers
    processes = multiprocessing.spawn(gather_on, given, nprocs=2, join=False)
    for copied, gathered, again in (answers.get(), answers.get()):
        # in each step three layers and the root are averaged, all are waited for, and each update is
        averaged, awaited = 3 * 4, 3 * (1 + 4)
        assert copied[0] == (0, averaged, awaited)
        # of each step four fetches through two slots, of which the first step has two more
        assert gathered[0] == (14, averaged, awaited)
        assert 0 <= 2 * gathered[1] - copied[1] < 14 * 2 * ALIGN_BYTES
        assert again == gathered, "memory is given back"
    while not processes.join():
        pass


@pytest.mark.cuda_values
@pytest.mark.parametrize("group", ["nccl", "gloo"], indirect=True)
@pytest.mark.parametrize("name", CASES)
def test_a_group_of_one_is_one_process(group: Any, name: str) -> None:
    norms, gradients, state = train(0, 1, {name: CASES[name]})[name]
    backwards, options, more = CASES[name]
    found = train_alone(1, (backwards, options, {**more, "given_norms": norms}))
    for one, other in zip((gradients, state), found[1:], strict=True):
        assert one.keys() == other.keys()
        assert not differing(one, other)


def differing(one: Arrays, other: Arrays) -> list[str]:
    return [key for key in one if not np.array_equal(one[key], other[key])]


def train_on_two(rank: int, cases: dict[str, Case]) -> Any:
    torch.cuda.set_device(rank)
    return train(rank, 2, {n: (b, {**o, "device": f"cuda:{rank}"}, m) for n, (b, o, m) in cases.items()})


@pytest.mark.cuda_values
def test_two_gpus_are_one_process() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    gathered = {
        f"{name}, gathered": (backwards, {**options, "gather_weights": True}, more)
        for name, (backwards, options, more) in CASES.items()
    }
    first, second = run_ranks(2, train_on_two, {**CASES, **gathered}, kind="nccl")
    for name in CASES:
        for one, other in zip(first[name], first[f"{name}, gathered"], strict=True):
            assert one == other if isinstance(one, list) else not differing(one, other)
    for name in (*CASES, *gathered):
        assert first[name][0] == second[name][0]
        for one, other in zip(first[name][1:], second[name][1:], strict=True):
            assert not differing(one, other)
    norms, _, _ = train_alone(2, CASES["fp32"])
    assert first["fp32"][0][0] == pytest.approx(norms[0], rel=1e-5)
