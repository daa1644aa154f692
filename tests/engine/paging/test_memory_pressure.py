"""Too little memory while a model trains: one error or one warning that says who holds what."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch

import streamer
from models.gpt2 import MLP
from streamer.backends.thread import ThreadBackend
from streamer.cli.main import main
from tests.cli.test_loop import CONFIG
from tests.reference import gradients, language_loss, one_step, streamed, tiny_gpt


def full_at(model: torch.nn.Module, rows: int) -> None:
    """Let the second layer's MLP want more than there is for ``rows`` sequences and more."""

    def hook(module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        if args[0].shape[0] >= rows:
            raise torch.OutOfMemoryError("tried to allocate 20.00 GiB")

    model.transformer.h[1].mlp.register_forward_pre_hook(hook)


def test_out_of_device_memory_names_who_holds_it_and_a_smaller_batch_works() -> None:
    with streamed(tiny_gpt()) as model:
        full_at(model, 3)
        optimizer = streamer.AdamW(model.parameters())
        match = (
            r"out of device memory in layer 'transformer\.h\.1': .* weight slots \d+ bytes, gradient slots "
            r"\d+ bytes, .* saved by layers for backward\. Call wrap with a micro.*to allocate 20\.00 GiB"
        )
        for _ in range(2):
            with pytest.raises(torch.OutOfMemoryError, match=match):
                language_loss(model, 0)
        plain = tiny_gpt()
        losses = language_loss(model, 0, size=2), language_loss(plain, 0, size=2)
        for loss in losses:
            loss.backward()
        assert losses[0].item() == losses[1].item()
        torch.testing.assert_close(gradients(model), gradients(plain), rtol=0, atol=0)
        optimizer.step()


def test_host_memory_that_runs_out_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with streamed(tiny_gpt()) as model:
        optimizer = streamer.AdamW(model.parameters())
        free, now = [1 << 30], [100.0]
        monkeypatch.setattr(ThreadBackend, "host_available", lambda self: free[-1])
        monkeypatch.setattr("streamer.engine.device_memory.time.monotonic", lambda: now[-1])

        with warnings.catch_warnings():
            warnings.simplefilter("error")
            one_step(model, optimizer, 0)
            free.append((1 << 28) - 1)
            now.append(100.9)
            one_step(model, optimizer, 0)  # looked a second ago
        now.append(101.0)
        held = sum(streamer.stats(model).host_bytes.values())
        match = f"only 268435455 bytes of host memory are free, .* the wrapped model holds {held}"
        with pytest.warns(UserWarning, match=match) as caught:
            language_loss(model, 0).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert caught[0].filename == __file__
        one_step(model, optimizer, 0)


@pytest.mark.parametrize(
    ("error", "beginning", "end"),
    [
        (
            torch.OutOfMemoryError("tried to allocate 20.00 GiB"),
            "out of device memory in layer 'transformer.h.0': ",
            "; lower stream.micro_batch_size",
        ),
        # from where host memory is asked for in the middle of a step
        (MemoryError("20 bytes more and 10 are free"), "", "20 bytes more and 10 are free"),
    ],
)
def test_a_run_without_enough_memory_ends_in_one_line(
    error: Exception,
    beginning: str,
    end: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").write_text("to be or not to be, that is the question. " * 100)
    (tmp_path / "run.toml").write_text(CONFIG.format(out="run", text="text"))

    plain = MLP.forward

    def full(self: MLP, x: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():
            raise error
        return plain(self, x)

    monkeypatch.setattr(MLP, "forward", full)
    assert main(["train", "run.toml"]) == 1
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("streamer: ")]
    assert len(errors) == 1
    assert errors[0].startswith(f"streamer: step 1: {beginning}") and errors[0].endswith(end)
