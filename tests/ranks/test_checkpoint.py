"""Checkpoints do not know how many ranks wrote them."""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import streamer
from streamer.checkpoint import save
from tests.ranks.common import run_ranks
from tests.ranks.programs import Arrays, a_step, arrays, equal, everyone, model, wrap_model

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
    """Go on from a checkpoint if there is one, make ``steps`` if there are any, save: the weights and moments
    before and after them."""
    group = {"process_group": everyone(machines)} if size else {}
    wrapped = streamer.wrap(model(), layers="layers", device="cpu", **BF16, **group)
    optimizer = streamer.AdamW(wrapped.parameters(), lr=1e-2)
    torch.manual_seed(rank)
    before: Arrays = {}
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
    after = held(wrapped, optimizer) if steps else {}
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
        for whole in [executor.across.whole_shard(unit)]
        for slice in unit.layout.slices
    }
    return arrays({**moments, **masters, **wrapped.state_dict()})


def save_and_go_on(
    rank: int, size: int, saved: str, block: bool, machines: int | str | None = None
) -> tuple[Arrays, Arrays, Arrays]:
    """The end of a run, and the beginning and the end of one that goes on from its checkpoint."""
    _, whole = go(rank, size, [1, 2], None, saved, block, machines)
    return whole, *go(rank, size, [2], saved, None, block, machines)


def test_ranks_go_on_from_a_checkpoint_to_the_bit(tmp_path: Path) -> None:
    saved = str(tmp_path / "saved")
    (whole, resumed, end), (second, _, other) = run_ranks(2, save_and_go_on, 2, saved, True)
    for each in (second, end, other):
        equal(each, whole)
    for size in (1, 3, 4):
        for before, _ in run_ranks(size, go, size, [], saved, None, True):
            equal(before, resumed)
    # one process that knows of no ranks, and back
    before, alone = go(0, 0, [1], saved, str(tmp_path / "alone"), True)
    equal(before, resumed)
    for before, _ in run_ranks(2, go, 2, [], str(tmp_path / "alone"), None, True):
        equal(before, alone)


def test_machines_write_a_checkpoint_once_and_all_go_on_from_it(tmp_path: Path) -> None:
    saved = str(tmp_path / "saved")
    by_rank = run_ranks(2, save_and_go_on, 2, saved, False, 2)
    whole, resumed, _ = by_rank[0]
    for end, _, end_of_resumed in by_rank:
        equal(end, whole)
        equal(end_of_resumed, whole)
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]
    for before, _ in run_ranks(4, go, 4, [], saved, None, True, 2):
        equal(before, resumed)
    before, _ = go(0, 0, [], saved, None, True)
    equal(before, resumed)


def test_machines_that_divide_the_state_save_and_load_as_others_do(tmp_path: Path) -> None:
    saved = str(tmp_path / "saved")
    by_rank = run_ranks(2, save_and_go_on, 2, saved, False, "ab")
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]
    resumed, alone = go(0, 0, [1], saved, str(tmp_path / "alone"), True)
    for whole, before, end in by_rank:
        equal(before, resumed)
        equal(whole, by_rank[0][0])
        equal(end, whole)
    for before, _ in run_ranks(4, go, 4, [], str(tmp_path / "alone"), None, True, "aabb"):
        equal(before, alone)


def fails(rank: int, folder: str, machines: str | None = None) -> str:
    wrapped = wrap_model(machines=machines)
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


def saves(rank: int, folder: str, machines: str | None, before: partial[None] | None = None) -> list[str]:
    """Save, ``before`` being called before its rank writes a file: the names of the files that this rank has
    written, or the error."""
    made = wrap_model(machines=machines, **BF16)
    written: list[str] = []
    write = save.write_tensors

    def note(path: Path, *given: Any, **options: Any) -> Any:
        if before is not None and rank == before.args[0]:
            before(path)
        written.append(path.name)
        return write(path, *given, **options)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(save, "write_tensors", note)
        try:
            streamer.save(made, None, folder, step=0)
        except (OSError, RuntimeError) as error:
            return [f"{type(error).__name__}: {error}"]
    streamer.unwrap(made)
    return written


@pytest.mark.parametrize("machines", [None, "ab"])
def test_each_rank_writes_units(machines: str | None, tmp_path: Path) -> None:
    whole, saved = tmp_path / "whole", tmp_path / "saved"
    run_ranks(1, saves, str(whole), None)
    by_rank = run_ranks(2, saves, str(saved), machines)
    assert all(by_rank)
    written = sorted(name for names in by_rank for name in names)
    assert written == sorted(path.name for path in whole.glob("*.safetensors"))
    # the states of generators differ
    for name in [name for name in written if name.startswith("weights-")]:
        assert (saved / name).read_bytes() == (whole / name).read_bytes()
    assert {path.name for path in saved.iterdir()} == {path.name for path in whole.iterdir()}
    fresh = streamer.wrap(model(), layers="layers", device="cpu", **BF16)
    streamer.load(fresh, None, saved)
    streamer.unwrap(fresh)


def no_room(rank: int, path: Path) -> None:
    if path.name.startswith("weights-"):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))


def ends(rank: int, path: Path) -> None:
    if path.name.startswith("weights-"):
        path.write_text("a part of it")
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("happens", "rank", "machines"),
    # each pair of two of them
    [(no_room, 0, None), (no_room, 1, "ab"), (ends, 0, "ab"), (ends, 1, None)],
)
def test_what_ends_the_writing_of_a_rank_leaves_nothing(
    happens: Callable[[int, Path], None], rank: int, machines: str | None, tmp_path: Path
) -> None:
    given = str(tmp_path / "saved"), machines, partial(happens, rank)
    answers = run_ranks(2, saves, *given, timeout=2.0 if machines else 60.0, may_end=True)
    other, failed = answers[1 - rank], answers[rank]
    if happens is no_room:
        assert failed[0].startswith("OSError") and "No space left on device" in failed[0]
        assert other[0].startswith("OSError") and f"No space left on device on rank {rank}" in other[0]
    else:
        assert failed is None
        assert other[0].startswith(f"RanksError: rank {rank} has ended")
    assert list(tmp_path.iterdir()) == []


def saves_apart(rank: int, folder: str) -> list[str]:
    """Save to a folder that the second rank does not find."""
    with pytest.MonkeyPatch.context() as patched:
        if rank:
            patched.setattr(Path, "is_dir", lambda _: False)
        return saves(rank, folder, "ab")


def test_machines_must_share_the_folder(tmp_path: Path) -> None:
    one, two = run_ranks(2, saves_apart, str(tmp_path / "saved"))
    assert "all machines must share this folder on rank 1" in one[0]
    assert "all machines must share this folder" in two[0]
    assert list(tmp_path.iterdir()) == []


def saves_beside_backward(rank: int, folder: str) -> Arrays:
    """Save while layers are updated in the next backward, the writer being late: what was there."""
    made = wrap_model(update="backward", **BF16)
    optimizer = streamer.AdamW(made.parameters(), lr=1e-2)
    write = save.write_tensors

    def write_late(*given: Any, **options: Any) -> Any:
        time.sleep(0.05)
        return write(*given, **options)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(save, "write_tensors", write_late)
        for step in range(3):
            a_step(made, optimizer, step, rank)
            if step == 1:
                there = held(made, optimizer)
                saved = streamer.save(made, optimizer, folder, step=1, block=False)
        streamer.synchronize(made)
        saved.result()
    return there


def test_a_checkpoint_is_of_one_moment_where_ranks_update_in_backward(tmp_path: Path) -> None:
    there, _ = run_ranks(2, saves_beside_backward, str(tmp_path / "saved"))
    found, _ = go(0, 0, [], str(tmp_path / "saved"), None, True)
    equal(found, there)
