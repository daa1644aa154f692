"""The command as a process: what it need not wait for, and Ctrl-C before it has begun."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from streamer.version import __version__
from tests.cli.common import HOME


def environment(*folders: Path, **variables: str) -> dict[str, str]:
    path = {"PYTHONPATH": os.pathsep.join(map(str, [*folders, HOME]))}
    return dict(os.environ) | path | variables


def command(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """``python -m streamer`` in ``folder``, run to its end."""
    return subprocess.run(
        [sys.executable, "-m", "streamer", *arguments],
        cwd=folder,
        env=environment(**variables),
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
        (["calibrate", "absent.toml"], 2, "streamer: absent.toml: No such file"),
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


SLOW = """
import time
print("importing", flush=True)
try:
    time.sleep(60)
except KeyboardInterrupt:  # as the import of an extension module may do
    raise ImportError("initialization failed") from None
"""


def test_ctrl_c_amid_an_import_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(SLOW)
    with subprocess.Popen(
        [sys.executable, "-m", "streamer", "export", "absent", "--to", "weights"],
        env=environment(tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "importing\n"
        child.send_signal(signal.SIGINT)
        _, errors = child.communicate(timeout=30)
    assert (child.returncode, errors) == (130, "\nstreamer: interrupted; nothing is written\n")
