"""Squared norms of gradients, taken before they leave the device.

[Note: norms]
A unit's sum of squares is taken on the device while its gradient is in a slot, or in the pass that adds
another gradient to it on the host, so that the global norm is known when backward ends and costs no pass
over memory. The sum is valid only while the host gradient is unchanged: if the user has written it or dropped
a part, a pass on the HOST lane takes the sum again. Some writers leave autograd's version counter as it is
(gradient scalers, collectives), so a sample of the gradient is compared too. Who holds its memory another way
(``.data``, NumPy) may write any part of it without a trace: the gradient is lent, and its sum is taken again
whenever it is asked for. If that differs from the known one by rounding alone, the known one stays: who only
reads changes no bit of what follows, and a rank that reads alone does not differ from the others.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

import streamer_native as native
from streamer.engine.paging.gradients import Squares, is_summed
from streamer.engine.paging.unit import Unit
from streamer.engine.schedule import op as ops
from streamer.engine.schedule.hazards import Issuer
from streamer.engine.schedule.op import ROOT
from streamer.engine.tensors.guarded import as_plain
from streamer.memory.host import HostStore, array
from streamer.memory.layout import Layout
from streamer.memory.purposes import SUMS
from streamer.memory.shares import within

#: Elements whose squares are added up one after another.
ROW = 4096
#: By what part of them two sums of the same squares in fp32 may differ.
ROUNDING = 1e-5


@dataclass(frozen=True)
class _Measured:
    """What is known of a layer's gradient, for as long as the gradient stays as it was then."""

    squares: Squares | float  # a scalar on the device, or taken on the host
    state: _State
    sample: bytes | None = None  # of the host gradient, once that has landed
    on_host: float | None = None  # the sum that the host has taken itself
    is_finite: bool = False  # known to be, though ``squares`` may still be on the device
    #: the state and the sample after the last of the writes that only made it smaller
    scaled: tuple[_State, bytes] | None = None


#: Which parameters hold a gradient, and how often the user has written the unit's gradient and sums.
_State = tuple[tuple[bool, ...], int, int]


class Norms:
    """Sums of squares of the gradients of all units. [Note: norms]"""

    def __init__(
        self,
        issuer: Issuer,
        units: Sequence[Unit],
        root: Unit,
        store: HostStore,
        is_lent: Callable[[int], bool],
    ) -> None:
        self._issuer = issuer
        self._is_lent = is_lent
        self._units = units
        self._root = root
        self._store = store
        self._measured: dict[int, _Measured] = {}
        #: the root's gradients that are known to be finite, with their version counters
        self._finite_root: list[tuple[weakref.ref[torch.Tensor], int]] | None = None
        self._where: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    @as_plain
    def keep(self, unit: Unit, squares: Squares | None) -> None:
        """``squares`` belong to the gradient that ``unit`` now holds; None if they are not known."""
        self._measured.pop(unit.index, None)
        if squares is not None:
            self._measured[unit.index] = _Measured(squares, self._state(unit))

    def begin_scaling(self, unit: Unit) -> bool:
        """The user's code is about to write gradients of ``unit``: whether they are as they were measured, or
        smaller, until now."""
        return self._is_scaled(unit) or self._is_measured(unit)

    def scaled(self, unit: Unit) -> None:
        """The user's code has multiplied the gradients of ``unit`` by a number from -1 to 1, as clipping
        does, so that they are finite if they were. What they add up to, rounded, is not known."""
        self._note(unit, scaled=(self._state(unit), self._sample(unit)))

    @as_plain
    def landed(self) -> None:
        """The gradients have arrived on the host: sample those whose squares were taken on the way."""
        for index, measured in self._measured.items():
            if measured.sample is None:
                squares = measured.squares() if callable(measured.squares) else measured.squares
                unit = self._units[index]
                self._note(unit, squares=squares, sample=self._sample(unit))

    @as_plain
    def total(self, layers_scale: float, *, or_more: bool = False) -> float:
        """The sum of squares of all gradients that are held, those of layers multiplied by ``layers_scale``
        first; NaN or Inf if one of them is. With ``or_more`` an upper bound, the sum before clipping, is
        enough."""
        holding, gradients_of_root = self._held()
        anew = [unit for unit in holding if not self._is_measured(unit)]
        if or_more:
            anew = [unit for unit in anew if not self._is_scaled(unit)]
        sums = self._measure_on_host(anew)
        if layers_scale != 1:
            for unit in anew:
                self._check_unwritten(unit, sums[unit.index])
        for unit in anew:
            self._keep_sum(unit, sums[unit.index])
        layers = []
        for unit in holding:
            squares = self._measured[unit.index].squares
            assert not callable(squares), "what the host was adding up has landed"
            layers.append(squares)
        root = [_squares(gradient) for gradient in gradients_of_root]
        values = _read([*layers, *root])
        of_layers, of_root = math.fsum(values[: len(layers)]), math.fsum(values[len(layers) :])
        # the scale may be NaN, which is nothing to the root where there are no layers
        return (layers_scale**2 * of_layers if layers else 0.0) + of_root

    @as_plain
    def remember_finite(self) -> None:
        """All gradients that are held now are finite, so that `is_finite` need not read them again."""
        holding, root = self._held()
        for unit in holding:
            if unit.index in self._measured:
                self._note(unit, is_finite=True)
        self._finite_root = [(weakref.ref(gradient), gradient._version) for gradient in root]

    @as_plain
    def is_finite(self, layers_scale: float) -> bool:
        """Whether `total` is finite. The device is read only if something was written since it was last."""
        known, self._finite_root = self._finite_root, None
        if known is not None and not self._is_lent(ROOT):
            holding, root = self._held()
            now = [(id(gradient), gradient._version) for gradient in root]
            # some writes do not increment the version counter
            if [(id(ref()), version) for ref, version in known] == now and all(
                self._is_measured(unit) and self._measured[unit.index].is_finite for unit in holding
            ):
                return True
        return math.isfinite(self.total(layers_scale, or_more=True))

    @as_plain
    def not_finite(self) -> list[str]:
        """The layers whose gradient, as `total` has last measured it, is not finite, in the order of
        backward; where there is none, such parameters of the rest."""
        layers = [
            unit.name
            for unit in reversed(self._units)
            if (measured := self._measured.get(unit.index)) is not None
            and not callable(measured.squares)
            and not math.isfinite(measured.squares)
        ]
        return layers or [
            f"'{slice.param.name}'"
            for slice, param in self._root.placed()
            if param.grad is not None and not math.isfinite(_squares(param.grad))
        ]

    @as_plain
    def dropped(self, unit: Unit) -> None:
        """Gradients of ``unit`` that are zero were dropped: the sum is what it was."""
        if unit.index in self._measured:
            self._note(unit, state=self._state(unit))

    def forget(self) -> None:
        """The gradients have been exchanged for others."""
        self._measured.clear()
        self._finite_root = None

    def _state(self, unit: Unit) -> _State:
        holders = tuple([param.grad is not None for param in unit.params])
        shard = self._store.shards[unit.index]
        return holders, shard.gradient._version, shard.sums._version

    def _note(self, unit: Unit, **known: Any) -> None:
        self._measured[unit.index] = replace(self._measured[unit.index], **known)

    def _held(self) -> tuple[list[Unit], list[torch.Tensor]]:
        """The layers that hold a gradient, and the root's gradients."""
        holding = [unit for unit in self._units if any(param.grad is not None for param in unit.params)]
        return holding, [param.grad for param in self._root.params if param.grad is not None]

    def _is_scaled(self, unit: Unit) -> bool:
        measured = self._measured.get(unit.index)
        if measured is None or measured.scaled is None or measured.scaled[0] != self._state(unit):
            return False
        return not self._is_lent(unit.index) and measured.scaled[1] == self._sample(unit)

    def _is_measured(self, unit: Unit) -> bool:
        return not self._is_lent(unit.index) and self._seems_unwritten(unit)

    def _seems_unwritten(self, unit: Unit) -> bool:
        """Whether a gradient that was measured was not written since, as far as can be seen."""
        measured = self._measured.get(unit.index)
        if measured is None or measured.state != self._state(unit) or measured.sample is None:
            return False
        return measured.sample == self._sample(unit)

    def _check_unwritten(self, unit: Unit, squares: float) -> None:
        """Raise RuntimeError if the gradient of ``unit``, whose sum on the host is ``squares`` now, was
        written while a clipping coefficient was still to be applied to it."""
        measured = self._measured.get(unit.index)
        if measured is None or measured.sample is None:
            return
        state = self._state(unit)
        # of a sum that is NaN the step is refused anyway
        is_same_sum = measured.on_host is None or measured.on_host == squares or math.isnan(squares)
        # a gradient that was dropped is missing in the sum
        was_written = state[1:] != measured.state[1:] or (state == measured.state and not is_same_sum)
        if was_written or measured.sample != self._sample(unit):
            raise RuntimeError(
                "gradients were written after clip_grad_norm_, whose coefficient step() applies when it "
                "reads them: write gradients before clipping"
            )

    def _sample(self, unit: Unit) -> bytes:
        """The first four bytes of each parameter's gradient, and four bytes at even distances; nothing of a
        meta tensor."""
        shard, (offsets, indices) = self._store.shards[unit.index], self._begins(unit)
        if shard.gradient.is_meta:
            return b""
        sample = _spread(shard.gradient, offsets)
        has_sums = shard.has(SUMS) and any(map(is_summed, unit.params))
        return sample + _spread(shard.sums, indices) if has_sums else sample

    def _begins(self, unit: Unit) -> tuple[np.ndarray, np.ndarray]:
        """Where the gradients of parameters begin, and their sums, in units of four bytes."""
        if unit.index not in self._where:
            slices = [slice for slice in unit.layout.trainable if slice.numel]
            begins = [slice.offset // 4 for slice in slices], [slice.index for slice in slices]
            self._where[unit.index] = np.array(begins[0], np.int64), np.array(begins[1], np.int64)
        return self._where[unit.index]

    def _measure_on_host(self, units: Sequence[Unit]) -> dict[int, float]:
        """By unit, the sum of squares of its gradient in host memory; 0 on the virtual backend."""
        totals = dict.fromkeys([unit.index for unit in units], 0.0)

        def measure(index: int, gradients: Sequence[torch.Tensor]) -> None:
            totals[index] = math.fsum(native.sum_squares(array(grad)) for grad in gradients)

        for unit in units:
            gradients = [param.grad for param in unit.params if param.grad is not None]
            op = ops.norm(unit.index, sum(grad.nbytes for grad in gradients))
            self._issuer.issue(op, partial(measure, unit.index, gradients))
        if units:
            self._issuer.wait(ops.squares(unit.index) for unit in units)
        return totals

    def _keep_sum(self, unit: Unit, on_host: float) -> None:
        """The host has taken the sum of ``unit`` again."""
        squares = on_host
        if self._seems_unwritten(unit):
            known = self._measured[unit.index].squares
            assert not callable(known), "it has landed"
            (known,) = _read([known])
            squares = known if math.isclose(known, on_host, rel_tol=ROUNDING) else on_host
        self._measured[unit.index] = _Measured(squares, self._state(unit), self._sample(unit), on_host)


def sum_squares(
    layout: Layout, gradient: torch.Tensor, used: Sequence[bool], elements: range | None = None
) -> torch.Tensor:
    """The sum of squares (an fp32 scalar) of the ``used`` parameters' gradients in a flat uint8 buffer; of
    these ``elements`` of the unit's state, if they are given."""
    # padding between stretches may hold anything
    stretches = layout.stretches(used)
    if elements is not None:
        stretches = [own for stretch in stretches if (own := within(stretch, elements)).numel]
    found = [_squares(stretch.view(gradient)) for stretch in stretches]
    if not found:
        return torch.zeros((), dtype=torch.float32, device=gradient.device)
    total, *others = found
    for squares in others:
        total += squares
    return total


def _spread(buffer: torch.Tensor, begins: np.ndarray) -> bytes:
    """Elements of four bytes of a buffer: one of every 1024, at most some 4096, and those at ``begins``."""
    elements = buffer.numpy().view(np.int32)
    sample: bytes = elements[:: max(1024, len(elements) // 4096)].tobytes() + elements[begins].tobytes()
    return sample


def _squares(gradient: torch.Tensor) -> torch.Tensor:
    """The sum of squares as an fp32 scalar.

    On the CPU taken in rows, whose sums are then added up: there PyTorch adds up one fp32 norm from beginning
    to end, which is 1 % off for 10^8 elements. A GPU adds up in a tree.
    """
    flat = (gradient.to_dense() if gradient.is_sparse else gradient).flatten()
    if flat.is_cuda or flat.numel() < ROW:
        norm: torch.Tensor = torch.linalg.vector_norm(flat, dtype=torch.float32)
        return norm.square()
    in_rows = flat.numel() // ROW * ROW
    rows = torch.linalg.vector_norm(flat[:in_rows].view(-1, ROW), dim=1, dtype=torch.float32)
    rest = torch.linalg.vector_norm(flat[in_rows:], dtype=torch.float32)
    squares: torch.Tensor = rows.square().sum() + rest.square()
    return squares


def _read(squares: Sequence[torch.Tensor | float]) -> list[float]:
    """Their values, those on the device brought over in one copy; 0 on the virtual backend, without any."""
    squares = [0.0 if isinstance(value, torch.Tensor) and value.is_meta else value for value in squares]
    on_device = [value for value in squares if isinstance(value, torch.Tensor)]
    read = iter(torch.stack(on_device).tolist() if on_device else ())
    return [next(read) if isinstance(value, torch.Tensor) else value for value in squares]
