"""`save`: a wrapped model, its optimizer and all that a run goes on from, in safetensors files."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import torch
from torch import nn

from streamer.engine.executor import Executor
from streamer.engine.unit import Unit
from streamer.files.folder import new_folder
from streamer.files.manifest import Manifest
from streamer.files.tensors import DTYPES, Piece, file_bytes, write_tensors
from streamer.files.tree import encode
from streamer.handle import require_home, wrapped
from streamer.moments import moments_of
from streamer.optim import AdamW
from streamer.randomness import random_states
from streamer.version import __version__

#: The file for values that are no weight, moment or gradient, and that for buffers.
VALUES, BUFFERS = "values.safetensors", "buffers.safetensors"
WEIGHTS, OPTIMIZER, GRADIENTS = "weights", "optimizer", "gradients"
#: Of the manifest's JSON beside that of each tensor; a margin for the room that is asked for.
MANIFEST_BYTES = 1 << 16

Files = dict[str, list[Piece]]


def save(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    path: str | PathLike[str],
    *,
    step: int,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Write a checkpoint of a wrapped model into the new folder ``path``, complete or not at all.

    In it are, in safetensors files: for each unit the weights (fp32 masters where they are trained, whatever
    dtype they are streamed in, else as they are), the optimizer's moments as they are held and, between
    backward calls that add up, the gradients; buffers; the states of the generators of random numbers; and
    ``extra``, of numbers, strings, lists, tuples, dicts, tensors and arrays (``scheduler.state_dict()``,
    ``scaler.state_dict()``, the position in the data). ``manifest.json`` lists every tensor with its shape,
    dtype and CRC-32. There is no pickle. `streamer.load` goes on from there to the bit.

    Waits for the updates that are running, and writes straight from host memory: beside the model no more
    than two parameters' tensors are made. ``optimizer`` may be one of ``torch.optim``, or None.

    Raises ValueError for what cannot be saved, FileExistsError where there is something at ``path``, and
    OSError, with the path and the bytes that are needed, where it cannot be written; then nothing is left.
    """
    executor = wrapped(model).executor
    if isinstance(optimizer, AdamW):
        optimizer.check_owns(executor)
    executor.synchronize()
    files: Files = {}
    values: Files = {VALUES: []}
    put = partial(_put, values[VALUES])
    described = {
        "model": {
            "units": [unit.name for unit in (*executor.units, executor.root)],
            "gradient_scale": encode(executor.gradients.scale, put),
            "skipped_steps": executor.skipped_steps,
        },
        "optimizer": _optimizer(optimizer, files, put),
        "random": encode(random_states(), put),
        "extra": encode(dict(extra or {}), put),
    }
    for unit in (*executor.units, executor.root):
        files[file_name(WEIGHTS, unit)] = [*_weights(executor, unit)]
        if gradients := [*_gradients(unit)]:
            files[file_name(GRADIENTS, unit)] = gradients
    files[BUFFERS] = [Piece.of(name, buffer) for name, buffer in model.named_buffers()]
    files = {name: pieces for name, pieces in (files | values).items() if pieces}
    path = Path(path)
    nbytes = sum(file_bytes(pieces) + 256 * len(pieces) for pieces in files.values()) + MANIFEST_BYTES
    with new_folder(path, nbytes=nbytes) as folder:
        entries = {name: write_tensors(folder / name, pieces) for name, pieces in files.items()}
        Manifest(step, entries, described, _written_by()).write(folder)


def _put(pieces: list[Piece], tensor: torch.Tensor) -> str:
    if tensor.dtype not in DTYPES or tensor.layout is not torch.strided:
        raise ValueError(f"a tensor of {tensor.dtype}, {tensor.layout}, cannot be saved: make it dense, real")
    # a copy, for it may change before it is written
    pieces.append(Piece.of(str(len(pieces)), tensor.detach().cpu().clone()))
    return pieces[-1].name


def file_name(kind: str, unit: Unit) -> str:
    """The file for what is of one ``kind`` of a unit."""
    number = "root" if unit.index < 0 else f"{unit.index:05d}"
    return f"{kind}-{number}.safetensors"


def _weights(executor: Executor, unit: Unit) -> list[Piece]:
    shard = executor.shard(unit)
    pieces = []
    for slice in unit.layout.slices:
        weight = slice.view(shard.weight)
        whole = slice.param.trainable and weight.dtype != torch.float32
        # the kernels that join a master run on the HOST lane
        read: Callable[[], torch.Tensor] = (
            partial(executor.backend.on_host, partial(shard.exact, slice))
            if whole
            else partial(_same, weight)
        )
        dtype = torch.float32 if whole else weight.dtype
        pieces.append(Piece(slice.param.name, dtype, slice.param.shape, read))
    return pieces


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _gradients(unit: Unit) -> list[Piece]:
    pairs = zip(unit.layout.slices, unit.params, strict=True)
    return [Piece.of(slice.param.name, param.grad) for slice, param in pairs if param.grad is not None]


def _optimizer(
    optimizer: torch.optim.Optimizer | None, files: Files, put: Callable[[torch.Tensor], str]
) -> dict[str, Any]:
    """What the manifest says of the optimizer; the moments of an `AdamW` go to ``files``."""
    if optimizer is None:
        return {"class": None}
    if not isinstance(optimizer, AdamW):
        return {"class": type(optimizer).__name__, "state": encode(optimizer.state_dict(), put, "optimizer")}
    steps: dict[str, float] = {}
    groups = []
    for group in optimizer.param_groups:
        names = []
        for param in group["params"]:
            home = require_home(param)
            names.append(home.slice.param.name)
            if state := optimizer.state.get(param):
                steps[names[-1]] = float(state["step"])
                moments = moments_of(home, optimizer.state_dtype)
                files.setdefault(file_name(OPTIMIZER, home.unit), []).extend(
                    Piece.of(f"{names[-1]}.{name}", moment) for name, moment in moments.items()
                )
        options = {key: value for key, value in group.items() if key != "params"}
        groups.append({"params": names, "options": encode(options, put, "optimizer.param_groups")})
    dtype = str(optimizer.state_dtype).removeprefix("torch.")
    return {"class": "AdamW", "state_dtype": dtype, "groups": groups, "steps": steps}


def _written_by() -> dict[str, str]:
    return {
        "streamer": __version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "safetensors": safetensors.__version__,
        "python": platform.python_version(),
    }
