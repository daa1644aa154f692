"""Configurations: what is read, what is refused in one line, and what is written back."""

from __future__ import annotations

from pathlib import Path

import pytest

from streamer.cli.config import dump_config, in_keys, load_config, with_keys
from streamer.cli.main import command_line
from tests.cli.common import HOME, error_of

OWN = """
[model]
factory = "models.gpt2:GPT"
[train]
max_steps = 10
"""
FOLDER = """
[model]
path = "llama"
[train]
num_train_epochs = 2
packing = true
per_device_train_batch_size = 4
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "run.toml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("path", sorted((HOME / "configs").glob("*.toml")), ids=lambda path: path.stem)
def test_shipped_configurations_are_read_and_written_back(path: Path, tmp_path: Path) -> None:
    model = ["model.path=llama"] if "factory" not in path.read_text() else []
    config = load_config(path, model)
    assert load_config(written(tmp_path, dump_config(config))) == config


def test_keys_of_the_trainer_pass_through(tmp_path: Path) -> None:
    config = load_config(written(tmp_path, FOLDER), ["train.gradient_accumulation_steps=3", "lora.r=8"])
    assert config.trainer["num_train_epochs"] == 2 and config.trainer["packing"] is True
    assert config.train.batch_size == 12 and config.lora == {"r": 8}
    changed = with_keys(config, train={"max_length": 7}, stream={"num_slots": 3})
    assert changed.trainer["max_length"] == changed.train.max_length == 7 and changed.stream.num_slots == 3


@pytest.mark.parametrize(
    ("text", "overrides", "expected"),
    [
        (OWN, ["train.max_stepz=3"], "unknown key 'max_stepz' in [train]; did you mean 'max_steps'?"),
        (OWN, ["strem.layers=x"], "unknown table [strem]; did you mean 'stream'?"),
        (OWN, ["train.max_steps=-1"], "train.max_steps must be an integer of 0 or more, not -1"),
        (OWN, ["train.max_steps=0"], "train.max_steps is missing"),
        (
            OWN,
            ["stream.device_memory=16GB x"],
            "stream.device_memory must be a string of a number and its unit",
        ),
        (OWN, ["lora.r=16"], "[lora] is for a Hugging Face folder"),
        (OWN, ["stream.update=backward"], 'stream.update = "backward" cannot clip gradients'),
        (OWN, ["max_steps"], "--set 'max_steps' must be table.key=value"),
        (OWN, ["model.args=[1"], "--set 'model.args=[1': not a TOML value"),
        (OWN, ["train.max_steps.more=1"], "max_steps is not a table"),
        (FOLDER, ["model.quantize=nf4"], "model.quantize is for the frozen base of [lora]: set lora.r"),
        ("[model]\n", [], "model.path is missing"),
        ("model = 3", [], "model must be a table"),
        ("[model", [], "not TOML in UTF-8"),
    ],
)
def test_errors_are_one_line(text: str, overrides: list[str], expected: str, tmp_path: Path) -> None:
    assert expected in error_of(load_config, written(tmp_path, text), overrides)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    path = written(tmp_path, OWN)
    found = error_of(load_config, tmp_path / "other.toml")
    assert "No such file" in found and str(path) in found


def test_options_of_the_command_are_keys() -> None:
    parsed = command_line().parse_args(["train", "x", "--lora-rank", "8", "--lr", "1e-4", "--data", "a", "b"])
    assert (vars(parsed)["lora.r"], vars(parsed)["train.learning_rate"]) == ("8", "1e-4")
    assert vars(parsed)["data.paths"] == ["a", "b"]


def test_messages_of_the_library_name_keys() -> None:
    assert in_keys("num_slots=1 is too few: wrap(device_memory=...)") == (
        "stream.num_slots=1 is too few: stream.device_memory"
    )
    assert in_keys("set micro_batch_size, or lr=3") == "set stream.micro_batch_size, or train.learning_rate=3"
    assert in_keys("host_memory=None, layers") == "stream.host_memory=None, layers"
