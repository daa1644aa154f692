"""`bench/gpu.sh` without a GPU, and with a stand-in for Python that says what it is asked for."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "bench" / "gpu.sh"

#: Finds a GPU, and runs nothing: the tests fail, the measurement by depth outlasts its limit.
STAND_IN = """#!/bin/sh
case "$*" in
  -c*) exit 0 ;;
  *"-m pytest"*) exit 1 ;;
  *"-m bench.depth"*) exec sleep 60 ;;
esac
echo "asked for $*"
"""


def run(python: Path | str, folder: Path, script: Path = SCRIPT) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHON": str(python), "CUDA_VISIBLE_DEVICES": ""}
    command = ["bash", str(script), str(folder)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=100)


def test_without_a_gpu_nothing_is_measured(tmp_path: Path) -> None:
    done = run(sys.executable, tmp_path / "out")
    assert done.returncode == 2
    assert "finds no CUDA GPU here: nothing was measured" in done.stdout
    assert list((tmp_path / "out").iterdir()) == []


@pytest.fixture
def stand_in(tmp_path: Path) -> Path:
    path = tmp_path / "python"
    path.write_text(STAND_IN)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_what_fails_does_not_keep_the_others_from_running(stand_in: Path, tmp_path: Path) -> None:
    # a copy whose limit for the measurement by depth is one second
    script = tmp_path / "bench" / "gpu.sh"
    script.parent.mkdir()
    script.write_text(SCRIPT.read_text().replace('"by depth" 40', '"by depth" 1'))
    done = run(stand_in, tmp_path / "out", script)
    assert done.returncode == 1
    outcomes = done.stdout.split(f"=== {tmp_path / 'out'}\n")[1].splitlines()
    said = [line.split(": ")[1].split(" after")[0].split(" in ")[0] for line in outcomes]
    assert said == ["done", "FAILED with 1", "done", "FAILED, stopped", "done", "done", "done"]
    assert done.stdout.count("asked for -m bench.") == 5
    assert (tmp_path / "out" / "gpu.txt").read_text() == done.stdout


def test_the_parts_fit_into_eight_minutes_by_what_is_left(stand_in: Path, tmp_path: Path) -> None:
    script = tmp_path / "bench" / "gpu.sh"
    script.parent.mkdir()
    script.write_text(SCRIPT.read_text().replace("SECONDS + 480", "SECONDS + 10"))
    done = run(stand_in, tmp_path / "out", script)
    assert done.returncode == 1
    assert done.stdout.count("not begun, no time left") == 7
    assert "asked for" not in done.stdout
