"""A model's weights move into host memory, a unit at a time, and out of it again.

Beside the host shards there is never more than one unit in memory: a unit's own storage is given up as soon
as its weights are in its shard, and a unit on the meta device gets its values when its turn comes.
"""

from __future__ import annotations

import abc
import hashlib
import sys
from bisect import bisect_right
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch import nn
from tqdm import tqdm

from streamer.backends.base import Backend
from streamer.backends.host_memory import file_mappings, give_back_freed
from streamer.backends.ranks import Ranks
from streamer.backends.virtual import VirtualBackend
from streamer.engine.guard import not_a_number
from streamer.engine.unit import Unit
from streamer.errors import DiskError, shortened, warn
from streamer.planner.machine import CPU, context_bytes
from streamer.quantized.parts import plain_parts
from streamer.store.host import HostStore
from streamer.store.layout import Slice
from streamer.store.ledger import Room, limit_of
from streamer.store.purposes import DIVIDED, MASTERING
from streamer.store.shard import HostShard

#: What `wrap(init=...)` takes: a function that sets one module's own parameters and buffers, in place.
Init = Callable[[nn.Module], object]


class UnitInit(abc.ABC):
    """An `Init` that is told when all modules of a unit have been given to it."""

    @abc.abstractmethod
    def __call__(self, module: nn.Module) -> None:
        """Set the values of the module's own parameters and buffers."""

    @abc.abstractmethod
    def end_unit(self, module: nn.Module) -> None:
        """All modules of the unit of ``module``, the last of them, have been given to `__call__`."""


def is_on_meta(unit: Unit) -> bool:
    """Whether a parameter or buffer of the unit has no values yet."""
    return any(tensor.is_meta for tensor in (*unit.params, *unit.buffers()))


def check_init(units: Sequence[Unit], init: Init | None) -> None:
    """Raise ValueError, naming the remedy, where ``init`` is missing or not needed, or is no function, where
    a unit cannot be given values, and where its values are in another place."""
    if init is not None and not callable(init):
        raise ValueError(f"init={init!r}: it must be a function of a module, as nn.Module.apply takes")
    on_meta = [unit for unit in units if is_on_meta(unit)]
    if init is not None and not on_meta:
        raise ValueError("init= is for a model on the meta device, and this one has values: leave it out")
    for unit in on_meta:
        name = next(
            (slice.param.name for slice, p in unit.placed() if p.is_meta),
            f"a buffer of {unit.name}",
        )
        # accelerate's, which bring the values for each forward
        if any("_hf_hook" in vars(module) for module in unit.module.modules()):
            raise ValueError(
                f"parameter '{name}' has no values on a device: device_map= has left them on disk or in host "
                "memory; load the model without device_map, or by streamer.from_pretrained(DIR)"
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
        for slice, param in unit.placed():
            if param._backward_hooks or param._post_accumulate_grad_hooks:
                raise ValueError(
                    f"parameter '{slice.param.name}' is on the meta device and has a hook, which would be "
                    "lost: register it after streamer.wrap"
                )


class Initialiser:
    """Gives the parameters and buffers of one unit after another their values, on ``device``.

    ``init`` is called with each module of the unit, children before their parents, as `nn.Module.apply` does.
    Random numbers come from a seed for each unit, made of the unit's name and of one number that is drawn
    here from PyTorch's generator. So the values depend on `torch.manual_seed`, and not on the order or the
    number of the units.
    """

    def __init__(self, init: Init, device: torch.device, layers: Sequence[Unit]) -> None:
        self._init = init
        self._device = device
        self._inside = {module for unit in layers for module in unit.module.modules()}
        self._layers = {unit.module for unit in layers}
        #: by buffer on the meta device, what takes its place; modules of several layers may share one
        self._blanks: dict[torch.Tensor, torch.Tensor] = {}
        self._seed = int(torch.randint(2**62, (), device="cpu").item())

    def __call__(self, unit: Unit) -> None:
        """Give ``unit`` its values, unless it has values. Raises ValueError for a tensor that gets none."""
        if (unit.params or unit.buffers()) and not is_on_meta(unit):
            return
        for slice, param in unit.placed():
            exchange(slice.param.name, param, _unset(param, self._device))
        unit.show_parts()
        blanks = [
            _Blank(unit, owner, owner._parameters, name) for owners in unit.owners for owner, name in owners
        ]
        for owner, name in unit.buffer_owners:
            if (buffer := owner._buffers[name]) is not None and buffer.is_meta:
                if buffer not in self._blanks:
                    self._blanks[buffer] = _unset(buffer, self._device)
                owner._buffers[name] = self._blanks[buffer]
                blanks.append(_Blank(unit, owner, owner._buffers, name))
        outside = self._inside if unit.module not in self._layers else ()
        modules = list(_children_first(unit.module, set(outside)))
        with _seeded(_unit_seed(self._seed, unit.name), self._device), torch.no_grad(), self._device:
            for module in modules:
                self._init(module)
            if isinstance(self._init, UnitInit):
                self._init.end_unit(unit.module)
        for blank in blanks:
            blank.check_filled()
        for module in modules:
            _check_attributes(unit, module)


def exchange(name: str, param: nn.Parameter, values: torch.Tensor) -> None:
    """Give ``param`` the tensor ``values``, on whatever device, and keep it the same object.

    Raises ValueError where PyTorch refuses that: where a weak reference or a graph holds ``param``.
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


def _unset(like: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the shape and dtype of ``like`` for an `Init` to fill: of NaN, or 0 if it has no NaN."""
    unset = torch.empty(like.shape, dtype=like.dtype, device=device)
    return unset.fill_(float("nan")) if unset.is_floating_point() else unset.zero_()


class _Blank:
    """A parameter or buffer that `Initialiser` has put in place of one on the meta device."""

    def __init__(
        self, unit: Unit, owner: nn.Module, registry: Mapping[str, torch.Tensor | None], name: str
    ) -> None:
        tensor = registry[name]  # None if the init of another unit has removed the parameter
        self._where = f"'{name}' of a {type(owner).__name__} in '{unit.name}'"
        self._is_param = registry is owner._parameters
        self._registry, self._name, self._tensor = registry, name, tensor
        self._version = 0 if tensor is None else tensor._version
        self._requires_grad = tensor is not None and tensor.requires_grad

    def check_filled(self) -> None:
        """Raise ValueError unless the `Init` has set it, in place if it is a parameter."""
        now = self._registry.get(self._name)
        if now is not None and now.requires_grad != self._requires_grad:
            raise ValueError(
                f"init= has changed requires_grad of {self._where}: set it before streamer.wrap, which makes "
                "room for the gradients of trained parameters only"
            )
        if now is not self._tensor and self._is_param:
            raise ValueError(
                f"init= has replaced parameter {self._where}: write into it, as torch.nn.init does"
            )
        if now is None or now is not self._tensor or now._version != self._version or not now.numel():
            return
        # a write through .data leaves the version as it is, but the values are not all NaN then
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


def _children_first(module: nn.Module, seen: set[nn.Module]) -> Iterator[nn.Module]:
    """The modules of ``module``, itself last, each once and without those that were ``seen``."""
    seen.add(module)
    for child in module.children():
        if child not in seen:
            yield from _children_first(child, seen)
    yield module


def _unit_seed(seed: int, name: str) -> int:
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


@contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Let random numbers begin from ``seed`` inside the block, and go on after it as if it had not been."""
    on_gpu = device.type == "cuda"
    with torch.random.fork_rng(devices=[device] if on_gpu else []):
        torch.default_generator.manual_seed(seed)
        if on_gpu:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield


class MoveIn:
    """Moves the weights of ``units``, the root unit's last, into the shards of ``store``."""

    def __init__(
        self,
        backend: Backend,
        units: Sequence[Unit],
        store: HostStore,
        initialise: Initialiser | None,
        ranks: Ranks,
    ) -> None:
        """Of ``ranks``, which share the shards, the first one gives the values, to other machines too."""
        self._ranks = ranks
        self._backend = backend
        self._units = units
        self._store = store
        self._initialise = initialise
        self._was = {param: (param.device, param.dtype) for unit in units for param in unit.params}
        self._buffers_were = [
            (owner, name, owner._buffers[name]) for unit in units for owner, name in unit.buffer_owners
        ]
        self._moved: list[Unit] = []
        #: by buffer of before, its copy on the device; modules of several layers may share one
        self._moved_buffers: dict[torch.Tensor, torch.Tensor] = {}

    @property
    def _gives_values(self) -> bool:
        return self._ranks.is_first_of_machine

    def run(self) -> None:
        """Move all units; a progress bar shows where that takes more than a second."""
        # a log file gets a line every ten seconds, a terminal ten a second
        interval = 0.1 if sys.stderr.isatty() else 10.0
        bar = tqdm(self._units, "to host memory", unit="unit", delay=1.0, mininterval=interval, leave=False)
        for unit, shard in zip(bar, self._store.shards, strict=True):
            self._take(unit, shard)
        if not self._ranks.is_alone:
            self._ranks.exchange("all weights are in host memory")
            whole = (
                held
                for shard in self._store.shards
                for name, held in shard.held.items()
                if not (shard.is_divided and name in DIVIDED)
            )
            self._ranks.replicate(whole)
            for buffer in self._moved_buffers.values():
                for part in plain_parts(buffer):
                    sent = part.contiguous()  # itself, where its elements are in order
                    self._ranks.broadcast(sent)
                    part.copy_(sent)
        self._store.pin(self._backend.pin)

    def undo(self) -> None:
        """Let parameters and buffers be what they were, on the devices where they were."""
        with ExitStack() as each:  # goes on after an error
            for unit, shard in zip(self._units, self._store.shards, strict=True):
                each.callback(self._put_back, unit, shard)
            for owner, name, buffer in self._buffers_were:
                owner._buffers[name] = buffer

    def _put_back(self, unit: Unit, shard: HostShard) -> None:
        unit.register_own()  # the user's code may have replaced some
        if unit in self._moved:
            take_out(self._backend, unit, shard, {param: self._was[param][1] for param in unit.params})
        for slice, param in unit.placed():
            device, dtype = self._was[param]
            if param.device == device:
                continue
            if device.type == "meta":
                exchange(slice.param.name, param, torch.empty(param.shape, dtype=dtype, device=device))
            else:
                param.data = param.data.to(device)
        unit.show_parts()

    def _take(self, unit: Unit, shard: HostShard) -> None:
        if self._initialise is not None:
            self._initialise(unit)
        virtual = self._backend.device.type == "meta"
        if not virtual:
            of_first = dict[Slice, torch.Tensor]()
            if self._ranks.machines > 1:
                of_first = self._of_first_machine(unit, shard)
            if self._gives_values:
                with self._store.weights_in(shard):
                    for slice, param in unit.placed():
                        # a copy from a GPU runs on the caller's own stream, so after what has written it;
                        # nobody holds what it was copied from, or more than one copy
                        load = partial(shard.load, slice, of_first.pop(slice, param.detach()).cpu())
                        self._backend.on_host(load)
                        del load
        self._moved.append(unit)
        for slice, param in unit.placed():
            param.grad = None
            if slice.param.trainable:
                param.grad_dtype = None  # the gradient may have the parameter's dtype or fp32: [Note: sums]
            # the root unit's parameters, too, give up their storage; later they show the device's buffer
            if shard.is_out:  # one number, of whatever shape, takes no memory
                nothing = not_a_number(slice.dtype, torch.device("meta" if virtual else "cpu"))
                param.data = nothing.expand(slice.param.shape)
            else:
                param.data = slice.own(shard.weight)
        unit.show_parts()
        for owner, name in unit.buffer_owners:
            if (buffer := owner._buffers[name]) is not None:
                if buffer not in self._moved_buffers:
                    self._moved_buffers[buffer] = buffer.to(self._backend.device)
                owner._buffers[name] = self._moved_buffers[buffer]
        give_back_freed()

    def _of_first_machine(self, unit: Unit, shard: HostShard) -> dict[Slice, torch.Tensor]:
        """The first machine's values of what is not copied from its host memory to the others' later: weights
        on disk, and short ones whose masters are on disk, or in parts on the machines."""
        out, wanted = shard.weights_on_disk, list[tuple[Slice, torch.dtype, torch.Tensor]]()
        has_masters_apart = shard.is_divided or any(map(shard.is_on_disk, MASTERING))
        for slice, param in unit.placed():
            is_short = slice.param.trainable and slice.dtype != torch.float32
            if (is_short and has_masters_apart) or not (out.is_empty or out.is_stored(slice)):
                wanted.append((slice, torch.float32 if is_short else slice.dtype, param))
        if not wanted:
            return {}
        # copies: those of another machine are replaced
        values = {
            slice: param.detach().to("cpu", dtype, copy=True).contiguous()
            for slice, dtype, param in wanted
            if self._gives_values
        }
        self._ranks.exchange(f"'{unit.name}' is about to be in host memory")
        self._ranks.replicate(each.view(-1) for each in values.values())
        return values


def take_out(
    backend: Backend,
    unit: Unit,
    shard: HostShard,
    dtypes: dict[nn.Parameter, torch.dtype],
    moved: Container[nn.Parameter] = (),
) -> None:
    """Give the parameters of ``unit`` storage of their own on the CPU, with the exact values of ``shard``
    rounded to ``dtypes``; those in ``moved``, to which user code has given other memory, keep their values.
    Gradients are dropped, and the unit's buffers come to the CPU. Warns of masters that a disk has lost: such
    parameters get the streamed values."""
    inexact: list[str] = []
    for slice, param in unit.placed():
        param.grad = None
        if param in moved:
            param.data = param.data.cpu()
        elif backend.device.type != "meta":
            if shard.is_divided and slice.param.trainable:
                # after an error in `wrap`, when other machines cannot be asked
                param.data = shard.weight_of(slice).clone()
                if slice.dtype != torch.float32:
                    inexact.append(slice.param.name)
                    why = "other machines have parts of them"
                param.data = param.data.to(dtypes[param])
                continue
            try:
                param.data = backend.on_host(partial(shard.values, slice, dtypes[param]))
            except DiskError as error:
                param.data = shard.weight_of(slice).clone()
                inexact.append(slice.param.name)
                why = str(error)
        param.data = param.data.to(dtypes[param])
    unit.show_parts()
    if inexact:
        warn(f"{shortened(inexact)}: no more exact than as streamed, since fp32 masters are lost ({why})")
    for owner, name in unit.buffer_owners:
        if (buffer := owner._buffers.get(name)) is not None and not buffer.is_meta:
            owner._buffers[name] = buffer.cpu()


def room_of(backend: Backend, given_up: Iterable[torch.Tensor] = (), *, limit: int | None = None) -> Room:
    """The bytes that are free now, with those that `MoveIn` gives up of the parameters ``given_up``.

    ``limit`` is the ``device_memory`` that ``backend`` is about to be limited to.
    """
    given_up = list(given_up)
    kind = backend.machine.kind if isinstance(backend, VirtualBackend) else backend.device.type
    on_device = 0 if kind == CPU else releasable_bytes(given_up, backend.device)
    on_host = releasable_bytes(given_up, torch.device("cpu"))
    # what CUDA itself takes is not free any more
    context = context_bytes(backend.device.type)
    if limit is not None and (used := backend.device_used()) is not None:
        # a limit holds for all that this process has allocated
        limit = max(0, limit - max(0, used[0] - on_device))
    return Room(
        device=backend.device_available() + on_device + context,
        host=backend.host_available() + on_host,
        budget=limit_of(limit),
        shared=kind == CPU,
        context=context,
        given_back=on_host,
        lockable=limit_of(backend.host_lockable()),
    )


def releasable_bytes(params: Iterable[torch.Tensor], device: torch.device) -> int:
    """Bytes of the storages on ``device`` that `MoveIn` gives up.

    Storages that are mapped from a file or shared with other processes are not counted (on Linux). Storages
    that the caller holds by other tensors are counted: PyTorch does not tell of those.
    """
    storages = {
        storage.data_ptr(): storage.nbytes()
        for param in params
        if param.device == device and not param.is_meta
        for storage in [param.untyped_storage()]
    }
    files = file_mappings() if storages and device.type == "cpu" else []

    def is_of_a_file(address: int) -> bool:
        before = bisect_right(files, address, key=lambda file: file[0])
        return before > 0 and address < files[before - 1][1]

    return sum(nbytes for address, nbytes in storages.items() if not is_of_a_file(address))
