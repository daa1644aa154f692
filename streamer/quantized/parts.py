"""Parameters stored as several plain tensors, such as quantized weights.

[Note: parts]
A quantized weight is codes of 8 or 4 bits and their scales, in one object: a tensor subclass that lists its
inner tensors in ``__tensor_flatten__`` (torchao's), or a class of bitsandbytes. A unit holds the plain
tensors, the *parts* of such a parameter, as frozen parameters in their own dtypes. So slots, copies, host
memory, disks and plans need no code for quantization, and checkpoints store one text for each weight
(`Composite.kind`). A `Composite` connects both sides:

- while the layer runs, its modules use a weight assembled from the parts in the slot (`Composite.assemble`);
- the user's parameter stays the same object, assembled from the parts in host memory (`Composite.set_parts`).

The library of the weight dequantizes it on the device, at each use. Only the parts cross the bus.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from streamer.torch_private import SubclassesOff, is_sparse, sparse_of, sparse_parts, storage_id

#: Modules in which a parameter is registered.
Modules = Sequence[nn.Module]


class Composite(abc.ABC):
    """The parameter ``param``, registered in ``modules``, that is assembled from other tensors."""

    #: attributes of the modules that use the same tensors
    attributes: frozenset[str] = frozenset()

    def __init__(self, param: torch.Tensor, modules: Modules) -> None:
        self.param = param
        self.modules = modules
        #: attributes of modules that differ in the wrapped model, with their earlier values
        self.held: dict[nn.Module, dict[str, object]] = {}

    @property
    @abc.abstractmethod
    def names(self) -> list[str]:
        """The name of each part, in order."""

    @abc.abstractmethod
    def parts(self) -> list[torch.Tensor]:
        """The parts, in the order of `names`."""

    @abc.abstractmethod
    def assemble(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """A weight of the kind of ``param``, with other ``parts`` of the same shapes and dtypes on any
        device."""

    @abc.abstractmethod
    def set_parts(self, parts: Sequence[torch.Tensor]) -> None:
        """Replace the parts of ``param`` itself."""

    @property
    @abc.abstractmethod
    def structure(self) -> object:
        """Everything except its parts that the weight's values depend on, to be compared by ``repr``."""

    @property
    @abc.abstractmethod
    def kind(self) -> str:
        """How the parts form the weight, in words for users. Parts of the same names and shapes may mean
        other values in a weight of another kind."""

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype in which the weight takes part in computations, None if it follows its input's."""
        return None

    def is_misread_on(self, device: torch.device) -> bool:
        """Whether the weight's library computes on ``device`` with wrong values."""
        return False

    def module_attributes(self, leaf: torch.Tensor) -> dict[str, object]:
        """Attributes of the modules while they use ``leaf``, a result of `assemble`."""
        return {}

    def hold(self) -> None:
        """Keep the modules of a wrapped model from changing the memory of their weight. `held` has the
        attributes that this changes."""
        return

    def let_go(self) -> None:
        """Undo `hold`, if it was called."""
        for module, had in self.held.items():
            vars(module).update(had)
        self.held.clear()


def composite_of(name: str, param: torch.Tensor, modules: Modules) -> Composite | None:
    """The `Composite` of ``param``; None for a plain parameter.

    Raises ValueError, with the remedy, for a class that cannot be split or a weight not quantized yet.
    """
    kind: Any = type(param)
    parametrizations = [
        each for module in modules if isinstance(module, ParametrizationList) for each in module
    ]
    if kind is nn.Parameter and not any(map(_is_of_bitsandbytes, parametrizations)):
        return None
    if has_inner_tensors(param):
        if hasattr(param, "device_mesh"):
            raise ValueError(
                f"parameter '{name}' is a DTensor: pass streamer.wrap the whole model (param.full_tensor()), "
                "and several GPUs by process_group="
            )
        return _Subclass(param, modules)
    if any(map(_is_of_bitsandbytes, (param, *parametrizations))):
        of_class: Callable[..., Composite | None] = import_module(
            "streamer.quantized.bitsandbytes"
        ).composite_of
        return of_class(name, param, modules)
    return None


def _is_of_bitsandbytes(thing: object) -> bool:
    return type(thing).__module__.partition(".")[0] == "bitsandbytes"


def parts_of(param: torch.Tensor) -> list[torch.Tensor]:
    """The parts of a parameter; the parameter itself if it is plain."""
    composite = composite_of("", param, ())
    return [param] if composite is None else composite.parts()


def shape_of(param: torch.Tensor) -> tuple[int, ...]:
    """The shape of a parameter's values. The tensor's own shape is that of the codes for 4 bits."""
    state = getattr(param, "quant_state", None)
    return tuple(param.shape if state is None else state.shape)


def values_in(param: torch.Tensor) -> int:
    """The number of a parameter's values: with 4 bits, two in each byte."""
    return math.prod(shape_of(param))


def has_inner_tensors(tensor: object) -> bool:
    """Whether ``tensor`` is of a subclass that lists its inner tensors."""
    return bool(is_traceable_wrapper_subclass(tensor))


def plain_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The plain tensors in ``tensor``: itself, unless it is sparse or of a subclass with inner tensors."""
    if is_sparse(tensor):
        return sparse_parts(tensor)
    if type(tensor) is torch.Tensor or not has_inner_tensors(tensor):
        return [tensor]
    return [*_Recipe.of(tensor).take(tensor)]


def aliases(tensor: torch.Tensor, buffer: torch.Tensor) -> bool:
    """Whether ``tensor``, or a part of it, has the storage of ``buffer``, compared by identity: all meta
    tensors have the same address."""
    number = storage_id(buffer)
    return any(storage_id(part) == number for part in plain_parts(tensor))


def rebuilt(tensor: torch.Tensor, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """A tensor of the kind of ``tensor`` (sparse, or of a subclass with inner tensors) with other
    ``parts``."""
    if is_sparse(tensor):
        return sparse_of(tensor, parts)
    return _Recipe.of(tensor).make(iter(parts))


@dataclasses.dataclass(frozen=True)
class _Recipe:
    """The structure of a tensor of a subclass: by attribute its inner tensors, which may be of a subclass
    themselves, and the other arguments of ``__tensor_unflatten__``."""

    kind: Any
    inner: tuple[tuple[str, _Recipe | None], ...]
    context: Any
    size: torch.Size
    stride: tuple[int, ...]

    @staticmethod
    def of(tensor: Any) -> _Recipe:
        names, context = tensor.__tensor_flatten__()
        inner = ((name, getattr(tensor, name)) for name in names)
        recipes = tuple(
            (name, _Recipe.of(value) if has_inner_tensors(value) else None) for name, value in inner
        )
        kind = getattr(type(tensor), "_plain_class", type(tensor))
        return _Recipe(kind, recipes, context, tensor.shape, tensor.stride())

    def names(self, prefix: str = "") -> Iterator[str]:
        """The names of the plain tensors."""
        for name, recipe in self.inner:
            if recipe is None:
                yield prefix + name
            else:
                yield from recipe.names(f"{prefix}{name}.")

    def take(self, tensor: torch.Tensor) -> Iterator[torch.Tensor]:
        """The plain tensors in ``tensor``."""
        for name, recipe in self.inner:
            value = getattr(tensor, name)
            yield from [value] if recipe is None else recipe.take(value)

    def make(self, parts: Iterator[torch.Tensor]) -> torch.Tensor:
        """A tensor of this structure, from the next of ``parts``."""
        inner = {name: next(parts) if recipe is None else recipe.make(parts) for name, recipe in self.inner}
        device = next(iter(inner.values())).device
        context = _on_device(self.context, device)
        whole: torch.Tensor = self.kind.__tensor_unflatten__(inner, context, self.size, self.stride)
        return whole

    def put(self, tensor: torch.Tensor, parts: Iterator[torch.Tensor]) -> None:
        """Replace the plain tensors in ``tensor`` by the next of ``parts``."""
        for name, recipe in self.inner:
            if recipe is None:
                setattr(tensor, name, next(parts))
            else:
                recipe.put(getattr(tensor, name), parts)


def _on_device(context: Any, device: torch.device) -> Any:
    """``context`` with ``device`` in place of the devices in it."""
    if isinstance(context, torch.device):
        return device
    if isinstance(context, dict):
        return {key: _on_device(value, device) for key, value in context.items()}
    if type(context) in (list, tuple):
        return type(context)(_on_device(value, device) for value in context)
    is_instance = dataclasses.is_dataclass(context) and not isinstance(context, type)
    if is_instance and isinstance(getattr(context, "device", None), torch.device):
        return dataclasses.replace(context, device=device)
    return context


class _Subclass(Composite):
    """A parameter of a subclass with ``__tensor_flatten__``."""

    def __init__(self, param: torch.Tensor, modules: Modules) -> None:
        super().__init__(param, modules)
        self._recipe = _Recipe.of(param)

    @property
    def names(self) -> list[str]:
        return [*self._recipe.names()]

    def parts(self) -> list[torch.Tensor]:
        return [*self._recipe.take(self.param)]

    def assemble(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return self._recipe.make(iter(parts))

    def set_parts(self, parts: Sequence[torch.Tensor]) -> None:
        if self.param.device == parts[0].device:
            self._recipe.put(self.param, iter(parts))
        else:  # a wrapper's own device never changes
            become(self.param, self.assemble(parts))

    @property
    def structure(self) -> object:
        return self._recipe

    @property
    def kind(self) -> str:
        of_class = self._recipe.kind
        return f"{of_class.__module__.partition('.')[0]} {of_class.__name__}"

    @property
    def dtype(self) -> torch.dtype:
        return self.param.dtype


def become(param: torch.Tensor, other: torch.Tensor) -> None:
    """Turn ``param``, which stays the same object, into ``other``, on another device."""
    kept = {name: value for name, value in vars(param).items() if name not in vars(other)}
    other.__dict__.update(kept)
    other.__class__ = type(param)
    torch.utils.swap_tensors(param, other)


def marked(leaf: torch.Tensor) -> torch.Tensor:
    """``leaf``, marked as a parameter for layers (``isinstance(leaf, nn.Parameter)``)."""
    leaf._is_param = True
    return leaf


def plainly(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """``tensors`` as plain ones, without gradients; both count writes in place."""
    with SubclassesOff():
        return [torch.Tensor.detach(tensor) for tensor in tensors]
