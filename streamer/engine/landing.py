"""``update="backward"``: a layer is updated as soon as its gradient has landed, and no gradient is kept.

[Note: landing]
Gradients pass through a ring of a few host buffers. Each is used up by the update that it starts, so host
memory holds a few layers' gradients whatever the depth; there is nothing left to clip, to add to or to look
at when backward ends. The root unit's gradients are those of a usual step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch

from streamer.engine import op as ops
from streamer.engine.issuer import Issuer
from streamer.engine.unit import Unit

#: Host buffers that gradients pass through: one fills, one is read, two even out what varies.
RING = 4

#: An update of one unit: what does it, given the unit's gradient (flat uint8), and the bytes that this moves.
Update = tuple[Callable[[torch.Tensor], None], int]
#: Asked for the update of a unit, given which of its trainable parameters have a gradient.
Updater = Callable[[Unit, Sequence[bool]], Update | None]


class Landing:
    """The ring, and who updates from it. [Note: landing]"""

    def __init__(self, issuer: Issuer, ring: Sequence[torch.Tensor]) -> None:
        #: names of layers whose update was skipped because their gradient was not finite
        self.not_finite: list[str] = []
        self._is_whole = True
        self._issuer = issuer
        self._ring = ring
        self._next = 0
        self._updaters: list[weakref.WeakMethod[Updater]] = []
        self._updated: set[int] = set()

    def add_updater(self, updater: Updater) -> None:
        """Ask ``updater``, a method, for updates as long as its object lives."""
        self._updaters.append(weakref.WeakMethod(updater))

    def check(self, unit: Unit) -> None:
        """Raise RuntimeError if a gradient of ``unit`` cannot be taken now."""
        self._updaters = [updater for updater in self._updaters if updater() is not None]
        if not self._updaters:
            raise RuntimeError(
                "update='backward' needs its optimizer before backward: make "
                "streamer.AdamW(model.parameters(), ...) after streamer.wrap"
            )
        if unit.index in self._updated:
            raise RuntimeError(
                f"layer '{unit.name}' was updated already since the last optimizer.step(): with "
                "update='backward' a layer takes part once in each backward, and a step follows each (or "
                "zero_grad, where backward has failed); wrap with update='step' to add several gradients up"
            )

    def land(self, unit: Unit, slot: int, source: torch.Tensor, used: Sequence[bool]) -> None:
        """Page out the gradient in gradient slot ``slot``, which ``source`` is, and update from it."""
        place, self._next = self._next, (self._next + 1) % len(self._ring)
        nbytes = unit.layout.grad_nbytes
        landed = self._ring[place][:nbytes]
        stage = ops.stage_grad(unit.index, slot, place, nbytes)
        self._issuer.issue(stage, lambda: self._issuer.backend.copy(landed, source[:nbytes]))
        self._updated.add(unit.index)
        self._is_whole = False
        for reference in self._updaters:
            updater = reference()
            update = None if updater is None else updater(unit, used)
            if update is not None:
                work, moved = update
                self._issuer.issue(ops.step_on_landing(unit.index, place, moved), _bound(work, landed))

    def finish_backward(self) -> None:
        """Backward has gone through all layers that it was to go through."""
        self._is_whole = True

    def zero_grad(self) -> None:
        """Gradients are dropped: after a backward that has failed, the next one begins anew."""
        if not self._is_whole:
            self._updated.clear()
            self._is_whole = True

    def next_step(self) -> list[str]:
        """A step has been made; the names of layers that were not updated since the last one."""
        self._updated.clear()
        skipped, self.not_finite = self.not_finite, []
        return skipped


def _bound(work: Callable[[torch.Tensor], None], gradient: torch.Tensor) -> Callable[[], None]:
    return lambda: work(gradient)
