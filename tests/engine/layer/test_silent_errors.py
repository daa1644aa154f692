"""What would give other gradients than plain PyTorch, without a word, gives them or an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from streamer.backends.base import Lane
from streamer.backends.thread import ThreadBackend
from tests.engine.layer.common import Layer, Stack
from tests.reference import POLICIES, assert_refused, gradients, streamed

D = 8
BLOCKS: dict[str, Any] = {"layers": "blocks"}


def inputs(seed: int = 0) -> torch.Tensor:
    return torch.randn(4, D, generator=torch.Generator().manual_seed(seed))


def square(model: nn.Module) -> torch.Tensor:
    return model(inputs()).square().sum()


def net(make: Callable[[], nn.Module] = lambda: nn.Sequential(nn.Linear(D, D), nn.Tanh())) -> Stack:
    return Stack(make, width=D, head=True)


class Base(Layer):
    def __init__(self) -> None:
        super().__init__(D)


class SideDoor(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.linear(x))
        self.penalty = x.square().mean()
        return x


@POLICIES
def test_a_tensor_that_leaves_by_a_side_door(activations: str) -> None:
    with streamed(net(SideDoor), layers="blocks", activations=activations) as model:
        loss = square(model) + sum(block.penalty for block in model.blocks)
        match = "blocks.2' computed reached the loss by another way.*an attribute"
        with pytest.raises(RuntimeError, match=match):
            loss.backward()
        # looked at but not trained on, it is no one's concern
        assert [block.penalty.item() > 0 for block in model.blocks] == [True] * 3
        square(model).backward()


class BiasBySideDoor(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.shifted = self.linear.bias + 1  # whose node saves nothing
        return torch.tanh(self.linear(x))


@POLICIES
def test_a_gradient_that_was_refused_is_not_left_for_the_next_backward(activations: str) -> None:
    plain = net(BiasBySideDoor)
    square(plain).backward()
    with streamed(net(BiasBySideDoor), layers="blocks", activations=activations) as model:
        loss = square(model)
        with pytest.raises(RuntimeError, match="blocks.1' computed reached the loss by another way"):
            model.blocks[1].shifted.sum().backward(retain_graph=True)
        loss.backward()
        found = gradients(model)
    assert all(map(torch.equal, found.values(), gradients(plain).values()))


@POLICIES
def test_a_tensor_from_outside_that_several_layers_use(activations: str) -> None:
    """As no argument, so that each layer's backward would go through the graph of that tensor."""
    scale = nn.Parameter(torch.ones(D))

    def use(model: nn.Module) -> None:
        outside = scale.square()
        for block in model.blocks:
            block[0].register_forward_hook(lambda module, args, out: out * outside)
        square(model).backward()

    match = r"layer 'blocks\.1' .*uses a tensor that is not an argument.*\(pass the tensor"
    assert_refused(net(), use, match, RuntimeError, activations=activations, **BLOCKS)


def test_a_penalty_on_the_weights_of_layers() -> None:
    def penalised(model: nn.Module) -> dict[str, torch.Tensor]:
        (square(model) + sum(param.square().sum() for param in model.blocks.parameters())).backward()
        return gradients(model)

    slow = ThreadBackend(delays={Lane.D2H: lambda: 0.02}, poison=True)
    with streamed(net(), backend=slow, **BLOCKS) as model:
        torch.testing.assert_close(penalised(model), penalised(net()))
