"""What tests of the command share as fixtures."""

from __future__ import annotations

import pytest

from streamer.cli.config import Config, dump_config
from streamer.cli.plan import planning
from streamer.cli.plan.planning import Models, RunPlan
from streamer.planner.machine import Machine

_plan_run = planning.plan_run
_made: dict[tuple[str, Machine], RunPlan] = {}


def _plan_once(config: Config, machine: Machine, models: Models | None = None) -> RunPlan:
    key = dump_config(config), machine
    if key not in _made:
        _made[key] = _plan_run(config, machine, models)
    return _made[key]


@pytest.fixture
def each_plan_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """`streamer plan` plans a dozen variants of a config, and tests ask for them as text and as JSON. For
    tests that change nothing of a plan but the config and the machine."""
    monkeypatch.setattr(planning, "plan_run", _plan_once)
