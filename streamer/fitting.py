"""Whether a checkpoint is one of this model and this optimizer, found out before anything is changed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from streamer.content import BUFFERS, GRADIENTS, OPTIMIZER, WEIGHTS, files_of
from streamer.engine.executor import Executor
from streamer.files.errors import CheckpointError, shortened
from streamer.files.manifest import NAME, Manifest
from streamer.files.tensors import DTYPES
from streamer.handle import Home, require_home
from streamer.memory.purposes import MOMENTS
from streamer.moments import check_owner, parse_state_dtype
from streamer.optim import AdamW

#: The format's names of what weights and gradients may be.
_FLOATS = ("F32", "BF16", "F16")


@contextmanager
def laid_out(path: Path) -> Iterator[None]:
    """Values of the manifest are taken apart inside the block: raise CheckpointError for what goes wrong."""
    try:
        yield
    except CheckpointError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError) as error:
        text = " ".join(str(error).split())
        raise CheckpointError(
            f"{path / NAME}: its values are not those of a checkpoint ({type(error).__name__}: {text})"
        ) from error


def check_model(path: Path, manifest: Manifest, model: nn.Module, executor: Executor) -> None:
    """Raise CheckpointError, listing what differs, unless it is one of this model."""
    units = (*executor.units, executor.root)
    there = {
        name: entry.shape
        for file, entries in manifest.files.items()
        if file.startswith(f"{WEIGHTS}-") or file == BUFFERS
        for name, entry in entries.items()
    }
    here = {slice.param.name: slice.param.shape for unit in units for slice in unit.layout.slices}
    here |= {name: tuple(buffer.shape) for name, buffer in model.named_buffers()}
    if differing := _unlike(there, here):
        raise CheckpointError(f"{path} is of another model; these tensors differ: {shortened(differing)}")
    shapes = {slice.param.name: slice.param.shape for unit in units for slice in unit.layout.slices}
    weights, gradients = files_of(WEIGHTS, manifest), files_of(GRADIENTS, manifest)
    for name in shapes.keys() - weights.keys():
        raise CheckpointError(f"{path}: tensor '{name}' is in none of the files of weights")
    for name, file in (*weights.items(), *gradients.items()):
        entry = manifest.files[file][name]
        if entry.shape != shapes.get(name) or entry.dtype not in _FLOATS:
            raise CheckpointError(f"{path / file}: tensor '{name}' is no value for a parameter of the model")
    if executor.landing is None:
        return
    in_layers = {slice.param.name for unit in executor.units for slice in unit.layout.slices}
    for name, file in gradients.items():
        if name in in_layers:
            raise CheckpointError(
                f"{path / file}: update='backward' keeps no gradients between backward and step(), and here "
                "are some: wrap with update='step', or save after a step"
            )


def check_optimizer(
    path: Path, manifest: Manifest, optimizer: torch.optim.Optimizer, executor: Executor
) -> None:
    """Raise CheckpointError, saying what differs, unless it holds the state of such an optimizer."""
    saved = manifest.values["optimizer"]
    # PyTorch has an AdamW too
    there = f"streamer.{saved['class']}" if "groups" in saved else saved["class"]
    here = "streamer.AdamW" if isinstance(optimizer, AdamW) else type(optimizer).__name__
    if there != here:
        raise CheckpointError(
            f"{path} holds the state of {there}, and this is {here}: give load that kind, or None"
        )
    if not isinstance(optimizer, AdamW):
        return
    groups = [group["params"] for group in saved["groups"]]
    mine = [[require_home(p).slice.param.name for p in group["params"]] for group in optimizer.param_groups]
    if groups != mine:
        raise CheckpointError(
            f"{path} was saved with groups of {[len(group) for group in groups]} parameters, and here are "
            f"groups of {[len(group) for group in mine]}; make the optimizer with the same groups, in the "
            f"same order. These differ: {shortened(_differing(groups, mine))}"
        )
    held_in = parse_state_dtype(saved["state_dtype"])
    files = files_of(OPTIMIZER, manifest)
    for group in optimizer.param_groups:
        for home in map(require_home, group["params"]):
            if home.slice.param.trainable and home.slice.param.name in saved["steps"]:
                _check_moments(path, manifest, files, home, held_in)


def check_other_state(path: Path, state: Any, optimizer: torch.optim.Optimizer) -> None:
    """`check_optimizer` for the ``state_dict`` of an optimizer of ``torch.optim``."""
    groups = [len(group["params"]) for group in state["param_groups"]]
    mine = [len(group["params"]) for group in optimizer.param_groups]
    if groups != mine:
        raise CheckpointError(
            f"{path} was saved with groups of {groups} parameters, and here are groups of {mine}: make the "
            "optimizer with the same groups"
        )


def _check_moments(
    path: Path, manifest: Manifest, files: Mapping[str, str], home: Home, held_in: torch.dtype
) -> None:
    name = home.slice.param.name
    step = manifest.values["optimizer"]["steps"][name]
    if type(step) is not float or not step.is_integer() or step < 0:
        raise ValueError(f"step {step} of '{name}'")
    for purpose in MOMENTS[held_in]:
        meta = torch.empty(purpose.numel(home.unit.layout), device="meta")
        shape = tuple(purpose.part(home.slice, meta).shape)
        file = files.get(f"{name}.{purpose.name}", NAME)
        entry = manifest.files.get(file, {}).get(f"{name}.{purpose.name}")
        if entry is None or (entry.dtype, entry.shape) != (DTYPES[purpose.dtype], shape):
            raise CheckpointError(f"{path / file}: tensor '{name}.{purpose.name}' is missing or no moment")


def _differing(there: Sequence[Sequence[str]], here: Sequence[Sequence[str]]) -> list[str]:
    """Each parameter that is in another group; where there is none, each that has another place in it."""

    def groups(names: Sequence[Sequence[str]]) -> dict[str, str]:
        return {name: f"group {number}" for number, group in enumerate(names) for name in group}

    def places(names: Sequence[Sequence[str]]) -> dict[str, str]:
        return {name: f"place {number}" for group in names for number, name in enumerate(group)}

    return _unlike(groups(there), groups(here)) or _unlike(places(there), places(here))


def _unlike(there: Mapping[str, object], here: Mapping[str, object]) -> list[str]:
    return [
        f"{name} ({there.get(name, 'missing')} there, {here.get(name, 'missing')} here)"
        for name in sorted(there.keys() | here.keys())
        if there.get(name) != here.get(name)
    ]


def check_owns(optimizer: AdamW, executor: Executor) -> None:
    """Raise unless all parameters are of this model, and this optimizer is the one that updates them."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            home = require_home(param)
            if home.executor is not executor:
                raise ValueError(f"'{home.slice.param.name}' of the optimizer is of another model")
            check_owner(home, optimizer.token)
