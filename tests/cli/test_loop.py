"""`streamer train` for a model of one's own."""

from __future__ import annotations

import json
import math
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

from models.gpt2 import GPT
from streamer.cli import loop
from streamer.cli.build import optimizer_of
from streamer.cli.config import TrainConfig, load_config
from streamer.cli.loop import load_text, loss_function, schedule
from streamer.cli.main import main
from streamer.optim.muon import Muon
from tests.cli.common import error_of, logged, refused, sets
from tests.reference import hugging_face

CONFIG = """
[model]
factory = "models.gpt2:GPT"
args = {{ vocab_size = 256, block_size = 16, n_layer = 3, n_head = 2, n_embd = 16 }}
[stream]
layers = "transformer.h"
device = "cpu"
host_threads = 1
[train]
output_dir = "{out}"
max_steps = 6
max_length = 16
per_device_train_batch_size = 4
learning_rate = 1e-2
warmup_steps = 2
weight_decay = 0.1
eval_steps = 3
eval_batches = 2
save_steps = 3
[data]
paths = ["{text}"]
val_fraction = 0.1
[sample]
tokens = 4
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    text = tmp_path / "text"
    text.write_text("".join(f"{number} times {number} is {number**2}\n" for number in range(60)))
    path = tmp_path / "tiny.toml"
    path.write_text(CONFIG.format(out=tmp_path / "run", text=text))
    return path


def tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """All of a checkpoint but the states of random numbers."""
    found: dict[str, torch.Tensor] = {}
    for file in sorted(checkpoint.glob("*.safetensors")):
        if file.name != "values.safetensors":
            found |= load_file(file)
    return found


def assert_same(one: Path, other: Path) -> None:
    expected = tensors(other)
    for name, value in tensors(one).items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize(
    ("kind", "more", "settings"),
    [
        (torch.optim.AdamW, {}, ["train.gradient_accumulation_steps=2"]),
        (
            torch.optim.RMSprop,
            {"momentum": 0.5},
            ["optimizer.name=rmsprop", "optimizer.args={momentum=0.5}", "train.lr_scheduler_type=constant"],
        ),
    ],
    ids=["adamw", "rmsprop"],
)
def test_losses_are_those_of_plain_pytorch(
    kind: Any, more: dict[str, float], settings: list[str], config: Path, tmp_path: Path
) -> None:
    assert main(["train", str(config), *sets(*settings)]) == 0
    loaded = load_config(config, settings)
    text, train = load_text(loaded), loaded.train
    torch.manual_seed(train.seed)
    model = GPT(**loaded.model.args)
    optimizer = kind(model.parameters(), lr=train.learning_rate, weight_decay=train.weight_decay, **more)
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule(train))
    draws = torch.Generator().manual_seed(train.seed)
    for line in logged(tmp_path / "run", "loss"):
        tokens, targets, _ = text.drawn(train.batch_size, train.max_length, draws)
        assert line["lr"] == rates.get_last_lr()[0]
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        rates.step()
        assert line["loss"] == pytest.approx(loss.item(), rel=1e-4)
        assert line["grad_norm"] == pytest.approx(norm.item(), rel=1e-3)
    with torch.no_grad():
        batches = text.validation(train.eval_batches, 4, train.max_length)
        losses = [F.cross_entropy(model(x).flatten(0, 1), y.flatten()).item() for x, y, _ in batches]
    assert logged(tmp_path / "run", "val_loss")[-1]["val_loss"] == pytest.approx(sum(losses) / 2, rel=1e-4)


def test_files_of_a_run(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(config), *sets("train.save_total_limit=1")]) == 0
    printed, out = capsys.readouterr().out, tmp_path / "run"
    assert {path.name for path in out.iterdir()} == {
        "config.toml", "metrics.jsonl", "summary.json", "trace.json", "checkpoint-6",
    }  # fmt: skip
    assert load_config(out / "config.toml") == load_config(config, ["train.save_total_limit=1"])
    assert [line["step"] for line in logged(out, "loss")] == [1, 2, 3, 4, 5, 6]
    assert [line["step"] for line in logged(out, "val_loss")] == [0, 3, 6]
    summary = json.loads((out / "summary.json").read_text())
    assert summary["last_val_loss"] < summary["first_val_loss"] and summary["tokens_per_second"] > 0
    assert "A sample" in printed and "overlap" in printed and "validation loss after" in printed
    assert main(["train", str(config)]) == 0
    assert (tmp_path / "run-2" / "summary.json").exists(), "a second run has a folder of its own"


@pytest.mark.filterwarnings("ignore")  # schedulefree's own
@pytest.mark.parametrize(
    "settings",
    [
        ["model.args.dropout=0.1"],
        ["optimizer.name=muon"],
        ["optimizer.name=schedulefree:AdamWScheduleFree"],
    ],
    ids=["dropout", "muon", "schedulefree"],
)
def test_a_run_resumes_to_the_bit(settings: list[str], config: Path, tmp_path: Path) -> None:
    changed = sets("stream.dtype=bfloat16", *settings)
    assert main(["train", str(config), *changed]) == 0
    whole = logged(tmp_path / "run")
    other = ["train", str(config), *changed, "--output", str(tmp_path / "other")]
    assert main([*other, "--resume", str(tmp_path / "run" / "checkpoint-3")]) == 0
    names = ("step", "loss", "lr", "grad_norm", "val_loss")
    assert [[line.get(name) for name in names] for line in logged(tmp_path / "run")] == [
        [line.get(name) for name in names] for line in whole
    ]


def test_a_run_that_has_ended(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(config)]) == 0
    assert "is the end of its run" in refused(capsys, "train", str(config), "--resume")
    larger = sets("model.args.n_layer=4", "train.max_steps=9")
    assert "is of another model" in refused(capsys, "train", str(config), *larger, "--resume")
    assert main(["train", str(config), "--steps", "7", "--resume"]) == 0
    assert [line["step"] for line in logged(tmp_path / "run", "loss")] == [1, 2, 3, 4, 5, 6, 7]


def test_ctrl_c_saves(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    step = loop.Loop.train_step

    def interrupted(self: loop.Loop) -> dict[str, float]:
        if self.step == 1:
            os.kill(os.getpid(), signal.SIGINT)
        return step(self)

    assert main(["train", str(config), "--output", str(tmp_path / "whole")]) == 0
    with monkeypatch.context() as patch:
        patch.setattr(loop.Loop, "train_step", interrupted)
        assert main(["train", str(config)]) == 0
    assert "stopped after step 2; --resume" in capsys.readouterr().out
    assert [path.name for path in (tmp_path / "run").glob("checkpoint-*")] == ["checkpoint-2"]
    assert main(["train", str(config), "--resume"]) == 0
    assert_same(tmp_path / "run" / "checkpoint-6", tmp_path / "whole" / "checkpoint-6")


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (["train.max_length=17"], "the model cannot run on sequences of train.max_length = 17"),
        (["model.factory=models.gpt2:GTP"], "models.gpt2 has no callable 'GTP'; did you mean 'GPT'?"),
        (["model.factory=nothing:GPT"], "no module 'nothing'"),
        (["model.args.n_head=3"], "n_embd=16 is not divisible by n_head=3"),
        (["model.init=initialise"], "GPT has no such method"),
        (["stream.layers=transformer.x"], "[stream]"),
        (["stream.host_memory=100kB"], "host_memory needs"),
        (["data.paths=['absent']"], "absent: no such file or folder"),
        (["train.max_length=999", "model.args.block_size=999"], "the validation data has"),
        (["optimizer.state_dtype=int8"], "optimizer.state_dtype"),
        (
            ["optimizer.name=lion", "optimizer.state_dtype=int8", "stream.dtype=bfloat16"],
            "optimizer.state_dtype is for adamw",
        ),
        (["optimizer.name=muno"], "optimizer.name='muno': did you mean 'muon'?"),
        (["optimizer.name=json:loads"], "not an optimizer: name a subclass of torch.optim.Optimizer"),
        (["optimizer.name=nothing:Here"], "no module 'nothing'"),
        (["optimizer.args={betas=3}"], "[optimizer]"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_bad_settings_are_refused_in_one_line(
    settings: list[str], expected: str, config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", str(config), *sets(*settings)]) == 2
    errors = capsys.readouterr().err
    assert expected in errors
    assert not (tmp_path / "run").exists()


@pytest.mark.filterwarnings("ignore:no direct I/O")  # where the tests' folder is in memory
def test_state_that_does_not_fit_in_memory_is_on_disk(config: Path, tmp_path: Path) -> None:
    """`make demo-disk` in small."""
    deep = sets("model.args.n_layer=12")
    assert main(["train", str(config), *deep]) == 0
    more = sets("stream.host_memory=500kB", f'stream.disk="{tmp_path}"')
    assert main(["train", str(config), *deep, *more, "--output", str(tmp_path / "disk")]) == 0
    assert_same(tmp_path / "disk" / "checkpoint-6", tmp_path / "run" / "checkpoint-6")
    assert json.loads((tmp_path / "disk" / "summary.json").read_text())["disk_bytes_per_parameter"] > 0


def test_tokens_of_nanogpt(config: Path, tmp_path: Path) -> None:
    tokens = np.arange(3000, dtype=np.uint16) % 200
    tokens.tofile(tmp_path / "train.bin")
    np.save(tmp_path / "val.npy", tokens[:500])
    paths = [f'data.paths=["{tmp_path / "train.bin"}"]', f'data.val_paths=["{tmp_path / "val.npy"}"]']
    whole = load_text(load_config(config))
    assert len(whole.train) + len(whole.val) == (tmp_path / "text").stat().st_size, "none is in both"
    text = load_text(load_config(config, paths))
    assert (len(text.train), len(text.val), text.is_bytes) == (3000, 500, False)
    x, y, _ = text.drawn(2, 16, torch.Generator())
    assert torch.equal((x + 1) % 200, y)
    assert "JSON lines and datasets need model.path" in error_of(
        load_text, load_config(config, ["data.dataset=x"])
    )


@pytest.mark.parametrize("kind", ["cosine", "linear", "constant", "cosine_with_min_lr"])
def test_schedules_are_those_of_transformers(kind: str) -> None:
    get = pytest.importorskip("transformers").get_scheduler
    more = {"min_lr": 1e-3} if kind == "cosine_with_min_lr" else {}
    train = TrainConfig(
        max_steps=40, warmup_steps=0.1, learning_rate=1e-2, lr_scheduler_type=kind, lr_scheduler_kwargs=more
    )
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1e-2)
    name = "constant_with_warmup" if kind == "constant" else kind
    expected = get(name, optimizer, num_warmup_steps=4, num_training_steps=40, scheduler_specific_kwargs=more)
    for step in range(41):
        assert 1e-2 * schedule(train)(step) == pytest.approx(
            expected.get_last_lr()[0], rel=1e-9, abs=1e-12
        ), step
        optimizer.step()
        expected.step()


def test_muon_has_the_options_of_train(config: Path) -> None:
    loaded = load_config(config, ["optimizer.name=muon", "optimizer.args={momentum=0.9}"])
    kind, options = optimizer_of(loaded)
    assert kind is Muon
    assert (options["lr"], options["weight_decay"], options["momentum"]) == (1e-2, 0.1, 0.9)


def test_losses_of_models_that_return_logits_and_of_transformers() -> None:
    x = torch.arange(12).view(2, 6)
    y = (x + 1) % 12
    plain = nn.Sequential(nn.Embedding(12, 8), nn.Linear(8, 12))
    expected = F.cross_entropy(plain(x).flatten(0, 1), y.flatten(), reduction="sum")
    assert torch.equal(loss_function(plain)(plain, (x, y, {})), expected)
    llama = hugging_face(vocab_size=12, num_hidden_layers=1)
    expected = F.cross_entropy(llama(x).logits.flatten(0, 1), y.flatten(), reduction="sum")
    found = loss_function(llama)(llama, (x, y, {}))
    assert math.isclose(found.item(), expected.item(), rel_tol=1e-6)
