"""Layers that are too large for a slot, cut into units along their children.

Every slot is as large as the largest unit, so one wide layer decides what all of them take. Which layers are
cut, and how far, depends on sizes alone: the largest are replaced by their parts, again and again, until the
slots fit on the device. [Note: split layers]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NoReturn

import torch
from torch import nn
from torch.nn.utils import parametrize

from streamer.engine.split import Split
from streamer.engine.unit import Unit
from streamer.find import SMALL, is_called, is_list
from streamer.memory.slots import num_grad_slots
from streamer.plan.ledger import Ledger, amount, ledger
from streamer.units import layout_of, make_units


@dataclass(frozen=True)
class Cut:
    """The units of a model, of which of the ``layers`` each is, what was ``split`` to get them, and, where
    they do not fit on the device, what would help."""

    units: list[Unit]
    root: Unit
    layers: list[int]
    split: tuple[Split, ...] = ()
    mend: str | None = None


@dataclass(frozen=True)
class _Piece:
    """A module that may be a unit, the bytes of its weights and gradients, and the number of its layer."""

    name: str
    module: nn.Module
    nbytes: int
    grad_nbytes: int
    layer: int


@dataclass(frozen=True)
class _Stage:
    """One way to cut a model into units; ``split`` are those that the stage before had whole."""

    pieces: list[_Piece]
    units: list[Unit]
    root: Unit
    split: tuple[_Piece, ...] = ()

    def ledger(self, num_slots: int) -> Ledger:
        return ledger(self.units, self.root, num_slots=min(num_slots, len(self.units)))

    def device_bytes(self, num_slots: int) -> int:
        """Bytes that it takes of the device."""
        return sum(self.ledger(num_slots).device.values())


def cut_to_fit(
    model: nn.Module,
    units: list[Unit],
    root: Unit,
    dtype: torch.dtype | None,
    *,
    num_slots: int,
    available: int,
    limit: int | None,
) -> Cut:
    """Cut the largest of ``units`` into their parts until ``num_slots`` slots, and what is on the device
    beside them, fit into ``available`` bytes; no further than that.

    ``dtype`` is what parameters are streamed in, ``limit`` the ``device_memory`` that `wrap` was given.
    """
    stages: list[_Stage] = []
    for stage in _stages(model, units, root, dtype):
        stages.append(stage)
        if stage.device_bytes(num_slots) <= available:
            mend = None
            break
    else:
        stage = min(stages, key=lambda stage: stage.device_bytes(num_slots))
        mend = _mend(stages, stage, num_slots=num_slots, available=available, limit=limit)
        stages = stages[: stages.index(stage) + 1]
    totals = [stage.device_bytes(num_slots) for stage in stages]
    split = tuple(
        Split(piece.name, piece.module, min(totals[:number]))
        for number, stage in enumerate(stages)
        for piece in stage.split
    )
    return Cut(stage.units, stage.root, [piece.layer for piece in stage.pieces], split, mend)


def refuse_micro_batches(split: Sequence[Split]) -> NoReturn:
    """Raise ValueError: what is the batch of a layer's arguments need not be that of its parts'."""
    raise ValueError(
        f"micro_batch_size: layer '{split[0].name}' is too large for a slot and would be streamed in parts, "
        f"which cannot be given micro-batches: {split[0].whole_bytes} bytes of device memory would keep "
        "layers whole; or leave micro_batch_size out"
    )


def _stages(model: nn.Module, units: list[Unit], root: Unit, dtype: torch.dtype | None) -> Iterator[_Stage]:
    """The ways to cut, coarse to fine: in each the largest pieces of the one before are in parts."""
    pieces = [
        _Piece(unit.name, unit.module, unit.layout.nbytes, unit.layout.grad_nbytes, unit.index)
        for unit in units
    ]
    split: tuple[_Piece, ...] = ()
    while True:
        yield _Stage(pieces, units, root, split)
        split = _to_split(pieces)
        if not split:
            return
        parts = {piece.name: list(_parts(piece, dtype)) for piece in split}
        pieces = [part for piece in pieces for part in parts.get(piece.name, [piece])]
        units, root = make_units(model, [(piece.name, piece.module) for piece in pieces], dtype)


def _to_split(pieces: Sequence[_Piece]) -> tuple[_Piece, ...]:
    """The largest pieces, or, where they cannot be split, those with the largest gradients."""
    sizes: list[Callable[[_Piece], int]] = [lambda piece: piece.nbytes, lambda piece: piece.grad_nbytes]
    for size in sizes:
        most = max(map(size, pieces))
        largest = tuple(piece for piece in pieces if size(piece) == most > 0)
        if largest and not any(_obstacle(piece) for piece in largest):
            return largest
    return ()


def _parts(piece: _Piece, dtype: torch.dtype | None) -> Iterator[_Piece]:
    """The children that are units. The small ones are left to the root unit: a norm would take a slot in
    which the matrix after it could be on its way."""
    layouts = [
        (name, child, layout_of(name, child, dtype)) for name, child in _children(piece.module, piece.name)
    ]
    most = max(layout.nbytes for _, _, layout in layouts)
    for name, child, layout in layouts:
        if SMALL * layout.nbytes > most:
            yield _Piece(name, child, layout.nbytes, layout.grad_nbytes, piece.layer)


def _children(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """The children with parameters; in place of a list of modules, which is not called, its own."""
    for key, child in module.named_children():
        if next(child.parameters(), None) is None:
            continue
        if is_list(child):
            yield from _children(child, f"{prefix}.{key}")
        else:
            yield f"{prefix}.{key}", child


def _obstacle(piece: _Piece) -> str | None:
    """Why a piece cannot be cut into parts, or None if it can."""
    module = piece.module
    kind = type(module).__name__
    if isinstance(module, torch.jit.ScriptModule) or parametrize.is_parametrized(module):
        return f"it is a {kind}, which does not call its children as a plain module does"
    children = list(_children(module, piece.name))
    inside = {param for _, child in children for param in child.parameters()}
    for name, param in module.named_parameters():
        if param not in inside:
            return f"it is a {kind} with a parameter of its own ('{name}')"
    for name, child in children:
        if not is_called(child):
            return f"'{name}' is a {type(child).__name__}, which is never called"
    if sum(len(list(child.parameters())) for _, child in children) > len(inside):
        return "its parts share a parameter"
    return _reference(children)


def _reference(children: Sequence[tuple[str, nn.Module]]) -> str | None:
    """How one of ``children`` refers to another in a way that PyTorch does not know of, if one does."""
    owners = {id(held): name for name, child in children for held in (*child.modules(), *child.parameters())}
    for name, child in children:
        for module in child.modules():
            for attribute, value in vars(module).items():
                if attribute in ("_modules", "_parameters"):
                    continue
                for held in _held(value):
                    if owners.get(id(held), name) != name:
                        return f"'{name}' refers to '{owners[id(held)]}' (in '{attribute}')"
    return None


def _held(value: object) -> Iterator[object]:
    if isinstance(value, list | tuple | set):
        for item in value:
            yield from _held(item)
    elif isinstance(value, dict):
        yield from _held(list(value.values()))
    elif isinstance(value, partial):
        yield from _held([value.func, value.args, value.keywords])
    else:
        yield getattr(value, "__self__", value)


def _mend(
    stages: Sequence[_Stage], best: _Stage, *, num_slots: int, available: int, limit: int | None
) -> str:
    """What helps a device that is too small for any of ``stages``, of which ``best`` takes least."""
    fewer = [
        count
        for count in range(min(num_slots, max(len(stage.units) for stage in stages)) - 1, 0, -1)
        if any(stage.device_bytes(count) <= available for stage in stages)
    ]
    needed = best.device_bytes(num_slots)
    figure = amount(needed) if limit is None else f"device_memory={needed + limit - available}"
    would_do = f"{figure} would do{f', or lower num_slots to {fewer[0]}' if fewer else ''}"
    beside = best.ledger(num_slots).beside_slots
    if beside >= available:
        return f"what is in no layer takes {amount(beside)} alone; {would_do}"
    most = max(piece.nbytes for piece in best.pieces)
    obstacles = {piece.name: _obstacle(piece) for piece in best.pieces if piece.nbytes == most}
    name = next((name for name, obstacle in obstacles.items() if obstacle), next(iter(obstacles)))
    reason = obstacles[name] or "its parts would take more"
    return (
        f"'{name}' takes {amount(most)}, a slot may take "
        f"{amount(_allowed(best, num_slots, available - beside))}, and it cannot be streamed in parts "
        f"({reason}); {would_do}"
    )


def _allowed(stage: _Stage, num_slots: int, room: int) -> int:
    """What a weight slot may take, if its gradient slot takes as much but no more than the gradients need."""
    count = min(num_slots, len(stage.pieces))
    grad_slots = num_grad_slots(count)
    grad_nbytes = max(piece.grad_nbytes for piece in stage.pieces)
    return max(room // (count + grad_slots), (room - grad_slots * grad_nbytes) // count)
