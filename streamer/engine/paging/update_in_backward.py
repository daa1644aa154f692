"""``update="backward"``: a layer is updated as soon as its gradient has landed, and no gradient is kept.

[Note: landing]
Gradients pass through a ring of a few host buffers. Each is used up by the update that it starts, so host
memory holds a few layers' gradients whatever the depth; there is nothing left to clip, to add to or to look
at when backward ends. The root unit's gradients stay until `step`, as usual; but to write them before `step`
(to clip them, say) would not reach the layers, so it is refused.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial

import torch

from streamer.engine.paging.across_ranks import AcrossRanks, Reduced
from streamer.engine.paging.gradient_pipeline import Landing, Updater
from streamer.engine.paging.gradients import Gradients, Squares
from streamer.engine.paging.unit import Unit
from streamer.engine.paging.weights import Weights
from streamer.engine.schedule import op as ops
from streamer.engine.schedule.hazards import Issuer
from streamer.engine.tensors.guarded import as_plain
from streamer.memory.host import HostStore
from streamer.torch_private import storage_id

#: Host buffers that gradients pass through: one fills, one is read, two even out what varies.
RING = 4


class UpdateInBackward(Landing):
    """The ring of host buffers, and the optimizers that update layers from it. [Note: landing]"""

    keeps_gradients = False

    def __init__(
        self,
        issuer: Issuer,
        gradients: Gradients,
        weights: Weights,
        ring: Sequence[torch.Tensor],
        across: AcrossRanks | None,
        store: HostStore,
    ) -> None:
        self._across = across
        self._store = store
        super().__init__()
        #: not while a backward is running, nor after one that has failed
        self._backward_completed = True
        self._issuer = issuer
        self._gradients = gradients
        self._weights = weights
        self._ring = ring
        self._next = 0
        self._updaters: list[weakref.WeakMethod[Updater]] = []
        #: by unit, the updaters that have updated it since the last step of their optimizer
        self._updated: dict[int, set[weakref.WeakMethod[Updater]]] = {}
        #: what `next_step` has told
        self._told: list[tuple[int, str]] = []
        #: the numbers of the steps that were skipped, at least in part
        self._skipped: set[int] = set()
        #: by a parameter of the root, its gradient since the last step
        self._of_root: dict[torch.Tensor, torch.Tensor] = {}
        #: by the `_counter` of a root gradient, its version after autograd's last write
        self._written: dict[int, int] = {}

    def add_updater(self, updater: Updater) -> None:
        self._updaters.append(weakref.WeakMethod(updater))

    def check(self, unit: Unit) -> None:
        self._updaters = [updater for updater in self._updaters if updater() is not None]
        if not self._updaters:
            raise RuntimeError(
                "update='backward' needs its optimizer before backward: make "
                "streamer.AdamW(model.parameters(), ...) after streamer.wrap"
            )
        # an optimizer that is gone, or that another one has succeeded, makes no step any more
        used = [True] * len(unit.trainable)
        updaters = [updater() for updater in self._updated.get(unit.index, ())]
        if any(updater is not None and updater(unit, used) is not None for updater in updaters):
            raise RuntimeError(
                f"layer '{unit.name}' was updated already since the last step() of its optimizer: with "
                "update='backward' a layer takes part once in each backward, and a step of each optimizer "
                "follows (or zero_grad, where backward has failed); wrap with update='step' to add several "
                "gradients up"
            )

    def land(self, unit: Unit, slot: int, used: Sequence[bool], squares: Squares) -> bool:
        # all are asked before anything is issued: where one raises, the layer is as it was
        asked = {
            reference: update
            for reference in self._updaters
            if (updater := reference()) is not None and (update := updater(unit, used)) is not None
        }
        self._weights.begin_flight(unit)
        number, self._next = self._next, (self._next + 1) % len(self._ring)
        place = ops.staging(number)
        share = self._store.shards[unit.index].updated.gradient
        landed, source = self._ring[number], self._gradients.in_slot(slot)[share]
        offload = ops.offload_grad(unit.index, slot, place, source.numel())
        self._issuer.issue(offload, lambda: self._issuer.backend.copy(landed[share], source))
        reduced = squares if isinstance(squares, Reduced) else None
        self._updated[unit.index] = {*asked}
        self._backward_completed = False
        for update in asked.values():
            update.begin()
            whole = partial(update.work, gradient=landed, reduced=reduced)
            self._weights.update(unit, whole, update.nbytes, place)
        if self._across is not None:
            self._across.after_update(unit)
        return True

    @as_plain
    def added(self, param: torch.Tensor) -> None:
        assert param.grad is not None, "this is called afterwards"
        self._of_root[param] = param.grad
        self._written[_counter(param.grad)] = param.grad._version

    def finish_backward(self) -> None:
        self._backward_completed = True

    def zero_grad(self) -> None:
        # after a backward that has failed, the next one begins anew
        self._forget_root()
        if not self._backward_completed:
            self._updated.clear()
            self._backward_completed = True

    @as_plain
    def check_unwritten(self) -> None:
        for param, gradient in self._of_root.items():
            was_written = self._written[_counter(gradient)] != gradient._version
            if param.grad is not None and (was_written or param.grad is not gradient):
                raise RuntimeError(
                    "gradients were written (by clip_grad_norm_?) between backward and step(), but "
                    "update='backward' has updated the layers before: wrap with update='step' to clip or "
                    "to write gradients"
                )

    def release(self) -> None:
        self._ring = ()

    def _forget_root(self) -> None:
        self._of_root.clear()
        self._written.clear()

    def next_step(self, updater: Updater | None = None) -> list[str]:
        self._forget_root()
        if updater is None:
            self._updated.clear()
        else:
            for updaters in self._updated.values():
                updaters.discard(weakref.WeakMethod(updater))
        self.number += 1
        self._told = []
        while self.not_finite:
            self._told.append(self.not_finite.popleft())
        return [name for _, name in self._told]

    def newly_skipped(self, *, step_too: bool) -> int:
        # updates that run late tell of steps before the last
        steps = {number for number, _ in self._told} | ({self.number - 1} if step_too else set())
        new = steps - self._skipped
        self._skipped |= new
        return len(new)

    def skipped_since(self) -> int:
        return len({number for number, _ in [*self.not_finite]} - self._skipped)


def _counter(gradient: torch.Tensor) -> int:
    """What tells gradients with different counts of writes apart: views of one buffer share theirs."""
    return id(gradient) if gradient.is_sparse else storage_id(gradient)
