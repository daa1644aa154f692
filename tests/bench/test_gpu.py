"""`bench/gpu.sh` without a GPU, and with a stand-in for Python that says what it is asked for."""

from __future__ import annotations

import contextlib
import os
import shlex
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench import depth, fits, hidden_update, overlap, tokens_per_transfer, versus
from bench.versus_contenders import Task, contenders
from streamer.cli.config import Config, load_config

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "bench" / "gpu.sh"
PARTS = ["fits", "versus", "overlap", "tests", "tokens", "depth", "hidden"]

#: Finds a GPU and has memory for so many layers, and runs nothing: tests fail, `bench.depth` outlasts its
#: limit, `bench.hidden_update` is killed.
STAND_IN = """#!/usr/bin/env bash
case "$*" in
  *available_bytes*) echo LAYERS; exit 0 ;;
  -c*) exit 0 ;;
  *"-m pytest"*) code=1 ;;
  *"-m bench.depth"*) exec sleep 60 ;;
  *"-m bench.hidden_update"*) kill -9 $$ ;;
esac
printf 'asked for'; printf ' %q' "$@"; echo
exit ${code:-0}
"""


def run(
    python: Path | str, *arguments: Path | str, script: Path = SCRIPT, **settings: str
) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHON": str(python), "CUDA_VISIBLE_DEVICES": "", **settings}
    command = ["bash", str(script), *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=100)


@pytest.fixture
def stand_in(tmp_path: Path) -> Path:
    path = tmp_path / "python"
    path.write_text(STAND_IN.replace("LAYERS", "50"))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.fixture
def short_script(tmp_path: Path) -> Path:
    """A copy that stops the measurement by depth after a second."""
    path = tmp_path / "bench" / "gpu.sh"
    path.parent.mkdir()
    path.write_text(SCRIPT.read_text().replace("part depth 50", "part depth 1"))
    return path


def asked(done: subprocess.CompletedProcess[str]) -> dict[str, list[str]]:
    """By module, its arguments."""
    calls = [shlex.split(line)[3:] for line in done.stdout.splitlines() if line.startswith("asked for -m")]
    return {module: arguments for module, *arguments in calls}


def test_without_a_gpu_nothing_is_measured(tmp_path: Path) -> None:
    done = run(sys.executable, tmp_path / "out")
    assert done.returncode == 2
    assert "finds no CUDA GPU here: nothing was measured" in done.stdout
    assert list((tmp_path / "out").iterdir()) == []


def test_what_fails_does_not_keep_the_others_from_running(
    stand_in: Path, short_script: Path, tmp_path: Path
) -> None:
    done = run(stand_in, tmp_path / "out", script=short_script)
    assert done.returncode == 1
    outcomes = done.stdout.split(f"=== {tmp_path / 'out'}\n")[1].splitlines()
    assert [line.split(": ")[0] for line in outcomes] == PARTS
    said = [line.split(": ")[1].split(" after")[0].split(" in ")[0] for line in outcomes]
    assert said == [*["done"] * 3, "FAILED with 1", "done", "FAILED, stopped", "FAILED, killed"]
    assert done.stdout.count("asked for -m bench.") == 4
    assert (tmp_path / "out" / "gpu.txt").read_text() == done.stdout


def config_of(options: object) -> Config:
    return load_config(options.config, options.overrides)  # type: ignore[attr-defined]


@pytest.mark.parametrize("is_dry", [False, True])
def test_every_part_takes_the_arguments_that_it_gets(
    is_dry: bool, stand_in: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What would be found out only on the machine with the GPU: names and values of arguments, keys of
    configs, names of contenders and variants, files of tests."""
    stand_in.write_text(STAND_IN.replace("exec sleep 60", "").replace("kill -9 $$", ""))
    monkeypatch.chdir(ROOT)
    dry = {"SMALL": "1", "NO_VALUES": "1"} if is_dry else {}
    given = asked(run(stand_in, tmp_path / "out", **dry))

    fitted = fits.parse(given.pop("bench.fits"))
    config = config_of(fitted)
    assert fitted.host_memory == "120GiB"
    assert all(size % config.stream.micro_batch_size == 0 for size in fitted.batch_sizes)
    assert fitted.batch_sizes[0] == config.train.per_device_train_batch_size
    traced = overlap.parse(given.pop("bench.overlap"))
    config_of(traced)

    beside = versus.parse(given.pop("bench.versus"))
    with contextlib.ExitStack() as exits:
        sizes = {"n_layer": beside.n_layer, "vocab_size": 8, "block_size": 8, "n_head": 1, "n_embd": 8}
        task = Task(torch.device("cpu"), torch.bfloat16, sizes, batch_size=2, lr=1.0, exits=exits)
        groups = versus.chosen(beside, list(contenders(task, num_slots=beside.slots)))
        assert [len(group) for group in groups] == [4, 4]
        by_tokens = tokens_per_transfer.parse(given.pop("bench.tokens_per_transfer"))
        assert len(tokens_per_transfer.builders(task, by_tokens, None)) == 2 + 5
    by_depth, hidden = (
        module.parse(given.pop(f"bench.{module.__name__.removeprefix('bench.')}"))
        for module in (depth, hidden_update)
    )

    ours = (fitted, traced, beside, by_tokens, by_depth, hidden)
    assert [options.no_values for options in ours] == [is_dry] * 6
    assert {options.json.parent for options in ours} == {tmp_path / "out"}
    for options in (beside, by_tokens, by_depth, hidden):
        assert options.device == "cuda"
        assert options.n_embd % options.n_head == 0
    files = [argument for argument in given.pop("pytest") if argument.startswith("tests/")]
    assert len(files) == 4
    assert all(Path(file).exists() for file in files)
    assert given == {}
