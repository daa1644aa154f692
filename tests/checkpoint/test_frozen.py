"""Checkpoints without the parameters that are not trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import streamer
from streamer.backends.stored_tensors import StoredTensors
from streamer.checkpoint.manifest import Manifest
from streamer.engine.handle import wrapped
from tests.pretrained.test_in_place import a_step, adamw, adapt, make, stored
from tests.reference import assert_equal

#: The base in memory, and on disk for all layers but some.
PLACED = [{}, {"disk": True, "stay": 1}]


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return stored(tmp_path / "base.safetensors")


def trained(model: nn.Module) -> dict[str, torch.Tensor]:
    streamer.synchronize(model)
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def names_in(folder: Path) -> set[str]:
    return {*Manifest.read(folder).files_of("weights")}


@pytest.mark.parametrize(
    ("before", "then", "block"),
    [
        (before, then, before is then)  # so that each place is tried with both ways to save
        for before in PLACED
        for then in PLACED
    ],
    ids=["memory, memory", "memory, in place", "in place, memory", "in place, in place"],
)
def test_a_run_continues_from_the_trained_parameters_alone(
    base: Path, tmp_path: Path, before: dict[str, Any], then: dict[str, Any], block: bool
) -> None:
    model = make(base, **before)
    optimizer = adamw(model)
    for number in range(2):
        a_step(model, optimizer, number)
    streamer.save(model, optimizer, tmp_path / "saved", step=2, block=block, frozen=False).result()
    assert names_in(tmp_path / "saved") == trained(model).keys()
    a_step(model, optimizer, 2)
    expected = trained(model)
    wrapped(model).close()

    model = make(base, **then)
    optimizer = adamw(model)
    assert streamer.load(model, optimizer, tmp_path / "saved").step == 2
    a_step(model, optimizer, 2)
    assert_equal(trained(model), expected)
    wrapped(model).close()


def test_with_all_that_is_frozen_it_takes_as_many_times_the_bytes(base: Path, tmp_path: Path) -> None:
    model = make(base)
    for frozen in (True, False):
        streamer.save(model, None, tmp_path / str(frozen), step=0, frozen=frozen)
    assert names_in(tmp_path / "True") == {name for name, _ in model.named_parameters()}
    of_trained = sum(param.nbytes for param in trained(model).values())
    held = {
        frozen: sum(file.stat().st_size for file in (tmp_path / str(frozen)).iterdir())
        for frozen in (True, False)
    }
    of_base = sum(param.nbytes for param in model.parameters()) - of_trained
    assert held[True] - held[False] > 0.9 * of_base
    wrapped(model).close()


def test_a_base_on_disk_is_read_once(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make(base, **PLACED[1])
    streamer.save(model, None, tmp_path / "0", step=0, frozen=False)
    monkeypatch.setattr(StoredTensors, "read", lambda *_: pytest.fail("it is read again"))
    streamer.save(model, None, tmp_path / "1", step=1, frozen=False)
    values = [Manifest.read(tmp_path / str(step)).values["frozen"] for step in range(2)]
    assert values[0] == values[1]
    wrapped(model).close()


@pytest.mark.parametrize("placed", PLACED, ids=["memory", "in place"])
def test_another_base_is_refused_before_anything_is_changed(
    base: Path, tmp_path: Path, placed: dict[str, Any]
) -> None:
    model = make(base)
    streamer.save(model, None, tmp_path / "saved", step=0, frozen=False)
    wrapped(model).close()

    other = make(stored(tmp_path / "other.safetensors", seed=1), **placed)
    a_step(other, adamw(other), 0)
    before = trained(other)
    with pytest.raises(streamer.CheckpointError, match=r"those when it was saved .*\(layers.*other values"):
        streamer.load(other, None, tmp_path / "saved")
    assert_equal(trained(other), before)
    wrapped(other).close()


def test_later_writes_of_the_user_are_noticed(base: Path, tmp_path: Path) -> None:
    """At any later save, and in any value."""
    model = make(base)
    streamer.save(model, None, tmp_path / "first", step=0, frozen=False)
    with torch.no_grad():
        next(p for p in model.parameters() if not p.requires_grad).view(-1)[-1] += 1
    with pytest.raises(streamer.CheckpointError, match="other values"):
        streamer.load(model, None, tmp_path / "first")
    streamer.save(model, None, tmp_path / "second", step=0, frozen=False)
    streamer.load(model, None, tmp_path / "second")
    wrapped(model).close()
    fresh = make(base)
    with pytest.raises(streamer.CheckpointError, match="other values"):
        streamer.load(fresh, None, tmp_path / "second")
    wrapped(fresh).close()


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"adapt": None}, "is of another model"),
        ({"dtype": torch.float32}, r"\(BF16 there, F32 here\)"),
        ({"adapt": lambda model: (adapt(model), model.requires_grad_(True))[1]}, r"\(trained here\)"),
    ],
)
def test_another_model_is_refused(base: Path, tmp_path: Path, change: dict[str, Any], match: str) -> None:
    model = make(base)
    streamer.save(model, None, tmp_path / "saved", step=0, frozen=False)
    wrapped(model).close()
    other = make(base, **change)
    with pytest.raises(streamer.CheckpointError, match=match):
        streamer.load(other, None, tmp_path / "saved")
    wrapped(other).close()
