"""PyTorch's own optimizers on a wrapped model, and several optimizers on one model."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import streamer
from models.gpt2 import GPT
from tests.reference import VOCAB, assert_equal, assert_trains_alike, language_loss, streamed


@cache
def gpt() -> GPT:
    torch.manual_seed(0)
    return GPT(vocab_size=VOCAB, block_size=16, n_layer=3, n_head=2, n_embd=32, dropout=0.1)


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


def torch_adamw(**settings: bool) -> Make:
    return lambda model, _: [torch.optim.AdamW(model.parameters(), **CALM, **settings)]


def sgd(model: nn.Module, _: Any) -> Optimizers:
    return [torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)]


def two_of_ours(model: nn.Module, kind: Any) -> Optimizers:
    """With this eps the size of a gradient, and so clipping, matters to Adam."""
    return [kind(list(model.parameters())[i::2], lr=1e-2, eps=1.0) for i in range(2)]


def one_of_each(model: nn.Module, kind: Any) -> Optimizers:
    params = list(model.parameters())
    return [kind(params[::2], **CALM), torch.optim.SGD(params[1::2], lr=0.5)]


MAKES = {
    "AdamW": torch_adamw(),
    "foreach": torch_adamw(foreach=True),
    "fused": torch_adamw(fused=True),
    "SGD": sgd,
    "two of ours": two_of_ours,
    "one of each": one_of_each,
}


@pytest.mark.parametrize("name", MAKES)
def test_training_is_that_of_a_plain_model(name: str) -> None:
    assert_trains_alike(gpt(), train, make=MAKES[name], tolerance=1e-5, options={"layers": "transformer.h"})


def test_a_step_that_the_loop_skips_after_clipping_leaves_nothing_behind() -> None:
    ours: Make = lambda model, kind: [kind(model.parameters(), **CALM)]  # noqa: E731
    loop = partial(train, skip=2)
    assert_trains_alike(gpt(), loop, make=ours, tolerance=1e-5, options={"layers": "transformer.h"})


def test_what_a_step_that_fails_has_written_is_what_runs() -> None:
    """A fused optimizer does not tell autograd what it writes."""

    def use(model: nn.Module) -> float:
        first, second = model.transformer.h[0].parameters(), model.transformer.h[1].parameters()
        groups = [{"params": [*first]}, {"params": [*second], "lr": None}]
        optimizer = torch.optim.SGD(groups, lr=0.5, fused=True)
        torch.manual_seed(0)
        language_loss(model, 0).backward()
        with pytest.raises(TypeError):
            optimizer.step()
        with torch.no_grad():
            return language_loss(model.eval(), 1).item()

    with streamed(gpt(), layers="transformer.h", num_slots=3) as model:
        assert use(model) == pytest.approx(use(copy.deepcopy(gpt())))


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


LOSES_UPDATES = r"keeps no fp32 masters of {} weights.*: use streamer\.AdamW"


def halves(dtype: torch.dtype) -> GPT:
    return copy.deepcopy(gpt()).to(dtype)


def backward(model: nn.Module) -> None:
    torch.manual_seed(0)
    language_loss(model, 0).backward()


@pytest.mark.parametrize("kind", ["AdamW", "SGD", "Adagrad"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_first_step_on_16_bit_weights_warns_of_lost_updates(kind: str, dtype: torch.dtype) -> None:
    """Once for a model, at the line of the user's loop, and before anything is written."""
    name = str(dtype).removeprefix("torch.")
    with streamed(halves(dtype), layers="transformer.h") as model:
        optimizer = getattr(torch.optim, kind)(model.parameters(), lr=1e-5)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        backward(model)
        with pytest.warns(UserWarning, match=f"{kind} {LOSES_UPDATES.format(name)}") as caught:
            optimizer.step()
        assert [Path(warning.filename) for warning in caught] == [Path(__file__)]
        schedule.step()
        optimizer.step()
        torch.optim.SGD(model.parameters(), lr=1e-5).step()


def test_fp32_weights_streamed_in_16_bits_are_warned_of() -> None:
    with streamed(gpt(), layers="transformer.h", dtype=torch.bfloat16) as model:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
        backward(model)
        with pytest.warns(UserWarning, match=LOSES_UPDATES.format("bfloat16")):
            optimizer.step()


def in_no_layer(model: GPT) -> list[nn.Parameter]:
    in_layers = {*model.transformer.h.parameters()}
    return [param for param in model.parameters() if param not in in_layers]


def test_weights_in_no_layer_are_warned_of() -> None:
    with streamed(halves(torch.bfloat16), layers="transformer.h") as model:
        optimizer = torch.optim.AdamW(in_no_layer(model))
        backward(model)
        with pytest.warns(UserWarning, match=LOSES_UPDATES.format("bfloat16")):
            optimizer.step()


def test_gradients_that_a_closure_computes_are_warned_of() -> None:
    with streamed(halves(torch.bfloat16), layers="transformer.h") as model:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)

        def closure() -> float:
            loss = language_loss(model, 0)
            loss.backward()
            return loss.item()

        with pytest.warns(UserWarning, match=LOSES_UPDATES.format("bfloat16")):
            optimizer.step(closure)


def test_a_warning_raised_as_an_error_leaves_the_weights_as_they_were() -> None:
    with streamed(halves(torch.bfloat16), layers="transformer.h") as model:
        before = {name: value.clone() for name, value in model.state_dict().items()}
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        backward(model)
        with pytest.raises(UserWarning, match=LOSES_UPDATES.format("bfloat16")):
            optimizer.step()
        assert_equal(model.state_dict(), before)


def test_optimizers_that_lose_nothing_are_not_warned_of() -> None:
    """Those of fp32 weights, of frozen 16-bit weights beside these, of a plain model, and streamer.AdamW."""
    with streamed(gpt(), layers="transformer.h") as model:
        backward(model)
        torch.optim.AdamW(model.parameters()).step()
    with streamed(halves(torch.bfloat16), layers="transformer.h") as model:
        backward(model)
        streamer.AdamW(model.parameters()).step()
        plain = nn.Linear(2, 2, dtype=torch.bfloat16)
        plain(torch.ones(2, dtype=torch.bfloat16)).sum().backward()
        torch.optim.SGD(plain.parameters()).step()
    mixed = halves(torch.bfloat16).requires_grad_(False)
    mixed.transformer.ln_f.float().requires_grad_(True)
    with streamed(mixed, layers="transformer.h") as model:
        torch.autocast("cpu", torch.bfloat16)(backward)(model)
        torch.optim.SGD(model.parameters(), lr=1e-2).step()
