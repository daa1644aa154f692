"""What happens to a layer's gradient between its backward and its update: fill, reduce, measure, land.

Layer 1 goes backward in weight slot 1 and gradient slot 0, as its ops print (unit, kind, slot):

    1B@1               fill, reduce and measure, on the device
    1OFFLOAD_GRAD@0    land, in host memory

- *Fill*: the layer's backward writes the gradients of its parameters into a gradient slot.
- *Reduce*: one process has the whole gradient already. Several ranks average theirs: [Note: ranks].
- *Measure*: the sum of squares is taken while the gradient is on the device: [Note: norms].
- *Land*: the gradient is copied to host memory. `UpdateInStep` keeps it there, where ``p.grad`` shows it
  until ``optimizer.step``; `UpdateInBackward` has the layer updated from it at once.

The root unit's gradient does not pass through `GradientPipeline`: autograd fills its buffer, clipping
measures it, and `Gradients.offload_root` copies it to the host in `step`. Several ranks average it where
backward ends.
"""

from __future__ import annotations

import abc
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch

from streamer.engine.paging.across_ranks import AcrossRanks, Reduced
from streamer.engine.paging.gradients import Gradients, Squares
from streamer.engine.paging.norms import Norms, sum_squares
from streamer.engine.paging.unit import Unit
from streamer.engine.schedule.hazards import Issuer
from streamer.memory.host import HostShard


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


class Landing(abc.ABC):
    """What becomes of a layer's gradient when it leaves the device.

    ``keeps_gradients`` says whether ``p.grad`` shows the gradients of layers between backward and step.
    """

    keeps_gradients: bool

    def __init__(self) -> None:
        #: how many steps have been made
        self.number = 0
        #: the names of layers whose update was skipped because their gradient was not finite, each with the
        #: number of steps made when it landed; updates add to them as they run
        self.not_finite: deque[tuple[int, str]] = deque()

    @abc.abstractmethod
    def land(self, unit: Unit, slot: int, used: Sequence[bool], squares: Squares) -> bool:
        """Page out the gradient in gradient slot ``slot``. ``used`` says which trainable parameters have one,
        ``squares`` is its sum of squares, or gives it when the gradient has landed. Returns whether the
        unit's update was issued."""

    # what follows concerns those that update layers before `step`

    def add_updater(self, updater: Updater) -> None:
        """Ask ``updater``, a method, for the updates of units, as long as its object lives."""
        return

    def check(self, unit: Unit) -> None:
        """Raise RuntimeError if a gradient of ``unit`` cannot be taken now."""
        return

    def added(self, param: torch.Tensor) -> None:
        """Autograd has added to the gradient of a parameter of the root unit."""
        return

    def check_unwritten(self) -> None:
        """Raise RuntimeError if gradients were written since backward, when layers were updated already."""
        return

    def finish_backward(self) -> None:
        """Backward has gone through all layers that it was to go through."""
        return

    def zero_grad(self) -> None:
        """Gradients are dropped."""
        return

    def next_step(self, updater: Updater | None = None) -> list[str]:
        """The optimizer of ``updater`` has made a step, or all optimizers have; the names of layers that were
        found not to be updated since the last one."""
        return []

    def newly_skipped(self, *, step_too: bool) -> int:
        """How many steps were skipped in part, of which that was not known, by what the last `next_step` has
        told; ``step_too`` is said where its own step was."""
        return int(step_too)

    def skipped_since(self) -> int:
        """How many further ones are known since."""
        return 0

    def release(self) -> None:
        """Give up the host buffers that gradients pass through."""
        return


class UpdateInStep(Landing):
    """``update="step"``: host memory keeps the gradient, or adds it to the one that is there."""

    keeps_gradients = True

    def __init__(self, gradients: Gradients, norms: Norms) -> None:
        super().__init__()
        self._gradients = gradients
        self._norms = norms

    def land(self, unit: Unit, slot: int, used: Sequence[bool], squares: Squares) -> bool:
        self._norms.keep(unit, self._gradients.offload(unit, slot, used, squares))
        return False


class GradientPipeline:
    """The steps that the gradient of every layer goes through, one after the other."""

    def __init__(
        self,
        issuer: Issuer,
        gradients: Gradients,
        norms: Norms,
        landing: Landing,
        across: AcrossRanks | None = None,
    ) -> None:
        self._across = across
        self._issuer = issuer
        self._gradients = gradients
        self._norms = norms
        self._landing = landing
        #: the sum of squares of a unit's gradients: fp32, on the device
        self.squares_of: Callable[[Unit, torch.Tensor, Sequence[bool]], torch.Tensor] = _squares_of

    def prepare(self, gradient: torch.Tensor) -> None:
        """A backward is about to fill ``gradient``, a gradient slot."""
        if self._issuer.backend.poison:
            # bytes of ones are NaN in every floating-point format
            gradient.fill_(255)

    def measure(self, unit: Unit, gradient: torch.Tensor, used: Sequence[bool]) -> torch.Tensor:
        """The sum of squares of ``gradient``, which has those of the trainable parameters that are ``used``;
        that of ranks is taken when they have averaged it. Part of the unit's backward."""
        if self._across is None:
            return self.squares_of(unit, gradient, used)
        for slice, is_used in zip(unit.layout.trainable, used, strict=True):
            if not is_used:
                slice.view(gradient).zero_()
        return gradient[:0]

    def land(
        self,
        unit: Unit,
        slot: int | None,
        gradient: torch.Tensor,
        used: Sequence[bool],
        squares: torch.Tensor,
    ) -> bool:
        """Reduce ``gradient``, in gradient slot ``slot`` (None where the unit trains nothing), and page it
        out. Returns whether the unit's update was issued."""
        if slot is None:
            return False
        if self._across is None:
            return any(used) and self._landing.land(unit, slot, used, squares)
        reduced = self._across.reduce(unit, slot, gradient, used)
        return any(reduced.wanted) and self._landing.land(unit, slot, reduced.wanted, reduced)

    def finish_backward(self) -> None:
        """Block until the gradients of all layers are in host memory."""
        self._gradients.finish()
        if self._across is not None:
            self._across.finish_backward(self._norms.dropped, self._landing.added)
        self._norms.landed()
        self._landing.finish_backward()


def _squares_of(unit: Unit, gradient: torch.Tensor, used: Sequence[bool]) -> torch.Tensor:
    return sum_squares(unit.layout, gradient, used)
