"""A unit is paged as one piece: a layer, or the root unit."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
import torch
from torch import nn

from streamer.engine.guard import as_plain
from streamer.engine.tensors import ModuleState
from streamer.quantized.parts import Composite, marked, plain_parts, plainly
from streamer.store.layout import Layout, Slice
from streamer.torch_private import set_accumulation_hook, storage_id

BufferPlace = tuple[nn.Module, str]

# called several times for each use of a layer, so without a Python frame for every parameter or module
_ADDRESS = operator.methodcaller("data_ptr")
_REQUIRES_GRAD = operator.attrgetter("requires_grad")
_VERSION = operator.attrgetter("_version")


@dataclass(frozen=True)
class InParts:
    """A parameter ``name`` of the model whose parts are at ``positions`` in its unit's ``params``; ``owners``
    are all the (module, name) pairs under which it is registered. [Note: parts]"""

    name: str
    composite: Composite
    positions: tuple[int, ...]
    owners: tuple[tuple[nn.Module, str], ...]

    @property
    def param(self) -> nn.Parameter:
        """The parameter itself."""
        return cast("nn.Parameter", self.composite.param)

    def of(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Its parts among ``tensors``, which are in the order of the unit's ``params``."""
        return [tensors[position] for position in self.positions]


class Shared(NamedTuple):
    """A parameter of the root unit that a layer also holds, in ``owners``. In a call of the layer it is an
    argument."""

    param: nn.Parameter
    owners: tuple[BufferPlace, ...]


@dataclass(eq=False)
class Unit:
    """A layer of the model or, with index ROOT, all parameters outside of layers.

    ``params`` are the model's own parameters in the order of ``layout.slices``; ``owners`` are, for each of
    them, all the (module, name) pairs under which it is registered in this unit. A parameter that consists of
    parts is in ``in_parts``; its parts are in ``params``, without owners.
    """

    index: int
    name: str
    module: nn.Module
    layout: Layout
    params: tuple[nn.Parameter, ...]
    owners: tuple[tuple[tuple[nn.Module, str], ...], ...]
    buffer_owners: tuple[tuple[nn.Module, str], ...]
    in_parts: tuple[InParts, ...] = ()
    shared: tuple[Shared, ...] = ()
    #: takes the gradients of parameters while the layer's backward runs
    collector: Takes | None = None
    #: the number of updates issued
    updates: int = 0
    #: whether its modules see leaves in place of their parameters
    has_leaves: bool = False
    #: replaced attributes of modules other than parameters: the module's dict, the name, the original value
    _replaced: list[tuple[dict[str, Any], str, object]] = field(default_factory=list)
    #: whether custom functions in its graph may keep views of the slot without calling hooks for saved
    #: tensors
    has_contexts: bool = True

    @property
    def trainable(self) -> tuple[nn.Parameter, ...]:
        """The parameters that have room for a gradient, in the order of ``layout.trainable``."""
        return self.params[: len(self.layout.trainable)]

    def placed(self) -> Iterator[tuple[Slice, nn.Parameter]]:
        """Each parameter with its place in the unit's buffers."""
        return zip(self.layout.slices, self.params, strict=True)

    @cached_property
    def registered(self) -> tuple[tuple[str, nn.Parameter, tuple[BufferPlace, ...]], ...]:
        """The parameters as modules have them: name, parameter, owners."""
        whole = [
            (slice.param.name, param, owners)
            for (slice, param), owners in zip(self.placed(), self.owners, strict=True)
            if owners
        ]
        return (*whole, *((each.name, each.param, each.owners) for each in self.in_parts))

    @as_plain
    def refresh_parts(self) -> None:
        """Set the parts of parameters in parts to the present ``params``."""
        for each in self.in_parts:
            each.composite.set_parts(plainly(each.of(self.params)))

    @as_plain
    def written(self) -> int:
        """A number that grows with every in-place write to a parameter through PyTorch."""
        return sum(map(_VERSION, self._counted))

    @cached_property
    def _counted(self) -> tuple[nn.Parameter, ...]:
        """The parameters whose version counters count: parts do not count writes to the parameter that they
        form."""
        return (*self.params, *(each.param for each in self.in_parts))

    @as_plain
    def wanted(self) -> list[bool]:
        """For each parameter, whether it requires a gradient now. Raises ValueError if it was frozen in
        `wrap`: there is no room for its gradient.
        """
        wanted = [*map(_REQUIRES_GRAD, self.params)]
        frozen = len(self.layout.trainable)
        for slice, is_wanted in zip(self.layout.slices[frozen:], wanted[frozen:], strict=True):
            if is_wanted:
                raise ValueError(
                    f"'{slice.param.name}' was frozen when the model was wrapped and has no room for a "
                    "gradient: set requires_grad before streamer.wrap (what is trained by then may be frozen "
                    "and unfrozen after it), or unwrap and wrap again"
                )
        return wanted

    @as_plain
    def leaves(self, weights: torch.Tensor) -> list[torch.Tensor]:
        """The parameters as autograd leaves that are views of the slot ``weights`` (flat uint8). They stay
        the same objects while the same parameters are trained. Their version counters count only writes to
        themselves, not to the slot, which will hold other layers."""
        # without gradients, parameters without room for one may be used
        wanted = self.wanted() if torch.is_grad_enabled() else [*map(_REQUIRES_GRAD, self.params)]
        held = self._leaves.get(id(weights))
        if held is None or held.weights is not weights or held.wanted != wanted:
            views = [view.data for view in self.layout.views(weights)]
            for view, is_wanted in zip(views, wanted, strict=True):
                # makes isinstance(leaf, nn.Parameter) true: layers may use it to detect weights
                view.requires_grad_(is_wanted)._is_param = True
            self._leaves[id(weights)] = held = Leaves(weights, wanted, views)
            added = Added(weakref.ref(self), {id(view): place for place, view in enumerate(views)})
            for view in views:
                if view.requires_grad:
                    set_accumulation_hook(view, added)
        return held.tensors

    def forget_leaves(self) -> None:
        """Slots are removed: drop the leaves that hold their memory."""
        self._leaves.clear()

    @cached_property
    def _leaves(self) -> dict[int, Leaves]:
        return {}

    @cached_property
    def modules(self) -> tuple[nn.Module, ...]:
        """The unit's module and its submodules, each once."""
        return tuple(self.module.modules())

    @cached_property
    def state(self) -> ModuleState:
        """The buffers and tensor attributes that its forward changes."""
        return ModuleState(self.module)

    def buffers(self) -> list[torch.Tensor]:
        """The unit's buffers (running statistics, masks), which stay on the device."""
        return [
            buffer for owner, name in self.buffer_owners if (buffer := owner._buffers.get(name)) is not None
        ]

    @cached_property
    def steps(self) -> torch.Tensor:
        """The number of updates of each of `trainable`, [n] fp32, for optimizers."""
        # memory of NumPy: plans do not count it, and a default device of the user does not apply
        return torch.from_numpy(np.zeros(len(self.trainable), np.float32))

    @contextmanager
    def using(self, leaves: Sequence[torch.Tensor]) -> Iterator[None]:
        """Replace the parameters of the unit's modules by ``leaves`` inside the block. Nested blocks change
        nothing."""
        if self.has_leaves:
            yield
            return
        try:
            self.swap_in(leaves)
            yield
        finally:
            self.restore()

    def swap_in(self, leaves: Sequence[torch.Tensor]) -> None:
        """Replace the parameters of the unit's modules by ``leaves``, until `restore`."""
        self.has_leaves = True
        wholes = [marked(each.composite.assemble(each.of(leaves))) for each in self.in_parts]
        for each, whole in zip(self.in_parts, wholes, strict=True):
            for attribute, value in each.composite.module_attributes(whole).items():
                for held in map(vars, each.composite.modules):
                    self._replaced.append((held, attribute, held[attribute]))
                    held[attribute] = value
        self.register(leaves, wholes)

    def restore(self) -> None:
        """Undo `swap_in`, if it was called."""
        if self.has_leaves:
            self.register_own()
            for held, attribute, value in self._replaced:
                held[attribute] = value
            self._replaced.clear()
            self.has_leaves = False

    @as_plain
    def elsewhere(self, weights: torch.Tensor) -> list[tuple[Slice, nn.Parameter]]:
        """The parameters whose memory is not their place in ``weights`` (flat uint8), since user code has
        replaced it."""
        start = weights.data_ptr()
        tensors: list[torch.Tensor] = [*self.params]
        for each in self.in_parts:
            for position, part in zip(each.positions, each.composite.parts(), strict=True):
                tensors[position] = part
        if start not in self._addresses:
            self._addresses.clear()
            self._addresses[start] = [start + slice.offset for slice in self.layout.slices]
        if [*map(_ADDRESS, tensors)] == self._addresses[start]:
            return []
        return [
            (slice, param)
            for (slice, param), tensor in zip(self.placed(), tensors, strict=True)
            if slice.numel and not tensor.is_meta and tensor.data_ptr() != start + slice.offset
        ]

    @cached_property
    def _positions(self) -> list[tuple[nn.Module, str, int]]:
        """The modules and names under which `params` are registered, with their positions."""
        return [(*place, position) for position, owners in enumerate(self.owners) for place in owners]

    @cached_property
    def _addresses(self) -> dict[int, list[int]]:
        """The expected addresses of `params` in the buffer of the last check, by the buffer's address."""
        return {}

    def register_own(self) -> None:
        """Register the parameters themselves in the unit's modules."""
        self.register(self.params, [each.param for each in self.in_parts])
        self.register_shared([each.param for each in self.shared])

    def register_shared(self, tensors: Sequence[torch.Tensor]) -> None:
        """Register ``tensors`` in place of `shared` parameters in the unit's modules."""
        for each, tensor in zip(self.shared, tensors, strict=True):
            for module, name in each.owners:
                module._parameters[name] = tensor  # type: ignore[assignment]

    def register(self, tensors: Sequence[torch.Tensor], wholes: Sequence[torch.Tensor] = ()) -> None:
        """Register ``tensors`` as parameters of the unit's modules, and ``wholes`` as those in parts."""
        for module, name, position in self._positions:
            # as torch.func.functional_call does: the module's own __setattr__ takes only Parameters
            module._parameters[name] = tensors[position]  # type: ignore[assignment]
            # torch's parametrizations, which peft adds in a forward, leave a leaf as a buffer
            if name in module._buffers:
                del module._buffers[name]
        for each, whole in zip(self.in_parts, wholes, strict=True):
            for module, name in each.owners:
                module._parameters[name] = whole  # type: ignore[assignment]


class Leaves(NamedTuple):
    """A unit's parameters as autograd leaves on the slot ``weights``, and whether each is ``wanted`` to have
    a gradient."""

    weights: torch.Tensor
    wanted: list[bool]
    tensors: list[torch.Tensor]


class Takes(Protocol):
    """Takes the gradients of a unit's parameters while its backward runs."""

    def take(self, index: int, leaf: torch.Tensor) -> None:
        """Autograd has set the gradient of ``leaf``, which stands for trainable parameter ``index``."""


@dataclass(frozen=True)
class Added:
    """Called when autograd has added to the gradient of a leaf of ``unit``; ``places`` has the leaves'
    positions."""

    #: weak, since the garbage collector cannot follow references of a tensor's hook
    unit: weakref.ref[Unit]
    places: dict[int, int]

    def __call__(self, leaf: torch.Tensor) -> None:
        unit = self.unit()
        if unit is None or unit.collector is None:
            leaf.grad = None
            raise leaked("" if unit is None else unit.name)
        unit.collector.take(self.places[id(leaf)], leaf)


def leaked(layer: str) -> RuntimeError:
    """The error for a gradient that reaches the own graph of ``layer`` without passing its result."""
    return RuntimeError(
        f"a tensor that layer '{layer}' computed reached the loss by another way than the layer's return "
        "value (an attribute, a hook, a cache, or torch.autograd.grad in the layer itself), where its "
        "gradient would be lost: return it, detach it, or do not stream this list of layers"
    )


def buffer_bytes(units: Iterable[Unit]) -> int:
    """Bytes of the buffers of ``units``, each counted once."""
    parts = [part for unit in units for buffer in unit.buffers() for part in plain_parts(buffer)]
    # not by address: all meta tensors have the same
    places = {(storage_id(part), part.storage_offset()): part.nbytes for part in parts}
    return sum(places.values())


class Structure:
    """Whether a wrapped model still has its layers, ``units``, in the modules of ``model`` that hold them.

    A module that replaces a layer runs without being streamed, and no loss reveals it. So, at the beginning
    of a forward of the model, the modules that hold layers are compared with their earlier contents.
    """

    def __init__(self, units: Sequence[Unit], model: nn.Module) -> None:
        self._model = model
        self._units = units
        #: the layers by their name in the module that holds them, by the path of that module
        self._layers: dict[str, dict[str, nn.Module]] = {}
        for unit in units:
            path, _, key = unit.name.rpartition(".")
            self._layers.setdefault(path, {})[key] = unit.module
        self._lengths = {
            path: len(model.get_submodule(path)._modules)
            for path, layers in self._layers.items()
            if all(key.isdigit() for key in layers)
        }

    def check(self) -> None:
        """Raise ValueError if a layer or a layer's parameter was replaced, removed or added since the model
        was wrapped."""
        for path, layers in self._layers.items():
            now = self._children(path)
            for key, layer in layers.items():
                found = now.get(key)
                # other code may have put the layer into a module of its own, which calls it
                if found is not layer and (found is None or layer not in found.modules()):
                    raise _refusal(f"layer '{path}.{key}' was replaced or removed")
            if len(now) != self._lengths.get(path, len(now)):
                raise _refusal(f"'{path}' had {self._lengths[path]} layers and has {len(now)}")

        for unit in self._units:
            for name, param, owners in unit.registered:
                if any(module._parameters.get(key) is not param for module, key in owners):
                    raise ValueError(
                        f"parameter '{name}' of a streamed layer was replaced or removed after streamer.wrap "
                        "(torch.func.functional_call does so too): write into it (param.copy_ under "
                        "torch.no_grad), or call streamer.unwrap(model) first"
                    )

    def _children(self, path: str) -> dict[str, nn.Module | None]:
        try:
            return self._model.get_submodule(path)._modules
        except AttributeError:
            raise _refusal(f"'{path}' was removed") from None


def _refusal(what: str) -> ValueError:
    return ValueError(
        f"{what} after streamer.wrap: call streamer.unwrap(model), change the model, and wrap it again"
    )
