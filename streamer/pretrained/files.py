"""Weights of other tools: a safetensors file, or several with an index, as from Hugging Face."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import prod
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from streamer.backends.stored_tensors import StoredTensor
from streamer.checkpoint.tensors import BY_NAME, in_a_line, reading
from streamer.errors import CheckpointError, shortened

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Stored:
    """A tensor in a file, from byte ``offset`` on."""

    name: str
    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def place(self) -> StoredTensor:
        """Its place, for reads without the format's library."""
        return StoredTensor(self.file, self.offset, self.dtype, prod(self.shape))

    def read(self) -> torch.Tensor:
        """A view of the file, on the CPU. Raises CheckpointError if the file has changed."""
        (tensor,) = read_all([self])
        return tensor


def read_all(stored: Sequence[Stored]) -> Iterator[torch.Tensor]:
    """A view of the file of each tensor in turn, on the CPU. Raises CheckpointError if a file has changed.

    A file is opened once for all of its tensors that follow each other in ``stored``: each opening reads its
    header, which takes 40 ms for 30,000 tensors.
    """
    for file, of_file in groupby(stored, key=lambda it: it.file):
        with reading(file) as read:
            for it in of_file:
                tensor = read(it.name)
                if (tensor.dtype, tuple(tensor.shape)) != (it.dtype, it.shape):
                    raise CheckpointError(f"{file}: tensor '{it.name}' has changed since the file was opened")
                yield tensor


def has_weights(path: Path) -> bool:
    """Whether a folder has safetensors files, or the path is one."""
    return path.is_file() or any(path.glob("*.safetensors"))


def stored_tensors(path: Path) -> dict[str, Stored]:
    """The tensors in a folder or in one file by name; only headers are read.

    Raises CheckpointError, naming the files and tensors, if there are none, if one is missing or cut off, or
    has a dtype that PyTorch cannot compute with.
    """
    if not path.is_dir():
        return tensors_of(path)
    # in the order of Hugging Face's library
    if (path / SINGLE).exists():
        return tensors_of(path / SINGLE)
    if (path / INDEX).exists():
        return _indexed(path, path / INDEX)
    files = sorted(path.glob("*.safetensors"))
    if len(files) == 1:
        return tensors_of(files[0])
    there = f"neither {SINGLE} nor {INDEX} is in it"
    if files:
        raise CheckpointError(f"{path}: {there}: name one of {shortened([file.name for file in files])}")
    others = [file.name for pattern in ("*.bin", "*.pt", "*.pth", "*.gguf") for file in path.glob(pattern)]
    found = f", only {shortened(sorted(others))}" if others else ""
    raise CheckpointError(
        f"{path}: {there}{found}: write the weights as safetensors, as save_pretrained does"
    )


def _indexed(path: Path, index: Path) -> dict[str, Stored]:
    try:
        named = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        files = {file: path / file for file in sorted({*named})}
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise CheckpointError(f"{index}: not an index of safetensors files ({in_a_line(error)})") from error
    if gone := [name for name, file in files.items() if not file.is_file()]:
        raise CheckpointError(f"{path}: of {len(files)} files these are missing: {shortened(gone)}")
    return {name: it for file in files.values() for name, it in tensors_of(file).items()}


def tensors_of(file: Path) -> dict[str, Stored]:
    """The tensors in one safetensors file, as `stored_tensors`."""
    try:
        with safe_open(str(file), framework="pt"), file.open("rb") as opened:  # which checks that it is whole
            nbytes = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(nbytes))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file}: not a whole safetensors file ({in_a_line(error)})") from error
    header.pop("__metadata__", None)
    if unknown := [f"{name} ({it['dtype']})" for name, it in header.items() if it["dtype"] not in BY_NAME]:
        raise CheckpointError(
            f"{file}: these tensors have an unsupported dtype; convert them to bfloat16 first: "
            f"{shortened(unknown)}"
        )
    return {
        name: Stored(name, file, BY_NAME[it["dtype"]], tuple(it["shape"]), 8 + nbytes + it["data_offsets"][0])
        for name, it in header.items()
    }
