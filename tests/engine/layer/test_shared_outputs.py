"""Layers that return tensors which share memory, with one another or with what the layer was given.

Written in place by the caller they are what plain PyTorch has, and so are the gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from tests.reference import streamed

D, HALF, BATCH = 8, 4, 6
OPTIONS: list[dict[str, Any]] = [
    {"activations": "recompute"},
    {"activations": "keep"},
    {"activations": "recompute", "micro_batch_size": 4},
    {"activations": "keep", "micro_batch_size": 4},
    {"activations": "recompute+offload", "micro_batch_size": 4},
]


class Layer(nn.Module):
    def __init__(self, run: Callable[[Layer, torch.Tensor], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)
        self.run = run

    def forward(self, x: torch.Tensor) -> Any:
        return self.run(self, x)


class Net(nn.Module):
    """Gives ``use`` what each of its layers returns; that is what the next one is given."""

    def __init__(self, run: Any, use: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(D, D)
        self.blocks = nn.ModuleList(Layer(run) for _ in range(3))
        self.use = use

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = self.use(x, block(x))
        return x


def results(model: nn.Module, grad: Any) -> dict[str, torch.Tensor]:
    """The model's output and, with gradients, those of its inputs and parameters."""
    x = torch.randn(BATCH, D, generator=torch.Generator().manual_seed(0), requires_grad=True)
    with grad:
        output = model(x)
        found = {"output": output.detach().clone()}
        if output.requires_grad:
            output.square().sum().backward()
            params = {"input": x, **dict(model.named_parameters())}
            found |= {name: p.grad.clone() for name, p in params.items() if p.grad is not None}
    return found


def assert_equal_to_plain(run: Any, use: Any, grad: Any = None, **options: Any) -> None:
    """Or refused where plain PyTorch refuses, or where the layer would run again on what was written."""
    model = Net(run, use)
    grad = grad or nullcontext()
    has_no_bases = isinstance(grad, torch.inference_mode)
    refusal = None
    try:
        expected = results(copy.deepcopy(model), grad)
    except RuntimeError as error:
        refusal = str(error)
    writes_input = run in OF_THE_INPUT and use is writes_the_second
    with streamed(model, layers="blocks", **options) as wrapped:
        if refusal is not None:
            with pytest.raises(RuntimeError, match="in-?place"):
                results(wrapped, grad)
            return
        if run is views_that_overlap and has_no_bases and options["micro_batch_size"]:
            # nothing tells of what they are views
            with pytest.raises(ValueError, match="'blocks.0' cannot be put together: .*share memory.*clone"):
                results(wrapped, grad)
            return
        if writes_input and "recompute" in options.get("activations", "keep"):
            with pytest.raises(RuntimeError, match="layer 'blocks.2' .*modified by an inplace operation"):
                results(wrapped, grad)
            return
        actual = results(wrapped, grad)
    assert list(actual) == list(expected)
    if options.get("micro_batch_size") is None:
        assert [name for name in expected if not torch.equal(actual[name], expected[name])] == []
    for name, value in expected.items():  # sums over slices are added up in another order
        torch.testing.assert_close(actual[name], value, msg=lambda text, name=name: f"{name}: {text}")


# --- what layers return: two tensors of as many rows as the batch ---------------------------------------


def itself_and_a_view(layer: Layer, x: torch.Tensor) -> Any:
    y = layer.linear(x)
    return y, y.view(len(y), 2, HALF)


def two_views(layer: Layer, x: torch.Tensor) -> Any:
    y = layer.linear(x)
    return y.view(len(y), HALF, 2), y.view(len(y), 2, HALF)


def views_that_overlap(layer: Layer, x: torch.Tensor) -> Any:
    y = layer.linear(x)
    return y[:, 1:], y[:, :-1]


def halves(layer: Layer, x: torch.Tensor) -> Any:
    y = layer.linear(x)
    return y[:, :HALF], y[:, HALF:]


def twice_the_same(layer: Layer, x: torch.Tensor) -> Any:
    y = layer.linear(x)
    return y, y


def nested(layer: Layer, x: torch.Tensor) -> Any:
    y = layer.linear(x)
    return {"y": [y]}, (y.view(len(y), 2, HALF),)


def with_a_detached_one(layer: Layer, x: torch.Tensor) -> Any:
    y = layer.linear(x)
    return y, y.detach()


def a_detached_one_first(layer: Layer, x: torch.Tensor) -> Any:
    y = layer.linear(x)
    return y.detach(), y


def with_a_view_without_gradients(layer: Layer, x: torch.Tensor) -> Any:
    y = layer.linear(x)
    with torch.no_grad():
        z = y[:, :HALF]
    return y, z


def with_a_hook_on_a_view(layer: Layer, x: torch.Tensor) -> Any:
    y = layer.linear(x)
    z = y.view(len(y), 2, HALF)
    if z.requires_grad:
        z.register_hook(lambda gradient: 2 * gradient)
    return y, z


def with_numbers_that_are_complex(layer: Layer, x: torch.Tensor) -> Any:
    y = torch.complex(layer.linear(x), x.sin())
    return y.conj(), y


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return -gradient


def with_its_gradient_reversed(layer: Layer, x: torch.Tensor) -> Any:
    y = layer.linear(x)
    return y, Reversed.apply(y)


def its_input_with_its_gradient_reversed(layer: Layer, x: torch.Tensor) -> Any:
    return layer.linear.bias + x.detach(), Reversed.apply(x)


def its_input_with_a_hook(layer: Layer, x: torch.Tensor) -> Any:
    if x.requires_grad:
        x.register_hook(lambda gradient: 2 * gradient)
    return layer.linear.bias + x.detach(), x


def its_input(layer: Layer, x: torch.Tensor) -> Any:
    return layer.linear.bias + x.detach(), x


def a_view_of_its_input(layer: Layer, x: torch.Tensor) -> Any:
    return layer.linear.bias + x.detach(), x.view(len(x), 2, HALF)


def a_part_of_its_input(layer: Layer, x: torch.Tensor) -> Any:
    return layer.linear.bias + x.detach(), x[:, :HALF]


def its_detached_input(layer: Layer, x: torch.Tensor) -> Any:
    return layer.linear.bias + x.detach(), x.detach()


OF_THE_INPUT = [its_input, a_view_of_its_input, a_part_of_its_input, its_detached_input]
SHARING = [
    itself_and_a_view,
    two_views,
    views_that_overlap,
    halves,
    twice_the_same,
    nested,
    with_a_detached_one,
    a_detached_one_first,
    with_a_view_without_gradients,
    with_its_gradient_reversed,
    its_input_with_its_gradient_reversed,
    *OF_THE_INPUT,
]


# --- what the caller does with them ---------------------------------------------------------------------


def _two(outputs: Any) -> Iterator[torch.Tensor]:
    """The tensors among them."""
    if isinstance(outputs, torch.Tensor):
        yield outputs
    else:
        for value in outputs.values() if isinstance(outputs, dict) else outputs:
            yield from _two(value)


def _mixed(x: torch.Tensor, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    rows = [value.reshape(len(x), -1).sin().abs().sum(1, keepdim=True) for value in (one, other)]
    # the sum is not saved for backward, so that the next layer's caller may write it
    return torch.tanh(x + 2 * rows[0] * x.cos() + rows[1]) + 0.1


def reads(x: torch.Tensor, outputs: Any) -> torch.Tensor:
    return _mixed(x, *_two(outputs))


def only_the_outputs(x: torch.Tensor, outputs: Any) -> torch.Tensor:
    return _mixed(torch.zeros_like(x), *_two(outputs))


def writes_the_first(x: torch.Tensor, outputs: Any) -> torch.Tensor:
    one, other = _two(outputs)
    one.mul_(3)
    return _mixed(x, one, other)


def writes_the_second(x: torch.Tensor, outputs: Any) -> torch.Tensor:
    one, other = _two(outputs)
    other.mul_(3)
    return _mixed(x, one, other)


def writes_what_needs_gradients(x: torch.Tensor, outputs: Any) -> torch.Tensor:
    one, other = _two(outputs)
    one.add_(one.detach().cos() * x.square().mean())
    return _mixed(x, one, other)


USES = [reads, writes_the_first, writes_the_second, writes_what_needs_gradients]


def covering(options: list[Any], *offsets: int) -> list[Any]:
    """Each layer with each use of it, and with some of ``options``: in all every layer and every use has
    each of them."""
    cases = [
        (run, use, options[(i + j + offset) % len(options)])
        for i, run in enumerate(SHARING)
        for j, use in enumerate(USES)
        for offset in offsets
    ]
    return [pytest.param(*case, id=f"{case[0].__name__}-{case[1].__name__}-{case[2]}") for case in cases]


@pytest.mark.parametrize(("run", "use", "options"), covering(OPTIONS, 0, 2))
def test_gradients_are_plain_pytorchs(run: Any, use: Any, options: dict[str, Any]) -> None:
    assert_equal_to_plain(run, use, **options)


@pytest.mark.parametrize(("run", "use", "grad"), covering(["no_grad", "inference_mode"], 0))
def test_without_gradients(run: Any, use: Any, grad: str) -> None:
    assert_equal_to_plain(run, use, getattr(torch, grad)(), micro_batch_size=4)


@pytest.mark.parametrize("activations", ["recompute", "keep"])
@pytest.mark.parametrize(
    "run",
    [with_a_hook_on_a_view, with_numbers_that_are_complex, its_input_with_a_hook],
    ids=lambda run: run.__name__,
)
def test_gradients_of_what_nobody_writes(run: Any, activations: str) -> None:
    assert_equal_to_plain(run, only_the_outputs, activations=activations)


@pytest.mark.parametrize("activations", ["recompute", "keep"])
def test_complex_numbers_that_are_written(activations: str) -> None:
    assert_equal_to_plain(with_numbers_that_are_complex, writes_the_first, activations=activations)


def test_a_view_of_another_dtype_is_refused() -> None:
    def run(layer: Layer, x: torch.Tensor) -> Any:
        y = torch.complex(layer.linear(x), x)
        return y, y.conj().imag

    with (
        streamed(Net(run, reads), layers="blocks") as model,
        pytest.raises(ValueError, match="layer 'blocks.0' returns a view of dtype torch.float32.*a clone"),
    ):
        model(torch.ones(1, D))


def test_what_is_passed_on_is_the_users_own_tensor() -> None:
    with streamed(Net(its_input, reads), layers="blocks") as model:
        x = torch.ones(1, D, requires_grad=True)
        assert model.blocks[0](x)[1] is x
