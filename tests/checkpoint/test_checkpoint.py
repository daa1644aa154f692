"""`save` and `load`: a run that was stopped ends where one that was not does, to the bit."""

from __future__ import annotations

import json
import random
import time
from concurrent.futures import Future
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import streamer
from models.gpt2 import GPT
from streamer.checkpoint import save as content
from tests.reference import VOCAB, batch

LAYERS = {"layers": "transformer.h", "device": "cpu"}


class Run:
    """A training run with all that it goes on from."""

    def __init__(self, *, seed: int = 0, state_dtype: Any = torch.float32, **options: Any) -> None:
        torch.manual_seed(0)
        model = GPT(vocab_size=VOCAB, block_size=16, n_layer=3, n_head=2, n_embd=20, dropout=0.1)
        model.register_buffer("count", torch.zeros(2))
        self.model = streamer.wrap(model, **(LAYERS | options))
        decayed = [p for p in model.parameters() if p.dim() > 1]
        rest = [p for p in model.parameters() if p.dim() < 2]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "lr": 3e-3, "weight_decay": 0.0}]
        self.optimizer = streamer.AdamW(groups, lr=1e-2, state_dtype=state_dtype)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 20)
        self.losses: list[float] = []
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        self.step_number = 0

    def backward(self) -> None:
        tokens = batch(random.randrange(1000))
        logits = self.model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        (loss * float(np.random.uniform(0.5, 1.0))).backward()
        self.losses.append(loss.item())

    def update(self) -> None:
        streamer.clip_grad_norm_(self.model, 0.3)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()
        with torch.no_grad():
            self.model.count += 1
        self.step_number += 1

    def steps(self, count: int, *, backwards: int = 1) -> None:
        for _ in range(count):
            for _ in range(backwards):
                self.backward()
            self.update()

    def save(self, path: Path, *, block: bool = True) -> Future[None]:
        extra = {"schedule": self.schedule.state_dict(), "losses": self.losses, "step": self.step_number}
        return streamer.save(
            self.model, self.optimizer, path, step=self.step_number, extra=extra, block=block
        )

    def load(self, path: Path) -> None:
        loaded = streamer.load(self.model, self.optimizer, path)
        self.schedule.load_state_dict(loaded.extra["schedule"])
        self.losses = loaded.extra["losses"]
        self.step_number = loaded.step

    def end(self) -> dict[str, torch.Tensor]:
        """Exact weights and moments."""
        streamer.synchronize(self.model)
        named = {param: name for name, param in self.model.named_parameters()}
        held = {
            f"{named[param]}.{key}": value.clone()
            for param, state in self.optimizer.state.items()
            for key, value in state.items()
        }
        streamer.unwrap(self.model)
        return {name: value.clone() for name, value in self.model.state_dict().items()} | held


def assert_equal(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert list(actual) == list(expected)
    assert [name for name in expected if not torch.equal(actual[name], expected[name])] == []


OPTIONS = [
    {},
    {"dtype": torch.bfloat16},
    {"dtype": torch.bfloat16, "state_dtype": torch.bfloat16},
    {"dtype": torch.bfloat16, "state_dtype": "int8"},
    {"dtype": torch.float16},
    {"activations": "keep", "num_slots": 3},
]


@cache
def undisturbed(number: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses of four steps with those options, and the end."""
    whole = Run(**OPTIONS[number])
    whole.steps(4)
    return whole.losses, whole.end()


# While training goes on


def slowed(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Let every file take its time."""
    write = content.write_tensors

    def slowly(path: Path, pieces: Any, **options: Any) -> Any:
        time.sleep(seconds)
        return write(path, pieces, **options)

    monkeypatch.setattr(content, "write_tensors", slowly)


@pytest.mark.parametrize(
    ("number", "seconds"),
    # what is written meanwhile has its masters in fp32, split, or with moments in 8 bits
    [(0, None), (2, None), (4, None), (5, None), (0, 0.05), (1, 0.05), (3, 0.05)],
)
def test_a_resumed_run_ends_where_an_undisturbed_one_does(
    number: int, seconds: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With ``seconds`` the checkpoint is written in the background and a file takes so long."""
    losses, end = undisturbed(number)
    first = Run(**OPTIONS[number])
    first.steps(2)
    slowed(monkeypatch, seconds or 0.0)
    saving = first.save(tmp_path / "c", block=seconds is None)
    first.steps(2)  # goes on as if nothing had been
    saving.result()
    assert first.losses == losses
    second = Run(seed=99, **OPTIONS[number])
    second.steps(1)  # had a life of its own
    second.load(tmp_path / "c")
    second.steps(2)
    assert second.losses == losses
    assert_equal(first.end(), end)
    assert_equal(second.end(), end)


def test_an_error_in_the_background_is_raised_once_and_training_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    run = Run()
    run.steps(1)
    for ask in (True, False):
        with monkeypatch.context() as patch:
            patch.setattr(content, "write_tensors", full)
            failed = streamer.save(run.model, run.optimizer, tmp_path / "c", step=1, block=False)
            run.steps(1)
            if ask:
                with pytest.raises(OSError, match="could not be written: No space left on device"):
                    failed.result()
        if not ask:
            with pytest.raises(OSError, match="could not be written: No space left on device"):
                streamer.save(run.model, run.optimizer, tmp_path / "c", step=1)
        assert list(tmp_path.iterdir()) == []
    streamer.save(run.model, run.optimizer, tmp_path / "c", step=3)
    assert json.loads((tmp_path / "c" / "manifest.json").read_text())["body"]["step"] == 3
    run.end()


@pytest.mark.parametrize("change", ["another optimizer", "load_state_dict", "load", "unwrap"])
def test_replacing_the_state_waits_until_it_is_written(
    change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(dtype=torch.bfloat16)
    run.steps(1)
    run.save(tmp_path / "before")
    run.steps(1)
    run.save(tmp_path / "here")
    slowed(monkeypatch, 0.02)
    other = run.optimizer.state_dict()
    for state in other["state"].values():
        state.update({name: torch.zeros_like(state[name]) for name in ("exp_avg", "exp_avg_sq")})
    saving = streamer.save(run.model, run.optimizer, tmp_path / "there", step=2, block=False)
    if change == "load_state_dict":
        run.optimizer.load_state_dict(other)
    elif change == "another optimizer":
        streamer.AdamW(run.model.parameters())
    elif change == "load":
        run.load(tmp_path / "before")
    streamer.unwrap(run.model)
    assert saving.done()
    for path in [*(tmp_path / "here").glob("weights-*"), *(tmp_path / "here").glob("optimizer-*")]:
        assert path.read_bytes() == (tmp_path / "there" / path.name).read_bytes(), path.name


def test_frozen_weights_of_the_root_are_there_after_a_load(tmp_path: Path) -> None:
    """On the device too, to which a step brings trained ones only."""

    def frozen(seed: int) -> torch.nn.Module:
        torch.manual_seed(seed)
        model = GPT(vocab_size=VOCAB, block_size=16, n_layer=2, n_head=2, n_embd=16)
        for name, param in model.named_parameters():
            param.requires_grad_("h.1" in name or "ln_f" in name)
        return streamer.wrap(model, **LAYERS)

    first, second = frozen(1), frozen(2)
    streamer.save(first, None, tmp_path / "c", step=1)
    streamer.load(second, None, tmp_path / "c")
    there, here = first.state_dict(), second.state_dict()
    assert [name for name in there if not torch.equal(here[name], there[name])] == []
    tokens = batch(0)[:, :-1]
    with torch.no_grad():
        assert torch.equal(second(tokens), first(tokens))
    for model in (first, second):
        streamer.unwrap(model)
