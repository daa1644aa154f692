"""What the tests of the command share."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from streamer.cli.config import ConfigError
from streamer.cli.main import main

HOME = Path(__file__).parents[2]


def error_of(call: Callable[..., object], *arguments: Any, **options: Any) -> str:
    """The one line of the ConfigError that a call raises."""
    with pytest.raises(ConfigError) as error:
        call(*arguments, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


def sets(*settings: str) -> list[str]:
    """The command's options that set keys."""
    return [part for setting in settings for part in ("--set", setting)]


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The last line of a command's errors; it ends with exit code 2."""
    assert main(list(arguments)) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("streamer: ")
    return error


def least_of(error: str) -> int:
    """The bytes of host memory that are enough, by an error that finds too few."""
    found = re.search(r"stream\.host_memory needs ([0-9]+) bytes", error)
    assert found is not None, error
    return int(found[1])


def logged(run: Path, key: str = "step") -> list[dict[str, Any]]:
    """The lines of a run's ``metrics.jsonl`` that have ``key``."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if key in line]


def chat(number: int) -> list[dict[str, str]]:
    """A conversation of one question and its answer."""
    return [
        {"role": "user", "content": f"after {number}?"},
        {"role": "assistant", "content": f"{number + 1}"},
    ]
