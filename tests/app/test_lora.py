"""`streamer train` with ``[lora]``: adapters of a pretrained model, as a user runs it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("peft", reason="peft is not installed")

import peft
import torch
import transformers

from streamer.app.cli import main
from streamer.app.config import load_config
from streamer.app.data.load import load_tokenizer, load_tokens
from streamer.app.data.rows import Rows
from streamer.app.plan.planning import plan_run
from streamer.checkpoint.manifest import Manifest
from streamer.planner.machine import MACHINES
from tests import tiny_llama
from tests.app.common import least_of, refused, sets
from tests.app.test_train_pretrained import CONFIG, SHORT, command, losses, place, prepare

__all__ = ["place"]
LORA = [*SHORT, "lora.rank=4"]
pytestmark = pytest.mark.filterwarnings("ignore")  # the libraries' own
RUN = Path("runs/hf-finetune")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A place with a finished run, and a copy of it."""
    folder, copy = (tmp_path_factory.mktemp(name) for name in ("place", "copy"))
    with pytest.MonkeyPatch.context() as monkeypatch:
        prepare(folder, monkeypatch)
        assert main(command(settings=LORA)) == 0
    return folder, shutil.copytree(folder, copy, dirs_exist_ok=True)


@pytest.fixture
def run(trained: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """A finished run, where it was trained: it knows the whole path of its base."""
    place, copy = trained
    shutil.rmtree(place)
    shutil.copytree(copy, place)
    monkeypatch.chdir(place)
    return place / RUN


def adapted(folder: Path) -> torch.nn.Module:
    model: torch.nn.Module = peft.AutoPeftModelForCausalLM.from_pretrained(folder)
    return model.eval()


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return dict(transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict())


def test_adapters_are_trained_and_written_as_peft_reads_them(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = {path: path.read_bytes() for path in (place / "llama").iterdir()}
    assert main(command(settings=LORA)) == 0
    out = capsys.readouterr().out
    assert " of them trained), of which" in out and "The adapters, " in out
    assert losses(RUN)[-1] < losses(RUN)[0]
    assert {path: path.read_bytes() for path in base} == base
    assert not (RUN / "model").exists()
    model, before = adapted(RUN / "adapters"), weights_of(place / "llama")
    held = model.base_model.model.state_dict()  # type: ignore[union-attr, operator]
    plain = {name.replace(".base_layer", ""): value for name, value in held.items()}
    assert all(torch.equal(plain[name], value) for name, value in before.items())
    # the loss that validation has found, by the library's own model
    data = load_tokens(("data.jsonl",), load_tokenizer("llama"), val_fraction=0.05)
    ((tokens, targets, positions),) = Rows(data, 16, 16, True, 0).val_batches(1)
    with torch.no_grad():
        logits = model(tokens, position_ids=positions, use_cache=False).logits.float()
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    found = json.loads((RUN / "summary.json").read_text())["last_val_loss"]
    assert loss.item() == pytest.approx(found, rel=2e-3)


def test_it_is_what_peft_trains(place: Path) -> None:
    """In fp32: PyTorch's own AdamW on the library's own model, from the same first values."""
    tiny_llama.write(place / "fp32", dtype=torch.float32)
    settings = [*LORA, "run.steps=3", "optimizer.warmup_steps=0", "optimizer.min_lr=1e-2", "run.eval_every=1"]
    # with another seed a gradient is so small that Adam makes a step of its rounding
    settings += ["run.seed=1"]
    batches: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
    first: dict[str, torch.Tensor] = {}
    with pytest.MonkeyPatch.context() as patch:
        from streamer.app import train as module
        from streamer.app.run import loop

        step_on, build = loop.step_on, module.build_model

        def noting(*given):  # type: ignore[no-untyped-def]
            batches.append(given[4])
            return step_on(*given)

        def built(config, **options):  # type: ignore[no-untyped-def]
            model = build(config, **options)
            first.update({name: p.detach().clone() for name, p in model.named_parameters() if "lora" in name})
            return model

        patch.setattr(loop, "step_on", noting)
        patch.setattr(module, "build_model", built)
        assert main(command(model="fp32", settings=settings)) == 0
    model = transformers.AutoModelForCausalLM.from_pretrained("fp32")
    options = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.inject_adapter_in_model(options, model).train()
    adapters = {name: param for name, param in model.named_parameters() if param.requires_grad}
    assert adapters.keys() == first.keys()
    with torch.no_grad():
        for name, param in adapters.items():
            param.copy_(first[name])
    optimizer = torch.optim.AdamW(adapters.values(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    expected = []
    for tokens, targets, positions in batches:
        logits = model(tokens, position_ids=positions, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(adapters.values(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    assert losses(RUN) == pytest.approx(expected, rel=1e-5)
    trained = dict(adapted(RUN / "adapters").named_parameters())
    for name, param in adapters.items():
        torch.testing.assert_close(trained[f"base_model.model.{name}"], param, rtol=1e-4, atol=1e-6)


def test_checkpoints_hold_the_adapters_alone_and_runs_go_on_from_them(run: Path) -> None:
    saved = run / "checkpoints" / "step-0000003"
    assert all("lora_" in name for name in Manifest.read(saved).files_of("weights"))
    before, weights = losses(run), (run / "adapters" / "adapter_model.safetensors").read_bytes()
    assert main(command("--resume", str(saved), settings=LORA)) == 0
    assert losses(run) == before
    assert (run / "adapters-2" / "adapter_model.safetensors").read_bytes() == weights


def test_a_base_on_disk_gives_the_same_adapters(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is read where it lies, and planned so."""
    wide = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 8}
    tiny_llama.write(place / "deep", dtype=torch.bfloat16, **wide)
    Path("scratch").mkdir()
    few = [*LORA, "run.steps=3"]
    assert main(command(model="deep", settings=few)) == 0
    on_disk = [*few, "memory.disk='scratch'", "run.name='on-disk'"]
    capsys.readouterr()
    needs = refused(capsys, *command(model="deep", settings=[*on_disk, "memory.host='1B'"]))
    least = f"memory.host='{least_of(needs)}B'"
    assert main(command(model="deep", settings=[*on_disk, least])) == 0
    of_run, of_disk = (
        Path("runs", name, "adapters", "adapter_model.safetensors").read_bytes()
        for name in ("hf-finetune", "on-disk")
    )
    assert of_disk == of_run
    held = json.loads(Path("runs/on-disk/summary.json").read_text())
    assert held["busy_seconds"]["disk_read"] > 0
    plan = plan_run(load_config(CONFIG, [*on_disk, least, "model.pretrained='deep'"]), MACHINES["rtx-4090"])
    assert plan.fits and plan.disk_moved[0] > 0
    # the frozen weights lie in files that are there
    assert not plan.step.disk_bytes.get("weights")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_merged_it_is_the_model_with_its_adapters(run: Path, dtype: str) -> None:
    assert main(["export", str(run), "--to", "merged", "--merge", "--dtype", dtype]) == 0
    # of fp32 masters
    assert main(["export", str(run), "--to", "exact", "--dtype", "float32"]) == 0
    model = adapted(Path("exact")).float()
    merge: Callable[[], torch.nn.Module] = model.merge_and_unload  # type: ignore[assignment]
    expected = {name: value.to(getattr(torch, dtype)) for name, value in merge().state_dict().items()}
    found = weights_of(Path("merged"))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype
        torch.testing.assert_close(found[name], value, rtol=2**-8 if dtype == "bfloat16" else 1e-6, atol=1e-7)
    changed = [
        name for name, value in weights_of(Path("llama")).items() if not torch.equal(value, found[name])
    ]
    assert len(changed) == 2 * 7, "of two layers, each with seven projections"


def test_exported_as_they_are(run: Path) -> None:
    assert main(["export", str(run), "--to", "exported"]) == 0
    of_run = adapted(run / "adapters").state_dict()
    assert all(
        torch.equal(value, of_run[name]) for name, value in adapted(Path("exported")).state_dict().items()
    )


@pytest.mark.parametrize("adapts", [True, False])
def test_what_weights_are_used_with_is_beside_them(place: Path, adapts: bool) -> None:
    """Tokenizer, template of chats, how to generate, licence: in the run's folder and in each export."""
    drawn = json.dumps({"do_sample": True, "temperature": 0.3, "top_k": 7})
    Path("llama/generation_config.json").write_text(drawn)
    Path("llama/LICENSE.txt").write_text("as you like")
    assert main(command(settings=LORA if adapts else SHORT)) == 0
    folders = [RUN / "adapters" if adapts else RUN / "model", Path("exported")]
    assert main(["export", str(RUN), "--to", "exported"]) == 0
    if adapts:
        folders.append(Path("merged"))
        assert main(["export", str(RUN), "--to", "merged", "--merge"]) == 0
    for folder in folders:
        words = transformers.AutoTokenizer.from_pretrained(folder)
        assert words.chat_template == tiny_llama.CHAT
        assert words("what follows?") == transformers.AutoTokenizer.from_pretrained("llama")("what follows?")
        assert transformers.GenerationConfig.from_pretrained(folder).top_k == 7
        assert (folder / "LICENSE.txt").read_text() == "as you like"


def test_another_base_is_refused(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained("llama")
    with torch.no_grad():
        model.lm_head.weight[-1, -1] += 1
    model.save_pretrained("llama")
    capsys.readouterr()
    assert "other values than in training" in refused(capsys, "export", str(run), "--to", "merged", "--merge")
    assert not Path("merged").exists()
    resume = "--resume", str(run / "checkpoints" / "step-0000003")
    assert "are not what they were when it was saved" in refused(capsys, *command(*resume, settings=LORA))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["lora.targets='q_prj'"], "[lora]: Target modules q_prj not found"),
        (["lora.targets=['q_prj']"], "[lora]: Target modules {'q_prj'} not found"),
        (["lora.rank=0", "lora.alpha=2"], "[lora] without lora.rank does nothing: set it"),
        (["lora.dropout=1.0"], "lora.dropout must be a number in [0, 1), not 1.0"),
        (["lora.r=4"], "unknown key 'r' in [lora]"),
    ],
)
def test_mistakes_end_in_one_line(
    place: Path, settings: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refused(capsys, *command(settings=[*LORA, *settings]))
    assert not (place / "runs").exists()


def test_adapters_are_of_a_pretrained_model(capsys: pytest.CaptureFixture[str]) -> None:
    error = refused(capsys, "plan", str(Path(CONFIG).parent / "gpt2-demo.toml"), *sets("lora.rank=4"))
    assert "[lora] adapts a pretrained model: give its folder as model.pretrained (--model)" in error


def test_experts_are_refused_before_anything_is_loaded(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_llama.tokenizer().save_pretrained("mixtral")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.MixtralConfig(vocab_size=300, num_key_value_heads=2, num_local_experts=4, **sizes)
    transformers.MixtralForCausalLM(config).save_pretrained("mixtral")
    told = refused(capsys, *command(model="mixtral", settings=LORA))
    assert "[lora] would adapt model.layers.0.mlp.gate and 5 more, which peft writes in each forward" in told
    targets = [*LORA, "run.steps=2", 'lora.targets=["q_proj", "k_proj", "v_proj", "o_proj"]']
    assert main(command(model="mixtral", settings=targets)) == 0
