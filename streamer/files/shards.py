"""Weights as others write them: a safetensors file, or several with an index as Hugging Face gives them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from streamer.files.errors import CheckpointError, shortened
from streamer.files.tensors import DTYPES, in_a_line, reading

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

_BY_NAME = {name: dtype for dtype, name in DTYPES.items()}


@dataclass(frozen=True)
class Stored:
    """A tensor in a file."""

    name: str
    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]

    def read(self) -> torch.Tensor:
        """A view of the file, on the CPU. Raises CheckpointError where the file has changed."""
        with reading(self.file) as read:
            return read(self.name)


def stored_tensors(path: Path) -> dict[str, Stored]:
    """The tensors in a folder or in one file by name; only headers are read.

    Raises CheckpointError, naming the files and tensors, where there are none, where one is missing or cut
    off, or of a dtype that PyTorch cannot compute with.
    """
    if not path.is_dir():
        return _tensors_of(path)
    index = path / INDEX
    if index.exists():
        return _indexed(path, index)
    if (path / SINGLE).exists():
        return _tensors_of(path / SINGLE)
    files = sorted(path.glob("*.safetensors"))
    if len(files) == 1:
        return _tensors_of(files[0])
    found = ", ".join(file.name for file in files) or "no safetensors file"
    raise CheckpointError(f"{path}: there is no {SINGLE} and no {INDEX} in it, but {found}: name the file")


def _indexed(path: Path, index: Path) -> dict[str, Stored]:
    try:
        names: dict[str, str] = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
        files = sorted({path / str(file) for file in names.values()})
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{index}: not an index of safetensors files ({in_a_line(error)})") from error
    if gone := [file.name for file in files if not file.is_file()]:
        raise CheckpointError(f"{path}: of {len(files)} files {shortened(gone)} are missing")
    tensors = {name: stored for file in files for name, stored in _tensors_of(file).items()}
    if absent := [name for name, file in names.items() if name not in tensors]:
        raise CheckpointError(f"{path}: not in the files, although in {INDEX}: {shortened(absent)}")
    return {name: tensors[name] for name in names}


def _tensors_of(file: Path) -> dict[str, Stored]:
    try:
        with safe_open(str(file), framework="pt") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
            kinds = {name: (slice.get_dtype(), tuple(slice.get_shape())) for name, slice in slices.items()}
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file}: {in_a_line(error)}") from error
    if strange := [f"{name} ({dtype})" for name, (dtype, _) in kinds.items() if dtype not in _BY_NAME]:
        raise CheckpointError(
            f"{file}: these tensors are quantised, and only whole numbers and floating point from 16 bits on "
            f"can be trained; write them as bfloat16 first: {shortened(strange)}"
        )
    return {name: Stored(name, file, _BY_NAME[dtype], shape) for name, (dtype, shape) in kinds.items()}
