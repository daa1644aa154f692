"""Unmodified Hugging Face models, tiny and with random weights, with their default ``use_cache=True``."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    DynamicCache,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

import streamer
from tests.reference import (
    POLICIES,
    VOCAB,
    assert_as_plain,
    assert_parity,
    batch,
    gradients,
    hugging_face,
    streamed,
    train_plain,
    train_streamed,
)


def gpt2() -> nn.Module:
    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCAB, n_positions=32, n_embd=32, n_layer=3, n_head=2)
    ).train()


def llama(**config: Any) -> nn.Module:
    return hugging_face(**config).train()


def t5() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    return T5ForConditionalGeneration(
        T5Config(vocab_size=VOCAB, decoder_start_token_id=0, pad_token_id=0, **sizes)
    )


def loss(model: nn.Module, step: int) -> torch.Tensor:
    tokens = batch(step)
    result: torch.Tensor = model(tokens, labels=tokens).loss
    return result


MODELS = [(gpt2, "transformer.h"), (llama, "model.layers")]


@pytest.mark.parametrize(("make", "layers"), MODELS)
@POLICIES
def test_training_with_the_default_cache(make: Any, layers: str, activations: str) -> None:
    model = make()
    assert model.config.use_cache
    options = {"loss_of": loss, "steps": 3}
    expected = train_plain(model, **options)
    for chosen in (layers, None):
        assert_parity(train_streamed(model, layers=chosen, activations=activations, **options), expected)
    with streamed(model, layers=layers, activations=activations) as mine:
        cache = mine(batch(0)).past_key_values
        assert cache is None or cache.get_seq_length() == 0, "its keys and values would stay on the device"


def test_a_model_without_cache_is_planned() -> None:
    """It looks at the values of positions, to see whether several sequences are packed into a row."""
    model = llama()
    model.config.use_cache = False
    batches = {"input_ids": batch(0), "labels": batch(0)}
    options: dict[str, Any] = {"layers": "model.layers", "activations": "auto", "device": "cpu"}
    packed = torch.arange(17).remainder(9)[None]
    for example in (batches, {**batches, "position_ids": packed}):
        streamer.wrap(model, example=example, **options)
        planned = streamer.chosen(model)
        assert planned is not None and planned.choice.activations == "keep"
        streamer.unwrap(model)


@pytest.mark.parametrize(("make", "layers"), MODELS)
def test_a_filled_cache_is_refused_in_training(make: Any, layers: str) -> None:
    with streamed(make(), layers=layers) as model:
        model.eval()
        tokens = batch(0)
        # from transformers 5.24 on it is called cache
        taken = inspect.signature(type(model).forward).parameters
        name = "cache" if "cache" in taken else "past_key_values"
        with torch.no_grad():
            cache = model(tokens, **{name: DynamicCache(config=model.config)})[name]
        assert cache.get_seq_length() == tokens.shape[1]
        match = f"{layers}.0' got a key/value cache with 17 tokens.*use_cache=False.*past_key_values=None"
        with pytest.raises(ValueError, match=match):
            model(tokens[:, :1], **{name: cache})


@pytest.mark.parametrize("tied", [True, False])
def test_embeddings_that_are_resized_after_wrap(tied: bool) -> None:
    tokens = batch(0)

    def use(model: nn.Module) -> Any:
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        return loss, gradients(model)

    model = streamer.wrap(llama(tie_word_embeddings=tied), device="cpu")
    model.resize_token_embeddings(VOCAB + 3, mean_resizing=False)
    match = "resize before streamer.wrap, or call streamer.unwrap" if tied else "call streamer.unwrap"
    with pytest.raises(ValueError, match=match) as error:
        use(model)
    assert "write into it" not in str(error.value)
    # as the error says
    streamer.unwrap(model)
    model.resize_token_embeddings(VOCAB + 5, mean_resizing=False)
    assert_as_plain(model, use, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("make", "layers"), MODELS)
def test_generation_uses_the_cache_and_equals_the_plain_model(make: Any, layers: str) -> None:
    settings = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    prompt = batch(0, size=2, time=4)
    assert_as_plain(make().eval(), lambda model: model.generate(prompt, **settings), layers=layers)


@pytest.mark.parametrize(("make", "layers"), [*MODELS, (t5, ["encoder.block", "decoder.block"])])
def test_micro_batches(make: Any, layers: Any) -> None:
    """Padded sequences, in training and in generation; see tests/engine/layer/test_micro_batches.py."""
    plain = make().eval()
    tokens, mask = batch(0, size=5), torch.ones(5, 17, dtype=torch.long)
    mask[1, 12:] = mask[3, :4] = 0
    inputs = {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}
    settings = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "attention_mask": mask}

    def first_gradients(model: nn.Module) -> Any:
        loss = model(**inputs).loss
        loss.backward()
        return loss, gradients(model)

    options = {"layers": layers, "micro_batch_size": 2}
    assert_as_plain(plain, lambda model: model.generate(tokens, **settings), **options)
    assert_as_plain(plain, first_gradients, rtol=1e-4, atol=1e-6, **options)


ON_DISK = {"": "disk"}
PARTLY = {f"model.{name}": "cpu" for name in ("embed_tokens", "rotary_emb", "norm", "layers.0", "layers.2")}
PARTLY |= {"model.layers.1": "disk", "lm_head": "cpu"}


@pytest.mark.filterwarnings("ignore:::transformers", "ignore:::accelerate")
@pytest.mark.parametrize("places", [ON_DISK, PARTLY])
@pytest.mark.parametrize("init", [None, nn.init.zeros_])
def test_a_model_whose_values_device_map_has_left_elsewhere_is_not_to_be_given_others(
    init: Any, places: dict[str, str], tmp_path: Path
) -> None:
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    llama().save_pretrained(tmp_path / "llama")
    model = LlamaForCausalLM.from_pretrained(
        tmp_path / "llama", device_map=places, offload_folder=tmp_path / "offloaded"
    )
    match = (
        r"^parameter 'model\.layers\.\d\.self_attn.* device_map= .*; load the model without device_map, or"
    )
    with pytest.raises(ValueError, match=match):
        streamer.wrap(model, device="cpu", init=init)
