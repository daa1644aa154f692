"""bench/depth.py: the line through the steps, and what a small run says of memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import depth


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
