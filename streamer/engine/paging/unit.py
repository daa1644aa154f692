"""What is paged as one piece: a layer, or the root unit."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm

from streamer.engine.tensors.attributes import FIXED, contents_of
from streamer.engine.tensors.guarded import as_plain
from streamer.engine.tensors.nested import version_of
from streamer.engine.tensors.once import kept
from streamer.engine.tensors.parts import Composite, marked, plain_parts, plainly
from streamer.engine.tensors.samples import Selection
from streamer.memory.layout import Layout, Slice
from streamer.torch_private import storage_id

BufferPlace = tuple[nn.Module, str]

# several times in each visit, so without a frame of Python for every parameter or module
_ADDRESS = operator.methodcaller("data_ptr")
_REQUIRES_GRAD = operator.attrgetter("requires_grad")
_VERSION = operator.attrgetter("_version")


class Snapshot:
    """The children and the parameters that each of ``modules`` has at one moment."""

    def __init__(self, modules: tuple[nn.Module, ...]) -> None:
        self.modules = modules
        self._dicts = _dicts_of(modules)
        self._counts = [*map(len, self._dicts)]
        self._filled = [*filter(None, self._dicts)]
        self._objects = [*_objects_in(self._filled)]

    def has_changed(self) -> bool:
        """Whether one of the modules has others now."""
        return not all(map(operator.is_, _dicts_of(self.modules), self._dicts)) or self.holds_others()

    def holds_others(self) -> bool:
        """Whether there are others now in the dicts that the modules had then."""
        # twice in each visit, nearly always for nothing, so without a frame for each module
        return [*map(len, self._dicts)] != self._counts or not all(
            map(operator.is_, _objects_in(self._filled), self._objects)
        )


class Attributes(dict[nn.Module, dict[str, Any]]):
    """The attributes that ``modules`` have at one moment, by module; without those that are `FIXED`."""

    def __init__(self, modules: tuple[nn.Module, ...]) -> None:
        super().__init__((module, _attributes_of(module)) for module in modules)
        self.modules = modules
        self._counts = [len(vars(module)) for module in modules]
        # of two names or more, as every module has, a getter makes a tuple
        self._getters = [operator.itemgetter(*values) for values in self.values()]
        self._objects = [*_objects_in(self.values())]

    def have_changed(self) -> bool:
        """Whether one of the modules has others now."""
        # several times in each visit, nearly always for nothing
        now = [*map(vars, self.modules)]
        if [*map(len, now)] != self._counts:
            return True
        found = chain.from_iterable(map(operator.call, self._getters, now))
        try:
            return not all(map(operator.is_, found, self._objects))
        except KeyError:
            return True

    @cached_property
    def contents(self) -> list[Any]:
        """The values that may hold other things."""
        return contents_of(self)

    def changed(self) -> list[tuple[nn.Module, dict[str, Any]]]:
        """The modules that have other attributes now, with those that they had then."""
        if not self.have_changed():
            return []
        now = ((module, _attributes_of(module), values) for module, values in self.items())
        return [
            (module, values)
            for module, held, values in now
            if len(held) != len(values) or not all(map(operator.is_, held.values(), values.values()))
        ]

    def put_back(self) -> None:
        """Give the modules these attributes and no others."""
        for module, values in self.changed():
            held = vars(module)
            for name in _attributes_of(module).keys() - values.keys():
                del held[name]
            # only those that differ: torch.compile counts writes of a module's attributes
            held.update({name: value for name, value in values.items() if held.get(name, held) is not value})


def _attributes_of(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name not in FIXED}


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


@dataclass(frozen=True)
class Unit:
    """A layer of the model (or, with index ROOT, all that is in no layer).

    ``params`` are the model's own parameters in the order of ``layout.slices``; ``owners`` are, for
    each of them, all the (module, name) pairs under which it is registered in this unit. Of a parameter that
    is made of parts the parts are among ``params``, without owners, and it itself is ``in_parts``.
    """

    index: int
    name: str
    module: nn.Module
    layout: Layout
    params: tuple[nn.Parameter, ...]
    owners: tuple[tuple[tuple[nn.Module, str], ...], ...]
    buffer_owners: tuple[tuple[nn.Module, str], ...]
    in_parts: tuple[InParts, ...] = ()

    @property
    def trainable(self) -> tuple[nn.Parameter, ...]:
        """The parameters that have room for a gradient, in the order of ``layout.trainable``."""
        return self.params[: len(self.layout.trainable)]

    def placed(self) -> Iterator[tuple[Slice, nn.Parameter]]:
        """Each parameter with its place in the unit's buffers."""
        return zip(self.layout.slices, self.params, strict=True)

    @cached_property
    def registered(self) -> tuple[tuple[str, nn.Parameter, tuple[BufferPlace, ...]], ...]:
        """The parameters as the modules have them: the name of each, itself, and its owners."""
        whole = [
            (slice.param.name, param, owners)
            for (slice, param), owners in zip(self.placed(), self.owners, strict=True)
            if owners
        ]
        return (*whole, *((each.name, each.param, each.owners) for each in self.in_parts))

    @as_plain
    def show_parts(self) -> None:
        """Let the parameters that are made of parts be made of those that ``params`` show now."""
        for each in self.in_parts:
            each.composite.show(plainly(each.of(self.params)))

    @as_plain
    def written(self) -> int:
        """A number that grows whenever somebody writes a parameter in place through PyTorch."""
        return sum(map(_VERSION, self._counted))

    @cached_property
    def _counted(self) -> tuple[nn.Parameter, ...]:
        """Whose writes in place are counted: a write of a parameter that is made of parts is not counted by
        its parts."""
        return (*self.params, *(each.param for each in self.in_parts))

    @as_plain
    def wanted(self) -> list[bool]:
        """Of which parameters a gradient is wanted now.

        Raises ValueError where it is one that was frozen when the model was wrapped: there is no room for it.
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
        """The parameters as autograd leaves that are views of a flat uint8 buffer of weights."""
        views = self.layout.views(weights)
        return [
            view.detach().requires_grad_(param.requires_grad)
            for view, param in zip(views, self.params, strict=True)
        ]

    @as_plain
    def leaves_apart(self, weights: torch.Tensor) -> list[torch.Tensor]:
        """`leaves` that count the writes to themselves alone, and not those to the slot, which will hold
        other layers."""
        views = self.layout.views(weights)
        return [
            view.data.requires_grad_(param.requires_grad)
            for view, param in zip(views, self.params, strict=True)
        ]

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """The unit's module and all that are in it, each once."""
        return self.tree.attributes().modules

    @cached_property
    def tree(self) -> _Tree:
        """Its modules, and what was last found in them."""
        return _Tree(self.module)

    def buffers(self) -> list[torch.Tensor]:
        """The unit's buffers (running statistics, masks), which stay on the device."""
        return [
            buffer for owner, name in self.buffer_owners if (buffer := owner._buffers.get(name)) is not None
        ]

    def attributes(self) -> Attributes:
        """The plain attributes of the unit's modules (training mode, counters, states of a recurrence)."""
        return self.tree.attributes()

    def forget_attributes(self) -> None:
        """Do not keep alive what `attributes` has last found."""
        self.tree.forget()

    @contextmanager
    def with_attributes(self, then: Attributes) -> Iterator[None]:
        """Run the block with the attributes of another moment: a forward run again starts from what the
        first one started from, and does not count twice."""
        now = self.attributes()
        try:
            if then is not now:
                then.put_back()
            yield
        finally:
            now.put_back()

    def buffers_now(self) -> dict[BufferPlace, tuple[torch.Tensor, int, torch.Tensor]]:
        """The buffers as they are: each with its version and a copy of its values."""
        return {
            (owner, name): (buffer, buffer._version, buffer.clone())
            for owner, name in self.buffer_owners
            if (buffer := owner._buffers.get(name)) is not None
        }

    def put_back(self, before: dict[BufferPlace, tuple[torch.Tensor, int, torch.Tensor]]) -> None:
        """Let the buffers be what `buffers_now` has found."""
        for (owner, name), (buffer, _, values) in before.items():
            owner._buffers[name] = buffer
            with torch.no_grad():
                buffer.copy_(values)

    def buffers_changed(
        self, before: dict[BufferPlace, tuple[torch.Tensor, int, torch.Tensor]]
    ) -> dict[BufferPlace, torch.Tensor]:
        """All the values ``before``, if one of the buffers was written or exchanged since, else none.

        All of them, because batch normalisation writes its statistics without saying so, and only its
        counter tells.
        """
        changed = any(
            owner._buffers.get(name) is not buffer or buffer._version != version
            for (owner, name), (buffer, version, _) in before.items()
        )
        return {place: values for place, (_, _, values) in before.items()} if changed else {}

    def with_buffers(self, values: dict[BufferPlace, torch.Tensor]) -> AbstractContextManager[None]:
        """Run the block with copies of ``values`` as buffers: a forward run again starts from what the first
        one started from, and does not count twice."""
        return self._with_buffers(values) if values else nullcontext()

    @contextmanager
    def _with_buffers(self, values: dict[BufferPlace, torch.Tensor]) -> Iterator[None]:
        now = {(owner, name): owner._buffers[name] for owner, name in values}
        try:
            for (owner, name), value in values.items():
                owner._buffers[name] = value.clone()
            yield
        finally:
            for (owner, name), buffer in now.items():
                owner._buffers[name] = buffer

    def buffers_unwritten_by(self, layer: str) -> AbstractContextManager[None]:
        """Raise ValueError after the block if ``layer``, which runs in it another time, has written or
        exchanged a buffer of this unit, which the layer does not have. What the first run alone writes, a
        table that is made when it is needed say, may be written."""
        return self._buffers_unwritten_by(layer) if self.buffer_owners else nullcontext()

    @contextmanager
    def _buffers_unwritten_by(self, layer: str) -> Iterator[None]:
        before = [*map(_stamp, self.buffer_owners)]
        yield
        for place, found in zip(self.buffer_owners, before, strict=True):
            if _stamp(place) != found:
                owner, name = place
                raise ValueError(
                    f"layer '{layer}' writes buffer '{name}' of a {type(owner).__name__} that is in no "
                    "layer, and does so twice, since it runs again (in backward, or to tell what it returns "
                    "of micro-batches): give the layer such a module of its own, or wrap with "
                    "activations='keep' and without micro_batch_size"
                )

    def start_again(self) -> Callable[[], None]:
        """A function that takes spectral norms back to the power iteration of this moment.

        In training each forward makes one iteration more, and with it another weight: the slices of a batch
        each begin with that of the first one, so that all see the weight that the whole batch would.
        """
        before = [(owner, name, owner._buffers[name]) for owner, name in self._iterated]
        values = [(owner, name, buffer.clone()) for owner, name, buffer in before if buffer is not None]

        def put_back() -> None:
            with torch.no_grad():
                for owner, name, value in values:
                    owner._buffers[name].copy_(value)  # type: ignore[union-attr]

        return put_back

    @cached_property
    def _iterated(self) -> tuple[BufferPlace, ...]:
        places: list[BufferPlace] = []
        for module in self.modules:
            if isinstance(module, _SpectralNorm):
                places += [(module, "_u"), (module, "_v")]
            for hook in module._forward_pre_hooks.values():
                if isinstance(hook, SpectralNorm):  # of before there were parametrizations
                    places += [(module, f"{hook.name}_u"), (module, f"{hook.name}_v")]
        return tuple((module, name) for module, name in places if name in module._buffers)

    @cached_property
    def is_short(self) -> bool:
        """Whether it has parameters of fewer bits than fp32."""
        return any(param.dtype.itemsize < torch.float32.itemsize for param in self.params)

    @cached_property
    def steps(self) -> torch.Tensor:
        """How often each of `trainable` was updated, [n] fp32: optimizers count."""
        # NumPy's memory: a plan of the device's does not see it, nor does a default device of the user's
        return torch.from_numpy(np.zeros(len(self.trainable), np.float32))

    @cached_property
    def selection(self) -> Selection:
        """Of which of the tensors that the layer saves there are samples."""
        return Selection()

    @cached_property
    def _places(self) -> frozenset[tuple[nn.Module, str]]:
        return frozenset(place for _, _, owners in self.registered for place in owners)

    def using(self, leaves: Sequence[torch.Tensor]) -> AbstractContextManager[None]:
        """Let the unit's modules see ``leaves`` in place of their parameters inside the block, which is to be
        ``with unit.restored(), unit.using(leaves)``."""
        for leaf in leaves:
            # isinstance(leaf, nn.Parameter), by which layers may tell a weight from what is computed of one
            leaf._is_param = True
        return _Lent(self, leaves)

    def dequantized_once(
        self, *, times: int, backward_on: torch.device | None = None
    ) -> AbstractContextManager[None]:
        """In the block, in which the unit runs so many ``times``, or is recomputed for a backward on a
        device, keep what is made of quantized weights, if it is used again. [Note: dequantized once]"""
        made = [
            each.composite.made
            for each in self.in_parts
            if each.composite.made.is_wanted
            and (times > 1 or (backward_on is not None and each.composite.is_made_again(backward_on)))
        ]
        return kept(made) if made else nullcontext()

    def restored(self) -> AbstractContextManager[None]:
        """After the block the unit's modules see their own parameters, even if Ctrl-C comes while `using`
        lends leaves or gives the parameters back: one Ctrl-C cannot interrupt the ends of both blocks."""
        return _Restored(self)

    def check_owned(self) -> None:
        """Raise ValueError if the modules that `attributes` has last found have others than the parameters
        that they had when the model was wrapped."""
        if self.tree.is_checked:
            return
        for _, param, owners in self.registered:
            for module, name in owners:
                if module._parameters.get(name) is not param:
                    raise ValueError(
                        f"parameter '{name}' of a {type(module).__name__} in layer '{self.name}' was "
                        "replaced or removed after streamer.wrap (torch.func.functional_call does so too): "
                        "write into it (param.copy_ under torch.no_grad), or unwrap first"
                    )
        self._check_places()

    def _check_places(self) -> None:
        places = {
            (module, name)
            for module in self.modules
            for name, param in module._parameters.items()
            if param is not None
        }
        if places == self._places:
            self.tree.is_checked = True
            return
        paths = {module: path for path, module in self.module.named_modules()}
        differing = places - self._places or self._places - places
        changed = sorted(
            f"{paths.get(module, type(module).__name__)}.{name}".lstrip(".") for module, name in differing
        )
        more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        raise ValueError(
            f"layer '{self.name}' has gained or lost parameters since streamer.wrap ('{changed[0]}'{more}): "
            "call streamer.unwrap(model), change the model (adapters too), and wrap it again"
        )

    def restore(self) -> None:
        """Let the unit's modules see their own parameters, whatever they see now, and have their own
        attributes in place of lent ones."""
        self.register(self.params, [each.param for each in self.in_parts])
        for module, attribute, value in self.tree.had:
            vars(module)[attribute] = value
        self.tree.had.clear()
        self.tree.lends = False

    def drop_leaves(self) -> None:
        """Let the unit's modules see their own parameters, should an interrupt have left them with leaves."""
        for _, param, owners in self.registered:
            for module, name in owners:
                seen: torch.Tensor | None = module._parameters.get(name)
                if type(seen) is torch.Tensor:
                    module._parameters[name] = param
        for each in self.in_parts:
            for module, name in each.owners:
                module._parameters[name] = each.param

    @as_plain
    def elsewhere(self, weights: torch.Tensor) -> list[tuple[Slice, nn.Parameter]]:
        """The parameters that do not show their place in ``weights`` (flat uint8): somebody has given them
        other memory."""
        start = weights.data_ptr()
        seen: list[torch.Tensor] = [*self.params]
        for each in self.in_parts:
            for position, part in zip(each.positions, each.composite.parts(), strict=True):
                seen[position] = part
        if start not in self._addresses:
            self._addresses.clear()
            self._addresses[start] = [start + slice.offset for slice in self.layout.slices]
        if [*map(_ADDRESS, seen)] == self._addresses[start]:
            return []
        return [
            (slice, param)
            for (slice, param), tensor in zip(self.placed(), seen, strict=True)
            if slice.numel and not tensor.is_meta and tensor.data_ptr() != start + slice.offset
        ]

    @cached_property
    def _positions(self) -> list[tuple[nn.Module, str, int]]:
        """Under which names of which modules each of `params`, by its position, is registered."""
        return [(*place, position) for position, owners in enumerate(self.owners) for place in owners]

    @cached_property
    def _addresses(self) -> dict[int, list[int]]:
        """Of `params`, by the address of the buffer that they were last looked for in."""
        return {}

    def register(self, tensors: Sequence[torch.Tensor], made: Sequence[torch.Tensor] = ()) -> None:
        """Let the unit's modules see ``tensors`` as their parameters, and ``made`` as those in parts."""
        for module, name, position in self._positions:
            # as torch.func.functional_call does: the module's own __setattr__ takes only Parameters
            module._parameters[name] = tensors[position]  # type: ignore[assignment]
        for each, whole in zip(self.in_parts, made, strict=True):
            for module, name in each.owners:
                module._parameters[name] = whole  # type: ignore[assignment]


class _Tree:
    """The modules of a layer and what they hold, looked for again only where something has changed."""

    def __init__(self, top: nn.Module) -> None:
        self._top = top
        #: whether `Unit.check_owned` has found nothing wrong with the parameters that were last found
        self.is_checked = False
        #: whether the modules may see other tensors than their own parameters
        self.lends = False
        #: attributes that modules of quantized weights had before theirs were lent
        self.had: list[tuple[nn.Module, str, object]] = []
        #: whether the layer's forward leaves tensors to the garbage collector that show its weights
        self.leaves_garbage = False
        self._attributes = Attributes(())
        self._held = Snapshot(())

    def attributes(self) -> Attributes:
        """Of each module once, the top one first; the same object as long as nothing has changed."""
        last, held = self._attributes, self._held
        # attributes tell whether the dicts of children and parameters are the same
        is_known = last.modules and held.modules
        if is_known and not last.have_changed() and not held.holds_others():
            return last
        self._attributes = Attributes(tuple(self._top.modules()))
        modules = self._attributes.modules
        if modules != held.modules or held.has_changed():
            self.is_checked = False
            # what is lent is not kept
            self._held = Snapshot(() if self.lends else modules)
        return self._attributes

    def forget(self) -> None:
        """Keep no attributes alive."""
        self._attributes = Attributes(())


class _Restored:
    """The block of `Unit.restored`.

    Not a generator: one that an interrupt has left unfinished would give the parameters back when the garbage
    collector finds it, which may be in the middle of another run of the layer.
    """

    def __init__(self, unit: Unit) -> None:
        self._unit = unit

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        # mostly the block of `using`, which ends first, has done so already
        if self._unit.tree.lends:
            self._unit.restore()


class _Lent(_Restored):
    """The block of `Unit.using`."""

    def __init__(self, unit: Unit, leaves: Sequence[torch.Tensor]) -> None:
        super().__init__(unit)
        self._leaves = leaves

    def __enter__(self) -> None:
        unit, leaves = self._unit, self._leaves
        unit.tree.lends = True
        if not unit.in_parts:
            unit.register(leaves)
            return
        made = [marked(each.composite.like(each.of(leaves))) for each in unit.in_parts]
        for each, whole in zip(unit.in_parts, made, strict=True):
            for attribute, value in each.composite.lent(whole).items():
                for module in each.composite.modules:
                    unit.tree.had.append((module, attribute, vars(module)[attribute]))
                    vars(module)[attribute] = value
        unit.register(leaves, made)


def _stamp(place: BufferPlace) -> tuple[int, int]:
    """Which tensor a buffer is, and how often that was written."""
    owner, name = place
    buffer = owner._buffers.get(name)
    return id(buffer), 0 if buffer is None else version_of(buffer)


def buffer_bytes(units: Iterable[Unit]) -> int:
    """Bytes of the buffers of ``units``, each counted once."""
    parts = [part for unit in units for buffer in unit.buffers() for part in plain_parts(buffer)]
    # not by address: all meta tensors have the same
    places = {(storage_id(part), part.storage_offset()): part.nbytes for part in parts}
    return sum(places.values())


def _dicts_of(modules: Iterable[nn.Module]) -> list[dict[str, Any]]:
    """Those of their children, and those of their parameters."""
    return [each for module in modules for each in (module._modules, module._parameters)]


def _objects_in(dicts: Iterable[dict[str, Any]]) -> Iterator[Any]:
    return chain.from_iterable(map(dict.values, dicts))
