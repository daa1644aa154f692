"""bench/depth.py: the line through the steps, and what a small run says of memory."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from bench import depth
from bench.depth import Block, depth_figures, line_through, report_table, summary


def test_a_straight_line() -> None:
    assert line_through([4, 8, 16], [9.0, 17.0, 33.0]) == {
        "slope": 2.0,
        "intercept": 1.0,
        "r_squared": 1.0,
        "largest_relative_residual": 0.0,
    }


def test_a_line_that_is_not_straight() -> None:
    # the best line is y = x + 4/3: the residuals are 1/6, -1/3 and 1/6
    found = line_through([0, 1, 2], [1.5, 2.0, 3.5])
    assert found["slope"] == pytest.approx(1.0)
    assert found["intercept"] == pytest.approx(4 / 3)
    variation = sum((y - 7 / 3) ** 2 for y in (1.5, 2.0, 3.5))
    assert found["r_squared"] == pytest.approx(1 - (1 / 6**2 + 1 / 3**2 + 1 / 6**2) / variation)
    assert found["largest_relative_residual"] == pytest.approx((1 / 3) / 2.0)


def test_a_flat_line_has_no_r_squared() -> None:
    found = line_through([1, 2, 4], [3.0, 3.0, 3.0])
    assert math.isnan(found.pop("r_squared"))
    assert found == {"slope": 0.0, "intercept": 3.0, "largest_relative_residual": 0.0}


def test_figures_of_a_depth() -> None:
    block = Block(seconds=1.0, owned={"weight slots": 60, "root weights": 40}, peak=140)
    blocks = [replace(block, seconds=seconds, peak=peak) for seconds, peak in ((1, 140), (2, 160), (3, 150))]
    assert depth_figures(4, blocks) == {
        "n_layer": 4,
        "seconds_per_step": {"lower_quartile": 1.0, "median": 2.0, "upper_quartile": 3.0},
        "seconds_per_layer": 0.5,
        "owned_bytes": {"weight slots": 60, "root weights": 40},
        "owned_bytes_total": 100,
        "peak_bytes": 160,
        "beyond_owned_bytes_per_layer": 15.0,
    }


@pytest.mark.parametrize("owned", [{"weight slots": 60}, {"weight slots": 61}])
def test_owned_bytes_that_differ_are_told(owned: dict[str, int]) -> None:
    blocks = {
        2: [Block(1.0, {"weight slots": 60}, 100)] * 2,
        4: [Block(2.0, owned, 140)] * 2,
    }
    found = summary(blocks)
    assert found["owned_bytes_are_equal"] == (owned == {"weight slots": 60})
    told = report_table(found)[0]
    assert ("NOT the same at every depth" in told) != found["owned_bytes_are_equal"]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda_api)])
@pytest.mark.parametrize("more", [[], ["--one-at-a-time"]])
def test_a_run(device: str, more: list[str], tmp_path: Path) -> None:
    report, picture = tmp_path / "depth.json", tmp_path / "depth.png"
    sizes = ["--n-embd", "64", "--n-head", "2", "--batch-size", "2", "--context", "8", "--layers", "4", "2"]
    counts = ["--rounds", "2", "--steps", "1", "--device", device, "--host-threads", "1"]
    outputs = ["--json", str(report), "--png", str(picture)]
    depth.main([*sizes, *counts, *outputs, *more])
    found = json.loads(report.read_text())
    assert [row["n_layer"] for row in found["depths"]] == [2, 4]
    assert found["owned_bytes_are_equal"]
    for row in found["depths"]:
        # two slots of 12 n^2 + 13 n parameters of 4 bytes
        assert row["owned_bytes"]["weight slots"] == 2 * 4 * (12 * 64**2 + 13 * 64)
        if device == "cpu":
            # each layer's input: 2 x 8 tokens of width 64
            assert row["beyond_owned_bytes_per_layer"] == 4 * 2 * 8 * 64
        assert row["peak_bytes"] > row["owned_bytes_total"]
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("complete", [1, 3])
def test_the_rounds_before_an_interrupt_stand(
    complete: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "depth.json"
    sizes = ["--n-embd", "16", "--n-head", "2", "--batch-size", "2", "--context", "8", "--layers", "1", "2"]
    arguments = [*sizes, "--rounds", "5", "--steps", "1", "--device", "cpu", "--host-threads", "1"]
    arguments += ["--json", str(report), "--png", str(tmp_path / "depth.png")]
    # the first blocks warm up; of the round that is interrupted one depth is done
    left = iter(range(2 + 2 * complete + 1))
    block = depth.Loop.block

    def interrupted(loop: depth.Loop, steps: int) -> Block:
        if next(left, None) is None:
            raise KeyboardInterrupt
        return block(loop, steps)

    monkeypatch.setattr(depth.Loop, "block", interrupted)
    if complete < 2:
        with pytest.raises(KeyboardInterrupt):
            depth.main(arguments)
        assert not report.exists()
    else:
        depth.main(arguments)
        found = json.loads(report.read_text())
        assert found["rounds"] == complete
        assert [row["n_layer"] for row in found["depths"]] == [1, 2]
    assert capsys.readouterr().out.count("seconds per step by layers: 1 ") == complete
