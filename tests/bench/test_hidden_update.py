"""`bench.hidden_update`: a small run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import hidden_update
from bench.hidden_update import MODES, Block

SMALL = ["--n-layer", "2", "--n-head", "2", "--n-embd", "16", "--context", "8", "--device", "cpu"]


def test_figures_are_those_of_the_rounds_after_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken, out, block = [], tmp_path / "hidden.json", hidden_update.Loop.block

    def noted(loop: hidden_update.Loop, mode: str, steps: int) -> Block:
        taken.append(block(loop, mode, steps))
        return taken[-1]

    monkeypatch.setattr(hidden_update.Loop, "block", noted)
    hidden_update.main([*SMALL, "--rounds", "4", "--steps", "1", "--json", str(out)])
    found = json.loads(out.read_text())
    assert found["rounds"] == 4
    assert found["forward_seconds"] is not None
    for mode in MODES:
        walls = sorted(one.wall for one in taken[3 : 3 * 5])
        figures = found["modes"][mode]["seconds_per_step"]
        assert walls[0] <= figures["lower_quartile"] <= figures["upper_quartile"] <= walls[-1]
    assert found["modes"]["none"]["host_busy_seconds"]["upper_quartile"] == 0
    assert found["modes"]["queued"]["host_busy_seconds"]["lower_quartile"] > 0
