"""A plan measures one layer of each kind, and counts it for all.

[Note: kinds of layers]
Most layers of a model are copies of one another. A layer's forward or backward depends only on the layer's
structure and on the shapes of its inputs: its time, the bytes that it allocates and frees, the bytes that
stay for backward. So each kind runs once, on meta tensors and outside of the step, and its figures count for
every call of its kind. The executor still issues every op, and tensors that stay are allocated.

For a batch that is cut into many slices, the plan measures two slices and three: the difference is the cost
of each further slice. A shorter last slice runs both times.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from streamer.backends.virtual import VirtualBackend
from streamer.engine.executor import Executor
from streamer.engine.handle import GUARDS
from streamer.engine.layer.arguments import Outputs
from streamer.engine.layer.layer import Call, LayerCall, OutputGradients, Policy, StreamedLayer
from streamer.engine.layer.micro_batches import BatchSlices
from streamer.engine.layer.surroundings import autocast_settings
from streamer.engine.tensors import Rebuild, Tensors, constants, storages
from streamer.engine.unit import Unit
from streamer.planner.cost import Cost
from streamer.planner.measure import Meter, Tracker
from streamer.torch_private import is_sparse, storage_id

T = TypeVar("T", "Forward", "Backward")

#: Attributes in which layers keep their own index; no computation depends on them.
INDICES = {"layer_idx", "layer_id", "layer_number", "layer_index", "block_idx", "block_index"}
#: Attributes that `wrap` sets on modules.
OURS = {*GUARDS, "forward"}
#: Hooks that run in forward or backward; others belong to ``state_dict``.
HOOKS = {"_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"}
_PLAIN = (int, float, str, bool, type(None), torch.dtype, torch.device)


def kind_of(unit: Unit) -> str:
    """A text that is equal for layers that compute alike: the layout of their parameters, and the classes and
    attributes of their modules. An object without a comparable value counts as itself."""
    layout = [(each.param.shape, each.param.dtype, each.param.trainable) for each in unit.layout.slices]
    parts = [(each.positions, each.composite.structure) for each in unit.in_parts]
    of_parts = {
        module: each.composite.attributes for each in unit.in_parts for module in each.composite.modules
    }
    names = {module: name for name, module in unit.module.named_modules()}
    ties = [[(names[module], name) for module, name in owners] for _, _, owners in unit.registered]
    modules = [
        (name, type(module), _attributes(module, {*INDICES, *OURS, *of_parts.get(module, ())}))
        for module, name in names.items()
    ]
    # modules may know their name in the model
    return repr((layout, parts, ties, modules)).replace(unit.name, "")


def _attributes(module: nn.Module, skipped: set[str]) -> list[object]:
    """Everything that a module's result may depend on, except its parameters and children."""
    found: list[object] = []
    for name, value in vars(module).items():
        if name in HOOKS:
            found.append((name, [id(hook) for hook in value.values()]))
        elif "_hooks" not in name and name not in ("_parameters", "_modules", *skipped):
            found.append((name, _comparable(value)))
    return found


def _comparable(value: object) -> object:
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, torch.Tensor):
        return Form.of(value)
    if isinstance(value, list | tuple):
        return [_comparable(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(map(repr, value))
    if isinstance(value, Mapping):
        return [(key, _comparable(item)) for key, item in value.items()]
    return id(value)


class Form(NamedTuple):
    """A tensor's properties except its values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @staticmethod
    def of(tensor: torch.Tensor) -> Form:
        """The form of ``tensor``. Raises NotImplementedError for a sparse one: PyTorch has no operations for
        it on the meta device."""
        if is_sparse(tensor):
            raise NotImplementedError("PyTorch has no operations for sparse tensors without values")
        return Form(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad)

    def tensor(self) -> torch.Tensor:
        """A tensor of this form, on the meta device."""
        tensor = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")
        return tensor.requires_grad_(self.requires_grad)


@dataclass(frozen=True)
class Taken:
    """The cost of some work, the peak of the bytes that it added, and the bytes that stay for backward."""

    cost: Cost
    rise: int
    kept: int = 0

    def with_more(self, other: Taken, slices: int) -> Taken:
        """The figures for ``slices`` more; ``other`` has one slice more than this."""
        each = other.cost - self.cost
        return Taken(
            self.cost + each.times(slices),
            self.rise + (other.rise - self.rise) * slices,
            self.kept + (other.kept - self.kept) * slices,
        )


@dataclass(frozen=True)
class Forward:
    """A layer's forward: the outputs, the cost, and the inputs and outputs that its graph keeps."""

    outputs: list[Form]
    rebuild: Rebuild
    taken: Taken
    keeps_inputs: list[bool]
    keeps_outputs: list[bool]
    needs_backward: bool


@dataclass(frozen=True)
class Backward:
    """A layer's backward: the parameters with gradients, the gradients of the inputs, and the cost."""

    used: list[bool]
    gradients: list[Form | None]
    taken: Taken


@dataclass
class Kinds:
    """The figures of each kind of call of ``executor``'s layers. [Note: kinds of layers]"""

    executor: Executor
    backend: VirtualBackend
    tracker: Tracker
    forwards: dict[Hashable, Forward] = field(default_factory=dict)
    backwards: dict[Hashable, Backward] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.of_layer = {unit.index: kind_of(unit) for unit in self.executor.units}

    def count(self, taken: Taken) -> None:
        """Count ``taken`` for work that does not run."""
        self.backend.count(taken.cost)
        self.tracker.rise(taken.rise)


def measure_kinds(executor: Executor, tracker: Tracker) -> None:
    """Make the layers of a model on the virtual backend count the figures of their kind; ``tracker`` counts
    the bytes."""
    assert isinstance(executor.backend, VirtualBackend), "others have work to do"
    kinds = Kinds(executor, executor.backend, tracker)
    for unit in executor.units:
        layer = unit.module.forward
        assert isinstance(layer, StreamedLayer), "the model is wrapped"
        layer.call_as(lambda *call: CountedCall(kinds, *call))


class CountedCall(LayerCall):
    """A call of a layer that counts the figures of its kind, and allocates the tensors that stay."""

    def __init__(
        self, kinds: Kinds, executor: Executor, call: Call, policy: Policy, cut: BatchSlices | None
    ) -> None:
        super().__init__(executor, call, policy, cut)
        self._kinds = kinds
        self._kept: list[torch.Tensor] = []
        self.runs = []

    @property
    def needs_backward(self) -> bool:
        return self._kinds.forwards[self._key].needs_backward

    def run(self, inputs: Tensors, weights: torch.Tensor) -> Outputs:
        self._forms = [Form.of(tensor) for tensor in inputs]
        self._key = (
            self.policy,
            self._kinds.of_layer[self.call.unit.index],
            tuple(self._forms),
            tuple(constants(self.call.rebuild(inputs))),
            None if self._cut is None else (tuple(self._cut.slices), tuple(self._cut.parts)),
            autocast_settings(self.executor.backend.device),
        )
        known = self._kinds.forwards
        if self._key not in known:
            known[self._key] = self._measured(lambda slices: self._forward(weights, slices))
        found = known[self._key]
        self._kinds.count(found.taken)
        outputs = [form.tensor() for form in found.outputs]
        if found.taken.kept:
            self._kept.append(torch.empty(found.taken.kept, dtype=torch.uint8, device="meta"))
        if not self.saves_inputs:
            graph = [*self._kept, *compress(inputs, found.keeps_inputs)]
            self._held = self.executor.saved.hold(storages([*graph, *compress(outputs, found.keeps_outputs)]))
            self._kept += [*inputs, *compress(outputs, found.keeps_outputs)]
        return outputs, found.rebuild

    def go_back(
        self,
        weights: torch.Tensor,
        into: torch.Tensor | None,
        inputs: Tensors,
        gradients: OutputGradients,
    ) -> tuple[list[bool], list[torch.Tensor | None]]:
        incoming = tuple(None if gradient is None else Form.of(gradient) for gradient in gradients)
        known, key = self._kinds.backwards, (self._key, incoming, into is not None)
        if key not in known:
            known[key] = self._measured(lambda slices: self._backward(weights, into, incoming, slices))
        found = known[key]
        self._kinds.count(found.taken)
        self._kept.clear()
        return list(found.used), [None if form is None else form.tensor() for form in found.gradients]

    def _measured(self, measure: Callable[[BatchSlices | None], T]) -> T:
        """``measure`` of all slices: of two and three, if there are more."""
        cut = self._cut
        with _disable_current_modes(), torch.enable_grad():
            if cut is None:
                return measure(None)
            length = cut.slices[0][1]
            full = [each for _, each in cut.slices].count(length)
            if full <= 3:
                return measure(cut)
            two, three = (measure(_cut_shorter(cut, count, full)) for count in (2, 3))
        return replace(two, taken=two.taken.with_more(three.taken, full - 2))

    def _forward(self, weights: torch.Tensor, cut: BatchSlices | None) -> Forward:
        call, inputs = self._apart(cut)
        with Meter(self._kinds.backend.machine) as meter:
            outputs, rebuild = call.run(inputs, weights)
        held = call.executor.saved.held  # type: ignore[attr-defined]
        keeps_outputs = [storage_id(output) in held for output in outputs]
        forms = [Form.of(output) for output in outputs]
        needs_backward = call.needs_backward
        if self._cut is not None:
            samples = sum(length for _, length in self._cut.slices)
            forms = [
                form if part is None else _resized(form, part.dim, samples * part.per_sample)
                for form, part in zip(forms, call._parts, strict=True)
            ]
        kept = meter.now - sum(storages(outputs).values())
        return Forward(
            forms,
            rebuild,
            Taken(meter.cost, meter.peak, kept),
            [storage_id(tensor) in held for tensor in inputs],
            keeps_outputs,
            needs_backward,
        )

    def _backward(
        self,
        weights: torch.Tensor,
        into: torch.Tensor | None,
        incoming: Sequence[Form | None],
        cut: BatchSlices | None,
    ) -> Backward:
        call, inputs = self._apart(cut)
        gradients = [None if form is None else form.tensor() for form in incoming]
        saved = inputs if self.saves_inputs else ()
        with Meter(self._kinds.backend.machine) as meter:
            outputs, _ = call.run(inputs, weights)
            del outputs
            cost, before = meter.cost, meter.now
            meter.peak = before
            with torch.no_grad():
                used, found = call.go_back(weights, into, saved, gradients)
        forms = [None if gradient is None else Form.of(gradient) for gradient in found]
        return Backward(used, forms, Taken(meter.cost - cost, meter.peak - before))

    def _apart(self, cut: BatchSlices | None) -> tuple[LayerCall, list[torch.Tensor]]:
        """A call outside of the step, and inputs for it."""
        executor: Any = Apart(self.executor)
        return LayerCall(executor, self.call, self.policy, cut), [form.tensor() for form in self._forms]


def _cut_shorter(cut: BatchSlices, count: int, full: int) -> BatchSlices:
    """``cut`` with ``count`` of its ``full`` slices, which are as long as the first, and the last slice if it
    is shorter."""
    end = cut.slices[count][0]
    return cut._replace(slices=[*cut.slices[:count], *((end, length) for _, length in cut.slices[full:])])


def _resized(form: Form, dim: int, length: int) -> Form:
    """``form`` with another ``length`` in dimension ``dim``, in one piece."""
    shape = [*form.shape]
    shape[dim] = length
    stride = torch.empty(shape, device="meta").stride()
    return form._replace(shape=tuple(shape), stride=stride)


class Apart:
    """Stands in for the executor in a call outside of the step: bytes saved there do not count."""

    def __init__(self, executor: Executor) -> None:
        self.backend, self.units, self.root = executor.backend, executor.units, executor.root
        self.sum_in_fp32 = executor.sum_in_fp32
        self.caller, self.blank = executor.caller, executor.blank
        self.saved = SavedApart()


class SavedApart:
    """The storages that a graph keeps."""

    def __init__(self) -> None:
        self.held: set[int] = set()

    def hold(self, held: Mapping[int, int]) -> None:
        """Note ``held``."""
        self.held.update(held)
