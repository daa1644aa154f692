"""`wrap(init=...)`: a model on the meta device gets its values one unit at a time, so that only the host
shards ever hold all of them."""

from __future__ import annotations

import abc
import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from streamer.engine.unit import Unit

#: A function that sets one module's own parameters and buffers, in place.
Init = Callable[[nn.Module], object]


_WRITE = "let it write into each parameter of the module that it is called with, as torch.nn.init does"


class UnitInit(abc.ABC):
    """An `Init` that is also called at the end of each unit."""

    @abc.abstractmethod
    def __call__(self, module: nn.Module) -> None:
        """Set the values of the module's own parameters and buffers."""

    @abc.abstractmethod
    def end_unit(self, module: nn.Module) -> None:
        """Called after `__call__` for all modules of a unit; ``module`` was the last of them."""


def is_on_meta(unit: Unit) -> bool:
    """Whether a parameter or buffer of the unit has no values yet."""
    return any(tensor.is_meta for tensor in (*unit.params, *unit.buffers()))


def check_init(units: Sequence[Unit], init: Init | None) -> None:
    """Raise ValueError, naming the fix, if ``init`` is missing, not needed or not a function, and if the
    values of a unit are elsewhere or would be lost."""
    if init is not None and not callable(init):
        raise ValueError(f"init={init!r}: it must be a function of a module, as nn.Module.apply takes")
    on_meta = [unit for unit in units if is_on_meta(unit)]
    if init is not None and not on_meta:
        raise ValueError("init= is for a model on the meta device, and this one has values: leave it out")
    for unit in on_meta:
        names = (slice.param.name for slice, param in unit.placed() if param.is_meta)
        name = next(names, f"a buffer of {unit.name}")
        # accelerate's hooks fetch the values for each forward
        if any("_hf_hook" in vars(module) for module in unit.module.modules()):
            raise ValueError(
                f"parameter '{name}' has no values on a device: device_map= has left them on disk or in host "
                "memory; load the model without device_map, or by streamer.from_pretrained(DIR)"
            )
        if init is None:
            raise ValueError(
                f"parameter '{name}' is on the meta device and has no values: set wrap(init=) to a function "
                "that sets those of a module, as nn.Module.apply takes, or build the model on the CPU"
            )
        if not all(param.is_meta for param in unit.params):
            raise ValueError(
                f"'{unit.name}' is only partly on the meta device ('{name}' is, others are not): build all "
                "of it there, or none"
            )
        for slice, param in unit.placed():
            if param._backward_hooks or param._post_accumulate_grad_hooks:
                raise ValueError(
                    f"parameter '{slice.param.name}' is on the meta device and has a hook, which would be "
                    "lost: register it after streamer.wrap"
                )


class Initialiser:
    """Sets the values of the parameters and buffers of one unit after another, on ``device``.

    ``init`` is called with each module of the unit, children before their parents, as `nn.Module.apply` does.
    The random numbers of a unit come from a seed that is derived from the unit's name and from one draw of
    PyTorch's generator: values depend on `torch.manual_seed`, not on the order or the number of the units.
    Without ``init`` every unit already has its values.
    """

    def __init__(self, init: Init | None, device: torch.device, layers: Sequence[Unit]) -> None:
        self._init = init
        self._device = device
        self._layers = {unit.module for unit in layers}
        self._inside = {module for layer in self._layers for module in layer.modules()}
        #: by buffer on the meta device, the tensor that replaces it; modules of several layers may share one
        self._buffers: dict[torch.Tensor, torch.Tensor] = {}
        self._seed = 0 if init is None else int(torch.randint(2**62, (), device="cpu").item())

    def __call__(self, unit: Unit) -> None:
        """Set the values of ``unit``, if it has none. Raises ValueError for a parameter left without."""
        if self._init is None or ((unit.params or unit.buffers()) and not is_on_meta(unit)):
            return
        for slice, param in unit.placed():
            exchange(slice.param.name, param, _unset(param, self._device))
        versions = [param._version for param in unit.params]
        unit.refresh_parts()
        for owner, name in unit.buffer_owners:
            if (buffer := owner._buffers[name]) is not None and buffer.is_meta:
                if buffer not in self._buffers:
                    self._buffers[buffer] = _unset(buffer, self._device)
                owner._buffers[name] = self._buffers[buffer]
        elsewhere = set() if unit.module in self._layers else set(self._inside)
        with _seeded(_unit_seed(self._seed, unit.name), self._device), torch.no_grad(), self._device:
            for module in _children_first(unit.module, elsewhere):
                self._init(module)
            if isinstance(self._init, UnitInit):
                self._init.end_unit(unit.module)
        for (slice, param), owners, version in zip(unit.placed(), unit.owners, versions, strict=True):
            if not all(owner._parameters.get(name) is param for owner, name in owners):
                raise ValueError(f"init= has replaced parameter '{slice.param.name}': {_WRITE}")
            # a write through .data does not change the version, but then the values are not all NaN
            is_untouched = param._version == version and param.is_floating_point() and param.numel()
            if is_untouched and bool(param.isnan().all()):
                raise ValueError(f"init= has left parameter '{slice.param.name}' without values: {_WRITE}")


def exchange(name: str, param: nn.Parameter, values: torch.Tensor) -> None:
    """Replace the tensor of ``param`` by ``values``, on any device; ``param`` stays the same object.

    Raises ValueError if PyTorch refuses: a weak reference or a graph holds ``param``.
    """
    other = nn.Parameter(values, requires_grad=param.requires_grad)
    other.__class__ = type(param)
    other.__dict__.update(param.__dict__)
    try:
        torch.utils.swap_tensors(param, other)
    except RuntimeError as error:
        raise ValueError(
            f"parameter '{name}' cannot get values in place of the meta device's, since a weak reference or "
            f"a graph holds it: release it before streamer.wrap ({error})"
        ) from error


def _unset(like: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the shape and dtype of ``like`` for an `Init` to fill: of NaN, or 0 without NaN."""
    unset = torch.empty(like.shape, dtype=like.dtype, device=device)
    return unset.fill_(float("nan")) if unset.is_floating_point() else unset.zero_()


def _children_first(module: nn.Module, done: set[nn.Module]) -> Iterator[nn.Module]:
    """The modules of ``module``, itself last, each once and without those that are ``done``."""
    done.add(module)
    for child in module.children():
        if child not in done:
            yield from _children_first(child, done)
    yield module


def _unit_seed(seed: int, name: str) -> int:
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


@contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Inside the block random numbers start from ``seed``; the generators' states are restored after it."""
    on_gpu = device.type == "cuda"
    with torch.random.fork_rng(devices=[device] if on_gpu else []):
        torch.default_generator.manual_seed(seed)
        if on_gpu:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield
