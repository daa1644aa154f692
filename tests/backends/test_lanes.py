"""What is kept by lane follows from the one list of lanes."""

from __future__ import annotations

from dataclasses import fields
from itertools import permutations

from streamer.backends.base import WORKER_LANES, Lane
from streamer.cli.calibrate.measure import PAIRS
from streamer.planner.machine import RTX_4090, KeptRates


def test_a_machine_has_a_rate_for_every_lane_and_a_share_beside_every_other() -> None:
    assert all(RTX_4090.bytes_per_second(lane) > 0 for lane in WORKER_LANES)
    pairs = {(lane, other): KeptRates().kept(lane, other) for lane, other in permutations(Lane, 2)}
    assert set(pairs.values()) == {1.0}
    measured = {f"{a.group}_{b.group}" for pair in PAIRS.values() for a, b in (pair, reversed(pair))}
    assert measured == {field.name for field in fields(KeptRates)}
