"""Folders that are complete or not there at all.

A checkpoint is written into a hidden folder beside the one that it is to be, flushed, and renamed: whoever
finds a folder by its name finds all of it. What is deleted is renamed first, for the same reason.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from streamer.files.errors import CheckpointError
from streamer.files.manifest import Manifest

_HIDDEN = re.compile(r"\..*\.(?:writing|deleting)-(\d+)")


@contextmanager
def new_folder(path: Path, *, nbytes: int) -> Iterator[Path]:
    """A folder to write ``nbytes`` into, which is ``path`` when the block ends, or nowhere if it raises.

    Raises FileExistsError where ``path`` is there already, and OSError, with the path and the bytes that are
    needed, where it cannot be written.
    """
    if path.exists():
        raise FileExistsError(
            errno.EEXIST, "there is something already: give each checkpoint a path of its own", str(path)
        )
    beside = path.with_name(f".{path.name}.writing-{os.getpid()}")
    new_parents = [parent for parent in path.parents if not parent.exists()]
    is_placed = False
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if (free := shutil.disk_usage(path.parent).free) < nbytes:
            raise OSError(errno.ENOSPC, f"no room: {nbytes} bytes are needed and {free} are free")
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir()
        yield beside
        flush(beside)
        beside.rename(path)
        is_placed = True
        for parent in (path, *new_parents):
            flush(parent.parent)
    except BaseException as error:
        shutil.rmtree(path if is_placed else beside, ignore_errors=True)
        for parent in new_parents:
            with suppress(OSError):  # not made, or somebody else has put something there
                parent.rmdir()
        if isinstance(error, OSError):
            at = "" if error.filename is None else f" ({error.filename})"
            raise OSError(
                error.errno,
                f"a checkpoint of {nbytes} bytes could not be written: {error.strerror or error}{at}",
                str(path),
            ) from error
        raise


def flush(folder: Path) -> None:
    """Have the names in ``folder`` on the disk."""
    if not hasattr(os, "O_DIRECTORY"):
        return  # Windows keeps them by itself
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints in ``folder`` whose manifests can be read, by step, the last one latest."""
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.name.startswith(".") or not path.is_dir():
            continue
        try:
            found.append((Manifest.read(path).step, path))
        except CheckpointError:
            continue  # whoever asks for it by name is told
    return [path for _, path in sorted(found)]


def prune(folder: Path, keep: int) -> None:
    """Delete all but the ``keep`` latest checkpoints in ``folder``, and what killed processes left there.

    Raises ValueError for a ``keep`` below 1.
    """
    if keep < 1:
        raise ValueError(f"keep={keep}: keep one checkpoint or more")
    for path in checkpoints(folder)[:-keep]:
        hidden = path.with_name(f".{path.name}.deleting-{os.getpid()}")
        shutil.rmtree(hidden, ignore_errors=True)  # of a process that had the same number
        path.rename(hidden)
        shutil.rmtree(hidden)
    for path in folder.iterdir() if folder.is_dir() else ():
        match = _HIDDEN.fullmatch(path.name)
        if match and not _is_running(int(match[1])):
            shutil.rmtree(path, ignore_errors=True)


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True
