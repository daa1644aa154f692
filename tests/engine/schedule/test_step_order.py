"""The order of a whole step, and loops that ask for layers in another order than it expects."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import streamer
from streamer.engine.schedule.op import Op
from tests.models import WIDTH, Layer
from tests.reference import (
    VOCAB,
    History,
    assert_parity,
    in_turn,
    language_loss,
    one_step,
    streamed,
    tiny_gpt,
    train_plain,
    train_streamed,
)


@pytest.mark.parametrize(
    ("layers", "options", "golden"),
    [
        (
            3,
            {},
            "rootF 0F@0 2UNSHARD@0 1F@1 2F@0 "
            "2B@0 2OFFLOAD_GRAD@1 0UNSHARD@0 1B@1 1OFFLOAD_GRAD@0 0B@0 0OFFLOAD_GRAD@1 SYNC "
            # before the root's gradients are collected
            "SYNC rootCOLLECT rootOFFLOAD_GRAD rootSTEP rootUNSHARD "
            "0STEP 1STEP 2STEP 0UNSHARD@0 1UNSHARD@1",
        ),
        (
            3,
            {"update": "backward"},
            "rootF 0F@0 2UNSHARD@0 1F@1 2F@0 "
            "2B@0 2OFFLOAD_GRAD@1 2STEP 0UNSHARD@0 1B@1 1OFFLOAD_GRAD@0 1STEP 1UNSHARD@1 "
            "0B@0 0OFFLOAD_GRAD@1 0STEP 0UNSHARD@0 "
            "SYNC SYNC rootCOLLECT rootOFFLOAD_GRAD rootSTEP rootUNSHARD",
        ),
        # the last layers are still there when backward begins
        (
            6,
            {"num_slots": 4},
            "rootF 0F@0 4UNSHARD@0 1F@1 5UNSHARD@1 2F@2 3F@3 4F@0 5F@1 "
            "5B@1 5OFFLOAD_GRAD@0 1UNSHARD@1 4B@0 4OFFLOAD_GRAD@1 0UNSHARD@0 3B@3 3OFFLOAD_GRAD@0 "
            "2B@2 2OFFLOAD_GRAD@1 1B@1 1OFFLOAD_GRAD@0 0B@0 0OFFLOAD_GRAD@1 SYNC "
            "SYNC rootCOLLECT rootOFFLOAD_GRAD rootSTEP rootUNSHARD "
            "0STEP 1STEP 2STEP 3STEP 4STEP 5STEP 0UNSHARD@0 1UNSHARD@1 2UNSHARD@2 3UNSHARD@3",
        ),
    ],
    ids=["two slots", "updates in backward", "four slots"],
)
def test_golden_of_a_step(layers: int, options: dict[str, Any], golden: str, issued: list[Op]) -> None:
    with streamed(tiny_gpt(layers), **options) as model:
        optimizer = streamer.AdamW(model.parameters())
        for step in range(2):
            issued.clear()
            language_loss(model, step).backward()
            if "update" not in options:
                streamer.clip_grad_norm_(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()
        assert " ".join(map(str, issued)) == golden


def test_golden_of_the_first_forward(issued: list[Op]) -> None:
    with streamed(tiny_gpt()) as model:
        issued.clear()
        language_loss(model, 0)
        assert " ".join(map(str, issued)) == "rootF 0UNSHARD@0 1UNSHARD@1 0F@0 2UNSHARD@0 1F@1 2F@0"


def test_golden_of_inference(issued: list[Op]) -> None:
    with streamed(tiny_gpt()) as model, torch.no_grad():
        language_loss(model, 0)
        issued.clear()
        language_loss(model, 1)
        # each layer is fetched once a pass, while the one before it runs
        assert " ".join(map(str, issued)) == "0F@1 2UNSHARD@1 1F@0 0UNSHARD@0 2F@1 1UNSHARD@1"


class Ordered(nn.Module):
    """Layers called in an order that the step decides."""

    def __init__(self, layers: int = 5) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(nn.Sequential(Layer(), nn.Dropout(0.1)) for _ in range(layers))
        self.head = nn.Linear(WIDTH, VOCAB)
        self.order = list(range(layers))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        for index in self.order:
            hidden = self.layers[index](hidden)
        return self.head(hidden)


def shuffled(model: nn.Module, step: int) -> torch.Tensor:
    random.Random(step).shuffle(model.order)
    return language_loss(model, step)


def layer_drop(model: nn.Module, step: int) -> torch.Tensor:
    draw = random.Random(step)
    model.order = [index for index in range(5) if draw.random() < 0.6]
    return language_loss(model, step)


def repeated(model: nn.Module, step: int) -> torch.Tensor:
    model.order = [0, 1, 1, 2, 0, 3, 4]
    return language_loss(model, step)


def two_forwards(model: nn.Module, step: int) -> torch.Tensor:
    first = language_loss(model, 2 * step)
    return first + language_loss(model, 2 * step + 1)


def two_forwards_two_backwards(model: nn.Module, step: int) -> torch.Tensor:
    first, second = language_loss(model, 2 * step), language_loss(model, 2 * step + 1)
    first.backward()
    return second


def an_abandoned_forward(model: nn.Module, step: int) -> torch.Tensor:
    language_loss(model, step + 100)
    return language_loss(model, step)


@cache
def expected_of(loss_of: Any) -> History:
    return train_plain(Ordered(), loss_of=loss_of, steps=4)


LOSSES = [shuffled, layer_drop, repeated, two_forwards, two_forwards_two_backwards, an_abandoned_forward]


@pytest.mark.parametrize(
    ("loss_of", "activations", "num_slots"), in_turn(LOSSES, ["recompute", "keep"], [1, 2, 4])
)
def test_an_unexpected_order_costs_time_only(loss_of: Any, activations: str, num_slots: int) -> None:
    actual = train_streamed(
        Ordered(), loss_of=loss_of, steps=4, layers="layers", activations=activations, num_slots=num_slots
    )
    assert_parity(actual, expected_of(loss_of))


def test_prefetch_misses_only_before_the_order_is_known() -> None:
    with streamed(tiny_gpt(6)) as model:
        optimizer = streamer.AdamW(model.parameters())
        for step in range(4):
            one_step(model, optimizer, step)
        stats = streamer.stats(model)
        assert (stats.prefetch_hits, stats.prefetch_misses) == (4 * 12 - 1, 1)
        # a forward that no backward follows is not learned
        language_loss(model, 4)
        one_step(model, optimizer, 5)
        assert streamer.stats(model).prefetch_misses <= 2
