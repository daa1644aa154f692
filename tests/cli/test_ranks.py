"""`streamer train` of a model of one's own under torchrun: two processes do what one does in two
passes."""

from __future__ import annotations

import contextlib
import io
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
import torch

from streamer.cli import loop
from streamer.cli.main import main
from tests.cli.common import HOME, logged, sets
from tests.cli.test_loop import config, tensors
from tests.ranks.common import listening, run_ranks

__all__ = ["config"]
Result = tuple[int, str, str]


def commands(
    rank: int,
    size: int,
    places: Sequence[Mapping[str, str]],
    runs: Sequence[Sequence[str]],
    spoil: Callable[[int], None] | None,
) -> list[Result]:
    """What each command ends with, run as torchrun would: its exit code, stdout and stderr."""
    os.chdir(HOME)
    results = []
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    for place, arguments in zip(places, runs, strict=True):
        os.environ.update({**place, **{name: str(value) for name, value in names.items()}})
        if spoil is not None:
            spoil(rank)
        out, error = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
            code = main([*arguments])
        results.append((code, out.getvalue(), error.getvalue()))
    return results


def under_torchrun(*runs: Sequence[str], spoil: Callable[[int], None] | None = None) -> list[list[Result]]:
    """The results of each command, by rank."""
    stores = [listening() for _ in runs]
    places = [place for _, place in stores]
    by_rank = run_ranks(2, commands, 2, places, runs, spoil, kind=None)
    return [*map(list, zip(*by_rank, strict=True))]


def test_two_ranks_train_as_one_does_and_resume_each_other(config: Path, tmp_path: Path) -> None:
    half = ["train", str(config), *sets("train.per_device_train_batch_size=2", "train.max_grad_norm=0")]
    one = [*half, *sets("train.gradient_accumulation_steps=2")]
    assert main([*one, "--output", str(tmp_path / "one")]) == 0
    results = under_torchrun(
        [*half, "--output", str(tmp_path / "two")],
        [*half, "--output", str(tmp_path / "three"), "--steps", "3"],
        [*half, "--resume", str(tmp_path / "three" / "checkpoint-3")],
    )
    assert [[code for code, _, _ in result] for result in results] == [[0, 0]] * 3
    assert "on each of 2 ranks" in results[0][0][1] and results[0][1][1] == "", "rank 1 prints nothing"
    expected = tensors(tmp_path / "one" / "checkpoint-6")
    for name in ("two", "three"):
        for key, value in tensors(tmp_path / name / "checkpoint-6").items():
            assert torch.equal(value, expected[key]), f"{name}: {key}"
    losses = [[line["loss"] for line in logged(tmp_path / name, "loss")] for name in ("one", "two")]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    # and one process continues what two have begun
    assert main([*one, "--resume", str(tmp_path / "two"), "--steps", "7"]) == 0


def interrupt_second(rank: int) -> None:
    step = loop.Loop.train_step

    def interrupted(self: loop.Loop) -> dict[str, float]:
        if self.step == 1 and rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(self)

    loop.Loop.train_step = interrupted  # type: ignore[method-assign]


def test_a_signal_to_one_rank_saves_on_all(config: Path, tmp_path: Path) -> None:
    [results] = under_torchrun(["train", str(config)], spoil=interrupt_second)
    assert [code for code, _, _ in results] == [0, 0]
    assert "stopped after step 2; --resume" in results[0][1]
    assert [path.name for path in (tmp_path / "run").glob("checkpoint-*")] == ["checkpoint-2"]


def test_a_run_that_is_refused_ends_all_ranks(config: Path, tmp_path: Path) -> None:
    [results] = under_torchrun(["train", str(config), *sets("train.max_length=17")])
    assert [code for code, _, _ in results] == [2, 2]
    assert "the model cannot run on sequences" in results[0][2]
    assert results[1][2].startswith("streamer: rank 1: ")
    assert not (tmp_path / "run").exists()
