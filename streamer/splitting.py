"""Layers that are too large for a slot, cut into units along their children.

Every slot is as large as the largest unit, so one wide layer decides what all of them take. Which layers are
cut, and how far, depends on sizes alone: the largest are replaced by their parts, again and again, until the
slots fit on the device. [Note: split layers]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.nn.utils import parametrize

from streamer.engine.split import Split
from streamer.engine.unit import Unit
from streamer.find import is_called
from streamer.memory.slots import num_grad_slots
from streamer.plan.ledger import amount, ledger
from streamer.units import layout_of, make_units


@dataclass(frozen=True)
class Cut:
    """The units of a model, what was ``split`` to get them, and, where they do not fit on the device, what
    would help."""

    units: list[Unit]
    root: Unit
    split: tuple[Split, ...] = ()
    mend: str | None = None


@dataclass(frozen=True)
class _Piece:
    """A module that may be a unit, and the bytes of its weights and gradients."""

    name: str
    module: nn.Module
    nbytes: int
    grad_nbytes: int


@dataclass(frozen=True)
class _Stage:
    """One way to cut a model into units; ``split`` are those that the stage before had whole."""

    pieces: list[_Piece]
    split: tuple[_Piece, ...] = ()

    def slot_bytes(self, num_slots: int) -> int:
        """Bytes of all slots of the device."""
        count = min(num_slots, len(self.pieces))
        grad_nbytes = max(piece.grad_nbytes for piece in self.pieces)
        return count * max(piece.nbytes for piece in self.pieces) + num_grad_slots(count) * grad_nbytes


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
    beside = ledger(units, root, num_slots=num_slots).beside_slots
    whole = [_Piece(unit.name, unit.module, unit.layout.nbytes, unit.layout.grad_nbytes) for unit in units]
    stages: list[_Stage] = []
    for stage in _stages(whole, dtype):
        stages.append(stage)
        if beside + stage.slot_bytes(num_slots) <= available:
            mend = None
            break
    else:
        stage = min(stages, key=lambda stage: stage.slot_bytes(num_slots))
        mend = _mend(stages, stage, num_slots=num_slots, beside=beside, available=available, limit=limit)
        stages = stages[: stages.index(stage) + 1]
    totals = [beside + stage.slot_bytes(num_slots) for stage in stages]
    split = tuple(
        Split(piece.name, piece.module, min(totals[:number]))
        for number, stage in enumerate(stages)
        for piece in stage.split
    )
    if not split:
        return Cut(units, root, mend=mend)
    return Cut(*make_units(model, [(piece.name, piece.module) for piece in stage.pieces], dtype), split, mend)


def _stages(pieces: list[_Piece], dtype: torch.dtype | None) -> Iterator[_Stage]:
    """The ways to cut, coarse to fine: in each the largest pieces of the one before are in parts."""
    stage: _Stage | None = _Stage(pieces)
    while stage is not None:
        yield stage
        stage = _finer(stage.pieces, dtype)


def _finer(pieces: list[_Piece], dtype: torch.dtype | None) -> _Stage | None:
    """``pieces`` with the largest of them in parts, or, where that cannot be, those with the largest
    gradients."""
    sizes: list[Callable[[_Piece], int]] = [lambda piece: piece.nbytes, lambda piece: piece.grad_nbytes]
    for size in sizes:
        most = max(map(size, pieces))
        largest = tuple(piece for piece in pieces if size(piece) == most > 0)
        if not largest or any(_obstacle(piece) for piece in largest):
            continue
        finer: list[_Piece] = []
        for piece in pieces:
            finer += _parts(piece, dtype) if piece in largest else [piece]
        return _Stage(finer, largest)
    return None


def _parts(piece: _Piece, dtype: torch.dtype | None) -> Iterator[_Piece]:
    for name, child in _children(piece.module, piece.name):
        layout = layout_of(name, child, dtype)
        yield _Piece(name, child, layout.nbytes, layout.grad_nbytes)


def _children(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """The children with parameters; in place of a list of modules, which is not called, its own."""
    for key, child in module.named_children():
        if next(child.parameters(), None) is None:
            continue
        if isinstance(child, nn.ModuleList | nn.ModuleDict) and not is_called(child):
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
    stages: Sequence[_Stage],
    best: _Stage,
    *,
    num_slots: int,
    beside: int,
    available: int,
    limit: int | None,
) -> str:
    """What helps a device that is too small for any of ``stages``, of which ``best`` takes least."""
    fewer = [
        count
        for count in range(num_slots - 1, 0, -1)
        if any(beside + stage.slot_bytes(count) <= available for stage in stages)
    ]
    needed = beside + best.slot_bytes(num_slots)
    figure = amount(needed) if limit is None else f"device_memory={needed + limit - available}"
    would_do = f"{figure} would do{f', or lower num_slots to {fewer[0]}' if fewer else ''}"
    if beside >= available:
        return f"what is in no layer takes {amount(beside)} alone; {would_do}"
    largest = [piece for piece in best.pieces if piece.nbytes == max(other.nbytes for other in best.pieces)]
    reasons = [(piece, _obstacle(piece) or "its parts would take more slots") for piece in largest]
    piece, reason = reasons[0]
    return (
        f"'{piece.name}' takes {amount(piece.nbytes)}, a slot may take "
        f"{amount(_allowed(best, num_slots, available - beside))}, and it cannot be streamed in parts "
        f"({reason}); {would_do}"
    )


def _allowed(stage: _Stage, num_slots: int, room: int) -> int:
    """What a weight slot may take, if its gradient slot takes as much but no more than the gradients need."""
    count = min(num_slots, len(stage.pieces))
    grad_nbytes = max(piece.grad_nbytes for piece in stage.pieces)
    return max(room // (count + num_grad_slots(count)), (room - num_grad_slots(count) * grad_nbytes) // count)
