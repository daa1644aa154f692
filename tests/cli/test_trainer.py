"""`streamer train` for a Hugging Face folder, and what takes its results further."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl", reason="needs trl (pip install '.[hf]')")

import datasets
import peft
import transformers
from safetensors.torch import load_file

from streamer.cli import shipped
from streamer.cli.config import SampleConfig, load_config
from streamer.cli.generate import chat as talk
from streamer.cli.main import main
from streamer.cli.trainer import Stopping, arguments_of
from tests import tiny_llama
from tests.cli.common import HOME, chat, error_of, logged, refused, sets
from tests.ranks.common import listening, run_ranks

pytestmark = pytest.mark.filterwarnings("ignore")  # the libraries' own
SETTINGS = [
    *(
        "train.max_steps=6",
        "train.per_device_train_batch_size=2",
        "train.max_length=48",
        "train.eval_steps=3",
    ),
    *("train.save_steps=3", "train.learning_rate=1e-2", "stream.device=cpu", "stream.host_threads=1"),
    *("stream.micro_batch_size=1", 'data.val_paths=["val.jsonl"]', 'train.output_dir="run"'),
]


@pytest.fixture(autouse=True)
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model and data to work in."""
    monkeypatch.chdir(tmp_path)
    tiny_llama.write(tmp_path / "llama")
    for name, numbers in (("train", range(60)), ("val", range(60, 70))):
        lines = [json.dumps({"messages": chat(number)}) for number in numbers]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    return tmp_path


def command(*settings: str, more: tuple[str, ...] = ()) -> list[str]:
    return ["train", "llama", "--data", "train.jsonl", *sets(*SETTINGS, *settings), *more]


def weights(folder: str) -> dict[str, torch.Tensor]:
    [file] = Path(folder).glob("*.safetensors")
    return load_file(file)


def stop_after(step: int, patch: pytest.MonkeyPatch) -> None:
    """Send SIGTERM to this process at the end of a step."""
    step_end = Stopping.on_step_end

    def stopped(self: Stopping, args: Any, state: Any, control: Any, **more: Any) -> None:
        if state.global_step == step:
            os.kill(os.getpid(), signal.SIGTERM)
        step_end(self, args, state, control, **more)

    patch.setattr(Stopping, "on_step_end", stopped)


def test_files_of_a_run(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sampling = ['sample.prompts=["after 3?"]', "sample.chat=true", "sample.every=3", "sample.tokens=4"]
    assert main(command(*sampling)) == 0
    printed, out = capsys.readouterr().out, Path("run")
    assert {path.name for path in out.iterdir()} == {
        "checkpoint-3", "checkpoint-6", "config.toml", "metrics.jsonl", "model", "samples.jsonl", 
        "summary.json", "trace.json", "README.md",
    }  # fmt: skip
    assert [line["step"] for line in logged(out, "loss")] == [1, 2, 3, 4, 5, 6]
    assert [line["step"] for line in logged(out, "val_loss")] == [0, 3, 6]
    assert all(line["tokens_per_second"] > 0 for line in logged(out, "tokens_per_second"))
    samples = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
    assert [sample["step"] for sample in samples] == [3, 6] and samples[0]["prompt"] == "after 3?"
    summary = json.loads((out / "summary.json").read_text())
    assert summary["last_val_loss"] < summary["first_val_loss"]
    assert "60 documents in" in printed and "overlap" in printed and "'loss': " in printed
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(out / "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(out / "model")
    text = tokenizer.apply_chat_template(chat(60), tokenize=False)
    assert torch.isfinite(
        model(**tokenizer(text, return_tensors="pt", return_token_type_ids=False)).logits
    ).all()
    config = load_config(out / "config.toml")
    assert config.model.path == str(work / "llama") and config.trainer["max_steps"] == 6


@pytest.mark.parametrize("lora", [(), ("lora.r=4",)], ids=["full", "lora"])
def test_a_run_that_is_stopped_resumes_to_the_bit(
    lora: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(*lora, 'train.output_dir="whole"')) == 0
    with monkeypatch.context() as patch:
        stop_after(4, patch)
        assert main(command(*lora)) == 0
    assert "stopped by SIGTERM after step 4: --resume" in capsys.readouterr().out
    assert "run has checkpoints of a run: use --resume" in refused(capsys, *command(*lora))
    shutil.copytree("run/checkpoint-4", "run/checkpoint-5")  # incomplete, as after a kill
    (Path("run/checkpoint-5/trainer_state.json")).write_text("{")
    assert main(command(*lora, more=("--resume",))) == 0
    place = "adapters" if lora else "model"
    expected = weights(f"whole/{place}")
    for name, value in weights(f"run/{place}").items():
        assert torch.equal(value, expected[name]), name
    names = ("step", "loss", "val_loss", "lr", "grad_norm")
    mine, theirs = (
        [[line.get(name) for name in names] for line in logged(Path(each))] for each in ("run", "whole")
    )
    assert [line for line in mine if line[1]] == [line for line in theirs if line[1]]
    capsys.readouterr()
    assert main(command(*lora, more=("--resume",))) == 0
    assert "is the end of its run" in capsys.readouterr().out


def test_adapters_are_trained_merged_and_used_in_a_chat(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(command("lora.r=4", "lora.lora_dropout=0.1", "stream.dtype=bfloat16")) == 0
    assert main(["export", "run", "--to", "merged", "--merge", "--dtype", "float32"]) == 0
    adapted: Any = peft.AutoPeftModelForCausalLM.from_pretrained("run/adapters", dtype=torch.float32)
    merged: Any = transformers.AutoModelForCausalLM.from_pretrained("merged", dtype=torch.float32)
    base = {name: value.bfloat16().float() for name, value in weights("llama").items()}
    changed = [name for name, value in weights("merged").items() if not torch.equal(value, base[name])]
    assert changed and all("proj" in name for name in changed)
    tokens = torch.arange(3, 12)[None]
    with torch.no_grad():
        torch.testing.assert_close(adapted(tokens).logits, merged(tokens).logits, rtol=1e-2, atol=1e-3)
    lines = iter(["after 3?", "/new", "after 4?", ""])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    capsys.readouterr()
    talk("run", SampleConfig(tokens=4, temperature=0.0), device="cpu")
    assert len(capsys.readouterr().out.splitlines()) >= 2
    assert "neither a Hugging Face folder nor a finished run" in refused(capsys, "chat", "llama/nothing")


def test_the_best_checkpoint_and_early_stopping(capsys: pytest.CaptureFixture[str]) -> None:
    settings = [
        *(
            "train.load_best_model_at_end=true",
            "train.eval_steps=1",
            "train.save_steps=1",
            "train.learning_rate=0.3",
        ),
        *("callbacks.EarlyStoppingCallback={early_stopping_patience=2}", "train.max_steps=30"),
        "train.warmup_steps=0",
    ]
    assert main(command(*settings)) == 0
    losses = {line["step"]: line["val_loss"] for line in logged(Path("run"), "val_loss") if line["step"]}
    best = min(losses, key=lambda step: losses[step])
    assert max(losses) == best + 2 < 30
    assert main(["export", "run", "--best", "--to", "best"]) == 0
    assert main(["export", f"run/checkpoint-{best}", "--to", "again"]) == 0
    for name, value in weights("best").items():
        assert torch.equal(value, weights("run/model")[name]) and torch.equal(value, weights("again")[name])


@pytest.mark.parametrize("name", ["a.txt", "a.parquet", "a.jsonl"])
def test_forms_of_files_and_a_report(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    if name == "a.txt":
        Path(name).write_text("one two three four. " * 200)
    elif name == "a.parquet":
        rows = [{"messages": chat(number)} for number in range(60)]
        datasets.Dataset.from_list(rows).to_parquet(name)
    else:
        shutil.copyfile("train.jsonl", name)
    report = ["train.report_to=tensorboard"] if importlib.util.find_spec("tensorboard") else []
    assert main(["train", "llama", "--data", name, *sets(*SETTINGS, *report, "train.max_steps=3")]) == 0
    losses = [line["loss"] for line in logged(Path("run"), "loss")]
    assert losses[-1] < losses[0] - 0.05
    assert f"{30 if name == 'a.txt' else 60} documents in" in capsys.readouterr().out
    assert bool([*Path("run").rglob("events.out.*")]) == bool(report)


def test_a_run_in_fp16_is_near_one_in_fp32() -> None:
    """On the CPU without a scale of the loss, which accelerate has for a GPU."""
    assert main(command('train.output_dir="fp32"')) == 0
    assert main(command("stream.dtype=float16", "train.fp16=true")) == 0
    names = ("loss", "grad_norm", "val_loss")
    mine, theirs = (
        [[line.get(name, 0.0) for name in names] for line in logged(Path(each))] for each in ("run", "fp32")
    )
    torch.testing.assert_close(mine, theirs, rtol=2e-2, atol=0)
    assert {value.dtype for value in weights("run/model").values()} == {torch.float16}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (["train.num_train_epoch=3"], "[train] has no 'num_train_epoch'; did you mean 'num_train_epochs'?"),
        (["train.save_strategy=never"], "[train]: "),
        (['train.report_to=["no such thing"]'], "[train]: "),
        (["train.optim_args=momentum=3"], "--set 'train.optim_args=momentum=3': not a TOML value"),
        (["lora.rr=3", "lora.r=4"], "[lora]: "),
        (["lora.r=4", 'lora.target_modules=["nothing"]'], "[lora]: "),
        (["callbacks.NoSuch={}"], "[callbacks] NoSuch"),
        (["train.max_length=65"], "train.max_length = 65 is above the model's max_position_embeddings = 64"),
        (["stream.host_memory=10kB"], "stream.host_memory needs"),
        (["model.args.rope=3"], "model.args.rope: the config of"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_bad_settings_are_refused_in_one_line(
    settings: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(*settings)) == 2
    assert expected in capsys.readouterr().err
    assert not Path("run").exists()


def test_folders_that_are_no_model(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "hf download someone/model" in refused(capsys, "train", "someone/model", "--data", "train.jsonl")
    assert "No such file" in refused(capsys, "train", "absent.toml")
    assert "there is nothing to train on" in refused(capsys, "train", "llama")
    Path("llama/tokenizer.json").unlink()
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        Path("llama", name).unlink(missing_ok=True)
    assert "there is no tokenizer in it" in refused(capsys, *command())


@pytest.mark.parametrize("kind", ["gpt2", "bloom"])
@pytest.mark.parametrize("packing", ["true", "false"])
def test_models_that_take_other_arguments(
    packing: str, kind: str, work: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """GPT-2's layers take no rotary embeddings; Bloom takes no positions, so that texts are not packed."""
    shutil.rmtree("llama")
    tokenizer = tiny_llama.tokenizer()
    sizes = {"vocab_size": len(tokenizer), "n_layer": 2, "n_head": 2}
    sizes |= {"n_embd": 16, "n_positions": 64} if kind == "gpt2" else {"hidden_size": 16}
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **sizes))
    model.save_pretrained(work / "llama")
    tokenizer.save_pretrained(work / "llama")
    # Bloom's biases have batch times heads along their first dimension, which cannot be cut
    size = 1 if kind == "gpt2" else 2
    assert main(command(f"train.packing={packing}", f"stream.micro_batch_size={size}")) == 0
    line = "BloomForCausalLM does not separate packed texts: each has a row of its own"
    assert (line in capsys.readouterr().out) is (kind == "bloom" and packing == "true")
    losses = [row["val_loss"] for row in logged(Path("run"), "val_loss")]
    assert losses[-1] < losses[0]


def test_defaults_differ_from_the_trainers_where_the_documentation_says_so() -> None:
    config = load_config(HOME / "configs" / "hf-finetune.toml", ["model.path=llama"])
    args = arguments_of(config)
    text = (HOME / "docs" / "configurations.md").read_text()
    for name, value in (("assistant_only_loss", True), ("bf16", False), ("gradient_checkpointing", False)):
        assert getattr(args, name) is value and f"`{name} = {str(value).lower()}`" in text
    assert error_of(
        arguments_of, load_config(HOME / "configs" / "hf-finetune.toml", ["model.path=x", "train.foo=1"])
    )
    assert shipped.is_model("owner/name") and not shipped.is_model("configs/x.toml")


def trained(rank: int, size: int, place: dict[str, str], folder: str) -> int:
    os.chdir(folder)
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    os.environ.update(place | {name: str(value) for name, value in names.items()})
    return main(command("train.per_device_train_batch_size=1", 'train.output_dir="two"'))


def test_two_ranks_train_as_one_does(work: Path) -> None:
    assert main(command()) == 0
    _store, place = listening()
    imports = ("trl.trainer.sft_trainer", "streamer.cli.trainer")
    assert run_ranks(2, trained, 2, place, str(work), kind=None, imports=imports) == [0, 0]
    for one, other in zip(logged(Path("run"), "loss"), logged(Path("two"), "loss"), strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-3)
    expected = weights("run/model")
    for name, value in weights("two/model").items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=2e-3, msg=name)
