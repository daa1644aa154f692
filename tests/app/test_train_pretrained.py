"""`streamer train configs/hf-finetune.toml --model DIR --data FILE`, as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers

from streamer.app.cli import main
from streamer.app.config import load_config
from tests import tiny_llama
from tests.app.common import HOME, logged, refused, sets

CONFIG = str(HOME / "configs" / "hf-finetune.toml")
SHORT = [
    "data.context=16",
    "run.steps=6",
    "run.save_every=3",
    "run.eval_every=3",
    "run.eval_batches=1",
    "run.sample_tokens=4",
    "optimizer.lr=1e-2",
    "optimizer.warmup_steps=1",
    "stream.device='cpu'",
]


def prepare(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make ``folder`` the working directory, with a model and data."""
    monkeypatch.chdir(folder)
    tiny_llama.write(folder / "llama", dtype=torch.bfloat16)
    lines = [{"prompt": f"what follows {n}? ", "completion": f"{n + 1}"} for n in range(80)]
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, [*lines, {"text": "one two three"}])))


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a model and data."""
    prepare(tmp_path, monkeypatch)
    return tmp_path


def command(*more: str, model: str = "llama", settings: list[str] = SHORT) -> list[str]:
    return ["train", CONFIG, "--model", model, "--data", "data.jsonl", *sets(*settings), *more]


def losses(run: Path) -> list[float]:
    return [line["loss"] for line in logged(run, "loss")]


@pytest.mark.filterwarnings("ignore")  # the library's own, while it writes
def test_a_run_ends_in_a_folder_with_all_weights(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command()) == 0
    run = place / "runs" / "hf-finetune"
    assert "token frequencies alone" in capsys.readouterr().out
    before = transformers.AutoModelForCausalLM.from_pretrained("llama")
    after = transformers.AutoModelForCausalLM.from_pretrained(run / "model")
    words = transformers.AutoTokenizer.from_pretrained(run / "model")
    assert words.decode(words("one")["input_ids"]) == "one"
    assert {value.dtype for value in after.state_dict().values()} == {torch.bfloat16}
    pairs = zip(before.state_dict().items(), after.state_dict().items(), strict=True)
    for (name, old), (same_name, new) in pairs:
        assert name == same_name and not torch.equal(old, new), "every weight is there, and trained"
    assert losses(run)[-1] < losses(run)[0] - 0.5
    # what streamer export makes of the last checkpoint is the same
    assert main(["export", str(run), "--to", "exported"]) == 0
    exported = transformers.AutoModelForCausalLM.from_pretrained("exported").state_dict()
    assert all(torch.equal(value, exported[name]) for name, value in after.state_dict().items())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("asked", [False, True])
def test_weights_in_fp16_are_trained_in_bf16_unless_asked_for(
    place: Path, asked: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_llama.write(place / "half", dtype=torch.float16)
    settings = [*SHORT, "run.steps=3", "run.save_every=0", *(["stream.dtype='float16'"] if asked else [])]
    assert main(command(model="half", settings=settings)) == 0
    said = "half has fp16 weights: they are streamed in bfloat16, whose range needs no scaling of the loss"
    assert (said in capsys.readouterr().out) is not asked
    run = place / "runs" / "hf-finetune"
    dtype = "float16" if asked else "bfloat16"
    assert load_config(run / "config.toml").stream.dtype == dtype
    after = transformers.AutoModelForCausalLM.from_pretrained(run / "model").state_dict()
    assert {value.dtype for value in after.values()} == {getattr(torch, dtype)}
    told = "runs/hf-finetune has no checkpoint to export (run.save_every = 0): its weights are in runs/hf-f"
    assert told in refused(capsys, "export", "runs/hf-finetune", "--to", "exported")


@pytest.mark.filterwarnings("ignore")
def test_samples_are_what_the_library_generates(place: Path) -> None:
    """The most likely tokens, after texts and chats of different lengths, until the end of the text."""
    chat = "[{role='system', content='one'}, {role='user', content='two'}]"
    prompts = f"sample.prompts=['what follows', {chat}, 'what follows one? two']"
    settings = [*SHORT, "stream.dtype='float32'", prompts, "sample.temperature=0", "sample.tokens=12"]
    settings += ["run.steps=1", "optimizer.lr=1e-3", "optimizer.warmup_steps=0"]
    assert main(command(settings=settings)) == 0
    run = place / "runs" / "hf-finetune"
    lines = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    assert [(line["step"], line["prompt"]) for line in lines] == [
        (1, "what follows"), (1, "two"), (1, "what follows one? two")
    ]  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_pretrained(run / "model", dtype=torch.float32)
    words = transformers.AutoTokenizer.from_pretrained(run / "model")
    texts = ["what follows", "<|system|>one\n<|user|>two\n<|assistant|>", "what follows one? two"]
    for text, line in zip(texts, lines, strict=True):
        given = words(text, return_tensors="pt")["input_ids"]
        ends = [words.eos_token_id, model.generation_config.eos_token_id]
        found = model.generate(
            given, do_sample=False, max_length=None, max_new_tokens=12, eos_token_id=ends, pad_token_id=0
        )
        made = found[0, given.shape[1] :].tolist()
        assert line["text"] == words.decode(made[:-1] if made[-1] in ends else made)
    assert len({line["text"] for line in lines}) == 3


@pytest.mark.filterwarnings("ignore")
def test_parts_of_a_batch_add_up_to_the_whole(place: Path) -> None:
    for name, micro in (("whole", 16), ("parts", 3)):
        settings = [
            *SHORT,
            f"run.name='{name}'",
            f"stream.micro_batch_size={micro}",
            "stream.dtype='float32'",
        ]
        assert main(command(settings=settings)) == 0
    torch.testing.assert_close(
        torch.tensor(losses(place / "runs" / "parts")), torch.tensor(losses(place / "runs" / "whole")),
        rtol=1e-4, atol=0,
    )  # fmt: skip


@pytest.mark.filterwarnings("ignore")
def test_a_run_goes_on_from_its_checkpoint(place: Path) -> None:
    tiny_llama.write(place / "dropout", attention_dropout=0.3)
    assert main(command(model="dropout")) == 0
    run = place / "runs" / "hf-finetune"
    first, weights = losses(run), (run / "model" / "model.safetensors").read_bytes()
    resume = ["--resume", str(run / "checkpoints" / "step-0000003")]
    assert main(command(*resume, model="dropout")) == 0
    assert losses(run) == first
    assert (run / "model-2" / "model.safetensors").read_bytes() == weights


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["model.args={hidden_sise=8}"], "model.args.hidden_sise: the config of llama has no such key; did"),
        (["model.args={hidden_size=8}"], "of another shape: model.embed_tokens.weight"),
        (["model.factory='transformers:BertForMaskedLM'"], "is not of a BertForMaskedLM; missing"),
        (["data.micro_batch_size=4"], "unknown key 'micro_batch_size' in [data]; did you mean 'batch_size'"),
        (["stream.activations=['keep']"], "stream.activations=[...] has 1 entries, and there are 2 layers"),
        (["data.context=65"], "data.context = 65 is above the model's max_position_embeddings = 64"),
        (["data.tokenizer='runs'"], "runs: no such folder"),
        (["stream.layers='model.layer'"], " stream.layers='model.layer': there is no such module"),
        (["memory.host='1MB'", "memory.disk='none'"], "[memory]: memory.disk=none: this process sees no "),
        (["stream.device='cuda:7'"], "stream.device='cuda"),
        (["optimizer.state_dtype='int8'", "stream.dtype='float32'"], "leave optimizer.state_dtype at floa"),
        (["model.init='foo'"], "[model] and [stream]: model.init='foo': give a function of a module"),
        (["model.factory='transformers:BertForMaskedLM'"], "(give model.init to make new ones)"),
    ],
)
def test_mistakes_end_in_one_line_and_exit_code_2(
    place: Path, settings: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refused(capsys, *command(settings=[*SHORT, *settings]))
    assert not (place / "runs").exists()


def test_models_that_are_missing_or_do_not_fit_the_data(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_llama.write(place / "small", vocab_size=100)
    for arguments, message in (
        (
            command(model="meta-llama/Llama-3"),
            "meta-llama/Llama-3: no such folder, and nothing is downloaded",
        ),
        (command(model="small"), "and the model embeds 100: give the model's own tokenizer"),
        (["train", CONFIG, "--data", "data.jsonl"], "model.pretrained (--model)"),
    ):
        assert message in refused(capsys, *arguments)


@pytest.mark.parametrize("settings", [[], ["model.args={num_hidden_layers=1}"]], ids=str)
@pytest.mark.parametrize("model", ["llama/checkpoint-500", "meta-llama/Llama-3"])
def test_no_other_model_is_planned_for_one_that_is_not_there(
    place: Path, model: str, settings: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    error = refused(capsys, "plan", CONFIG, "--model", model, *sets(*settings))
    assert f"{model}: no such folder, and nothing is downloaded: give a local one" in error


@pytest.mark.filterwarnings("ignore")  # the library's own, while it writes
@pytest.mark.parametrize("answer", ["stop", "warn"])
def test_weights_are_written_also_where_the_last_checkpoint_cannot_be(
    answer: str, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_room(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device", "somewhere")

    monkeypatch.setattr("streamer.checkpoint.save.write_tensors", no_room)
    settings = [*SHORT, "run.save_every=6", f"run.save_failure={answer}", "run.save_wait=0"]
    assert main(command(settings=settings)) == (1 if answer == "stop" else 0)
    run = place / "runs" / "hf-finetune"
    assert (run / "model" / "model.safetensors").exists()
    assert (run / "summary.json").exists() == (answer == "warn")
    told = capsys.readouterr().out
    assert ("the weights are written all the same" in told) == (answer == "stop")


@pytest.mark.filterwarnings("ignore")  # the library's own, while it writes
def test_a_run_is_exported_and_resumed_from_another_folder(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command()) == 0
    (place / "elsewhere").mkdir()
    monkeypatch.chdir(place / "elsewhere")
    assert main(["export", "../runs/hf-finetune", "--to", "out"]) == 0
    found = transformers.AutoModelForCausalLM.from_pretrained("out")
    of_run = transformers.AutoModelForCausalLM.from_pretrained(place / "runs" / "hf-finetune" / "model")
    assert found.dtype == of_run.dtype and (place / "elsewhere" / "out" / "tokenizer.json").exists()
    given = ["--resume", "../runs/hf-finetune", *sets(*SHORT), "--data", "data.jsonl"]
    assert main(["train", CONFIG, "--model", "../llama", *given]) == 0
    assert "has finished at step 6" in capsys.readouterr().out
    (place / "llama").rename(place / "moved")
    told = refused(capsys, "export", "../runs/hf-finetune", "--to", "again")
    assert "llama, the model that the run went on from, is not there: correct model.pretrained in" in told


def test_values_that_the_librarys_config_refuses_are_named(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2}
    tiny_llama.tokenizer().save_pretrained("qwen3")
    config = transformers.Qwen3Config(vocab_size=300, num_key_value_heads=2, head_dim=8, **sizes)
    transformers.Qwen3ForCausalLM(config).save_pretrained("qwen3")
    told = refused(capsys, *command(model="qwen3", settings=[*SHORT, "model.args.num_hidden_layers=2"]))
    assert "model.args: the config of qwen3 refuses them: " in told
