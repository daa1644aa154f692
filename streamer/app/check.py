"""A run's plan, held against the memory that there is, before any of it is taken."""

from __future__ import annotations

from torch import nn

from streamer.app.config import Config, ConfigError
from streamer.app.mending import mend
from streamer.app.plan_report import ledger_lines, mend_line
from streamer.app.planning import PROCESS_BYTES, plan_run
from streamer.app.pretrained import without_values
from streamer.backends.choose import backend_for
from streamer.backends.machine import Machine
from streamer.plan.recalling import Recollection
from streamer.plan.step_plan import CONTEXT_BYTES


def check_memory(config: Config) -> None:
    """Raise ConfigError, with the plan's bytes by owner and what would help, where a step of ``config`` needs
    more than the device or the host has left.

    A model that cannot be planned (its forward asks for values) is let through, which a line says.
    """
    try:
        machine = _this_machine(config.stream.device)
        model = without_values(config.model)
    except (TypeError, ValueError):
        return  # which building the model is about to refuse, in better words
    if not isinstance(model, nn.Module):
        return
    parameters = sum(param.numel() for param in model.parameters())
    # tiny runs need no plan: a step makes no more bytes than it has FLOPs, and holds 18 of each parameter
    at_most = parameters * (6 * config.data.batch_size * config.data.context + 18)
    if at_most < min(machine.device_bytes, machine.host_bytes) / 2:
        return
    try:
        recollection = Recollection()
        plan = plan_run(config, machine, recollection)
    except ConfigError as error:
        print(f"not planned: {error}")
        return
    if not plan.fits:
        found = mend(plan, lambda changed: plan_run(changed, machine, recollection))
        line = mend_line("this run", found, plan, with_speed=False)
        raise ConfigError(line, table="\n".join(ledger_lines(plan)))


def _this_machine(device: str | None) -> Machine:
    """The memory that is left here; how fast it is does not matter."""
    backend = backend_for(device)
    kind = backend.device.type
    try:
        return Machine(
            "this machine",
            1.0,
            1.0,
            1.0,
            1.0,
            # this process and its device are there already
            backend.device_available() + (CONTEXT_BYTES if kind == "cuda" else 0),
            backend.host_available() + PROCESS_BYTES,
            kind=kind,
        )
    finally:
        backend.close()
