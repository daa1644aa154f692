"""Folders and arguments that `streamer.from_pretrained` cannot use: one line that names the tensors and the
fix, before anything is allocated."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

import streamer
from bench.architectures import ALL
from models.gpt2 import GPT
from streamer.errors import CheckpointError
from tests.model.test_bad_input import refused
from tests.model.test_moving import LINUX
from tests.model_folders import (
    FILE,
    SIZES,
    Shared,
    differing,
    in_use,
    load,
    rewritten,
    saved,
    untied,
    unwrapped,
)

UP = "model.layers.1.mlp.up_proj.weight"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"

Change = Callable[[Path], object]


@pytest.fixture
def copied(llama: Path, tmp_path: Path) -> Path:
    """A folder of a Llama, to be spoilt."""
    return Path(shutil.copytree(llama, tmp_path / "llama"))


def is_refused(
    path: Path, match: str, patch: pytest.MonkeyPatch, error: type[Exception] = ValueError, **options: Any
) -> None:
    with refused(nn.Module(), error, rf"\A.*{match}.*\Z", patch):
        load(path, **options)
    assert in_use(path) == []


# --- folders --------------------------------------------------------------------------------------------


def edit(change: Callable[[dict[str, torch.Tensor]], object]) -> Change:
    return lambda folder: rewritten(folder / FILE, change)


def put(name: str, tensor: torch.Tensor) -> Change:
    return edit(lambda held: held.update({name: tensor}))


def write(data: bytes, file: str = FILE) -> Change:
    return lambda folder: (folder / file).write_bytes(data)


def card(**values: Any) -> Change:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return change


def split(change: Callable[[Path, dict[str, Any]], object]) -> Change:
    """Two files with an index; ``change`` may spoil the folder and the index."""

    def in_two(folder: Path) -> None:
        held = load_file(folder / FILE)
        where: dict[str, Any] = {name: SECOND if ".1." in name else FIRST for name in sorted(held)}
        for file in (FIRST, SECOND):
            save_file({name: held[name] for name in held if where[name] == file}, folder / file)
        (folder / FILE).unlink()
        change(folder, where)
        (folder / f"{FILE}.index.json").write_text(json.dumps({"weight_map": where}))

    return in_two


def two_files(folder: Path) -> None:
    shutil.copy(folder / FILE, folder / "a.safetensors")
    (folder / FILE).rename(folder / "b.safetensors")


def pickled(folder: Path) -> None:
    (folder / FILE).rename(folder / "pytorch_model.bin")


ONES = torch.ones(64, 32)
FOLDERS: dict[str, tuple[Change, str]] = {
    "missing": (edit(lambda held: held.pop(UP)), rf"not of a LlamaForCausalLM; missing .*init=.*: {UP}"),
    "unexpected": (put("model.extra", ONES), r"unexpected \(set ignore=.*: model\.extra"),
    "shape": (put(UP, torch.ones(2, 3)), rf"of another shape: {UP} \(\[2, 3\] in {FILE}, \[64, 32\] here\)"),
    "float64": (put(UP, ONES.double()), rf"of an unsupported dtype \(.*: {UP} \(torch\.float64\)"),
    "one thing twice": (put(UP.removeprefix("model."), ONES), rf"unexpected \(.*: {UP}"),
    "cut off": (lambda folder: os.truncate(folder / FILE, 5000), rf"{FILE}: not a whole safetensors file"),
    "8-bit floats": (
        put(UP, ONES.to(torch.float8_e4m3fn)),
        rf"convert them to bf.*: {UP} \(torch\.float8_e4m3fn\)",
    ),
    "quantized by config": (
        card(quantization_config={"quant_method": "gptq"}),
        "are quantized by gptq, which",
    ),
    "file is gone": (split(lambda folder, _: (folder / SECOND).unlink()), f"2 files .* missing: {SECOND}"),
    "no index": (split(lambda _, where: where.update(ghost=3)), r"index\.json: not an index of safetens"),
    "several": (two_files, r"neither .* is in it: name one of a\.safetensors, b\.safetensors"),
    "pickle": (pickled, r"in it, only pytorch_model\.bin: write the weights as safetensors"),
    "no weights": (lambda folder: (folder / FILE).unlink(), "is in it: write the weights as safetensors"),
    "no config": (lambda folder: (folder / "config.json").unlink(), r"no config\.json: set model_class="),
    "adapters": (
        lambda folder: (folder / "config.json").rename(folder / "adapter_config.json"),
        "holds only adapters: merge them into their base model",
    ),
    "damaged config": (write(b"{", "config.json"), r"config\.json: "),
    "damaged settings": (write(b"{", "generation_config.json"), r"generation_config\.json: "),
    "unknown config": (card(model_type="nothing"), r"config\.json: .*nothing"),
    "code": (card(model_type="nothing", auto_map={"AutoConfig": "a.B"}), r"config\.json: .*trust_remote"),
    "no class": (card(architectures=None), r"\(architectures: none\): set model_class="),
    "unknown class": (card(architectures=["Llama5"]), r"\(architectures: Llama5\): set model_class="),
    "no model": (card(architectures=["LlamaConfig"]), r"\(architectures: LlamaConfig\): set model_class="),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_that_cannot_be_loaded(name: str, copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    change, match = FOLDERS[name]
    change(copied)
    is_refused(copied, match, monkeypatch)


@pytest.mark.parametrize("name", ["meta-llama/Llama-3", "/nowhere/at/all"])
def test_a_path_where_nothing_is(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    is_refused(Path(name), f"{name}: there is no such file or folder; nothing is downloaded", monkeypatch)


def test_weights_that_are_tied_here_and_differ_in_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path, "gpt2")
    edit(lambda held: held.update({"lm_head.weight": held["transformer.wte.weight"].clone()}))(tmp_path)
    unwrapped(tmp_path)
    edit(lambda held: held["lm_head.weight"].add_(1))(tmp_path)
    match = r"tied here, and different in the files \(use a config .*\): lm_head\.weight"
    is_refused(tmp_path, match, monkeypatch, CheckpointError)
    config = transformers.GPT2Config.from_pretrained(tmp_path, tie_word_embeddings=False)
    model = unwrapped(tmp_path, config=config)
    assert torch.equal(model.lm_head.weight, model.transformer.wte.weight + 1)


NO_STACK = rf"'model\.layers\.1\.mlp\.experts\.gate_up_proj' cannot be converted from {FILE} .*experts"
EXPERT, FUSED = (
    "model.layers.1.block_sparse_moe.experts.7.w1.weight",
    "model.layers.1.mlp.experts.gate_up_proj",
)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (put(EXPERT, torch.ones(3, 3)), NO_STACK),
        (edit(lambda held: held.pop(EXPERT)), NO_STACK),
        (put(FUSED, torch.ones(32, 128, 32)), rf"unexpected \(.*: {FUSED}"),
    ],
    ids=["misshapen", "missing", "stored twice"],
)
def test_experts_that_do_not_fit_together(
    change: Change, match: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path, "mixtral")
    change(tmp_path)
    is_refused(tmp_path, match, monkeypatch, CheckpointError)


# --- arguments ------------------------------------------------------------------------------------------

MADE = GPT(**SIZES)


def made_before() -> GPT:
    return MADE


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return Shared()


ARGUMENTS: list[tuple[dict[str, Any], str]] = [
    ({"model_class": "gpt2"}, r"model_class=str\(\.\.\.\): use a class of transformers, or a function"),
    ({"model_class": ALL["llama"].build()}, r"model_class=LlamaForCausalLM\(\.\.\.\): use a class of trans"),
    ({"model_class": lambda: 3}, "model_class has returned a int, not an nn.Module"),
    ({"model_class": transformers.AutoModelForImageClassification}, "has no class for a LlamaConfig: use"),
    ({"model_class": made_before}, r"parameter 'transformer\.wte\.weight' has values before any are read"),
    ({"model_class": on_meta}, "buffer 'table' is on the meta device and has no values: let model_class"),
    ({"model_class": untied, "config": {}}, "config= is for classes of transformers: let model_class"),
    ({"config": {"n_layer": 3}}, r"config=\{.*\}: it must be a config of the transformers library"),
    ({"init": "nothing"}, "init='nothing': use a function of a module, or .* method of LlamaForCausalLM"),
    ({"ignore": "("}, r"ignore=\['\('\]: use regular expressions"),
    ({"ignore": [3]}, r"ignore=\[3\]: use regular expressions"),
    ({"dtype": torch.float64}, r"dtype=torch\.float64 cannot be streamed: use torch\.float32"),
    ({"layers": "nowhere"}, r"layers='nowhere': there is no such module\. Found in this model"),
]


@pytest.mark.parametrize(("options", "match"), ARGUMENTS)
def test_an_argument_that_cannot_be_honoured(
    options: dict[str, Any], match: str, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_refused(llama, match, monkeypatch, **options)


def test_the_transformers_library_is_missing(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    is_refused(llama, r"need the transformers library: pip install 'layer-streamer\[hf\]'", monkeypatch)
    save_file(untied().state_dict(), tmp_path / FILE)
    unwrapped(tmp_path, untied, "transformer.h")


# --- errors on the way ----------------------------------------------------------------------------------


@LINUX
@pytest.mark.parametrize("case", ["cut off", "another"])
def test_a_file_that_changes_while_it_is_read(case: str, tmp_path: Path) -> None:
    plain = untied()
    save_file(plain.state_dict(), tmp_path / FILE)
    split(lambda *_: None)(tmp_path)
    whole = (tmp_path / SECOND).read_bytes()

    def changing() -> GPT:
        if case == "cut off":
            (tmp_path / SECOND).write_bytes(whole[: len(whole) // 2])
        else:
            save_file({name: torch.ones(1) for name in load_file(tmp_path / SECOND)}, tmp_path / SECOND)
        return untied()

    match = {"cut off": rf"{SECOND}: ", "another": rf"{SECOND}: tensor '.*' has changed since"}[case]
    with pytest.raises(streamer.CheckpointError, match=rf"\A.*{match}.*\Z"):
        load(tmp_path, changing, "transformer.h")
    assert in_use(tmp_path) == []
    (tmp_path / SECOND).write_bytes(whole)
    assert differing(unwrapped(tmp_path, untied, "transformer.h").state_dict(), plain.state_dict()) == []


@LINUX
def test_an_init_that_raises(tmp_path: Path) -> None:
    saved(tmp_path, "gpt2")
    kind = transformers.GPT2ForSequenceClassification

    def failing(module: nn.Module) -> None:
        if isinstance(module, kind):
            raise KeyError("in init")

    with pytest.raises(KeyError, match="in init"):
        load(tmp_path, kind, init=failing)
    assert in_use(tmp_path) == []
    unwrapped(tmp_path, kind, init="_init_weights")
