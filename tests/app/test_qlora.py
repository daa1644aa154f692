"""`streamer train configs/qlora.toml`: adapters beside a quantized base, as a user runs it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("peft", reason="peft is not installed")

import peft
import torch
import transformers
from safetensors.torch import save_file

from streamer.app.cli import main
from streamer.app.config import load_config
from streamer.app.plan.command import check_memory, figures, remedy_line
from streamer.app.plan.planning import PROCESS_BYTES, RunPlan, plan_run
from streamer.app.plan.variants import find_remedies
from streamer.checkpoint.manifest import Manifest
from streamer.planner.machine import MACHINES
from tests import tiny_llama
from tests.app.common import HOME, refused, sets
from tests.app.test_train_pretrained import SHORT, losses, place
from tests.model_folders import rewritten
from tests.pretrained.test_experts_in_4_bits import in_4_bits
from tests.pretrained.test_quantize import stored_in_fp8

__all__ = ["place"]
pytestmark = pytest.mark.filterwarnings("ignore")  # the libraries' own
CONFIG = str(HOME / "configs" / "qlora.toml")
SETTINGS = [*SHORT, "lora.rank=4", "lora.dropout=0.1"]
RUN = Path("runs/qlora")
BF16 = torch.bfloat16
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


@pytest.fixture(autouse=True)
def wide(place: Path) -> None:
    """A base whose codes are most of its layers."""
    tiny_llama.write(place / "llama", dtype=BF16, hidden_size=64, intermediate_size=128)


def command(*more: str, model: str = "llama", settings: list[str] = SETTINGS) -> list[str]:
    return ["train", CONFIG, "--model", model, "--data", "data.jsonl", *sets(*settings), *more]


def adapters(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "adapter_model.safetensors")


def merged() -> Any:
    """What export makes of the run, in fp32."""
    assert main(["export", str(RUN), "--to", "merged", "--merge", "--dtype", "float32"]) == 0
    return transformers.AutoModelForCausalLM.from_pretrained("merged")


def is_merged(model: Any, base: Any) -> None:
    """Check that peft comes to the same ``model`` from the masters of the run's adapters and its ``base``."""
    assert getattr(model.config, "quantization_config", None) is None
    assert main(["export", str(RUN), "--to", "exact", "--dtype", "float32"]) == 0
    merge: Any = peft.PeftModel.from_pretrained(base, "exact").merge_and_unload
    expected = merge().state_dict()
    found = model.state_dict()
    assert found.keys() == expected.keys()
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("word", ["nf4", "int8"])
def test_a_run_learns_resumes_and_is_exported(
    word: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = [*SETTINGS, f"model.quantize={word}"]
    assert main(command(settings=settings)) == 0
    told = capsys.readouterr().out
    plain = transformers.AutoModelForCausalLM.from_pretrained("llama")
    total = sum(param.numel() for param in plain.parameters())
    trained = sum(value.numel() for value in adapters(RUN / "adapters").values())
    assert f"qlora: {total + trained:,} parameters ({trained:,} of them trained)" in told
    before = losses(RUN)
    assert min(before[1:]) < before[0]
    # what is saved are the adapters, and a run goes on from them to the bit
    saved = RUN / "checkpoints" / "step-0000003"
    assert all("lora_" in name for name in Manifest.read(saved).files_of("weights"))
    assert main(command("--resume", str(saved), settings=settings)) == 0
    assert losses(RUN) == before
    for name, value in adapters(RUN / "adapters").items():
        assert torch.equal(value, adapters(RUN / "adapters-2")[name])
    capsys.readouterr()
    model = merged()
    assert f"trained on a base quantized to {word}: its adapters are added" in capsys.readouterr().out
    is_merged(model, plain.float())


OF_MIXTURE = [*SETTINGS, "run.steps=2", f"lora.targets={json.dumps(ATTENTION)}"]


def mixture() -> Any:
    tiny_llama.tokenizer().save_pretrained("mixture")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
    made = transformers.MixtralConfig(vocab_size=300, num_key_value_heads=2, num_local_experts=4, **sizes)
    plain = transformers.MixtralForCausalLM(made).to(BF16)
    plain.save_pretrained("mixture")
    return plain


def test_a_mixture_is_planned_trained_and_exported(place: Path) -> None:
    plain, settings = mixture(), OF_MIXTURE
    plan, exact = (
        plan_run(load_config(CONFIG, [*each, 'model.pretrained="mixture"']), MACHINES["rtx-4090"])
        for each in (settings, [*settings, "model.quantize=none"])
    )
    assert (plan.parameters, plan.flops_per_token) == (exact.parameters, exact.flops_per_token)
    saved = exact.step.host_bytes["weights"] - plan.step.host_bytes["weights"]
    elements = 2 * (4 * 64 * 64 + 4 * 3 * 64 * 96)
    assert 1.2 * elements < saved < 1.5 * elements
    assert main(command(model="mixture", settings=settings)) == 0
    is_merged(merged(), plain.float())


def test_a_mixture_in_fp8_is_trained_as_it_is(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mixture()
    stored_in_fp8(Path("mixture"), Path("fp8"), block=32, of=("experts", "proj"))
    tiny_llama.tokenizer().save_pretrained("fp8")
    plain = transformers.AutoModelForCausalLM.from_pretrained(
        "fp8", dtype=BF16, quantization_config=transformers.FineGrainedFP8Config(dequantize=True)
    )
    assert main(command(model="fp8", settings=[*OF_MIXTURE, "model.quantize=none"])) == 0
    capsys.readouterr()
    model = merged()
    assert "quantized" not in capsys.readouterr().out
    is_merged(model, plain.float())
    scale = "model.layers.1.block_sparse_moe.experts.2.w2.weight_scale_inv"
    rewritten(Path("fp8/model.safetensors"), lambda held: held[scale].mul_(2))
    told = refused(capsys, "export", str(RUN), "--to", "again", "--merge")
    assert "layers.1.mlp.experts.down_proj' has other values than in training" in told


@pytest.mark.parametrize("lie", ["one by one", "whole"])
def test_a_mixture_in_4_bits_is_trained_as_it_is(
    lie: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With scales in 8 bits, which are no whole blocks of each expert. The plan has fewer bytes."""
    scale = "model.layers.1.block_sparse_moe.experts.2.w2.weight.nested_absmax"
    made = mixture()
    if lie == "whole":
        save_file(made.state_dict(), "mixture/model.safetensors", metadata={"format": "pt"})
        scale = "model.layers.1.mlp.experts.down_proj.nested_absmax"
    of_all = {"quant_type": "nf4", "compress_statistics": True}
    in_4_bits(Path("mixture"), Path("four"), values=Path("values"), **of_all)
    tiny_llama.tokenizer().save_pretrained("four")
    settings = [*OF_MIXTURE, "model.quantize=none"]
    plan, exact = (
        plan_run(load_config(CONFIG, [*settings, f'model.pretrained="{folder}"']), MACHINES["rtx-4090"])
        for folder in ("four", "values")
    )
    assert (plan.parameters, plan.flops_per_token) == (exact.parameters, exact.flops_per_token)
    saved = exact.step.host_bytes["weights"] - plan.step.host_bytes["weights"]
    elements = 2 * 4 * 3 * 64 * 96
    scales = 4 if lie == "one by one" else 1
    assert (1.5 - scales / 64) * elements - 12_000 < saved < (1.5 - scales / 64) * elements
    assert main(command(model="four", settings=settings)) == 0
    plain = transformers.AutoModelForCausalLM.from_pretrained("values", dtype=BF16)
    capsys.readouterr()
    model = merged()
    assert "quantized" not in capsys.readouterr().out
    is_merged(model, plain.float())
    rewritten(Path("four/model.safetensors"), lambda held: held[scale].mul_(2))
    told = refused(capsys, "export", str(RUN), "--to", "again", "--merge")
    assert "layers.1.mlp.experts.down_proj' has other values than in training" in told


def test_a_folder_in_4_bits_is_trained_as_it_is(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    four = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=BF16
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(
        "llama", quantization_config=four, dtype=BF16, device_map={"": "cpu"}
    )
    tiny_llama.tokenizer().save_pretrained("four")
    model.save_pretrained("four")
    told = refused(capsys, *command(model="four"))
    assert "four: its weights are quantized already: " in told and "model.quantize=none" in told
    none = [*SETTINGS, "model.quantize=none"]
    assert main(command(model="four", settings=none)) == 0
    assert min(losses(RUN)[1:]) < losses(RUN)[0]
    is_merged(merged(), model.dequantize(dtype=BF16).float())
    # only the files tell how they are quantized
    Path("four/model.safetensors").unlink()
    told = refused(capsys, "plan", CONFIG, "--model", "four", *sets(*none))
    assert "four: its weights are quantized, and only its safetensors files tell how" in told


def test_a_plan_counts_what_a_run_holds(place: Path) -> None:
    def plan_of(word: str, *more: str) -> RunPlan:
        settings = [*SETTINGS, f"model.quantize={word}", 'model.pretrained="llama"', *more]
        return plan_run(load_config(CONFIG, settings), MACHINES["rtx-4090"])

    exact, skipped = plan_of("none"), plan_of("nf4", 'model.quantize_skip=["mlp"]')
    quantized = {word: plan_of(word) for word in ("nf4", "int8")}
    # two layers, each of four projections of 64 x 64 and three of 64 x 128: a byte or half of one in place
    # of two, and for 4 bits a kilobyte of tables for each
    elements = 2 * (4 * 64 * 64 + 3 * 64 * 128)
    for word, least, most in (("nf4", 1.2, 1.5), ("int8", 0.9, 1.0)):
        plan = quantized[word]
        assert (plan.parameters, plan.flops_per_token) == (exact.parameters, exact.flops_per_token)
        saved = exact.step.host_bytes["weights"] - plan.step.host_bytes["weights"]
        assert least * elements < saved < most * elements
    weights = [plan.step.host_bytes["weights"] for plan in (quantized["nf4"], skipped, exact)]
    assert weights == sorted(set(weights))
    # what is not downloaded yet is planned alike
    Path("llama/model.safetensors").unlink()
    for word, plan in quantized.items():
        assert figures(plan_of(word)) == figures(plan)


def test_quantization_is_proposed_where_nothing_exact_fits(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(
        vocab_size=1000, num_attention_heads=16, num_key_value_heads=8, tie_word_embeddings=False, **sizes
    )
    config.architectures = ["LlamaForCausalLM"]
    config.dtype = BF16
    config.save_pretrained("large")
    settings = ["model.quantize=none", 'model.pretrained="large"', "data.batch_size=1"]
    given = load_config(CONFIG, settings)

    def proposed(megabytes: int) -> dict[str, Any]:
        """With so much beside what Python takes. In bf16 the layers are 63 MB."""
        machine = replace(MACHINES["rtx-4090"], host_bytes=PROCESS_BYTES + megabytes * 10**6)
        plan = plan_run(given, machine)
        assert not plan.fits
        found = find_remedies(plan, lambda changed: plan_run(changed, machine))
        line = remedy_line("it", found, plan)
        assert ("(the frozen base is rounded)" in line) is found.plan.fits
        return dict(found.changes)

    assert proposed(60)["model.quantize"] == "int8"
    assert proposed(40)["model.quantize"] == "nf4"
    assert proposed(15)["model.quantize"] == "nf4", "it helps, and is not enough"


def test_mistakes_end_in_one_line(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for settings, message in (
        (["lora.rank=0", "lora.dropout=0.0", "lora.alpha=1.0"], "model.quantize is for a frozen base"),
        (["model.quantize=none", 'model.quantize_skip=["down"]'], "without model.quantize does nothing"),
        (['model.quantize_skip=["dwn"]'], "skip='dwn' is found in the name of no linear module"),
        (["model.quantize=int4"], 'model.quantize must be "none", "int8" or "nf4", not "int4"'),
    ):
        assert message in refused(capsys, *command(settings=[*SETTINGS, *settings]))
    assert not (place / "runs").exists()


def test_what_a_run_needs_is_seen_before(place: Path) -> None:
    config = load_config(CONFIG, [*SETTINGS, 'model.pretrained="llama"'])
    assert json.dumps(config.model.quantize) == '"nf4"'
    assert check_memory(config) is None
