"""Outputs of a layer that share memory with one another, or with what the layer was given.

[Note: shared outputs]
A custom function of autograd does not know that two tensors which it returns show one memory: where the
caller writes one of them in place, the other keeps the gradient of what was there before. So of outputs that
are views of one tensor, that tensor alone leaves the function, and the views are made of it in the user's
graph, where autograd follows a write as it always does. An output that is a tensor the layer was given, or a
view of one, becomes that of the user's own tensor. Outputs that share nothing, which are nearly all, leave
the function as they are.

A layer that returns ``y`` and ``y.view(-1)`` has one tensor leave, ``y``; its result is built around ``y``
and ``y.as_strided(...)``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
from torch import nn

from streamer.engine.tensors.nested import Rebuild, Tensors
from streamer.engine.tensors.param_hooks import hooks_of
from streamer.torch_private import BY_CUSTOM_FUNCTION, BY_NO_GRAD, is_sparse, refuse_writes, was_made


@dataclass(frozen=True)
class View:
    """How a tensor shows a part of another tensor, or all of it."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    #: from the first element of the other tensor, counted in elements of this one
    offset: int
    #: whether it shows complex numbers as pairs of real ones, or their conjugates
    is_real: bool = False
    is_conj: bool = False
    #: False for one that was made in no-grad mode: a gradient that comes to it goes no further
    has_grad: bool = True

    @staticmethod
    def of(view: torch.Tensor, whole: torch.Tensor) -> View | None:
        """``view``, which shares the storage of ``whole``; None if it is another dtype's view."""
        is_real = whole.is_complex() and view.dtype == whole.dtype.to_real() and not whole.is_conj()
        if view.is_neg() != whole.is_neg() or not (is_real or view.dtype == whole.dtype):
            return None
        offset = int(view.storage_offset()) - int(whole.storage_offset()) * (2 if is_real else 1)
        return View(
            tuple(view.shape),
            view.stride(),
            offset,
            is_real,
            view.is_conj() != whole.is_conj(),
            not was_made(view, BY_NO_GRAD),
        )

    def on(self, whole: torch.Tensor) -> torch.Tensor:
        """The same view of ``whole``."""
        with nullcontext() if self.has_grad else torch.no_grad():
            base = torch.view_as_real(whole) if self.is_real else whole
            view = base.as_strided(self.shape, self.stride, int(base.storage_offset()) + self.offset)
            return view.conj() if self.is_conj else view


@dataclass(frozen=True)
class Shown:
    """How an output is made of the tensors that leave the layer: which of them it is, or is a ``view`` of."""

    of: int
    view: View | None = None
    #: a custom function has made this output, or another view of the same tensor: autograd refuses writes
    is_guarded: bool = False

    def out_of(self, tensors: Tensors) -> torch.Tensor:
        """The output."""
        tensor = tensors[self.of] if self.view is None else self.view.on(tensors[self.of])
        if self.is_guarded:
            tensor = tensor.view_as(tensor)
            refuse_writes(tensor)
        return tensor


@dataclass(frozen=True)
class SharedOutputs:
    """Builds a layer's result around the tensors that have left it and, after them, those it was given.
    [Note: shared outputs]"""

    rebuild: Rebuild
    #: one for each output
    shown: Sequence[Shown]
    #: for each tensor that leaves the layer, which of those it was given it is
    passed_on: Sequence[int | None]

    def __call__(self, tensors: Tensors) -> Any:
        given = len(self.passed_on)
        wholes = [
            tensors[number if passed_on is None else given + passed_on]
            for number, passed_on in enumerate(self.passed_on)
        ]
        return self.rebuild([shown.out_of(wholes) for shown in self.shown])


def untangle(
    layer: str, outputs: Sequence[torch.Tensor], rebuild: Rebuild, inputs: Tensors
) -> tuple[list[torch.Tensor], Rebuild]:
    """The tensors that are to leave ``layer``, which has returned ``outputs`` of ``inputs``, and what builds
    its result around them and, after them, the user's inputs. [Note: shared outputs]

    Raises ValueError for a view that cannot be made again.
    """
    bases = [output if (base := output._base) is None else base for output in outputs]
    given = {id(tensor): number for number, tensor in enumerate(inputs)}
    count = Counter(map(id, bases))
    if len(count) == len(bases) and given.keys().isdisjoint(count):
        return list(outputs), rebuild
    alike: dict[int, list[torch.Tensor]] = {}
    for output, base in zip(outputs, bases, strict=True):
        if _can_be_shown(output, base):
            alike.setdefault(id(base), []).append(output)
    guarded = {
        id(base)
        for output, base in zip(outputs, bases, strict=True)
        if _is_custom(output, base) and (id(base) in given or count[id(base)] > 1)
    }
    numbers: dict[int, int] = {}
    sources: list[torch.Tensor] = []
    passed_on: list[int | None] = []
    shown: list[Shown] = []
    for output, base in zip(outputs, bases, strict=True):
        number, members = given.get(id(base)), alike.get(id(base), ())
        source = output
        if any(member is output for member in members):
            source = base if number is not None else _source(members, base, output)
        if id(source) not in numbers:
            numbers[id(source)] = len(sources)
            sources.append(source)
            passed_on.append(number if source is base and members else None)
        view = None
        if source is not output and (view := View.of(output, source)) is None:
            raise ValueError(
                f"layer '{layer}' returns a view of dtype {output.dtype} of a tensor of dtype "
                f"{source.dtype}, which it returns too or was given: let it return a clone of one of them"
            )
        shown.append(Shown(numbers[id(source)], view, id(base) in guarded))
    return sources, SharedOutputs(rebuild, shown, passed_on)


def _can_be_shown(output: torch.Tensor, base: torch.Tensor) -> bool:
    """Whether ``output``, a view of ``base`` or that itself, may be made of another tensor in its place."""
    # a sparse tensor has no views, but it may be that itself
    is_sparse_itself = output is base and is_sparse(output)
    is_plain = _is_plain(output) and _is_plain(base)
    if not (is_plain or is_sparse_itself) or _is_custom(output, base):
        return False
    # a hook of the layer on a view, or on what it was given, hears of what comes to that tensor of its graph
    hooked = [tensor for tensor in (output, base) if hooks_of(tensor)]
    return not any(tensor is not base or base.is_leaf for tensor in hooked)


def _source(members: Tensors, base: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    """What is to leave the layer in place of ``output``, one of ``members``, which are views of ``base``."""
    pairs = combinations(members, 2)
    if all(are_apart(one, other) for one, other in pairs):
        return output
    for member in members:
        if member is base:
            return base
    for member in members:
        if (
            member.is_contiguous()
            and member.nbytes == base.nbytes
            and member.dtype == base.dtype
            and not was_made(member, BY_NO_GRAD)
        ):
            return member
    return base


def _is_custom(output: torch.Tensor, base: torch.Tensor) -> bool:
    """Whether a custom function has made ``output`` as a view: its backward need not be that of a view."""
    return output is not base and was_made(output, BY_CUSTOM_FUNCTION)


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout == torch.strided


def are_apart(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one storage are known to share no element.

    Two parts of the same rows (the halves of a chunk) share none though their rows alternate in memory:
    modulo the length of a row, their elements are in different places.
    """
    if one.itemsize != other.itemsize:
        return False
    steps = {step for tensor in (one, other) for step in tensor.stride() if step > 0}
    rows = [step for step in steps if all(larger % step == 0 for larger in steps if larger > step)]
    return any(_are_apart_modulo(one, other, row) for row in (*rows, None))


def _are_apart_modulo(one: torch.Tensor, other: torch.Tensor, row: int | None) -> bool:
    places = []
    for tensor in (one, other):
        start = int(tensor.storage_offset())
        first = start if row is None else start % row
        dims = zip(tensor.shape, tensor.stride(), strict=True)
        last = first + sum((size - 1) * step for size, step in dims if row is None or step < row)
        if row is not None and last >= row:
            return False
        places.append((first, last))
    return places[0][1] < places[1][0] or places[1][1] < places[0][0]
