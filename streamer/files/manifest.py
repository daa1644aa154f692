"""What a checkpoint holds: its step, its files with every tensor in them, and values that are no tensors."""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from streamer.files.errors import CheckpointError
from streamer.files.tensors import DTYPES, Entry, check_tensors

NAME = "manifest.json"
#: Of the format: raised when a reader of this version could not make sense of what is written.
VERSION = 1

#: Names of files beside the manifest: a path could lead out of the folder.
_FILE_NAME = re.compile(r"[\w-]+\.safetensors", re.ASCII)
_ITEMSIZES = {name: dtype.itemsize for dtype, name in DTYPES.items()}


@dataclass(frozen=True)
class Manifest:
    """``files`` are by name in the checkpoint's folder; ``values`` are encoded by `streamer.files.tree`."""

    step: int
    files: dict[str, dict[str, Entry]]
    values: dict[str, Any]
    written_by: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if type(self.step) is not int:
            raise ValueError(f"step={self.step!r}: a checkpoint's step is an int")

    def write(self, folder: Path) -> None:
        """Write it, and have it on the disk when this returns."""
        body = json.dumps(asdict(self), sort_keys=True)
        given = {"version": VERSION, "crc32": zlib.crc32(body.encode()), "body": json.loads(body)}
        text = json.dumps(given, indent=1)
        with (folder / NAME).open("x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())

    @staticmethod
    def read(folder: Path) -> Manifest:
        """Raises CheckpointError for one that is missing, damaged or of a newer version."""
        path = folder / NAME
        try:
            given = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise CheckpointError(f"{folder} holds no checkpoint ({NAME}: {error.strerror})") from error
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{path}: damaged ({error})") from error
        version = given.get("version") if isinstance(given, dict) else None
        if type(version) is not int or version < 1:
            raise CheckpointError(f"{path}: this is no manifest of a checkpoint")
        if version > VERSION:
            raise CheckpointError(
                f"{path}: written in version {version} of the format, and this streamer reads up to "
                f"{VERSION}: update it"
            )
        body = given.get("body")
        if zlib.crc32(json.dumps(body, sort_keys=True).encode()) != given.get("crc32"):
            raise CheckpointError(f"{path}: damaged (its checksum differs)")
        try:
            return _parsed(path, body)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"{path}: not laid out as a manifest ({error!r})") from error

    def check(self, folder: Path) -> None:
        """Raise CheckpointError unless every file is there and holds what was written."""
        for name, entries in self.files.items():
            check_tensors(folder / name, entries)


def _parsed(path: Path, body: Any) -> Manifest:
    files = {}
    for name, entries in body["files"].items():
        if not _FILE_NAME.fullmatch(name):
            raise CheckpointError(f"{path}: {name!r} is no name of a file beside it")
        files[name] = {key: _entry(value) for key, value in entries.items()}
    step, values, written_by = body["step"], body["values"], body["written_by"]
    if type(step) is not int or not isinstance(values, dict) or not isinstance(written_by, dict):
        raise TypeError("step, values or written_by")
    return Manifest(step, files, values, written_by)


def _entry(value: Mapping[str, Any]) -> Entry:
    numbers = [*value["shape"], value["offset"], value["nbytes"], value["crc32"]]
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise TypeError("shape, offset, nbytes or crc32")
    if value["layout"] != "strided" or value["nbytes"] != prod(value["shape"]) * _ITEMSIZES[value["dtype"]]:
        raise ValueError(f"an entry of {value['nbytes']} bytes, {value['layout']}")
    return Entry(**{**value, "shape": tuple(value["shape"])})
