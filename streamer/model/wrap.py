"""`wrap`: a plain model becomes a streamed one in place."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch
from torch import nn

import streamer_native as native
from streamer.backends.base import Backend
from streamer.backends.select import backend_for
from streamer.engine.layer.call import CompileBackend, Compiler
from streamer.engine.layer.layer import StreamedLayer
from streamer.engine.layer.micro_batches import micro_batches
from streamer.engine.paging.executor import Executor
from streamer.engine.paging.handle import HANDLE, Wrapped, home_of, settle_in, wrapped_part
from streamer.memory.host import HostStore
from streamer.memory.purposes import GRADIENTS
from streamer.model.auto import AUTO, Number, choose_options
from streamer.model.guards import attach_guards
from streamer.model.layers import Layers, find_layers
from streamer.model.move_in import Init, Initialiser, MoveIn, check_init, releasable_bytes
from streamer.model.options import (
    Activations,
    check_dtypes_for_backward,
    check_options,
    parse_bytes,
    policies,
)
from streamer.model.units import cut_to_fit, make_units, refuse_micro_batches
from streamer.model.unwrap import forget
from streamer.optim.torch_optimizers import serve_other_optimizers
from streamer.plan.ledger import least_moments, ledger
from streamer.simulate.machine import Machine

M = TypeVar("M", bound=nn.Module)


def wrap(
    model: M,
    *,
    layers: Layers = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    num_slots: Number = None,
    activations: Activations = "recompute",
    micro_batch_size: Number = None,
    batch_dims: Mapping[str, int | None] | None = None,
    update: str = "step",
    grad_dtype: torch.dtype | None = torch.float32,
    host_threads: int | None = None,
    init: Init | None = None,
    compile: bool | CompileBackend = False,
    device_memory: int | str | None = None,
    example: object = None,
    machine: Machine | str | None = None,
    backend: Backend | None = None,
) -> M:
    """Stream the layers of ``model`` from host memory. Changes the model in place and returns it.

    The weights move to host memory, a layer at a time, and the storage that they had is given up;
    ``num_slots`` buffers on the device, each as large as the largest layer, take them in turn. A layer for
    which they would be too large is cut into its children, which are streamed in its place, while its own
    forward runs as it is. What is in no layer (embeddings, final norm, head) stays on the device.
    Inputs are moved to the device. Class, parameter objects, parameter names and ``state_dict`` keys
    stay as they are; `copy.deepcopy` gives a plain CPU model. Train it with `streamer.AdamW`.

    Args:
        layers: dotted path of an ``nn.ModuleList``, ``nn.Sequential`` or ``nn.ModuleDict``, several paths (an
            encoder's and a decoder's), or None for the lists of like blocks that hold most of the parameters.
        device: ``"cuda"``, ``"cuda:1"`` or ``"cpu"`` (threads stand in for a GPU's copy engines); None
            means CUDA where there is one, else the CPU.
        dtype: what parameters are computed in: float32, bfloat16 or float16; None keeps each as it is.
            A trained parameter keeps an exact fp32 master in host memory; a frozen one is rounded for good.
            Buffers keep their dtype.
        num_slots: layers that the device holds at a time: 1 overlaps nothing, 2 is double buffering, as
            many as there are layers keeps all of them there, so that only updated weights come back. More
            than that are not allocated. None means 2, and more where ``device_memory`` has room for them.
        activations: ``"recompute"`` keeps a layer's inputs and runs it again in backward, with the hooks of
            modules inside of it; ``"recompute+offload"`` does so with inputs that wait in host memory
            [Note: saved inputs]; ``"keep"`` keeps all that its backward needs. A list has one for each layer,
            a function is given a layer's index. `torch.utils.checkpoint` around layers then changes nothing,
            inside of them it works. [Note: checkpointing]
        micro_batch_size: samples that a layer runs at a time while its weights are in a slot, so that they
            cross the bus twice a step whatever the batch is; None runs the whole batch. Gradients of the
            slices are added up on the device, as ``grad_dtype`` says. [Note: micro-batches]
        batch_dims: the dimension of the batch by the name of an argument of the layers, None for an argument
            that has none. Left out: the first, where it is as long as that of the hidden states; where that
            may be chance, the layer's call raises ValueError.
        update: ``"step"`` updates when ``optimizer.step()`` is called, under the next forward; ``"backward"``
            updates each layer as soon as its gradient has landed, so that host memory holds the gradients of
            four layers instead of all, and there is no clipping and no accumulation.
        grad_dtype: what several backward calls before a step, and micro-batches, are added up in:
            ``torch.float32``, which takes 4 bytes per parameter of host memory from the second call on where
            parameters are shorter (for micro-batches 4 per parameter of one layer on the device), or None for
            the parameters' own dtype, as PyTorch does.
        host_threads: threads that update the weights; None means one for each core, less one where there
            is a GPU to feed.
        init: gives a model that was built under ``torch.device("meta")`` its values, a layer at a time, so
            that it is never whole anywhere else. Called with one module after another, children before their
            parents, as ``model.apply(init)`` would, on the device and without gradients; it sets all of the
            module's own parameters and buffers in place. Each layer has a seed of its own, made of its name
            and of one draw from PyTorch's generator.
        compile: True passes the layers through ``torch.compile``, once for all that have one structure; a
            string or a function is the backend that it uses. A layer that cannot be compiled runs as it is,
            with a warning.
        device_memory: bytes, or a text such as ``"16GiB"``: what this process may take of a GPU (PyTorch's
            allocator refuses more, until `unwrap`), and what is planned on the device. Layers that are too
            large for the slots that this leaves are streamed in parts, along their children. Unless
            ``num_slots`` is given, what is left holds more layers: the first step (or, where nothing is
            trained, the first pass) shows what is needed beside two, and at its end slots are allocated for
            as many as fit; on a GPU an eighth of what others take is left free for gaps in PyTorch's
            allocator. Where a later step takes more, slots are given back. One that runs out of memory takes
            back all but two for good: run it again.
        example: where ``activations``, ``num_slots`` or ``micro_batch_size`` is ``"auto"``, a batch to plan
            with: a tensor, a tuple of the model's arguments, or a dict of them by name. Only shapes and
            dtypes count, which the batches of the steps should have. [Note: options that are chosen]
        machine: how fast the device is, for such a plan: the name of one in `streamer.simulate.machine`,
            ``"rtx-4090"`` say, or a `Machine`. None means an RTX 4090 where there is a GPU.
        backend: runs on this backend in place of the device's own. A virtual one has no values and compiles
            nothing.

    Raises:
        ValueError: for a path, an option or a parameter that cannot be honoured, naming the remedy.
        MemoryError: if the device or the host has too little memory, or the host may page-lock too little of
            it: a line with what each needs and has, and the bytes by owner below it. The limits of control
            groups count. Both are raised before anything is allocated or changed, but for what ``init`` does
            wrong. Then, as with any other error, parameters are put back, without their gradients; frozen
            ones that were moved already are as ``dtype`` has rounded them.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"wrap takes an nn.Module, not a {type(model).__name__}")
    if any(home_of(param) is not None for param in model.parameters()):
        part = wrapped_part(model) or "it"
        raise ValueError(
            f"this model, or a part of it, is wrapped already: call streamer.unwrap on {part} first"
        )
    with ExitStack() as undo:
        if backend is None:
            backend = backend_for(device)
        undo.callback(backend.close)
        chosen = None
        if activations == AUTO or num_slots == AUTO or micro_batch_size == AUTO:
            asked = (activations, num_slots, micro_batch_size)
            given = dict(
                layers=layers, dtype=dtype, batch_dims=batch_dims, update=update, grad_dtype=grad_dtype
            )
            chosen = choose_options(wrap, model, backend, example, machine, asked, device_memory, init, given)
            activations, num_slots, micro_batch_size = chosen.choice
            batch_dims = None if micro_batch_size is None else batch_dims
        check_options(
            dtype=dtype,
            num_slots=num_slots,
            activations=activations,
            micro_batch_size=micro_batch_size,
            batch_dims=batch_dims,
            update=update,
            grad_dtype=grad_dtype,
            host_threads=host_threads,
            compile=compile,
        )
        limit = parse_bytes("device_memory", device_memory)
        units, root = make_units(model, find_layers(model, layers), dtype)
        run_as = policies(activations, units)
        cutters = micro_batches(units, micro_batch_size, batch_dims or {})
        in_backward = update == "backward"
        if in_backward:
            check_dtypes_for_backward([unit.layout for unit in (*units, root)])
        slots = 2 if num_slots is None else num_slots
        virtual = backend is not None and backend.device.type == "meta"
        if not virtual:
            check_init((*units, root), init)
        if limit is not None:
            backend.limit_device(limit)
        if host_threads is None and backend.device.type == "cuda":
            # the kernels of a GPU are launched by this process too
            host_threads = max(1, native.num_threads_available() - 1)
        if host_threads is not None:
            backend.on_host(partial(native.set_num_threads, host_threads))
        plain_dtypes = {param: param.dtype for param in model.parameters()}
        on_device = backend.device.type != "cpu"
        device_available = backend.device_available()
        if on_device:
            device_available += releasable_bytes(plain_dtypes, backend.device)
        cut = cut_to_fit(model, units, root, dtype, num_slots=slots, available=device_available, limit=limit)
        if cut.split and micro_batch_size is not None:
            refuse_micro_batches(cut.split)
        elif cut.split:
            run_as = [run_as[layer] for layer in cut.layers]
            cutters = micro_batches(cut.units, None, {})
        units, root = cut.units, cut.root
        slots = min(slots, len(units))
        planned = ledger(units, root, num_slots=slots, update_in_backward=in_backward)
        replace(planned, host={**planned.host, **least_moments(units, root)}).check(
            device_available=device_available,
            device_mend=cut.mend,
            host_available=backend.host_available(),
            host_lockable=backend.host_lockable(),
            shared=not on_device,
            given_back=releasable_bytes(plain_dtypes, torch.device("cpu")),
        )
        store = HostStore([unit.layout for unit in (*units, root)], backend.host_buffer, backend.host_reserve)
        initialise = None if init is None or virtual else Initialiser(init, backend.device, units)
        move = MoveIn(backend, (*units, root), store, initialise)
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
            sum_in_fp32=grad_dtype is not None,
            update_in_backward=in_backward,
        )
        undo.callback(forget, model, executor)
        settle_in(executor)
        compiler = None
        if compile and not virtual:
            compiler = Compiler(backend.device, "inductor" if compile is True else compile)
        for unit, policy, cutter in zip(units, run_as, cutters, strict=True):
            # an instance attribute: __call__ and the user's hooks run around it as before
            unit.module.forward = StreamedLayer(executor, unit, policy, cutter, compiler)
        take_off = attach_guards(
            model, executor, plain_dtypes, is_compiled=compiler is not None, split=cut.split
        )
        undo.callback(take_off)
        end_service = serve_other_optimizers(executor)
        undo.callback(end_service)
        close = weakref.finalize(model, _close, backend, end_service)
        model.__dict__[HANDLE] = Wrapped(executor, planned, plain_dtypes, take_off, close, chosen)
        undo.pop_all()
    return model


def _close(backend: Backend, end_service: Callable[[], None]) -> None:
    end_service()
    backend.close()
