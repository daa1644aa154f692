"""A model's weights on their way into host memory, a unit at a time, and out of it again.

Beside the host shards there is never more than one unit: a unit's own storage is given up as soon as its
weights are in its shard, and one on the meta device is given values when its turn comes.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Container, Iterable, Sequence
from contextlib import ExitStack
from functools import partial

import torch
from torch import nn
from tqdm import tqdm

from streamer.backends.base import Backend
from streamer.backends.mapping import file_mappings, give_back_freed
from streamer.engine.unit import Unit
from streamer.initialising import Initialiser, exchange
from streamer.memory.host import HostShard, HostStore


class MoveIn:
    """Moves the weights of ``units``, the root unit's last, into the shards of ``store``."""

    def __init__(
        self, backend: Backend, units: Sequence[Unit], store: HostStore, initialise: Initialiser | None
    ) -> None:
        self._backend = backend
        self._units = units
        self._store = store
        self._initialise = initialise
        self._was = {param: (param.device, param.dtype) for unit in units for param in unit.params}
        self._buffers_were = [
            (owner, name, owner._buffers[name]) for unit in units for owner, name in unit.buffer_owners
        ]
        self._moved: list[Unit] = []
        #: buffers by what they were before; modules of several layers may share one
        self._moved_buffers: dict[torch.Tensor, torch.Tensor] = {}

    def run(self) -> None:
        """Move all of them; a progress bar shows if it takes more than a second."""
        versions = []
        # a log file needs a line now and then, a terminal wants to be alive
        interval = 0.1 if sys.stderr.isatty() else 10.0
        bar = tqdm(self._units, "to host memory", unit="unit", delay=1.0, mininterval=interval, leave=False)
        for unit, shard in zip(bar, self._store.shards, strict=True):
            self._take(unit, shard)
            versions.append(unit.written())
        for unit, shard, version in zip(self._units, self._store.shards, versions, strict=True):
            if unit.written() != version:  # by the initialisation of another unit
                for slice in unit.layout.slices:
                    shard.rebase(slice)
        self._store.pin(self._backend.pin)

    def undo(self) -> None:
        """Let the parameters be what they were, on the device where they were."""
        with ExitStack() as each:  # goes on after an error
            for unit, shard in zip(self._units, self._store.shards, strict=True):
                each.callback(self._put_back, unit, shard)
            for owner, name, buffer in self._buffers_were:
                owner._buffers[name] = buffer

    def _put_back(self, unit: Unit, shard: HostShard) -> None:
        unit.restore()
        if unit in self._moved:
            take_out(self._backend, unit, shard, {param: self._was[param][1] for param in unit.params})
        for slice, param in zip(unit.layout.slices, unit.params, strict=True):
            device, dtype = self._was[param]
            if param.device == device:
                continue
            if device.type == "meta":
                exchange(slice.param.name, param, torch.empty(param.shape, dtype=dtype, device=device))
            else:
                param.data = param.data.to(device)

    def _take(self, unit: Unit, shard: HostShard) -> None:
        if self._initialise is not None:
            self._initialise(unit)
        virtual = self._backend.device.type == "meta"
        for slice, param in zip(unit.layout.slices, unit.params, strict=True):
            if not virtual:
                # brought here on the caller's own stream, which knows when it was written
                self._backend.on_host(partial(shard.load, slice, param.detach().cpu()))
        self._moved.append(unit)
        for slice, param in zip(unit.layout.slices, unit.params, strict=True):
            param.grad = None
            if slice.param.trainable:
                param.grad_dtype = None  # its own or fp32: [Note: sums]
            # the root's are soon those on the device; until then they too must not keep their own storage
            param.data = slice.own(shard.weight)
        for owner, name in unit.buffer_owners:
            if (buffer := owner._buffers[name]) is not None:
                if buffer not in self._moved_buffers:
                    self._moved_buffers[buffer] = buffer.to(self._backend.device)
                owner._buffers[name] = self._moved_buffers[buffer]
        give_back_freed()


def take_out(
    backend: Backend,
    unit: Unit,
    shard: HostShard,
    dtypes: dict[nn.Parameter, torch.dtype],
    moved: Container[nn.Parameter] = (),
) -> None:
    """Give the parameters of ``unit`` storage of their own on the CPU, with the exact values of ``shard``
    rounded to ``dtypes``, or their own values if somebody has ``moved`` them; their gradients are dropped.
    Its buffers come to the CPU too."""
    for slice, param in zip(unit.layout.slices, unit.params, strict=True):
        param.grad = None
        if param in moved:
            param.data = param.data.cpu()
        elif backend.device.type != "meta":
            param.data = backend.on_host(partial(shard.exact, slice))
        param.data = param.data.to(dtypes[param])
    for owner, name in unit.buffer_owners:
        if (buffer := owner._buffers.get(name)) is not None and not buffer.is_meta:
            owner._buffers[name] = buffer.cpu()


def releasable_bytes(params: Iterable[torch.Tensor], device: torch.device) -> int:
    """Bytes of the storages on ``device`` that `MoveIn` gives up, as far as can be known.

    What is mapped from a file or shared with other processes is not counted (on Linux); what the caller holds
    by other names is: PyTorch does not tell.
    """
    storages = {
        storage.data_ptr(): storage.nbytes()
        for param in params
        if param.device == device
        for storage in [param.untyped_storage()]
    }
    files = file_mappings() if device.type == "cpu" else []

    def is_of_a_file(address: int) -> bool:
        before = bisect_right(files, address, key=lambda file: file[0])
        return before > 0 and address < files[before - 1][1]

    return sum(nbytes for address, nbytes in storages.items() if not is_of_a_file(address))
