"""Layers that return tensors which share memory, with one another or with what the layer was given.

Written in place by the caller they are what plain PyTorch has, and so are the gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from tests.engine.layer.common import Stack
from tests.reference import POLICIES, assert_refused, gradients, streamed

D, HALF, BATCH = 8, 4, 6
OPTIONS: list[dict[str, Any]] = [
    {"activations": "recompute"},
    {"activations": "keep"},
    {"activations": "recompute", "micro_batch_size": 4},
    {"activations": "keep", "micro_batch_size": 4},
    {"activations": "recompute+offload", "micro_batch_size": 4},
]


#: What a layer returns, two tensors of as many rows as the batch, of its input x, its linear map y of x, and
#: z, which has a gradient of its own and none of x.
Returns = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Any]


class Layer(nn.Module):
    def __init__(self, returns: Returns) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)
        self.returns = returns

    def forward(self, x: torch.Tensor) -> Any:
        return self.returns(x, self.linear(x), self.linear.bias + x.detach())


class Net(Stack):
    """Gives ``use`` what each of its layers returns; that is what the next one is given."""

    def __init__(self, returns: Returns, use: Any) -> None:
        super().__init__(partial(Layer, returns), width=D)
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
            found |= {"input": x.grad} | gradients(model)
    return found


def assert_equal_to_plain(returns: Returns, use: Any, grad: Any = None, **options: Any) -> None:
    """Or refused where plain PyTorch refuses, or where the layer would run again on what was written."""
    model = Net(returns, use)
    grad = grad or nullcontext()
    has_no_bases = isinstance(grad, torch.inference_mode)
    refusal = None
    try:
        expected = results(copy.deepcopy(model), grad)
    except RuntimeError as error:
        refusal = str(error)
    writes_input = returns in OF_THE_INPUT.values() and use is writes_the_second
    with streamed(model, layers="blocks", **options) as wrapped:
        if refusal is not None:
            with pytest.raises(RuntimeError, match="in-?place"):
                results(wrapped, grad)
            return
        if returns is SHARING["views that overlap"] and has_no_bases and options["micro_batch_size"]:
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


# --- what layers return ---------------------------------------------------------------------------------


def hooked(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.requires_grad:
        tensor.register_hook(lambda gradient: 2 * gradient)
    return tensor


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return -gradient


def halved(y: torch.Tensor) -> torch.Tensor:
    return y.view(len(y), 2, HALF)


OF_THE_INPUT: dict[str, Returns] = {
    "its input": lambda x, y, z: (z, x),
    "a view of its input": lambda x, y, z: (z, halved(x)),
    "a part of its input": lambda x, y, z: (z, x[:, :HALF]),
    "its detached input": lambda x, y, z: (z, x.detach()),
}
SHARING: dict[str, Returns] = {
    "itself and a view": lambda x, y, z: (y, halved(y)),
    "two views": lambda x, y, z: (y.view(len(y), HALF, 2), halved(y)),
    "views that overlap": lambda x, y, z: (y[:, 1:], y[:, :-1]),
    "halves": lambda x, y, z: (y[:, :HALF], y[:, HALF:]),
    "twice the same": lambda x, y, z: (y, y),
    "nested": lambda x, y, z: ({"y": [y]}, (halved(y),)),
    "with a detached one": lambda x, y, z: (y, y.detach()),
    "a detached one first": lambda x, y, z: (y.detach(), y),
    "with a view without gradients": lambda x, y, z: (y, torch.no_grad()(y.narrow)(1, 0, HALF)),
    "with its gradient reversed": lambda x, y, z: (y, Reversed.apply(y)),
    "its input with its gradient reversed": lambda x, y, z: (z, Reversed.apply(x)),
    **OF_THE_INPUT,
}
WITH_A_HOOK_ON_A_VIEW: Returns = lambda x, y, z: (y, hooked(halved(y)))  # noqa: E731
ITS_INPUT_WITH_A_HOOK: Returns = lambda x, y, z: (z, hooked(x))  # noqa: E731


def complex_numbers(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> Any:
    y = torch.complex(y, x.sin())
    return y.conj(), y


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
    return [
        (name, use, options[(i + j + offset) % len(options)])
        for i, name in enumerate(SHARING)
        for j, use in enumerate(USES)
        for offset in offsets
    ]


@pytest.mark.parametrize(("name", "use", "options"), covering(OPTIONS, 0, 2))
def test_gradients_are_plain_pytorchs(name: str, use: Any, options: dict[str, Any]) -> None:
    assert_equal_to_plain(SHARING[name], use, **options)


@pytest.mark.parametrize(("name", "use", "grad"), covering(["no_grad", "inference_mode"], 0))
def test_without_gradients(name: str, use: Any, grad: str) -> None:
    assert_equal_to_plain(SHARING[name], use, getattr(torch, grad)(), micro_batch_size=4)


@POLICIES
@pytest.mark.parametrize(
    ("returns", "use"),
    [
        (WITH_A_HOOK_ON_A_VIEW, only_the_outputs),
        (ITS_INPUT_WITH_A_HOOK, only_the_outputs),
        (complex_numbers, only_the_outputs),
        (complex_numbers, writes_the_first),
    ],
)
def test_hooks_and_complex_numbers(returns: Returns, use: Any, activations: str) -> None:
    assert_equal_to_plain(returns, use, activations=activations)


def test_a_view_of_another_dtype_is_refused() -> None:
    def returns(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> Any:
        y = torch.complex(y, x)
        return y, y.conj().imag

    match = "layer 'blocks.0' returns a view of dtype torch.float32.*a clone"
    assert_refused(Net(returns, reads), lambda model: model(torch.ones(1, D)), match, layers="blocks")


def test_what_is_passed_on_is_the_users_own_tensor() -> None:
    with streamed(Net(SHARING["its input"], reads), layers="blocks") as model:
        x = torch.ones(1, D, requires_grad=True)
        assert model.blocks[0](x)[1] is x
