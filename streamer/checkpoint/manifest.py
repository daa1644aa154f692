"""A checkpoint's manifest (its step, its files with every tensor in them, values that are not tensors), and
folders that are complete or do not exist.

A checkpoint is written into a hidden folder next to its final path, flushed to the disk, and renamed: a
folder with its final name is complete. For the same reason, deleting a checkpoint renames it first.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import zlib
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from streamer.checkpoint.tensors import BY_NAME, Entry, check_tensors
from streamer.errors import CheckpointError

NAME = "manifest.json"
#: The format's version: increased when older readers cannot read a new file.
VERSION = 1

#: File names that a manifest may have: with others, a path could lead out of the folder.
_FILE_NAME = re.compile(r"[\w-]+\.safetensors", re.ASCII)


@dataclass(frozen=True)
class Manifest:
    """``files`` are by name in the checkpoint's folder; `checkpoint.values` encodes ``values``."""

    step: int
    files: dict[str, dict[str, Entry]]
    values: dict[str, Any]
    written_by: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if type(self.step) is not int:
            raise ValueError(f"step={self.step!r}: a checkpoint's step is an int")

    def write(self, folder: Path) -> None:
        """Write the manifest; it is on the disk when this returns."""
        body = json.dumps(asdict(self), sort_keys=True)
        content = {"version": VERSION, "crc32": zlib.crc32(body.encode()), "body": json.loads(body)}
        text = json.dumps(content, indent=1)
        with (folder / NAME).open("x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())

    def files_of(self, kind: str) -> dict[str, str]:
        """The file of each tensor of one ``kind``, the first part of the file's name."""
        return {
            name: file
            for file, entries in self.files.items()
            if re.split("[-.]", file)[0] == kind
            for name in entries
        }

    @staticmethod
    def read(folder: Path) -> Manifest:
        """Raises CheckpointError for a manifest that is missing, damaged or of a newer version."""
        path = folder / NAME
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise CheckpointError(f"{folder} holds no checkpoint ({NAME}: {error.strerror})") from error
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{path}: damaged ({error})") from error
        version = content.get("version") if isinstance(content, dict) else None
        if type(version) is not int or version < 1:
            raise CheckpointError(f"{path}: this is not a manifest of a checkpoint")
        if version > VERSION:
            raise CheckpointError(
                f"{path}: written in version {version} of the format, and this streamer reads up to "
                f"{VERSION}: update it"
            )
        body = content.get("body")
        if zlib.crc32(json.dumps(body, sort_keys=True).encode()) != content.get("crc32"):
            raise CheckpointError(f"{path}: damaged (its checksum differs)")
        try:
            return _parsed(path, body)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"{path}: not laid out as a manifest ({error!r})") from error

    def check(self, folder: Path) -> None:
        """Raise CheckpointError unless every file is there and unchanged."""
        for name, entries in self.files.items():
            check_tensors(folder / name, entries)


def _parsed(path: Path, body: Any) -> Manifest:
    files = {}
    for name, entries in body["files"].items():
        if not _FILE_NAME.fullmatch(name):
            raise CheckpointError(f"{path}: {name!r} is not the name of a file in its folder")
        files[name] = {key: _entry(value) for key, value in entries.items()}
    step, values, written_by = body["step"], body["values"], body["written_by"]
    if type(step) is not int or not isinstance(values, dict) or not isinstance(written_by, dict):
        raise TypeError("step, values or written_by")
    return Manifest(step, files, values, written_by)


def _entry(value: Mapping[str, Any]) -> Entry:
    numbers = [*value["shape"], value["offset"], value["nbytes"], value["crc32"]]
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise TypeError("shape, offset, nbytes or crc32")
    nbytes = prod(value["shape"]) * BY_NAME[value["dtype"]].itemsize
    if value["layout"] != "strided" or value["nbytes"] != nbytes:
        raise ValueError(f"an entry of {value['nbytes']} bytes, {value['layout']}")
    return Entry(**{**value, "shape": tuple(value["shape"])})


_HIDDEN = re.compile(r"\..*\.(?:writing|deleting)-(\d+)")


@contextmanager
def new_folder(path: Path, *, nbytes: int, what: str = "a checkpoint") -> Iterator[Path]:
    """A folder to write ``nbytes`` of ``what`` into. It becomes ``path`` when the block ends, and is deleted
    if the block raises.

    Raises FileExistsError if ``path`` exists, and OSError, with the path and the number of bytes, if it
    cannot be written.
    """
    if path.exists():
        raise FileExistsError(errno.EEXIST, f"the path exists already: use a new path for {what}", str(path))
    temporary = path.with_name(f".{path.name}.writing-{os.getpid()}")
    new_parents = [parent for parent in path.parents if not parent.exists()]
    is_placed = False
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if (free := shutil.disk_usage(path.parent).free) < nbytes:
            raise OSError(errno.ENOSPC, f"no room: {nbytes} bytes are needed and {free} are free")
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        yield temporary
        flush(temporary)
        temporary.rename(path)
        is_placed = True
        for parent in (path, *new_parents):
            flush(parent.parent)
    except BaseException as error:
        shutil.rmtree(path if is_placed else temporary, ignore_errors=True)
        for parent in new_parents:
            with suppress(OSError):  # it does not exist, or another process has put a file there
                parent.rmdir()
        if isinstance(error, OSError):
            at = "" if error.filename is None else f" ({error.filename})"
            raise OSError(
                error.errno,
                f"{what} of {nbytes} bytes could not be written: {error.strerror or error}{at}",
                str(path),
            ) from error
        raise


@contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """A path to write a file to. When the block ends it becomes ``path``, replacing a file there; it is
    deleted if the block raises. An OSError names ``path``; that of a write would name no file."""
    temporary = path.with_name(f".{path.name}")
    try:
        yield temporary
        temporary.replace(path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.strerror is not None:
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


def flush(folder: Path) -> None:
    """Flush the names in ``folder`` to the disk."""
    if not hasattr(os, "O_DIRECTORY"):
        return  # Windows flushes the names itself
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
            continue  # loading it by its path raises the error
    return [path for _, path in sorted(found)]


def prune(folder: Path, keep: int, spared: Collection[Path] = ()) -> None:
    """Delete all but the ``keep`` latest checkpoints in ``folder`` and those in ``spared``, and also files
    that killed processes left there.

    Raises ValueError for a ``keep`` below 1.
    """
    if keep < 1:
        raise ValueError(f"keep={keep}: keep one checkpoint or more")
    for path in checkpoints(folder)[:-keep]:
        if path in spared:
            continue
        hidden = path.with_name(f".{path.name}.deleting-{os.getpid()}")
        shutil.rmtree(hidden, ignore_errors=True)  # of a process with the same id
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
