"""Slices of a layer's batch that are alike, of which three are run. [Note: recalled visits]"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from streamer.engine.activations import Outputs, Run, Visit
from streamer.engine.backpropagation import Gradients, Graph
from streamer.engine.collecting import Collector
from streamer.engine.cut import Tensors
from streamer.engine.tree import Rebuild
from streamer.plan.meter import Measured, Meter
from streamer.plan.outputs import OutputKinds
from streamer.plan.structure import Kind


def recall_slices(visit: Visit, meter: Meter) -> None:
    """Let the fourth slice of ``visit``, and those after it, be recalled where they are like the second one:
    the first is another, since what is added up begins with it, and what the second one keeps shows when the
    third has run. The visit is to run inside of ``meter``."""
    first, *others = visit.runs
    if len(others) > 2:
        pattern = _Pattern(others[0], meter)
        visit.runs = [first, pattern, *(_Like(run, pattern) for run in others[1:])]


class _Around(Run):
    def __init__(self, run: Run) -> None:
        super().__init__(run.executor, run.call)
        self._run = run

    def graph(self, weights: torch.Tensor, inputs: Tensors) -> AbstractContextManager[Graph]:
        return self._run.graph(weights, inputs)


@dataclass(frozen=True)
class _Forward:
    """What a slice was given, has returned, and took."""

    given: list[Kind]
    outputs: OutputKinds
    rebuild: Rebuild
    measured: Measured


@dataclass(frozen=True)
class _Backward:
    returned: list[Kind | None]
    measured: Measured


class _Pattern(_Around):
    """The slice that others may be like: it is run and measured."""

    forward: _Forward
    backward: _Backward

    def __init__(self, run: Run, meter: Meter) -> None:
        super().__init__(run)
        self.meter = meter
        self._began = 0
        self._grown: int | None = None
        self._kept: int | None = None

    def first_run(self, weights: torch.Tensor, inputs: Tensors) -> Outputs:
        self._began = self.meter.now
        with self.meter.measuring() as measured:
            outputs, rebuild = self._run.first_run(weights, inputs)
        self.forward = _Forward(_kinds(inputs), OutputKinds(outputs, inputs), rebuild, measured)
        return outputs, rebuild

    def go_back(
        self, weights: torch.Tensor, inputs: Tensors, gradients: Gradients, collector: Collector
    ) -> list[torch.Tensor | None]:
        with self.meter.measuring() as measured:
            found = self._run.go_back(weights, inputs, gradients, collector)
        returned = [None if tensor is None else Kind.of(tensor) for tensor in found]
        self.backward = _Backward(returned, measured)
        return found

    def kept(self) -> int | None:
        """Bytes that stay for backward, beside the outputs; None where that is not known yet. To be asked
        when each of the slices after it begins."""
        if self._grown is None:
            # as when the pattern began, there are the outputs of one slice before
            self._grown = self.meter.now - self._began
        elif self._kept is None:
            # its outputs have been dropped since then
            self._kept = self._grown - self.forward.outputs.note_kept()
        return self._kept


class _Like(_Around):
    """A slice that is recalled if it is like the pattern, else run."""

    _kept: list[torch.Tensor] | None = None

    def __init__(self, run: Run, pattern: _Pattern) -> None:
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
        self, weights: torch.Tensor, inputs: Tensors, gradients: Gradients, collector: Collector
    ) -> list[torch.Tensor | None]:
        if self._kept is None:
            return self._run.go_back(weights, inputs, gradients, collector)
        found = self._pattern.backward
        self._pattern.meter.recall(found.measured)
        self._kept = None
        return [None if kind is None else kind.make() for kind in found.returned]


def _kinds(tensors: Sequence[torch.Tensor]) -> list[Kind]:
    return [Kind.of(tensor) for tensor in tensors]
