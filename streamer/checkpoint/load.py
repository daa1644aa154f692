"""`load`: continue a wrapped model and its optimizer from a checkpoint of `streamer.save`.

All checks that the checkpoint is of this model and this optimizer come before any change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn

from streamer.checkpoint.manifest import LeftOut, Manifest
from streamer.checkpoint.save import (
    BUFFERS,
    FROZEN,
    GRADIENTS,
    IN_PARTS,
    KINDS,
    OPTIMIZER,
    RANDOM_OF_RANKS,
    VALUES,
    WEIGHTS,
    check_owns,
    in_parts,
)
from streamer.checkpoint.tensors import DTYPES, Entry, reading, stored_buffers
from streamer.checkpoint.values import decode, set_random_states
from streamer.engine.executor import Executor
from streamer.engine.handle import require_home, wrapped
from streamer.errors import CheckpointError, shortened, warn
from streamer.optim.adamw import AdamW
from streamer.optim.state import convert, load_moments, parse_state_dtype
from streamer.store.purposes import MOMENTS


@dataclass(frozen=True)
class Loaded:
    """The ``step`` and the ``extra`` of `streamer.save`."""

    step: int
    extra: dict[str, Any]


def load(model: nn.Module, optimizer: torch.optim.Optimizer | None, path: str | PathLike[str]) -> Loaded:
    """Load weights, optimizer state, gradients, buffers and random states from the checkpoint ``path``.

    The model may be wrapped with other options than when it was saved: other layers, slots, activations,
    device or dtype, and more or fewer ranks. Every rank must call this. With the same number of ranks, each
    continues with its own random numbers. Otherwise the first rank continues with those of the first, and the
    others keep theirs. Moments saved in another dtype are converted, with a warning.

    The whole checkpoint is read and compared with its checksums before any change. Raises `CheckpointError`
    (a ValueError) for a damaged checkpoint, naming the file and the tensor; for one of another model, listing
    the tensors that differ; and for one with another quantization, naming both.
    """
    path = Path(path)
    executor = wrapped(model).executor
    ranks = executor.ranks
    with ExitStack() as opened:
        with ranks.together(f"reading '{path}'"):
            if isinstance(optimizer, AdamW):
                check_owns(optimizer, executor)
            manifest = Manifest.read(path)
            manifest.check(path)
            files = _Files(path, manifest, opened)
            values = manifest.values
            left_out = {name: LeftOut.parsed(value) for name, value in values.get(FROZEN, {}).items()}
            _check_in_parts(files, left_out, executor)
            _check_model(files, left_out, model, executor)
            _check_stored(files, executor)
            _check_left_out(path, left_out, executor)
            random = files.decoded(values["random"])
            of_ranks = [files.decoded(states) for states in values.get(RANDOM_OF_RANKS, ())]
            loaded = Loaded(manifest.step, files.decoded(values["extra"]))
            state = _optimizer_state(files, optimizer)
        opened.enter_context(ranks.together(f"loading '{path}'"))
        executor.host.wait_for_saving()
        # the loaded state repairs a step that has failed (on a disk, say)
        executor.forget_failures()
        executor.synchronize()
        if isinstance(optimizer, AdamW):
            _load_adamw(files, optimizer, state)
        elif optimizer is not None:
            optimizer.load_state_dict(state)
        with ranks.together(f"loading weights from '{path}'"):
            if ranks.is_first_of_machine:
                _load_weights(files, executor)
        for unit in (*executor.units, executor.root):
            if any(slice.param.name in files.names[WEIGHTS] for slice in unit.layout.slices):
                executor.pager.replaced(unit)
        with torch.no_grad():
            for name, buffer in stored_buffers(model).items():
                buffer.copy_(files.read(BUFFERS, name))
        executor.gradients.early.next_step()  # no gradient of the loaded step has been applied
        _load_gradients(files, executor)
        executor.gradients.norms.forget()
        executor.gradients.factor = files.decoded(values["model"]["gradient_scale"])
        executor.skipped_steps = values["model"]["skipped_steps"]
        # the root's copy to the device is running, and no other op waits for it
        executor.synchronize()
    if ranks.is_first:
        set_random_states(random)
    elif len(of_ranks) == ranks.size - 1:
        set_random_states(of_ranks[ranks.rank - 1])
    return loaded


class _Files:
    """A checkpoint's tensors, by their kind and name. Files are opened at the first read of one of their
    tensors, and closed with ``opened``."""

    def __init__(self, path: Path, manifest: Manifest, opened: ExitStack) -> None:
        self.path = path
        self.values = manifest.values
        #: By kind, each tensor's file: the model may have been saved with other layers.
        self.names = {kind: manifest.files_of(kind) for kind in KINDS}
        self._entries = manifest.files
        self._opened = opened
        self._readers: dict[str, Callable[[str], torch.Tensor]] = {}

    def entries(self, kind: str) -> dict[str, Entry]:
        return {name: self._entries[file][name] for name, file in self.names[kind].items()}

    def read(self, kind: str, name: str) -> torch.Tensor:
        """A view of the file. Raises LookupError if there is no such tensor."""
        file = self.names[kind][name]
        if file not in self._readers:
            self._readers[file] = self._opened.enter_context(reading(self.path / file))
        return self._readers[file](name)

    def decoded(self, value: Any) -> Any:
        """The decoded value; its tensors are copies, which outlive the file."""
        return decode(value, lambda name: self.read(VALUES, name).clone())


def _check_in_parts(files: _Files, left_out: Mapping[str, LeftOut], executor: Executor) -> None:
    """Raise CheckpointError for parameters quantized in another way: their parts may have the same names
    and shapes, and yet mean other values."""
    if (there := files.values.get(IN_PARTS)) is None:  # of an older release, which did not save it
        return
    here = in_parts(executor)
    units = (*executor.units, executor.root)
    known_here = {name for unit in units for name, _, _ in unit.registered}
    known_there = {*there, *files.names[WEIGHTS], *left_out}
    differing = [
        name
        for name in sorted(there.keys() | here.keys())
        if name in known_here and name in known_there and there.get(name) != here.get(name)
    ]
    if differing:
        plain, name = "not quantized", differing[0]
        raise CheckpointError(
            f"{files.path} is of a model that is quantized otherwise: '{name}', one of {len(differing)}, is "
            f"{there.get(name, plain)} there, {here.get(name, plain)} here; load the model as it was when it "
            "was saved, or move its adapters to this one by peft (model.save_pretrained, model.load_adapter)"
        )


def _check_model(
    files: _Files, left_out: Mapping[str, LeftOut], model: nn.Module, executor: Executor
) -> None:
    """Raise CheckpointError, listing the differences, unless the checkpoint is of this model."""
    units = (*executor.units, executor.root)
    shapes: dict[str, object] = {
        slice.param.name: slice.param.shape for unit in units for slice in unit.layout.slices
    }
    buffers: dict[str, object] = {name: tuple(buffer.shape) for name, buffer in stored_buffers(model).items()}
    there: dict[str, object] = {name: entry.shape for name, entry in files.entries(WEIGHTS).items()}
    there |= {name: frozen.shape for name, frozen in left_out.items()}
    differing = _unlike(there, shapes)
    differing += _unlike({name: entry.shape for name, entry in files.entries(BUFFERS).items()}, buffers)
    if differing:
        raise CheckpointError(
            f"{files.path} is of another model; these tensors differ: {shortened(differing)}"
        )
    if executor.gradients.are_kept:
        return
    in_layers = {slice.param.name for unit in executor.units for slice in unit.layout.slices}
    for name, file in files.names[GRADIENTS].items():
        if name in in_layers:
            raise CheckpointError(
                f"{files.path / file}: update='backward' keeps no gradients between backward and step(), and "
                "this checkpoint has some: wrap with update='step', or save after a step"
            )


def _check_stored(files: _Files, executor: Executor) -> None:
    """Raise CheckpointError if the checkpoint has other values of frozen weights that the model reads from
    files, which do not change."""
    differing = [
        slice.param.name
        for unit in executor.units
        for on_disk in [executor.shard(unit).weights_on_disk]
        for slice in unit.layout.slices
        if on_disk.is_stored(slice)
        and slice.param.name in files.names[WEIGHTS]
        and not torch.equal(
            on_disk.read(slice).view(-1).view(torch.uint8),
            files.read(WEIGHTS, slice.param.name).to(slice.dtype).reshape(-1).view(torch.uint8),
        )
    ]
    if differing:
        raise CheckpointError(
            f"{files.path} has other frozen weights than the files that this model reads them from "
            f"({shortened(differing)}): load the model without disk=True, which reads them into memory"
        )


def _check_left_out(path: Path, left_out: dict[str, LeftOut], executor: Executor) -> None:
    """Raise CheckpointError unless frozen parameters that the checkpoint leaves out are unchanged here."""
    differing = []
    for unit in (*executor.units, executor.root):
        for slice in unit.layout.slices:
            name = slice.param.name
            if (there := left_out.get(name)) is None:
                continue
            if slice.param.trainable:
                differing.append(f"{name} (trained here)")
            elif there.dtype != (here := DTYPES[slice.dtype]):
                differing.append(f"{name} ({there.dtype} there, {here} here)")
            elif there != LeftOut.held(slice, executor.shard(unit)):
                differing.append(f"{name} (other values)")
    if differing:
        raise CheckpointError(
            f"{path} holds no frozen parameters, and those of this model differ from those when it was saved "
            f"({shortened(differing)}): load the model with the weights that it had then"
        )


def _unlike(there: Mapping[str, object], here: Mapping[str, object]) -> list[str]:
    return [
        f"{name} ({there.get(name, 'missing')} there, {here.get(name, 'missing')} here)"
        for name in sorted(there.keys() | here.keys())
        if there.get(name) != here.get(name)
    ]


def _optimizer_state(files: _Files, optimizer: torch.optim.Optimizer | None) -> Any:
    """The decoded state of the optimizer; for `AdamW` the options of its groups, since its moments are read
    one parameter at a time. Raises CheckpointError, naming the difference, unless the checkpoint has the
    state of such an optimizer; other errors for values that are not a checkpoint's."""
    if optimizer is None:
        return None
    saved = files.values["optimizer"]
    # the manifest has no module of the class, and PyTorch has an AdamW too
    there = f"streamer.{saved['class']}" if "groups" in saved else saved["class"]
    here = "streamer.AdamW" if isinstance(optimizer, AdamW) else type(optimizer).__name__
    if there != here:
        raise CheckpointError(
            f"{files.path} holds the state of {there}, and this is {here}: pass load that kind, or None"
        )
    mine: list[Any] = [group["params"] for group in optimizer.param_groups]
    sizes = [len(group) for group in mine]
    if not isinstance(optimizer, AdamW):
        state = files.decoded(saved["state"])
        if (groups := [len(group["params"]) for group in state["param_groups"]]) != sizes:
            raise CheckpointError(
                f"{files.path} was saved with groups of {groups} parameters, and this optimizer has groups "
                f"of {sizes}: create it with the same groups"
            )
        return state
    names = [group["params"] for group in saved["groups"]]
    mine = [[require_home(param).slice.param.name for param in group] for group in mine]
    if differing := _unlike(_groups(names), _groups(mine)):
        raise CheckpointError(
            f"{files.path} was saved with groups of {[len(group) for group in names]} parameters, and this "
            f"optimizer has groups of {sizes}; create it with the same groups. "
            f"These differ: {shortened(differing)}"
        )
    if (held_in := parse_state_dtype(saved["state_dtype"])) != optimizer.state_dtype:
        warn(
            f"the moments were held in {held_in} and are converted to {optimizer.state_dtype}: the run does "
            "not continue bitwise"
        )
    return [files.decoded(group["options"]) for group in saved["groups"]]


def _groups(names: Sequence[Sequence[str]]) -> dict[str, object]:
    return {name: f"group {number}" for number, group in enumerate(names) for name in group}


def _load_adamw(files: _Files, optimizer: AdamW, options: Sequence[dict[str, Any]]) -> None:
    saved = files.values["optimizer"]
    steps, held_in = saved["steps"], parse_state_dtype(saved["state_dtype"])

    def values_of(name: str) -> dict[str, Any] | None:
        if name not in steps:
            return None
        held = {purpose.name: files.read(OPTIMIZER, f"{name}.{purpose.name}") for purpose in MOMENTS[held_in]}
        return convert(held, held_in, optimizer.state_dtype) | {"step": steps[name]}

    for group, options_there in zip(optimizer.param_groups, options, strict=True):
        group.update(options_there)
    homes = {param: require_home(param) for group in optimizer.param_groups for param in group["params"]}
    # a generator: converted moments are in memory for one parameter at a time
    states = (
        (param, home, values_of(home.slice.param.name))
        for param, home in homes.items()
        if home.slice.param.trainable
    )
    optimizer.restart(load_moments(states, optimizer.state_dtype))


def _load_weights(files: _Files, executor: Executor) -> None:
    for unit in (*executor.units, executor.root):
        shard = executor.shard(unit)
        slices = [slice for slice in unit.layout.slices if slice.param.name in files.names[WEIGHTS]]
        if not slices:
            continue
        with executor.store.weights_in(shard, read=len(slices) < len(unit.layout.slices)):
            for slice in slices:
                values = files.read(WEIGHTS, slice.param.name)
                executor.backend.on_host(partial(shard.load, slice, values))


def _load_gradients(files: _Files, executor: Executor) -> None:
    for unit in (*executor.units, executor.root):
        for slice, param in unit.placed():
            param.grad = None
            if slice.param.trainable and slice.param.name in files.names[GRADIENTS]:
                gradient = files.read(GRADIENTS, slice.param.name)
                # sums stay in fp32
                dtype = gradient.dtype if gradient.dtype == torch.float32 else param.dtype
                param.grad = gradient.to(param.device, dtype, copy=True)
    executor.gradients.take_in()
