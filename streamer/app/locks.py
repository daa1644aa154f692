"""One process at a time, by locks on files that end with the process that holds them."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, TextIO

fcntl: Any
try:
    fcntl = import_module("fcntl")
except ImportError:  # Windows
    fcntl = None


def is_held(file: TextIO) -> bool:
    """Lock ``file``, or say that another process has locked it. Where the system or the file system has no
    such locks, none is taken."""
    if fcntl is None:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in (errno.EAGAIN, errno.EACCES)
    return False


@contextlib.contextmanager
def alone(path: Path, told: str) -> Iterator[None]:
    """Inside the block the lock on the file ``path`` is this process's. Where another one has it, waits,
    after printing what is ``told``."""
    with path.open("a+") as file:
        if is_held(file):
            print(told, flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
