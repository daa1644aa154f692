"""`streamer export` of a model of one's own: what is written loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import streamer
from models.gpt2 import GPT
from streamer.cli.export import export
from streamer.cli.main import main
from streamer.errors import CheckpointError
from tests.cli.common import error_of, refused, sets
from tests.cli.test_loop import config, tensors

__all__ = ["config"]
SIZES = {"vocab_size": 256, "block_size": 16, "n_layer": 3, "n_head": 2, "n_embd": 16}


class Odd(GPT):
    """With a third name for the tied weight, buffers of several kinds, and a weight that is not trained."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.again = nn.Linear(1, 1, bias=False)
        self.again.weight = self.lm_head.weight
        self.register_buffer("mean", torch.full((3,), 1 / 3))
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("mask", torch.ones(4), persistent=False)
        self.transformer.wpe.weight.requires_grad_(False)


@pytest.fixture
def run(config: Path, tmp_path: Path) -> Path:  # noqa: F811
    odd = sets("model.args.tied=true", "stream.dtype=bfloat16", "model.factory=tests.cli.test_export:Odd")
    assert main(["train", str(config), *odd]) == 0
    return tmp_path / "run"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_are_the_masters(dtype: str, run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    export(run, out, dtype=dtype, shard_size="20kB")
    masters = tensors(run / "checkpoint-6")
    written: dict[str, torch.Tensor] = {}
    for path in out.glob("*.safetensors"):
        assert path.stat().st_size < 21_000 + 16_384
        written |= load_file(path)
    assert set(json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]) == set(written)
    for name, value in written.items():
        kept = masters[name].dtype if name in ("mean", "count") else getattr(torch, dtype)  # buffers
        assert torch.equal(value, masters[name].to(kept)), name
    known = json.loads((out / "config.json").read_text())
    model: Any = Odd(**known["args"])
    model.load_state_dict(written | {name: written[first] for name, first in known["tied"].items()})
    assert "mean" in written and "mask" not in written
    # and read by streamer
    streamed = streamer.from_pretrained(out, lambda: Odd(**SIZES), "transformer.h", device="cpu")
    assert {name: value.dtype for name, value in streamer.unwrap(streamed).state_dict().items()} == {
        name: written[name].dtype if name in written else written["transformer.wte.weight"].dtype
        for name in model.state_dict()
    }
    assert torch.equal(
        model.transformer.wte.weight, masters["transformer.wte.weight"].to(getattr(torch, dtype)).float()
    )


def test_runs_that_cannot_be_exported(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "the path exists already" in refused(capsys, "export", str(run), "--to", str(tmp_path))
    assert "has no complete one" in refused(
        capsys, "export", str(tmp_path / "x"), "--to", str(tmp_path / "out")
    )
    assert "--merge adds adapters" in refused(
        capsys, "export", str(run), "--to", str(tmp_path / "out"), "--merge"
    )
    assert "has no best checkpoint" in refused(
        capsys, "export", str(run), "--to", str(tmp_path / "out"), "--best"
    )
    assert "--shard-size" in error_of(export, run, tmp_path / "out", shard_size="5 of them")
    config_file = run / "config.toml"
    config_file.write_text(config_file.read_text().replace("n_layer = 3", "n_layer = 2"))
    assert "these tensors differ" in refused(capsys, "export", str(run), "--to", str(tmp_path / "out"))
    with (run / "checkpoint-6" / "weights-root.safetensors").open("r+b") as file:
        file.seek(-4, 2)
        file.write(b"\1\2\3\4")
    with pytest.raises(CheckpointError, match="weights-root"):
        export(run, tmp_path / "out")
    assert not (tmp_path / "out").exists()
