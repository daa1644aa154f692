"""Text as training data: a file is its bytes and a byte is a token, so there are 256 of them."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NoReturn

import torch

from streamer.app.config import ConfigError

VOCAB_SIZE = 256
HEAD_BYTES = 8 * 1024

#: Folders in the standard library's tree that are not read: what was installed into it, the tests (more
#: than half of its bytes), and tables and help texts that are generated, so that what is left is code.
NOT_LIBRARY = (
    "site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data",
)  # fmt: skip

Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, eq=False)
class ByteData:
    """Two splits of a text, ``train`` and ``val``: uint8 tensors [bytes] on the CPU, neither empty."""

    train: torch.Tensor
    val: torch.Tensor

    def batch(
        self, split: Literal["train", "val"], batch_size: int, context: int, generator: torch.Generator
    ) -> Batch:
        """Crops of a split at random places: tokens and, one byte on, targets, int64 [batch_size, context].

        Raises ConfigError where the split has fewer than context + 1 bytes.
        """
        text, last_start = self._split(split, context)
        return _crops(text, torch.randint(last_start + 1, (batch_size,), generator=generator), context)

    def val_batches(self, count: int, batch_size: int, context: int) -> list[Batch]:
        """``count`` batches as from ``batch``, of crops spaced evenly from the first byte of the validation
        split to its last: the same at every call, so that losses on them can be compared.

        Raises ConfigError where the split has fewer than context + 1 bytes.
        """
        text, last_start = self._split("val", context)
        crops = count * batch_size
        starts = torch.arange(crops) * last_start // max(1, crops - 1)
        return [_crops(text, some, context) for some in starts.split(batch_size)]

    def unigram_entropy(self) -> float:
        """Nats per byte of the validation split under the byte frequencies of the training split, each
        byte counted once more than it occurs: the loss of a model that knows those frequencies alone."""
        train, val = (torch.bincount(text, minlength=VOCAB_SIZE).double() for text in (self.train, self.val))
        log_frequency = ((train + 1) / (train + 1).sum()).log()
        return -(val / val.sum() * log_frequency).sum().item()

    def _split(self, split: Literal["train", "val"], context: int) -> tuple[torch.Tensor, int]:
        """The bytes of a split and the last of them that a crop can start at."""
        text = {"train": self.train, "val": self.val}[split]
        if len(text) <= context:
            other = "larger" if split == "val" else "smaller"
            raise ConfigError(
                f"the {split} split has {len(text)} bytes and data.context = {context} needs {context + 1}: "
                f"give more text, a {other} data.val_fraction or a smaller context"
            )
        return text, len(text) - context - 1


def _crops(text: torch.Tensor, starts: torch.Tensor, context: int) -> Batch:
    places = starts[:, None] + torch.arange(context)
    return text[places].long(), text[places + 1].long()


def load_bytes(paths: Sequence[str | os.PathLike[str]] = (), *, val_fraction: float = 0.05) -> ByteData:
    """The text at ``paths`` (see ``find_files``), split into training and validation by file.

    Which file goes where follows from a hash of its path below the folder that holds them all, so it is the
    same on every machine. Validation takes files in the order of their hashes, passing over those that would
    bring it above ``val_fraction`` of the bytes; where that leaves none, it takes the smallest file. A text
    in a single file is cut instead: its tail is for validation. Either way the files of a split follow each
    other in the order of their paths.

    Raises ConfigError, in one line, as ``find_files`` does, and for a single file of a single byte.
    """
    texts = {path: _read(path) for path in find_files(paths)}
    if len(texts) == 1:
        [(path, text)] = texts.items()
        if len(text) < 2:
            raise ConfigError(
                f"{path}: one byte cannot be split into training and validation; give more text"
            )
        cut = len(text) - min(len(text) - 1, max(1, round(len(text) * val_fraction)))
        return ByteData(_tensor([text[:cut]]), _tensor([text[cut:]]))
    root = os.path.commonpath([path.absolute().parent for path in texts])
    by_hash = sorted(texts, key=lambda path: _hash(path.absolute().relative_to(root)))
    room = val_fraction * sum(map(len, texts.values()))
    held_out = set()
    for path in by_hash:
        if len(texts[path]) <= room:
            held_out.add(path)
            room -= len(texts[path])
    held_out = held_out or {min(by_hash, key=lambda path: len(texts[path]))}
    return ByteData(
        train=_tensor([text for path, text in texts.items() if path not in held_out]),
        val=_tensor([text for path, text in texts.items() if path in held_out]),
    )


def find_files(paths: Sequence[str | os.PathLike[str]] = ()) -> list[Path]:
    """The text files at ``paths``, sorted, each once; with no paths, the Python standard library's sources.

    A directory is searched to its depths, without following links to directories; hidden, empty and binary
    files in it (a NUL byte in the first 8 KiB) are passed over. Raises ConfigError, in one line that names
    the path and the mend, for one that is missing or unreadable, for a file given that is empty or binary,
    and for a directory without text files.
    """
    if not paths:
        library = Path(sysconfig.get_path("stdlib"))
        sources = sorted(
            path for path in _walk(library, NOT_LIBRARY) if path.suffix == ".py" and _is_text(path)
        )
        if not sources:
            raise ConfigError(f"{library}: this Python came without the library's sources; set data.paths")
        return sources
    found: dict[Path, Path] = {}  # by the file a link leads to: text in both splits would flatter the loss
    for path in map(Path, paths):
        if os.path.isdir(path):
            files = [file for file in _walk(path) if _is_text(file)]
            if not files:
                raise ConfigError(f"{path}: no text files in this folder; give text files or folders of them")
        elif os.path.isfile(path):
            files = [path]
            if not _is_text(path):
                raise ConfigError(f"{path}: empty, or binary (it has a NUL byte); give a text file")
        elif os.path.lexists(path):
            raise ConfigError(f"{path}: neither a file nor a folder; give text files or folders of them")
        else:
            raise ConfigError(f"{path}: no such file or folder in {os.getcwd()}; mend data.paths")
        found.update((file.resolve(), file) for file in files)
    return sorted(found.values())


def _walk(folder: Path, skip: Collection[str] = ()) -> Iterator[Path]:
    """The regular files below ``folder``, without hidden ones and the folders named in ``skip``."""
    for root, folders, names in os.walk(folder, onerror=_unreadable):
        folders[:] = [name for name in folders if name[0] != "." and name not in skip]
        paths = (Path(root, name) for name in names if name[0] != ".")
        yield from (path for path in paths if os.path.isfile(path))


def _is_text(path: Path) -> bool:
    head = _read(path, HEAD_BYTES)
    return bool(head) and b"\0" not in head


def _read(path: Path, size: int = -1) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(size)
    except OSError as error:
        error.filename = path  # a read that fails, unlike an open, does not say where
        _unreadable(error)


def _unreadable(error: OSError) -> NoReturn:
    raise ConfigError(f"{error.filename}: {error.strerror}; make it readable or leave it out") from None


def _hash(path: Path) -> bytes:
    return hashlib.sha256(os.fsencode(path.as_posix())).digest()  # hash() differs from run to run


def _tensor(texts: Sequence[bytes]) -> torch.Tensor:
    return torch.frombuffer(bytearray(b"".join(texts)), dtype=torch.uint8)
