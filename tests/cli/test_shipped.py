"""Configs and models that come with streamer, from any folder and from a wheel."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from setuptools import find_packages

from streamer.cli import shipped
from streamer.cli.build import import_factory
from streamer.cli.config import load_config
from streamer.cli.main import main
from tests.cli.common import HOME, refused


def test_every_package_goes_into_the_wheel() -> None:
    project = tomllib.loads((HOME / "pyproject.toml").read_text())["tool"]["setuptools"]
    there = find_packages(str(HOME), include=["streamer*", "streamer_native*"])
    assert sorted(project["packages"]) == sorted([*there, *project["package-dir"]])
    assert {path.suffix for path in (HOME / "configs").iterdir()} <= {".toml", ".md"}


def test_configs_are_listed_and_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["configs"]) == 0
    listed = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert listed.keys() == {path.stem for path in (HOME / "configs").glob("*.toml")}
    assert listed["gpt2-demo"].startswith("What `make demo` trains")
    assert main(["configs", "gpt2-demo"]) == 0
    assert capsys.readouterr().out == "gpt2-demo.toml: streamer train gpt2-demo.toml\n"
    copied = tmp_path / "gpt2-demo.toml"
    assert copied.read_text() == (HOME / "configs" / "gpt2-demo.toml").read_text()
    assert "exists already: choose another name by --to" in refused(capsys, "configs", "gpt2-demo")
    assert "did you mean 'gpt2-demo'" in refused(capsys, "configs", "gpt2-dem")
    assert main(["configs", "gpt2-demo", "--to", "mine.toml"]) == 0
    assert load_config(tmp_path / "mine.toml") == load_config(copied)


@pytest.mark.parametrize("name", ["gpt2-demo", "gpt2-demo.toml", "configs/gpt2-demo.toml"])
def test_a_config_of_streamers_own_is_found_from_any_folder(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert shipped.config_path(name) == HOME / "configs" / "gpt2-demo.toml"
    for other in ("gpt3-demo", "mine/gpt2-demo.toml", "gpt2-demo.json"):
        assert shipped.config_path(other) == Path(other)
    # one's own of that name comes first
    own = tmp_path / name
    own.parent.mkdir(exist_ok=True)
    own.write_text("")
    assert shipped.config_path(name) == Path(name)


def test_its_model_is_found_there_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [path for path in __import__("sys").path if Path(path) != HOME])
    for name in ("models", "models.gpt2"):
        monkeypatch.delitem(__import__("sys").modules, name, raising=False)
    assert import_factory("models.gpt2:GPT").__name__ == "GPT"
