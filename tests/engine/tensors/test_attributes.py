"""Layers that change attributes of their own: a recomputed forward begins where the first one began."""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import streamer
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


@dataclass
class Count:
    n: int = 0


class CountingInside(nn.Module):
    """Its result depends on how often it was called, which something that an attribute holds tells."""

    def __init__(self, held: Callable[[], Any], count: Callable[[Any], float]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.held, self.count = held(), count

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # before what backward needs: a run in backward ends when that is there
        return x + (self.linear(x) / self.count(self.held)).tanh()


def in_a_dict(held: dict[str, int]) -> float:
    held["n"] = held.get("n", 0) + 1
    return held["n"]


def in_a_list(held: list[int]) -> float:
    held.append(1)
    return len(held)


def in_an_object(held: Any) -> float:
    held.n += 1
    return held.n


def in_a_nested_dict(held: Any) -> float:
    return in_a_dict(held["all"][0][1])


def drawn_by_torch(held: dict[str, torch.Generator]) -> float:
    return 1 + torch.rand((), generator=held["random"]).item()


def drawn_by_python(held: Any) -> float:
    return 1 + held.random()


INSIDE = {
    "dict": (dict, in_a_dict),
    "defaultdict": (lambda: defaultdict(int), in_a_dict),
    "list": (list, in_a_list),
    "deque": (deque, in_a_list),
    "set": (set, lambda held: held.add(len(held)) or len(held)),
    "dataclass": (Count, in_an_object),
    "namespace": (lambda: SimpleNamespace(n=0), in_an_object),
    "nested": (lambda: {"all": [(None, {})]}, in_a_nested_dict),
    "torch.Generator": (lambda: {"random": torch.Generator().manual_seed(0)}, drawn_by_torch),
    "random.Random": (lambda: random.Random(0), drawn_by_python),
    "numpy.Generator": (lambda: np.random.default_rng(0), drawn_by_python),
    "numpy.RandomState": (lambda: np.random.RandomState(0), lambda held: 1 + held.rand()),
}


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


@pytest.mark.parametrize("held, count", INSIDE.values(), ids=INSIDE)
@pytest.mark.parametrize("activations", ["recompute", "keep"])
def test_what_attributes_hold_changes_once_per_forward(held: Any, count: Any, activations: str) -> None:
    make = lambda: nn.Sequential(*(CountingInside(held, count) for _ in range(3)))  # noqa: E731
    torch.manual_seed(0)
    expected = train(make(), steps=3)
    torch.manual_seed(0)
    model = streamer.wrap(make(), layers="", device="cpu", activations=activations)
    try:
        assert train(model, steps=3) == expected
    finally:
        streamer.unwrap(model)


def train(model: nn.Module, *, steps: int) -> list[float]:
    """Losses and sums of gradients, step by step."""
    found = []
    for step in range(steps):
        value = loss(model, step)
        value.backward()
        found += [value.item(), *(param.grad.abs().sum().item() for param in model.parameters())]
        model.zero_grad()
    return found


class WritesInside(nn.Module):
    """Writes a tensor that a dict holds."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.held = {"sum": torch.zeros(())}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.held["sum"] += 1
        return self.linear(x) * self.held["sum"].clone()


def test_a_tensor_that_a_dict_holds_is_not_written() -> None:
    refusal = pytest.raises(ValueError, match="layer '0' writes into a tensor that is one of its attributes")
    with streamed(stack(WritesInside), layers="") as model, refusal:
        loss(model, 0)


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


# functions, which are not copied with the layer, as a method of the generator would be
def a_normal() -> float:
    return float(np.random.randn())


def a_normal_in_the_end() -> float:
    return a_normal()


def a_uniform() -> float:
    return float(np.random.rand())


def nothing() -> float:
    return 1.0


class DrawingFromNumPy(nn.Module):
    """Draws from NumPy's own generator: a normal number, whose pair waits for the next one, or a uniform."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.linear, self.draw = nn.Linear(WIDTH, WIDTH), draw

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.draw is a_normal_in_the_end:
            # a run in backward ends before
            return x + self.linear(x).tanh() + self.draw()
        return x + (self.linear(x) * self.draw()).tanh()


@pytest.mark.parametrize("of_user", [0, 1])
@pytest.mark.parametrize(
    "draws",
    [
        [a_normal] * 4,
        [a_uniform] * 4,
        [a_normal, nothing, a_normal, a_uniform],
        [a_normal, a_normal_in_the_end, nothing, nothing],
        [nothing] * 4,
    ],
    ids=["normal", "uniform", "mixed", "late", "none"],
)
def test_numpys_own_generator_goes_on_as_it_would(draws: list[Callable[[], float]], of_user: int) -> None:
    found = []
    for is_streamed in (False, True):
        torch.manual_seed(0)
        np.random.seed(0)
        model, values = nn.Sequential(*map(DrawingFromNumPy, draws)), []
        with streamed(model, layers="") if is_streamed else nullcontext(model) as trained:
            for step in range(3):
                # the user's draws begin between two of the layers', or do not
                values += [float(np.random.randn()) for _ in range(of_user)]
                value = trained(torch.full((4, WIDTH), 0.1 * step)).square().mean()
                value.backward()
                gradients = [param.grad.tolist() for param in trained.parameters()]
                values += [value.item(), gradients, float(np.random.randn())]
                trained.zero_grad()
        state = np.random.get_state(legacy=False)
        found.append((values, state["state"]["key"].tolist(), state["gauss"], state["has_gauss"]))
    assert found[0] == found[1]
