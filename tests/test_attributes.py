"""Layers that change attributes of their own: a recomputed forward begins where the first one began."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.reference import assert_parity, streamed, train_plain, train_streamed

WIDTH = 8


class Counting(nn.Module):
    """Its result depends on how often it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x + self.linear(x).tanh() / self.calls


class Recurrent(nn.Module):
    """Keeps a state from one call to the next, of which the model makes a new one when it wants to."""

    state: torch.Tensor | None = None

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = torch.zeros_like(x) if self.state is None else self.state
        self.state = (0.5 * before + self.linear(x)).detach()
        return x + (self.linear(x) + before).tanh()


class Caching(nn.Module):
    """Keeps a transposed view of its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.turned: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.turned is None:
            self.turned = self.linear.weight.t()
        return x @ self.turned


def stack(layer: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(layer() for _ in range(4)))


def loss(model: nn.Module, step: int) -> torch.Tensor:
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))
    return model(x).square().mean() + model(x + 1).square().mean()


@pytest.mark.parametrize("layer", [Counting, Recurrent])
@pytest.mark.parametrize("activations", ["recompute", "keep"])
def test_attributes_change_once_per_forward(layer: type[nn.Module], activations: str) -> None:
    model = stack(layer)
    expected = train_plain(model, loss_of=loss, steps=4)
    assert_parity(train_streamed(model, loss_of=loss, steps=4, layers="", activations=activations), expected)


def test_attributes_after_backward_are_those_after_forward() -> None:
    with streamed(stack(Counting), layers="") as model:
        loss(model, 0).backward()
        assert [layer.calls for layer in model] == [2, 2, 2, 2]


def test_an_attribute_that_somebody_changes_before_backward_does_not_change_what_is_recomputed() -> None:
    gradients = []
    for change in (False, True):
        with streamed(stack(Counting), layers="") as model:
            value = loss(model, 0)
            if change:
                model[1].calls = 100
                model[1].new = "an attribute that was not there"
            value.backward()
            gradients.append([param.grad.clone() for param in model.parameters()])
            assert not change or (model[1].calls, hasattr(model[1], "new")) == (100, True)
    for with_change, without in zip(*gradients, strict=True):
        assert torch.equal(with_change, without)


@pytest.mark.parametrize("grad", [False, True])
def test_a_view_of_a_weight_is_not_kept(grad: bool) -> None:
    with streamed(stack(Caching), layers="") as model, torch.set_grad_enabled(grad):
        for _ in range(2):  # the first refusal has left nothing behind
            with pytest.raises(ValueError, match="'0' keeps a weight.* in attribute 'turned' of a Caching"):
                model(torch.ones(1, WIDTH))
