"""What a config's run will take on a machine, known before anything is allocated: for the config as it is,
for other batches, and for the options that it leaves to be chosen. Machines are compared by the arithmetic
that a model needs by its size alone (MFU).
"""

from __future__ import annotations

import inspect
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import streamer
from streamer.backends.base import DISKS
from streamer.backends.disk import Disks
from streamer.backends.select import backend_for
from streamer.backends.virtual import VirtualBackend, VirtualScratch
from streamer.cli.build import build_optimizer, from_files, refusals, without_values, wrap_options
from streamer.cli.config import TRAINER, Config, ConfigError, StreamConfig, dump_config, in_keys, with_keys
from streamer.cli.run import Space, loss_function, space_of, step_on
from streamer.engine.handle import wrapped
from streamer.engine.layer.micro_batches import AmbiguousBatchError
from streamer.engine.schedule.trace import Trace
from streamer.model.layers import find_layers
from streamer.model.memory import room_of
from streamer.model.options import AUTO, folders_of, parse_bytes
from streamer.planner.choose import Choice, Chosen, PlanOf, choose, may_be_auto
from streamer.planner.machine import CPU, Machine, context_bytes
from streamer.planner.model import machine_of, one_line, skeleton
from streamer.planner.step import StepPlan, plan_step, uncollected
from streamer.pretrained.architecture import is_quantized_folder
from streamer.pretrained.files import has_weights
from streamer.quantized.parts import shape_of, values_in
from streamer.store.ledger import UNLIMITED, Ledger, Room, Tier, limit_of

#: Bytes of host memory that Python and its libraries take: a round figure, not a measurement.
PROCESS, PROCESS_BYTES = "Python and its libraries", 1 << 30
#: Seconds without a line after which one says how many plans there are by then.
SILENCE = 10.0


def this_machine(stream: StreamConfig, ranks: int = 1, machines: int = 1) -> tuple[Machine, Room]:
    """Rates to plan with where no others are known, and what is free here and now, for ``ranks`` of each of
    ``machines``."""
    limit = parse_bytes("device_memory", stream.device_memory)
    with closing(backend_for(stream.device)) as backend:
        machine, room = machine_of(backend), room_of(backend, limit=limit)
    # what this process has taken already is planned again
    host = room.host + PROCESS_BYTES
    machine = replace(machine, ranks=ranks, machines=machines)
    return replace(machine, device_bytes=room.device, host_bytes=host), room


def room_on(machine: Machine, config: Config) -> Room:
    """What there is for a run of ``config`` on ``machine``, without what Python takes."""
    return Room(
        machine.device_bytes,
        machine.host_bytes - PROCESS_BYTES * machine.ranks,
        limit_of(parse_bytes("device_memory", config.stream.device_memory)),
        machine.has_one_memory,
        context_bytes(machine.kind),
        host_limit=limit_of(parse_bytes("host_memory", config.stream.host_memory)),
        ranks=machine.ranks,
    )


@dataclass(frozen=True)
class RunPlan:
    """A config's step on a machine."""

    config: Config
    machine: Machine
    step: StepPlan
    parameters: int
    trace: Trace
    #: why the config's device_memory is too small for anything, if it is
    refused: str | None = None
    #: why it does not fit into host memory with the rest on disk, if it does not: all is planned in memory
    beyond_disk: str | None = None
    #: of the model for a token, by its size alone
    flops_per_token: float = 0.0
    #: what the run's own files take of a disk
    space: Space | None = None

    @property
    def tokens(self) -> int:
        """Tokens of one step."""
        return self.config.train.batch_size * self.config.train.max_length * self.machine.ranks

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.step.prediction.seconds

    @property
    def model_flops(self) -> float:
        """FLOPs of a step as usually counted: see `model_flops_per_token`."""
        return self.flops_per_token * self.tokens

    @property
    def mfu(self) -> float:
        """The share of the FLOP/s of the machine's GPUs that `model_flops` are: model FLOPs utilization
        (Chowdhery et al., 2022, arXiv:2204.02311, appendix B)."""
        at_peak = self.machine.flops_per_second * self.machine.ranks
        return self.model_flops / (self.step.prediction.seconds * at_peak)

    @property
    def hours(self) -> float:
        """Of all steps of the run, without validation."""
        return self.config.train.max_steps * self.step.prediction.seconds / 3600

    @cached_property
    def room(self) -> Room:
        """What the machine has for the run."""
        return room_on(self.machine, self.config)

    @property
    def host_bytes(self) -> Mapping[str, int]:
        """Bytes of host memory by owner, the process's own with them."""
        return {**self.step.host_bytes, PROCESS: PROCESS_BYTES * self.machine.ranks}

    @property
    def host_pinned(self) -> int:
        """Bytes of host memory that are page-locked, as what is copied to or from a GPU is."""
        return 0 if self.machine.kind == CPU else Ledger({}, self.step.host_bytes).pinned_host_bytes

    @property
    def device_needed(self) -> int:
        """Bytes of the device, what is left free there with them."""
        return self.step.device_needed

    @property
    def host_needed(self) -> int:
        """Bytes of host memory; where the host stands in for a device, with those of that."""
        return self.room.host_tier(sum(self.host_bytes.values()), self.device_needed).needed

    @property
    def tiers(self) -> list[Tier]:
        """Bytes that are needed and that there are, of each memory with a limit."""
        return [*self.step.device_tiers(self.room), *self.step.host_tiers(self.room, self.device_needed)]

    @property
    def lack(self) -> int:
        """Bytes that are lacking in all; the layers alone may be too large for the device."""
        return sum(self.lacking.values()) + (self.refused is not None)

    @property
    def is_tight(self) -> bool:
        """Whether less than a tenth of host memory is left for the system."""
        return self.fits and self.host_needed > 0.9 * self.machine.host_bytes

    @property
    def fits_device(self) -> bool:
        """Whether the device has room, and the budget too."""
        return self.refused is None and "device" not in self.lacking

    @property
    def fits_host(self) -> bool:
        """Whether the host has room."""
        return "host" not in self.lacking

    @property
    def fits(self) -> bool:
        """Whether the run can start."""
        return self.fits_device and self.fits_host

    @property
    def lacking(self) -> Mapping[str, int]:
        """Bytes that there are too few of, by side."""
        sides = {
            "device": self.step.device_tiers(self.room),
            "host": self.step.host_tiers(self.room, self.device_needed),
        }
        found = {side: max(tier.lacking for tier in tiers) for side, tiers in sides.items()}
        return {side: nbytes for side, nbytes in found.items() if nbytes}

    @property
    def has_disk(self) -> bool:
        """Whether the config has folders for what host memory has no room for."""
        return self.config.stream.disk is not None

    @property
    def on_disk(self) -> int:
        """Bytes on disk."""
        return sum(self.step.disk_bytes.values())

    @property
    def disk_moved(self) -> tuple[int, int]:
        """Bytes that a step reads from disk, and writes there; of ranks as much for each as for the first."""
        reads, writes = (self.machine.ranks * self.step.prediction.moved_bytes[lane] for lane in DISKS)
        return reads, writes


@uncollected()
def plan_run(config: Config, machine: Machine, models: Models | None = None) -> RunPlan:
    """Plan a step of ``config`` on ``machine``, with the loop's own code, without data. Several plans build
    a model once with the same ``models``.

    Raises ConfigError for a config that cannot be run, and for a model that cannot run without values.
    """
    models = models or Models()
    with refusals("[model]"):
        plain = models.plain(config)
    with refusals("[stream]"):
        options = wrap_options(config, plain)
    in_memory = options | {"host_memory": None, "disk": None}
    if config.stream.disk is None:
        return _plan_with(in_memory, config, machine, models)
    room = max(1, room_on(machine, config).host_room())
    try:
        found = _plan_with(options | {"host_memory": room}, config, machine, models)
        if found.step.host_of_step and found.step.host_total > room:
            room = max(1, room - found.step.host_of_step)
            found = _plan_with(options | {"host_memory": room}, config, machine, models)
        return found
    except MemoryError as error:
        plan = _plan_with(in_memory, config, machine, models)
        return replace(plan, beyond_disk=in_keys(str(error).partition("\n")[0]))


def _plan_with(options: Mapping[str, Any], config: Config, machine: Machine, models: Models) -> RunPlan:
    """A plan with these ``options`` of `streamer.wrap`; MemoryError if their ``host_memory`` is too small."""
    refused = None
    try:
        model = _wrapped(options, config, machine, models)
    except MemoryError as error:
        refused = in_keys(str(error).partition("\n")[0])
        model = _wrapped({**options, "device_memory": None}, config, machine, models)
    return _plan(config, machine, model, refused)


def _wrapped(options: Mapping[str, Any], config: Config, machine: Machine, models: Models) -> nn.Module:
    """The config's model on the virtual backend. With a disk what is frozen is where a run would find it: in
    the files of a pretrained model, if they are there. What is quantized there only they tell."""
    backend = VirtualBackend(machine.with_room())
    folder = config.model.path
    model: nn.Module
    has_files = folder is not None and has_weights(Path(folder))
    if has_files and (options["disk"] is not None or _has_quantized(config)):
        disks = None
        if options["disk"] is not None:
            disks = Disks(folders_of(options["disk"]), lambda *_, **__: VirtualScratch())
        with refusals("[model] and [stream]", besides=MemoryError):
            model = from_files(config, {**options, "disk": disks, "backend": backend})
        return model
    with refusals("[model]"):
        model = models.model(config)
    with refusals("[stream]", besides=MemoryError):
        model = streamer.wrap(model, **options, backend=backend)
    return model


class Models:
    """Models without values, each built once."""

    def __init__(self) -> None:
        self._built: dict[str, Any] = {}

    def plain(self, config: Config) -> Any:
        """The model of ``config`` without adapters, its weights not quantized; not to be changed."""
        return self._once(replace(config, lora={}), quantized=False)

    def model(self, config: Config) -> Any:
        """A copy of the model of ``config`` with its adapters, for parameters of ``stream.dtype``."""
        return skeleton(self._once(config, quantized=_has_quantized(config)))

    def _once(self, config: Config, *, quantized: bool) -> Any:
        key = repr((config.model, config.lora, config.stream.dtype, quantized))
        if key not in self._built:
            self._built[key] = without_values(config, quantized=quantized)
        return self._built[key]


class Plans:
    """Plans of configs on one machine, each planned once. After `SILENCE` a line says that more are under
    way."""

    def __init__(self, machine: Machine, models: Models) -> None:
        self._machine = machine
        self._models = models
        self._known: dict[str, RunPlan] = {}
        self._said = time.monotonic()

    def __call__(self, config: Config) -> RunPlan:
        text = dump_config(config)
        if text not in self._known:
            self._known[text] = plan_run(config, self._machine, self._models)
            if time.monotonic() - self._said > SILENCE:
                self._said = time.monotonic()
                print(f"{len(self._known)} steps planned", file=sys.stderr, flush=True)
        return self._known[text]


def _has_quantized(config: Config) -> bool:
    """Whether the config, or that of its pretrained model, has weights quantized."""
    folder = config.model.path
    in_files = folder is not None and is_quantized_folder(Path(folder))
    return in_files or config.model.quantize != "none"


def _plan(
    config: Config,
    machine: Machine,
    model: nn.Module,
    refused: str | None,
) -> RunPlan:
    try:
        optimizer = build_optimizer(config, model)
    except ConfigError as error:
        raise error.__cause__ if isinstance(error.__cause__, MemoryError) else error from None
    executor = wrapped(model).executor
    # a plan adds the needs of steps to the memory that is allocated by now
    executor.host.limit = UNLIMITED
    shape = config.train.per_device_train_batch_size, config.train.max_length
    # on the CPU, as data comes
    tokens = torch.zeros(shape, dtype=torch.long)
    options = {}
    if config.model.path is not None and "position_ids" in inspect.signature(model.forward).parameters:
        # as `streamer.integrations.rows.Rows` has them
        options["position_ids"] = torch.arange(shape[1]).expand(shape)
    model.train()
    batches = [(tokens, tokens, options)] * config.train.gradient_accumulation_steps
    step = partial(step_on, config, model, optimizer, loss_function(model), batches)
    try:
        plan = plan_step(executor, step, packed=bool((TRAINER | config.trainer)["packing"]))
    except (NotImplementedError, RuntimeError) as error:
        raise ConfigError(_without_values(error)) from error
    except (ValueError, IndexError, TypeError) as error:
        raise ConfigError.of(f"the model cannot run on {shape} tokens", error) from error
    parameters = sum(map(values_in, model.parameters()))
    return RunPlan(
        config,
        machine,
        plan,
        parameters,
        executor.issuer.trace,
        refused,
        flops_per_token=model_flops_per_token(model),
        space=space_of(config, model),
    )


def _without_values(error: Exception) -> str:
    """One line for a model that wants to know values where there are none."""
    return (
        "the model cannot run without values, as a plan needs it to "
        f"({one_line(error)}): let its forward decide by shapes alone, or start it with "
        "train.max_steps=1 and read what it takes from summary.json"
    )


#: Plans a config.
RunPlanOf = Callable[[Config], RunPlan]


def with_changes(config: Config, changes: Mapping[str, Any]) -> Config:
    """``config`` with other values of some keys, ``section.key``."""
    for key, value in changes.items():
        section, name = key.split(".")
        config = with_keys(config, **{section: {name: value}})
    return config


def settle(
    config: Config,
    machine: Machine | None = None,
    *,
    ranks: int = 1,
    machines: int = 1,
    models: Models | None = None,
) -> tuple[Config, Chosen | None]:
    """``config`` with a choice for each of ``stream.activations``, ``num_slots`` and ``micro_batch_size``
    that is "auto", and why each was chosen, or None if nothing was to be chosen.

    ``machine`` has the rates and the sizes. None is this one with ``ranks``, of so many ``machines``: the
    sizes are then what is free now, and the rates those that `streamer.wrap` would take.
    Raises ConfigError for a config that cannot be run, and where nothing fits.
    """
    stream, may_be = config.stream, may_be_auto(config.stream)
    models = models or Models()
    if AUTO not in may_be:
        return config, None
    try:
        machine, room = (
            this_machine(stream, ranks, machines) if machine is None else (machine, room_on(machine, config))
        )
        room = replace(room, host_limit=limit_of(parse_bytes("host_memory", config.stream.host_memory)))
        layers = find_layers(models.plain(config), stream.layers)
        batch = config.train.per_device_train_batch_size
        chosen = choose(
            _plan_of(config, Plans(machine, models)), may_be, room, layers=len(layers), batch=batch
        )
    except (TypeError, ValueError, MemoryError) as error:
        raise error if isinstance(error, ConfigError) else ConfigError.of("[stream]", error) from error
    return with_keys(config, stream=chosen.choice.options()), chosen


def without_auto(config: Config) -> Config:
    """``config`` with `streamer.wrap`'s own in place of what is "auto"."""
    usual = vars(StreamConfig())
    changed = {key: usual[key] for key in Choice._fields if getattr(config.stream, key) == AUTO}
    return with_keys(config, stream=changed)


def _plan_of(config: Config, plans: Plans) -> PlanOf:
    """A function that plans a choice for ``config``."""

    def plan(choice: Choice) -> StepPlan:
        # `choose` checks what fits
        of_choice = with_keys(config, stream=choice.options() | {"device_memory": None})
        try:
            return plans(of_choice).step
        except ConfigError as error:
            if isinstance(error.__cause__, AmbiguousBatchError):
                raise error.__cause__ from None
            raise

    return plan


#: FLOPs of a parameter and a token: forward, and in backward the gradient of what goes in. The third
#: product, of the parameter's own gradient, is for what is trained.
FROZEN, TRAINED = 4, 6

#: Names in configs of transformers for the number of experts, and of those that a token uses.
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_k")


def model_flops_per_token(model: nn.Module) -> float:
    """FLOPs of a training step for one token: 6 for each trained parameter that a token uses, 4 for a frozen
    one (Kaplan et al., 2020, arXiv:2001.08361, 2.1). A token uses few of the experts. The products of
    attention scores are not counted.
    """
    config = getattr(model, "config", None)
    share = _share_of_experts(config)
    flops = 0.0
    for name, param in model.named_parameters():
        used = share if _is_of_experts(name, param, config) else 1.0
        flops += used * values_in(param) * (TRAINED if param.requires_grad else FROZEN)
    return flops


def _number(config: Any, names: tuple[str, ...]) -> int | None:
    found = (getattr(config, name, None) for name in names)
    return next((value for value in found if isinstance(value, int) and value > 0), None)


def _share_of_experts(config: Any) -> float:
    experts, used = _number(config, EXPERTS), _number(config, PER_TOKEN)
    return 1.0 if experts is None or used is None else min(1.0, used / experts)


def _is_of_experts(name: str, param: nn.Parameter, config: Any) -> bool:
    """Whether a parameter is of experts of which a token uses some: all in one, or one by one."""
    if "expert" not in name or "shared" in name:
        return False
    shape = shape_of(param)
    stacked = len(shape) >= 3 and shape[0] == _number(config, EXPERTS)
    return stacked or any(part.isdigit() for part in name.partition("expert")[2].split("."))
