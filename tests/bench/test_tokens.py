"""`bench.tokens_per_transfer`: all of its parts in small, on this machine and on a slow bus."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import streamer
from bench import tokens_per_transfer
from bench.tokens_per_transfer import PLANS, Streamed, curves, readme_figure, report_table, variants
from bench.versus_contenders import Plain, Task

SIZES = {"n_layer": 4, "n_head": 2, "n_embd": 16, "vocab_size": 32, "block_size": 128}
SMALL = ["--n-layer", "4", "--n-head", "2", "--n-embd", "16", "--vocab-size", "32", "--context", "16"]
SMALL += ["--lr", "1e-2"]
NAMES = list(variants(slots=3, parts=2))


def run(folder: Path, *arguments: str) -> dict[str, object]:
    path = folder / "found.json"
    tokens_per_transfer.main([*arguments, "--json", str(path)])
    assert path.with_suffix(".png").stat().st_size > 1000
    return json.loads(path.read_text())


def task(exits: object = None, **sizes: int) -> Task:
    return Task(torch.device("cpu"), torch.float32, SIZES | sizes, batch_size=6, lr=1e-2, exits=exits)


def test_plain_beside_streamed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PLANS, 256, (2, 2, 1, 0.5))
    report = run(tmp_path, "plain", *SMALL, "--tokens", "256")
    text = "\n".join(report_table(report))
    assert [group["tokens_per_step"] for group in report["groups"]] == [256]
    for group in report["groups"]:
        assert group["contenders"]["streamed"]["refused"] is None, group["contenders"]["streamed"]
        assert f"| {group['tokens_per_step']:,} | " in text
    figure = readme_figure(report)
    assert "as a share of the tokens per second of plain PyTorch" in figure


def test_all_ways_on_a_slow_bus_once(tmp_path: Path) -> None:
    few = ["--batch-sizes", "8", "--rounds", "2", "--steps", "1", "--n-layer", "2"]
    report = run(tmp_path, "bus", *SMALL, *few, "--gb-per-second", "0.1", "--parts", "2", "--slots", "3")
    (group,) = report["groups"]
    assert list(group["contenders"]) == ["plain-fp32", "as fast as memory", *NAMES]
    for name, row in group["contenders"].items():
        assert row.get("refused") is None and "skipped" not in row, (name, row)
    text = "\n".join(report_table(report))
    assert "| 0.1 GB/s each way | 128 |" in text
    assert sorted(curves(report)["0.1 GB/s each way"]) == sorted(group["contenders"])


@pytest.mark.parametrize("name", NAMES)
def test_every_way_has_the_gradients_of_the_whole_batch(name: str) -> None:
    tokens = task().batch(0)

    def gradients(contender: Streamed | Plain) -> dict[str, torch.Tensor]:
        parts = contender.variant.split(tokens) if isinstance(contender, Streamed) else (tokens,)
        for part in parts:
            (contender.loss(part) * (len(part) / len(tokens))).backward()
        return {name: param.grad.clone() for name, param in contender.model.named_parameters()}

    expected = gradients(Plain(task(), exact=True))
    contender = Streamed(task(), variants(slots=3, parts=2)[name])
    for key, gradient in gradients(contender).items():
        torch.testing.assert_close(gradient, expected[key], rtol=1e-4, atol=1e-6)
    streamer.unwrap(contender.model)


@pytest.mark.cuda_api
def test_all_ways_on_a_gpu_once(tmp_path: Path) -> None:
    few = ["--batch-sizes", "8", "--rounds", "2", "--steps", "1", "--device", "cuda", "--dtype", "float32"]
    report = run(tmp_path, "bus", *SMALL, *few, "--parts", "2", "--slots", "3")
    (group,) = report["groups"]
    assert group["gb_per_second"] is None
    assert [name for name, row in group["contenders"].items() if "skipped" in row] == []
