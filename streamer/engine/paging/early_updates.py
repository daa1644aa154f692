"""The optimizers that update layers in backward (``update="backward"``), and the steps that follow.

A gradient is used up by the update that it starts, so there is nothing left to clip, to add to or to look at
when backward ends. The root unit's gradients stay until `step`, as usual; but to write them before `step`
(to clip them, say) would not reach the layers, so it is refused.
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
    """The update of a unit's shard, or of a chunk of its state, from its ``gradient`` (flat uint8), of which
    other ranks know the rest if it was ``reduced``."""

    def __call__(self, shard: HostShard, *, gradient: torch.Tensor, reduced: Reduced | None) -> None: ...


class Update(NamedTuple):
    """An update of one unit."""

    work: UpdateWork
    #: the bytes of host memory that ``work`` moves
    nbytes: int
    #: called before the update is issued: counts the step
    begin: Callable[[], None]


#: Asked for the update of a unit, given which of its trainable parameters have a gradient; counts no step.
Updater = Callable[[Unit, Sequence[bool]], Update | None]


class EarlyUpdates:
    """The updates of layers in backward, between two steps of their optimizers."""

    def __init__(self) -> None:
        #: how many steps have been made
        self.number = 0
        #: the names of layers whose update was skipped because their gradient was not finite, each with the
        #: number of steps made when it arrived; updates add to them as they run
        self.not_finite: deque[tuple[int, str]] = deque()
        #: whether the last backward has: not while one is running, nor after one that has failed
        self._has_finished = True
        self._updaters: list[weakref.WeakMethod[Updater]] = []
        #: by unit, the updaters that have updated it since the last step of their optimizer
        self._updated: dict[int, set[weakref.WeakMethod[Updater]]] = {}
        #: what `next_step` has found
        self._found: list[tuple[int, str]] = []
        #: the numbers of the steps that were skipped, at least in part
        self._skipped: set[int] = set()

    def add(self, updater: Updater) -> None:
        """Ask ``updater``, a method, for the updates of units, as long as its object lives."""
        self._updaters.append(weakref.WeakMethod(updater))

    def check(self, unit: Unit) -> None:
        """Raise RuntimeError if a gradient of ``unit`` cannot be taken now."""
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

    def ask(self, unit: Unit, used: Sequence[bool]) -> list[Update]:
        """The updates of ``unit``, of whose trainable parameters those ``used`` have a gradient."""
        asked = {
            reference: update
            for reference in self._updaters
            if (updater := reference()) is not None and (update := updater(unit, used)) is not None
        }
        self._updated[unit.index] = {*asked}
        self._has_finished = False
        return [*asked.values()]

    def finish_backward(self) -> None:
        """Backward has gone through all layers that it was to go through."""
        self._has_finished = True

    def zero_grad(self) -> None:
        """Gradients are dropped: after a backward that has failed, the next one begins anew."""
        if not self._has_finished:
            self._updated.clear()
            self._has_finished = True

    def next_step(self, updater: Updater | None = None) -> list[str]:
        """The optimizer of ``updater`` has made a step, or all optimizers have; the names of layers that were
        found not to be updated since the last one."""
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
        """Of the steps that the last `next_step` has found to be skipped in part, and its own where
        ``step_too``, the number of those that were not counted yet."""
        # updates that run late belong to steps before the last
        steps = {number for number, _ in self._found} | ({self.number - 1} if step_too else set())
        new = steps - self._skipped
        self._skipped |= new
        return len(new)

    def skipped_since(self) -> int:
        """How many further ones were skipped since."""
        return len({number for number, _ in [*self.not_finite]} - self._skipped)
