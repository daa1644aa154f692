"""`wrap`: a plain model becomes a streamed one in place, and options that are "auto" are chosen."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import nn

from streamer.backends.base import Backend
from streamer.backends.disk import Disks
from streamer.backends.ranks import Ranks, alone_among
from streamer.backends.select import backend_for
from streamer.backends.virtual import VirtualBackend, VirtualRanks
from streamer.engine.handle import home_of, wrapped_part
from streamer.engine.layer.compiled import CompileBackend
from streamer.errors import shortened, warn
from streamer.model.layers import Layers
from streamer.model.move_in import Init
from streamer.model.options import AUTO, Activations, Folders, Number, WrapOptions
from streamer.model.streaming import stream
from streamer.planner.choose import may_be_auto
from streamer.planner.machine import Machine
from streamer.planner.model import choose_options

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

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
    host_memory: int | str | None = None,
    disk: Folders | Disks | None = None,
    example: object = None,
    machine: Machine | str | None = None,
    process_group: ProcessGroup | DeviceMesh | None = None,
    gather_weights: bool = False,
    backend: Backend | None = None,
) -> M:
    """Stream the layers of ``model`` from host memory. Changes the model in place and returns it.

    The weights move to host memory, a layer at a time, and the storage that they had is given up;
    ``num_slots`` buffers on the device, the slots, each as large as the largest layer, take them in turn.
    What is in no layer (embeddings, final norm, head) stays on the device.
    Inputs are moved to the device. Class, parameter objects, parameter names and ``state_dict`` keys
    stay as they are; `copy.deepcopy` gives a plain CPU model. Train it with `streamer.AdamW`. Gradients of
    the plain model are dropped, with a warning.

    Args:
        layers: dotted path of an ``nn.ModuleList``, ``nn.Sequential`` or ``nn.ModuleDict``, a glob of modules
            (``"model.layers.*.mlp"``), several of them (an encoder's and a decoder's), or None for the lists
            of like blocks that hold most of the parameters. Each module that a glob matches is a layer, also
            where it is a part of a block, whose own forward then runs as it is. A wildcard of `fnmatch`
            stands for one part of a dotted name, or for a piece of it. No layer may be inside of another.
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
            that has none; and by the path of a list of layers, or a glob, the dimension of the batch in their
            hidden states, None for layers that are not to be cut (``{"vision.blocks": None}``, or
            ``{"model.layers.*.mlp.experts": None}``, whose inputs are tokens). Left out: the first,
            where it is as long as that of the hidden states. Whether that is right is checked once for each
            kind of layer; if not, its call raises ValueError. [Note: the check of a batch]
        update: ``"step"`` updates when ``optimizer.step()`` is called, under the next forward; ``"backward"``
            updates each layer as soon as its gradient has landed, so that host memory holds the gradients of
            four layers instead of all, and there is no clipping and no accumulation.
        grad_dtype: what several backward calls before a step, and micro-batches, are added up in:
            ``torch.float32``, which takes 4 bytes per parameter of host memory from the second call on where
            parameters are shorter (for micro-batches 4 per parameter of one layer on the device), or None for
            the parameters' own dtype, as PyTorch does.
        host_threads: threads that update the weights; None means one for each core (of ranks, for each of
            a rank's share of the cores), less one where there is a GPU to feed.
        init: gives a model that was built under ``torch.device("meta")`` its values, a layer at a time, so
            that it is never whole anywhere else. Called with one module after another, children before their
            parents, as ``model.apply(init)`` would, on the device and without gradients; it sets all of the
            module's own parameters and buffers in place. Each layer has a seed of its own, made of its name
            and of one draw from PyTorch's generator.
        compile: True passes the layers through ``torch.compile``, once for all that have one structure; a
            string or a function is the backend that it uses. A layer that cannot be compiled runs as it is,
            with a warning.
        device_memory: bytes, or a text such as ``"16GiB"``: what this process may take of a GPU (PyTorch's
            allocator refuses more, until `unwrap`), and what is planned on the device. Unless ``num_slots``
            is given, what is left holds more layers: the first step (or, where nothing is trained, the first
            pass) shows what is needed beside two, and at its end slots are allocated for as many as fit
            beside all that PyTorch's allocator has taken of a GPU by then. On Linux the allocator is set to
            use expandable segments from then on, which leave no gaps, unless ``PYTORCH_CUDA_ALLOC_CONF`` sets
            something else. Where a later step takes more, slots are given back. One that runs out of memory
            takes back all but two for good: run it again.
        host_memory: bytes, or a text such as ``"48GiB"``: what the wrapped model may take of host memory,
            beside what PyTorch and the program itself take; of ranks, what all of one machine together may
            take. None means as much as is free.
        disk: a folder, or several on different drives: where that goes which host memory, or ``host_memory``,
            has no room for: the optimizer's state, then weights of layers. The layers that the next forward
            asks for first keep theirs in memory. [Note: placement] Results are those without a disk, to the
            bit. A parameter that is on disk is read when user code touches it, and let go when other layers'
            are asked for. Files have no name and end with the process; `streamer.save` is what lasts. With
            ``"recompute+offload"`` give ``example`` too, so that room is left for the inputs that wait.
            Ranks share what is on the disk of their machine; the first of all has chosen what that is. Each
            reads and writes its share of state, and reads all weights for itself. They write a parameter that
            is on disk by PyTorch's functions, not through ``p.data``. A disk that fails on one, or has no
            room on one machine, ends all of them.
        example: a batch to plan a step with, needed where ``activations``, ``num_slots`` or
            ``micro_batch_size`` is ``"auto"``: a tensor, a tuple of the model's arguments, or a dict of them
            by name. Only its shapes and dtypes count, which should be those of the steps' batches. With it, a
            step that does not fit into the memory, or into ``device_memory``, is refused here, not when it
            runs. [Note: options that are chosen]
        machine: how fast the device is, for such a plan: the name of one in `streamer.planner.machine`,
            ``"rtx-4090"`` say, or a `Machine`. None means an RTX 4090 where there is a GPU, else a CPU.
        process_group: the ranks that train this model together, a group of `torch.distributed` (NCCL for
            GPUs, gloo for the CPU): every process of it calls ``wrap``, with a device of its own and the same
            model and options, and gets the values of the first one. Weights, gradients and optimizer state
            lie in host memory once on each machine, which the ranks of that machine share, and each updates a
            share of each layer. A group may have as many ranks on each of several machines: these divide the
            optimizer's state and what makes fp32 masters of the weights, so that each holds a part of it.
            With a `torch.distributed.device_mesh.DeviceMesh` of two dimensions, as for FSDP2's
            ``fully_shard(mesh=)``, each machine holds all of it: the first dimension is over machines, which
            are replicas, the second over the ranks of a machine. Gradients are averaged over the ranks, in
            ``grad_dtype``, as `torch.nn.parallel.DistributedDataParallel` does. All ranks make the same calls
            in the same order, `save` and `load` too. ``example`` is a rank's part of a batch, and the first
            one chooses what is "auto". [Note: ranks]
        gather_weights: how the ranks of a machine bring a layer to their devices. False copies the whole
            layer over the bus of each. True copies another part of it over each bus, and each device gathers
            the others' parts from there, as FSDP2 does: a bus and the host's memory move one part in place of
            all, which pays where the devices have links of their own (NVLink). Then all ranks call the same
            layers in the same order where gradients are on, and have as many slots. Without gradients one may
            run a forward that others do not: such forwards copy whole layers. Nothing is gathered where there
            is one rank, or nothing is trained. Results are the same to the bit. [Note: gathered weights]
        backend: the backend to run on in place of the device's own. A virtual one has no values and compiles
            nothing.

    Raises:
        ValueError: for a path, an option or a parameter that cannot be honoured, naming the remedy.
        DiskError: (an OSError) for a folder of ``disk`` that cannot be used, or is too full.
        MemoryError: if the device or the host has too little memory, or the host may page-lock too little of
            it: a line with what that needs and has, and the bytes by owner below it. Where parts of the
            largest layers would fit, the line has the globs for ``layers``. The limits of control groups
            count. Both are raised before anything is allocated or changed, but for what ``init`` does wrong.
            Then, as with any other error, parameters are put back, without their gradients; frozen ones that
            were moved already are as ``dtype`` has rounded them.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"wrap takes an nn.Module, not a {type(model).__name__}")
    if any(home_of(param) is not None for param in model.parameters()):
        part = wrapped_part(model) or "it"
        raise ValueError(
            f"this model, or a part of it, is wrapped already: call streamer.unwrap on {part} first"
        )
    options = WrapOptions(
        layers=layers,
        dtype=dtype,
        num_slots=num_slots,
        activations=activations,
        micro_batch_size=micro_batch_size,
        batch_dims=batch_dims,
        update=update,
        grad_dtype=grad_dtype,
        host_threads=host_threads,
        init=init,
        compile=compile,
        device_memory=device_memory,
        host_memory=host_memory,
        disk=disk,
        gather_weights=gather_weights,
    )
    if process_group is None and alone_among() > 1:
        warn(
            f"torch.distributed has {alone_among()} ranks, and each of them trains this model alone: give "
            "wrap process_group=torch.distributed.group.WORLD to train it together"
        )
    if held := [name for name, param in model.named_parameters() if param.grad is not None]:
        warn(
            f"wrap drops the gradients of {shortened(held, most=2)}: wrap before their backward, or call "
            "model.zero_grad() before wrap to be spared this"
        )
    with ExitStack() as undo:
        if backend is None:
            backend = backend_for(device)
        undo.callback(backend.close)
        chosen = None
        ranks = _ranks(process_group, backend)
        undo.callback(ranks.leave)
        undo.push(partial(_tell_of_failure, ranks))
        if example is not None or AUTO in may_be_auto(options):
            there = ranks.local_size, ranks.state_machines
            chosen = choose_options(model, backend, options, example, machine, *there)
            # what is free may differ from rank to rank
            chosen = ranks.from_first("choosing options", chosen)
            options = replace(options, **chosen.choice.options())
        for_inputs = 0 if chosen is None else chosen.plan.host_beside
        stream(model, backend, options, ranks, chosen=chosen, for_inputs=for_inputs)
        undo.pop_all()
    return model


def _ranks(process_group: ProcessGroup | DeviceMesh | None, backend: Backend) -> Ranks:
    if isinstance(backend, VirtualBackend) and process_group is None:
        return VirtualRanks(backend)
    return Ranks(process_group, backend.device)


def _tell_of_failure(ranks: Ranks, kind: object, error: BaseException | None, trace: object) -> None:
    """Let the other ranks, which wait for this one, know why it does not come."""
    if isinstance(error, Exception):
        ranks.tell(error)
