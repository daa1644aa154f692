"""`streamer export`: others load what was trained."""

from __future__ import annotations

import json
import re
import shutil
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

import streamer
from bench.architectures import ALL
from models.gpt2 import GPT
from streamer.app import export
from streamer.app.cli import main
from streamer.app.config import load_config
from streamer.app.run.build import build_model, build_optimizer
from streamer.checkpoint import tensors
from streamer.checkpoint.manifest import prune
from streamer.checkpoint.tensors import Piece
from tests.reference import VOCAB, batch

CONFIG = """
[run]
name = "tiny"
steps = 2
[model]
factory = "{factory}"
args = {args}
[data]
context = 16
batch_size = 4
[stream]
layers = "{layers}"
device = "cpu"
{dtype}
[optimizer]
lr = 1e-2
"""
SIZES = f"vocab_size = {VOCAB}, block_size = 16, n_layer = 3, n_head = 2, n_embd = 16"


def hugging_face(name: str) -> nn.Module:
    return ALL[name].build()


class Odd(GPT):
    """With a third name for the tied weight, buffers of several kinds, and a weight that is not trained."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.again = nn.Linear(1, 1, bias=False)
        self.again.weight = self.lm_head.weight
        self.register_buffer("mean", torch.full((3,), 1 / 3))
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("mask", torch.ones(4), persistent=False)
        self.transformer.wpe.weight.requires_grad_(False)


class Twice(GPT):
    """Its layers have another name, under which they may be streamed."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.blocks = self.transformer.h


def seeing(**options: Any) -> nn.Module:
    """Wants to see a value."""
    model = GPT(**options)
    assert model.lm_head.weight[0, 0].item() < 9
    return model


def trained(
    run: Path, factory: str, args: str = f"{{ {SIZES} }}", layers: str = "transformer.h", dtype: str = ""
) -> nn.Module:
    """The unwrapped model of a run that has left two checkpoints."""
    run.mkdir()
    stream = f'dtype = "{dtype}"' if dtype else ""
    text = CONFIG.format(factory=factory, args=args, layers=layers, dtype=stream)
    (run / "config.toml").write_text(text)
    config = load_config(run / "config.toml")
    torch.manual_seed(0)
    model = build_model(config)
    optimizer = build_optimizer(config.optimizer, model)
    for step in range(4):
        tokens = batch(step)
        result: Any = model(tokens[:, :-1])
        logits = getattr(result, "logits", result)
        F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 2:
            streamer.save(model, optimizer, run / "checkpoints" / f"step-{step + 1:07d}", step=step + 1)
    return streamer.unwrap(model).eval()


def exported(run: Path, out: Path, dtype: str | None = None, *options: str) -> Path:
    """``out``, into which the command has exported."""
    chosen = ["--dtype", dtype] if dtype else []
    assert main(["export", str(run), "--to", str(out), *chosen, *options]) == 0
    return out


def load_as_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the code of README.txt leaves behind, run in the folder."""
    code = re.findall(r"^    (.*)$", (folder / "README.txt").read_text().partition("the dot:")[2], re.M)
    assert not any("torch.load(" in line or "strict" in line for line in code)
    left: dict[str, Any] = {}
    with monkeypatch.context() as patched:
        patched.chdir(folder)
        exec("\n".join(code), left)
    return left


def in_files(folder: Path) -> dict[str, torch.Tensor]:
    loaded: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        loaded |= load_file(path)
        with safe_open(path, "pt") as file:
            assert file.metadata() == {"format": "pt"}
    return loaded


def assert_equal(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert sorted(actual) == sorted(expected)
    for name, value in expected.items():
        assert actual[name].dtype == value.dtype, name
        assert torch.equal(actual[name], value), name


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, nn.Module]:
    """A run and its unwrapped model."""
    run = tmp_path_factory.mktemp("odd") / "run"
    return run, trained(run, "tests.app.test_export:Odd")


@pytest.mark.parametrize("dtype", ["", "bfloat16"])
@pytest.mark.parametrize(
    ("name", "layers"), [("gpt2", "transformer.h"), ("gemma", "model.layers"), ("llama", "model.layers")]
)
def test_hugging_face_loads_its_models(
    name: str, layers: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    factory, args = "tests.app.test_export:hugging_face", f'{{ name = "{name}" }}'
    plain: Any = trained(tmp_path / "run", factory, args, layers, dtype)
    assert (plain.get_input_embeddings().weight is plain.lm_head.weight) == (name != "llama"), "tied"
    tokens = batch(9)
    for option in ("float32", None):
        out = exported(tmp_path / "run", tmp_path / str(option), option)
        written = getattr(torch, option or dtype or "float32")
        # not to(), which rounds the rotary frequencies too
        for param in plain.parameters():
            param.data = param.data.to(written)
        told = load_as_told(out, monkeypatch)["model"]
        for model in (AutoModelForCausalLM.from_pretrained(out), told):
            assert type(model) is type(plain)
            assert model.dtype == written
            assert torch.equal(model(tokens).logits, plain(tokens).logits)
        assert json.loads((out / "config.json").read_text())["architectures"] == [type(plain).__name__]


ODD_TIED = {"lm_head.weight", "again.weight"}
PLAIN = [
    ("models.gpt2:GPT", f"{{ {SIZES} }}", "float32", {"lm_head.weight"}),
    ("models.gpt2:GPT", f"{{ {SIZES}, tied = false }}", "bfloat16", set()),
    ("tests.app.test_export:Odd", f"{{ {SIZES} }}", "bfloat16", ODD_TIED),
]


@pytest.mark.parametrize(("factory", "args", "streamed", "tied"), PLAIN)
def test_plain_pytorch_loads_as_the_folder_tells(
    factory: str, args: str, streamed: str, tied: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = trained(tmp_path / "run", factory, args, dtype=streamed)
    masters = plain.state_dict()
    for dtype in ("float32", "bfloat16", "float16", None):
        out = exported(tmp_path / "run", tmp_path / str(dtype), dtype)
        written = getattr(torch, dtype or streamed)
        expected = {
            name: value if name in ("mean", "count") else value.to(written) for name, value in masters.items()
        }
        assert_equal(in_files(out), {name: value for name, value in expected.items() if name not in tied})
        card = json.loads((out / "config.json").read_text())
        assert card["factory"] == factory
        assert card["args"] == load_config(tmp_path / "run" / "config.toml").model.args
        assert card["tied"] == dict.fromkeys(sorted(tied, reverse=True), "transformer.wte.weight")
        loaded = load_as_told(out, monkeypatch)["model"].state_dict()
        assert_equal(loaded, {name: value.to(masters[name].dtype) for name, value in expected.items()})
    # what was trained is not what it is rounded to, or this has shown nothing
    assert not torch.equal(
        masters["transformer.wte.weight"], masters["transformer.wte.weight"].bfloat16().float()
    )


def test_layers_that_were_streamed_under_their_second_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = trained(tmp_path / "run", "tests.app.test_export:Twice", layers="blocks")
    out = exported(tmp_path / "run", tmp_path / "out")
    assert_equal(in_files(out), dict(plain.named_parameters()))
    assert_equal(load_as_told(out, monkeypatch)["model"].state_dict(), plain.state_dict())


@pytest.mark.parametrize("size", [1000, 4116, 60_000])
def test_shards_are_those_of_hugging_face(
    size: int, odd: tuple[Path, nn.Module], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, plain = odd
    out = exported(run, tmp_path / "out", None, "--shard-size", f"{size}B")
    wanted = {name: value for name, value in plain.state_dict().items() if name not in ODD_TIED}
    pattern = "model{suffix}.safetensors"
    split = split_torch_state_dict_into_shards(wanted, filename_pattern=pattern, max_shard_size=size)
    files = {path.name for path in out.iterdir()} - {"config.json", "README.txt"}
    if split.is_sharded:
        index = json.loads((out / "model.safetensors.index.json").read_text())
        assert index == {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        files.remove("model.safetensors.index.json")
    assert files == set(split.filename_to_tensors)
    for name, names in split.filename_to_tensors.items():
        assert set(load_file(out / name)) == set(names)
    assert_equal(load_as_told(out, monkeypatch)["model"].state_dict(), plain.state_dict())


def test_the_latest_complete_checkpoint_is_taken_or_the_one_that_is_named(
    odd: tuple[Path, nn.Module], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, plain = Path(shutil.copytree(odd[0], tmp_path / "run")), odd[1]
    latest = run / "checkpoints" / "step-0000004"
    shutil.copytree(latest, run / "checkpoints" / ".step-0000006.writing-1")
    shutil.copytree(latest, broken := run / "checkpoints" / "step-0000008")
    (broken / "manifest.json").unlink()
    taken = {}
    for path in (run, latest, run / "checkpoints" / "step-0000002"):
        out = exported(path, tmp_path / "out" / path.name)
        taken[path.name] = in_files(out)
        assert json.loads((out / "config.json").read_text())["step"] == (2 if path.name[-1] == "2" else 4)
    name = "transformer.h.1.mlp.c_fc.weight"
    assert torch.equal(taken["run"][name], plain.state_dict()[name])
    assert torch.equal(taken["step-0000004"][name], plain.state_dict()[name])
    assert not torch.equal(taken["step-0000002"][name], plain.state_dict()[name])
    printed = capsys.readouterr().out
    assert "step-0000002: step 2, " in printed
    assert "float32 weights" in printed


@pytest.mark.parametrize("case", ["no config", "elsewhere", "wants values"])
def test_weights_come_out_without_a_model(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = path = tmp_path / "run"
    factory = "seeing" if case == "wants values" else "Odd"
    plain = trained(run, f"tests.app.test_export:{factory}")
    if case == "no config":
        (run / "config.toml").unlink()
    if case == "elsewhere":
        path = Path(shutil.move(run / "checkpoints" / "step-0000004", tmp_path / "mine"))
    out = exported(path, tmp_path / "out")
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 3
    assert {
        "no config": f"There is no {run / 'config.toml'} of a run",
        "elsewhere": "There is no config.toml of a run",
        "wants values": "tests.app.test_export:seeing cannot be called on the meta device",
    }[case] in printed[0]
    expected = plain.state_dict() | dict(plain.named_buffers())
    files = in_files(out)
    assert_equal(files, {name: expected[name] for name in expected if name not in ODD_TIED})
    card = json.loads((out / "config.json").read_text())
    assert card["tied"] is None
    assert card["factory"] == ("tests.app.test_export:seeing" if case == "wants values" else None)
    assert "The model itself was not known" in (out / "README.txt").read_text()
    if case != "wants values":
        assert_equal(load_as_told(out, monkeypatch)["weights"], files)


def damaged(file: str) -> Callable[[Path], object]:
    def change(run: Path) -> None:
        path = run / STEP / file
        data = bytearray(path.read_bytes())
        data[-3] ^= 4
        path.write_bytes(data)

    return change


def changed(old: str, new: str) -> Callable[[Path], object]:
    """Replaces a part of the run's config."""

    def change(run: Path) -> None:
        text = (run / "config.toml").read_text()
        assert old in text
        (run / "config.toml").write_text(text.replace(old, new))

    return change


STEP = "checkpoints/step-0000004"
MISTAKES: list[tuple[Callable[[Path], object], list[str], str]] = [
    (damaged("optimizer-00001.safetensors"), [], "is damaged (its checksum differs)"),
    (lambda run: (run / STEP / "buffers.safetensors").unlink(), [], "buffers.safetensors: No such file"),
    (lambda run: shutil.rmtree(run / "checkpoints"), [], "holds no complete one"),
    (changed("lr =", "lrr ="), [], "unknown key 'lrr'"),
    (changed(":Odd", ":Even"), [], "has no callable 'Even'"),
    (changed("n_embd = 16", "n_embd = 8"), [], "these tensors differ: transf"),
    (changed("n_layer = 3", "n_layer = 4"), [], "differ: transformer.h.3.ln_1"),
    (changed("n_layer = 3", "n_layer = 2"), [], "differ: transformer.h.2."),
    (changed("n_head = 2", "n_head = 2, tied = false"), [], "differ: lm_head"),
    (lambda run: None, ["--shard-size", "big"], "streamer: --shard-size='big': give a number and its unit"),
    (lambda run: (run.parent / "out").mkdir(), [], "out: there is something already: export to a new"),
    (lambda run: None, ["--to", "/proc/no/out"], "/proc/no/out: "),
]


@pytest.mark.parametrize(("mistake", "options", "message"), MISTAKES)
def test_mistakes_end_in_one_line_and_leave_nothing(
    mistake: Callable[[Path], object],
    options: list[str],
    message: str,
    odd: tuple[Path, nn.Module],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = Path(shutil.copytree(odd[0], tmp_path / "run"))
    mistake(run)
    before = sorted(tmp_path.iterdir())
    assert main(["export", str(run), "--to", str(tmp_path / "out"), *options]) == 2
    error = capsys.readouterr().err
    assert error.startswith("streamer: ")
    assert error.count("\n") == 1
    assert message in error
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("when", ["_config", "_stored", "_write_shards"])
def test_a_checkpoint_that_a_run_deletes_meanwhile_is_told(
    when: str,
    odd: tuple[Path, nn.Module],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = Path(shutil.copytree(odd[0], tmp_path / "run"))
    earlier, then = run / "checkpoints" / "step-0000002", getattr(export, when)

    def meanwhile(*given: Any) -> Any:
        prune(run / "checkpoints", 1)
        return then(*given)

    monkeypatch.setattr(export, when, meanwhile)
    assert main(["export", str(earlier), "--to", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"streamer: {earlier} has been deleted while it was read, as a run does")
    assert error.count("\n") == 1 and [*tmp_path.iterdir()] == [run]


def test_values_beyond_float16_are_refused_and_infinite_ones_are_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for value, code in ((65519.0, 0), (65520.0, 2), (float("inf"), 0), (float("nan"), 0)):
        torch.manual_seed(0)
        model = GPT(vocab_size=VOCAB, block_size=16, n_layer=2, n_head=2, n_embd=16)
        with torch.no_grad():
            model.transformer.h[1].mlp.c_fc.bias[3] = -value
        streamer.wrap(model, layers="transformer.h", device="cpu")
        place = tmp_path / str(value)
        streamer.save(model, None, place / "one", step=1)
        streamer.unwrap(model)
        for dtype in ("float16", "bfloat16"):
            result = main(["export", str(place / "one"), "--to", str(place / dtype), "--dtype", dtype])
            assert result == (code if dtype == "float16" else 0)
            assert (place / dtype).exists() == (result == 0)
    error = capsys.readouterr().err
    assert (
        "transformer.h.1.mlp.c_fc.bias' has values up to 6.55e+04, which are beyond float16: export" in error
    )


def test_a_few_tensors_are_in_memory_at_a_time(
    odd: tuple[Path, nn.Module], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive: list[int] = []
    counts: list[int] = []

    def counted(piece: Piece) -> Piece:
        def read() -> torch.Tensor:
            tensor = piece.read()
            alive.append(1)
            counts.append(len(alive))
            weakref.finalize(tensor.untyped_storage(), alive.pop)
            return tensor

        return replace(piece, read=read)

    def write(path: Path, pieces: Sequence[Piece], **options: Any) -> Any:
        return tensors.write_tensors(path, [counted(piece) for piece in pieces], **options)

    monkeypatch.setattr("streamer.app.export.write_tensors", write)
    assert len(in_files(exported(odd[0], tmp_path / "out", "bfloat16"))) == len(counts)
    assert max(counts) <= 3, "one being written, one being made, one whose checksum is taken"
