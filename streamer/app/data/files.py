"""The files that data come from."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import NoReturn

from streamer.app.config import ConfigError

HEAD_BYTES = 8 * 1024
#: Suffixes of files that hold tokens: nanoGPT's (uint16, one after another), and NumPy's arrays.
TOKEN_FILES = (".bin", ".npy")
#: Suffixes of data in forms that are not read, and of text that is compressed.
TABLES = (".parquet", ".arrow")
COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
DATA_FILES = (".jsonl", ".ndjson", ".json", ".csv", ".txt")

#: Folders in the standard library's tree that are not read: what was installed into it, the tests (more
#: than half of its bytes), and what is generated (tables, help texts, bytecode): what is left is code.
NOT_LIBRARY = (
    "site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data", "__pycache__",
)  # fmt: skip


def find_files(paths: Sequence[str | os.PathLike[str]] = ()) -> list[Path]:
    """The text files at ``paths``, sorted, each once; with no paths, the Python standard library's sources.

    A directory is searched to its depths, without following links to directories; hidden, empty and binary
    files in it (a NUL byte in the first 8 KiB) are passed over. Raises ConfigError, in one line that names
    the path and the remedy, for one that is missing or unreadable, for a file given that is empty or binary,
    for a directory without text files, and for data in a form that is not read.
    """
    if not paths:
        library = Path(sysconfig.get_path("stdlib"))
        sources = sorted(path for path in _texts_in(library, NOT_LIBRARY) if path.suffix == ".py")
        if not sources:
            raise ConfigError(f"{library}: this Python came without the library's sources; set data.paths")
        return sources
    found: dict[Path, Path] = {}  # by the file a link leads to: text in both splits would flatter the loss
    for path in map(Path, paths):
        if os.path.isdir(path):  # unlike Path.is_dir, false where it may not look
            files = _texts_in(path)
            if not files:
                raise ConfigError(f"{path}: no text files in this folder; give text files or folders of them")
        elif os.path.isfile(path):
            files = [path]
            _refuse_unread(path)
            if path.suffix not in TOKEN_FILES and not _is_text(path):
                raise ConfigError(f"{path}: empty, or binary (it has a NUL byte); give a text file")
        elif os.path.lexists(path):
            raise ConfigError(f"{path}: neither a file nor a folder; give text files or folders of them")
        else:
            raise ConfigError(f"{path}: no such file or folder in {os.getcwd()}; correct data.paths")
        found.update((file.resolve(), file) for file in files)
    return sorted(found.values())


def _texts_in(folder: Path, skip: Collection[str] = ()) -> list[Path]:
    """The text files below ``folder``, without hidden ones and the folders named in ``skip``."""
    paths: list[Path] = []
    for root, folders, names in os.walk(folder, onerror=_unreadable):
        folders[:] = [name for name in folders if name[0] != "." and name not in skip]
        paths += [Path(root, name) for name in names if name[0] != "."]
    for path in paths:
        _refuse_unread(path)
    return [path for path in paths if os.path.isfile(path) and _is_text(path)]


def _refuse_unread(path: Path) -> None:
    """Raise ConfigError if ``path`` names data that would be passed over as a binary file."""
    within, last = Path(path.stem).suffix.lower(), path.suffix.lower()
    is_compressed = last in COMPRESSED and within in DATA_FILES
    if is_compressed or last in TABLES:
        remedy = "decompress it" if is_compressed else "write it as .jsonl, a row a line"
        raise ConfigError(f"{path}: {last} is not read; {remedy}, or leave it out of data.paths")


def _is_text(path: Path) -> bool:
    head = read_bytes(path, HEAD_BYTES)
    return bool(head) and b"\0" not in head


def read_bytes(path: Path, size: int = -1) -> bytes:
    """The first ``size`` bytes of a file, or all. Raises ConfigError where it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(size)
    except OSError as error:
        error.filename = path  # a read that fails, unlike an open, does not say where
        _unreadable(error)


def read_parts(path: Path, size: int, end: int = sys.maxsize) -> Iterator[bytes]:
    """A file's bytes before ``end``, ``size`` of them at a time. Raises ConfigError where it cannot be
    read."""
    try:
        with path.open("rb") as file:
            while part := file.read(min(size, end - file.tell())):
                yield part
    except OSError as error:
        error.filename = path
        _unreadable(error)


def _unreadable(error: OSError) -> NoReturn:
    raise ConfigError(f"{error.filename}: {error.strerror}; make it readable or leave it out") from None
