"""The disk that a run's files take, told and asked for before it begins."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from streamer.app.cli import main
from streamer.app.config import load_config
from streamer.app.run.build import without_values
from streamer.app.run.space import check_space, space_of
from tests import tiny_llama
from tests.app.common import refused, sets
from tests.app.test_resume import written

NO_WARMUP = ["optimizer.warmup_steps=0"]


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@pytest.mark.filterwarnings("ignore")  # the library's own, while it writes
@pytest.mark.parametrize(
    "options",
    [
        [],
        ["stream.dtype='bfloat16'", "optimizer.state_dtype='bfloat16'"],
        ["stream.dtype='bfloat16'", "optimizer.state_dtype='int8'"],
        ["lora.rank=64"],
    ],
    ids=str,
)
def test_what_is_told_is_what_is_written(
    options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("peft", reason="adapters are peft's (pip install peft)")
    config = written(tmp_path, monkeypatch)
    # large enough for headers of files to be small beside it
    tiny_llama.write(tmp_path / "llama", hidden_size=256, intermediate_size=512)
    text = config.read_text().replace('factory = "models.gpt2:GPT"', 'pretrained = "llama"')
    config.write_text(
        "\n".join(line for line in text.splitlines() if line.split(" = ")[0] not in ("args", "layers"))
    )
    given = [
        "run.steps=2",
        "optimizer.warmup_steps=0",
        "run.save_every=1",
        "run.keep=1",
        "data.context=8",
        *options,
    ]
    assert main(["train", str(config), *sets(*given)]) == 0
    run = tmp_path / "runs" / "run"
    loaded = load_config(config, given)
    space = space_of(loaded, without_values(loaded.model, loaded.lora))
    assert space.most == 2 and f"there {space.line()}" in capfd.readouterr().out
    [checkpoint] = (run / "checkpoints").glob("step-*")
    assert size(checkpoint) == pytest.approx(space.checkpoint, rel=0.05)
    [weights] = [*run.glob("model/*.safetensors"), *run.glob("adapters/*.safetensors")]
    assert weights.stat().st_size == pytest.approx(space.weights, rel=0.05)
    assert size(weights.parent) < space.weights + space.beside
    # what is asked for before the run is enough in the end, and a byte less is refused then
    alone = [*given, "run.save_every=0", "run.save_wait=0"]
    space = space_of(load_config(config, alone), without_values(loaded.model, loaded.lora))
    free = [space.peak]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free[0]))
    assert main(["train", str(config), *sets(*alone)]) == 0
    free[0] -= 1
    assert "the run's files do not fit" in refused(capfd, "train", str(config), *sets(*alone))


def test_a_disk_that_is_too_small_is_refused_before_anything_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = written(tmp_path, monkeypatch)
    space = space_of(load_config(config), without_values(load_config(config).model))
    assert space.most == 3  # two that are kept, and the one that is being written
    with_best = load_config(config, ["run.keep_best=true", "run.save_every=0"])
    assert (
        space_of(with_best, without_values(with_best.model)).most == 3
    )  # at two validations, and at the end

    def free(nbytes: int) -> None:
        monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=nbytes))

    free(space.peak - 1)
    error = refused(capsys, "train", str(config))
    assert f"the run's files do not fit: {space.line()}, and {tmp_path} has " in error
    assert error.endswith(" free: give it run.out on a larger disk or --set run.keep=1")
    assert not (tmp_path / "runs").exists()
    free(2 * space.checkpoint)
    assert main(["train", str(config), "--set", "run.keep=1"]) == 0
    # a run that goes on has its checkpoints already
    free(space.checkpoint)
    check_space(
        load_config(config, ["run.keep=1", "run.steps=20"]), torch.nn.Linear(1, 1), tmp_path / "runs" / "run"
    )


def test_final_weights_are_there_without_any_checkpoint_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = written(tmp_path, monkeypatch)
    assert main(["train", str(config), *sets("run.save_every=0", "run.steps=2", *NO_WARMUP)]) == 0
    assert main(["export", "runs/run", "--to", "weights"]) == 0
    assert (tmp_path / "weights" / "model.safetensors").exists()
