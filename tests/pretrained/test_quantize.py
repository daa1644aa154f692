"""Bases that are quantized while they are read, or in their files, against transformers' own loading."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    FineGrainedFP8Config,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    TorchAoConfig,
)

import streamer
from streamer.engine.handle import wrapped
from streamer.pretrained.quantize import quantize_weights
from streamer.quantized.schemes import SCHEMES
from tests.model_folders import rewritten
from tests.on_disk import least_of
from tests.optim.masters import MASTER, master
from tests.quantized import history, sizes
from tests.reference import assert_equal, hugging_face, in_turn

peft = pytest.importorskip("peft", reason="peft is not installed")
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*(register_constant|Calling register_constant|cast from)",
    "ignore:::transformers",
    "ignore:::peft",
)

BF16 = torch.bfloat16
WORDS = tuple(SCHEMES)


def adapt(model: nn.Module) -> Any:
    config = peft.LoraConfig(target_modules="all-linear", r=4, lora_dropout=0.1, task_type="CAUSAL_LM")
    return peft.get_peft_model(model, config)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in bf16."""
    return write_llama(tmp_path_factory.mktemp("llama"), layers=4)


def write_llama(folder: Path, *, layers: int) -> Path:
    hugging_face(**sizes(128, layers)).to(BF16).save_pretrained(folder)
    return folder


def gpt2(folder: Path) -> None:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=128, n_positions=32, n_embd=64, n_layer=3, n_head=4, use_cache=False)
    GPT2LMHeadModel(config).to(BF16).save_pretrained(folder)


def four_bits(**options: Any) -> BitsAndBytesConfig:
    return BitsAndBytesConfig(
        load_in_4bit=True,
        **{
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": True,
            "bnb_4bit_compute_dtype": BF16,
            **options,
        },
    )


def int8(**options: Any) -> TorchAoConfig:
    from torchao.quantization import Int8WeightOnlyConfig

    return TorchAoConfig(Int8WeightOnlyConfig(), **options)


CONFIGS: dict[str, Callable[[], Any]] = {"nf4": four_bits, "int8": int8}


def plain(folder: Path, quantization: Any = None) -> nn.Module:
    """As transformers loads it, with adapters."""
    options = {} if quantization is None else {"quantization_config": quantization}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=BF16, device_map={"": "cpu"}, **options)
    return adapt(model).train()


def streamed(folder: Path, **options: Any) -> Any:
    options = {"adapt": adapt, "dtype": BF16, "device": "cpu"} | options
    return streamer.from_pretrained(folder, **options).train()


def take_adapters(reference: nn.Module, model: nn.Module) -> None:
    """Let the ``reference`` have the adapters of ``model`` with their masters, and gradients in all."""
    own = dict(model.named_parameters())
    torch.manual_seed(2)
    with torch.no_grad():
        for name, param in reference.named_parameters():
            if param.requires_grad:
                if "lora_B" in name:
                    own[name].normal_(std=0.05)
                param.data = own[name].detach().clone()
                vars(param)[MASTER] = master(own[name])


@pytest.mark.parametrize(("word", "activations"), in_turn(WORDS, ["recompute", "keep"]))
def test_it_trains_as_a_model_quantized_by_transformers(word: str, activations: str, llama: Path) -> None:
    reference = plain(llama, CONFIGS[word]())
    model = streamed(llama, quantize=word, activations=activations)
    take_adapters(reference, model)
    assert_equal(history(model), history(reference))
    assert type(model.get_base_model().lm_head) is nn.Linear
    assert _told(model) == _told(reference)
    plain_again = streamer.unwrap(model)
    for mine, other in zip(plain_again.parameters(), reference.parameters(), strict=True):
        assert type(mine) is type(other)
        # adapters were written in bf16 and kept what rounding had taken from their masters, up to half a unit
        # in the last place: [Note: masters]
        half = torch.finfo(BF16).eps / 2 if mine.requires_grad else 0.0
        found, expected = _values(mine), _values(other)
        torch.testing.assert_close(found, expected, rtol=half, atol=0.0, check_dtype=not mine.requires_grad)


def _told(model: Any) -> dict[str, Any]:
    """What trainers may ask a model about its quantization, but for the modules that are left out."""
    base = model.get_base_model()
    names = ("is_quantized", "is_loaded_in_4bit", "quantization_method")
    card = base.config.quantization_config.to_dict()
    for left_out in ("llm_int8_skip_modules", "modules_to_not_convert"):
        card.pop(left_out, None)
    marks = {name: getattr(base, name, None) for name in names}
    return marks | {"in config": getattr(base.config, "_is_quantized", None)} | card


def _values(param: Any) -> torch.Tensor:
    return param.dequantize() if hasattr(param, "dequantize") and hasattr(param, "qdata") else param.detach()


def test_weights_that_are_transposed(tmp_path: Path) -> None:
    gpt2(tmp_path)
    reference, model = plain(tmp_path, four_bits()), streamed(tmp_path, quantize="nf4")
    take_adapters(reference, model)
    assert_equal(history(model), history(reference))
    streamer.unwrap(model)
    # torchao has no kernel for transposed weights: there is a linear module with the weight turned
    model, own = streamed(tmp_path, quantize="int8"), streamed(tmp_path)
    one, other = (each.get_base_model().transformer.h[1].mlp.c_fc.base_layer for each in (model, own))
    torch.testing.assert_close(one.weight.dequantize(), other.weight.T, rtol=0, atol=0.01)
    history(model)
    for each in (model, own):
        streamer.unwrap(each)


def stored_in_4_bits(folder: Path, to: Path, **options: Any) -> None:
    stored_quantized(folder, to, four_bits(**options))


def stored_quantized(folder: Path, to: Path, quantization: Any) -> None:
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=BF16, device_map={"": "cpu"}, quantization_config=quantization
    )
    model.save_pretrained(to)


def stored_in_fp8(folder: Path, to: Path, *, block: int = 64, of: Sequence[str] = ("proj",)) -> None:
    """As DeepSeek and Qwen write it; ``of`` are parts of the names of what is quantized."""
    to.mkdir(exist_ok=True)
    card = json.loads((folder / "config.json").read_text())
    card["quantization_config"] = {
        "quant_method": "fp8",
        "weight_block_size": [block, block],
        "activation_scheme": "dynamic",
        "modules_to_not_convert": ["lm_head"],
    }
    (to / "config.json").write_text(json.dumps(card))
    tensors: dict[str, torch.Tensor] = {}
    for name, values in load_file(folder / "model.safetensors").items():
        if not any(part in name for part in of):
            tensors[name] = values
            continue
        rows, columns = (length // block for length in values.shape)
        blocks = values.float().view(rows, block, columns, block)
        scale = blocks.abs().amax((1, 3)) / 448
        codes = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn)
        tensors |= {name: codes.view(values.shape).contiguous(), f"{name}_scale_inv": scale}
    save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})


def least_memory(folder: Path, **options: Any) -> int:
    """The least budget of host memory, as the error says it."""
    with pytest.raises(MemoryError) as refused:
        streamed(folder, host_memory=1, **options)
    return least_of(refused.value)


STORED: dict[str, tuple[Callable[[Path, Path], None], Any]] = {
    "nf4": (lambda folder, to: stored_in_4_bits(folder, to, bnb_4bit_use_double_quant=False), None),
    "nf4, scales in 8 bits": (stored_in_4_bits, None),
    "fp4": (lambda folder, to: stored_in_4_bits(folder, to, bnb_4bit_quant_type="fp4"), None),
    "fp8": (stored_in_fp8, FineGrainedFP8Config(dequantize=True)),
    "torchao": (lambda folder, to: stored_quantized(folder, to, int8()), None),
}


def adapt_what_is_frozen(model: nn.Module) -> Any:
    assert not any(param.requires_grad for param in model.parameters())
    assert not any(module.training for module in model.modules())
    return adapt(model)


@pytest.mark.parametrize(
    ("kind", "place"),
    [("fp4", "memory"), ("fp8", "memory"), ("nf4, scales in 8 bits", "files"), ("torchao", "files")],
)
def test_a_folder_that_is_quantized_already(kind: str, place: str, llama: Path, tmp_path: Path) -> None:
    store, quantization = STORED[kind]
    options: dict[str, Any] = {}
    if place == "files":
        # more than the buffers through which files are read
        llama = write_llama(tmp_path / "deep", layers=6)
    store(llama, tmp_path)
    reference = plain(tmp_path, copy.deepcopy(quantization))
    if place == "files":
        options = {"disk": True, "host_memory": least_memory(tmp_path, disk=True)}
    model = streamed(tmp_path, adapt=adapt_what_is_frozen, **options)
    take_adapters(reference, model)
    shards = [not shard.weights_on_disk.is_empty for shard in wrapped(model).executor.store.shards]
    assert any(shards) == (place == "files")
    assert_equal(history(model), history(reference))
    streamer.unwrap(model)


_PEAK = """
import gc, re, sys, threading, time
import torch, streamer, transformers, bitsandbytes

def taken():
    status = open("/proc/self/status").read()
    return int(re.search(r"RssAnon:\\s+(\\d+)", status)[1])

def watch():
    while True:
        record = most
        record[0] = max(record[0], taken())
        time.sleep(0.003)

most = [0]
threading.Thread(target=watch, daemon=True).start()
for word in (None, "nf4"):
    options = {"quantize": word, "adapt": lambda model: model.requires_grad_(False), "num_slots": 1}
    # what is imported by the way does not count
    streamer.unwrap(streamer.from_pretrained(sys.argv[1], device="cpu", **options))
    gc.collect()
    before = taken()
    most = [before]  # another one: the thread may be about to write what it has read of the one before
    model = streamer.from_pretrained(sys.argv[2], device="cpu", **options)
    print(most[0] - before)
    streamer.unwrap(model)
    del model
"""


def test_a_base_that_is_larger_than_memory_is_read_within_it(llama: Path, tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=24,
        num_attention_heads=8,
        use_cache=False,
    )
    config.architectures = ["LlamaForCausalLM"]
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    values = {name: torch.full(p.shape, 0.01, dtype=BF16) for name, p in model.named_parameters()}
    whole = sum(tensor.nbytes for tensor in values.values())
    save_file(values, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(tmp_path)
    # In addition to the model there are a slot, and a tensor that is copied: on the CPU bitsandbytes takes 64
    # bytes for each element of it. Pages of the mapped file do not count.
    done = subprocess.run(
        [sys.executable, "-c", _PEAK, str(llama), str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        # what is freed goes back at once
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"},
    )
    assert done.returncode == 0, done.stderr
    plain, nf4 = (1024 * int(line) for line in done.stdout.split()[-2:])
    assert plain > whole and nf4 < 0.6 * whole, (plain, nf4)


def test_linear_modules_that_are_skipped(llama: Path) -> None:
    wrapped_model = streamed(llama, quantize="nf4", skip=["down_proj", r"layers\.3\."])
    model = wrapped_model.get_base_model()
    kinds = {
        name: type(module.base_layer).__name__
        for name, module in model.named_modules()
        if hasattr(module, "base_layer")
    }
    assert {kind for name, kind in kinds.items() if "down_proj" in name or ".3." in name} == {"Linear"}
    rest = {kind for name, kind in kinds.items() if not ("down_proj" in name or ".3." in name)}
    assert rest == {"Linear4bit"}
    left = model.config.quantization_config.llm_int8_skip_modules
    assert {"lm_head", "model.layers.3.mlp.up_proj", "model.layers.0.mlp.down_proj"} <= {*left}
    assert "model.layers.0.mlp.up_proj" not in left
    streamer.unwrap(wrapped_model)
    in_8_bits = streamed(llama, quantize="int8", skip=["down_proj"])
    assert "model.layers.0.mlp.down_proj" in (
        in_8_bits.get_base_model().config.quantization_config.modules_to_not_convert
    )
    streamer.unwrap(in_8_bits)


def refused(match: str, folder: Path, **options: Any) -> None:
    with pytest.raises(ValueError, match=match):
        streamed(folder, **options)


class Experts(nn.Module):
    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.empty(count, width, width, dtype=torch.bfloat16))


def test_models_that_cannot_be_quantized(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused(r"quantize='int4': it is one of 'int8', 'nf4', or None", llama, quantize="int4")
    refused(r"'down_prj' matches the name of no linear .*q_proj", llama, quantize="nf4", skip="down_prj")
    refused(r"skip=.*: use regular expressions", llama, quantize="nf4", skip="(")
    refused(r"set quantize=, or leave skip= out", llama, skip="down_proj")
    refused(r"finds no linear module", llama, quantize="nf4", skip="proj")
    with torch.device("meta"):
        many = Experts(2, 1 << 15)
    with pytest.raises(
        ValueError, match=r"'0\.experts' has 2147483648 values, .*set quantize='int8', or skip="
    ):
        quantize_weights(many, [("0", many)], "nf4", (), None, None)
    quantize_weights(many, [("0", many)], "int8", (), None, None)

    def unfreeze(model: nn.Module) -> Any:
        adapted = adapt(model)
        adapted.get_base_model().model.layers[0].mlp.up_proj.base_layer.weight.requires_grad_(True)
        return adapted

    refused(r"up_proj.* is a Int8Tensor, which .* cannot be trained", llama, quantize="int8", adapt=unfreeze)
    for word, library in (("int8", "torchao"), ("nf4", "bitsandbytes")):
        with monkeypatch.context() as patched:
            patched.setitem(sys.modules, library, None)
            refused(rf"need {library}: pip install 'layer-streamer\[quantize\]'", llama, quantize=word)
    stored_in_4_bits(llama, tmp_path)
    refused(r"its weights are quantized already: leave quantize='nf4' out", tmp_path, quantize="nf4")


@pytest.mark.parametrize(
    ("kind", "library"), [("nf4", "bitsandbytes"), ("fp8", "torchao"), ("torchao", "torchao")]
)
def test_quantized_files_without_the_library(
    kind: str, library: str, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    STORED[kind][0](llama, tmp_path)
    monkeypatch.setitem(sys.modules, library, None)
    refused(rf"need {library}: pip install 'layer-streamer\[quantize\]'", tmp_path)


def test_quantized_files_that_are_not_whole(llama: Path, tmp_path: Path) -> None:
    weight = "model.layers.1.mlp.up_proj.weight"
    stored_in_4_bits(llama, tmp_path / "4")
    stored_in_fp8(llama, tmp_path / "8")
    stored_quantized(llama, tmp_path / "ao", int8())
    file = tmp_path / "ao/model.safetensors"
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    left = load_file(file)
    del left[f"{weight.removesuffix('weight')}_weight_scale"]
    save_file(left, file, metadata=metadata)
    refused(rf"'{weight}' is not whole in its file: .*up_proj\._weight_scale is missing", tmp_path / "ao")
    rewritten(tmp_path / "4/model.safetensors", lambda held: held.pop(f"{weight}.absmax"))
    refused(rf"'{weight}' is not whole in its file .*absmax", tmp_path / "4")
    rewritten(tmp_path / "8/model.safetensors", lambda held: held.pop(f"{weight}_scale_inv"))
    refused(rf"of an unsupported dtype .*{weight} \(torch\.float8_e4m3fn\)", tmp_path / "8")
    rewritten(
        tmp_path / "8/model.safetensors", lambda held: held.update({f"{weight}_scale_inv": torch.ones(1, 1)})
    )
    refused(r"fp8 of \[256, 128\] with scales of \[1, 1\] for blocks of \[64, 64\]", tmp_path / "8")
    card = json.loads((tmp_path / "8/config.json").read_text())
    card["quantization_config"]["weight_block_size"] = [48, 128]
    (tmp_path / "8/config.json").write_text(json.dumps(card))

    def in_blocks_of_48(held: dict[str, torch.Tensor]) -> None:
        for name in [name for name in held if "proj.weight" in name and "scale" not in name]:
            rows, columns = held[name].shape
            held[f"{name}_scale_inv"] = torch.ones(-(-rows // 48), columns // 128)

    rewritten(tmp_path / "8/model.safetensors", in_blocks_of_48)
    refused(r"with scales of .* for blocks of \[48, 128\], which do not divide it", tmp_path / "8")


def test_weights_quantized_during_reading_are_not_read_from_their_files(tmp_path: Path) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in range(3))

    save_file(Model().state_dict(), tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"but there are none: .* leave quantize= out, or set disk="):
        streamer.from_pretrained(tmp_path, Model, quantize="int8", device="cpu", disk=True)
