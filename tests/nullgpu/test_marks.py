"""Which tests run where."""

from __future__ import annotations

import re
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


#: Collects the tests of each folder as its marks select them, in one process that imports once.
COLLECT = """
import sys
import pytest

for folder, select in zip(sys.argv[1::2], sys.argv[2::2]):
    options = ["-c", "pyproject.toml", "-p", "tests.conftest", "-p", "no:cacheprovider"]
    code = pytest.main(["--collect-only", "-q", *options, "-m", select, folder])
    print(f"=== {int(code)}", flush=True)
    print("===", file=sys.stderr, flush=True)
"""
#: What is selected of which mark, and the tests that are found.
CASES = [
    ("cuda_values", "cuda_api", ["test_api"]),
    ("cuda_values", "cuda_values", ["test_one", "test_values"]),
    ("cuda_values", "not cuda", []),
    ("cuda", "cuda", []),
]


@pytest.fixture(scope="module")
def collected(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, str]]:
    """Of each of the `CASES` what pytest prints, and its errors."""
    arguments = []
    for number, (mark, select, _) in enumerate(CASES):
        folder = tmp_path_factory.mktemp("marks")
        (folder / f"test_some_{number}.py").write_text(TESTS.format(mark=mark))
        arguments += [str(folder), select]
    command = [sys.executable, "-c", COLLECT, *arguments]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    found = list(zip(re.split(r"(?<==== \d)\n", run.stdout), run.stderr.split("===\n"), strict=False))
    assert len(found) >= len(CASES), run.stderr
    return found


@pytest.mark.parametrize("number", range(3))
def test_a_test_of_either_kind_is_a_cuda_test(number: int, collected: list[tuple[str, str]]) -> None:
    names = [line.split("::")[1] for line in collected[number][0].splitlines() if "::" in line]
    assert names == CASES[number][2]


def test_a_cuda_test_of_neither_kind_is_an_error(collected: list[tuple[str, str]]) -> None:
    printed, errors = collected[3]
    assert printed.endswith(f"=== {int(pytest.ExitCode.USAGE_ERROR)}")
    assert "::test_one needs a GPU: mark it as one of cuda_api and cuda_values" in errors
