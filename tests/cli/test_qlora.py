"""`streamer train` with ``[lora]`` on a quantized base."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl", reason="needs trl (pip install '.[hf]')")
pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")

import peft
import transformers
from safetensors.torch import load_file

from streamer.checkpoint.manifest import Manifest
from streamer.cli.main import main
from tests import tiny_llama
from tests.cli.common import HOME, chat, logged, refused, sets
from tests.cli.test_trainer import stop_after
from tests.pretrained.test_quantize import stored_in_fp8
from tests.reference import hugging_face

pytestmark = pytest.mark.filterwarnings("ignore")  # the libraries' own
CONFIG = str(HOME / "configs" / "qlora.toml")
BF16 = torch.bfloat16
SETTINGS = [
    *(
        "train.max_steps=4",
        "train.per_device_train_batch_size=2",
        "train.max_length=48",
        "train.eval_steps=2",
    ),
    *("train.save_steps=2", "train.learning_rate=1e-2", "train.warmup_steps=0", "stream.device=cpu"),
    *("stream.host_threads=1", "stream.micro_batch_size=1", 'data.val_paths=["val.jsonl"]', "lora.r=4"),
    *('train.output_dir="run"', "lora.lora_dropout=0.1"),
]
#: Of a base that is quantized already, or in part.
AS_IT_IS = ["model.quantize=none", "train.max_steps=2"]
ATTENTION = 'lora.target_modules=["q_proj", "k_proj", "v_proj", "o_proj"]'


@pytest.fixture(autouse=True)
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with data, and a base whose codes are most of its layers."""
    monkeypatch.chdir(tmp_path)
    tiny_llama.write(tmp_path / "llama", dtype=BF16, hidden_size=64, intermediate_size=128)
    for name, numbers in (("train", range(60)), ("val", range(60, 70))):
        lines = [json.dumps({"messages": chat(number)}) for number in numbers]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))


def command(*settings: str, model: str = "llama", more: tuple[str, ...] = ()) -> list[str]:
    return ["train", CONFIG, "--model", model, "--data", "train.jsonl", *sets(*SETTINGS, *settings), *more]


def losses(run: str, *names: str) -> list[Any]:
    found = logged(Path(run))
    return [line[name] for line in found for name in names or ("loss", "val_loss") if name in line]


def adapters(run: str) -> dict[str, torch.Tensor]:
    return load_file(Path(run, "adapters", "adapter_model.safetensors"))


def is_merged(base: Any) -> None:
    """Check that export makes the same model as peft of the run's masters and its ``base``."""
    assert main(["export", "run", "--to", "merged", "--merge", "--dtype", "float32"]) == 0
    found: Any = transformers.AutoModelForCausalLM.from_pretrained("merged")
    assert getattr(found.config, "quantization_config", None) is None
    assert main(["export", "run", "--to", "exact", "--dtype", "float32"]) == 0
    merge: Any = peft.PeftModel.from_pretrained(base, "exact").merge_and_unload
    expected, weights = merge().state_dict(), found.state_dict()
    assert weights.keys() == expected.keys()
    for name, value in weights.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("word", ["nf4", "int8"])
def test_a_run_learns_resumes_to_the_bit_and_is_exported(
    word: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    quantize = f"model.quantize={word}"
    assert main(command(quantize, 'train.output_dir="whole"')) == 0
    plain: Any = transformers.AutoModelForCausalLM.from_pretrained("llama")
    total = sum(param.numel() for param in plain.parameters())
    trained = sum(value.numel() for value in adapters("whole").values())
    assert f"llama: {total + trained:,} parameters, {trained:,} of them trained" in capsys.readouterr().out
    validations = losses("whole", "val_loss")
    assert validations[-1] < validations[0] - 0.1
    with monkeypatch.context() as patch:
        stop_after(3, patch)
        assert main(command(quantize)) == 0
    # what is saved are the adapters
    assert all(
        "lora_" in name for name in Manifest.read(Path("run/checkpoint-3/streamer")).files_of("weights")
    )
    assert main(command(quantize, more=("--resume",))) == 0
    assert losses("run", "loss", "grad_norm") == losses("whole", "loss", "grad_norm")
    assert losses("run", "val_loss")[-1] == validations[-1]
    expected = adapters("whole")
    assert all(torch.equal(value, expected[name]) for name, value in adapters("run").items())
    capsys.readouterr()
    is_merged(plain.float())
    assert f"trained on a base quantized to {word}" in capsys.readouterr().out


def test_adapters_are_written_where_there_are_no_checkpoints() -> None:
    assert main(command('train.output_dir="whole"')) == 0
    assert main(command("train.save_strategy=no")) == 0
    assert not [*Path("run").glob("checkpoint-*")]
    expected = adapters("whole")
    assert all(torch.equal(value, expected[name]) for name, value in adapters("run").items())
    adapted: Any = peft.AutoPeftModelForCausalLM.from_pretrained("run/adapters")
    assert any("lora_A" in name for name, _ in adapted.named_parameters())


def mixture() -> Any:
    tiny_llama.tokenizer().save_pretrained("mixture")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_local_experts": 4}
    plain = hugging_face("mixtral", vocab_size=300, max_position_embeddings=64, **sizes).to(BF16)
    plain.save_pretrained("mixture")
    return plain


def test_a_mixture_is_quantized_trained_and_merged() -> None:
    plain = mixture()
    assert main(command("train.max_steps=2", ATTENTION, model="mixture")) == 0
    is_merged(plain.float())


@pytest.mark.parametrize("form", ["4 bits", "4 bits of a mixture", "fp8 of a mixture"])
def test_a_folder_that_is_quantized_already_is_trained_as_it_is(
    form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_llama.tokenizer().save_pretrained("quantized")
    if form == "4 bits":
        four = transformers.BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=BF16
        )
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            "llama", quantization_config=four, dtype=BF16, device_map={"": "cpu"}
        )
        model.save_pretrained("quantized")
        plain = model.dequantize(dtype=BF16)
        line = refused(capsys, *command(model="quantized"))
        assert "quantized: its weights are quantized already: " in line and "model.quantize=none" in line
    elif form == "4 bits of a mixture":
        if not hasattr(transformers.core_model_loading, "Interleave"):
            pytest.skip("what writes the folder is for a later release of transformers")
        from tests.pretrained.test_experts_in_4_bits import in_4_bits

        mixture()
        in_4_bits(
            Path("mixture"),
            Path("quantized"),
            values=Path("values"),
            quant_type="nf4",
            compress_statistics=True,
        )
        plain = transformers.AutoModelForCausalLM.from_pretrained("values", dtype=BF16)
    else:
        mixture()
        stored_in_fp8(Path("mixture"), Path("quantized"), block=32, of=("experts", "proj"))
        plain = transformers.AutoModelForCausalLM.from_pretrained(
            "quantized", dtype=BF16, quantization_config=transformers.FineGrainedFP8Config(dequantize=True)
        )
    assert main(command(*AS_IT_IS, ATTENTION, model="quantized")) == 0
    assert losses("run", "val_loss")[-1] < losses("run", "val_loss")[0]
    capsys.readouterr()
    is_merged(plain.float())
    assert "quantized to" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ([], "model.quantize is for the frozen base of [lora]: set lora.r"),
        (
            ["model.quantize=none", 'model.quantize_skip=["down"]'],
            "set model.quantize, or leave model.quantize_skip out",
        ),
        (['model.quantize_skip=["dwn"]'], "model.quantize_skip='dwn' matches the name of no linear module"),
        (["model.quantize=int4"], 'model.quantize must be "none", "int8" or "nf4", not "int4"'),
        (["lora.use_dora=true"], "[lora] use_dora needs the base's values before they are read"),
        (
            ["lora.init_lora_weights=pissa"],
            "[lora] init_lora_weights: adapters start from peft's default values",
        ),
        (['lora.target_modules=["lm_head"]'], "[train]: an adapter on the head would not be trained"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bases_that_cannot_be_trained_are_refused_in_one_line(
    settings: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = command(*settings)
    if not settings:
        Path("no-lora.toml").write_text(Path(CONFIG).read_text().partition("[lora]")[0])
        arguments = ["train", "no-lora.toml", "--model", "llama", "--data", "train.jsonl"]
    assert expected in refused(capsys, *arguments)
    assert not Path("run").exists()
