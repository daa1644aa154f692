"""Turn a plain model into a streamed one in place, with options of which none is "auto"."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, TypeVar

from torch import nn

import streamer_native as native
from streamer.backends.base import Backend
from streamer.backends.ranks import Ranks
from streamer.engine.executor import Executor
from streamer.engine.handle import HANDLE, Wrapped, settle_in
from streamer.engine.layer.layer import POLICIES, StreamedLayer
from streamer.engine.layer.micro_batches import micro_batches
from streamer.engine.layer.surroundings import compiled
from streamer.engine.unit import Unit
from streamer.model.guards import attach_guards
from streamer.model.init import Initialiser, check_init
from streamer.model.layers import find_layers
from streamer.model.memory import MemoryPlan, disks_for
from streamer.model.move_in import MoveIn
from streamer.model.options import AUTO, WrapOptions, check_dtypes_for_backward, policies
from streamer.model.units import make_units, warn_of_misread
from streamer.model.unwrap import forget
from streamer.optim import torch_optimizers  # noqa: F401  # lets optimizers of PyTorch update masters
from streamer.store.host import HostStore
from streamer.store.purposes import GRADIENTS
from streamer.torch_private import is_sparse, sparse_parts

M = TypeVar("M", bound=nn.Module)


def stream(
    model: M,
    backend: Backend,
    options: WrapOptions,
    ranks: Ranks,
    *,
    chosen: object = None,
    for_inputs: int = 0,
) -> M:
    """Wrap ``model`` on ``backend``. `streamer.wrap` documents the options and errors; none may be "auto"
    here. ``ranks`` share the weights. ``chosen`` is the later result of `streamer.chosen`; ``for_inputs``
    bytes of host memory are left to layer inputs that wait there.
    """
    options.check()
    num_slots, micro_batch_size = options.num_slots, options.micro_batch_size
    assert num_slots != AUTO and micro_batch_size != AUTO
    with ExitStack() as undo:
        # Find the layers; create a unit for each and one for all other parameters.
        units, root = make_units(model, find_layers(model, options.layers), options.dtype)
        every = (*units, root)
        layouts = [unit.layout for unit in every]
        run_as = policies(options.activations, units)
        cutters = micro_batches(units, micro_batch_size, options.batch_dims or {})
        _check_units(every, backend, options)

        # Decide the place of everything, and check that each memory has room for it.
        if options.device_limit is not None:
            backend.limit_device(options.device_limit)
        slots = min(num_slots or 2, len(units))
        memory, disks = MemoryPlan(model, options, ranks), disks_for(backend, options, ranks)
        planned, placement = memory.decide(units, root, backend, disks, num_slots=slots, left=for_inputs)
        ranks.check_same(_same_on_all(options, slots, every))

        # Allocate the host shards.
        store = HostStore(
            layouts,
            partial(ranks.host_buffer, backend),
            partial(ranks.host_reserve, backend),
            disks=disks,
            placement=placement,
            rank=ranks.local_rank,
            division=memory.division,
            machine=ranks.machine,
            private=backend.host_buffer,
            is_shared=not ranks.is_alone,
        )
        undo.callback(store.close_disks)

        # Move the weights in.
        if (threads := _host_threads(options, backend, ranks)) is not None:
            backend.set_host_threads(threads)
        plain_dtypes = {param: param.dtype for unit in every for param in unit.params}
        init = options.init if backend.has_values else None
        move = MoveIn(backend, every, store, Initialiser(init, backend.device, units), ranks)
        undo.callback(move.undo)
        move.run()
        store.add([GRADIENTS], only=store.shards[-1:] if options.update == "backward" else None)

        # Attach the executor to the model: layers run on slots, and calls of the model wait for it.
        executor = Executor(
            backend,
            units,
            root,
            store,
            num_slots=slots,
            budget=options.device_limit if num_slots is None else None,
            sum_in_fp32=options.grad_dtype is not None,
            update_in_backward=options.update == "backward",
            host_limit=options.host_limit,
            for_inputs=for_inputs,
            ranks=ranks,
            gather_weights=options.gather_weights,
        )
        undo.callback(forget, model, executor)
        settle_in(executor)
        for unit, policy, cutter in zip(units, run_as, cutters, strict=True):
            # an attribute of the instance, so that __call__ and the user's hooks run as before
            forward = _forward_of(unit, backend, options)
            unit.module.forward = StreamedLayer(executor, unit, POLICIES[policy], cutter, forward)
        take_off = attach_guards(model, executor, plain_dtypes)
        undo.callback(take_off)
        close = weakref.finalize(model, _close, backend, store, ranks)
        model.__dict__[HANDLE] = Wrapped(executor, planned, plain_dtypes, take_off, close, chosen)
        undo.pop_all()
    return model


def _check_units(units: Sequence[Unit], backend: Backend, options: WrapOptions) -> None:
    """Raise ValueError for parameters that cannot get values or be trained with these options; warn of
    quantized ones that their own library computes wrong with."""
    if backend.has_values:
        check_init(units, options.init)
    if options.update == "backward":
        check_dtypes_for_backward([unit.layout for unit in units])
    warn_of_misread(units, backend.device)


def _host_threads(options: WrapOptions, backend: Backend, ranks: Ranks) -> int | None:
    """Threads that update weights; None leaves the number to Numba: all cores."""
    feeds_gpu = backend.device.type == "cuda"
    if options.host_threads is not None or not (feeds_gpu or not ranks.is_alone):
        return options.host_threads
    # ranks share the cores, and each GPU's kernels are launched by a thread that has a core for itself
    return max(1, native.num_threads_available() // ranks.local_size - feeds_gpu)


def _forward_of(unit: Unit, backend: Backend, options: WrapOptions) -> Callable[..., Any]:
    """The forward of a layer on a slot: its own, or that compiled."""
    if options.compile and backend.has_values:
        return compiled(unit, "inductor" if options.compile is True else options.compile)
    return unit.module.forward


def _same_on_all(options: WrapOptions, num_slots: int, units: Sequence[Unit]) -> list[str]:
    """A line for each thing that must be the same on all ranks."""
    same = ("dtype", "update", "grad_dtype", "gather_weights")
    lines = [f"{name}={getattr(options, name)}" for name in same] + [f"num_slots={num_slots}"]
    lines.append(f"disk={'None' if options.disk is None else 'set'}")
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


def _close(backend: Backend, store: HostStore, ranks: Ranks) -> None:
    # finishes what this rank has begun, since the others wait for it
    backend.close()
    ranks.leave()
    store.close_disks()
