"""A model's step, planned on a copy without values, and the options of `wrap` that are "auto".

[Note: options that are chosen]
A step is planned as forward and backward of the model's ``loss``, or of the sum of all that it returns, and
AdamW with fp32 moments, in training mode and outside of autocast. What else a loop holds on the device comes
on top: a loss outside of the model takes a copy or two of the logits. ``device_memory``, if there is one, is
the budget of the device, else what is free there; the host has what is free, and what the model's own weights
will free. Rates are those of ``machine``, else of `streamer.planner.machine.RTX_4090` for a GPU and of
`CPU`; sizes are always those of the device and the host that there are. Where ``num_slots`` is None, two are
planned, and what ``device_memory`` leaves room for comes on top as it always does.
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections import defaultdict
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
from streamer.engine.tensors.nested import Rebuild, flatten
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

#: What to do about a model that cannot be planned.
WITHOUT_PLAN = "give activations, num_slots and micro_batch_size yourself, and no example"


def skeleton(model: nn.Module) -> nn.Module:
    """A copy of ``model`` on the meta device, whose parameters, buffers and plain tensor attributes have no
    values: none is copied. What is shared is shared in the copy.

    Raises ValueError where a module cannot be copied.
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
            plain.__dict__.update(vars(param))  # a dtype that it is to keep
            memo[id(param)] = plain
            continue
        # the modules may hold the parts too
        own = composite.parts()
        parts = [torch.empty_like(part, device="meta") for part in plainly(own)]
        memo |= {id(part): without for part, without in zip(own, parts, strict=True)}
        memo[id(param)] = marked(composite.like(parts))
    held = [value for module in model.modules() for value in vars(module).values()]
    for tensor in (*model.buffers(), *(value for value in held if isinstance(value, torch.Tensor))):
        without = torch.empty_like(tensor, device="meta", requires_grad=tensor.requires_grad)
        memo.setdefault(id(tensor), without)
    try:
        return copy.deepcopy(model, memo)
    except (TypeError, RuntimeError) as error:
        raise ValueError(
            f"a step is planned on a copy of the model, and this {type(model).__name__} cannot be copied "
            f"({one_line(error)}): {WITHOUT_PLAN}"
        ) from error


@dataclass(frozen=True)
class Batch:
    """What a model is called with in a plan: tensors without values."""

    tensors: list[torch.Tensor]
    rebuild: Rebuild

    @staticmethod
    def like(example: object) -> Batch:
        """Raises ValueError for what is no batch."""
        if isinstance(example, torch.Tensor):
            example = (example,)
        if not isinstance(example, tuple | Mapping):
            raise ValueError(
                "'auto' needs a batch to plan with: give wrap(example=...) a tensor, a tuple of the model's "
                "arguments, or a dict of them by name; only shapes and dtypes are used"
            )
        given = ((), dict(example)) if isinstance(example, Mapping) else (example, {})
        tensors, rebuild = flatten(given)
        if not any(tensor.dim() for tensor in tensors):
            raise ValueError("example: there is no tensor in it whose first dimension could be the batch")
        batch = Batch([torch.empty_like(tensor, device="meta") for tensor in tensors], rebuild)
        if not batch.size:
            raise ValueError("example: its batch is empty: give one as large as those of the steps")
        return batch

    @property
    def size(self) -> int:
        """Samples: the first dimension of its first tensor that has one."""
        return next(tensor.shape[0] for tensor in self.tensors if tensor.dim())

    def check_arguments(self, model: nn.Module) -> None:
        """Raise ValueError unless they are arguments of ``model``'s forward."""
        args, kwargs = self.rebuild(self.tensors)
        try:
            inspect.signature(model.forward).bind(*args, **kwargs)
        except TypeError as error:
            raise ValueError(
                f"example: it is not what {type(model).__name__}.forward takes ({error}): give a tensor, a "
                "tuple of the model's arguments, or a dict of them by name"
            ) from error

    def step(self, model: nn.Module) -> Callable[[], None]:
        """A step of ``model`` on it: forward, backward of its ``loss`` or of the sum of all that it returns,
        and AdamW."""
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
    """What to raise where a step cannot be run."""
    told = one_line(error)
    if isinstance(error, NotImplementedError) or "meta" in told.lower():
        return ValueError(
            f"a step is planned without values, which this model needs ({told}): {WITHOUT_PLAN}"
        )
    return ValueError(f"example: the model cannot run on a batch like it ({told})")


def one_line(error: Exception) -> str:
    """An error's message on one line, in 300 characters at most, and what was added to it."""
    message = " ".join(str(error).split())[:300] or type(error).__name__
    return "; ".join([message, *notes(error)])


#: Rates of the host's cores where they stand in for a device: round figures, not a measurement.
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
    """What plans a choice for ``model``, a `skeleton`, on ``machine`` with room for anything: what fits is
    seen to by whoever chooses. ``options`` are the same for all choices. With ``options.disk``, what
    ``host_bytes`` have no room for is on disk. What does not fit even so is planned as if all were in host
    memory."""
    roomy = machine.with_room()

    def plan(choice: Choice) -> StepPlan:
        given = replace(options, **choice.options(), device_memory=None, host_memory=None)
        if options.disk is not None:
            with suppress(MemoryError):
                found = planned_with(replace(given, host_memory=host_bytes), choice)
                if found.host_beside and found.host_total > host_bytes:
                    room = max(1, host_bytes - found.host_beside)
                    found = planned_with(replace(given, host_memory=room), choice)
                return found
        return planned_with(replace(given, disk=None), choice)

    def planned_with(given: WrapOptions, choice: Choice) -> StepPlan:
        backend = VirtualBackend(roomy)
        planned = stream(skeleton(model).train(), backend, given, VirtualRanks(backend))
        executor = wrapped(planned).executor
        try:
            step = batch.step(planned)
            # the plan shows what steps take beside what has its place by now
            executor.host_limit = UNLIMITED
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
    """A choice for those of ``options`` that are "auto", for ``backend``'s device and memory and for so many
    ``ranks`` of each of ``machines``, each with such an example. Where none is, the choice is what
    ``options`` say, planned.

    ``machine`` says how fast the device is, itself or by name. Raises ValueError for what cannot be planned,
    or not be run, and MemoryError where no step fits. [Note: options that are chosen]
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


def machine_of(backend: Backend, given: Machine | str | None = None) -> Machine:
    """Rates to plan with on ``backend``: those of ``given``, a machine or the name of one, if it is not None,
    and what PyTorch says of the GPU that there is."""
    machine = named_machine(given) if isinstance(given, str) else given
    if machine is None and isinstance(backend, VirtualBackend):
        machine = backend.machine
    elif machine is None:
        machine = CPU if backend.device.type == "cpu" else RTX_4090
    elif not isinstance(machine, Machine):
        raise ValueError(f"machine={machine!r}: give the name of one, or a streamer.planner.machine.Machine")
    return gpu_properties(machine, backend.device) if backend.device.type == CUDA else machine


def chosen(model: nn.Module) -> Chosen | None:
    """What `wrap` has chosen for "auto": the ``choice``, the ``plan`` of a step (bytes by owner, seconds),
    the ``reason``, and all that was ``considered``. None where nothing was to be chosen.

    Raises ValueError if ``model`` is not wrapped.
    """
    found = wrapped(model).chosen
    return found if isinstance(found, Chosen) else None
