"""A checkpoint's manifest (its step, its files with every tensor in them, values that are not tensors), and
folders that are complete or do not exist.

A checkpoint is written into a hidden folder next to its final path, flushed to the disk, and renamed: a
folder with its final name is complete. A checkpoint may leave out frozen parameters, such as the base of
adapters. The manifest holds their checksums, so that `load` can check that the model has the same values.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from streamer.checkpoint.tensors import DTYPES, Entry, bytes_of, check_tensors, in_a_line
from streamer.errors import CheckpointError
from streamer.store.layout import Slice
from streamer.store.shard import HostShard
from streamer.store.weights_on_disk import WeightsOnDisk

NAME = "manifest.json"
#: The format's version: increased when older readers cannot read a new file.
VERSION = 1


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
            if (version := content["version"]) > VERSION:
                raise CheckpointError(
                    f"{path}: written in version {version} of the format, and this streamer reads up to "
                    f"{VERSION}: update it"
                )
            body, checksum = content["body"], content["crc32"]
        except CheckpointError:
            raise
        except OSError as error:
            raise CheckpointError(f"{folder} holds no checkpoint ({NAME}: {error.strerror})") from error
        except (ValueError, LookupError, TypeError) as error:
            raise CheckpointError(f"{path}: damaged ({in_a_line(error)})") from error
        if zlib.crc32(json.dumps(body, sort_keys=True).encode()) != checksum:
            raise CheckpointError(f"{path}: damaged (its checksum differs)")
        files = {
            file: {
                name: Entry(**{**entry, "shape": tuple(entry["shape"])}) for name, entry in entries.items()
            }
            for file, entries in body["files"].items()
        }
        return Manifest(body["step"], files, body["values"], body["written_by"])

    def check(self, folder: Path) -> None:
        """Raise CheckpointError unless every file is there and unchanged."""
        for name, entries in self.files.items():
            check_tensors(folder / name, entries)


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


@dataclass(frozen=True)
class LeftOut:
    """A manifest's entry for a parameter that the checkpoint leaves out: its dtype by the name of the
    safetensors format, its shape, and the CRC-32 of its bytes."""

    dtype: str
    shape: tuple[int, ...]
    crc32: int

    @staticmethod
    def held(slice: Slice, shard: HostShard) -> LeftOut:
        """The entry of a frozen parameter of ``shard``, which is read as a whole; read only once if it is in
        the user's file, which does not change."""
        on_disk = shard.weights_on_disk
        known = _IN_FILES.setdefault(on_disk, {}) if on_disk.is_stored(slice) else {}
        if slice not in known:
            values = shard.weight_of(slice)
            known[slice] = LeftOut(DTYPES[values.dtype], tuple(values.shape), zlib.crc32(bytes_of(values)))
        return known[slice]

    @staticmethod
    def parsed(value: Mapping[str, Any]) -> LeftOut:
        """The entry, as a manifest has it."""
        return LeftOut(value["dtype"], tuple(value["shape"]), value["crc32"])


#: Known entries of parameters in files, for as long as these files are read.
_IN_FILES: WeakKeyDictionary[WeightsOnDisk, dict[Slice, LeftOut]] = WeakKeyDictionary()
