"""Layers that are alike, run once.

[Note: recalled runs]
A plan runs the executor without data, layer by layer, slice by slice, though most layers are copies of one.
What one of them takes (FLOPs, bytes that come and go, bytes that stay for backward) depends on its structure
and on the shapes it is given alone. So each kind of run is carried out once, on meta tensors and apart from
the step, and recalled from then on: the executor still issues every op, and the tensors that stay are still
made.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from streamer.backends.virtual import Flops, VirtualBackend
from streamer.engine.activations import Outputs, Run
from streamer.engine.backpropagation import Gradients
from streamer.engine.call import Tensors
from streamer.engine.collecting import Collector
from streamer.engine.executor import Executor
from streamer.engine.layer import StreamedLayer
from streamer.engine.saved import storages
from streamer.engine.tree import Rebuild, constants
from streamer.engine.unit import Unit
from streamer.guards import GUARDS
from streamer.plan.tracker import Tracker

#: Names under which layers keep which of them they are, on which nothing depends that they compute.
NUMBERS = {"layer_idx", "layer_id", "layer_number", "layer_index", "block_idx", "block_index"}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_PLAIN = (int, float, str, bool, type(None), torch.dtype)


@dataclass(frozen=True)
class _Kind:
    """What a tensor is, but for its values."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = False

    @staticmethod
    def of(tensor: torch.Tensor) -> _Kind:
        return _Kind(tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad)

    def make(self) -> torch.Tensor:
        tensor = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")
        return tensor.requires_grad_(self.requires_grad)


@dataclass(frozen=True)
class _Forward:
    """A first run: its outputs, FLOPs, the most bytes on top of what was there, and those that stay beside
    the outputs."""

    outputs: list[_Kind]
    rebuild: Rebuild
    flops: int
    rise: int
    kept: int


@dataclass(frozen=True)
class _Backward:
    """Going back: for which parameters there are gradients, those of the inputs, FLOPs, and the most bytes on
    top of what was there."""

    used: list[bool]
    gradients: list[_Kind | None]
    flops: int
    rise: int


@dataclass
class Recollection:
    """What runs of layers have taken. [Note: recalled runs]"""

    tracker: Tracker
    forwards: dict[Hashable, _Forward] = field(default_factory=dict)
    backwards: dict[Hashable, _Backward] = field(default_factory=dict)
    _structures: dict[int, Hashable] = field(default_factory=dict)

    def structure(self, unit: Unit) -> Hashable:
        """Equal for layers that compute alike."""
        if unit.index not in self._structures:
            self._structures[unit.index] = _structure(unit)
        return self._structures[unit.index]

    def kind(self, policy: type[Run]) -> type[Run]:
        """Runs as those of ``policy``, recalled. For `StreamedLayer.run_as`."""

        class Recalled(_Recalled):
            saves_inputs, pages_inputs = policy.saves_inputs, policy.pages_inputs
            real, recollection = policy, self

        return Recalled


class _Recalled(Run):
    real: type[Run]
    recollection: Recollection

    def first_run(self, weights: torch.Tensor, inputs: Tensors) -> Outputs:
        memory = self.recollection
        self._kept: list[torch.Tensor] = []
        self._given = [_Kind.of(tensor) for tensor in inputs]
        self._key = (
            self.real,
            memory.structure(self.call.unit),
            tuple(self._given),
            tuple(constants(self.call.rebuild(inputs))),
            torch.is_autocast_enabled("cpu"),
        )
        if self._key not in memory.forwards:
            memory.forwards[self._key] = self._measure_forward(weights)
        found = memory.forwards[self._key]
        self._count(found.flops, found.rise)
        if found.kept:
            self._kept.append(torch.empty(found.kept, dtype=torch.uint8, device="meta"))
        if not self.saves_inputs:
            # a graph that is kept holds what it was given
            self._kept += inputs
            self.release = self.executor.saved.hold(self, storages(self._kept))
        return [kind.make() for kind in found.outputs], found.rebuild

    def go_back(
        self, weights: torch.Tensor, inputs: Tensors, gradients: Gradients, collector: Collector
    ) -> list[torch.Tensor | None]:
        memory = self.recollection
        incoming = tuple(None if gradient is None else _Kind.of(gradient) for gradient in gradients)
        key = (self._key, incoming, tuple(collector.asked), tuple(collector.used))
        if key not in memory.backwards:
            memory.backwards[key] = self._measure_backward(weights, incoming, collector)
        found = memory.backwards[key]
        self._count(found.flops, found.rise)
        collector.used[:] = found.used
        self._kept.clear()
        return [None if kind is None else kind.make() for kind in found.gradients]

    def graph(self, weights: torch.Tensor, inputs: Tensors) -> Any:
        raise AssertionError("`go_back` does without")

    def _count(self, flops: int, rise: int) -> None:
        backend = self.executor.backend
        assert isinstance(backend, VirtualBackend), "others have work to do"
        backend.recall(flops)
        self.recollection.tracker.rise(rise)

    def _measure_forward(self, weights: torch.Tensor) -> _Forward:
        with _disable_current_modes():
            run = self._real_run()
            inputs = [kind.make() for kind in self._given]
            with Tracker() as tracker, Flops() as counter:
                outputs, rebuild = run.first_run(weights, inputs)
            rise, flops = tracker.peak, counter.total
            kinds = [_Kind.of(output) for output in outputs]
            del outputs
            return _Forward(kinds, rebuild, flops, rise, kept=tracker.now)

    def _measure_backward(
        self, weights: torch.Tensor, incoming: tuple[_Kind | None, ...], collector: Collector
    ) -> _Backward:
        with _disable_current_modes():
            run = self._real_run()
            inputs = [kind.make() for kind in self._given]
            gradients = [None if kind is None else kind.make() for kind in incoming]
            collector = copy.copy(collector)
            collector.used = list(collector.used)
            with Tracker() as tracker:
                outputs, _ = run.first_run(weights, inputs)
                del outputs
                before, tracker.peak = tracker.now, tracker.now
                with Flops() as counter:
                    found = run.go_back(weights, inputs if self.saves_inputs else (), gradients, collector)
                kinds = [None if gradient is None else _Kind.of(gradient) for gradient in found]
            return _Backward(collector.used, kinds, counter.total, tracker.peak - before)

    def _real_run(self) -> Run:
        return self.real(_Apart(self.executor), self.call)  # type: ignore[arg-type]


class _Apart:
    """An executor for a run that does not belong to the step: what it saves is not counted there."""

    def __init__(self, executor: Executor) -> None:
        self.backend, self.units, self.root = executor.backend, executor.units, executor.root
        self.saved = _SavesNothing()


class _SavesNothing:
    def hold(self, owner: object, held: object) -> Callable[[], object]:
        return lambda: None


def recall_layers(executor: Executor, recollection: Recollection) -> None:
    """Let the layers of a model on the virtual backend recall their runs."""
    for unit in executor.units:
        layer = unit.module.forward
        assert isinstance(layer, StreamedLayer), "the model is wrapped"
        layer.run_as(recollection.kind)


def _structure(unit: Unit) -> Hashable:
    layout = [
        (slice.offset, slice.param.shape, slice.param.dtype, slice.param.trainable)
        for slice in unit.layout.slices
    ]
    names = {module: name for name, module in unit.module.named_modules()}
    ties = [[(names[module], name) for module, name in owners] for owners in unit.owners]
    modules = [(name, type(module), *_own(module)) for module, name in names.items()]
    return repr((layout, ties, modules))


def _own(module: nn.Module) -> list[Any]:
    """What a module computes by, beside parameters and children."""
    found: list[Any] = [(name, _plain(value)) for name, value in module._buffers.items()]
    for name, value in vars(module).items():
        if name in _HOOKS:
            found += [id(hook) for hook in value.values()]
        elif name not in NUMBERS and name not in (*GUARDS, "forward") and not name.endswith(_SKIPPED):
            found.append((name, _plain(value)))
    return found


#: Dictionaries of PyTorch's own that say nothing of what is computed.
_SKIPPED = (
    "_hooks",
    "_hooks_with_kwargs",
    "_hooks_always_called",
    "_parameters",
    "_buffers",
    "_modules",
    "_set",
)


def _plain(value: object) -> object:
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, torch.Tensor):
        return _Kind.of(value)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return id(value)
