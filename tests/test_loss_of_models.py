"""`streamer.chunked_cross_entropy` with the heads of streamed models, of Hugging Face's, and in a run."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Gemma2Config, Gemma2ForCausalLM, GraniteConfig, GraniteForCausalLM

import streamer
from models.gpt2 import GPT
from streamer import chunked_cross_entropy
from streamer.backends.base import Lane
from streamer.backends.thread import ThreadBackend
from streamer.cli.loop import loss_function
from streamer.integrations import causal_lm
from tests.libraries.test_huggingface import gpt2, llama
from tests.reference import (
    LLAMA_SIZES,
    VOCAB,
    assert_equal,
    assert_parity,
    batch,
    flat,
    gradients,
    streamed,
    tiny_gpt,
    train_plain,
    train_streamed,
)


@cache
def of_gpt(model: nn.Module, step: int, *, reduction: str = "mean") -> torch.Tensor:
    tokens = batch(step)
    loss: torch.Tensor = model(
        tokens[:, :-1],
        loss_of=lambda hidden, weight: chunked_cross_entropy(
            hidden, weight, tokens[:, 1:], chunk_size=13, reduction=reduction
        ),
    )
    return loss.mean()


def of_hugging_face(model: Any, step: int) -> torch.Tensor:
    """As README.md has it."""
    tokens = batch(step)
    hidden = model.base_model(tokens).last_hidden_state
    return chunked_cross_entropy(hidden[:, :-1], model.lm_head.weight, tokens[:, 1:], chunk_size=13)


@pytest.mark.parametrize(("reduction", "delayed"), [("mean", None), ("none", Lane.HOST), ("mean", Lane.H2D)])
def test_a_streamed_model_with_a_tied_head(reduction: str, delayed: Lane | None) -> None:
    backend = ThreadBackend(delays={} if delayed is None else {delayed: lambda: 0.003}, poison=True)
    loss_of = partial(of_gpt, reduction=reduction)
    assert_parity(
        train_streamed(tiny_gpt(), steps=4, loss_of=loss_of, backend=backend),
        train_plain(tiny_gpt(), steps=4, loss_of=loss_of),
    )


@pytest.mark.parametrize(
    ("options", "tolerance"), [({"dtype": torch.bfloat16}, 1e-3), ({"update": "backward"}, 1e-5)]
)
def test_other_ways_to_stream(options: dict[str, Any], tolerance: float) -> None:
    """Against the loss of all logits."""
    run = partial(train_streamed, tiny_gpt(), steps=4, clip=False, **options)
    torch.testing.assert_close(run(loss_of=of_gpt).losses, run().losses, rtol=tolerance, atol=0)


@pytest.mark.parametrize("name", ["lm_head.weight", "transformer.h.1.mlp.c_proj.weight"])
def test_the_weight_is_that_of_the_last_update_though_nothing_was_called(name: str) -> None:
    backend = ThreadBackend(delays={Lane.HOST: lambda: 0.005, Lane.H2D: lambda: 0.005})
    with streamed(tiny_gpt(), layers="transformer.h", backend=backend) as model:
        optimizer = streamer.AdamW(model.parameters(), lr=0.1)
        weight = model.get_parameter(name)
        hidden, targets = torch.randn(4, weight.shape[1]), torch.arange(4)
        of_gpt(model, 0).backward()
        optimizer.step()
        soon = chunked_cross_entropy(hidden, weight, targets)
        streamer.synchronize(model)
        torch.testing.assert_close(soon, F.cross_entropy(hidden @ weight.T, targets))


@pytest.mark.parametrize("make", [llama, gpt2])
def test_hugging_face_models(make: Callable[[], nn.Module]) -> None:
    def all_logits(model: nn.Module, step: int) -> torch.Tensor:
        loss: torch.Tensor = model(batch(step), labels=batch(step)).loss
        return loss

    plain = make().eval()  # without dropout, which would be drawn otherwise
    expected = train_plain(plain, steps=4, loss_of=of_hugging_face)
    backend = ThreadBackend(delays={Lane.HOST: lambda: 0.002}, poison=True)
    assert_parity(train_streamed(plain, steps=4, loss_of=of_hugging_face, backend=backend), expected)
    theirs = train_plain(plain, steps=4, loss_of=all_logits)
    torch.testing.assert_close(expected.losses, theirs.losses, rtol=1e-5, atol=0)
    for name, gradient in theirs.first_gradients.items():
        torch.testing.assert_close(expected.first_gradients[name], gradient, rtol=0, atol=1e-6)


def test_a_head_that_was_frozen_when_wrapped_is_refused() -> None:
    plain = llama()
    plain.lm_head.requires_grad_(False)
    with streamed(plain) as model:
        of_hugging_face(model, 0).backward()
        assert model.lm_head.weight.grad is None
        model.lm_head.requires_grad_(True)
        with pytest.raises(ValueError, match=r"'lm_head.weight' was frozen when the model was wrapped"):
            of_hugging_face(model, 0)


def small(kind: Any, config: Any, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    return kind(config(**(LLAMA_SIZES | {"hidden_size": 16, "num_hidden_layers": 1} | options)))


class OnlyLogits(nn.Module):
    """A user's model."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, 8), nn.Linear(8, VOCAB)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(tokens))


def loss_and_gradients(model: nn.Module, loss: torch.Tensor) -> Any:
    model.zero_grad()
    loss.backward()
    return flat([loss, gradients(model)])


@pytest.mark.parametrize(
    ("make", "is_chunked"),
    [
        (tiny_gpt, True),
        (llama, True),
        (lambda: gpt2().eval(), True),
        (partial(small, Gemma2ForCausalLM, Gemma2Config, final_logit_softcapping=0.05), True),
        # whose logits are divided by a number
        (partial(small, GraniteForCausalLM, GraniteConfig, logits_scaling=4.0), False),
        (OnlyLogits, False),
    ],
)
def test_the_loss_of_a_run(
    make: Callable[[], nn.Module], is_chunked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make()
    tokens, targets = batch(0)[:, :-1], batch(0)[:, 1:].clone()
    logits = model(tokens)
    logits = getattr(logits, "logits", logits)
    total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    expected = loss_and_gradients(model, total / 100)
    sizes = []

    def counting(*args: Any, **options: Any) -> torch.Tensor:
        sizes.append(1)
        return chunked_cross_entropy(*args, **options)

    for module in (streamer, causal_lm):
        monkeypatch.setattr(module, "chunked_cross_entropy", counting)
    loss = loss_function(model)
    for _ in range(2):
        found = loss(model, (tokens, targets, {})) / 100
        assert_equal(loss_and_gradients(model, found), expected, atol=1e-6)
    assert len(sizes) == (2 if is_chunked else 0)


WORDS = 100


def wide_gpt() -> nn.Module:
    return GPT(vocab_size=WORDS, block_size=16, n_layer=1, n_head=2, n_embd=32)


def wide_llama() -> nn.Module:
    return llama(vocab_size=WORDS, num_hidden_layers=1)


class Largest(TorchDispatchMode):
    """The most logits in one tensor."""

    logits = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.shape[-1:] == (WORDS,):
            self.logits = max(self.logits, result.numel())
        return result


@pytest.mark.parametrize("make", [wide_gpt, wide_llama])
def test_a_run_holds_no_whole_logits(make: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (streamer, causal_lm):
        monkeypatch.setattr(module, "chunked_cross_entropy", partial(chunked_cross_entropy, chunk_size=16))
    tokens, targets = batch(0)[:, :-1], batch(0)[:, 1:]
    model = make()
    loss = loss_function(model)
    for _ in range(2):
        with Largest() as largest:
            loss(model, (tokens, targets, {})).backward()
        # 16 tokens at a time; the weight, transposed, looks like the logits of 32
        assert 16 * WORDS <= largest.logits <= 32 * WORDS < targets.numel() * WORDS
