"""Several optimizers on one model, and steps that fail."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import streamer
from tests.reference import assert_trains_alike, language_loss, streamed, tiny_gpt

gpt = partial(tiny_gpt, dropout=0.1)
Optimizers = list[torch.optim.Optimizer]
Make = Callable[[nn.Module, Any], Optimizers]
CALM = {"lr": 1e-2, "eps": 1e-2}


def train(
    model: nn.Module,
    optimizers: Optimizers,
    clip: Callable[[float], torch.Tensor],
    *,
    skip: int | None = None,
) -> None:
    for step in range(5):
        torch.manual_seed(step)
        (language_loss(model, step) * (1e6 if step == skip else 1)).backward()
        if clip(0.1) < 1e4:
            for optimizer in optimizers:
                optimizer.step()
        model.zero_grad()


def two_of_ours(model: nn.Module, kind: Any) -> Optimizers:
    """With this eps the size of a gradient, and so clipping, matters to Adam."""
    return [kind(list(model.parameters())[i::2], lr=1e-2, eps=1.0) for i in range(2)]


def one_of_each(model: nn.Module, kind: Any) -> Optimizers:
    params = list(model.parameters())
    return [kind(params[::2], **CALM), torch.optim.SGD(params[1::2], lr=0.5)]


MAKES = {"two of ours": two_of_ours, "one of each": one_of_each}


@pytest.mark.parametrize("name", MAKES)
def test_training_is_that_of_a_plain_model(name: str) -> None:
    assert_trains_alike(gpt(), train, make=MAKES[name], tolerance=1e-5, options={"layers": "transformer.h"})


def test_a_step_that_the_loop_skips_after_clipping_leaves_nothing_behind() -> None:
    ours: Make = lambda model, kind: [kind(model.parameters(), **CALM)]  # noqa: E731
    loop = partial(train, skip=2)
    assert_trains_alike(gpt(), loop, make=ours, tolerance=1e-5, options={"layers": "transformer.h"})


def test_a_step_that_fails_writes_nothing() -> None:
    with streamed(gpt(), layers="transformer.h", num_slots=3) as model:
        first, second = model.transformer.h[0].parameters(), model.transformer.h[1].parameters()
        groups = [{"params": [*first]}, {"params": [*second], "lr": None}]
        optimizer = torch.optim.SGD(groups, lr=0.5, fused=True)
        torch.manual_seed(0)
        language_loss(model, 0).backward()
        with pytest.raises(TypeError):
            optimizer.step()
        with torch.no_grad():
            after = language_loss(model.eval(), 1).item()
    assert after == pytest.approx(language_loss(gpt().eval(), 1).item())


def test_optimizers_of_others_do_not_keep_a_dropped_model_alive() -> None:
    model = streamer.wrap(gpt(), device="cpu")
    executor = weakref.ref(model._streamer.executor)
    del model
    gc.collect()
    assert executor() is None
    plain = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(plain.parameters(), lr=1.0)
    plain(torch.ones(2)).sum().backward()
    optimizer.step()
