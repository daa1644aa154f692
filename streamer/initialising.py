"""Values for a model that was built on the meta device, a unit at a time."""

from __future__ import annotations

import abc
import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from streamer.engine.unit import Unit

#: What `wrap(init=...)` takes: sets the values of one module's own parameters and buffers, in place.
Init = Callable[[nn.Module], object]


class UnitInit(abc.ABC):
    """An `Init` that is told when all modules of a unit have been given to it."""

    @abc.abstractmethod
    def __call__(self, module: nn.Module) -> None:
        """Set the values of the module's own parameters and buffers."""

    @abc.abstractmethod
    def end_unit(self, module: nn.Module) -> None:
        """The unit of ``module``, which came last, is through."""


def is_on_meta(unit: Unit) -> bool:
    """Whether the unit has no values yet."""
    return any(tensor.is_meta for tensor in (*unit.params, *unit.buffers()))


def check_init(units: Sequence[Unit], init: Init | None) -> None:
    """Raise ValueError, naming the mend, where ``init`` is missing, of no use, or cannot do its work."""
    if init is not None and not callable(init):
        raise ValueError(f"init={init!r}: it must be a function of a module, as nn.Module.apply takes")
    on_meta = [unit for unit in units if is_on_meta(unit)]
    if init is not None and not on_meta:
        raise ValueError("init= is for a model on the meta device, and this one has values: leave it out")
    for unit in on_meta:
        name = next(
            (slice.param.name for slice, p in zip(unit.layout.slices, unit.params, strict=True) if p.is_meta),
            f"a buffer of {unit.name}",
        )
        if init is None:
            raise ValueError(
                f"parameter '{name}' is on the meta device and has no values: give wrap(init=...) a function "
                "that sets those of a module, as nn.Module.apply takes, or build the model on the CPU"
            )
        if not all(param.is_meta for param in unit.params):
            raise ValueError(
                f"'{unit.name}' is on the meta device in part only ('{name}' is, others are not): build all "
                "of it there, or none"
            )
        for slice, param in zip(unit.layout.slices, unit.params, strict=True):
            if param._backward_hooks or param._post_accumulate_grad_hooks:
                raise ValueError(
                    f"parameter '{slice.param.name}' is on the meta device and has a hook, which would be "
                    "lost: register it after streamer.wrap"
                )


class Initialiser:
    """Gives the parameters and buffers of one unit after another their values, on ``device``.

    ``init`` is called with each module of the unit, children before their parents, as `nn.Module.apply`
    does. Random numbers come from a seed for each unit, made of one number that is drawn here from PyTorch's
    generator and of the unit's name: so `torch.manual_seed` decides, and neither the order of the units nor
    how many there are does.
    """

    def __init__(self, init: Init, device: torch.device, layers: Sequence[Unit]) -> None:
        self._init = init
        self._device = device
        self._inside = {module for unit in layers for module in unit.module.modules()}
        self._layers = {unit.module for unit in layers}
        #: what has taken the place of buffers, which modules of several layers may share
        self._blanks: dict[torch.Tensor, torch.Tensor] = {}
        self._seed = int(torch.randint(2**62, (), device="cpu").item())

    def __call__(self, unit: Unit) -> None:
        """Give ``unit`` its values, unless it has some. Raises ValueError for what gets none."""
        if (unit.params or unit.buffers()) and not is_on_meta(unit):
            return
        for slice, param in zip(unit.layout.slices, unit.params, strict=True):
            exchange(slice.param.name, param, _blank(param, self._device))
        without_values = []
        for owner, name in unit.buffer_owners:
            if (buffer := owner._buffers[name]) is not None and buffer.is_meta:
                if buffer not in self._blanks:
                    self._blanks[buffer] = _blank(buffer, self._device)
                owner._buffers[name] = self._blanks[buffer]
                without_values.append((owner, name))
        places = [
            *(
                _Place(unit, owner, owner._parameters, name)
                for owners in unit.owners
                for owner, name in owners
            ),
            *(_Place(unit, owner, owner._buffers, name) for owner, name in without_values),
        ]
        outside = self._inside if unit.module not in self._layers else ()
        modules = list(_children_first(unit.module, outside))
        with _seeded(_unit_seed(self._seed, unit.name), self._device), torch.no_grad(), self._device:
            for module in modules:
                self._init(module)
            if isinstance(self._init, UnitInit):
                self._init.end_unit(unit.module)
        for place in places:
            place.check()
        for module in modules:
            _check_attributes(unit, module)


def exchange(name: str, param: nn.Parameter, values: torch.Tensor) -> None:
    """Let ``param`` be of ``values``, on whatever device, and yet the object that it is.

    Raises ValueError where PyTorch refuses that, since somebody counts on what it was.
    """
    other = nn.Parameter(values, requires_grad=param.requires_grad)
    other.__class__ = type(param)
    other.__dict__.update(param.__dict__)
    try:
        torch.utils.swap_tensors(param, other)
    except RuntimeError as error:
        raise ValueError(
            f"parameter '{name}' cannot get values in place of the meta device's, since a weak reference or "
            f"a graph holds on to it: let go of it before streamer.wrap ({error})"
        ) from error


def _blank(like: torch.Tensor, device: torch.device) -> torch.Tensor:
    blank = torch.empty(like.shape, dtype=like.dtype, device=device)
    return blank.fill_(float("nan")) if blank.is_floating_point() else blank.zero_()


class _Place:
    """Where a parameter or buffer of ``unit`` is registered, and what was there at first."""

    def __init__(
        self, unit: Unit, owner: nn.Module, registry: Mapping[str, torch.Tensor | None], name: str
    ) -> None:
        self._where = f"'{name}' of a {type(owner).__name__} in '{unit.name}'"
        self._is_param = registry is owner._parameters
        self._registry = registry
        self._name = name
        self._blank = registry[name]
        self._requires_grad = self._blank is not None and self._blank.requires_grad
        self._version = 0 if self._blank is None else self._blank._version

    def check(self) -> None:
        """Raise ValueError unless there are values now."""
        now = self._registry.get(self._name)
        if now is not None and now.requires_grad != self._requires_grad:
            raise ValueError(
                f"init= has changed requires_grad of {self._where}: set it before streamer.wrap, by which "
                "there is room for gradients or none"
            )
        if now is not self._blank and self._is_param:
            raise ValueError(
                f"init= has replaced parameter {self._where}: write into it, as torch.nn.init does"
            )
        if now is None or now is not self._blank or now._version != self._version or not now.numel():
            return
        # what is written through .data leaves the version as it is, but not all NaN
        if not now.is_floating_point() or bool(now.isnan().all()):
            raise ValueError(
                f"init= has given {self._where} no values: let it set all parameters and buffers of the "
                "module that it is called with"
            )


def _check_attributes(unit: Unit, module: nn.Module) -> None:
    for name, value in vars(module).items():
        if isinstance(value, torch.Tensor) and value.is_meta:
            raise ValueError(
                f"attribute '{name}' of a {type(module).__name__} in '{unit.name}' is a tensor on the meta "
                "device and stays there: let init= set it, or make it a buffer"
            )


def _children_first(module: nn.Module, outside: Collection[nn.Module]) -> Iterator[nn.Module]:
    """``module`` and all that is in it but what is ``outside``, each once."""
    seen: set[nn.Module] = set(outside)

    def visit(module: nn.Module) -> Iterator[nn.Module]:
        seen.add(module)
        for child in module.children():
            if child not in seen:
                yield from visit(child)
        yield module

    return visit(module)


def _unit_seed(seed: int, name: str) -> int:
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


@contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Random numbers from ``seed`` on inside the block, as before it after it."""
    on_gpu = device.type == "cuda"
    with torch.random.fork_rng(devices=[device] if on_gpu else []):
        torch.default_generator.manual_seed(seed)
        if on_gpu:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield
