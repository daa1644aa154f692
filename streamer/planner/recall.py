"""A plan runs layers that are alike once, and reuses the figures.

[Note: recalled visits]
Most layers of a model are copies of one another. What a visit takes (time, bytes that come and go, bytes that
stay for backward) depends only on the layer's structure and on the shapes of its inputs. So each kind of
visit runs once, on meta tensors and outside of the step, and is recalled from then on: its figures are
memoised. The executor still issues every op, and tensors that stay are still made. Within a visit, slices of
the batch that are alike are recalled from the fourth on. The figures also serve other plans of the same
model, with other batches or more slots.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from streamer.engine.layer.arguments import Outputs
from streamer.engine.layer.collector import Collector
from streamer.engine.layer.layer import (
    Call,
    LayerCall,
    LayerRun,
    OutputGradients,
    Policy,
    StreamedLayer,
)
from streamer.engine.layer.micro_batches import BatchSlices
from streamer.engine.layer.surroundings import autocast_settings
from streamer.engine.paging.executor import Executor
from streamer.engine.paging.norms import sum_squares
from streamer.engine.tensors.nested import Rebuild, Tensors, constants
from streamer.engine.tensors.saved import storages
from streamer.engine.unit import Unit
from streamer.planner.alike import Kind, Numbers, OutputKinds, structure_of
from streamer.planner.measure import Measured, Meter, Tracker
from streamer.simulate.backend import VirtualBackend
from streamer.simulate.machine import Machine
from streamer.torch_private import storage_id


def recall_slices(visit: LayerCall, meter: Meter) -> None:
    """Let the fourth slice of ``visit``, and those after it, be recalled where they are like the second. The
    first differs: sums begin with it. What the second keeps is known when the third has run. The visit is to
    run inside of ``meter``."""
    first, *others = visit.runs
    if len(others) > 2:
        pattern = _Pattern(others[0], meter)
        visit.runs = [first, pattern, *(_Like(run, pattern) for run in others[1:])]


class _Around(LayerRun):
    """Stands in for ``run``, whose graph it builds."""

    def __init__(self, run: LayerRun) -> None:
        super().__init__(run.executor, run.call, run.policy)
        self._run = run

    @property
    def needs_backward(self) -> bool:
        return self._run.needs_backward


@dataclass(frozen=True)
class _SliceForward:
    """A slice's forward: its inputs and outputs without values, and what it took."""

    given: list[Kind]
    outputs: OutputKinds
    rebuild: Rebuild
    measured: Measured


@dataclass(frozen=True)
class _SliceBackward:
    returned: list[Kind | None]
    measured: Measured


class _Pattern(_Around):
    """The slice that is run and measured, and compared with later ones."""

    forward: _SliceForward
    backward: _SliceBackward

    def __init__(self, run: LayerRun, meter: Meter) -> None:
        super().__init__(run)
        self.meter = meter
        self._began = 0
        self._grown: int | None = None
        self._kept: int | None = None

    def first_run(self, weights: torch.Tensor, inputs: Tensors) -> Outputs:
        self._began = self.meter.now
        with self.meter.measuring() as measured:
            outputs, rebuild = self._run.first_run(weights, inputs)
        self.forward = _SliceForward(_kinds(inputs), OutputKinds(outputs, inputs), rebuild, measured)
        return outputs, rebuild

    def go_back(
        self, weights: torch.Tensor, inputs: Tensors, gradients: OutputGradients, collector: Collector | None
    ) -> list[torch.Tensor | None]:
        with self.meter.measuring() as measured:
            found = self._run.go_back(weights, inputs, gradients, collector)
        returned = [None if tensor is None else Kind.of(tensor) for tensor in found]
        self.backward = _SliceBackward(returned, measured)
        return found

    def kept(self) -> int | None:
        """Bytes that stay for backward, beside the outputs; None where that is not known yet. To be called
        when each later slice begins."""
        if self._grown is None:
            # the outputs of one earlier slice are still alive, as they were when the pattern began
            self._grown = self.meter.now - self._began
        elif self._kept is None:
            # the pattern's outputs have been dropped since then
            self._kept = self._grown - self.forward.outputs.note_kept()
        return self._kept


class _Like(_Around):
    """A slice that is recalled if its inputs are like the pattern's, and run if not."""

    _kept: list[torch.Tensor] | None = None

    def __init__(self, run: LayerRun, pattern: _Pattern) -> None:
        super().__init__(run)
        self._pattern = pattern

    def first_run(self, weights: torch.Tensor, inputs: Tensors) -> Outputs:
        kept, found = self._pattern.kept(), self._pattern.forward
        if kept is None or _kinds(inputs) != found.given:
            return self._run.first_run(weights, inputs)
        self._pattern.meter.recall(found.measured)
        outputs, self._kept = found.outputs.make(inputs)
        self._kept.append(torch.empty(kept, dtype=torch.uint8, device="meta"))
        return outputs, found.rebuild

    def go_back(
        self, weights: torch.Tensor, inputs: Tensors, gradients: OutputGradients, collector: Collector | None
    ) -> list[torch.Tensor | None]:
        if self._kept is None:
            return self._run.go_back(weights, inputs, gradients, collector)
        found = self._pattern.backward
        self._pattern.meter.recall(found.measured)
        self._kept = None
        return [None if kind is None else kind.make() for kind in found.returned]


def _kinds(tensors: Sequence[torch.Tensor]) -> list[Kind]:
    return [Kind.of(tensor) for tensor in tensors]


@dataclass(frozen=True)
class _Forward:
    """A layer's forward: its outputs, what it took, the bytes that stay beside the outputs, and which of the
    inputs its graph has saved."""

    outputs: OutputKinds
    rebuild: Rebuild
    measured: Measured
    kept: int
    saved: list[bool]
    needs_backward: bool


@dataclass(frozen=True)
class _Backward:
    """A layer's backward: which parameters have gradients, what it returns, what it took."""

    used: list[bool]
    returned: list[Kind | None]
    measured: Measured


@dataclass
class Recollection:
    """The figures of visits, for one plan or for several plans of copies of a model. [Note: recalled
    visits]"""

    forwards: dict[Hashable, _Forward] = field(default_factory=dict)
    backwards: dict[Hashable, _Backward] = field(default_factory=dict)
    #: what the sums of squares of gradients took
    squares: dict[Hashable, Measured] = field(default_factory=dict)


class Recalling:
    """A `Recollection` as the layers of one wrapped model use it."""

    def __init__(self, executor: Executor, recollection: Recollection, tracker: Tracker) -> None:
        assert isinstance(executor.backend, VirtualBackend), "others have work to do"
        self.recollection = recollection
        self._backend = executor.backend
        self._tracker = tracker
        numbers = Numbers()
        machine, in_fp32 = executor.backend.machine, executor.sum_in_fp32
        #: by a layer's index: equal for layers that compute alike
        self.structures = {
            unit.index: (machine, in_fp32, structure_of(unit, numbers)) for unit in executor.units
        }

    def kind(self) -> type[LayerCall]:
        """Layer calls that reuse the figures of an identical call. For `StreamedLayer.visit_as`."""

        class Recalled(_Recalled):
            recalling = self

        return Recalled

    def count(self, measured: Measured) -> None:
        """Count ``measured`` for work that is recalled."""
        self._backend.recall(measured.cost)
        self._tracker.rise(measured.rise)

    def squares_of(self, unit: Unit, gradient: torch.Tensor, used: Sequence[bool]) -> torch.Tensor:
        """`Gradients.squares_of`, run once for each kind of layer."""
        found = self.recollection.squares
        key = (self.structures[unit.index], tuple(used))
        if key not in found:
            with _disable_current_modes(), Meter(self._backend.machine) as meter:
                sum_squares(unit.layout, gradient, used)
            found[key] = meter.all
        self.count(found[key])
        return torch.empty((), dtype=torch.float32, device=gradient.device)


class _Recalled(LayerCall):
    recalling: Recalling

    def __init__(self, executor: Executor, call: Call, policy: Policy, cut: BatchSlices | None) -> None:
        super().__init__(executor, call, policy, cut)
        self.runs = []
        self._kept: list[torch.Tensor] = []

    @property
    def needs_backward(self) -> bool:
        return self.recalling.recollection.forwards[self._key].needs_backward

    def run(self, inputs: Tensors, weights: torch.Tensor) -> Outputs:
        forwards = self.recalling.recollection.forwards
        self._given = [Kind.of(tensor) for tensor in inputs]
        self._key = (
            self.policy,
            self.recalling.structures[self.call.unit.index],
            tuple(self._given),
            tuple(constants(self.call.rebuild(inputs))),
            None if self._cut is None else (tuple(self._cut.slices), tuple(self._cut.parts)),
            autocast_settings(self.executor.backend.device),
        )
        if self._key not in forwards:
            forwards[self._key] = self._measure_forward(weights)
        found = forwards[self._key]
        self.recalling.count(found.measured)
        outputs, kept = found.outputs.make(inputs)
        self._kept += kept
        if found.kept:
            self._kept.append(torch.empty(found.kept, dtype=torch.uint8, device="meta"))
        if not self.saves_inputs:
            saved = [*self._kept, *compress(inputs, found.saved)]
            self._held = self.executor.saved.hold(storages(saved))
            # a graph that is kept holds its inputs
            self._kept += inputs
        return outputs, found.rebuild

    def go_back(
        self,
        weights: torch.Tensor,
        into: torch.Tensor | None,
        inputs: Tensors,
        gradients: OutputGradients,
    ) -> tuple[list[bool], list[torch.Tensor | None]]:
        backwards = self.recalling.recollection.backwards
        incoming = tuple(None if gradient is None else Kind.of(gradient) for gradient in gradients)
        key = (self._key, incoming, into is not None)
        if key not in backwards:
            backwards[key] = self._measure_backward(weights, into, incoming)
        found = backwards[key]
        self.recalling.count(found.measured)
        self._kept.clear()
        return list(found.used), [None if kind is None else kind.make() for kind in found.returned]

    def _measure_forward(self, weights: torch.Tensor) -> _Forward:
        with _disable_current_modes():
            apart = _Apart(self.executor)
            visit, inputs = self._apart(apart)
            with Meter(self._machine) as meter:
                recall_slices(visit, meter)
                outputs, rebuild = visit.run(inputs, weights)
            kinds = OutputKinds(outputs, inputs)
            del outputs
            held = apart.saved.held
            saved = [storage_id(tensor) in held for tensor in inputs]
            kept = meter.now - kinds.note_kept()
            return _Forward(kinds, rebuild, meter.all, kept, saved, visit.needs_backward)

    def _measure_backward(
        self,
        weights: torch.Tensor,
        into: torch.Tensor | None,
        incoming: tuple[Kind | None, ...],
    ) -> _Backward:
        with _disable_current_modes(), torch.enable_grad():
            visit, inputs = self._apart(_Apart(self.executor))
            gradients = [None if kind is None else kind.make() for kind in incoming]
            given = inputs if self.saves_inputs else ()
            with Meter(self._machine) as meter:
                recall_slices(visit, meter)
                outputs, _ = visit.run(inputs, weights)
                del outputs
                with torch.no_grad(), meter.measuring() as measured:
                    used, found = visit.go_back(weights, into, given, gradients)
            kinds = [None if gradient is None else Kind.of(gradient) for gradient in found]
            return _Backward(used, kinds, measured)

    @property
    def _machine(self) -> Machine:
        backend = self.executor.backend
        assert isinstance(backend, VirtualBackend), "others have work to do"
        return backend.machine

    def _apart(self, executor: Any) -> tuple[LayerCall, list[torch.Tensor]]:
        """A visit outside of the step, and inputs for it."""
        return LayerCall(executor, self.call, self.policy, self._cut), [kind.make() for kind in self._given]


class _Apart:
    """Stands in for the executor in a visit outside of the step: what is saved there is not counted."""

    def __init__(self, executor: Executor) -> None:
        self.backend, self.units, self.root = executor.backend, executor.units, executor.root
        self.sum_in_fp32 = executor.sum_in_fp32
        self.caller, self.blank = executor.caller, executor.blank
        self.saved = _SavedApart()


class _SavedApart:
    def __init__(self) -> None:
        self.held: set[int] = set()

    def hold(self, held: Mapping[int, int]) -> None:
        self.held.update(held)


def recall_layers(executor: Executor, tracker: Tracker, recollection: Recollection) -> None:
    """Let the layers of a model on the virtual backend recall their visits; ``tracker`` counts what visits
    that are recalled would hold."""
    recalling = Recalling(executor, recollection, tracker)
    kind = recalling.kind()
    for unit in executor.units:
        layer = unit.module.forward
        assert isinstance(layer, StreamedLayer), "the model is wrapped"
        layer.visit_as(kind)
    executor.gradients.squares_of = recalling.squares_of  # type: ignore[method-assign]
