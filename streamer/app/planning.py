"""What a config's run will take on a machine, known before anything is allocated."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

import streamer
from streamer.app.build import build_optimizer, stream_options
from streamer.app.config import Config, ConfigError
from streamer.app.loop import step_on
from streamer.app.loss import TokenLoss
from streamer.app.pretrained import without_values
from streamer.backends.base import Lane
from streamer.backends.machine import CPU, Machine
from streamer.backends.virtual import VirtualBackend
from streamer.engine.trace import Trace
from streamer.handle import wrapped
from streamer.memory.purposes import PINNED
from streamer.options import parse_bytes
from streamer.plan.recalling import Recollection
from streamer.plan.step_plan import BESIDE, GAPS, WORKING_SET, StepPlan, plan_step, uncollected

#: Bytes of host memory that Python and its libraries take: a round figure, not a measurement.
PROCESS, PROCESS_BYTES = "Python and its libraries", 1 << 30
#: Room for any model: what does not fit is to be told in figures.
_ENOUGH = 1 << 60


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

    @property
    def tokens(self) -> int:
        """Tokens of one step."""
        return self.config.data.batch_size * self.config.data.context

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.step.prediction.seconds

    @property
    def model_flops(self) -> int:
        """FLOPs of a step as usually counted, 6 per parameter and token (Kaplan et al., 2020, 2.1)."""
        return 6 * self.parameters * self.tokens

    @property
    def device_budget(self) -> int | None:
        """What the config lets PyTorch take of the device, in bytes."""
        return parse_bytes("device_memory", self.config.stream.device_memory)

    @property
    def host_bytes(self) -> Mapping[str, int]:
        """Bytes of host memory by owner, the process's own with them."""
        return {**self.step.host_bytes, PROCESS: PROCESS_BYTES}

    @property
    def host_pinned(self) -> int:
        """Bytes of host memory that are page-locked, as what is copied to or from a GPU is."""
        if self.machine.kind == CPU:
            return 0
        return sum(nbytes for purpose, nbytes in self.step.host_bytes.items() if purpose in PINNED)

    @property
    def device_allocated(self) -> int:
        """What counts towards the budget, in bytes: all that PyTorch's allocator takes of the device; where
        the host stands in for one, which has no such count, buffers and saved inputs."""
        if self.machine.kind == CPU:
            uncounted = (WORKING_SET, BESIDE)
            return sum(nbytes for owner, nbytes in self.step.device_bytes.items() if owner not in uncounted)
        return self.step.device_total + self.step.reserve.get(GAPS, 0)

    @property
    def device_needed(self) -> int:
        """Bytes of the device, what is left free there with them."""
        return self.step.device_total + sum(self.step.reserve.values())

    @property
    def host_needed(self) -> int:
        """Bytes of host memory; where the host stands in for a device, with those of that."""
        own = sum(self.host_bytes.values())
        return own + self.device_needed if self.machine.kind == CPU else own

    @property
    def fits_budget(self) -> bool:
        """Whether the budget has room, if there is one."""
        budget = self.device_budget
        return self.refused is None and (budget is None or self.device_allocated <= budget)

    @property
    def fits_device(self) -> bool:
        """Whether the device has room, and the budget too."""
        return self.fits_budget and self.device_needed <= self.machine.device_bytes

    @property
    def fits_host(self) -> bool:
        """Whether the host has room."""
        return self.host_needed <= self.machine.host_bytes

    @property
    def fits(self) -> bool:
        """Whether the run can start."""
        return self.fits_device and self.fits_host

    @property
    def lacking(self) -> Mapping[str, int]:
        """Bytes that there are too few of, by side."""
        of_device = self.device_needed - self.machine.device_bytes
        if self.device_budget is not None:
            of_device = max(of_device, self.device_allocated - self.device_budget)
        of_host = self.host_needed - self.machine.host_bytes
        return {side: lack for side, lack in (("device", of_device), ("host", of_host)) if lack > 0}

    @property
    def binding_lane(self) -> Lane:
        """What the step waits for."""
        return self.step.prediction.binding_lane


@uncollected()
def plan_run(config: Config, machine: Machine, recollection: Recollection | None = None) -> RunPlan:
    """Plan a step of ``config`` on ``machine``, with the loop's own code, without data. Plans of one model
    are made faster with one ``recollection``.

    Raises ConfigError for a config that cannot be run, and for a model that cannot run without values.
    """
    try:
        model = without_values(config.model)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"[model]: {error}") from error
    unlimited = replace(machine, device_bytes=_ENOUGH, host_bytes=_ENOUGH)
    options = stream_options(config.stream)
    refused = None
    try:
        streamer.wrap(model, **options, backend=VirtualBackend(unlimited))
    except ValueError as error:
        raise ConfigError(f"[stream]: {error}") from error
    except MemoryError as error:
        refused = str(error).partition("\n")[0]
        streamer.wrap(model, **options | {"device_memory": None}, backend=VirtualBackend(unlimited))
    return _plan(config, machine, model, refused, recollection)


def _plan(
    config: Config,
    machine: Machine,
    model: nn.Module,
    refused: str | None,
    recollection: Recollection | None,
) -> RunPlan:
    optimizer = build_optimizer(config.optimizer, model)
    executor = wrapped(model).executor
    shape = config.data.batch_size, config.data.context
    # on the CPU, as data comes
    tokens = torch.zeros(shape, dtype=torch.long)
    model.train()
    step = partial(step_on, config, model, optimizer, TokenLoss(model), tokens, tokens)
    try:
        plan = plan_step(executor, step, recollection)
    except (NotImplementedError, RuntimeError) as error:
        raise ConfigError(_without_values(error)) from error
    except (ValueError, IndexError, TypeError) as error:
        raise ConfigError(f"the model cannot run on {shape} tokens: {error}") from error
    parameters = sum(param.numel() for param in model.parameters())
    return RunPlan(config, machine, plan, parameters, executor.issuer.trace, refused)


def _without_values(error: Exception) -> str:
    """One line for a model that wants to know values where there are none."""
    return (
        "the model cannot run without values, as a plan needs it to "
        f"({' '.join(str(error).split())[:300]}): let its forward decide by shapes alone, or start it with "
        "run.steps=1 and read what it takes from summary.json"
    )


#: Plans a config.
PlanOf = Callable[[Config], RunPlan]


def with_options(config: Config, **sections: Mapping[str, Any]) -> Config:
    """``config`` with some keys of some sections changed."""
    changed = {name: replace(getattr(config, name), **keys) for name, keys in sections.items()}
    return replace(config, **changed)
