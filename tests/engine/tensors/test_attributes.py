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
from streamer.engine.layer.ambient import _PythonState
from tests.reference import gradients, streamed

WIDTH = 8


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)


class Counting(Layer):
    """Its result depends on how often it was called."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x + self.linear(x).tanh() / self.calls


@dataclass
class Count:
    n: int = 0


class CountingInside(Layer):
    """Its result depends on how often it was called, which something that an attribute holds tells."""

    def __init__(self, held: Callable[[], Any], count: Callable[[Any], float]) -> None:
        super().__init__()
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


def drawn(held: Any) -> float:
    return 1 + held.random()


class Recurrent(Layer):
    """Keeps a state from one call to the next, of which the model makes a new one when it wants to."""

    state: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = torch.zeros_like(x) if self.state is None else self.state
        self.state = (0.5 * before + self.linear(x)).detach()
        return x + (self.linear(x) + before).tanh()


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "number": Counting,
    "tensor": Recurrent,
    "dict": lambda: CountingInside(dict, in_a_dict),
    "defaultdict": lambda: CountingInside(lambda: defaultdict(int), in_a_dict),
    "list": lambda: CountingInside(list, in_a_list),
    "deque": lambda: CountingInside(deque, in_a_list),
    "set": lambda: CountingInside(set, lambda held: held.add(len(held)) or len(held)),
    "dataclass": lambda: CountingInside(Count, in_an_object),
    "namespace": lambda: CountingInside(lambda: SimpleNamespace(n=0), in_an_object),
    "nested": lambda: CountingInside(
        lambda: {"all": [(None, {})]}, lambda held: in_a_dict(held["all"][0][1])
    ),
    "torch.Generator": lambda: CountingInside(
        lambda: {"random": torch.Generator().manual_seed(0)}, drawn_by_torch
    ),
    "random.Random": lambda: CountingInside(lambda: random.Random(0), drawn),
    "numpy.Generator": lambda: CountingInside(lambda: np.random.default_rng(0), drawn),
    "numpy.RandomState": lambda: CountingInside(lambda: np.random.RandomState(0), drawn),
}


class Caching(Layer):
    """Keeps a transposed view of its weight."""

    turned: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.turned is None:
            self.turned = self.linear.weight.t()
        return x @ self.turned


def stack(layer: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(layer() for _ in range(4)))


def loss(model: nn.Module, step: int) -> torch.Tensor:
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))
    return model(x).square().mean() + model(x + 1).square().mean()


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("activations", ["recompute", "keep"])
def test_attributes_change_once_per_forward(name: str, activations: str) -> None:
    expected = train(stack(LAYERS[name]))
    model = streamer.wrap(stack(LAYERS[name]), layers="", device="cpu", activations=activations)
    try:
        assert train(model) == expected
    finally:
        streamer.unwrap(model)


def train(model: nn.Module) -> list[float]:
    """Losses and sums of gradients, step by step."""
    found = []
    for step in range(3):
        value = loss(model, step)
        value.backward()
        found += [value.item(), *(param.grad.abs().sum().item() for param in model.parameters())]
        model.zero_grad()
    return found


class WritesInside(Layer):
    """Writes a tensor that a dict holds."""

    def __init__(self) -> None:
        super().__init__()
        self.held = {"sum": torch.zeros(())}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.held["sum"] += 1
        return self.linear(x) * self.held["sum"].clone()


def test_a_tensor_that_a_dict_holds_is_not_written() -> None:
    refusal = pytest.raises(ValueError, match="layer '0' writes into a tensor that is one of its attributes")
    with streamed(stack(WritesInside), layers="") as model, refusal:
        loss(model, 0)


def test_an_attribute_that_somebody_changes_before_backward_does_not_change_what_is_recomputed() -> None:
    found = []
    for change in (False, True):
        with streamed(stack(Counting), layers="") as model:
            value = loss(model, 0)
            if change:
                model[1].calls = 100
                model[1].new = "an attribute that was not there"
            value.backward()
            found.append(gradients(model))
            assert [layer.calls for layer in model] == [2, 100 if change else 2, 2, 2]
            assert hasattr(model[1], "new") == change
    torch.testing.assert_close(*found, rtol=0, atol=0)


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


def pythons_normal() -> float:
    return random.gauss(1.0, 0.5)


def pythons_uniform() -> float:
    return random.random()


def a_uniform() -> float:
    return float(np.random.rand())


def nothing() -> float:
    return 1.0


class DrawingFromOwn(Layer):
    """Draws from NumPy's or Python's own generator: a normal number, whose pair waits for the next one, or a
    uniform."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.draw = draw

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
        [pythons_normal] * 4,
        [pythons_uniform] * 4,
        [pythons_normal, a_normal, nothing, pythons_uniform],
    ],
    ids=["normal", "uniform", "mixed", "late", "none", "python's normal", "python's uniform", "both"],
)
def test_own_generators_go_on_as_they_would(draws: list[Callable[[], float]], of_user: int) -> None:
    found = []
    for is_streamed in (False, True):
        torch.manual_seed(0)
        np.random.seed(0)
        random.seed(0)
        model, values = nn.Sequential(*map(DrawingFromOwn, draws)), []
        with streamed(model, layers="") if is_streamed else nullcontext(model) as trained:
            for step in range(3):
                # the user's draws begin between two of the layers', or do not
                values += [float(np.random.randn()) + random.gauss(0.0, 1.0) for _ in range(of_user)]
                value = trained(torch.full((4, WIDTH), 0.1 * step)).square().mean()
                value.backward()
                values += [
                    value.item(),
                    *(param.grad.tolist() for param in trained.parameters()),
                    float(np.random.randn()),
                    random.gauss(0.0, 1.0),
                ]
                trained.zero_grad()
        state = np.random.get_state(legacy=False)
        numpys = state["state"]["key"].tolist(), state["gauss"], state["has_gauss"]
        found.append((values, numpys, random.getstate()))
    assert found[0] == found[1]


@pytest.mark.parametrize("between", [lambda: random.gauss(0.0, 1.0), random.random, lambda: random.seed(5)])
def test_pythons_state_is_taken_where_it_has_changed(between: Callable[[], object]) -> None:
    """Also where only the second of a pair of normal numbers is gone."""
    random.seed(0)
    random.gauss(0.0, 1.0)
    own = _PythonState()
    then = own.get()
    assert then == random.getstate()
    assert own.get() is then, "the memory is found"
    between()
    assert own.get() == random.getstate() != then
    own.set(then)
    assert own.get() == random.getstate() == then


def test_where_the_memory_is_not_found_the_state_is_taken_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    class Elsewhere(random.Random):
        def getstate(self) -> tuple[Any, ...]:
            return 3, (0,) * 625, None

    monkeypatch.setattr(random, "_inst", Elsewhere())
    own = _PythonState()
    assert own._read() is None
    then = own.get()
    random.random()
    assert own.get() == random.getstate() and own.get() is not then
