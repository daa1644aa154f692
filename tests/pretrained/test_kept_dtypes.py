"""What transformers keeps in fp32 when it loads a model in 16 bits: routers, their biases, T5's ``wo``."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Ernie4_5_MoeConfig,
    Glm4MoeConfig,
    T5Config,
    T5ForConditionalGeneration,
)

import streamer
from streamer.cli.build import build_model, without_values
from streamer.cli.config import load_config
from streamer.cli.main import main
from streamer.cli.plan.planning import plan_run
from streamer.cli.run import space_of
from streamer.engine.handle import home_of, wrapped
from streamer.planner.machine import RTX_4090
from tests import tiny_llama
from tests.model_folders import FILE, differing, load, rewritten
from tests.reference import VOCAB, in_turn, unwrapping

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

SIZES: dict[str, Any] = {
    "vocab_size": 300,  # of the tokenizer
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CONFIGS = {
    "glm4 moe": lambda: Glm4MoeConfig(
        **SIZES,
        head_dim=8,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_shared_experts=1,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
    ),
    "ernie moe": lambda: Ernie4_5_MoeConfig(
        **SIZES, moe_num_experts=4, moe_k=2, moe_layer_start_index=1, moe_num_shared_experts=1
    ),
    "deepseek v3": lambda: DeepseekV3Config(
        **SIZES | {"num_key_value_heads": 4},
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
    ),
    "t5": lambda: T5Config(
        vocab_size=VOCAB, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0
    ),
}


def kind_of(name: str) -> Any:
    return T5ForConditionalGeneration if name == "t5" else AutoModelForCausalLM


def write(folder: Path, name: str) -> Path:
    """An fp32 folder of a random model, whose routers are not indifferent."""
    torch.manual_seed(0)
    config = CONFIGS[name]()
    model: Any = T5ForConditionalGeneration(config) if name == "t5" else kind_of(name).from_config(config)
    with torch.no_grad():
        for key, tensor in model.state_dict().items():
            if "gate" in key or "bias" in key:
                tensor.normal_(std=0.3)
            bits = tensor.view(torch.int32)  # masters round ties away from zero, PyTorch rounds them to even
            bits += (bits & 0xFFFF == 0x8000).int()
    model.save_pretrained(folder)
    return folder


def logits(model: Any) -> torch.Tensor:
    tokens = torch.arange(24).view(2, 12)
    inputs = {"decoder_input_ids": tokens} if isinstance(model, T5ForConditionalGeneration) else {}
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=tokens, use_cache=False, **inputs).logits
    return found


def streamed_in(model: Any) -> dict[str, torch.dtype]:
    """The dtype in which each parameter is streamed."""
    homes = {name: home_of(param) for name, param in model.named_parameters()}
    return {name: home.slice.dtype for name, home in homes.items() if home is not None}


def loaded(folder: Path, **options: Any) -> AbstractContextManager[Any]:
    return unwrapping(load(folder, **options))


#: What of each model is in fp32 where the rest is in 16 bits.
IN_FP32 = {"glm4 moe": "gate.weight", "ernie moe": "gate.weight", "deepseek v3": "gate.weight", "t5": "wo"}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*in_turn(CONFIGS, [BF16, FP16]), ("glm4 moe", FP32), ("t5", FP16), ("t5", BF16)],
    ids=str,
)
def test_logits_and_dtypes_are_those_of_the_library(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    theirs = kind_of(name).from_pretrained(write(tmp_path, name), dtype=dtype)
    dtypes = {key: param.dtype for key, param in theirs.named_parameters()}
    # T5's are kept in fp16 alone
    assert ({FP32, dtype} == {*dtypes.values()}) == (name != "t5" or dtype != BF16)
    with loaded(tmp_path, dtype=dtype) as mine:
        assert streamed_in(mine) == {key: param.dtype for key, param in mine.named_parameters()} == dtypes
        assert torch.equal(logits(mine), logits(theirs))
        buffers = {key: value for key, value in theirs.named_buffers() if key in theirs.state_dict()}
        assert differing({key: mine.get_buffer(key) for key in buffers}, buffers) == []
    # unwrapped, parameters have the exact values of the files
    files, exact = load_file(tmp_path / FILE), dict(mine.named_parameters())
    same = [key for key in exact if key in files]
    assert any(IN_FP32[name] in key for key in same)
    assert differing({key: exact[key].detach() for key in same}, {key: files[key] for key in same}) == []


@pytest.mark.parametrize("name", ["glm4 moe", "t5"])
def test_a_folder_in_16_bits_is_computed_as_the_library_does(name: str, tmp_path: Path) -> None:
    dtype = FP16 if name == "t5" else BF16
    write(tmp_path, name)
    rewritten(tmp_path / FILE, lambda held: held.update({k: v.to(dtype) for k, v in held.items()}))
    theirs = kind_of(name).from_pretrained(tmp_path, dtype=dtype)
    for wanted in (None, dtype):
        with loaded(tmp_path, dtype=wanted) as mine:
            assert streamed_in(mine) == {key: param.dtype for key, param in theirs.named_parameters()}
            assert torch.equal(logits(mine), logits(theirs))


@pytest.mark.parametrize("options", [{"activations": "keep"}, {"micro_batch_size": 1}], ids=str)
def test_layers_of_two_dtypes_have_the_gradients_of_the_plain_model(
    options: dict[str, Any], tmp_path: Path
) -> None:
    theirs = AutoModelForCausalLM.from_pretrained(write(tmp_path, "glm4 moe"), dtype=BF16).train()
    tokens = torch.arange(24).view(2, 12)
    with loaded(tmp_path, dtype=BF16, **options) as mine:
        for model in (theirs, mine.train()):
            model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        expected = {key: param.grad for key, param in theirs.named_parameters()}
        for key, param in mine.named_parameters():
            if (gradient := expected[key]) is None:
                assert param.grad is None
            elif "micro_batch_size" in options:  # sums of two roundings
                torch.testing.assert_close(param.grad.float(), gradient.float(), rtol=0.05, atol=2e-3)
            else:
                assert param.grad.dtype == gradient.dtype
                assert torch.equal(param.grad, gradient), key


@pytest.mark.parametrize("update", ["step", "backward"])
def test_an_fp32_router_of_a_bf16_model_is_updated_in_fp32(update: str, tmp_path: Path) -> None:
    theirs = AutoModelForCausalLM.from_pretrained(write(tmp_path, "glm4 moe"), dtype=BF16).train()
    tokens = torch.arange(24).view(2, 12)
    settings = {"lr": 1e-6, "weight_decay": 0.0}
    with loaded(tmp_path, dtype=BF16, update=update) as mine:
        for model, kind in ((theirs, torch.optim.AdamW), (mine.train(), streamer.AdamW)):
            optimizer = kind(model.parameters(), **settings)
            model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
            optimizer.step()
        name = "model.layers.1.mlp.gate.weight"
        assert not torch.equal(theirs.get_parameter(name), load_file(tmp_path / FILE)[name])
        torch.testing.assert_close(mine.get_parameter(name), theirs.get_parameter(name), rtol=0, atol=1e-8)


def test_frozen_weights_are_read_from_the_files(tmp_path: Path) -> None:
    write(tmp_path, "glm4 moe")
    rewritten(tmp_path / FILE, lambda held: held.update({k: v.bfloat16() for k, v in held.items()}))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=BF16)
    options = {"dtype": BF16, "disk": True, "host_memory": "116KiB"}
    with loaded(tmp_path, adapt=lambda model: model.requires_grad_(False), **options) as mine:
        assert torch.equal(logits(mine), logits(theirs))


def test_quantization_leaves_out_the_same_weights_as_the_library(tmp_path: Path) -> None:
    """Of quantized weights T5 would take the dtype of their codes for that of its inputs."""
    pytest.importorskip("torchao", reason="needs torchao (pip install '.[quantize]')")
    write(tmp_path, "t5")
    with loaded(tmp_path, dtype=BF16, quantize="int8") as mine:
        plain = {key for key, dtype in streamed_in(mine).items() if dtype == BF16 and "Dense" in key}
        assert plain == {key for key, _ in mine.named_parameters() if key.endswith(".wo.weight")}


# --- the command -------------------------------------------------------------------------------------------


def config_of(folder: Path) -> Path:
    """A run of the model in ``folder``, streamed in bf16, on tokens that are ready."""
    tiny_llama.tokenizer().save_pretrained(folder)
    (folder / "text.txt").write_text("what follows one? two follows one, and three follows two. " * 40)
    path = folder / "config.toml"
    path.write_text(
        f"""
        [model]
        path = "{folder}"
        [data]
        paths = ["{folder / "text.txt"}"]
        [train]
        output_dir = "{folder / "run"}"
        max_length = 8
        per_device_train_batch_size = 2
        max_steps = 2
        save_steps = 1
        learning_rate = 1e-3
        [stream]
        dtype = "bfloat16"
        device = "cpu"
        """
    )
    return path


@pytest.fixture
def glm4(tmp_path: Path) -> Path:
    return write(tmp_path, "glm4 moe")


def dtypes_there(folder: Path) -> dict[str, torch.dtype]:
    """As the library loads the model in bf16."""
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=BF16)
    return {key: param.dtype for key, param in plain.named_parameters()}


@pytest.mark.parametrize("has_weights", [True, False], ids=["with weights", "config alone"])
def test_a_plan_counts_the_bytes_of_the_run(has_weights: bool, glm4: Path) -> None:
    dtypes, config = dtypes_there(glm4), load_config(config_of(glm4))
    with unwrapping(build_model(config)) as model:
        assert streamed_in(model) == dtypes
        sizes = dict(wrapped(model).planned.host)
    if not has_weights:
        (glm4 / FILE).unlink()
    planned = plan_run(config, RTX_4090).step.host_bytes
    assert (
        planned["weights"]
        == sizes["weights"]
        == sum(param.numel() * dtypes[name].itemsize for name, param in model.named_parameters())
    )


@pytest.mark.filterwarnings("ignore")  # the library's own, while it writes
def test_a_run_writes_weights_trained_in_fp32_in_fp32(glm4: Path) -> None:
    dtypes, config = dtypes_there(glm4), config_of(glm4)
    assert main(["train", str(config)]) == 0
    run, exported = glm4 / "run", glm4 / "exported"
    assert main(["export", str(run), "--to", str(exported)]) == 0
    written = AutoModelForCausalLM.from_pretrained(run / "model").state_dict()
    again = AutoModelForCausalLM.from_pretrained(exported).state_dict()
    assert differing(again, written) == []
    for folder in (run / "model", exported):
        model = load(folder)
        assert streamed_in(model) == dtypes
        streamer.unwrap(model)
        tensors = load_file(folder / FILE)
        routers = [value for key, value in tensors.items() if key.endswith("gate.weight")]
        assert {value.dtype for value in routers} == {FP32}
        assert any(not torch.equal(value, value.bfloat16().float()) for value in routers)
    loaded = load_config(config)
    space = space_of(loaded, without_values(loaded))
    assert space.weights == sum(
        written[name].numel() * dtype.itemsize for name, dtype in dtypes.items() if name in written
    )
