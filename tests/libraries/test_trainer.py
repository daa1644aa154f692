"""`transformers.Trainer` and `accelerate` with a wrapped model, beside a plain one."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers", reason="needs transformers (pip install '.[hf]')")
pytest.importorskip("accelerate", reason="transformers.Trainer needs accelerate (pip install accelerate)")

from accelerate import Accelerator
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from transformers.utils import logging

import streamer
from tests.libraries import test_huggingface
from tests.libraries.common import CALM
from tests.reference import assert_equal, batch, streamed

ROWS = batch(0, size=24, time=11)
State = dict[str, torch.Tensor]
#: As it is called since transformers 5, and was before.
CHECKPOINTING = next(
    name
    for name in ("activation_checkpointing", "gradient_checkpointing")
    if name in TrainingArguments.__dataclass_fields__
)
DATA = [{"input_ids": row, "labels": row} for row in ROWS]


@pytest.fixture(autouse=True)
def quiet() -> None:
    logging.set_verbosity_error()
    logging.disable_progress_bar()


llama = partial(test_huggingface.llama, hidden_size=16, num_hidden_layers=2, attention_dropout=0.1)
wrapped = partial(streamed, layers="model.layers")


def trainer(model: nn.Module, folder: Path, **options: Any) -> Trainer:
    """Told nothing of streaming but the optimizer."""
    is_streamed = "_streamer" in model.__dict__
    kind: Any = streamer.AdamW if is_streamed else torch.optim.AdamW
    defaults = {
        "max_steps": 4,
        "per_device_train_batch_size": 4,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
    }
    args = TrainingArguments(output_dir=str(folder), **(defaults | options))
    optimizer = kind(model.parameters(), **CALM)
    return Trainer(model, args, train_dataset=DATA, eval_dataset=DATA[:8], optimizers=(optimizer, None))


def logged(run: Trainer) -> list[float]:
    """Losses of training and evaluation, norms, learning rates: what the trainer has written down."""
    kept = ("loss", "eval_loss", "grad_norm", "learning_rate")
    return [float(entry[name]) for entry in run.state.log_history for name in kept if name in entry]


def saved(folder: Path) -> State:
    return load_file(folder / "model.safetensors")


def assert_alike(actual: Trainer, expected: Trainer) -> None:
    """The first loss to the bit, the others, norms, rates and final weights within 1e-5."""
    mine, theirs = logged(actual), logged(expected)
    assert mine[0] == theirs[0]
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=0)
    assert_equal(actual.model.state_dict(), expected.model.state_dict(), atol=1e-5)


def test_a_run_that_is_saved_resumed_and_loaded(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "max_steps": 6,
        "gradient_accumulation_steps": 2,
        "max_grad_norm": 0.2,
        "warmup_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "steps",
        "save_steps": 2,
        # the worst, in truth: that of the second step
        "load_best_model_at_end": True,
        "metric_for_best_model": "loss",
        "greater_is_better": True,
    }
    plain = trainer(llama(), tmp_path / "plain", **options)
    plain.train()
    with wrapped(llama()) as model:
        run = trainer(model, tmp_path / "run", **options)
        run.train()
        assert_alike(run, plain)
        assert all(entry["grad_norm"] > 0.2 for entry in run.state.log_history if "grad_norm" in entry)
        # the files hold all of the weights, those of their step
        last = saved(tmp_path / "run" / "checkpoint-6")
        assert_equal(last, saved(tmp_path / "plain" / "checkpoint-6"), atol=1e-5)
        best = {name: value.clone() for name, value in model.state_dict().items()}
        assert_equal(best, saved(tmp_path / "run" / "checkpoint-2"))
        run.save_model(str(tmp_path / "saved"))
        model.save_pretrained(tmp_path / "shards", max_shard_size="8KB")
        assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
        for folder in ("saved", "shards"):
            loaded = AutoModelForCausalLM.from_pretrained(tmp_path / folder)
            assert_equal(loaded.state_dict(), best)
        with torch.no_grad():
            logits = loaded.eval()(ROWS[:4]).logits
        assert torch.equal(torch.as_tensor(run.predict(DATA[:4]).predictions), logits)
    with wrapped(llama()) as model:
        resumed = trainer(model, tmp_path / "run", **options)
        resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-4"))
        assert logged(resumed) == logged(run)
        assert_equal(saved(tmp_path / "run" / "checkpoint-6"), last)
        assert_equal(model.state_dict(), best)


@pytest.mark.parametrize(
    "options",
    [
        # from the second step on, weights that differ in their last bit are rounded to other bf16 numbers
        {"bf16": True, "max_steps": 1},
        {CHECKPOINTING: True, "label_smoothing_factor": 0.1},
        {CHECKPOINTING: True, f"{CHECKPOINTING}_kwargs": {"use_reentrant": True}},
    ],
    ids=lambda options: "-".join(options),
)
def test_options(options: dict[str, Any], tmp_path: Path) -> None:
    plain = trainer(llama(), tmp_path, **options)
    plain.train()
    with wrapped(llama()) as model:
        forwards: list[nn.Module] = []
        model.model.layers[0].mlp.register_forward_pre_hook(lambda module, *_: forwards.append(module))
        run = trainer(model, tmp_path, **options)
        run.train()
        assert_alike(run, plain)
        assert len(forwards) == 2 * run.state.global_step, "no layer runs a third time"


def test_accelerate(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)

    def train(model: nn.Module, kind: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
        model, optimizer = accelerator.prepare(model, kind(model.parameters(), **CALM))
        torch.manual_seed(1)
        losses = []
        for step in range(4):
            with accelerator.accumulate(model):
                tokens = batch(step)
                loss = model(tokens, labels=tokens).loss
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 0.2)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
        return losses, model.state_dict()

    expected, there = train(llama(), torch.optim.AdamW)
    with wrapped(llama()) as model:
        actual, here = train(model, streamer.AdamW)
        assert actual[0] == expected[0]
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=0)
        assert_equal(here, there, atol=1e-5)
        # which leaves out tensors that share a storage
        accelerator.save_model(model, tmp_path)
        assert_equal(saved(tmp_path), here)
