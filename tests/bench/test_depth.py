"""bench/depth.py: the line through the steps, and what a small run says of memory."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bench import depth
from bench.depth import Block, depth_figures, line_through


def test_a_straight_line() -> None:
    assert line_through([4, 8, 16], [9.0, 17.0, 33.0]) == {
        "slope": 2.0,
        "intercept": 1.0,
        "r_squared": 1.0,
        "largest_relative_residual": 0.0,
    }


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
