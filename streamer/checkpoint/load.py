"""`load`: a wrapped model and its optimizer go on from a checkpoint of `streamer.save`. Whether it is one of
this model and this optimizer is found out before anything is changed.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from streamer.checkpoint.manifest import NAME, Manifest
from streamer.checkpoint.save import BUFFERS, GRADIENTS, OPTIMIZER, VALUES, WEIGHTS, check_owns, files_of
from streamer.checkpoint.tensors import DTYPES, reading
from streamer.checkpoint.values import check_random_states, decode, set_random_states
from streamer.engine.paging.executor import Executor
from streamer.engine.paging.handle import Home, require_home, wrapped
from streamer.engine.paging.unit import Unit
from streamer.errors import CheckpointError, shortened, warn
from streamer.memory.purposes import MOMENTS
from streamer.optim.adamw import AdamW, check_group
from streamer.optim.state import State, convert, moments_of, parse_state_dtype

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
    if executor.landing.keeps_gradients:
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
        warn(
            f"the moments were held in {there} and are converted to {optimizer.state_dtype}: the run does "
            "not go on to the bit",
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
