"""``[optimizer] name``: the command trains with other optimizers than AdamW."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from models.gpt2 import GPT
from streamer.checkpoint.manifest import Manifest
from streamer.cli.build import optimizer_of
from streamer.cli.config import load_config
from streamer.cli.loop import load_text
from streamer.cli.main import main
from streamer.optim.muon import Muon
from tests.cli.common import logged, refused, sets
from tests.cli.test_loop import config
from tests.cli.test_trainer import command, work

__all__ = ["config", "work"]
pytestmark = pytest.mark.filterwarnings("ignore")  # the libraries' own


@pytest.mark.parametrize("name", ["muon", "sgd", "schedulefree:AdamWScheduleFree"])
def test_a_run_resumes_to_the_bit(name: str, config: Path, tmp_path: Path) -> None:
    changed = sets(f"optimizer.name={name}", "stream.dtype=bfloat16", *_more(name))
    assert main(["train", str(config), *changed]) == 0
    whole = logged(tmp_path / "run")
    checkpoint = str(tmp_path / "run" / "checkpoint-3")
    assert main(["train", str(config), *changed, "--resume", checkpoint]) == 0
    names = ("step", "loss", "lr", "grad_norm", "val_loss")
    assert [[line.get(each) for each in names] for line in logged(tmp_path / "run")] == [
        [line.get(each) for each in names] for line in whole
    ]


def _more(name: str) -> list[str]:
    return ["optimizer.args={momentum=0.9}"] if name == "sgd" else []


def test_losses_are_those_of_plain_pytorch(config: Path, tmp_path: Path) -> None:
    changed = ["optimizer.name=rmsprop", "optimizer.args={momentum=0.5}", "train.warmup_steps=0"]
    changed.append('train.lr_scheduler_type="constant"')
    assert main(["train", str(config), *sets(*changed)]) == 0
    given = load_config(config, changed)
    text, train = load_text(given), given.train
    torch.manual_seed(train.seed)
    model = GPT(**given.model.args)
    optimizer = torch.optim.RMSprop(
        model.parameters(), lr=train.learning_rate, weight_decay=train.weight_decay, momentum=0.5
    )
    draws = torch.Generator().manual_seed(train.seed)
    for line in logged(tmp_path / "run", "loss"):
        tokens, targets, _ = text.drawn(4, train.max_length, draws)
        loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        assert line["loss"] == pytest.approx(loss.item(), rel=1e-4)


def test_a_folder_is_trained_with_lion(work: Path) -> None:
    assert main(command("optimizer.name=lion", "train.learning_rate=1e-3")) == 0
    saved = Manifest.read(work / "run" / "checkpoint-6" / "streamer")
    assert saved.values["optimizer"]["class"] == "Lion"
    losses = [line["loss"] for line in logged(work / "run", "loss")]
    assert losses[-1] < losses[0]


def test_muon_has_the_options_of_train(config: Path) -> None:
    given = load_config(config, ["optimizer.name=muon", "optimizer.args={momentum=0.9}"])
    kind, options = optimizer_of(given)
    assert kind is Muon
    assert (options["lr"], options["weight_decay"], options["momentum"]) == (1e-2, 0.1, 0.9)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ("optimizer.name=muno", "did you mean 'muon'|there are: .*muon"),
        ("optimizer.name=json:loads", "not an optimizer: name a subclass of torch.optim.Optimizer"),
        ("optimizer.name=nothing:Here", "no module 'nothing'"),
        ("optimizer.args={betas=3}", r"\[optimizer\]"),
    ],
)
def test_what_cannot_be_made_is_one_line(
    changed: str, message: str, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refused(capsys, "train", str(config), *sets(changed))
    assert re.search(message, line), line


def test_a_dtype_of_moments_is_for_adamw(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changed = sets("optimizer.name=lion", "optimizer.state_dtype=int8", "stream.dtype=bfloat16")
    assert "optimizer.state_dtype is for adamw" in refused(capsys, "train", str(config), *changed)
