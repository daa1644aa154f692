"""Files in a run's folder that have a line of JSON for each thing told, such as ``metrics.jsonl``."""

from __future__ import annotations

import contextlib
import json
import os
from collections import deque
from collections.abc import Callable, Mapping
from io import FileIO
from pathlib import Path
from typing import Any


class Lines:
    """The file ``path``, at whose end lines are added, each whole or not at all. A line that cannot be
    written is no reason to end a run: it waits in memory for a later `add`, or for the end of the block, and
    ``tell`` gets one line of why."""

    def __init__(self, path: Path, tell: Callable[[str], object]) -> None:
        self._path = path
        self._tell = tell
        self._waiting: deque[Mapping[str, Any]] = deque()
        self._has_told = False

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *_: object) -> None:
        self._write()
        if self._waiting:
            self._tell(f"{self._path}: {len(self._waiting):,} lines could not be written and are lost")

    def add(self, value: Mapping[str, Any]) -> None:
        """Add a line, which has the key "step"."""
        self._waiting.append(value)
        self._write()

    def forget_after(self, step: int) -> None:
        """Drop the lines beyond ``step``."""
        self._waiting = deque(value for value in self._waiting if value["step"] <= step)
        forget_after(self._path, step)

    def _write(self) -> None:
        if not self._waiting:
            return
        try:
            with self._path.open("ab", buffering=0) as file:
                while self._waiting:
                    _append(file, f"{json.dumps(self._waiting[0], ensure_ascii=False)}\n".encode())
                    self._waiting.popleft()
        except OSError as error:
            if not self._has_told:
                self._tell(
                    f"{self._path}: {error.strerror}; the run goes on, and keeps its lines in memory until "
                    "they can be written: make room there"
                )
            self._has_told = True
        else:
            self._has_told = False


def _append(file: FileIO, line: bytes) -> None:
    end = file.seek(0, os.SEEK_END)
    try:
        # of a disk with room for a part of the line, the first write writes that
        while line:
            line = line[file.write(line) :]
    except OSError:
        with contextlib.suppress(OSError):
            file.truncate(end)
        raise


def forget_after(lines: Path, step: int) -> None:
    """Drop the lines of a file beyond ``step``, which will be written again, and an incomplete last line."""
    if not lines.exists():
        return
    kept = []
    for line in lines.read_text(encoding="utf-8", errors="replace").split("\n"):
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line)
        except ValueError:
            continue  # the process was killed while it wrote this line
    with lines.open("r+b") as file:  # in place, for which a full disk has room
        file.write("".join(f"{line}\n" for line in kept).encode())
        file.truncate()
