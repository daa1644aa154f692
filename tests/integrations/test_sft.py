"""TRL's SFTTrainer on a streamed model, compared with one on a plain model."""

from __future__ import annotations

import shutil
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("trl", reason="needs trl (pip install '.[hf]')")

import datasets
import peft
import transformers
import trl

import streamer
from streamer.integrations.transformers import last_checkpoint
from streamer.integrations.trl import ROWS, SFTTrainer
from tests import tiny_llama
from tests.cli.common import chat
from tests.reference import unwrapping

pytestmark = pytest.mark.filterwarnings("ignore")  # the libraries' own

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|assistant|>{% generation %}{{ m.content }}</s>"
    "{% endgeneration %}{% else %}<|user|>{{ m.content }}</s>{% endif %}{% endfor %}"
)
LORA = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
STEPS, SAVED = 6, 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("llama")
    tiny_llama.write(path)
    return path


def words(folder: Path) -> Any:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def config(out: Path, **options: Any) -> trl.SFTConfig:
    usual: dict[str, Any] = {
        "max_steps": STEPS,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-3,
        "max_length": 48,
        "packing": True,
        "assistant_only_loss": True,
        "max_grad_norm": 0.5,
        "warmup_steps": 2,
        "weight_decay": 0.1,
        "logging_steps": 1,
        "save_steps": SAVED,
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "disable_tqdm": True,
    }
    return trl.SFTConfig(str(out), **(usual | options))


CHATS = [{"messages": chat(number) + chat(number * 7 % 90)} for number in range(200)]


def streamed(folder: Path, *, lora: bool = False, **options: Any) -> AbstractContextManager[nn.Module]:
    def adapt(model: nn.Module) -> nn.Module:
        return peft.get_peft_model(model, LORA)  # type: ignore[arg-type, return-value]

    usual = {"device": "cpu", "micro_batch_size": 1, "batch_dims": ROWS, "adapt": adapt if lora else None}
    torch.manual_seed(0)
    return unwrapping(streamer.from_pretrained(folder, **(usual | options)))


def run(
    model: nn.Module, folder: Path, args: trl.SFTConfig, kind: Any = SFTTrainer, resume: bool = False
) -> Any:
    data = datasets.Dataset.from_list(CHATS)
    trainer = kind(
        model, args, train_dataset=data, eval_dataset=data.select(range(8)), processing_class=words(folder)
    )
    trainer.train(resume_from_checkpoint=resume or None)
    return trainer


def logged(trainer: Any) -> list[float]:
    names = ("loss", "grad_norm", "learning_rate", "eval_loss")
    return [float(row[name]) for row in trainer.state.log_history for name in names if name in row]


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("packing", [False, True], ids=["rows", "packed"])
def test_as_plain(packing: bool, lora: bool, folder: Path, tmp_path: Path) -> None:
    options = {"packing": packing, "eval_strategy": "steps", "eval_steps": 3}
    torch.manual_seed(0)
    plain: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if lora:
        plain = peft.get_peft_model(plain, LORA)
    first = state(plain)
    expected = run(plain, folder, config(tmp_path / "plain", optim="adamw_torch", **options), trl.SFTTrainer)
    with streamed(folder, lora=lora) as model:
        model.load_state_dict(first)  # the same adapters
        trainer = run(model, folder, config(tmp_path / "mine", **options))
        assert type(trainer.optimizer.optimizer) is streamer.AdamW
        mine, theirs = logged(trainer), logged(expected)
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
        weights = state(plain)
        for name, value in state(model).items():
            torch.testing.assert_close(value, weights[name], rtol=0, atol=1e-5, msg=name)


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_run_resumes_to_the_bit(dtype: torch.dtype, lora: bool, folder: Path, tmp_path: Path) -> None:
    args = config(tmp_path)
    with streamed(folder, lora=lora, dtype=dtype) as model:
        whole = run(model, folder, args)
        expected = state(model)
    last = tmp_path / f"checkpoint-{STEPS}"
    assert last_checkpoint(tmp_path) == last
    shutil.rmtree(last / "streamer")
    (last / "trainer_state.json").write_text("{")  # as if killed while it was written
    assert last_checkpoint(tmp_path) == tmp_path / f"checkpoint-{SAVED}"
    shutil.rmtree(last)
    with streamed(folder, lora=lora, dtype=dtype) as model:
        again = run(model, folder, args, resume=True)
        assert logged(again) == logged(whole)
        for name, value in state(model).items():
            assert torch.equal(value, expected[name]), name


def test_the_best_model_is_loaded(folder: Path, tmp_path: Path) -> None:
    args = config(
        tmp_path,
        learning_rate=3e-2,
        eval_strategy="steps",
        eval_steps=1,
        save_steps=1,
        load_best_model_at_end=True,
    )
    with streamed(folder) as model:
        trainer = run(model, folder, args)
        losses = [row["eval_loss"] for row in trainer.state.log_history if "eval_loss" in row]
        assert trainer.evaluate()["eval_loss"] == pytest.approx(min(losses), rel=1e-6)


def test_moments_in_int8_and_an_option_that_does_not_exist(folder: Path, tmp_path: Path) -> None:
    with streamed(folder, dtype=torch.bfloat16) as model:
        trainer = run(model, folder, config(tmp_path, optim_args="state_dtype=int8"))
        moments = {
            name: value for name, value in streamer.stats(model).host_bytes.items() if "moment" in name
        }
        assert sum(moments.values()) < 3 * sum(p.numel() for p in model.parameters()), moments
        assert trainer.state.global_step == STEPS
        with pytest.raises(ValueError, match="optim_args has 'momentum'"):
            run(model, folder, config(tmp_path / "other", optim_args="momentum=0.9"))
