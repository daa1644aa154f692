"""A plain model becomes a streamed one in place, with options of which none is "auto"."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TypeVar

from torch import nn

import streamer_native as native
from streamer.backends.base import Backend
from streamer.backends.disk import Disks
from streamer.backends.ranks import Ranks
from streamer.backends.virtual import VirtualBackend, VirtualDisks
from streamer.engine.handle import HANDLE, Wrapped, settle_in
from streamer.engine.layer.compiled import compiled
from streamer.engine.layer.layer import POLICIES, StreamedLayer
from streamer.engine.layer.micro_batches import micro_batches
from streamer.engine.paging.executor import Executor
from streamer.engine.unit import Unit, buffer_bytes
from streamer.model.guards import attach_guards
from streamer.model.layers import find_layers
from streamer.model.move_in import Initialiser, MoveIn, check_init, room_of
from streamer.model.options import AUTO, Folders, WrapOptions, check_dtypes_for_backward, folders_of, policies
from streamer.model.units import device_remedy, make_units, warn_of_misread
from streamer.model.unwrap import forget
from streamer.optim.torch_optimizers import serve_other_optimizers
from streamer.store.host import NO_DISKS, HostStore
from streamer.store.host import Disks as HostDisks
from streamer.store.ledger import Ledger, frozen_matrices, least_moments, ledger
from streamer.store.placement import Placement, place_model
from streamer.store.purposes import GRADIENTS, of_all_ranks
from streamer.store.shares import Division
from streamer.torch_private import is_sparse, sparse_parts

M = TypeVar("M", bound=nn.Module)


def stream(
    model: M,
    backend: Backend,
    options: WrapOptions,
    ranks: Ranks | None = None,
    *,
    chosen: object = None,
    for_inputs: int = 0,
) -> M:
    """Wrap ``model`` on ``backend``. `streamer.wrap` documents the options and what is raised; none may be
    "auto" here. ``ranks`` are those that share the weights, this process alone if None. ``chosen`` is what
    `streamer.chosen` returns; ``for_inputs`` bytes of host memory are left to layer inputs that wait there.
    """
    ranks = ranks or Ranks()
    with ExitStack() as undo:
        options.check()
        num_slots, micro_batch_size = options.num_slots, options.micro_batch_size
        assert num_slots != AUTO and micro_batch_size != AUTO
        limit, host_limit, init = options.device_limit, options.host_limit, options.init
        dtype = options.dtype
        units, root = make_units(model, find_layers(model, options.layers), dtype)
        warn_of_misread((*units, root), backend.device)
        run_as = policies(options.activations, units)
        cutters = micro_batches(units, micro_batch_size, options.batch_dims or {})
        in_backward = options.update == "backward"
        if in_backward:
            check_dtypes_for_backward([unit.layout for unit in (*units, root)])
        slots = 2 if num_slots is None else num_slots
        virtual = backend.device.type == "meta"
        if not virtual:
            check_init((*units, root), init)
        if limit is not None:
            backend.limit_device(limit)
        host_threads = options.host_threads
        if host_threads is None and (backend.device.type == "cuda" or not ranks.is_alone):
            # ranks share the cores, and each GPU's kernels are launched by a thread that has one for itself
            cores = native.num_threads_available() // ranks.local_size
            host_threads = max(1, cores - (backend.device.type == "cuda"))
        # no work of the host runs on a virtual backend
        if host_threads is not None and not virtual:
            backend.on_host(partial(native.set_num_threads, host_threads))
        room = room_of(backend, (param for unit in (*units, root) for param in unit.params))
        room = replace(room, host_limit=host_limit)
        plain_dtypes = {param: param.dtype for unit in (*units, root) for param in unit.params}
        slots = min(slots, len(units))
        division = Division(ranks.local_size, ranks.state_machines)

        def plan_of(units: Sequence[Unit], root: Unit, num_slots: int) -> Ledger:
            return ledger(
                [unit.layout for unit in (*units, root)],
                num_slots=min(num_slots, len(units)),
                buffers=buffer_bytes((*units, root)),
                update_in_backward=in_backward,
                averages_in_fp32=not ranks.is_alone and options.grad_dtype is not None,
                division=division,
            )

        planned = plan_of(units, root, slots)
        remedy = "lower num_slots"
        if sum(planned.device.values()) > room.tensors:
            remedy = device_remedy(
                model, units, root, dtype, plan_of, num_slots=slots, available=room.tensors, limit=limit
            )
        layouts = [unit.layout for unit in (*units, root)]
        disks, placement, moments = NO_DISKS, Placement(), least_moments(layouts, division)
        if options.disk is not None:
            disks, moments = _disks(backend, options.disk), {}
            planned, placement = place_model(
                planned,
                layouts,
                room.host_room(sum(planned.device.values())) - for_inputs,
                stored=disks.stored,
                may_write=disks.may_write,
                division=division,
            )
        # what is free differs from rank to rank
        planned, placement = ranks.from_first("planning memory", (planned, placement))
        # ranks have the host's memory once on each machine, which its first one takes with what is each one's
        everything = of_all_ranks(planned.host, ranks.local_size)
        on_host = {**everything, **moments} if ranks.is_first_of_machine else {}
        replace(planned, host=on_host).check(room, device_remedy=remedy, frozen=frozen_matrices(layouts))
        ranks.check_same(_same_on_all(options, slots, (*units, root)))
        if isinstance(disks, Disks):
            disks = disks.among(ranks)
        store = HostStore(
            layouts,
            partial(ranks.host_buffer, backend),
            partial(ranks.host_reserve, backend),
            disks=disks,
            placement=placement,
            rank=ranks.local_rank,
            division=division,
            machine=ranks.machine,
            private=backend.host_buffer,
            is_shared=not ranks.is_alone,
        )
        undo.callback(store.close_disks)
        initialise = None if init is None or virtual else Initialiser(init, backend.device, units)
        move = MoveIn(backend, (*units, root), store, initialise, ranks)
        undo.callback(move.undo)
        move.run()
        store.add([GRADIENTS], only=store.shards[-1:] if in_backward else None)
        executor = Executor(
            backend,
            units,
            root,
            store,
            num_slots=slots,
            budget=limit if num_slots is None else None,
            sum_in_fp32=options.grad_dtype is not None,
            update_in_backward=in_backward,
            host_limit=host_limit,
            for_inputs=for_inputs,
            ranks=ranks,
            gather_weights=options.gather_weights,
        )
        undo.callback(forget, model, executor)
        settle_in(executor)
        for unit, policy, cutter in zip(units, run_as, cutters, strict=True):
            # an attribute of the instance, so that __call__ and the user's hooks run around it as before
            forward = unit.module.forward
            if options.compile and not virtual:
                forward = compiled(unit, "inductor" if options.compile is True else options.compile)
            unit.module.forward = StreamedLayer(executor, unit, POLICIES[policy], cutter, forward)
        take_off = attach_guards(model, executor, plain_dtypes)
        undo.callback(take_off)
        end_service = serve_other_optimizers(executor)
        undo.callback(end_service)
        close = weakref.finalize(model, _close, backend, store, end_service, ranks)
        model.__dict__[HANDLE] = Wrapped(executor, planned, plain_dtypes, take_off, close, chosen)
        undo.pop_all()
    return model


def _disks(backend: Backend, disk: Folders | Disks) -> HostDisks:
    if isinstance(backend, VirtualBackend):
        given = disk if isinstance(disk, Disks) else None
        if given is None:
            return VirtualDisks(backend, {})
        return VirtualDisks(backend, given.stored, may_write=given.may_write)
    return disk if isinstance(disk, Disks) else Disks(folders_of(disk))


def _same_on_all(options: WrapOptions, num_slots: int, units: Sequence[Unit]) -> list[str]:
    """A line for all that must be the same on all ranks."""
    same = ("dtype", "update", "grad_dtype", "gather_weights")
    lines = [f"{name}={getattr(options, name)}" for name in same] + [f"num_slots={num_slots}"]
    lines.append(f"disk={'None' if options.disk is None else 'given'}")
    for unit in units:
        for slice in unit.layout.slices:
            param = slice.param
            kind = "trained" if param.trainable else "frozen"
            lines.append(f"{unit.name}: {param.name} {list(param.shape)} {param.dtype} {kind}")
        for owner, name in unit.buffer_owners:
            if (buffer := owner._buffers[name]) is not None and is_sparse(buffer):
                shapes = [list(part.shape) for part in sparse_parts(buffer)]
                lines.append(f"{unit.name}: buffer {name} of {shapes}")
    return lines


def _close(backend: Backend, store: HostStore, end_service: Callable[[], None], ranks: Ranks) -> None:
    end_service()
    # what this rank has begun it ends, for the others wait for it
    backend.close()
    ranks.leave()
    store.close_disks()
