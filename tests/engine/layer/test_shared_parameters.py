"""A parameter that several layers hold, or a layer and the rest of the model, stays on the device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

import streamer
from tests.models import WIDTH, Stack, numbers
from tests.reference import assert_as_plain, assert_parity, gradients, in_turn, train_plain, train_streamed

Use = Callable[[nn.Module], Any]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own, self.shared = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.shared(torch.tanh(self.own(x))))


def module_of_layers(model: Any) -> None:
    for layer in model.blocks[1:3]:
        layer.shared = model.blocks[0].shared


def weight_of_layers(model: Any) -> None:
    model.blocks[3].own.weight = model.blocks[1].own.weight


def weight_of_a_layer_and_the_head(model: Any) -> None:
    model.head.weight = model.blocks[2].shared.weight


def frozen(model: Any) -> None:
    module_of_layers(model)
    model.blocks[0].shared.requires_grad_(False)


TIES = [module_of_layers, weight_of_layers, weight_of_a_layer_and_the_head, frozen]
POLICIES = ["recompute", "recompute+offload", "keep"]


def net(tie: Callable[[Any], None]) -> nn.Module:
    model = Stack(Layer, 4, head=True)
    tie(model)
    return model


def loss(model: nn.Module, step: int = 0) -> torch.Tensor:
    return model(numbers(6, 3, WIDTH, seed=step)).square().mean()


@pytest.mark.parametrize(("tie", "activations"), [*product(TIES[:1], POLICIES), *in_turn(TIES[1:], POLICIES)])
def test_it_trains_as_in_plain_pytorch(tie: Callable[[Any], None], activations: str) -> None:
    options: dict[str, Any] = {"steps": 3, "loss_of": loss}
    actual = train_streamed(net(tie), layers="blocks", activations=activations, **options)
    assert_parity(actual, train_plain(net(tie), **options))


@pytest.mark.parametrize("tie", [module_of_layers, weight_of_a_layer_and_the_head])
def test_layers_around_it_may_be_updated_in_backward(tie: Callable[[Any], None]) -> None:
    options: dict[str, Any] = {"steps": 3, "loss_of": loss, "clip": False, "layers": "blocks"}
    actual, expected = (train_streamed(net(tie), update=update, **options) for update in ("backward", "step"))
    assert actual.losses == expected.losses
    assert all(torch.equal(actual.weights[name], weight) for name, weight in expected.weights.items())


def of_hooks(model: Any) -> Any:
    """What a hook on the shared weight hears: one gradient of all layers, once a backward."""
    weight, heard = model.blocks[1].shared.weight, []
    weight.register_hook(lambda gradient: heard.append(gradient.clone()))
    weight.register_post_accumulate_grad_hook(lambda param: heard.append(param.grad.clone()))
    for step in range(2):
        loss(model, step).backward()
    return heard, gradients(model)


def of_autograd(model: Any) -> Any:
    return torch.autograd.grad(loss(model), [model.blocks[1].shared.weight, model.embed.weight])


def of_inference(model: Any) -> Any:
    with torch.no_grad():
        before = loss(model)
        model.blocks[1].shared.weight.mul_(2)
        return before, loss(model)


def of_two_backwards(model: Any) -> Any:
    value = loss(model)
    value.backward(retain_graph=True)
    value.backward()
    return gradients(model)


@pytest.mark.parametrize(
    ("use", "activations"), in_turn([of_hooks, of_autograd, of_inference, of_two_backwards], POLICIES)
)
def test_it_is_a_parameter_outside_of_layers(use: Use, activations: str) -> None:
    assert_as_plain(net(module_of_layers), use, layers="blocks", activations=activations)


@pytest.mark.parametrize(("use", "activations"), [(of_hooks, "recompute"), (of_inference, "keep")])
def test_it_is_not_cut_with_the_batch(use: Use, activations: str) -> None:
    options = {"layers": "blocks", "activations": activations, "micro_batch_size": 2}
    model = net(module_of_layers)
    for layer in model.blocks:
        layer.drop.p = 0.0
    assert_as_plain(model, use, rtol=1e-5, atol=1e-7, **options)


def test_a_layer_with_no_parameter_of_its_own_is_refused() -> None:
    model = net(module_of_layers)
    for layer in model.blocks[:2]:
        layer.own = model.blocks[2].own
    with pytest.raises(ValueError, match="'blocks.0' has no parameters of its own.*leave it out"):
        streamer.wrap(copy.deepcopy(model), device="cpu", layers="blocks")
