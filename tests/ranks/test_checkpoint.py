"""Checkpoints do not know how many ranks wrote them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import streamer
from streamer.checkpoint import save
from tests.ranks.common import run_ranks
from tests.ranks.programs import Arrays, arrays, backward, everyone, model

BF16 = {"dtype": torch.bfloat16}


def go(
    rank: int,
    size: int,
    steps: list[int],
    start: str | None,
    end: str | None,
    block: bool,
    machines: int | str | None = None,
) -> tuple[Arrays, Arrays]:
    """Go on from a checkpoint, make ``steps``, save: the weights and moments at both ends."""
    group = {"process_group": everyone(machines)} if size else {}
    wrapped = streamer.wrap(model(), layers="layers", device="cpu", **BF16, **group)
    optimizer = streamer.AdamW(wrapped.parameters(), lr=1e-2)
    torch.manual_seed(rank)
    if start is not None:
        streamer.load(wrapped, optimizer, start)
    before = held(wrapped, optimizer)
    for step in steps:
        # without a seed of its own: dropout goes on from the states of the generators
        tokens = torch.randint(0, 48, (2, 6), generator=torch.Generator().manual_seed(10 * step + rank))
        logits = wrapped(tokens, spare=True)
        torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten()).backward()
        streamer.clip_grad_norm_(wrapped, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step == 1 and end is not None:
            streamer.save(wrapped, optimizer, end, step=step, extra={"step": step}, block=block)
    after = held(wrapped, optimizer)
    streamer.unwrap(wrapped)
    return before, after


def held(wrapped: Any, optimizer: Any) -> Arrays:
    streamer.synchronize(wrapped)
    moments = {
        f"{name}.{key}": value
        for name, param in wrapped.named_parameters()
        for key, value in optimizer.state.get(param, {}).items()
    }
    executor = wrapped.__dict__["_streamer"].executor
    masters = {
        slice.param.name + " exact": whole.joined(slice)
        for unit in (*executor.units, executor.root)
        for whole in [executor.whole_shard(unit)]
        for slice in unit.layout.slices
    }
    return arrays({**moments, **masters, **wrapped.state_dict()})


def same(one: Arrays, other: Arrays) -> None:
    assert one.keys() == other.keys()
    assert not [name for name in one if not np.array_equal(one[name], other[name])]


def save_and_go_on(
    rank: int, size: int, saved: str, block: bool, machines: int | None = None
) -> tuple[Arrays, Arrays, Arrays]:
    """The end of a run, and the beginning and the end of one that goes on from its checkpoint."""
    _, whole = go(rank, size, [0, 1, 2, 3], None, saved, block, machines)
    return whole, *go(rank, size, [2, 3], saved, None, block, machines)


@pytest.mark.parametrize("block", [True, False])
def test_ranks_go_on_from_a_checkpoint_to_the_bit(tmp_path: Path, *, block: bool) -> None:
    saved = str(tmp_path / "saved")
    (whole, resumed, end), (second, _, other) = run_ranks(2, save_and_go_on, 2, saved, block)
    for each in (second, end, other):
        same(each, whole)
    for size in (1, 3, 4) if block else ():
        for before, _ in run_ranks(size, go, size, [], saved, None, block):
            same(before, resumed)
    # one process that knows of no ranks, and back
    before, _ = go(0, 0, [], saved, None, block)
    same(before, resumed)
    go(0, 0, [1], saved, str(tmp_path / "alone"), block)
    alone, _ = go(0, 0, [], str(tmp_path / "alone"), None, block)
    for before, _ in run_ranks(2, go, 2, [], str(tmp_path / "alone"), None, block):
        same(before, alone)


def test_machines_write_a_checkpoint_once_and_all_go_on_from_it(tmp_path: Path) -> None:
    saved = str(tmp_path / "saved")
    by_rank = run_ranks(4, save_and_go_on, 4, saved, True, 2)
    whole, resumed, _ = by_rank[0]
    for end, _, end_of_resumed in by_rank:
        same(end, whole)
        same(end_of_resumed, whole)
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]
    for size, machines in ((2, 2), (3, None)):
        for before, _ in run_ranks(size, go, size, [], saved, None, True, machines):
            same(before, resumed)
    before, _ = go(0, 0, [], saved, None, True)
    same(before, resumed)


def test_machines_that_divide_the_state_save_and_load_as_others_do(tmp_path: Path) -> None:
    saved = str(tmp_path / "saved")
    first, *others = run_ranks(4, go, 4, [0, 1, 2, 3], None, saved, False, "aabb")
    for _, whole in others:
        same(whole, first[1])
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]
    resumed, _ = go(0, 0, [], saved, None, True)
    for before, end in run_ranks(4, go, 4, [2, 3], saved, None, True, "aabb"):
        same(before, resumed)
        same(end, first[1])
    go(0, 0, [1], saved, str(tmp_path / "alone"), True)
    alone, _ = go(0, 0, [], str(tmp_path / "alone"), None, True)
    for before, _ in run_ranks(2, go, 2, [], str(tmp_path / "alone"), None, True, "ab"):
        same(before, alone)


def fails(rank: int, folder: str, machines: str | None = None) -> str:
    wrapped = streamer.wrap(model(), layers="layers", device="cpu", process_group=everyone(machines))
    answers = []
    for write in (
        lambda: streamer.save(wrapped, None, folder, step=0),
        lambda: streamer.load(wrapped, None, f"{folder}/nothing"),
        lambda: streamer.save(wrapped, None, f"{folder}/good", step=0),
    ):
        try:
            write()
        except (OSError, RuntimeError, ValueError) as error:
            answers.append(type(error).__name__)
    return " ".join(answers)


def test_all_ranks_know_that_a_checkpoint_could_not_be_written(tmp_path: Path) -> None:
    for machines in (None, "ab"):
        folder = tmp_path / f"on {machines}"
        folder.mkdir()
        assert run_ranks(2, fails, str(folder), machines) == [
            "FileExistsError CheckpointError",
            "RanksError CheckpointError",
        ]
        assert (folder / "good" / "manifest.json").is_file()


def saves_beside_backward(rank: int, folder: str) -> Arrays:
    """Save while layers are updated in the next backward, the writer being late: what was there."""
    made = streamer.wrap(
        model(), layers="layers", device="cpu", update="backward", process_group=dist.group.WORLD, **BF16
    )
    optimizer = streamer.AdamW(made.parameters(), lr=1e-2)
    write = save.write_tensors

    def write_late(*given: Any, **options: Any) -> Any:
        time.sleep(0.05)
        return write(*given, **options)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(save, "write_tensors", write_late)
        for step in range(3):
            backward(made, step, rank, 1, None)
            optimizer.step()
            optimizer.zero_grad()
            if step == 1:
                there = held(made, optimizer)
                saved = streamer.save(made, optimizer, folder, step=1, block=False)
        streamer.synchronize(made)
        saved.result()
    return there


def test_a_checkpoint_is_of_one_moment_where_ranks_update_in_backward(tmp_path: Path) -> None:
    there, _ = run_ranks(2, saves_beside_backward, str(tmp_path / "saved"))
    found, _ = go(0, 0, [], str(tmp_path / "saved"), None, True)
    same(found, there)
