"""Tensors in files of the safetensors format (https://huggingface.co/docs/safetensors), written one after
another straight from their memory.

The library's own writer needs all tensors of a file in memory at once. Here each tensor is created just
before it is written, so that temporary copies (the fp32 master of a bf16 weight) exist for at most two
tensors at a time. The library reads the files.
"""

from __future__ import annotations

import itertools
import json
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from streamer.errors import CheckpointError
from streamer.torch_private import is_sparse, sparse_parts

#: The format's names of the supported dtypes.
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e8m0fnu: "F8_E8M0",
}

BY_NAME = {name: dtype for dtype, name in DTYPES.items()}


@dataclass(frozen=True)
class Piece:
    """A tensor to write: ``read`` returns it, on the CPU, when it is written."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[], torch.Tensor]

    @staticmethod
    def of(name: str, tensor: torch.Tensor) -> Piece:
        """The piece of an existing tensor."""
        return Piece(name, tensor.dtype, tuple(tensor.shape), lambda: tensor.detach().cpu())

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def stored_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """The tensors that store the buffers of ``model`` in a checkpoint, by name. A sparse buffer is stored as
    its indices and, last, its values, under its name and a number."""
    found: dict[str, torch.Tensor] = {}
    for name, buffer in model.named_buffers():
        if is_sparse(buffer):
            found |= {f"{name}.{number}": part for number, part in enumerate(sparse_parts(buffer))}
        else:
            found[name] = buffer
    return found


@dataclass(frozen=True)
class Entry:
    """A manifest's entry for a tensor in a file: its dtype by the format's name, the start of its bytes after
    the header, their number, and their CRC-32."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    crc32: int
    layout: str = "strided"


class Flushing:
    """Flushes files to the disk in a thread, while the next files are written. If the block ends without an
    error, all of them are on the disk."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1)
        self._flushed: list[Future[None]] = []

    def flush(self, descriptor: int) -> None:
        """Flush an open file, which may be closed meanwhile."""
        self._flushed.append(self._pool.submit(_flush_and_close, os.dup(descriptor)))

    def __enter__(self) -> Flushing:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._pool.shutdown()
        if kind is None:
            for flushed in self._flushed:
                flushed.result()


def _flush_and_close(descriptor: int) -> None:
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_tensors(
    path: Path,
    pieces: Sequence[Piece],
    *,
    flushing: Flushing,
    metadata: Mapping[str, str] | None = None,
) -> dict[str, Entry]:
    """Write ``pieces`` into a new file, which is on the disk when the block of ``flushing`` ends. Returns an
    entry for each."""
    pieces = _in_order(pieces)
    checksums = []
    # the next tensor is created, and both checksums computed, while one tensor is written
    with path.open("xb", buffering=0) as file, ThreadPoolExecutor(2) as pool:
        _write_all(file, memoryview(_header(pieces, metadata)))
        created = [pool.submit(_created, piece) for piece in pieces[:1]]
        for index in range(len(pieces)):
            data = created.pop().result()
            created += [pool.submit(_created, piece) for piece in pieces[index + 1 : index + 2]]
            checksums.append(pool.submit(zlib.crc32, data))
            _write_all(file, data)
        flushing.flush(file.fileno())
    offsets = itertools.accumulate((piece.nbytes for piece in pieces), initial=0)
    return {
        piece.name: Entry(DTYPES[piece.dtype], piece.shape, offset, piece.nbytes, checksum.result())
        for piece, offset, checksum in zip(pieces, offsets, checksums, strict=False)
    }


@contextmanager
def reading(path: Path) -> Iterator[Callable[[str], torch.Tensor]]:
    """A function that reads a tensor of the file by its name. The tensor is a view of the file, valid inside
    the block. Raises CheckpointError for a damaged file and an unknown name."""
    with ExitStack() as stack:
        try:
            file = stack.enter_context(safe_open(str(path), framework="pt"))
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path}: {in_a_line(error)}") from error

        def read(name: str) -> torch.Tensor:
            try:
                return file.get_tensor(name)  # type: ignore[no-any-return]
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{path}: tensor '{name}': {in_a_line(error)}") from error

        yield read


def check_tensors(path: Path, entries: Mapping[str, Entry]) -> None:
    """Raise CheckpointError, naming the tensor, unless the file holds these tensors with these checksums."""
    with reading(path) as read:
        for name, entry in entries.items():
            tensor = read(name)
            if (DTYPES[tensor.dtype], tuple(tensor.shape)) != (entry.dtype, entry.shape):
                raise CheckpointError(f"{path}: tensor '{name}' is not the one of the manifest")
            if zlib.crc32(bytes_of(tensor)) != entry.crc32:
                raise CheckpointError(f"{path}: tensor '{name}' is damaged (its checksum differs)")


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor on the CPU."""
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().data


def in_a_line(error: Exception) -> str:
    """The error's message on one line."""
    return " ".join(str(error).split())


def _in_order(pieces: Sequence[Piece]) -> list[Piece]:
    """The widest dtype first, so that each tensor begins at a multiple of its elements' size."""
    return sorted(pieces, key=lambda piece: -piece.dtype.itemsize)


def _header(pieces: Sequence[Piece], metadata: Mapping[str, str] | None = None) -> bytes:
    at = 0
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    for piece in pieces:
        header[piece.name] = {
            "dtype": DTYPES[piece.dtype],
            "shape": [*piece.shape],
            "data_offsets": [at, at + piece.nbytes],
        }
        at += piece.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that tensors begin at a multiple of 8 bytes
    return len(text).to_bytes(8, "little") + text


def _created(piece: Piece) -> memoryview:
    tensor = piece.read()
    assert (tensor.dtype, tuple(tensor.shape)) == (piece.dtype, piece.shape)
    return bytes_of(tensor)


def _write_all(file: Any, data: memoryview) -> None:
    while data.nbytes:
        data = data[file.write(data) :]
