"""PyTorch's own optimizers on a wrapped model, and several optimizers on one model."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import streamer
from models.gpt2 import GPT
from tests.reference import VOCAB, language_loss, streamed


@cache
def gpt() -> GPT:
    torch.manual_seed(0)
    return GPT(vocab_size=VOCAB, block_size=16, n_layer=3, n_head=2, n_embd=32, dropout=0.1)


def train(
    model: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    clip: Callable[[float], torch.Tensor],
    *,
    skip: int | None = None,
) -> dict[str, torch.Tensor]:
    for step in range(5):
        torch.manual_seed(step)
        (language_loss(model, step) * (1e6 if step == skip else 1)).backward()
        norm = clip(0.1)
        if norm < 1e4:
            for optimizer in optimizers:
                optimizer.step()
        model.zero_grad()
    return {name: value.clone() for name, value in model.state_dict().items()}


def compare(make: Callable[[nn.Module, bool], list[torch.optim.Optimizer]], **options: Any) -> None:
    """Weights after training equal plain PyTorch's, ``make`` being told whether the model is streamed."""
    reference = copy.deepcopy(gpt())
    clip = torch.nn.utils.clip_grad_norm_
    plain = make(reference, False)
    expected = train(reference, plain, lambda norm: clip(reference.parameters(), norm), **options)
    with streamed(gpt(), layers="transformer.h") as model:
        actual = train(
            model, make(model, True), lambda norm: streamer.clip_grad_norm_(model, norm), **options
        )
    for name, weight in expected.items():
        torch.testing.assert_close(actual[name], weight, rtol=0, atol=1e-5, msg=name)


@pytest.mark.parametrize("settings", [{}, {"foreach": True}, {"fused": True}], ids=str)
def test_pytorchs_adamw(settings: dict[str, bool]) -> None:
    compare(lambda model, _: [torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-2, **settings)])


def test_sgd_with_momentum() -> None:
    compare(lambda model, _: [torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)])


def test_two_of_ours_are_both_clipped() -> None:
    def two(model: nn.Module, is_streamed: bool) -> list[torch.optim.Optimizer]:
        kind: Any = streamer.AdamW if is_streamed else torch.optim.AdamW
        params = list(model.parameters())
        return [kind(params[i::2], lr=1e-2, eps=1e-2) for i in range(2)]

    compare(two)


def test_one_of_ours_beside_one_of_pytorchs() -> None:
    def two(model: nn.Module, is_streamed: bool) -> list[torch.optim.Optimizer]:
        kind: Any = streamer.AdamW if is_streamed else torch.optim.AdamW
        params = list(model.parameters())
        return [kind(params[::2], lr=1e-2, eps=1e-2), torch.optim.SGD(params[1::2], lr=0.5)]

    compare(two)


def test_a_step_that_the_loop_skips_after_clipping_leaves_nothing_behind() -> None:
    def ours(model: nn.Module, is_streamed: bool) -> list[torch.optim.Optimizer]:
        kind: Any = streamer.AdamW if is_streamed else torch.optim.AdamW
        return [kind(model.parameters(), lr=1e-2, eps=1e-2)]

    compare(ours, skip=2)


def test_optimizers_of_others_do_not_keep_a_dropped_model_alive() -> None:
    model = streamer.wrap(copy.deepcopy(gpt()), device="cpu")
    executor = weakref.ref(model._streamer.executor)
    del model
    gc.collect()
    assert executor() is None
    plain = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(plain.parameters(), lr=1.0)
    plain(torch.ones(2)).sum().backward()
    optimizer.step()
