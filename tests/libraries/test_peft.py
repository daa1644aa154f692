"""Adapters of peft on Hugging Face models whose layers are streamed, against peft alone."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import streamer
from tests.libraries.test_huggingface import gpt2, llama, loss
from tests.reference import (
    POLICIES,
    assert_equal,
    assert_parity,
    assert_same,
    hugging_face,
    streamed,
    train,
    train_plain,
    train_streamed,
)

pytest.importorskip("transformers", reason="transformers is not installed")
peft = pytest.importorskip("peft", reason="peft is not installed")
# what they say of one another
pytestmark = pytest.mark.filterwarnings("ignore:::transformers", "ignore:::peft")

PROJECTIONS = ["q_proj", "v_proj", "down_proj"]


def tied_llama() -> nn.Module:
    return llama(tie_word_embeddings=True)


def lora(make: Callable[[], nn.Module] = llama, **options: Any) -> nn.Module:
    """A model with adapters whose B is not zero, so that all of them have gradients."""
    given = {"target_modules": PROJECTIONS, "r": 4, "lora_dropout": 0.1, "init_lora_weights": "gaussian"}
    model = peft.get_peft_model(make(), peft.LoraConfig(**(given | options)))
    torch.manual_seed(1)
    for name, param in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(param, std=0.1)
    return model.train()


def conv1d() -> nn.Module:
    return lora(gpt2, target_modules=["c_attn", "c_proj"], fan_in_fan_out=True)


def bf16_base() -> nn.Module:
    """peft keeps the adapters in fp32."""
    return lora(lambda: llama().bfloat16())


def tuned(config: Any) -> nn.Module:
    torch.manual_seed(1)
    return peft.get_peft_model(llama(), config).train()


def input_gradients() -> nn.Module:
    model = lora()
    model.enable_input_require_grads()
    return model


def checkpointed() -> nn.Module:
    model = lora()
    model.config.use_cache = False
    model.gradient_checkpointing_enable()
    return model


def mixtral() -> nn.Module:
    return hugging_face("mixtral", num_hidden_layers=2, num_key_value_heads=2, num_local_experts=4)


EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]

METHODS: dict[str, Callable[[], nn.Module]] = {
    "dora": lambda: lora(use_dora=True),
    "embeddings": lambda: lora(target_modules=["q_proj", "embed_tokens"]),
    "whole modules": lambda: lora(modules_to_save=["lm_head", "embed_tokens"]),
    "a few tokens": lambda: lora(trainable_token_indices=[1, 2, 3]),
    "tied embeddings": lambda: lora(tied_llama, modules_to_save=["embed_tokens"], ensure_weight_tying=True),
    "input gradients": input_gradients,
    "gradient checkpointing": checkpointed,
    "ia3": lambda: tuned(
        peft.IA3Config(target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"])
    ),
    "adalora": lambda: tuned(
        peft.AdaLoraConfig(target_modules=PROJECTIONS, total_step=10, init_r=4, target_r=2)
    ),
    # of which several layers hold the base's weights
    "replicated layers": lambda: lora(layer_replication=[[0, 2], [1, 2]]),
    "fused experts": lambda: lora(
        mixtral, target_modules=["q_proj"], target_parameters=EXPERTS, lora_dropout=0.0
    ),
    # adds a sparse matrix, whose values are what is trained
    "shira": lambda: tuned(peft.ShiraConfig(target_modules=PROJECTIONS, r=2, init_weights=False)),
}


@pytest.mark.parametrize(
    ("make", "layers", "activations"),
    [
        (lora, "base_model.model.model.layers", "recompute"),
        (lora, None, "keep"),
        (conv1d, "base_model.model.transformer.h", "recompute"),
        (conv1d, None, "keep"),
    ],
)
def test_lora(make: Any, layers: str | None, activations: str) -> None:
    model, options = make(), {"loss_of": loss, "steps": 3}
    expected = train_plain(model, **options)
    assert_parity(train_streamed(model, layers=layers, activations=activations, **options), expected)
    assert {name for name in expected.first_gradients if "lora" not in name} == set()


@POLICIES
def test_a_bf16_base_with_fp32_adapters(activations: str) -> None:
    """One step; and several with PyTorch's optimizer, to the bit: with the other's last bits of the adapters
    the base rounds other activations."""
    model = bf16_base()
    expected = train_plain(model, loss_of=loss, steps=1)
    assert_parity(train_streamed(model, loss_of=loss, steps=1, activations=activations), expected)
    plain = copy.deepcopy(model)
    expected = train(plain, optimizer_of(plain), None, steps=4, loss_of=loss)
    with streamed(model, activations=activations) as wrapped:
        assert {param.dtype for param in wrapped.parameters()} == {torch.float32, torch.bfloat16}
        assert_same(train(wrapped, optimizer_of(wrapped), None, steps=4, loss_of=loss), expected)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-3)


@pytest.mark.parametrize("method", METHODS)
def test_other_methods(method: str) -> None:
    model = METHODS[method]()
    expected = train_plain(model, loss_of=loss, steps=2)
    for activations in ("recompute", "keep") if method == "shira" else ("recompute",):
        actual = train_streamed(model, loss_of=loss, steps=2, activations=activations)
        assert_parity(actual, expected)


def test_vectors_that_all_layers_hold() -> None:
    """A layer adds up the gradients of its own uses first, so that sums are rounded otherwise."""
    config = peft.VBLoRAConfig(
        target_modules=["q_proj", "v_proj"],
        r=4,
        num_vectors=16,
        vector_length=16,
        topk=2,
        save_only_topk_weights=False,
    )
    model = tuned(config)
    options = {"loss_of": loss, "steps": 2}
    actual, expected = train_streamed(model, **options), train_plain(model, **options)
    assert actual.losses[0] == expected.losses[0]
    assert_close(actual.first_gradients, expected.first_gradients, rtol=1e-4, atol=1e-7)
    assert_close(actual.weights, expected.weights, rtol=0, atol=1e-5)


def files(folder: Path) -> dict[str, Any]:
    """What is in them; peft writes sets, in whatever order they are, into its config."""
    found: dict[str, Any] = {path.name: path.read_bytes() for path in folder.iterdir()}
    config = json.loads(found.pop("adapter_config.json"))
    ordered = {key: sorted(value) if isinstance(value, list) else value for key, value in config.items()}
    return {"adapter_config.json": ordered, **found}


def test_adapters_are_saved_as_by_peft(tmp_path: Path) -> None:
    plain = lora()
    plain.save_pretrained(tmp_path / "plain before")
    with streamed(plain) as model:
        model.save_pretrained(tmp_path / "before")
        optimizer = streamer.AdamW(model.parameters(), lr=1e-2)
        train(model, optimizer, None, steps=2, loss_of=loss)
        loss(model, 2).backward()
        optimizer.step()  # still running
        model.save_pretrained(tmp_path / "after")
    model.save_pretrained(tmp_path / "plain after")
    assert files(tmp_path / "before") == files(tmp_path / "plain before")
    assert files(tmp_path / "after") == files(tmp_path / "plain after") != files(tmp_path / "before")
    again = peft.PeftModel.from_pretrained(llama(), tmp_path / "after").eval()
    assert torch.equal(loss(again, 0), loss(model.eval(), 0))


def test_adapters_are_merged_before_unwrap_and_after() -> None:
    with streamed(lora()) as model:
        optimizer = streamer.AdamW(model.parameters(), lr=1e-2)
        train(model, optimizer, None, steps=2, loss_of=loss)
    expected = loss(model.eval(), 0)
    merged = copy.deepcopy(model).merge_and_unload()
    assert "lora" not in " ".join(merged.state_dict())
    torch.testing.assert_close(loss(merged, 0), expected)
    with streamed(model) as wrapped, torch.no_grad():
        merged = wrapped.merge_and_unload()
        torch.testing.assert_close(loss(merged, 0), expected)


@POLICIES
def test_adapters_after_wrap_are_trained_by_whoever_trains_them(activations: str) -> None:
    """As TRL's trainers add one in their constructor."""

    def adapted(base: nn.Module) -> tuple[Any, dict[str, torch.Tensor]]:
        torch.manual_seed(2)
        config = peft.LoraConfig(target_modules=PROJECTIONS, init_lora_weights=False)
        model = peft.get_peft_model(base, config)
        params = {name: param for name, param in model.named_parameters() if param.requires_grad}
        assert params and all("lora_" in name for name in params)
        history = train(model, torch.optim.AdamW(params.values(), lr=1e-2), None, steps=3, loss_of=loss)
        return (history.losses, history.first_gradients), params

    with streamed(llama(), activations=activations) as base:
        assert_equal(adapted(base), adapted(llama()))


@pytest.mark.parametrize("names", [["embed_tokens"], ["embed_tokens", "lm_head"]])
def test_tied_adapters_that_are_two_parameters_are_refused_with_a_way_out(names: list[str]) -> None:
    """Plain PyTorch updates their memory twice in each step, by two sets of moments."""
    model = lora(tied_llama, target_modules=["q_proj", *names], ensure_weight_tying=True)
    match = r"lm_head\.lora_A\.default\.weight' has the same memory .* ensure_weight_tying .* modules_to_save"
    with pytest.raises(ValueError, match=match):
        streamer.wrap(model, device="cpu")


def test_what_cannot_be_done_with_adapters_after_wrap_names_the_way_out() -> None:
    with streamed(llama()) as base:
        model = peft.get_peft_model(base, peft.LoraConfig(target_modules=PROJECTIONS))
        with pytest.raises(ValueError, match=r"before streamer\.AdamW.* and after adding parameters"):
            streamer.AdamW(model.parameters())
        with pytest.raises(ValueError, match=r"call streamer\.unwrap on model\.base_model\.model first"):
            streamer.wrap(model, device="cpu")
    with streamed(model) as wrapped:
        train(wrapped, streamer.AdamW(wrapped.parameters()), None, steps=1, loss_of=loss)
