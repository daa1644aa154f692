"""What is kept by lane follows from the one list of lanes."""

from __future__ import annotations

import ast
from dataclasses import fields
from itertools import permutations
from pathlib import Path

import streamer
from streamer.backends.base import WORKER_LANES, Lane
from streamer.cli.calibrate.measure import PAIRS
from streamer.planner.machine import RTX_4090, Beside

PACKAGE = Path(streamer.__file__).parent
#: Who may name a lane other than COMPUTE and HOST: who lists them, what ops do, which way a copy goes, what
#: more slots would hide, which lanes share the links between GPUs.
NAMING = {
    *("backends/base.py", "engine/schedule/op.py", "cli/calibrate/measure.py", "planner/choose.py"),
    "planner/machine.py",
}


def test_a_machine_has_a_rate_for_every_lane_and_a_share_beside_every_other() -> None:
    assert all(RTX_4090.bytes_per_second(lane) > 0 for lane in WORKER_LANES)
    pairs = {(lane, other): Beside().kept(lane, other) for lane, other in permutations(Lane, 2)}
    assert set(pairs.values()) == {1.0}
    measured = {f"{a.group}_{b.group}" for pair in PAIRS.values() for a, b in (pair, reversed(pair))}
    assert measured == {field.name for field in fields(Beside)}


def test_nobody_else_lists_lanes() -> None:
    naming = {
        str(file.relative_to(PACKAGE))
        for file in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "Lane"
        and node.attr not in ("COMPUTE", "HOST")
    }
    assert naming <= NAMING
