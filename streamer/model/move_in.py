"""Moves a model's weights into host memory, one unit at a time, and out of it again.

Host memory never holds more than one unit twice: a unit's own storage is freed as soon as its weights are in
its shard.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Container, Sequence
from contextlib import ExitStack
from functools import partial

import torch
from torch import nn
from tqdm import tqdm

from streamer.backends.base import Backend
from streamer.backends.host_memory import give_back_freed
from streamer.backends.ranks import Ranks
from streamer.engine.guard import not_a_number
from streamer.engine.unit import Unit
from streamer.errors import DiskError, shortened, warn
from streamer.model.init import exchange
from streamer.quantized.parts import plain_parts
from streamer.store.host import HostStore
from streamer.store.layout import Slice
from streamer.store.purposes import DIVIDED, MASTERING
from streamer.store.shard import HostShard


class MoveIn:
    """Moves the weights of ``units``, the root unit's last, into the shards of ``store``. ``initialise`` sets
    the values of a unit before that. The first of ``ranks`` has the values for all."""

    def __init__(
        self,
        backend: Backend,
        units: Sequence[Unit],
        store: HostStore,
        initialise: Callable[[Unit], None],
        ranks: Ranks,
    ) -> None:
        self._backend = backend
        self._units = units
        self._store = store
        self._initialise = initialise
        self._ranks = ranks
        self._was = {param: (param.device, param.dtype) for unit in units for param in unit.params}
        self._buffers_were = [
            (owner, name, owner._buffers[name]) for unit in units for owner, name in unit.buffer_owners
        ]
        self._moved: list[Unit] = []
        #: by buffer of the plain model, its copy on the device; modules of several layers may share one
        self._moved_buffers: dict[torch.Tensor, torch.Tensor] = {}

    def run(self) -> None:
        """Move all units, with a progress bar if that takes more than a second."""
        # a log file gets a line every ten seconds, a terminal ten a second
        interval = 0.1 if sys.stderr.isatty() else 10.0
        bar = tqdm(self._units, "to host memory", unit="unit", delay=1.0, mininterval=interval, leave=False)
        for unit, shard in zip(bar, self._store.shards, strict=True):
            self._take(unit, shard)
        self._take_from_first_rank()
        self._store.pin(self._backend.pin)

    def _take(self, unit: Unit, shard: HostShard) -> None:
        self._initialise(unit)
        if self._backend.has_values:
            self._load(unit, shard)
        self._moved.append(unit)
        self._give_up_storage(unit, shard)
        self._move_buffers(unit)
        give_back_freed()

    def undo(self) -> None:
        """Restore parameters and buffers on their former devices."""
        with ExitStack() as each:  # continues after an error
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
        unit.refresh_parts()

    def _load(self, unit: Unit, shard: HostShard) -> None:
        """Write the unit's weights into its shard."""
        of_first = self._of_first_machine(unit, shard)
        if self._ranks.is_first_of_machine:
            with self._store.weights_in(shard):
                for slice, param in unit.placed():
                    # `cpu` runs on the caller's own stream, so after the kernels that wrote the parameter;
                    # the copy is freed before the next one is created
                    load = partial(shard.load, slice, of_first.pop(slice, param.detach()).cpu())
                    self._backend.on_host(load)
                    del load

    def _give_up_storage(self, unit: Unit, shard: HostShard) -> None:
        """Point the unit's parameters at the shard. (Those of the root unit will be on the device.)"""
        for slice, param in unit.placed():
            param.grad = None
            if slice.param.trainable:
                param.grad_dtype = None  # the gradient may have the parameter's dtype or fp32: [Note: sums]
            if shard.is_out:  # one number, expanded to any shape, takes no memory
                param.data = not_a_number(slice.dtype, self._backend.host).expand(slice.param.shape)
            else:
                param.data = slice.own(shard.weight)
        unit.refresh_parts()

    def _move_buffers(self, unit: Unit) -> None:
        for owner, name in unit.buffer_owners:
            if (buffer := owner._buffers[name]) is not None:
                if buffer not in self._moved_buffers:
                    self._moved_buffers[buffer] = buffer.to(self._backend.device)
                owner._buffers[name] = self._moved_buffers[buffer]

    def _take_from_first_rank(self) -> None:
        """Set weights and buffers of all ranks to those of the first one."""
        if self._ranks.is_alone:
            return
        self._ranks.exchange("all weights are in host memory")
        self._ranks.replicate(
            held
            for shard in self._store.shards
            for name, held in shard.held.items()
            if not (shard.is_divided and name in DIVIDED)
        )
        for buffer in self._moved_buffers.values():
            for part in plain_parts(buffer):
                sent = part.contiguous()  # the same tensor, if its elements are in order
                self._ranks.broadcast(sent)
                part.copy_(sent)

    def _of_first_machine(self, unit: Unit, shard: HostShard) -> dict[Slice, torch.Tensor]:
        """The first machine's values of those weights that `_take_from_first_rank` does not copy: weights on
        disk, and 16-bit ones whose masters are on disk, or divided among the machines."""
        if self._ranks.machines == 1:
            return {}
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
            if self._ranks.is_first_of_machine
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
    """Move the parameters of ``unit`` into their own storage on the CPU, with the exact values of ``shard``
    rounded to ``dtypes``; those in ``moved``, whose memory user code has replaced, keep their values.
    Gradients are dropped, and the unit's buffers move to the CPU. Warns of masters lost by a disk: such
    parameters get the streamed values."""
    inexact: dict[str, str] = {}
    for slice, param in unit.placed():
        param.grad = None
        values = param.data.cpu() if param in moved else param.data
        if param not in moved and backend.has_values:
            values, lost = _exact(backend, shard, slice, dtypes[param])
            inexact |= {slice.param.name: lost} if lost else {}
        param.data = values.to(dtypes[param])
    unit.refresh_parts()
    if inexact:
        why = [*inexact.values()][-1]
        warn(f"{shortened([*inexact])}: only as exact as streamed, since fp32 masters are lost ({why})")
    for owner, name in unit.buffer_owners:
        if (buffer := owner._buffers.get(name)) is not None and not buffer.is_meta:
            owner._buffers[name] = buffer.cpu()


def _exact(backend: Backend, shard: HostShard, slice: Slice, dtype: torch.dtype) -> tuple[torch.Tensor, str]:
    """A weight's exact values in ``dtype``, or its streamed values and why its master is lost."""
    if shard.is_divided and slice.param.trainable:
        # after an error in `wrap`, when no exchange with other machines is possible
        is_exact = slice.dtype == torch.float32
        return shard.weight_of(slice).clone(), "" if is_exact else "other machines have parts of them"
    try:
        return backend.on_host(partial(shard.values, slice, dtype)), ""
    except DiskError as error:
        return shard.weight_of(slice).clone(), str(error)
