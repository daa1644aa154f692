"""`bench.hidden_update`: a small run, and one that is interrupted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import hidden_update
from bench.hidden_update import MODES, Block

SMALL = ["--n-layer", "2", "--n-head", "2", "--n-embd", "16", "--context", "8", "--device", "cpu"]


@pytest.mark.parametrize(("blocks", "rounds"), [(None, 4), (3 * 3 + 1, 2), (2 * 3 + 2, None)])
def test_the_rounds_before_an_interrupt_stand(
    blocks: int | None, rounds: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of ``blocks``, three a round, those of the first round only warm up."""
    taken, out, block = [], tmp_path / "hidden.json", hidden_update.Loop.block

    def interrupted(loop: hidden_update.Loop, mode: str, steps: int) -> Block:
        if len(taken) == blocks:
            raise KeyboardInterrupt
        taken.append(block(loop, mode, steps))
        return taken[-1]

    monkeypatch.setattr(hidden_update.Loop, "block", interrupted)
    arguments = [*SMALL, "--rounds", "4", "--steps", "1", "--json", str(out)]
    if rounds is None:
        with pytest.raises(KeyboardInterrupt):
            hidden_update.main(arguments)
        return
    hidden_update.main(arguments)
    found = json.loads(out.read_text())
    assert found["rounds"] == rounds
    assert (found["forward_seconds"] is None) == (blocks is not None)
    for mode in MODES:
        walls = sorted(one.wall for one in taken[3 : 3 * (rounds + 1)])
        figures = found["modes"][mode]["seconds_per_step"]
        assert walls[0] <= figures["lower_quartile"] <= figures["upper_quartile"] <= walls[-1]
    assert found["modes"]["none"]["host_busy_seconds"]["upper_quartile"] == 0
    assert found["modes"]["queued"]["host_busy_seconds"]["lower_quartile"] > 0
