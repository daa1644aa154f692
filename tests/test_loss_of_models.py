"""`streamer.chunked_cross_entropy` with the heads of streamed models, of Hugging Face's, and in a run."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)

import streamer
from models.gpt2 import GPT
from streamer import chunked_cross_entropy
from streamer.app.run.data import IGNORED
from streamer.app.run.loop import TokenLoss
from streamer.backends.base import Lane
from streamer.backends.thread import ThreadBackend
from tests.libraries.test_huggingface import gpt2, llama
from tests.reference import VOCAB, assert_parity, batch, streamed, train_plain, train_streamed


@cache
def gpt() -> GPT:
    torch.manual_seed(0)
    return GPT(vocab_size=VOCAB, block_size=16, n_layer=3, n_head=2, n_embd=32)


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
        train_streamed(gpt(), steps=4, loss_of=loss_of, backend=backend),
        train_plain(gpt(), steps=4, loss_of=loss_of),
    )


@pytest.mark.parametrize("options", [{"dtype": torch.bfloat16}, {"update": "backward"}])
def test_other_ways_to_stream(options: dict[str, Any]) -> None:
    """Against the loss of all logits."""

    def all_logits(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        logits = model(tokens[:, :-1]).flatten(0, 1).float()
        return F.cross_entropy(logits, tokens[:, 1:].flatten())

    def losses(loss_of: Callable[[nn.Module, int], torch.Tensor]) -> list[float]:
        with streamed(gpt(), **options) as model:
            optimizer = streamer.AdamW(model.parameters(), lr=1e-3)
            found = []
            for step in range(4):
                loss = loss_of(model, step)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                found.append(loss.item())
        return found

    expected = losses(lambda model, step: all_logits(model, batch(step)))
    tolerance = 1e-3 if "dtype" in options else 1e-5
    torch.testing.assert_close(losses(of_gpt), expected, rtol=tolerance, atol=0)


@pytest.mark.parametrize("name", ["lm_head.weight", "transformer.h.1.mlp.c_proj.weight"])
def test_the_weight_is_that_of_the_last_update_though_nothing_was_called(name: str) -> None:
    backend = ThreadBackend(delays={Lane.HOST: lambda: 0.005, Lane.H2D: lambda: 0.005})
    with streamed(gpt(), layers="transformer.h", backend=backend) as model:
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


def gemma(**more: Any) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Gemma2Config(vocab_size=VOCAB, num_key_value_heads=1, head_dim=8, **sizes, **more)
    return Gemma2ForCausalLM(config)


def granite() -> nn.Module:
    """Its logits are divided by a number."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return GraniteForCausalLM(GraniteConfig(vocab_size=VOCAB, logits_scaling=4.0, **sizes))


class OnlyLogits(nn.Module):
    """A user's model."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, 8), nn.Linear(8, VOCAB)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(tokens))


def loss_and_gradients(model: nn.Module, loss: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return [loss.detach(), *(param.grad.clone() for param in model.parameters())]


@pytest.mark.parametrize(
    ("make", "is_chunked", "says"),
    [
        (lambda: copy.deepcopy(gpt()), True, ""),
        (llama, True, ""),
        (lambda: gpt2().eval(), True, ""),
        (partial(gemma, final_logit_softcapping=0.05), True, ""),
        (granite, False, "GraniteForCausalLM does more than multiply by its head: all logits are held\n"),
        (OnlyLogits, False, ""),
    ],
)
def test_the_loss_of_a_run(
    make: Callable[[], nn.Module],
    is_chunked: bool,
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = make()
    tokens, targets = batch(0)[:, :-1], batch(0)[:, 1:].clone()
    targets[:, :3] = IGNORED
    logits = model(tokens)
    logits = getattr(logits, "logits", logits)
    expected = loss_and_gradients(model, F.cross_entropy(logits.flatten(0, 1), targets.flatten()))
    sizes = []
    inner = streamer.chunked_cross_entropy
    monkeypatch.setattr(streamer, "chunked_cross_entropy", lambda *a, **k: sizes.append(1) or inner(*a, **k))
    loss = TokenLoss(model)
    for _ in range(2):
        actual = loss_and_gradients(model, loss(tokens, targets))
        for mine, theirs in zip(actual, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6)
    assert len(sizes) == (2 if is_chunked else 0)
    assert capsys.readouterr().out == says
    targets.fill_(IGNORED)
    assert loss(tokens, targets).item() == 0


WORDS = 100


def wide_gpt() -> nn.Module:
    return GPT(vocab_size=WORDS, block_size=16, n_layer=1, n_head=2, n_embd=32)


def wide_llama() -> nn.Module:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, **sizes))


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
    monkeypatch.setattr(streamer, "chunked_cross_entropy", partial(chunked_cross_entropy, chunk_size=16))
    tokens, targets = batch(0)[:, :-1], batch(0)[:, 1:]
    loss = TokenLoss(make())
    for _ in range(2):
        with Largest() as largest:
            loss(tokens, targets).backward()
        # 16 tokens at a time; the weight, transposed, looks like the logits of 32
        assert 16 * WORDS <= largest.logits <= 32 * WORDS < targets.numel() * WORDS
