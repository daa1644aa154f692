"""Layers that are alike, run once.

[Note: recalled visits]
A plan runs the executor without data, though most layers are copies of one. What a visit of one of them
takes (time, bytes that come and go, bytes that stay for backward) depends on its structure and on the shapes
it is given alone. So each kind of visit is carried out once, on meta tensors and apart from the step, and
recalled from then on: the executor still issues every op, and the tensors that stay are still made.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from streamer.backends.operations import Cost, Operations
from streamer.backends.virtual import VirtualBackend
from streamer.engine.activations import Outputs, Run, Visit
from streamer.engine.ambient import Autocast
from streamer.engine.asked import Asked
from streamer.engine.backpropagation import Gradients
from streamer.engine.call import Call, Tensors
from streamer.engine.cut import Cut
from streamer.engine.executor import Executor
from streamer.engine.layer import StreamedLayer
from streamer.engine.saved import storages
from streamer.engine.tree import Rebuild, constants
from streamer.engine.unit import Unit
from streamer.plan.structure import Kind, structure_of
from streamer.plan.tracker import Tracker


@dataclass(frozen=True)
class _Forward:
    """A layer's forward: its outputs, cost, the most bytes on top of what was there, and those that stay
    beside the outputs."""

    outputs: list[Kind]
    rebuild: Rebuild
    cost: Cost
    rise: int
    kept: int


@dataclass(frozen=True)
class _Backward:
    """Its backward: for which parameters there are gradients, what it returns, cost, and the most bytes on
    top of what was there."""

    used: list[bool]
    returned: list[Kind | None]
    cost: Cost
    rise: int


@dataclass
class Recollection:
    """What visits of layers have taken. [Note: recalled visits]"""

    tracker: Tracker
    forwards: dict[Hashable, _Forward] = field(default_factory=dict)
    backwards: dict[Hashable, _Backward] = field(default_factory=dict)
    _structures: dict[int, Hashable] = field(default_factory=dict)

    def structure(self, unit: Unit) -> Hashable:
        """Equal for layers that compute alike."""
        if unit.index not in self._structures:
            self._structures[unit.index] = structure_of(unit)
        return self._structures[unit.index]

    def kind(self) -> type[Visit]:
        """Visits that recall. For `StreamedLayer.visit_as`."""

        class Recalled(_Recalled):
            recollection = self

        return Recalled


class _Recalled(Visit):
    recollection: Recollection

    def __init__(self, executor: Executor, call: Call, policy: type[Run], cut: Cut) -> None:
        super().__init__(executor, call, policy, cut)
        self._policy = policy
        self._runs = []
        self._kept: list[torch.Tensor] = []

    def run(self, inputs: Tensors, weights: torch.Tensor) -> Outputs:
        memory = self.recollection
        self._given = [Kind.of(tensor) for tensor in inputs]
        self._key = (
            self._policy,
            memory.structure(self.call.unit),
            tuple(self._given),
            tuple(constants(self.call.rebuild(inputs))),
            repr(self._cut),
            Autocast.now(self.executor.backend.device),
        )
        if self._key not in memory.forwards:
            memory.forwards[self._key] = self._measure_forward(weights)
        found = memory.forwards[self._key]
        self._count(found.cost, found.rise)
        if found.kept:
            self._kept.append(torch.empty(found.kept, dtype=torch.uint8, device="meta"))
        if not self.saves_inputs:
            # a graph that is kept holds what it was given
            self._kept += inputs
            self._release = self.executor.saved.hold(self, storages(self._kept))
        return [kind.make() for kind in found.outputs], found.rebuild

    def go_back(
        self,
        weights: torch.Tensor,
        into: torch.Tensor,
        inputs: Tensors,
        gradients: Gradients,
        asked: Sequence[Asked],
    ) -> tuple[list[bool], list[torch.Tensor | None]]:
        memory = self.recollection
        incoming = tuple(None if gradient is None else Kind.of(gradient) for gradient in gradients)
        key = (self._key, incoming, tuple(asked))
        if key not in memory.backwards:
            memory.backwards[key] = self._measure_backward(weights, into, incoming, asked)
        found = memory.backwards[key]
        self._count(found.cost, found.rise)
        self._kept.clear()
        return list(found.used), [None if kind is None else kind.make() for kind in found.returned]

    @property
    def _backend(self) -> VirtualBackend:
        backend = self.executor.backend
        assert isinstance(backend, VirtualBackend), "others have work to do"
        return backend

    def _count(self, cost: Cost, rise: int) -> None:
        self._backend.recall(cost)
        self.recollection.tracker.rise(rise)

    def _measure_forward(self, weights: torch.Tensor) -> _Forward:
        with _disable_current_modes():
            visit, inputs = self._apart()
            with Tracker() as tracker, Operations(self._backend.machine) as counter:
                outputs, rebuild = visit.run(inputs, weights)
            rise, cost = tracker.peak, counter.cost
            kinds = [Kind.of(output) for output in outputs]
            del outputs
            return _Forward(kinds, rebuild, cost, rise, kept=tracker.now)

    def _measure_backward(
        self,
        weights: torch.Tensor,
        into: torch.Tensor,
        incoming: tuple[Kind | None, ...],
        asked: Sequence[Asked],
    ) -> _Backward:
        with _disable_current_modes():
            visit, inputs = self._apart()
            gradients = [None if kind is None else kind.make() for kind in incoming]
            with Tracker() as tracker:
                outputs, _ = visit.run(inputs, weights)
                del outputs
                before = tracker.peak = tracker.now
                with Operations(self._backend.machine) as counter:
                    used, found = visit.go_back(
                        weights, into, inputs if self.saves_inputs else (), gradients, asked
                    )
                kinds = [None if gradient is None else Kind.of(gradient) for gradient in found]
            return _Backward(used, kinds, counter.cost, tracker.peak - before)

    def _apart(self) -> tuple[Visit, list[torch.Tensor]]:
        """A visit that does not belong to the step, and inputs for it."""
        executor: Any = _Apart(self.executor)
        return Visit(executor, self.call, self._policy, self._cut), [kind.make() for kind in self._given]


class _Apart:
    """An executor for a run that does not belong to the step: what it saves is not counted there."""

    def __init__(self, executor: Executor) -> None:
        self.backend, self.units, self.root = executor.backend, executor.units, executor.root
        self.sum_in_fp32 = executor.sum_in_fp32
        self.saved = _SavesNothing()


class _SavesNothing:
    def hold(self, owner: object, held: object) -> Callable[[], object]:
        return lambda: None


def recall_layers(executor: Executor, recollection: Recollection) -> None:
    """Let the layers of a model on the virtual backend recall their visits."""
    kind = recollection.kind()
    for unit in executor.units:
        layer = unit.module.forward
        assert isinstance(layer, StreamedLayer), "the model is wrapped"
        layer.visit_as(kind)
