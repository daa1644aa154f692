"""Parameters that are made of several plain tensors, as quantized weights are.

[Note: parts]
A quantized weight is codes of 8 or 4 bits and their scales, in one object: a tensor subclass that tells its
inner tensors by ``__tensor_flatten__`` (torchao's), or a class of bitsandbytes. A unit holds the plain
tensors, the *parts* of such a parameter, as frozen parameters in their own dtypes. So slots, copies, host
memory, disks and plans know nothing of quantization, and checkpoints a word for each weight
(`Composite.kind`). A `Composite` connects both sides:

- in a run of the layer its modules see a weight that is made of the parts in the slot (`Composite.like`);
- the user's parameter stays the same object, and is made of the parts in host memory (`Composite.show`).

The library that made a weight dequantizes it on the device, at each use. Only the parts cross the bus.
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
    """The parameter ``param``, registered in ``modules``, that is made of other tensors."""

    #: attributes of the modules that are made of the same tensors
    attributes: frozenset[str] = frozenset()

    def __init__(self, param: torch.Tensor, modules: Modules) -> None:
        self.param = param
        self.modules = modules
        #: attributes of modules that are others in the wrapped model, as they were before
        self.held: dict[nn.Module, dict[str, object]] = {}

    @property
    @abc.abstractmethod
    def names(self) -> list[str]:
        """The name of each part, in order."""

    @abc.abstractmethod
    def parts(self) -> list[torch.Tensor]:
        """The parts, in the order of `names`."""

    @abc.abstractmethod
    def like(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """A weight as ``param`` is, made of other ``parts`` of the same shapes and dtypes on any device."""

    @abc.abstractmethod
    def show(self, parts: Sequence[torch.Tensor]) -> None:
        """Let ``param`` itself be made of ``parts``."""

    @property
    @abc.abstractmethod
    def structure(self) -> object:
        """What the weight's values depend on beside its parts, to be compared by its ``repr``."""

    @property
    @abc.abstractmethod
    def kind(self) -> str:
        """How the weight is made of its parts, in words for users. Parts of the same names and shapes may
        stand for other values in a weight of another kind."""

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype in which the weight takes part in computations, None where it follows its input's."""
        return None

    def is_misread_on(self, device: torch.device) -> bool:
        """Whether the library that made the weight computes on ``device`` with other values than it has."""
        return False

    def lent(self, leaf: torch.Tensor) -> dict[str, object]:
        """Attributes that the modules are to have while they see ``leaf``, which `like` has made."""
        return {}

    def hold(self) -> None:
        """Let the modules of a wrapped model leave the memory of their weight as it is. `held` has what that
        changes."""
        return

    def let_go(self) -> None:
        """End what `hold` has begun, if it has."""
        for module, had in self.held.items():
            vars(module).update(had)
        self.held.clear()


def composite_of(name: str, param: torch.Tensor, modules: Modules) -> Composite | None:
    """What ``param`` is made of; None for a plain parameter.

    Raises ValueError, with the remedy, for one of a class that cannot be taken apart or is not quantized yet.
    """
    kind: Any = type(param)
    beside = [each for module in modules if isinstance(module, ParametrizationList) for each in module]
    if kind is nn.Parameter and not any(map(_is_of_bitsandbytes, beside)):
        return None
    if has_inner_tensors(param):
        if hasattr(param, "device_mesh"):
            raise ValueError(
                f"parameter '{name}' is a DTensor: give streamer.wrap the whole model (param.full_tensor()), "
                "and several GPUs by process_group="
            )
        return _Subclass(param, modules)
    if any(map(_is_of_bitsandbytes, (param, *beside))):
        of_class: Callable[..., Composite | None] = import_module(
            "streamer.quantized.bitsandbytes"
        ).composite_of
        return of_class(name, param, modules)
    return None


def _is_of_bitsandbytes(thing: object) -> bool:
    return type(thing).__module__.partition(".")[0] == "bitsandbytes"


def parts_of(param: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that a parameter is made of, itself if it is a plain one."""
    composite = composite_of("", param, ())
    return [param] if composite is None else composite.parts()


def shape_of(param: torch.Tensor) -> tuple[int, ...]:
    """The shape of the values that a parameter stands for: one in 4 bits shows that of its codes."""
    state = getattr(param, "quant_state", None)
    return tuple(param.shape if state is None else state.shape)


def values_in(param: torch.Tensor) -> int:
    """How many values a parameter stands for: of one in 4 bits a byte has two."""
    return math.prod(shape_of(param))


def has_inner_tensors(tensor: object) -> bool:
    """Whether ``tensor`` is of a subclass that tells its inner tensors."""
    return bool(is_traceable_wrapper_subclass(tensor))


def plain_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The plain tensors that ``tensor`` is made of: itself, unless it is sparse or of a subclass with inner
    tensors."""
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


def remade(tensor: torch.Tensor, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """A tensor as ``tensor``, sparse or of a subclass with inner tensors, made of other ``parts``."""
    if is_sparse(tensor):
        return sparse_of(tensor, parts)
    return _Recipe.of(tensor).make(iter(parts))


@dataclasses.dataclass(frozen=True)
class _Recipe:
    """How a tensor of a subclass is put together: by attribute its inner tensors, which may be of a subclass
    themselves, and what else ``__tensor_unflatten__`` takes."""

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
        """A tensor of this kind, of the next of ``parts``."""
        inner = {name: next(parts) if recipe is None else recipe.make(parts) for name, recipe in self.inner}
        device = next(iter(inner.values())).device
        context = _on_device(self.context, device)
        made: torch.Tensor = self.kind.__tensor_unflatten__(inner, context, self.size, self.stride)
        return made

    def put(self, tensor: torch.Tensor, parts: Iterator[torch.Tensor]) -> None:
        """Let ``tensor`` be made of the next of ``parts``."""
        for name, recipe in self.inner:
            if recipe is None:
                setattr(tensor, name, next(parts))
            else:
                recipe.put(getattr(tensor, name), parts)


def _on_device(context: Any, device: torch.device) -> Any:
    """``context`` with ``device`` in place of the devices that are told in it."""
    if isinstance(context, torch.device):
        return device
    if isinstance(context, dict):
        return {key: _on_device(value, device) for key, value in context.items()}
    if type(context) in (list, tuple):
        return type(context)(_on_device(value, device) for value in context)
    told = dataclasses.is_dataclass(context) and not isinstance(context, type)
    if told and isinstance(getattr(context, "device", None), torch.device):
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

    def like(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return self._recipe.make(iter(parts))

    def show(self, parts: Sequence[torch.Tensor]) -> None:
        if self.param.device == parts[0].device:
            self._recipe.put(self.param, iter(parts))
        else:  # a wrapper's own device stays for good
            become(self.param, self.like(parts))

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
    """Let ``param``, which stays the same object, be what ``other`` is, on another device."""
    kept = {name: value for name, value in vars(param).items() if name not in vars(other)}
    other.__dict__.update(kept)
    other.__class__ = type(param)
    torch.utils.swap_tensors(param, other)


def marked(leaf: torch.Tensor) -> torch.Tensor:
    """``leaf``, which layers are to take for a parameter (``isinstance(leaf, nn.Parameter)``)."""
    leaf._is_param = True
    return leaf


def plainly(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """``tensors`` as plain ones, without gradients; writes in place are counted in both."""
    with SubclassesOff():
        return [torch.Tensor.detach(tensor) for tensor in tensors]
