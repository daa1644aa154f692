"""Squared norms of gradients, taken before they leave the device.

[Note: norms]
A unit's sum of squares is taken on the device while its gradient is in a slot, so that the global norm is
known when backward ends and costs no pass over memory. It stands for the host gradient only as long as
that is what left the device: where a second backward has added to it, where the user has written it or
dropped a part of it, a pass over host memory on the HOST lane takes it anew.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

import streamer_native as native
from streamer.engine import op as ops
from streamer.engine.issuer import Issuer
from streamer.engine.unit import Unit
from streamer.memory.host import HostStore, array
from streamer.memory.layout import Layout


@dataclass(frozen=True)
class _Measured:
    squares: torch.Tensor  # a scalar on the device
    holders: tuple[bool, ...]
    version: int


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
        version = self._store.shards[unit.index].gradient._version
        self._measured[unit.index] = _Measured(squares, _holders(unit), version)

    def drop(self, unit: Unit) -> None:
        """What was measured is not the whole gradient of ``unit``."""
        self._measured.pop(unit.index, None)

    def total(self, layers_scale: float) -> float:
        """The sum of squares of all gradients that are held, those of layers multiplied by ``layers_scale``
        first; NaN or Inf if one of them is."""
        on_device: list[torch.Tensor] = []
        of_root: list[torch.Tensor] = []
        on_host: dict[int, float] = {}
        for unit in self._units:
            holders = _holders(unit)
            if not any(holders):
                continue
            measured = self._measured.get(unit.index)
            version = self._store.shards[unit.index].gradient._version
            if measured is not None and (measured.holders, measured.version) == (holders, version):
                on_device.append(measured.squares)
            else:
                self._measure_on_host(unit, on_host)
        for param in self._root.params:
            if param.grad is not None:
                grad = param.grad.to_dense() if param.grad.is_sparse else param.grad
                of_root.append(torch.linalg.vector_norm(grad, dtype=torch.float32).square())
        if on_host:
            self._issuer.wait(ops.squares(index) for index in on_host)
        values = torch.stack([*on_device, *of_root]).tolist() if on_device or of_root else []
        layers = math.fsum(values[: len(on_device)]) + math.fsum(on_host.values())
        return layers_scale**2 * layers + math.fsum(values[len(on_device) :])

    def _measure_on_host(self, unit: Unit, totals: dict[int, float]) -> None:
        gradients = [param.grad for param in unit.params if param.grad is not None]

        def measure() -> None:
            # the kernels have no fp16
            widened = (grad.float() if grad.dtype == torch.float16 else grad for grad in gradients)
            totals[unit.index] = math.fsum(native.sum_squares(array(grad)) for grad in widened)

        totals[unit.index] = math.nan
        self._issuer.issue(ops.norm(unit.index, sum(grad.nbytes for grad in gradients)), measure)


def sum_squares(layout: Layout, gradient: torch.Tensor, used: Sequence[bool]) -> torch.Tensor:
    """The sum of squares (an fp32 scalar) of the ``used`` parameters' gradients in a flat uint8 buffer."""
    total = torch.zeros((), dtype=torch.float32, device=gradient.device)
    for dtype, start, stop in layout.runs(used):
        # padding between runs may hold anything
        total += torch.linalg.vector_norm(gradient[start:stop].view(dtype), dtype=torch.float32).square()
    return total


def _holders(unit: Unit) -> tuple[bool, ...]:
    return tuple(param.grad is not None for param in unit.params)
