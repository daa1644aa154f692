"""Which tests run where."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TESTS = """
import pytest

@pytest.mark.{mark}
def test_one(): ...

@pytest.mark.cuda_api
def test_api(): ...

@pytest.mark.cuda_values
def test_values(): ...
"""


def collected(folder: Path, mark: str, select: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_some.py").write_text(TESTS.format(mark=mark))
    options = ["-c", str(ROOT / "pyproject.toml"), "-p", "tests.conftest", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", *options, "-m", select, str(folder)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("select", "names"),
    [("cuda_api", ["test_api"]), ("cuda_values", ["test_one", "test_values"]), ("not cuda", [])],
)
def test_a_test_of_either_kind_is_a_cuda_test(select: str, names: list[str], tmp_path: Path) -> None:
    run = collected(tmp_path, "cuda_values", select)
    assert [line.split("::")[1] for line in run.stdout.splitlines() if "::" in line] == names


def test_a_cuda_test_of_neither_kind_is_an_error(tmp_path: Path) -> None:
    run = collected(tmp_path, "cuda", "cuda")
    assert run.returncode == pytest.ExitCode.USAGE_ERROR
    assert "::test_one needs a GPU: mark it as one of cuda_api and cuda_values" in run.stderr
