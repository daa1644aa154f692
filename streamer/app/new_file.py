"""Files that are complete or not there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """A path to write a file to. It becomes ``path``, in place of what is there, when the block ends, and is
    deleted if the block raises. An OSError names ``path``; that of a write would name no file."""
    beside = path.with_name(f".{path.name}")
    try:
        yield beside
        beside.replace(path)
    except BaseException as error:
        beside.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.strerror is not None:
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise
