"""`load`: a wrapped model and its optimizer go on from a checkpoint of `streamer.save`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Container
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache, partial
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from streamer.content import BUFFERS, GRADIENTS, OPTIMIZER, VALUES, WEIGHTS, files_of
from streamer.engine.executor import Executor
from streamer.engine.unit import Unit
from streamer.files.manifest import Manifest
from streamer.files.tensors import reading
from streamer.files.tree import decode
from streamer.fitting import check_model, check_optimizer, check_other_state, check_owns, laid_out
from streamer.groups import check_group
from streamer.handle import require_home, wrapped
from streamer.memory.purposes import MOMENTS
from streamer.moment_dtypes import convert
from streamer.moments import State, moments_of, parse_state_dtype
from streamer.optim import AdamW
from streamer.randomness import check_random_states, set_random_states

T = TypeVar("T")

Read = Callable[[str], torch.Tensor]


@dataclass(frozen=True)
class Loaded:
    """The ``step`` and the ``extra`` that `streamer.save` was given."""

    step: int
    extra: dict[str, Any]


def load(model: nn.Module, optimizer: torch.optim.Optimizer | None, path: str | PathLike[str]) -> Loaded:
    """Take over weights, optimizer state, gradients, buffers and random states from the checkpoint ``path``.

    The model may be wrapped otherwise than when it was saved: with other layers, slots, activations, device
    or dtype. Moments that were held in another dtype are converted, with a warning.

    All of the checkpoint is read and compared with its checksums before anything is changed. Raises
    `CheckpointError` (a ValueError) for one that is damaged, naming the file and the tensor, or of another
    model, listing the tensors that differ.
    """
    path = Path(path)
    executor = wrapped(model).executor
    if isinstance(optimizer, AdamW):
        check_owns(optimizer, executor)
    manifest = Manifest.read(path)
    manifest.check(path)
    units = (*executor.units, executor.root)
    with ExitStack() as files:

        @cache
        def opened(name: str) -> Read:
            return files.enter_context(reading(path / name))

        def of_kind(kind: str) -> Read:
            places = files_of(kind, manifest)
            return lambda name: opened(places[name])(name)

        weights, gradients = of_kind(WEIGHTS), of_kind(GRADIENTS)

        with laid_out(path):
            check_model(path, manifest, model, executor)
            if optimizer is not None:
                check_optimizer(path, manifest, optimizer, executor)
            values = _decoded(path, manifest, optimizer, opened)
        if isinstance(optimizer, AdamW):
            _warn_of_conversion(manifest.values["optimizer"]["state_dtype"], optimizer)
        executor.wait_for_saving()
        executor.synchronize()
        if optimizer is not None and not isinstance(optimizer, AdamW):
            _load_other(path, optimizer, values.optimizer)
        for unit in units:
            _load_weights(executor, unit, weights)
        if BUFFERS in manifest.files:
            _load_buffers(model, opened(BUFFERS))
        if isinstance(optimizer, AdamW):
            _load_moments(optimizer, manifest.values["optimizer"], values.optimizer, of_kind(OPTIMIZER))
        if executor.landing is not None:
            executor.landing.next_step()  # of this model nothing has landed
        for unit in units:
            _load_gradients(unit, gradients, files_of(GRADIENTS, manifest))
        executor.gradients.adopt_all()
        executor.norms.forget()
        executor.gradients.scale = values.gradient_scale
        executor.skipped_steps = values.skipped_steps
        # the root is on its way to the device, and nobody else waits for it
        executor.synchronize()
    set_random_states(values.random)
    return Loaded(manifest.step, values.extra)


@dataclass(frozen=True)
class _Values:
    """What is no weight, moment or gradient; ``optimizer`` is the options of each group of an `AdamW`, the
    ``state_dict`` of another."""

    extra: dict[str, Any]
    random: dict[str, Any]
    gradient_scale: float
    skipped_steps: int
    optimizer: Any


def _decoded(
    path: Path, manifest: Manifest, optimizer: torch.optim.Optimizer | None, opened: Callable[[str], Read]
) -> _Values:
    """Raises an error of any kind for values that are not those of a checkpoint."""
    read = opened(VALUES) if VALUES in manifest.files else _nothing
    values = manifest.values

    def get(name: str) -> torch.Tensor:
        return read(name).clone()  # stays when the file goes

    def decoded(value: Any, kind: type[T]) -> T:
        if not isinstance(given := decode(value, get), kind) or isinstance(given, bool):
            raise TypeError(f"a {type(given).__name__} in place of a {kind.__name__}")
        return given

    random = decoded(values["random"], dict)
    check_random_states(random)
    of_optimizer: Any = None
    if isinstance(optimizer, AdamW):
        of_optimizer = [decoded(group["options"], dict) for group in values["optimizer"]["groups"]]
        for group, options in zip(optimizer.param_groups, of_optimizer, strict=True):
            if "params" in options:
                raise ValueError("a group's options hold parameters")
            check_group(group | options)
    elif optimizer is not None:
        of_optimizer = decoded(values["optimizer"]["state"], dict)
        check_other_state(path, of_optimizer, optimizer)
    return _Values(
        decoded(values["extra"], dict),
        random,
        decoded(values["model"]["gradient_scale"], float),
        decoded(values["model"]["skipped_steps"], int),
        of_optimizer,
    )


def _nothing(name: str) -> torch.Tensor:
    raise LookupError(f"there is no file with tensor '{name}'")


def _warn_of_conversion(held_in: str, optimizer: AdamW) -> None:
    if (there := parse_state_dtype(held_in)) != optimizer.state_dtype:
        warnings.warn(
            f"the moments were held in {there} and are converted to {optimizer.state_dtype}: the run does "
            "not go on to the bit",
            stacklevel=3,
        )


def _load_other(path: Path, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    before = {"state": optimizer.state, "param_groups": optimizer.param_groups}
    try:
        with laid_out(path):
            optimizer.load_state_dict(state)
    except BaseException:
        optimizer.__dict__.update(before)
        raise


def _load_weights(executor: Executor, unit: Unit, read: Read) -> None:
    shard = executor.shard(unit)
    for slice in unit.layout.slices:
        values = read(slice.param.name)
        executor.backend.on_host(partial(shard.load, slice, values))
    executor.weights.replaced(unit)


def _load_buffers(model: nn.Module, read: Read) -> None:
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(read(name))


def _load_moments(optimizer: AdamW, saved: dict[str, Any], options: list[dict[str, Any]], read: Read) -> None:
    held_in = parse_state_dtype(saved["state_dtype"])
    state: dict[torch.Tensor, dict[str, Any]] = {}
    for group, options_there in zip(optimizer.param_groups, options, strict=True):
        group.update(options_there)
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
            there_held = {purpose.name: read(f"{name}.{purpose.name}") for purpose in MOMENTS[held_in]}
            for key, values in convert(there_held, held_in, optimizer.state_dtype).items():
                moments[key].copy_(values)
            state[param] = State(home, optimizer.state_dtype)
            state[param]["step"] = torch.tensor(saved["steps"][name])
    optimizer.restart(state)


def _load_gradients(unit: Unit, read: Read, there: Container[str]) -> None:
    for slice, param in zip(unit.layout.slices, unit.params, strict=True):
        param.grad = None
        if slice.param.trainable and slice.param.name in there:
            gradient = read(slice.param.name)
            # sums stay in fp32
            dtype = gradient.dtype if gradient.dtype == torch.float32 else param.dtype
            param.grad = gradient.to(param.device, dtype, copy=True)
