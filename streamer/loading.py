"""`load`: a wrapped model and its optimizer go on from a checkpoint of `streamer.save`."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn

from streamer.engine.executor import Executor
from streamer.engine.unit import Unit
from streamer.files.errors import CheckpointError
from streamer.files.manifest import Manifest
from streamer.files.tensors import reading
from streamer.files.tree import decode
from streamer.handle import require_home, wrapped
from streamer.memory.purposes import MOMENTS
from streamer.moment_dtypes import convert
from streamer.moments import moments_of, parse_state_dtype
from streamer.optim import AdamW
from streamer.randomness import set_random_states
from streamer.saving import BUFFERS, GRADIENTS, OPTIMIZER, VALUES, WEIGHTS, file_name

Read = Callable[[str], torch.Tensor]


@dataclass(frozen=True)
class Loaded:
    """The ``step`` and the ``extra`` that `streamer.save` was given."""

    step: int
    extra: dict[str, Any]


def load(model: nn.Module, optimizer: torch.optim.Optimizer | None, path: str | PathLike[str]) -> Loaded:
    """Take over weights, optimizer state, gradients, buffers and random states from the checkpoint ``path``.

    The model may be wrapped otherwise than when it was saved: with other slots, activations, device or dtype.
    Moments that were held in another dtype are converted, with a warning.

    All of the checkpoint is read and compared with its checksums before anything is changed. Raises
    `CheckpointError` (a ValueError) for one that is damaged, naming the file and the tensor, or of another
    model, listing the tensors that differ.
    """
    path = Path(path)
    executor = wrapped(model).executor
    manifest = Manifest.read(path)
    manifest.check(path)
    values = manifest.values
    with ExitStack() as files:

        def opened(name: str) -> Read:
            return files.enter_context(reading(path / name)) if name in manifest.files else _nothing

        get = opened(VALUES)
        _check_model(path, manifest, model, executor)
        _check_optimizer(path, values["optimizer"], optimizer, executor)
        _check_gradients(path, manifest, executor)
        extra = decode(values["extra"], get)
        states = decode(values["random"], get)
        executor.synchronize()
        for unit in (*executor.units, executor.root):
            _load_weights(executor, unit, opened(file_name(WEIGHTS, unit)))
        _load_buffers(model, manifest, opened(BUFFERS))
        if optimizer is not None:
            _load_optimizer(optimizer, values["optimizer"], opened, get)
        for unit in (*executor.units, executor.root):
            _load_gradients(unit, manifest, opened(file_name(GRADIENTS, unit)))
        executor.gradients.adopt_all()
        executor.gradients.scale = decode(values["model"]["gradient_scale"], get)
        executor.skipped_steps = values["model"]["skipped_steps"]
    set_random_states(states)
    return Loaded(manifest.step, extra)


def _nothing(name: str) -> torch.Tensor:
    raise CheckpointError(f"there is no file with tensor '{name}' in it")


def _check_model(path: Path, manifest: Manifest, model: nn.Module, executor: Executor) -> None:
    """Raise CheckpointError, listing what differs, unless it is one of this model."""
    weights = {
        name: entry.shape
        for file, entries in manifest.files.items()
        if file.startswith(f"{WEIGHTS}-")
        for name, entry in entries.items()
    }
    here = {
        slice.param.name: slice.param.shape
        for unit in (*executor.units, executor.root)
        for slice in unit.layout.slices
    }
    weights |= {name: entry.shape for name, entry in manifest.files.get(BUFFERS, {}).items()}
    here |= {name: tuple(buffer.shape) for name, buffer in model.named_buffers()}
    differing = [
        f"{name} ({weights.get(name, 'missing')} there, {here.get(name, 'missing')} here)"
        for name in sorted(weights.keys() | here.keys())
        if weights.get(name) != here.get(name)
    ]
    if differing:
        more = f" and {len(differing) - 10} more" if len(differing) > 10 else ""
        shown = ", ".join(differing[:10]) + more
        raise CheckpointError(f"{path} is of another model; these tensors differ: {shown}")
    units = [unit.name for unit in (*executor.units, executor.root)]
    if manifest.values["model"]["units"] != units:
        raise CheckpointError(
            f"{path} was saved with other layers: wrap with those ({manifest.values['model']['units']})"
        )


def _check_optimizer(
    path: Path, saved: dict[str, Any], optimizer: torch.optim.Optimizer | None, executor: Executor
) -> None:
    if optimizer is None:
        return
    kind = "AdamW" if isinstance(optimizer, AdamW) else type(optimizer).__name__
    if saved["class"] != kind:
        raise CheckpointError(
            f"{path} holds the state of {saved['class']}, and this is {kind}: give load that kind, or None"
        )
    if not isinstance(optimizer, AdamW):
        return
    there = [group["params"] for group in saved["groups"]]
    here = [[require_home(p).slice.param.name for p in group["params"]] for group in optimizer.param_groups]
    if there != here:
        raise CheckpointError(
            f"{path} was saved with groups of {[len(group) for group in there]} parameters, and here are "
            f"groups of {[len(group) for group in here]}, or in another order: make the optimizer with the "
            "same groups"
        )


def _check_gradients(path: Path, manifest: Manifest, executor: Executor) -> None:
    """Raise CheckpointError for gradients of layers where updates take them as they land."""
    held = [unit.name for unit in executor.units if file_name(GRADIENTS, unit) in manifest.files]
    if held and executor.landing is not None:
        raise CheckpointError(
            f"{path} was saved between backward and step and holds gradients of layers ({held[0]}), for "
            "which update='backward' has no room: wrap with update='step', or save after the step"
        )


def _load_weights(executor: Executor, unit: Unit, read: Read) -> None:
    shard = executor.shard(unit)
    for slice in unit.layout.slices:
        values = read(slice.param.name)
        executor.backend.on_host(partial(shard.load, slice, values))
    executor.weights.updated(unit)


def _load_buffers(model: nn.Module, manifest: Manifest, read: Read) -> None:
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(read(name))


def _load_optimizer(
    optimizer: torch.optim.Optimizer, saved: dict[str, Any], opened: Callable[[str], Read], get: Read
) -> None:
    if not isinstance(optimizer, AdamW):
        optimizer.load_state_dict(decode(saved["state"], get))
        return
    held_in = parse_state_dtype(saved["state_dtype"])
    if held_in != optimizer.state_dtype:
        warnings.warn(
            f"the moments were held in {held_in} and are converted to {optimizer.state_dtype}: the run does "
            "not go on to the bit",
            stacklevel=3,
        )
    readers: dict[int, Read] = {}
    state: dict[torch.Tensor, dict[str, Any]] = {}
    for group, there in zip(optimizer.param_groups, saved["groups"], strict=True):
        group.update(decode(there["options"], get))
        for param in group["params"]:
            home = require_home(param)
            name = home.slice.param.name
            if not home.slice.param.trainable:
                continue
            moments = moments_of(home, optimizer.state_dtype)
            if name not in saved["steps"]:
                for moment in moments.values():
                    moment.zero_()
                continue
            if home.unit.index not in readers:
                readers[home.unit.index] = opened(file_name(OPTIMIZER, home.unit))
            read = readers[home.unit.index]
            there_held = {purpose.name: read(f"{name}.{purpose.name}") for purpose in MOMENTS[held_in]}
            for key, values in convert(there_held, held_in, optimizer.state_dtype).items():
                moments[key].copy_(values)
            state[param] = {"step": torch.tensor(saved["steps"][name]), **moments}
    optimizer.state.clear()
    optimizer.state.update(state)


def _load_gradients(unit: Unit, manifest: Manifest, read: Read) -> None:
    there = manifest.files.get(file_name(GRADIENTS, unit), {})
    for slice, param in zip(unit.layout.slices, unit.params, strict=True):
        param.grad = read(slice.param.name).to(param.device) if slice.param.name in there else None
