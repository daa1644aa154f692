"""`streamer train` holds the plan of a step against the memory that is free, before any of it is taken."""

from __future__ import annotations

from pathlib import Path

import pytest

from streamer.app import train as app
from streamer.app.cli import main
from streamer.app.config import Config, ConfigError, load_config
from streamer.app.plan.command import check_memory
from streamer.backends.thread import ThreadBackend
from tests.app.test_plan_command import SMALL


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(SMALL.replace("steps = 1", f'steps = 1\nout = "{tmp_path}/runs"'))
    return path


def loaded(path: Path, *overrides: str) -> Config:
    return load_config(path, overrides)


def free(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    monkeypatch.setattr(ThreadBackend, "host_available", lambda self: nbytes)


def test_a_step_that_is_too_large_ends_before_anything_is_built(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    free(monkeypatch, 20 << 20)

    def built(*_: object) -> None:
        raise AssertionError("the model was built")

    monkeypatch.setattr(app, "build_model", built)
    assert main(["train", str(config), "--set", "data.batch_size=128"]) == 2
    line, *table = capsys.readouterr().err.splitlines()
    assert line.startswith("streamer: this run does not fit on the device and the host; it would with --set ")
    assert " stream.micro_batch_size=" in line
    text = "\n".join(table)
    assert all(words in text for words in ("weight slots", "logits and loss", "exp_avg", "DOES NOT FIT"))
    assert not (tmp_path / "runs").exists()


def test_what_it_says_would_fit_is_let_through(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free(monkeypatch, 20 << 20)
    with pytest.raises(ConfigError) as refused:
        check_memory(loaded(config, "data.batch_size=128"))
    words = str(refused.value).splitlines()[0].split(": device")[0].split("--set ")[1:]
    check_memory(loaded(config, "data.batch_size=128", *(word.strip() for word in words)))


def test_a_model_that_cannot_be_planned_is_told(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    free(monkeypatch, 1 << 20)
    model = ['model.factory="tests.app.test_plan_command:Decides"', "model.args={}", "data.batch_size=128"]
    check_memory(loaded(config, *model))
    assert "not planned: the model cannot run without values" in capsys.readouterr().out
