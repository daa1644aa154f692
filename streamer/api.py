"""`wrap` turns a plain model into a streamed one in place; `plan` predicts what a step of it needs.

model = streamer.wrap(model, layers="transformer.h", dtype="bf16")
print(streamer.plan(model_without_values, batch, machine="rtx-4090"))
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from streamer.backends.base import Backend, Lane
from streamer.backends.disk import Disks
from streamer.backends.ranks import Ranks, alone_among
from streamer.backends.select import backend_for
from streamer.backends.virtual import VirtualBackend, VirtualRanks
from streamer.engine.handle import home_of, wrapped_part
from streamer.engine.layer.surroundings import CompileBackend
from streamer.errors import shortened, warn
from streamer.model.init import Init
from streamer.model.layers import Layers
from streamer.model.options import AUTO, Activations, Dtype, Folders, Number, WrapOptions, dtype_of
from streamer.model.streaming import stream
from streamer.planner.choose import Choice, may_be_auto
from streamer.planner.machine import Machine, context_bytes, named_machine
from streamer.planner.model import Batch, choose_options, plan_of, skeleton
from streamer.store.ledger import Room, limit_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

M = TypeVar("M", bound=nn.Module)


def wrap(
    model: M,
    *,
    layers: Layers = None,
    device: torch.device | str | None = None,
    dtype: Dtype | None = None,
    micro_batch_size: Number = None,
    activations: Activations = "recompute",
    device_memory: int | str | None = None,
    host_memory: int | str | None = None,
    disk: Folders | Disks | None = None,
    num_slots: Number = None,
    batch_dims: Mapping[str, int | None] | None = None,
    update: str = "step",
    grad_dtype: Dtype | None = torch.float32,
    compile: bool | CompileBackend = False,
    init: Init | None = None,
    host_threads: int | None = None,
    process_group: ProcessGroup | DeviceMesh | None = None,
    gather_weights: bool = False,
    example: object = None,
    machine: Machine | str | None = None,
    backend: Backend | None = None,
) -> M:
    """Stream the layers of ``model`` from host memory. Changes the model in place and returns it.

    Weights move to host memory, and each layer's are copied to the device when it runs; embeddings, final
    norm and head stay on the device. Inputs are moved to the device. Class, parameter objects, parameter
    names and ``state_dict`` keys do not change. Train the model with `streamer.AdamW` or any optimizer of
    PyTorch. Gradients of the plain model are dropped, with a warning.

    Args:
        layers: the dotted path of a list of layers (``"model.layers"``), a glob of modules
            (``"model.layers.*.mlp"``), several of them, or None for the lists of equal blocks that hold most
            of the parameters.
        device: ``"cuda"``, ``"cuda:1"`` or ``"cpu"``; None is CUDA if there is a GPU, else the CPU.
        dtype: the dtype that weights are computed in, ``"bf16"``, ``"fp16"``, ``"fp32"`` or a `torch.dtype`.
            Trained weights keep exact fp32 masters in host memory. None keeps each weight's own dtype.
        micro_batch_size: samples that a layer runs at a time while its weights are on the device. Weights are
            then copied only twice a step for any batch. None runs the whole batch at once.
        activations: ``"recompute"`` runs a layer again in backward, as `torch.utils.checkpoint` does;
            ``"recompute+offload"`` also keeps its inputs in host memory until then; ``"keep"`` keeps its
            activations on the device. A list has one of them for each layer; a function takes a layer's index
            and returns one.
        device_memory: bytes of the GPU that this process may take, as a number or as ``"16GiB"``. Layers that
            fit stay there.
        host_memory: bytes of host memory that the wrapped model may take, as a number or as ``"48GiB"``, for
            all ranks of a machine. None is all free memory.
        disk: a folder, or several on different drives. Optimizer state and weights that do not fit in host
            memory spill there. Results are bitwise the same, and the files are deleted with the process.
        num_slots: layers that the device holds at a time. None is 2, and more if ``device_memory`` has room.
        batch_dims: the dimension of the batch, if ``micro_batch_size`` does not find it: of an argument of
            the layers, by the argument's name, or of the hidden states of a list of layers, by its path or
            glob (None: do not cut).
        update: ``"step"`` updates weights in ``optimizer.step()``. ``"backward"`` updates each layer as soon
            as its gradient is in host memory, which then holds four layers' gradients instead of all, but
            excludes clipping and gradient accumulation.
        grad_dtype: the dtype in which gradients of several backwards, micro-batches and ranks are added up:
            fp32, or None for that of the parameters, as PyTorch does.
        compile: True passes the layers through `torch.compile`, once for all of one structure. A name or a
            function is its backend.
        init: a function that sets a module's own parameters and buffers in place, as ``model.apply`` takes,
            for a model built under ``torch.device("meta")``. It runs one layer at a time.
        host_threads: threads that update weights. None is one for each core, less one that feeds a GPU.
        process_group: the ranks that train this model together, a group of `torch.distributed` or a mesh.
            Each rank calls ``wrap`` with its own device and the same options. Gradients are averaged over all
            ranks, and the ranks of a machine share host memory. Machines divide the optimizer state. With a
            two-dimensional mesh, whose first dimension is over machines, each machine is a replica.
        gather_weights: True copies a different part of each layer to each GPU of a machine, and the GPUs
            all-gather the parts. This is faster if they have links of their own (NVLink). Forwards without
            gradients get two more weight slots, into which each GPU copies whole layers.
        example: a batch (a tensor, a tuple of arguments, or a dict by name) to plan a step with; only its
            shapes and dtypes count. An option of ``"auto"`` needs it. With it, a step that does not fit is
            refused before it runs.
        machine: the name of a machine in `streamer.planner.machine`, or a `Machine`. Its speed decides
            options that are "auto". None is an RTX 4090 if there is a GPU, else a CPU.
        backend: the backend to run on, in place of the device's; a virtual one has no values.

    Raises:
        ValueError: for a path, an option or a parameter that cannot be used, naming the fix.
        DiskError: (an OSError) for a folder of ``disk`` that cannot be used, or is too full.
        MemoryError: if the device or the host has too little memory: one line with the bytes needed and free
            and the fix, and the bytes by owner below it. It is raised before any allocation or change. After
            an error of ``init``, or any later one, the parameters are restored, without gradients; frozen
            ones that were moved stay rounded to ``dtype``.
    """
    _check_model(model)
    options = WrapOptions(
        layers=layers,
        dtype=dtype_of("dtype", dtype),
        num_slots=num_slots,
        activations=activations,
        micro_batch_size=micro_batch_size,
        batch_dims=batch_dims,
        update=update,
        grad_dtype=dtype_of("grad_dtype", grad_dtype),
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
            f"torch.distributed has {alone_among()} ranks, and each of them trains this model alone: pass "
            "wrap process_group=torch.distributed.group.WORLD to train it together"
        )
    with ExitStack() as undo:
        if backend is None:
            backend = backend_for(device)
        undo.callback(backend.close)
        ranks = _ranks(process_group, backend)
        undo.callback(ranks.leave)
        undo.push(partial(_tell_of_failure, ranks))
        chosen = None
        if example is not None or AUTO in may_be_auto(options):
            there = ranks.local_size, ranks.state_machines
            chosen = choose_options(model, backend, options, example, machine, *there)
            # free memory may differ from rank to rank
            chosen = ranks.from_first("choosing options", chosen)
            options = replace(options, **chosen.choice.options())
        for_inputs = 0 if chosen is None else chosen.plan.host_of_step
        stream(model, backend, options, ranks, chosen=chosen, for_inputs=for_inputs)
        undo.pop_all()
    return model


def _check_model(model: nn.Module) -> None:
    """Raise ValueError for a wrapped model or another object; warn of gradients that will be dropped."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"wrap takes an nn.Module, not a {type(model).__name__}")
    if any(home_of(param) is not None for param in model.parameters()):
        part = wrapped_part(model) or "it"
        raise ValueError(
            f"this model, or a part of it, is wrapped already: call streamer.unwrap on {part} first"
        )
    if held := [name for name, param in model.named_parameters() if param.grad is not None]:
        warn(
            f"wrap drops the gradients of {shortened(held, most=2)}: wrap before their backward, or call "
            "model.zero_grad() before wrap to avoid this"
        )


def _ranks(process_group: ProcessGroup | DeviceMesh | None, backend: Backend) -> Ranks:
    if isinstance(backend, VirtualBackend) and process_group is None:
        return VirtualRanks(backend)
    return Ranks(process_group, backend.device)


def _tell_of_failure(ranks: Ranks, kind: object, error: BaseException | None, trace: object) -> None:
    """Send this rank's error to the other ranks, which wait for it."""
    if isinstance(error, Exception):
        ranks.tell(error)


GIB = 1 << 30


@dataclass(frozen=True)
class Plan:
    """A step's needs: bytes by owner on the device (at the peak), in host memory and on disk, and seconds
    by lane, busy and exposed (compute waits for the lane).

    ``device_needed`` and ``host_needed`` are bytes, including those to leave free; ``lacking`` are the bytes
    that the machine lacks, by side. ``flops`` are executed FLOPs, by PyTorch's formulas.
    """

    machine: str
    device_bytes: Mapping[str, int]
    host_bytes: Mapping[str, int]
    disk_bytes: Mapping[str, int]
    device_needed: int
    host_needed: int
    lacking: Mapping[str, int]
    num_slots: int
    samples: int
    seconds: float
    busy_seconds: Mapping[str, float]
    exposed_seconds: Mapping[str, float]
    binding_lane: str
    flops: int

    @property
    def fits(self) -> bool:
        """Whether the machine has room."""
        return not self.lacking

    @property
    def samples_per_second(self) -> float:
        """Samples of the batch per second."""
        return self.samples / self.seconds

    def __repr__(self) -> str:
        lines = [
            f"{self.machine}: a step of {self.samples} samples takes {self.seconds:.3f} s, "
            f"{self.samples_per_second:,.1f} samples/s; {self.binding_lane} binds"
        ]
        for side, held in (
            (f"device, {self.num_slots} slots", self.device_bytes),
            ("host", self.host_bytes),
            ("disk", self.disk_bytes),
        ):
            if held:
                lines.append(f"{side:32}{sum(held.values()) / GIB:>10.3f} GiB")
                lines += [f"  {owner:30}{nbytes / GIB:>10.3f}" for owner, nbytes in held.items()]
        lines.append(f"{'lane':12}{'busy s':>10}{'exposed s':>12}")
        for lane, busy in self.busy_seconds.items():
            if busy:
                lines.append(f"{lane:12}{busy:>10.3f}{self.exposed_seconds[lane]:>12.3f}")
        lacks = ", ".join(f"{nbytes / GIB:.2f} GiB of the {side}" for side, nbytes in self.lacking.items())
        lines.append(f"does not fit: lacks {lacks}" if lacks else "fits")
        return "\n".join(lines)


def plan(model: nn.Module, example: object, *, machine: Machine | str = "rtx-4090", **options: Any) -> Plan:
    """Predict the needs of a training step of ``model`` on ``machine``: its name or a `Machine`.

    ``example`` is a batch: a tensor, a tuple of the model's arguments, or a dict of them by name. Only shapes
    and dtypes count, and the model needs no values: build it under ``torch.device("meta")``. ``options`` are
    those of `streamer.wrap` (``layers``, ``dtype``, ``activations``, ``micro_batch_size``, ``update``,
    ``device_memory``, ``host_memory``, ``disk``, ...), none of them ``"auto"``. The step is forward, backward
    of the model's ``loss`` or of the sum of its outputs, and AdamW with fp32 moments. The model does not
    change, and nothing is allocated. For a `Machine` with several ``ranks`` the batch, the device's bytes
    and the seconds are for one rank, host memory is for all.

    Raises ValueError for an option or a model that cannot be planned, and for an unknown machine.
    """
    wanted = WrapOptions(**_defaults(options))
    if AUTO in may_be_auto(wanted):
        raise ValueError('plan does not choose options: use another value than "auto"')
    wanted.check()
    batch = Batch.like(example)
    batch.check_arguments(model)
    there = named_machine(machine) if isinstance(machine, str) else machine
    room = Room(
        there.device_bytes,
        there.host_bytes,
        limit_of(wanted.device_limit),
        there.has_one_memory,
        context_bytes(there.kind),
        host_limit=wanted.host_limit,
    )
    choice = Choice(*may_be_auto(wanted))
    step = plan_of(skeleton(model), there, batch, wanted, room.host_room())(choice)
    sides = {"device": step.device_tiers(room), "host": step.host_tiers(room, step.device_needed)}
    lacking = {side: max(tier.lacking for tier in tiers) for side, tiers in sides.items()}
    prediction = step.prediction
    return Plan(
        machine=there.name,
        device_bytes=dict(step.device_bytes),
        host_bytes=dict(step.host_bytes),
        disk_bytes=dict(step.disk_bytes),
        device_needed=step.device_needed,
        host_needed=step.host_total,
        lacking={side: nbytes for side, nbytes in lacking.items() if nbytes},
        num_slots=step.num_slots,
        samples=batch.size,
        seconds=prediction.seconds,
        busy_seconds={lane.value: prediction.busy_seconds[lane] for lane in Lane},
        exposed_seconds={lane.value: prediction.exposed_seconds[lane] for lane in Lane},
        binding_lane=prediction.binding_lane.value,
        flops=prediction.flops,
    )


def _defaults(passed: Mapping[str, Any]) -> dict[str, Any]:
    """All options of a plan: those ``passed``, and the defaults of `streamer.wrap` for the others."""
    usual = inspect.signature(wrap).parameters
    names = [item.name for item in fields(WrapOptions)]
    if unknown := sorted(passed.keys() - set(names)):
        raise ValueError(
            f"plan knows no option {unknown[0]!r}: those of streamer.wrap are {', '.join(names)}"
        )
    found = {name: passed.get(name, usual[name].default) for name in names}
    return found | {name: dtype_of(name, found[name]) for name in ("dtype", "grad_dtype")}
