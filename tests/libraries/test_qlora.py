"""QLoRA as people do it: a quantized base of transformers, peft's adapters, the trainers; beside the same
without streaming.

Every kind of quantization that transformers makes and that can be trained on is tried on the CPU, where its
results repeat to the bit.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning", reason="lightning is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed")

import torch
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Trainer, TrainingArguments

import streamer
from streamer.errors import CheckpointError
from tests import tiny_llama
from tests.libraries.common import LIGHTNINGS_OWN
from tests.pretrained.test_quantize import four_bits, int8, take_adapters, write_llama
from tests.quantized import history, loss_of, nothing_is_packed, sgd, trained
from tests.reference import assert_equal, unwrapping

__all__ = ["nothing_is_packed"]
peft = pytest.importorskip("peft", reason="peft is not installed")

# what they say of one another
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*(register_constant|Calling register_constant|cast from)",
    "ignore:MatMul8bitLt",
    "ignore:torch.utils.checkpoint",
    "ignore:::transformers",
    "ignore:::peft",
    "ignore:::trl",
    *LIGHTNINGS_OWN,
)

BF16 = torch.bfloat16
#: As users write it, by a word for each.
QUANTIZATIONS: dict[str, Callable[[], Any]] = {
    "nf4": four_bits,
    "fp4": partial(four_bits, bnb_4bit_quant_type="fp4", bnb_4bit_use_double_quant=False),
    "bitsandbytes int8": lambda: BitsAndBytesConfig(load_in_8bit=True),
    "torchao int8": int8,
}
KINDS = pytest.mark.parametrize("kind", QUANTIZATIONS)
#: The words of ``quantize=``, and what transformers makes alike.
WORDS = {"nf4": "nf4", "int8": "torchao int8"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of two layers in bf16, with dropout in its attention."""
    return write_llama(tmp_path_factory.mktemp("llama"), layers=2)


def adapted(model: nn.Module, **options: Any) -> Any:
    """``model`` as QLoRA trains it; ``options`` are those of `peft.prepare_model_for_kbit_training`."""
    config = peft.LoraConfig(target_modules="all-linear", r=4, lora_dropout=0.1, task_type="CAUSAL_LM")
    return peft.get_peft_model(peft.prepare_model_for_kbit_training(model, **options), config)


def base(folder: Path, kind: str | None) -> Any:
    """As transformers loads it."""
    options = {} if kind is None else {"quantization_config": QUANTIZATIONS[kind]()}
    return AutoModelForCausalLM.from_pretrained(folder, dtype=BF16, device_map={"": "cpu"}, **options)


def qlora(folder: Path, kind: str | None, **options: Any) -> Any:
    """All of it without streaming; each call makes the same one, whose adapters change its results."""
    torch.manual_seed(1)
    model = adapted(base(folder, kind), **options)
    for name, param in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(param, std=0.05)
    return model.train()


def wrapped(model: Any, **options: Any) -> AbstractContextManager[Any]:
    return unwrapping(streamer.wrap(model, device="cpu", **options))


def streamed(folder: Path, word: str, **options: Any) -> AbstractContextManager[Any]:
    """Quantized by streamer, with adapters."""
    model = streamer.from_pretrained(folder, quantize=word, device="cpu", **({"adapt": adapted} | options))
    return unwrapping(model.train())


def stepped(model: Any, kind: Any = torch.optim.AdamW) -> Any:
    """``model`` after a step."""
    optimizer = kind(trained(model), lr=1e-2)
    loss_of(model, 0).backward()
    optimizer.step()
    return model


@torch.no_grad()
def logits(model: nn.Module) -> torch.Tensor:
    was_training = model.training
    found: torch.Tensor = model.eval()(input_ids=torch.arange(16)[None]).logits
    model.train(was_training)
    return found


def values(state: dict[str, Any]) -> dict[str, list[torch.Tensor]]:
    """The bytes of the plain tensors of each entry."""
    parts = {
        name: [value.qdata, value.scale] if hasattr(value, "qdata") else [value]
        for name, value in state.items()
    }
    return {name: [part.detach().view(-1).view(torch.uint8) for part in each] for name, each in parts.items()}


def assert_same_values(actual: nn.Module, expected: nn.Module) -> None:
    mine, theirs = values(actual.state_dict()), values(expected.state_dict())
    assert mine.keys() == theirs.keys()
    for name in mine:
        assert all(map(torch.equal, mine[name], theirs[name])), name


def assert_same_model(actual: nn.Module, expected: nn.Module) -> None:
    """Of the same classes, parameters on the CPU with the same values."""
    assert type(actual) is type(expected)
    for mine, theirs in zip(actual.parameters(), expected.parameters(), strict=True):
        assert (type(mine), mine.requires_grad, mine.device) == (
            type(theirs),
            theirs.requires_grad,
            torch.device("cpu"),
        )
    assert_same_values(actual, expected)


@KINDS
def test_what_transformers_quantizes_and_peft_prepares(kind: str, folder: Path) -> None:
    plain = qlora(folder, kind)
    expected = history(plain)
    for activations in ("recompute", "keep"):
        with wrapped(qlora(folder, kind), activations=activations) as model:
            assert_equal(history(model), expected)
            assert_same_values(model, plain)
            assert_same_model(copy.deepcopy(model), plain)
        assert_same_model(model, plain)


@pytest.mark.parametrize(
    "options",
    [{"use_gradient_checkpointing": False}, {"gradient_checkpointing_kwargs": {"use_reentrant": False}}],
    ids=lambda options: next(iter(options)),
)
def test_other_ways_of_gradient_checkpointing(options: dict[str, Any], folder: Path) -> None:
    expected = history(qlora(folder, "nf4", **options))
    with wrapped(qlora(folder, "nf4", **options)) as model:
        assert_equal(history(model), expected)


@pytest.mark.parametrize("word", WORDS)
def test_a_model_is_prepared_before_it_has_values(word: str, folder: Path) -> None:
    expected = qlora(folder, WORDS[word])
    with streamed(folder, word) as model:
        take_adapters(expected, model)
        dtypes = [
            {name: param.dtype for name, param in each.named_parameters()} for each in (model, expected)
        ]
        assert dtypes[0] == dtypes[1]
        assert_equal(history(model), history(expected))
    assert_same_model(model, expected)


def test_adapters_are_loaded_by_peft(folder: Path, tmp_path: Path) -> None:
    plain = qlora(folder, "nf4")
    with wrapped(qlora(folder, "nf4")) as model:
        stepped(model)
        model.save_pretrained(tmp_path / "streamed")
        expected = logits(model)
    stepped(plain)
    plain.save_pretrained(tmp_path / "plain")
    files = [(tmp_path / name / "adapter_model.safetensors").read_bytes() for name in ("plain", "streamed")]
    assert files[0] == files[1]
    prepared = peft.prepare_model_for_kbit_training(base(folder, "nf4"))
    assert torch.equal(logits(peft.PeftModel.from_pretrained(prepared, tmp_path / "streamed")), expected)
    # and on the base as it was before
    first, second = (
        logits(peft.PeftModel.from_pretrained(base(folder, None), tmp_path / name))
        for name in ("plain", "streamed")
    )
    assert torch.equal(first, second) and not torch.equal(first, logits(base(folder, None)))


@pytest.mark.parametrize(
    ("there", "here", "frozen", "match"),
    [
        # the same parts, of the same shapes
        (
            "nf4",
            "fp4",
            True,
            r"down_proj\S*', one of 14, is bitsandbytes nf4 in .* there, bitsandbytes fp4 in .* here",
        ),
        (
            "nf4",
            None,
            False,
            "is bitsandbytes nf4 in blocks of 64, scales in 8 bits there, not quantized here",
        ),
        (None, "torchao int8", True, "is not quantized there, torchao Int8Tensor here"),
        (
            "bitsandbytes int8",
            "torchao int8",
            False,
            "is bitsandbytes int8 there, torchao Int8Tensor here; load the",
        ),
    ],
)
def test_a_checkpoint_of_another_quantization(
    there: str | None,
    here: str | None,
    frozen: bool,
    match: str,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(QUANTIZATIONS, "fp4", partial(four_bits, bnb_4bit_quant_type="fp4"))
    with wrapped(qlora(folder, there)) as model:
        streamer.save(model, None, tmp_path / "saved", step=1, frozen=frozen)
    with wrapped(qlora(folder, here)) as model, pytest.raises(CheckpointError, match=match):
        streamer.load(model, None, tmp_path / "saved")


@KINDS
def test_adapters_are_merged_and_the_whole_is_saved(kind: str, folder: Path, tmp_path: Path) -> None:
    plain = stepped(qlora(folder, kind))
    with wrapped(qlora(folder, kind)) as model:
        stepped(model)
        copied = copy.deepcopy(model)
    expected = plain.merge_and_unload()
    for each in (model, copied):
        merged = each.merge_and_unload()
        assert_same_model(merged, expected)
        assert torch.equal(logits(merged), logits(expected))
    merged.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto", device_map={"": "cpu"})
    assert_same_values(again, merged)
    assert torch.equal(logits(again), logits(merged))


@pytest.mark.parametrize("word", WORDS)
def test_a_whole_model_is_saved_while_it_is_wrapped(word: str, folder: Path, tmp_path: Path) -> None:
    with streamed(folder, word, adapt=None) as model:
        model.save_pretrained(tmp_path / "wrapped")
        expected = logits(model)
    model.save_pretrained(tmp_path / "plain")
    for name in ("wrapped", "plain"):
        again = AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype="auto", device_map={"": "cpu"})
        assert torch.equal(logits(again), expected)
        assert_same_values(again, model)


def test_what_comes_after_wrap_and_should_come_before(folder: Path) -> None:
    for late in (adapted, peft.prepare_model_for_kbit_training):
        with wrapped(base(folder, "nf4").requires_grad_(False)) as model:
            changed = late(model)
            with pytest.raises(ValueError, match=r"streamer\.unwrap\(model\)"):
                loss_of(changed, 0)


def test_an_evaluation_packs_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # the head, too, which is in no layer
    monkeypatch.setitem(QUANTIZATIONS, "nf4", partial(four_bits, llm_int8_skip_modules=["nothing"]))
    expected = qlora(folder, "nf4")
    model = qlora(folder, "nf4")
    packs = "support_avx512bf16_for_cpu"
    for module in model.modules():
        if packs in vars(module):
            setattr(module, packs, True)
    with wrapped(model):
        assert torch.equal(logits(model), logits(expected))
        assert_equal(history(model), history(expected))
        copied = copy.deepcopy(model)
    for each in (model, copied):
        packing = [
            module for module in each.modules() if getattr(module, "support_avx512bf16_for_cpu", False)
        ]
        assert len(packing) == 15
        assert_same_model(each, expected)


ROWS = torch.randint(128, (12, 12), generator=torch.Generator().manual_seed(0))


def logged(run: Any) -> list[float]:
    kept = ("loss", "eval_loss", "grad_norm")
    return [float(entry[name]) for entry in run.state.log_history for name in kept if name in entry]


def of_torch(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(trained(model), lr=1e-2, foreach=False)


#: That of the trainers of transformers and TRL.
QUIET: dict[str, Any] = {
    "per_device_train_batch_size": 4,
    "logging_steps": 1,
    "report_to": "none",
    "disable_tqdm": True,
    "use_cpu": True,
    "dataloader_pin_memory": False,
}


@pytest.mark.parametrize("kind", ["nf4", "torchao int8"])
def test_transformers_trainer(kind: str, folder: Path, tmp_path: Path) -> None:
    """It asks how the model is quantized, and whether it may train it so."""
    data = [{"input_ids": row, "labels": row} for row in ROWS]

    def run(model: nn.Module, name: str, optimizer_of: Any = of_torch, resume: Path | None = None) -> Any:
        times = {"max_steps": 4, "eval_steps": 2, "save_steps": 2}
        each = {"eval_strategy": "steps", "save_strategy": "steps"}
        arguments = TrainingArguments(str(tmp_path / name), **QUIET, **times, **each)
        optimizers = (optimizer_of(model), None)
        trainer = Trainer(model, arguments, train_dataset=data, eval_dataset=data[:4], optimizers=optimizers)
        trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
        return trainer

    plain = qlora(folder, kind)
    expected = logged(run(plain, "plain"))
    with wrapped(qlora(folder, kind)) as model:
        assert logged(run(model, "streamed")) == expected
        assert_same_values(model, plain)
    saved = [tmp_path / name / "checkpoint-4/adapter_model.safetensors" for name in ("plain", "streamed")]
    assert saved[0].read_bytes() == saved[1].read_bytes()
    if kind != "nf4":
        return
    optimizer_of = lambda model: streamer.AdamW(trained(model), lr=1e-2)  # noqa: E731
    with wrapped(qlora(folder, kind)) as model:
        whole = logged(run(model, "own", optimizer_of))
        # one rounding is enough to set a bf16 activation apart
        torch.testing.assert_close(whole, expected, rtol=0.02, atol=0)
    with wrapped(qlora(folder, kind)) as model:
        assert logged(run(model, "own", optimizer_of, tmp_path / "own/checkpoint-2")) == whole


@pytest.mark.filterwarnings("ignore:bitsandbytes computes wrong")  # on some CPUs, and the same in both
@pytest.mark.parametrize("kind", ["nf4", "torchao int8"])
def test_trl(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("trl", reason="needs trl (pip install trl)")
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    chat = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
    chats = Dataset.from_list([{"messages": chat}] * 4)
    tiny_llama.write(tmp_path, dtype=BF16, hidden_size=64, attention_dropout=0.1)

    def run(model: nn.Module) -> Any:
        arguments = SFTConfig(str(tmp_path / "run"), max_steps=3, max_length=32, bf16=False, **QUIET)
        trainer = SFTTrainer(
            model,
            arguments,
            train_dataset=chats,
            processing_class=tiny_llama.tokenizer(),
            optimizers=(sgd(model), None),
        )
        trainer.train()
        return trainer

    def made() -> Any:
        # as SFTTrainer has them where bitsandbytes has quantized the base
        model = qlora(tmp_path, kind)
        for param in trained(model):
            param.data = param.data.to(BF16)
        return model

    plain = made()
    expected = logged(run(plain))
    with wrapped(made()) as model:
        assert logged(run(model)) == expected
        assert_same_values(model, plain)
    if kind == "torchao int8":
        return
    cast = r"lora_A\S+ was cast from .* as TRL does .*dtype=torch\.bfloat16"
    with wrapped(qlora(tmp_path, kind)) as model, pytest.raises(ValueError, match=cast):
        run(model)
    with wrapped(qlora(tmp_path, kind), dtype=BF16) as model:
        run(model)
