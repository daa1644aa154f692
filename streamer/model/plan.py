"""`plan`: the needs of a model's step on a machine, for notebooks; nothing is allocated."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from torch import nn

from streamer.backends.base import Lane
from streamer.model.options import AUTO, WrapOptions, dtype_of
from streamer.model.wrap import wrap
from streamer.planner.choose import Choice, may_be_auto
from streamer.planner.machine import Machine, context_bytes, named_machine
from streamer.planner.model import Batch, plan_of, skeleton
from streamer.store.ledger import Room, limit_of

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
