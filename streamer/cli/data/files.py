"""The files of data."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from streamer.cli.config import ConfigError

#: Files of tokens: nanoGPT's (uint16, one after another), and NumPy's arrays.
TOKEN_FILES = (".bin", ".npy")
BINARY = (*TOKEN_FILES, ".parquet", ".arrow")
COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
#: Folders of the standard library that hold tests, tables, help texts and what was installed, and no sources.
NOT_LIBRARY = (
    "site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data", "__pycache__",
)  # fmt: skip


def find_files(paths: Sequence[str] = ()) -> list[Path]:
    """The files at ``paths``, sorted, each once; with no paths the sources of the Python standard library.

    Of a folder: all files in it that hold data, at any depth; hidden, empty and binary ones are left out.
    Raises ConfigError, which names the path and the remedy, for one that is missing, empty, binary or
    compressed."""
    if not paths:
        library = Path(sysconfig.get_path("stdlib"))
        return [path for path in _in_folder(library, NOT_LIBRARY) if path.suffix == ".py"]
    found: dict[Path, Path] = {}  # by the file that a link leads to
    for path in map(Path, paths):
        if path.is_dir():
            files = _in_folder(path)
            if not files:
                raise ConfigError(f"{path}: there is no data in this folder: give files, or a folder of them")
        elif path.is_file():
            files = [path]
            if path.suffix.lower() in COMPRESSED:
                raise ConfigError(f"{path}: decompress it, or leave it out of data.paths")
            if not _has_data(path):
                raise ConfigError(f"{path}: empty, or binary (it has a NUL byte): give text")
        else:
            raise ConfigError(f"{path}: no such file or folder in {os.getcwd()}: correct data.paths")
        found.update((file.resolve(), file) for file in files)
    return sorted(found.values())


def _in_folder(folder: Path, skip: Collection[str] = ()) -> list[Path]:
    paths: list[Path] = []
    for root, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name[0] != "." and name not in skip]
        paths += [Path(root, name) for name in names if name[0] != "."]
    return sorted(path for path in paths if path.is_file() and _has_data(path))


def _has_data(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            head = file.read(8192)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}: make it readable, or leave it out") from None
    return bool(head) and (b"\0" not in head or path.suffix.lower() in BINARY)


def read_pieces(path: Path, size: int) -> Iterator[str]:
    """A text in pieces of about ``size`` bytes, each ending with a line where it can. Raises ConfigError for
    text that is not UTF-8."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            while lines := file.readlines(size):
                text = "".join(lines)
                yield from (text[begin : begin + 4 * size] for begin in range(0, len(text), 4 * size))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 ({error.reason}): convert it") from None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}: make it readable, or leave it out") from None
