"""Streamed training equals plain PyTorch."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import nn

import streamer
from tests.models import WIDTH, Stack, numbers
from tests.reference import (
    History,
    assert_parity,
    assert_same,
    batch,
    language_loss,
    streamed,
    tiny_gpt,
    train,
    train_plain,
    train_streamed,
    wide_loss,
)

LAYERS = 4


gpt = partial(tiny_gpt, LAYERS, dropout=0.1)


@cache
def plain(tied: bool) -> History:
    return train_plain(gpt(tied=tied), max_norm=0.5)


@pytest.mark.parametrize("activations", ["recompute", "keep"])
@pytest.mark.parametrize("num_slots", [1, 2, 3, LAYERS])
def test_ten_steps_in_fp32(activations: str, num_slots: int) -> None:
    tied = (activations == "keep") == (num_slots in (1, LAYERS))  # so that each two values meet
    options: dict[str, Any] = {"activations": activations, "num_slots": num_slots, "max_norm": 0.5}
    expected = plain(tied)
    assert max(expected.norms) > 0.5, "clipping must have something to do"
    assert_parity(train_streamed(gpt(tied=tied), layers="transformer.h", **options), expected)


#: In bf16 a gradient that is close to zero is all rounding, and with the usual eps Adam makes a whole step
#: of it, so that two runs which differ in one last bit diverge at once. With this eps they do not.
CALM = {"lr": 3e-4, "weight_decay": 0.1, "eps": 1e-3}


class TorchMasters:
    """A plain bf16 model with fp32 masters, as people write it: PyTorch updates the masters, which are then
    rounded into the model (to nearest, ties away from zero, as streamer's split master is)."""

    def __init__(self, model: nn.Module, masters: dict[str, torch.Tensor], **settings: float) -> None:
        self.params = dict(model.named_parameters())
        self.masters = {name: nn.Parameter(masters[name].clone()) for name in self.params}
        self.optimizer = torch.optim.AdamW(self.masters.values(), **settings)
        self.round()

    @torch.no_grad()
    def round(self) -> None:
        for name, master in self.masters.items():
            bits = (master.view(torch.int32).long() + 0x8000) & 0xFFFF0000
            exact = bits.where(bits < 1 << 31, bits - (1 << 32)).to(torch.int32).view(torch.float32)
            self.params[name].copy_(exact)

    def step(self) -> None:
        for name, master in self.masters.items():
            grad = self.params[name].grad
            master.grad = None if grad is None else grad.float()
        self.optimizer.step()
        self.round()

    def zero_grad(self) -> None:
        for param in self.params.values():
            param.grad = None


@cache
def train_masters(*, steps: int = 5, **settings: float) -> tuple[History, TorchMasters]:
    model = gpt()
    reference = copy.deepcopy(model).bfloat16()
    masters = TorchMasters(reference, dict(model.named_parameters()), **settings)
    history = train(reference, masters, None, steps=steps, loss_of=wide_loss)  # type: ignore[arg-type]
    return history, masters


def train_bf16(activations: str, *, steps: int = 5, **settings: float) -> tuple[History, nn.Module]:
    """The history of a streamed bf16 model, and the model unwrapped."""
    wrapped = streamer.wrap(gpt(), device="cpu", dtype=torch.bfloat16, activations=activations)
    optimizer = streamer.AdamW(wrapped.parameters(), **settings)
    history = train(wrapped, optimizer, None, steps=steps, loss_of=wide_loss)
    return history, streamer.unwrap(wrapped)


@pytest.mark.parametrize("activations", ["recompute", "keep"])
def test_bf16_equals_a_plain_bf16_model_with_fp32_masters(activations: str) -> None:
    in_bf16, masters = train_masters(**CALM)
    actual, unwrapped = train_bf16(activations, **CALM)
    # weights that differ in an fp32 rounding may be rounded to different bf16 neighbours: compare the masters
    actual.weights = {name: param.detach() for name, param in unwrapped.named_parameters()}
    of_masters = {name: master.detach() for name, master in masters.masters.items()}
    assert_parity(actual, replace(in_bf16, weights=of_masters))


def test_inference_equals_the_plain_model_and_does_not_disturb_training() -> None:
    tokens = batch(99)[:, :-1]
    reference = gpt().eval()
    with torch.no_grad():
        expected = reference(tokens)

    def loss_with_validation(model: nn.Module, step: int) -> torch.Tensor:
        model.eval()
        for guard in (torch.no_grad, torch.inference_mode):
            with guard():
                model(tokens)
        model.train()
        return language_loss(model, step)

    with streamed(gpt(), layers="transformer.h") as model, torch.no_grad():
        assert torch.equal(model.eval()(tokens), expected)
        before = streamer.stats(model).busy_seconds["d2h"]
        model(tokens)
        assert streamer.stats(model).busy_seconds["d2h"] == before
    with streamed(gpt(), layers="transformer.h") as model, torch.inference_mode():
        assert torch.equal(model.eval()(tokens), expected)
    actual = train_streamed(gpt(), layers="transformer.h", max_norm=0.5, loss_of=loss_with_validation)
    assert_same(actual, train_streamed(gpt(), layers="transformer.h", max_norm=0.5))


def test_switching_to_eval_before_backward_changes_nothing_of_a_layer_that_is_kept() -> None:
    def gradients(model: nn.Module) -> list[torch.Tensor]:
        torch.manual_seed(0)
        loss = language_loss(model, 0)
        model.eval()
        loss.backward()
        assert not any(module.training for module in model.modules())
        return [param.grad.clone() for param in model.parameters() if param.grad is not None]

    expected = gradients(gpt())
    with streamed(gpt(), activations="keep") as model:
        actual = gradients(model)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(actual, expected, strict=True))
    # as under PyTorch's checkpoint, a layer that runs again is by then one without dropout
    match = "computed something else when it ran again in backward .wrap with activations='keep'"
    with streamed(gpt(), activations="recompute") as model, pytest.raises(RuntimeError, match=match):
        gradients(model)


class Collecting(Stack):
    def forward(self, x: torch.Tensor, seen: list[torch.Tensor]) -> torch.Tensor:
        seen.append(x)
        return super().forward(x)


def test_a_list_among_the_arguments_is_the_callers() -> None:
    x, seen = numbers(2, WIDTH), list[torch.Tensor]()
    with streamed(Collecting(), layers="blocks") as model:
        model(x, seen)
    assert len(seen) == 1 and seen[0] is x
