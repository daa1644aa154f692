"""The command as a process: what it need not wait for."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from streamer.version import __version__
from tests.cli.common import HOME


def command(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """``python -m streamer`` in ``folder``, run to its end."""
    return subprocess.run(
        [sys.executable, "-m", "streamer", *arguments],
        cwd=folder,
        env=dict(os.environ) | {"PYTHONPATH": str(HOME)} | variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_the_package_is_the_command(tmp_path: Path) -> None:
    done = command(tmp_path, "--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"streamer {__version__}\n", "")


@pytest.mark.parametrize(
    ("arguments", "code", "answer"),
    [
        (["--help"], 0, "streamer train DIR"),
        (["trian"], 2, "invalid choice: 'trian'"),
        (["train", "absent.toml"], 2, "streamer: absent.toml: No such file"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_help_and_refusals_wait_for_no_library(
    tmp_path: Path, arguments: list[str], code: int, answer: str
) -> None:
    done = command(tmp_path, *arguments, PYTHONPROFILEIMPORTTIME="1")
    assert done.returncode == code
    assert answer in done.stdout + done.stderr
    imported = set(re.findall(r"^import time:.*\|\s+(\S+)$", done.stderr, re.MULTILINE))
    assert "streamer.cli.main" in imported
    assert not imported & {"torch", "numba", "numpy", "tqdm"}


def test_libraries_print_nothing_before_the_command(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    from tests import tiny_llama

    tiny_llama.write(tmp_path / "model")
    done = command(tmp_path, "plan", "model", "--machine", "rtx-4090", "--set", "train.max_length=32")
    assert (done.returncode, re.sub(r"^\d+ steps? planned\n", "", done.stderr)) == (0, "")
