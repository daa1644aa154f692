"""The optimizers that update layers in backward (``update="backward"``), and the steps that follow.

An update consumes its gradient, so when backward ends there is nothing left to clip, to accumulate or to
read. The root unit's gradients stay until `step`, as usual. A write to them before `step` (clipping, for
example) would not affect the layers, so it is refused.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch

from streamer.engine.paging.across_ranks import Reduced
from streamer.engine.unit import Unit
from streamer.store.shard import HostShard


class UpdateWork(Protocol):
    """The update of a unit's shard, or of a chunk of its state, from its ``gradient`` (flat uint8). If the
    gradient was ``reduced``, other ranks have the other parts."""

    def __call__(self, shard: HostShard, *, gradient: torch.Tensor, reduced: Reduced | None) -> None: ...


class Update(NamedTuple):
    """An update of one unit."""

    work: UpdateWork
    #: the bytes of host memory that ``work`` moves
    nbytes: int
    #: called before the update is issued: counts the step
    begin: Callable[[], None]


#: Returns the update of a unit; the second argument tells which of its trainable parameters have a gradient.
#: Counts no step.
Updater = Callable[[Unit, Sequence[bool]], Update | None]


class EarlyUpdates:
    """The updates of layers in backward, between two steps of their optimizers."""

    def __init__(self) -> None:
        #: the number of steps so far
        self.number = 0
        #: the names of layers whose update was skipped because of a non-finite gradient, each with the number
        #: of steps at the time of the gradient; running updates append to it
        self.not_finite: deque[tuple[int, str]] = deque()
        #: whether the last backward has finished: not during a backward, nor after a failed one
        self._has_finished = True
        self._updaters: list[weakref.WeakMethod[Updater]] = []
        #: by unit, the updaters that have updated it since the last step of their optimizer
        self._updated: dict[int, set[weakref.WeakMethod[Updater]]] = {}
        #: the result of the last `next_step`
        self._found: list[tuple[int, str]] = []
        #: the numbers of the steps that were skipped, at least in part
        self._skipped: set[int] = set()

    def add(self, updater: Updater) -> None:
        """Use ``updater``, a method, for the updates of units, as long as its object lives."""
        self._updaters.append(weakref.WeakMethod(updater))

    def check(self, unit: Unit) -> None:
        """Raise RuntimeError if a gradient of ``unit`` cannot be taken now."""
        self._updaters = [updater for updater in self._updaters if updater() is not None]
        if not self._updaters:
            raise RuntimeError(
                "update='backward' needs its optimizer before backward: create "
                "streamer.AdamW(model.parameters(), ...) after streamer.wrap"
            )
        # an optimizer that is gone or was replaced makes no more steps
        used = [True] * len(unit.trainable)
        updaters = [updater() for updater in self._updated.get(unit.index, ())]
        if any(updater is not None and updater(unit, used) is not None for updater in updaters):
            raise RuntimeError(
                f"layer '{unit.name}' was updated already since the last step() of its optimizer: with "
                "update='backward' a layer takes part once in each backward, and a step of each optimizer "
                "follows (or zero_grad, where backward has failed); wrap with update='step' to add several "
                "gradients up"
            )

    def ask(self, unit: Unit, used: Sequence[bool]) -> list[Update]:
        """The updates of ``unit``. ``used`` tells which of its trainable parameters have a gradient."""
        updates = {
            reference: update
            for reference in self._updaters
            if (updater := reference()) is not None and (update := updater(unit, used)) is not None
        }
        self._updated[unit.index] = {*updates}
        self._has_finished = False
        return [*updates.values()]

    def finish_backward(self) -> None:
        """Backward has finished all its layers."""
        self._has_finished = True

    def zero_grad(self) -> None:
        """Gradients are dropped: after a failed backward, the next one starts afresh."""
        if not self._has_finished:
            self._updated.clear()
            self._has_finished = True

    def next_step(self, updater: Updater | None = None) -> list[str]:
        """The optimizer of ``updater`` has taken a step, or all optimizers have. Returns the names of the
        layers whose update was skipped since the last one."""
        if updater is None:
            self._updated.clear()
        else:
            for updaters in self._updated.values():
                updaters.discard(weakref.WeakMethod(updater))
        self.number += 1
        self._found = []
        while self.not_finite:
            self._found.append(self.not_finite.popleft())
        return [name for _, name in self._found]

    def newly_skipped(self, *, step_too: bool) -> int:
        """The number of partly skipped steps that were not counted yet: those found by the last `next_step`
        and, with ``step_too``, its own step."""
        # updates that run late belong to steps before the last
        steps = {number for number, _ in self._found} | ({self.number - 1} if step_too else set())
        new = steps - self._skipped
        self._skipped |= new
        return len(new)

    def skipped_since(self) -> int:
        """The number of further steps skipped since then."""
        return len({number for number, _ in [*self.not_finite]} - self._skipped)
