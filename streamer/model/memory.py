"""The bytes that a wrapped model will take of each memory, and the place of everything, before allocation."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace

import torch
from torch import nn

from streamer.backends.base import Backend
from streamer.backends.disk import Disks
from streamer.backends.host_memory import file_mappings
from streamer.backends.ranks import Ranks
from streamer.backends.virtual import VirtualBackend, VirtualDisks
from streamer.engine.unit import Unit, buffer_bytes
from streamer.errors import exact_amount
from streamer.model.layers import find_layers, finer_globs
from streamer.model.options import WrapOptions, folders_of
from streamer.model.units import make_units
from streamer.planner.machine import CPU, context_bytes
from streamer.store.ledger import Ledger, Room, frozen_matrices, least_moments, ledger, limit_of
from streamer.store.placement import Placement, place_model
from streamer.store.purposes import of_all_ranks
from streamer.store.shares import Division


class MemoryPlan:
    """Bytes by purpose for the units of ``model``, streamed with ``options`` among ``ranks``."""

    def __init__(self, model: nn.Module, options: WrapOptions, ranks: Ranks) -> None:
        self._model = model
        self._options = options
        self._ranks = ranks
        self.division = Division(ranks.local_size, ranks.state_machines)

    def ledger(self, units: Sequence[Unit], root: Unit, num_slots: int) -> Ledger:
        """The bytes with everything in memory, without an optimizer's moments."""
        return ledger(
            [unit.layout for unit in (*units, root)],
            num_slots=min(num_slots, len(units)),
            buffers=buffer_bytes((*units, root)),
            update_in_backward=self._options.update == "backward",
            averages_in_fp32=not self._ranks.is_alone and self._options.grad_dtype is not None,
            division=self.division,
        )

    def decide(
        self,
        units: Sequence[Unit],
        root: Unit,
        backend: Backend,
        disks: Disks,
        *,
        num_slots: int,
        left: int,
    ) -> tuple[Ledger, Placement]:
        """The bytes, and the places of state and weights in memory or on ``disks``, with ``left`` bytes of
        host memory kept free. All ranks follow the first one. Raises MemoryError, with the bytes by owner, if
        a memory is too small. [Note: placement]"""
        layouts = [unit.layout for unit in (*units, root)]
        room = room_of(backend, (param for unit in (*units, root) for param in unit.params))
        room = replace(room, host_limit=self._options.host_limit)
        planned, placement = self.ledger(units, root, num_slots), Placement()
        on_device = sum(planned.device.values())
        moments = least_moments(layouts, self.division)
        if disks.may_write or disks.stored:
            moments = {}  # they may be on disk
            planned, placement = place_model(
                planned,
                layouts,
                room.host_room(on_device) - left,
                stored=disks.stored,
                may_write=disks.may_write,
                division=self.division,
            )
        # free memory differs between ranks
        planned, placement = self._ranks.from_first("planning memory", (planned, placement))
        remedy = "lower num_slots"
        if on_device > room.tensors:
            remedy = self.device_remedy(units, root, num_slots, room.tensors)
        # the first rank of a machine allocates host memory, for all of them
        of_machine = {**of_all_ranks(planned.host, self._ranks.local_size), **moments}
        checked = replace(planned, host=of_machine if self._ranks.is_first_of_machine else {})
        checked.check(room, device_remedy=remedy, frozen=frozen_matrices(layouts))
        return planned, placement

    def device_remedy(self, units: Sequence[Unit], root: Unit, num_slots: int, available: int) -> str:
        """The fix if ``num_slots`` slots for ``units`` do not fit into ``available`` bytes of the device:
        more memory, fewer slots, or globs of parts of the largest layers."""
        planned, limit = self.ledger(units, root, num_slots), self._options.device_limit
        needed = sum(planned.device.values())
        figure = exact_amount(needed) if limit is None else f"device_memory={needed + limit - available}"
        if planned.outside_slots >= available:
            taken = exact_amount(planned.outside_slots)
            return f"the parameters outside of layers alone take {taken}; {figure} would do"

        def fits(units: Sequence[Unit], root: Unit, slots: int = num_slots) -> bool:
            return sum(self.ledger(units, root, slots).device.values()) <= available

        remedies = [f"{figure} would do"]
        fewer = range(min(num_slots, len(units)) - 1, 0, -1)
        if (fit := next((slots for slots in fewer if fits(units, root, slots)), None)) is not None:
            remedies.append(f"lower num_slots to {fit}")
        if globs := self._globs_that_fit(units, fits):
            remedies.append(f"stream its parts: layers=[{', '.join(map(json.dumps, globs))}]")
        largest = max(units, key=lambda unit: unit.layout.nbytes)
        takes = exact_amount(largest.layout.nbytes)
        return f"the largest layer, '{largest.name}', takes {takes}; {', or '.join(remedies)}"

    def _globs_that_fit(
        self, units: Sequence[Unit], fits: Callable[[Sequence[Unit], Unit], bool]
    ) -> list[str]:
        """Globs for ``layers=`` with which the model fits; they split the largest layers only as far as
        needed. Empty if there are none."""
        layers = [(unit.name, unit.module) for unit in units]
        # the functions that build layers and units from modules refuse unsuitable ones
        with suppress(ValueError):
            while globs := finer_globs(layers):
                layers = find_layers(self._model, globs)
                if fits(*make_units(self._model, layers, self._options.dtype)):
                    return globs
        return []


def disks_for(backend: Backend, options: WrapOptions, ranks: Ranks) -> Disks:
    """The disks of ``wrap(disk=...)``; without it, disks that take nothing."""
    disk = options.disk
    if isinstance(backend, VirtualBackend):
        if isinstance(disk, Disks):
            return VirtualDisks(backend, disk.stored, may_write=disk.may_write)
        return VirtualDisks(backend, {}, may_write=disk is not None)
    if not isinstance(disk, Disks):
        disk = Disks([] if disk is None else folders_of(disk))
    return disk.among(ranks)


def room_of(backend: Backend, to_free: Iterable[torch.Tensor] = (), *, limit: int | None = None) -> Room:
    """The bytes that are free now, plus those that `MoveIn` frees of the parameters ``to_free``.

    ``limit`` is the ``device_memory`` that ``backend`` is about to be limited to.
    """
    to_free = list(to_free)
    kind = backend.machine.kind if isinstance(backend, VirtualBackend) else backend.device.type
    on_device = 0 if kind == CPU else releasable_bytes(to_free, backend.device)
    on_host = releasable_bytes(to_free, torch.device("cpu"))
    # CUDA's own bytes are no longer free
    context = context_bytes(backend.device.type)
    if limit is not None and (used := backend.device_used()) is not None:
        # a limit applies to everything that this process has allocated
        limit = max(0, limit - max(0, used[0] - on_device))
    return Room(
        device=backend.device_available() + on_device + context,
        host=backend.host_available() + on_host,
        budget=limit_of(limit),
        shared=kind == CPU,
        context=context,
        freed_by_model=on_host,
    )


def releasable_bytes(params: Iterable[torch.Tensor], device: torch.device) -> int:
    """Bytes of the storages on ``device`` that `MoveIn` frees.

    Storages that are mapped from a file or shared with other processes do not count (on Linux). Storages that
    the caller holds by other tensors do count: PyTorch has no list of those.
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
