"""Squared norms of gradients, taken before they leave the device.

[Note: norms]
A unit's sum of squares is taken on the device while its gradient is in a slot, or in the pass that adds
another gradient to it on the host. So the global norm is known when backward ends and costs no pass over
memory. The sum is valid until user code writes the gradient or drops a part of it: then a pass on the HOST
lane takes it again. The guard detects writes by functions of PyTorch. While user code holds the memory in
another way (``.data``, NumPy), the sum is taken again at each use. PyTorch does not count the writes of
collectives, so a few numbers of the gradient are compared too.

If a new sum differs from the known one by rounding alone, the known one stays. So reading a gradient changes
no bit of later results, and a rank that reads alone does not differ from the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

import streamer_native as native
from streamer.engine.guard import as_plain
from streamer.engine.paging.host_gradient import HostGradient
from streamer.engine.schedule import op as ops
from streamer.engine.schedule.hazards import Issuer
from streamer.engine.schedule.op import ROOT
from streamer.engine.unit import Unit
from streamer.store.layout import Layout
from streamer.store.shard import array
from streamer.store.shares import within

#: The number of elements in a row; the squares of a row are added up one after another.
ROW = 4096
#: The largest relative difference, due to rounding, between two fp32 sums of the same squares.
ROUNDING = 1e-5
#: The number of values of a gradient that are compared.
SAMPLE = 64

#: The sum of squares of a unit's gradient: on the device, on the host, or known when backward has ended.
Squares = torch.Tensor | float | Callable[[], float | torch.Tensor]


@dataclass
class _Measured:
    """The measurement of a unit's gradient."""

    squares: Squares
    #: the parameters that had a gradient then
    holding: list[bool]
    #: some numbers of the gradient, once it is on the host
    sample: bytes | None = None
    #: user code has written the gradient since; every write has made it smaller
    is_written: bool = False
    is_shrunk: bool = False
    #: user code held its memory when the sum was taken, and may have written it since
    is_aliased: bool = False


class Norms:
    """Sums of squares of the gradients of all units. [Note: norms]"""

    def __init__(
        self, issuer: Issuer, units: Sequence[Unit], root: Unit, held: Mapping[int, HostGradient]
    ) -> None:
        self._issuer = issuer
        self._units = units
        self._root = root
        self._held = held
        self._measured: dict[int, _Measured] = {}

    @as_plain
    def keep(self, unit: Unit, squares: Squares | None) -> None:
        """``squares`` belong to the present gradient of ``unit``; None if they are not known."""
        self._measured.pop(unit.index, None)
        if squares is not None:
            self._measured[unit.index] = _Measured(squares, _holding(unit))

    @as_plain
    def arrived(self) -> None:
        """The gradients have arrived on the host."""
        for index, measured in self._measured.items():
            if measured.sample is None and index != ROOT:
                if callable(measured.squares):
                    measured.squares = measured.squares()
                measured.sample = self._sample(self._units[index])

    def written(self, unit: Unit, *, shrinks: bool = False) -> None:
        """User code has written the gradient of ``unit``, or has multiplied it by a number from -1 to 1."""
        if (measured := self._measured.get(unit.index)) is not None:
            measured.is_shrunk = shrinks and (measured.is_shrunk or not measured.is_written)
            measured.is_written = True
            measured.sample = self._sample(unit)

    @as_plain
    def dropped(self, unit: Unit) -> None:
        """Gradients of ``unit`` that are zero were dropped: the sum is what it was."""
        if (measured := self._measured.get(unit.index)) is not None:
            measured.holding = _holding(unit)

    def forget(self) -> None:
        """The gradients were exchanged for others."""
        self._measured.clear()

    @as_plain
    def total(self, *, or_more: bool = False) -> float:
        """The sum of squares of all present gradients, without the pending factor; NaN or Inf if one of them
        is. With ``or_more``, the sum from before the gradients were reduced in size is enough."""
        holding = [unit for unit in (*self._units, self._root) if any(_holding(unit))]
        self._measure([unit for unit in holding if not self._is_known(unit, or_more=or_more)])
        found = [self._measured[unit.index] for unit in holding]
        values = values_of([each.squares for each in found])
        for each, value in zip(found, values, strict=True):
            each.squares = value  # so that no other call reads the device
        return math.fsum(values)

    def is_finite(self) -> bool:
        """Whether all present gradients are finite."""
        return math.isfinite(self.total(or_more=True))

    @as_plain
    def not_finite(self) -> list[str]:
        """The layers with a non-finite gradient in the last `total`, in the order of backward. If there are
        none, the parameters outside of layers with a non-finite gradient."""
        layers = [
            unit.name
            for unit in reversed(self._units)
            if (measured := self._measured.get(unit.index)) is not None
            and isinstance(measured.squares, float)
            and not math.isfinite(measured.squares)
        ]
        return layers or [
            f"'{slice.param.name}'"
            for slice, param in self._root.placed()
            if param.grad is not None and not math.isfinite(_squares(param.grad))
        ]

    def _is_known(self, unit: Unit, *, or_more: bool = False) -> bool:
        """Whether the sum is still that of the gradient or, with ``or_more``, not below it."""
        measured = self._measured.get(unit.index)
        if measured is None or measured.holding != _holding(unit) or measured.is_aliased:
            return False
        if self._held[unit.index].is_aliased():
            return False
        if measured.is_written and not (or_more and measured.is_shrunk):
            return False
        return unit is self._root or measured.sample == self._sample(unit)

    def _sample(self, unit: Unit) -> bytes:
        """Numbers of the gradient at even distances; none of a meta tensor."""
        found = b""
        for memory in self._held[unit.index].memories():
            if memory.device.type == "cpu":
                elements = memory.numpy().view(np.int32)
                found += elements[:: max(1, len(elements) // SAMPLE)].tobytes()
        return found

    def _measure(self, units: Sequence[Unit]) -> None:
        """Take the sums of ``units`` again: of layers in host memory, 0 on the virtual backend."""
        totals = dict.fromkeys([unit.index for unit in units], 0.0)

        def measure(index: int, gradients: Sequence[torch.Tensor]) -> None:
            totals[index] = math.fsum(native.sum_squares(array(grad)) for grad in gradients)

        layers = [unit for unit in units if unit is not self._root]
        for unit in layers:
            gradients = [param.grad for param in unit.params if param.grad is not None]
            op = ops.norm(unit.index, sum(grad.nbytes for grad in gradients))
            self._issuer.issue(op, partial(measure, unit.index, gradients))
        if layers:
            self._issuer.wait(ops.squares(unit.index) for unit in layers)
        for unit in units:
            known, found = self._measured.get(unit.index), _Measured(totals[unit.index], _holding(unit))
            if unit is self._root:
                grads = [param.grad for param in unit.params if param.grad is not None]
                if not grads[0].is_meta:
                    found.squares = torch.stack([*map(_squares, grads)]).sum(dtype=torch.float64)
            elif known is not None and known.holding == found.holding:
                (squares,) = values_of([known.squares])
                if math.isclose(squares, totals[unit.index], rel_tol=ROUNDING):
                    found.squares = squares
            found.sample, found.is_aliased = self._sample(unit), self._held[unit.index].is_aliased()
            self._measured[unit.index] = found


def _holding(unit: Unit) -> list[bool]:
    """Which parameters of ``unit`` have a gradient."""
    return [param.grad is not None for param in unit.params]


def sum_squares(
    layout: Layout, gradient: torch.Tensor, used: Sequence[bool], elements: range | None = None
) -> torch.Tensor:
    """The sum of squares (an fp32 scalar) of the ``used`` parameters' gradients in a flat uint8 buffer, of
    the ``elements`` of the unit's state alone if that is not None."""
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


def _squares(gradient: torch.Tensor) -> torch.Tensor:
    """The sum of squares as an fp32 scalar.

    On the CPU it is taken in rows, and the sums of the rows are added up: PyTorch adds up one fp32 norm from
    beginning to end there, which is 1 % off for 10^8 elements. A GPU adds up in a tree.
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


def values_of(squares: Sequence[Squares]) -> list[float]:
    """The values of the sums. Those on the device are copied at once; on the virtual backend they are 0."""
    known = [value() if callable(value) else value for value in squares]
    on_device = [value for value in known if isinstance(value, torch.Tensor) and not value.is_meta]
    read = iter(torch.stack(on_device).tolist() if on_device else ())
    return [
        float(value) if not isinstance(value, torch.Tensor) else 0.0 if value.is_meta else next(read)
        for value in known
    ]
