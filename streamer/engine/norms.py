"""Squared norms of gradients, taken before they leave the device.

[Note: norms]
A unit's sum of squares is taken on the device while its gradient is in a slot, so that the global norm is
known when backward ends and costs no pass over memory. It stands for the host gradient only as long as
that is what left the device: where a second backward has added to it, where the user has written it or
dropped a part of it, a pass over host memory on the HOST lane takes it anew. Some writers do not tell
autograd (gradient scalers, collectives, ``.data``), so a sample of the gradient is compared too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

import streamer_native as native
from streamer.engine import op as ops
from streamer.engine.issuer import Issuer
from streamer.engine.unit import Unit
from streamer.memory.host import HostStore, array
from streamer.memory.layout import Layout


@dataclass(frozen=True)
class _Measured:
    squares: torch.Tensor | float  # a scalar on the device, or a number taken on the host
    state: _State
    sample: torch.Tensor | None = None  # of the host gradient, once that has landed


#: Which parameters hold a gradient, and how often the user has written the unit's host gradient.
_State = tuple[tuple[bool, ...], int]


class Norms:
    """Sums of squares of the gradients of all units. [Note: norms]"""

    def __init__(self, issuer: Issuer, units: Sequence[Unit], root: Unit, store: HostStore) -> None:
        self._issuer = issuer
        self._units = units
        self._root = root
        self._store = store
        self._measured: dict[int, _Measured] = {}

    def keep(self, unit: Unit, squares: torch.Tensor) -> None:
        """``squares``, as from `sum_squares`, belongs to the gradient that ``unit`` now holds."""
        self._measured[unit.index] = _Measured(squares, self._state(unit))

    def landed(self) -> None:
        """The gradients have arrived on the host: sample those whose squares were taken on the device."""
        for index, measured in self._measured.items():
            if measured.sample is None:
                self._measured[index] = replace(measured, sample=self._sample(self._units[index]))

    def drop(self, unit: Unit) -> None:
        """What was measured is not the whole gradient of ``unit``."""
        self._measured.pop(unit.index, None)

    def total(self, layers_scale: float) -> float:
        """The sum of squares of all gradients that are held, those of layers multiplied by ``layers_scale``
        first; NaN or Inf if one of them is."""
        holding = [unit for unit in self._units if any(param.grad is not None for param in unit.params)]
        self._measure_on_host([unit for unit in holding if not self._is_measured(unit)])
        layers = [self._measured[unit.index].squares for unit in holding]
        root = [_squares(param.grad) for param in self._root.params if param.grad is not None]
        return layers_scale**2 * _sum(layers) + _sum(root)

    def _state(self, unit: Unit) -> _State:
        holders = tuple(param.grad is not None for param in unit.params)
        return holders, self._store.shards[unit.index].gradient._version

    def _is_measured(self, unit: Unit) -> bool:
        measured = self._measured.get(unit.index)
        if measured is None or measured.state != self._state(unit) or measured.sample is None:
            return False
        return measured.sample.is_meta or torch.equal(measured.sample, self._sample(unit))

    def _sample(self, unit: Unit) -> torch.Tensor:
        """The first four bytes of each parameter's gradient, and four of every 4 KiB."""
        gradient = self._store.shards[unit.index].gradient.view(torch.int32)
        firsts = [slice.offset // 4 for slice in unit.layout.trainable if slice.numel]
        return torch.cat([gradient[::1024], gradient[firsts]])

    def _measure_on_host(self, units: Sequence[Unit]) -> None:
        totals: dict[int, float] = {}

        def measure(index: int, gradients: Sequence[torch.Tensor]) -> None:
            # the kernels have no fp16
            widened = (grad.float() if grad.dtype == torch.float16 else grad for grad in gradients)
            totals[index] = math.fsum(native.sum_squares(array(grad)) for grad in widened)

        for unit in units:
            gradients = [param.grad for param in unit.params if param.grad is not None]
            op = ops.norm(unit.index, sum(grad.nbytes for grad in gradients))
            self._issuer.issue(op, partial(measure, unit.index, gradients))
        if units:
            self._issuer.wait(ops.squares(unit.index) for unit in units)
        for unit in units:
            # on the virtual backend nothing was measured
            squares = totals.get(unit.index, 0.0)
            self._measured[unit.index] = _Measured(squares, self._state(unit), self._sample(unit))


def sum_squares(layout: Layout, gradient: torch.Tensor, used: Sequence[bool]) -> torch.Tensor:
    """The sum of squares (an fp32 scalar) of the ``used`` parameters' gradients in a flat uint8 buffer."""
    total = torch.zeros((), dtype=torch.float32, device=gradient.device)
    for dtype, start, stop in layout.runs(used):
        # padding between runs may hold anything
        total += torch.linalg.vector_norm(gradient[start:stop].view(dtype), dtype=torch.float32).square()
    return total


def _squares(gradient: torch.Tensor) -> torch.Tensor:
    dense = gradient.to_dense() if gradient.is_sparse else gradient
    norm: torch.Tensor = torch.linalg.vector_norm(dense, dtype=torch.float32)
    return norm.square()


def _sum(squares: Sequence[torch.Tensor | float]) -> float:
    """Their sum, those on the device brought over in one copy."""
    on_device = [value for value in squares if isinstance(value, torch.Tensor)]
    values: list[float] = torch.stack(on_device).tolist() if on_device else []
    return math.fsum([*values, *(value for value in squares if not isinstance(value, torch.Tensor))])
