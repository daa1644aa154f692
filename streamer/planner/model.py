"""A model's step, planned on a copy without values, and the options of `wrap` that are "auto".

[Note: options that are chosen]
A step is planned as forward and backward of the model's ``loss``, or of the sum of all that it returns, and
AdamW with fp32 moments, in training mode and outside of autocast. Other device memory of a loop is not in the
plan: a loss outside of the model takes a copy or two of the logits. The budget of the device is
``device_memory``, or else its free memory. The host has its free memory, and the bytes that the model's own
weights will free. Rates are those of ``machine``, or else of `streamer.planner.machine.RTX_4090` for a GPU
and of `CPU`; sizes are always those of the real device and host. If ``num_slots`` is None, the plan has two,
and `wrap` adds as many as ``device_memory`` has room for, as it always does.
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from streamer.backends.base import Backend
from streamer.backends.ranks import Ranks
from streamer.backends.virtual import VirtualBackend, VirtualRanks
from streamer.engine.handle import wrapped
from streamer.engine.layer.micro_batches import AmbiguousBatchError
from streamer.engine.tensors import Rebuild, flatten
from streamer.engine.unit import Unit
from streamer.errors import notes
from streamer.model.init import check_init
from streamer.model.layers import find_layers
from streamer.model.memory import MemoryPlan, room_of
from streamer.model.options import AUTO, WrapOptions
from streamer.model.streaming import stream
from streamer.model.units import make_units
from streamer.optim.adamw import AdamW
from streamer.planner.choose import Choice, Chosen, PlanOf, choose, may_be_auto
from streamer.planner.machine import CUDA, ENOUGH, GIB, RTX_4090, Machine, gpu_properties, named_machine
from streamer.planner.step import StepPlan, plan_step
from streamer.quantized.parts import composite_of, marked, plainly
from streamer.store.ledger import UNLIMITED, Tier, require

#: The remedy for a model that cannot be planned.
WITHOUT_PLAN = "set activations, num_slots and micro_batch_size yourself, without example"


def skeleton(model: nn.Module) -> nn.Module:
    """A copy of ``model`` on the meta device. Its parameters, buffers and plain tensor attributes have no
    values: none is copied. Shared tensors stay shared in the copy.

    Raises ValueError if a module cannot be copied.
    """
    memo: dict[int, Any] = {}
    owners: dict[nn.Parameter, list[nn.Module]] = defaultdict(list)
    for module in model.modules():
        for param in module._parameters.values():
            if param is not None:
                owners[param].append(module)
    for name, param in model.named_parameters():
        if (composite := composite_of(name, param, owners[param])) is None:
            plain = nn.Parameter(torch.empty_like(param, device="meta"), param.requires_grad)
            plain.__dict__.update(vars(param))  # such as a dtype to keep
            memo[id(param)] = plain
            continue
        # the modules may hold the parts too
        own = composite.parts()
        parts = [torch.empty_like(part, device="meta") for part in plainly(own)]
        memo |= {id(part): without for part, without in zip(own, parts, strict=True)}
        memo[id(param)] = marked(composite.assemble(parts))
    held = [value for module in model.modules() for value in vars(module).values()]
    for tensor in (*model.buffers(), *(value for value in held if isinstance(value, torch.Tensor))):
        without = torch.empty_like(tensor, device="meta", requires_grad=tensor.requires_grad)
        memo.setdefault(id(tensor), without)
    # most of what a module holds are empty dicts of hooks, for which deepcopy takes long
    memo |= {id(value): OrderedDict() for value in held if type(value) is OrderedDict and not value}
    try:
        return copy.deepcopy(model, memo)
    except (TypeError, RuntimeError) as error:
        raise ValueError(
            f"a step is planned on a copy of the model, and this {type(model).__name__} cannot be copied "
            f"({one_line(error)}): {WITHOUT_PLAN}"
        ) from error


@dataclass(frozen=True)
class Batch:
    """The arguments of a model in a plan: tensors without values."""

    tensors: list[torch.Tensor]
    rebuild: Rebuild

    @staticmethod
    def like(example: object) -> Batch:
        """Raises ValueError for an object that is not a batch."""
        if isinstance(example, torch.Tensor):
            example = (example,)
        if not isinstance(example, tuple | Mapping):
            raise ValueError(
                "'auto' needs a batch to plan with: set wrap(example=...) to a tensor, a tuple of the "
                "model's arguments, or a dict of them by name; only shapes and dtypes are used"
            )
        arguments = ((), dict(example)) if isinstance(example, Mapping) else (example, {})
        tensors, rebuild = flatten(arguments)
        if not any(tensor.dim() for tensor in tensors):
            raise ValueError("example: no tensor in it has a first dimension that could be the batch")
        batch = Batch([torch.empty_like(tensor, device="meta") for tensor in tensors], rebuild)
        if not batch.size:
            raise ValueError("example: its batch is empty: use one as large as those of the steps")
        return batch

    @property
    def size(self) -> int:
        """Samples: the first dimension of the first tensor that has one."""
        return next(tensor.shape[0] for tensor in self.tensors if tensor.dim())

    def check_arguments(self, model: nn.Module) -> None:
        """Raise ValueError unless the batch fits the arguments of ``model``'s forward."""
        args, kwargs = self.rebuild(self.tensors)
        try:
            inspect.signature(model.forward).bind(*args, **kwargs)
        except TypeError as error:
            raise ValueError(
                f"example: {type(model).__name__}.forward does not take it ({error}): use a tensor, a "
                "tuple of the model's arguments, or a dict of them by name"
            ) from error

    def step(self, model: nn.Module) -> Callable[[], None]:
        """A step of ``model`` on the batch: forward, backward of its ``loss`` or of the sum of all that it
        returns, and AdamW."""
        args, kwargs = self.rebuild(self.tensors)
        is_trained = any(param.requires_grad for param in model.parameters())
        optimizer = AdamW(model.parameters()) if is_trained else None

        def step() -> None:
            result = model(*args, **kwargs)
            loss = getattr(result, "loss", None)
            found = [loss] if isinstance(loss, torch.Tensor) else flatten(result)[0]
            summed = [tensor.sum() for tensor in found if tensor.requires_grad]
            if optimizer is not None and summed:
                torch.stack([value.float() for value in summed]).sum().backward()
                optimizer.step()
                optimizer.zero_grad()

        return step


def not_planned(error: Exception) -> ValueError:
    """The error to raise if a step cannot run."""
    message = one_line(error)
    if isinstance(error, NotImplementedError) or "meta" in message.lower():
        return ValueError(
            f"a step is planned without values, which this model needs ({message}): {WITHOUT_PLAN}"
        )
    return ValueError(f"example: the model cannot run on such a batch ({message})")


def one_line(error: Exception) -> str:
    """An error's message and its notes on one line, in at most 300 characters."""
    message = " ".join(str(error).split())[:300] or type(error).__name__
    return "; ".join([message, *notes(error)])


#: Rates of the host's cores when they stand in for a device: round figures, not a measurement.
CPU = Machine(
    name="CPU",
    flops_per_second=100e9,
    h2d_bytes_per_second=5e9,
    d2h_bytes_per_second=5e9,
    host_bytes_per_second=10e9,
    device_bytes=16 * GIB,
    host_bytes=16 * GIB,
    kind="cpu",
    device_bytes_per_second=10e9,
    seconds_per_op=5e-6,
)


def plan_of(
    model: nn.Module,
    machine: Machine,
    batch: Batch,
    options: WrapOptions,
    host_bytes: int = ENOUGH,
) -> PlanOf:
    """A function that plans a choice for ``model``, a `skeleton`, on ``machine`` with unlimited memory: the
    caller checks what fits. ``options`` are the same for all choices. With ``options.disk``, state beyond
    ``host_bytes`` is on disk. A choice that does not fit even so is planned with everything in host memory.
    """
    roomy = machine.with_room()

    def plan(choice: Choice) -> StepPlan:
        of_choice = replace(options, **choice.options(), device_memory=None, host_memory=None)
        if options.disk is not None:
            with suppress(MemoryError):
                found = planned_with(replace(of_choice, host_memory=host_bytes), choice)
                if found.host_of_step and found.host_total > host_bytes:
                    room = max(1, host_bytes - found.host_of_step)
                    found = planned_with(replace(of_choice, host_memory=room), choice)
                return found
        return planned_with(replace(of_choice, disk=None), choice)

    def planned_with(options: WrapOptions, choice: Choice) -> StepPlan:
        backend = VirtualBackend(roomy)
        planned = stream(skeleton(model).train(), backend, options, VirtualRanks(backend))
        executor = wrapped(planned).executor
        try:
            step = batch.step(planned)
            # the plan adds a step's needs to the memory that is allocated by now
            executor.host.limit = UNLIMITED
            return plan_step(executor, step)
        except AmbiguousBatchError:
            raise
        except (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError) as error:
            raise not_planned(error) from error
        except (TypeError, ValueError) as error:
            if choice.micro_batch_size is not None:
                raise
            raise not_planned(error) from error

    return plan


def choose_options(
    model: nn.Module,
    backend: Backend,
    options: WrapOptions,
    example: object,
    machine: Machine | str | None,
    ranks: int = 1,
    machines: int = 1,
) -> Chosen:
    """A choice for those of ``options`` that are "auto", for ``backend``'s device and memory, with ``ranks``
    GPUs in each of ``machines``, each with a batch like the example. If none is "auto", the choice is
    ``options`` as they are, planned.

    ``machine`` defines the device's speed, as a `Machine` or a name. Raises ValueError for a model that
    cannot be planned or run, and MemoryError if no step fits. [Note: options that are chosen]
    """
    batch = Batch.like(example)
    batch.check_arguments(model)
    machine = replace(machine_of(backend, machine), ranks=ranks, machines=machines)
    layers = find_layers(model, options.layers)
    units, root = make_units(model, layers, options.dtype)
    if backend.has_values:
        check_init((*units, root), options.init)
    params = [param for unit in (*units, root) for param in unit.params]
    room = room_of(backend, params, limit=options.device_limit)
    room = replace(room, host_limit=options.host_limit, ranks=ranks)
    planned = plan_of(skeleton(model), machine, batch, options, room.host_room())
    try:
        chosen = choose(planned, may_be_auto(options), room, layers=len(layers), batch=batch.size)
    except MemoryError:
        # the layers alone may be too large
        _require_slots(model, units, root, options, room.tensors)
        raise
    logging.getLogger("streamer").info("chosen: %s", chosen.reason)
    return chosen


def _require_slots(
    model: nn.Module, units: list[Unit], root: Unit, options: WrapOptions, available: int
) -> None:
    """Raise MemoryError if the fewest slots are too many for ``available`` bytes of the device."""
    memory = MemoryPlan(model, options, Ranks())
    slots = 1 if options.num_slots == AUTO else options.num_slots or 2
    needed = sum(memory.ledger(units, root, slots).device.values())
    if needed > available:
        remedy = memory.device_remedy(units, root, slots, available)
        require("the model", Tier("the device", needed, available, remedy))


def machine_of(backend: Backend, machine: Machine | str | None = None) -> Machine:
    """Rates to plan with on ``backend``: those of ``machine``, or its name, unless it is None, and
    PyTorch's properties of the real GPU."""
    machine = named_machine(machine) if isinstance(machine, str) else machine
    if machine is None and isinstance(backend, VirtualBackend):
        machine = backend.machine
    elif machine is None:
        machine = CPU if backend.device.type == "cpu" else RTX_4090
    elif not isinstance(machine, Machine):
        raise ValueError(f"machine={machine!r}: use a machine's name, or a streamer.planner.machine.Machine")
    return gpu_properties(machine, backend.device) if backend.device.type == CUDA else machine


def chosen(model: nn.Module) -> Chosen | None:
    """The choice of `wrap` for "auto": the ``choice``, the ``plan`` of a step (bytes by owner, seconds), the
    ``reason``, and all plans ``considered``. None if no option was "auto".

    Raises ValueError if ``model`` is not wrapped.
    """
    found = wrapped(model).chosen
    return found if isinstance(found, Chosen) else None
