"""`Streamed` in other trainers than SFTTrainer, and models whose loss needs all logits."""

from __future__ import annotations

import inspect
import math
import shutil
from functools import partial
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
from streamer.integrations.transformers import Streamed, Trainer
from streamer.integrations.trl import SFTTrainer
from tests import tiny_llama
from tests.reference import hugging_face, streamed

pytestmark = pytest.mark.filterwarnings("ignore")  # the libraries' own
STEPS, SAVED, TIME = 6, 3, 16
SIZES: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 300,
}  # fmt: skip
USUAL: dict[str, Any] = {
    "max_steps": STEPS, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "use_cpu": True,
    "learning_rate": 1e-3, "max_grad_norm": 0.5, "weight_decay": 0.1, "warmup_steps": 2, "bf16": False,
    "logging_steps": 1, "save_steps": SAVED, "report_to": "none", "gradient_checkpointing": False,
    "disable_tqdm": True,
}  # fmt: skip
LORA: Any = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")


def logged(trainer: Any) -> list[float]:
    names = ("loss", "grad_norm", "learning_rate", "eval_loss", "rewards/margins", "aux_loss")
    return [float(row[name]) for row in trainer.state.log_history for name in names if name in row]


def are_equal(mine: nn.Module, plain: nn.Module) -> None:
    weights = plain.state_dict()
    for name, value in mine.state_dict().items():
        torch.testing.assert_close(value, weights[name], rtol=0, atol=1e-5, msg=name)


llama = partial(hugging_face, **SIZES, max_position_embeddings=64)


def classifier() -> Any:
    torch.manual_seed(0)
    sizes = SIZES | {"num_attention_heads": 2, "num_labels": 3}
    return transformers.BertForSequenceClassification(
        transformers.BertConfig(**sizes, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    )


def t5() -> Any:
    torch.manual_seed(0)
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=300, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, dropout_rate=0.0,
            decoder_start_token_id=0,
        )
    )  # fmt: skip


def rows(kind: Any, count: int = 40) -> Any:
    def row(number: int) -> dict[str, Any]:
        tokens = [(number * 31 + place * 7) % 97 + 2 for place in range(TIME)]
        labels = [-100] * (number % 5) + tokens[number % 5 :]
        return {"input_ids": tokens, "labels": number % 3 if kind is classifier else labels}

    return datasets.Dataset.from_list([row(number) for number in range(count)])


def train(kind: Any, model: Any, out: Path, data: Any, *, resume: bool = False, **options: Any) -> Any:
    args = transformers.TrainingArguments(str(out), **USUAL | options)
    trainer = kind(model, args, train_dataset=data, eval_dataset=data.select(range(8)))
    trainer.train(resume_from_checkpoint=resume or None)
    return trainer


@pytest.mark.parametrize(
    ("build", "options"),
    [
        (llama, {"eval_strategy": "steps", "eval_steps": 3}),
        (llama, {"label_smoothing_factor": 0.1}),
        (classifier, {"eval_strategy": "steps", "eval_steps": 3}),
        (t5, {}),
    ],
    ids=["llama", "smoothed", "classifier", "t5"],
)
def test_as_a_plain_trainer(build: Any, options: dict[str, Any], tmp_path: Path) -> None:
    plain = build()
    expected = train(transformers.Trainer, plain, tmp_path / "plain", rows(build), **options)
    with streamed(build(), micro_batch_size=1 if build is llama else None) as model:
        trainer = train(Trainer, model, tmp_path / "mine", rows(build), **options)
        assert type(trainer.optimizer.optimizer) is streamer.AdamW
        assert (trainer._head is not None) == (build is llama)
        torch.testing.assert_close(logged(trainer), logged(expected), rtol=1e-5, atol=1e-6)
        are_equal(model, plain)


@pytest.mark.parametrize("build", [llama, t5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_trainer_resumes_to_the_bit(dtype: torch.dtype, build: Any, tmp_path: Path) -> None:
    with streamed(build(), dtype=dtype) as model:
        whole = train(Trainer, model, tmp_path, rows(build))
        expected = {name: value.clone() for name, value in model.state_dict().items()}
    shutil.rmtree(tmp_path / f"checkpoint-{STEPS}")
    with streamed(build(), dtype=dtype) as model:
        again = train(Trainer, model, tmp_path, rows(build), resume=True)
        assert logged(again) == logged(whole)
        for name, value in model.state_dict().items():
            assert torch.equal(value, expected[name]), name


def test_the_best_model_is_loaded(tmp_path: Path) -> None:
    options: Any = {
        "eval_strategy": "steps",
        "eval_steps": 1,
        "save_steps": 1,
        "load_best_model_at_end": True,
    }
    # the highest loss is the first, which is that of no change
    options |= {"metric_for_best_model": "loss", "greater_is_better": True}
    expected = train(transformers.Trainer, llama(), tmp_path / "plain", rows(llama), **options)
    with streamed(llama()) as model:
        trainer = train(Trainer, model, tmp_path / "mine", rows(llama), **options)
        losses = [row["eval_loss"] for row in trainer.state.log_history if "eval_loss" in row]
        assert trainer.state.best_global_step == expected.state.best_global_step == 1
        assert trainer.evaluate()["eval_loss"] == pytest.approx(max(losses), rel=1e-6) != losses[-1]


class Preferences(Streamed, trl.DPOTrainer):
    """DPO on a streamed model."""


PAIRS = [
    {"prompt": f"what follows {n}? ", "chosen": f"{n + 1}", "rejected": f"{n + 2} and more"}
    for n in range(40)
]


def prefer(kind: Any, model: Any, out: Path, *, resume: bool = False, **options: Any) -> Any:
    args = trl.DPOConfig(str(out), **USUAL | {"max_length": 48, "learning_rate": 3e-2, "beta": 1.0})
    data, tokenizer = datasets.Dataset.from_list(PAIRS), tiny_llama.tokenizer()
    trainer = kind(model, None, args, train_dataset=data, processing_class=tokenizer, **options)
    trainer.train(resume_from_checkpoint=resume or None)
    return trainer


def adapted() -> Any:
    model = llama()
    torch.manual_seed(1)
    return peft.get_peft_model(model, LORA)


def test_preferences(tmp_path: Path) -> None:
    """The adapters of the reference are added to the wrapped model by TRL, and stay on the device."""
    plain = adapted()
    expected = prefer(trl.DPOTrainer, plain, tmp_path / "plain")
    with streamed(adapted()) as model:
        trainer = prefer(Preferences, model, tmp_path / "mine")
        assert type(trainer.optimizer.optimizer) is streamer.AdamW
        losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
        assert losses[0] == pytest.approx(math.log(2)) and losses[-1] < 0.5
        torch.testing.assert_close(logged(trainer), logged(expected), rtol=1e-5, atol=1e-6)
        are_equal(model, plain)
        weights = {name: value.clone() for name, value in model.state_dict().items() if ".ref." not in name}
    shutil.rmtree(tmp_path / "mine" / f"checkpoint-{STEPS}")
    with streamed(adapted()) as model:
        again = prefer(Preferences, model, tmp_path / "mine", resume=True)
        assert logged(again) == logged(trainer)
        for name, value in weights.items():
            assert torch.equal(model.state_dict()[name], value), name
    with (
        streamed(llama()) as model,
        pytest.raises(ValueError, match="peft_config= would add adapters to a model that is wrapped"),
    ):
        prefer(Preferences, model, tmp_path / "other", peft_config=LORA)


class Doubled(transformers.Trainer):
    def compute_loss(self, *args: Any, **options: Any) -> Any:
        return 2 * super().compute_loss(*args, **options)


class StreamedDoubled(Streamed, Doubled):
    """A trainer with a loss of its own."""


def test_a_loss_of_ones_own_is_kept(tmp_path: Path) -> None:
    expected = train(Doubled, llama(), tmp_path / "plain", rows(llama))
    with streamed(llama()) as model:
        trainer = train(StreamedDoubled, model, tmp_path / "mine", rows(llama))
        torch.testing.assert_close(logged(trainer), logged(expected), rtol=1e-5, atol=1e-6)


balanced = partial(hugging_face, **SIZES, output_router_logits=True, router_aux_loss_coef=0.5)
MIXTURES = {
    "mixtral": partial(balanced, "mixtral", num_local_experts=4),
    "qwen": partial(
        balanced, "qwen3_moe", num_experts=4, moe_intermediate_size=16, num_experts_per_tok=2, head_dim=8
    ),
}


@pytest.mark.parametrize("build", MIXTURES.values(), ids=MIXTURES)
def test_the_balance_of_experts_is_part_of_the_loss(build: Any, tmp_path: Path) -> None:
    args: dict[str, Any] = USUAL | {"max_length": 24, "save_strategy": "no", "router_aux_loss_coef": 0.5}
    if "current_gradient_accumulation_steps" not in inspect.getsource(trl.SFTTrainer):
        args["gradient_accumulation_steps"] = 1  # the balance counted once for each pass in early releases
    tokenizer = tiny_llama.tokenizer()

    def tuned(kind: Any, model: Any, name: str) -> Any:
        config = trl.SFTConfig(str(tmp_path / name), **args)
        trainer = kind(model, config, train_dataset=rows(build), processing_class=tokenizer)
        trainer.train()
        return trainer

    plain = build()
    expected = tuned(trl.SFTTrainer, plain, "plain")
    with streamed(build()) as model:
        trainer = tuned(SFTTrainer, model, "mine")
        assert trainer._head is not None
        torch.testing.assert_close(logged(trainer), logged(expected), rtol=1e-5, atol=1e-6)
        are_equal(model, plain)


class Scaled(Trainer):
    """With what accelerate has for ``fp16=True`` on a GPU; on the CPU it has no scaler."""

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self.accelerator.native_amp = True
        self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=4)


@pytest.mark.parametrize("max_norm", [0.5, 0.0])
def test_the_loss_is_scaled_in_fp16(max_norm: float, tmp_path: Path) -> None:
    options: Any = {"max_grad_norm": max_norm}
    expected = train(transformers.Trainer, llama(), tmp_path / "plain", rows(llama), **options)
    options["fp16"] = True
    with streamed(llama(), dtype=torch.float16) as model:
        whole = train(Scaled, model, tmp_path / "mine", rows(llama), **options)
        torch.testing.assert_close(logged(whole), logged(expected), rtol=5e-3, atol=0)
        weights = {name: value.clone() for name, value in model.state_dict().items()}
        assert streamer.stats(model).skipped_steps == 0
        assert whole.accelerator.scaler.get_scale() == 2**13
    shutil.rmtree(tmp_path / "mine" / f"checkpoint-{STEPS}")
    with streamed(llama(), dtype=torch.float16) as model:
        again = train(Scaled, model, tmp_path / "mine", rows(llama), **options, resume=True)
        assert logged(again) == logged(whole)
        assert again.accelerator.scaler.state_dict() == whole.accelerator.scaler.state_dict()
        for name, value in weights.items():
            assert torch.equal(model.state_dict()[name], value), name
