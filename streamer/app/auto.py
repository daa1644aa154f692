"""What a config leaves to be chosen, chosen for a machine."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from typing import Any

import torch

from streamer.app.config import Config, ConfigError
from streamer.app.planning import PROCESS_BYTES, plan_run
from streamer.app.pretrained import without_values
from streamer.backends.choose import backend_for
from streamer.backends.machine import Machine
from streamer.choosing import AUTO, boxes, machine_of
from streamer.engine.micro_batches import AmbiguousBatchError
from streamer.find import find_layers
from streamer.options import parse_bytes
from streamer.plan.choices import Choice, Room
from streamer.plan.choosing import Chosen, PlanOf, choose
from streamer.plan.recalling import Recollection
from streamer.plan.step_plan import StepPlan


def settle(
    config: Config, machine: Machine | None = None, recollection: Recollection | None = None
) -> tuple[Config, Chosen | None]:
    """``config`` with a choice for each of ``stream.activations``, ``num_slots`` and ``micro_batch_size``
    that is "auto", and how it was come by; None where nothing is.

    ``machine`` has the rates and the sizes. None is this one: the sizes are then what is free now, and the
    rates those that `streamer.wrap` would take. ``recollection`` is that of other plans of it. Raises
    ConfigError for a config that cannot be run, and where nothing fits.
    """
    stream = config.stream
    if AUTO not in (stream.activations, stream.num_slots, stream.micro_batch_size):
        return config, None
    limit = parse_bytes("device_memory", stream.device_memory)
    try:
        if machine is None:
            with closing(backend_for(stream.device)) as backend:
                machine = machine_of(backend)
                room = Room(
                    backend.device_available(), backend.host_available(), limit, machine.kind == "cpu"
                )
        else:
            host = machine.host_bytes - PROCESS_BYTES
            room = Room(machine.device_bytes, host, limit, machine.kind == "cpu")
        among = boxes(
            layers=len(find_layers(without_values(config.model), stream.layers)),
            batch=config.data.batch_size,
            activations=stream.activations,
            num_slots=stream.num_slots,
            micro_batch_size=stream.micro_batch_size,
        )
        recollection = recollection or Recollection()
        whole = _plan_of(config, machine, recollection, in_parts=False)
        in_parts = None if limit is None else _plan_of(config, machine, recollection, in_parts=True)
        with torch.random.fork_rng(devices=()):
            chosen = choose(whole, among, room, in_parts)
    except (TypeError, ValueError, MemoryError) as error:
        raise error if isinstance(error, ConfigError) else ConfigError(f"[stream]: {error}") from error
    return _with(config, chosen.choice), chosen


def without_auto(config: Config) -> Config:
    """``config`` with `streamer.wrap`'s own in place of what is "auto"."""
    usual = {"activations": "recompute", "num_slots": None, "micro_batch_size": None}
    changed: dict[str, Any] = {
        key: value for key, value in usual.items() if getattr(config.stream, key) == AUTO
    }
    return replace(config, stream=replace(config.stream, **changed))


def _plan_of(config: Config, machine: Machine, recollection: Recollection, *, in_parts: bool) -> PlanOf:
    """What plans a choice; with ``in_parts`` layers are cut where the config's ``device_memory`` needs it."""

    def plan(choice: Choice) -> StepPlan:
        of_choice = _with(config, choice)
        if not in_parts:
            # what fits is seen to by whoever chooses
            of_choice = replace(of_choice, stream=replace(of_choice.stream, device_memory=None))
        try:
            return plan_run(of_choice, machine, recollection).step
        except ConfigError as error:
            if isinstance(error.__cause__, AmbiguousBatchError):
                raise error.__cause__ from None
            raise

    return plan


def _with(config: Config, choice: Choice) -> Config:
    changed: dict[str, Any] = choice._asdict()
    if choice.micro_batch_size is None:
        changed["batch_dims"] = None
    return replace(config, stream=replace(config.stream, **changed))
