"""A streamed layer is a layer under `torch.utils.checkpoint`: the same numbers, the same work."""

from __future__ import annotations

import copy
import operator
from collections import UserDict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad
from torch.autograd.functional import jacobian
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import streamer
from streamer.backends.base import Lane
from streamer.backends.thread import ThreadBackend
from streamer.planner.measure import Tracker
from tests.models import Layer, Stack
from tests.reference import (
    POLICIES,
    assert_as_plain,
    assert_equal,
    assert_refused,
    gradients,
    in_turn,
    language_loss,
    streamed,
    tiny_gpt,
)

D = 8
ALL_POLICIES = pytest.mark.parametrize("activations", ["recompute", "recompute+offload", "keep"])
Forward = Callable[["Running", torch.Tensor], torch.Tensor]


class Running(nn.Module):
    """Two linear maps and a vector, with which it computes what ``run`` says."""

    def __init__(self, run: Forward) -> None:
        super().__init__()
        self.run = run
        self.up, self.down = nn.Linear(D, D), nn.Linear(D, D)
        self.scale = nn.Parameter(torch.randn(D))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(self, x)


def net(run: Forward, layers: int = 3) -> Stack:
    return Stack(partial(Running, run), layers, width=D)


def plain_layers() -> Stack:
    return Stack(partial(Layer, D), width=D, head=True)


def inputs(size: int = 4, *, seed: int = 0) -> torch.Tensor:
    return torch.randn(size, D, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def square(model: nn.Module, x: torch.Tensor | None = None) -> torch.Tensor:
    return model(inputs() if x is None else x).abs().square().sum()


def trained(model: nn.Module) -> Any:
    """The loss and all gradients of one backward."""
    x = inputs()
    loss = square(model, x)
    loss.backward()
    return loss, x.grad, gradients(model)


# --- layers that make it hard ---------------------------------------------------------------------------


def tanh(layer: Running, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(layer.up(x))


def several(layer: Running, x: torch.Tensor) -> torch.Tensor:
    hidden = torch.sigmoid(layer.down(tanh(layer, x)))
    return layer.down(hidden * hidden * 0.5)


def checkpoints(layer: Running, x: torch.Tensor) -> torch.Tensor:
    def run(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.sin(F.linear(x, weight)) * layer.scale

    hidden = checkpoint(run, tanh(layer, x), layer.down.weight.t(), use_reentrant=False)
    return hidden + checkpoint(run, x, layer.down.weight, use_reentrant=True)


def a_view(layer: Running, x: torch.Tensor) -> torch.Tensor:
    return layer.down(tanh(layer, x)).view(2, -1, D).transpose(0, 1).reshape_as(x).mT.mT[:, :]


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, scale)
        return x * scale

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, scale = ctx.saved_tensors
        return gradient * scale, (gradient * x).sum(0)


def custom_function(layer: Running, x: torch.Tensor) -> torch.Tensor:
    return Scale.apply(tanh(layer, x), layer.scale)


def writes_a_part(layer: Running, x: torch.Tensor) -> torch.Tensor:
    hidden = layer.up(x) * 0.5
    hidden[:, :4].mul_(layer.scale[:4])
    hidden[:, 4:] = x[:, 4:]
    return layer.down(hidden)


def dead_branches(layer: Running, x: torch.Tensor) -> torch.Tensor:
    layer.down(tanh(layer, x))
    hidden = torch.cat([tanh(layer, x[:0]), tanh(layer, x)])
    layer.down(hidden)
    return hidden


def complex_numbers(layer: Running, x: torch.Tensor) -> torch.Tensor:
    return torch.fft.fft(torch.tanh(layer.up(x.real))).conj() * torch.complex(layer.scale, layer.scale)


def draws(layer: Running, x: torch.Tensor) -> torch.Tensor:
    return layer.down(F.dropout(tanh(layer, x), 0.3) * torch.rand_like(x))


def scales_the_gradient_of_its_input(layer: Running, x: torch.Tensor) -> torch.Tensor:
    x.register_hook(lambda gradient: 2 * gradient)
    return layer.down(tanh(layer, x))


HARD = [
    several,
    checkpoints,
    a_view,
    custom_function,
    writes_a_part,
    dead_branches,
    complex_numbers,
    draws,
    scales_the_gradient_of_its_input,
]


@ALL_POLICIES
@pytest.mark.parametrize("run", HARD, ids=lambda run: run.__name__)
def test_gradients_are_plain_pytorchs(run: Forward, activations: str) -> None:
    assert_as_plain(net(run), trained, layers="blocks", activations=activations)


def under_autocast(model: nn.Module) -> Any:
    x = inputs()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = square(model, x).float()
    loss.backward()
    return loss, x.grad, gradients(model)


@ALL_POLICIES
def test_autocast_is_that_of_the_forward(activations: str) -> None:
    # each weight is cast once: autocast would add the gradients of two uses of one cast in bf16
    model = net(lambda layer, x: layer.down(F.dropout(tanh(layer, x), 0.2)) * layer.scale)
    assert_as_plain(model, under_autocast, layers="blocks", activations=activations)


# --- several backwards ----------------------------------------------------------------------------------


def retained(model: nn.Module) -> Any:
    x = inputs()
    loss = square(model, x)
    loss.backward(retain_graph=True)
    once = gradients(model)
    loss.backward()
    return once, x.grad, gradients(model)


def two_losses(model: nn.Module) -> Any:
    x = inputs()
    out = model(x)
    out.square().sum().backward(retain_graph=True)
    out.sin().sum().backward()
    return x.grad, gradients(model)


def two_forwards(model: nn.Module) -> Any:
    (square(model) + square(model, inputs(seed=1))).backward()
    return gradients(model)


def layers_called_again(model: nn.Module) -> Any:
    x = inputs()
    first, second = model.blocks[0], model.blocks[1]
    second(first(second(first(x)))).square().sum().backward()
    return x.grad, gradients(model)


@ALL_POLICIES
@pytest.mark.parametrize("use", [retained, two_losses, two_forwards, layers_called_again])
def test_several_backwards(use: Callable[[nn.Module], Any], activations: str) -> None:
    # gradients of two uses are added in another order
    assert_as_plain(net(several), use, rtol=1e-5, atol=1e-7, layers="blocks", activations=activations)


@ALL_POLICIES
def test_a_second_backward_through_a_graph_that_is_gone_says_so(activations: str) -> None:
    def use(model: nn.Module) -> None:
        loss = model(inputs()).sum()
        loss.backward()
        loss.backward()

    match = r"layer 'blocks\.2' runs backward a second time.* retain_graph=True"
    assert_refused(net(several), use, match, RuntimeError, layers="blocks", activations=activations)


class Turned(nn.Module):
    """The gradient of its input is not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x.transpose(1, 2)).transpose(1, 2)


@ALL_POLICIES
def test_gradients_of_inputs_come_as_they_were_computed(activations: str) -> None:
    """With other strides the layer before may round otherwise."""

    def strides(model: nn.Module) -> Any:
        seen: list[tuple[int, ...]] = []
        x = torch.ones(2, D, D, requires_grad=True)
        for layer in model:
            x = layer(x * 1)
            x.register_hook(lambda gradient: seen.append(gradient.stride()))
        x.square().sum().backward()
        return torch.tensor(seen), gradients(model)

    torch.manual_seed(0)
    model = nn.Sequential(*(Turned() for _ in range(3)))
    assert_as_plain(model, strides, layers="", activations=activations)


# --- what is run ----------------------------------------------------------------------------------------


def flops(model: nn.Module) -> int:
    with FlopCounterMode(display=False) as counter:
        language_loss(model, 0).backward()
    return counter.get_total_flops()


class Checkpointed(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.block, x, use_reentrant=False)


@pytest.mark.parametrize(
    "options", [{}, {"micro_batch_size": 2}, {"activations": "recompute+offload"}], ids=str
)
def test_a_step_runs_as_much_as_under_pytorchs_checkpoint(options: dict[str, Any]) -> None:
    model = tiny_gpt(dropout=0.1)
    with streamed(model, layers="transformer.h", **options) as wrapped:
        language_loss(wrapped, 0)  # how a batch may be cut is found out once
        actual = flops(wrapped)
    model.transformer.h = nn.ModuleList(map(Checkpointed, model.transformer.h))
    assert actual == flops(model)


def test_a_layer_that_is_kept_runs_once() -> None:
    model = tiny_gpt(dropout=0.1)
    with streamed(model, layers="transformer.h", activations="keep") as wrapped:
        actual = flops(wrapped)
    assert actual == flops(model)


# --- buffers and attributes -----------------------------------------------------------------------------


class Normalised(Layer):
    def __init__(self) -> None:
        super().__init__(D)
        self.norm = nn.BatchNorm1d(D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.norm(super().forward(x))


class Recurrent(Layer):
    """Keeps a state from one call to the next, in an attribute that is None before the first."""

    state: torch.Tensor | None

    def __init__(self) -> None:
        super().__init__(D)
        self.state = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = torch.zeros_like(x) if self.state is None else self.state
        self.state = (0.5 * before + self.linear(x)).detach()
        return x + (self.linear(x) + before).tanh()


class Averaging(Layer):
    """Writes a buffer, and a tensor that is none, in place."""

    def __init__(self) -> None:
        super().__init__(D)
        self.register_buffer("calls", torch.zeros(()))
        self.mean = torch.zeros(D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.mean.mul_(0.9).add_(x.detach().mean(0))
        return super().forward(x + self.mean.clone()) / self.calls.clone()


class HoldingAState(nn.Module):
    """The state is in a module inside of the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(Recurrent(), Recurrent())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def tensors_of(model: nn.Module) -> list[Any]:
    attributes = [getattr(module, name, None) for module in model.modules() for name in ("state", "mean")]
    return [*model.buffers(), *attributes]


def steps_of(model: nn.Module) -> Any:
    found = []
    for step in range(3):
        loss = square(model, inputs(seed=step)) + square(model, inputs(seed=10 + step))
        loss.backward()
        found += [loss, gradients(model), copy.deepcopy(tensors_of(model))]
        model.zero_grad()
    with torch.no_grad():
        found.append(model.eval()(inputs()))
    # the first forward in this mode with gradients
    return [*found, trained(model), tensors_of(model)]


@ALL_POLICIES
@pytest.mark.parametrize("layer", [Normalised, Recurrent, Averaging, HoldingAState])
def test_buffers_and_tensor_attributes_are_what_the_first_run_found(
    layer: type[nn.Module], activations: str
) -> None:
    model = Stack(layer, width=D)
    assert_as_plain(model, steps_of, rtol=1e-5, atol=1e-6, layers="blocks", activations=activations)


# --- outputs --------------------------------------------------------------------------------------------


def halves(layer: nn.Module, x: torch.Tensor) -> Any:
    y = layer(x)
    return y[:, : D // 2], y[:, D // 2 :]


def itself_and_a_view(layer: nn.Module, x: torch.Tensor) -> Any:
    y = layer(x)
    return {"y": [y]}, y.view(-1, 2, D // 2)


def its_input_and_a_view_of_it(layer: nn.Module, x: torch.Tensor) -> Any:
    return layer(x), x, x[:, : D // 2]


def twice_the_same(layer: nn.Module, x: torch.Tensor) -> Any:
    y = layer(x)
    return y, y


def with_one_detached(layer: nn.Module, x: torch.Tensor) -> Any:
    y = layer(x)
    return y, y.detach()


class Returning(nn.Module):
    def __init__(self, returns: Callable[[nn.Module, torch.Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.returns = nn.Linear(D, D), returns

    def forward(self, x: torch.Tensor) -> Any:
        return self.returns(self.linear, x)


def tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    else:
        for each in value.values() if isinstance(value, dict) else value:
            yield from tensors(each)


class Mixing(Stack):
    """Gives the next layer a function of all that a layer returns."""

    def __init__(self, returns: Any) -> None:
        super().__init__(partial(Returning, returns), width=D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            parts = [part.reshape(len(x), -1).sin().square().sum(1) for part in tensors(block(x))]
            x = torch.tanh(x + sum(i * part[:, None] for i, part in enumerate(parts, 1)))
        return x


RETURNS = [halves, itself_and_a_view, its_input_and_a_view_of_it, twice_the_same, with_one_detached]


@ALL_POLICIES
@pytest.mark.parametrize(("returns", "size"), in_turn(RETURNS, [None, 3]))
def test_outputs_that_share_memory(returns: Any, size: int | None, activations: str) -> None:
    def use(model: nn.Module) -> Any:
        with torch.no_grad():
            without = model(inputs())
        return without, trained(model)

    options = {"layers": "blocks", "activations": activations, "micro_batch_size": size}
    # what several outputs share gets its gradient in another order, and so do slices
    assert_as_plain(Mixing(returns), use, rtol=1e-5, atol=1e-6, **options)


@POLICIES
def test_one_of_several_outputs_may_be_written_in_place(activations: str) -> None:
    """It is a clone: the others do not change, as those of a layer that returns clones."""

    def use(model: nn.Module) -> Any:
        x = inputs()
        one, other = tensors(model.blocks[0](x))
        one.mul_(3)
        assert not torch.equal(one, other.view_as(one))
        (one.sum() + other.square().sum()).backward()
        return x.grad

    def cloned(layer: nn.Module, x: torch.Tensor) -> Any:
        y = layer(x)
        return y.clone(), y.view(-1, 2, D // 2).clone()

    found = []
    for returns in (itself_and_a_view, cloned):
        with streamed(Mixing(returns), layers="blocks", activations=activations) as model:
            found.append(use(model))
    assert_equal(*found)


class SideDoor(Layer):
    """Leaves a tensor in an attribute, and one whose node saves nothing."""

    def __init__(self) -> None:
        super().__init__(D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        self.penalty, self.shifted = x.square().mean(), self.linear.bias + 1
        return x


@POLICIES
def test_a_tensor_that_leaves_a_layer_by_another_way_is_refused(activations: str) -> None:
    expected = trained(Stack(SideDoor, width=D))
    match = "blocks.{}' computed reached the loss by another way.*an attribute"
    with streamed(Stack(SideDoor, width=D), layers="blocks", activations=activations) as model:
        loss = square(model) + sum(block.penalty for block in model.blocks)
        with pytest.raises(RuntimeError, match=match.format(2)):
            loss.backward()
        model.zero_grad()
        x = inputs()
        loss = square(model, x)
        with pytest.raises(RuntimeError, match=match.format(1)):
            model.blocks[1].shifted.sum().backward(retain_graph=True)
        # what was refused is not left for the next backward
        loss.backward()
        assert_equal((loss, x.grad, gradients(model)), expected)


# --- containers -----------------------------------------------------------------------------------------


class Sharing(nn.Module):
    """Hands keys on to later layers through a mapping, and what it has seen through a list."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.keys, self.out = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x: torch.Tensor, shared: Any, *, seen: list[Any]) -> torch.Tensor:
        if self.number % 2 == 0:
            keys = shared[self.number] = torch.tanh(self.keys(x))
            shared["last"] = keys.detach() * 2
        else:
            keys = shared[self.number - 1] * shared["last"]
        seen.append((keys.sum(-1), self.number))
        return x + self.out(keys)


class SharingNet(nn.Module):
    def __init__(self, make: Callable[[], Any], layers: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.make, self.embed = make, nn.Linear(D, D)
        self.blocks = nn.ModuleList(Sharing(number) for number in range(layers))

    def forward(self, x: torch.Tensor) -> Any:
        x, shared, seen = self.embed(x), self.make(), []
        for block in self.blocks:
            x = block(x, shared, seen=seen)
        return x, shared, seen


def with_shared_keys(model: nn.Module) -> Any:
    x = inputs(6)
    out, shared, seen = model(x)
    assert list(shared) == [0, "last", 2]
    assert [number for _, number in seen] == [0, 1, 2, 3]
    # gradients come to what containers hold too
    loss = out.square().sum() + shared[2].sum() + sum(each.square().sum() for each, _ in seen)
    before = [*shared.values(), *seen]
    loss.backward()
    # a run in backward puts nothing more into them
    assert all(map(operator.is_, [*shared.values(), *seen], before))
    assert len(seen) == len(model.blocks)
    return loss, dict(shared), [each for each, _ in seen], x.grad, gradients(model)


@ALL_POLICIES
@pytest.mark.parametrize("make", [dict, UserDict], ids=["dict", "UserDict"])
def test_what_layers_put_into_containers_is_an_output(make: Callable[[], Any], activations: str) -> None:
    """Keys and values that later layers of Gemma 3n and 4 share; their mapping is no dict."""
    assert_as_plain(SharingNet(make), with_shared_keys, layers="blocks", activations=activations)


@POLICIES
def test_containers_of_a_batch_in_slices(activations: str) -> None:
    options = {"layers": "blocks", "activations": activations, "micro_batch_size": 4}
    assert_as_plain(SharingNet(dict), with_shared_keys, rtol=1e-5, atol=1e-5, **options)


@pytest.mark.parametrize(("context", "size"), [(torch.no_grad, 4), (torch.inference_mode, None)])
def test_containers_without_gradients(size: int | None, context: Any) -> None:
    def use(model: nn.Module) -> Any:
        with context():
            out, shared, seen = model(inputs(6))
        return out, dict(shared), [each for each, _ in seen]

    options = {"layers": "blocks", "micro_batch_size": size}
    assert_as_plain(SharingNet(dict), use, rtol=1e-6, atol=1e-6, **options)


# --- post-accumulate-grad hooks -------------------------------------------------------------------------

WEIGHT = "blocks.1.linear.weight"


def heard_by_hooks(model: nn.Module) -> Any:
    """What the hooks of all parameters have found in p.grad, by name, in each of three backwards."""
    heard: dict[str, list[torch.Tensor]] = {name: [] for name, _ in model.named_parameters()}
    for name, param in model.named_parameters():

        def hook(param: torch.Tensor, name: str = name) -> None:
            assert param.grad is not None and param.grad.device.type == "cpu"
            heard[name].append(param.grad.clone())

        param.register_post_accumulate_grad_hook(hook)
    for seed in range(2):  # the second adds to what is there
        square(model, inputs(seed=seed)).backward()
    assert {len(found) for found in heard.values()} == {2}
    model.zero_grad()
    square(model, inputs(seed=2)).backward()
    return heard, gradients(model)


@ALL_POLICIES
def test_post_accumulate_hooks_are_called_once_per_backward(activations: str) -> None:
    slow = ThreadBackend(delays={Lane.D2H: lambda: 0.01}, poison=True)
    options = {"layers": "blocks", "activations": activations, "backend": slow}
    assert_as_plain(plain_layers(), heard_by_hooks, **options)


@POLICIES
def test_post_accumulate_hooks_of_a_layer_that_is_called_twice_are_called_once(activations: str) -> None:
    def use(model: nn.Module) -> Any:
        heard: list[torch.Tensor] = []
        model.get_parameter(WEIGHT).register_post_accumulate_grad_hook(lambda p: heard.append(p.grad.clone()))
        block = model.blocks[1]
        block(block(model.embed(inputs()))).square().sum().backward()
        assert len(heard) == 1
        return heard

    options = {"layers": "blocks", "activations": activations}
    assert_as_plain(plain_layers(), use, rtol=1e-5, atol=1e-7, **options)


def stepped_in_hooks(model: nn.Module) -> Any:
    """As PyTorch's tutorial has it: each parameter is updated when its gradient is there."""
    optimizers = {param: torch.optim.SGD([param], lr=0.01, momentum=0.9) for param in model.parameters()}

    def step(param: torch.Tensor) -> None:
        optimizers[param].step()
        optimizers[param].zero_grad()

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(step)
    losses = []
    for seed in range(4):
        loss = square(model, inputs(seed=seed)) * 0.01
        loss.backward()
        assert gradients(model) == {}
        losses.append(loss)
    return losses, dict(model.state_dict())


@POLICIES
def test_an_optimizer_in_hooks_that_drops_gradients(activations: str) -> None:
    poisoned = ThreadBackend(poison=True)
    options = {"layers": "blocks", "activations": activations, "backend": poisoned}
    assert_as_plain(plain_layers(), stepped_in_hooks, **options)


def test_hooks_of_a_gradient_that_is_not_kept_are_refused() -> None:
    with streamed(plain_layers(), layers="blocks", update="backward") as model:
        optimizer = streamer.AdamW(model.parameters())
        model.get_parameter(WEIGHT).register_post_accumulate_grad_hook(print)
        with pytest.raises(RuntimeError, match="'blocks.1' has a post-accumulate-grad hook.*update='step'"):
            square(model).backward()
        del optimizer


def test_a_penalty_on_the_weights_of_layers() -> None:
    def penalised(model: nn.Module) -> Any:
        (square(model) + sum(param.square().sum() for param in model.blocks.parameters())).backward()
        return gradients(model)

    options = {"layers": "blocks", "backend": ThreadBackend(delays={Lane.D2H: lambda: 0.02}, poison=True)}
    assert_as_plain(plain_layers(), penalised, rtol=1e-5, atol=1e-6, **options)


# --- parameters that a layer gains ----------------------------------------------------------------------


class Adapted(nn.Module):
    """A linear map with a low-rank one beside it, as peft puts it in the place of a linear map."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear
        self.a = nn.Parameter(torch.linspace(-1, 1, 2 * D).view(2, D))
        self.b = nn.Parameter(torch.linspace(-0.5, 0.5, 2 * D).view(D, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + x @ self.a.T @ self.b.T


def with_adapters(model: nn.Module) -> Any:
    model.requires_grad_(False)
    for block in model.blocks:
        block.linear = Adapted(block.linear)
    adapters = [param for param in model.parameters() if param.requires_grad]
    assert len(adapters) == 6
    optimizer = torch.optim.AdamW(adapters, lr=1e-2)
    losses = []
    for seed in range(3):
        loss = square(model, inputs(seed=seed))
        loss.backward()
        first = [param.grad.clone() for param in adapters]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss)
    with torch.no_grad():
        losses.append(square(model))
    return losses, first, adapters


@ALL_POLICIES
def test_adapters_that_are_added_after_wrap_are_trained(activations: str) -> None:
    poisoned = ThreadBackend(poison=True)
    options = {"layers": "blocks", "activations": activations, "backend": poisoned}
    assert_as_plain(plain_layers(), with_adapters, **options)


def test_autocast_keeps_no_cast_of_a_layer_that_has_run() -> None:
    """It would keep one of each layer until it ends."""

    def peak(layers: int) -> int:
        model = Stack(partial(Layer, 64), layers, width=64)
        with streamed(model, layers="blocks") as wrapped, torch.autocast("cpu", dtype=torch.bfloat16):
            with torch.no_grad(), Tracker() as tracker:
                wrapped(torch.ones(1, 64))
            return tracker.peak

    assert peak(8) == peak(3)


# --- what is refused ------------------------------------------------------------------------------------


def weight_of(model: nn.Module) -> nn.Parameter:
    return model.get_parameter(WEIGHT)


def with_other_weight(model: nn.Module, weight: nn.Parameter) -> None:
    linear = model.blocks[1].linear
    own, linear.weight = linear.weight, weight
    try:
        square(model)
    finally:
        linear.weight = own


def calls_another(model: nn.Module) -> torch.Tensor:
    model.blocks[1].linear.register_forward_hook(lambda module, args, out: model.blocks[0](out))
    return square(model)


def with_other_layers(change: Callable[[nn.ModuleList], Any], model: nn.Module) -> None:
    square(model)
    held = model.blocks._modules
    before = dict(held)
    try:
        change(model.blocks)
        square(model)
    finally:
        model.blocks._modules = held
        held.clear()
        held.update(before)


def with_another_list(model: nn.Module) -> None:
    square(model)
    before = model.blocks
    try:
        model.blocks = nn.ModuleList(Layer(D) for _ in range(3))
        square(model)
    finally:
        model.blocks = before


def uses_a_tensor_from_outside(model: nn.Module) -> None:
    """As no argument, so that each layer's backward would go through the graph of that tensor."""
    outside = nn.Parameter(torch.ones(D)).square()
    for block in model.blocks:
        block.linear.register_forward_hook(lambda module, args, out: out * outside)
    square(model).backward()


def tangent(model: nn.Module) -> torch.Tensor:
    with forward_ad.dual_level():
        return model(forward_ad.make_dual(inputs().detach(), torch.ones(4, D)))


UNWRAP = r"streamer\.unwrap\(model\)"
CREATE_GRAPH = f"create_graph=True: streamed layer 'blocks.2'.*leave create_graph out, or call {UNWRAP}"
FUNC = "torch.func .*streamed layer 'blocks.{}': use torch.autograd.grad, or call " + UNWRAP
TAKE_GRAD = r"blocks\.1\.linear\.weight'.* in a streamed layer: call loss\.backward\(\) and take p\.grad"
CHANGED = f"after streamer.wrap: call {UNWRAP}.*wrap it again"
REFUSALS: dict[str, tuple[Callable[[nn.Module], Any], str]] = {
    "double backward": (lambda model: square(model).backward(create_graph=True), CREATE_GRAPH),
    "autograd.grad of an input, create_graph": (
        lambda model: torch.autograd.grad(square(model), model.embed.weight, create_graph=True),
        CREATE_GRAPH,
    ),
    "torch.func.grad": (
        lambda model: torch.func.grad(partial(square, model))(inputs().detach()),
        FUNC.format(0),
    ),
    "torch.func.vmap": (lambda model: torch.func.vmap(model)(inputs().detach()), FUNC.format(0)),
    "torch.func.jvp": (
        lambda model: torch.func.jvp(model, (inputs().detach(),), (torch.ones(4, D),)),
        FUNC.format(0),
    ),
    "torch.func without gradients": (
        torch.no_grad()(lambda model: torch.func.vmap(model)(inputs().detach())),
        FUNC.format(0),
    ),
    "a batch of gradients": (
        lambda model: jacobian(model, inputs(2).detach(), vectorize=True),
        FUNC.format(2),
    ),
    "forward mode": (tangent, "forward-mode differentiation.*'blocks.0'.*under torch.no_grad"),
    "autograd.grad of a parameter": (
        lambda model: torch.autograd.grad(square(model), weight_of(model)),
        TAKE_GRAD,
    ),
    "autograd.grad of a list": (
        lambda model: torch.autograd.grad(square(model), [model.embed.weight, weight_of(model)]),
        TAKE_GRAD,
    ),
    "a tensor hook on a parameter": (
        lambda model: weight_of(model).register_hook(lambda gradient: 2 * gradient),
        "'blocks.1.linear.weight' is in a streamed layer, .* use param.register_post_accumulate_grad_hook",
    ),
    "a layer inside of a layer": (
        calls_another,
        "'blocks.0' is called inside of layer 'blocks.1': call it outside .* keep one .* out of layers=",
    ),
    "a tensor from outside in several layers": (
        uses_a_tensor_from_outside,
        r"layer 'blocks\.1' .*uses a tensor that is not an argument.*\(pass the tensor",
    ),
    "a replaced parameter": (
        lambda model: with_other_weight(model, nn.Parameter(torch.zeros(D, D))),
        rf"parameter '{WEIGHT}' of a streamed layer was replaced or removed .*param\.copy_ .*{UNWRAP} first",
    ),
    "functional_call": (
        lambda model: torch.func.functional_call(model, {WEIGHT: torch.zeros(D, D)}, (inputs(),)),
        rf"parameter '{WEIGHT}' of a streamed layer was replaced or removed .*functional_call",
    ),
    "a replaced layer": (
        partial(with_other_layers, lambda blocks: blocks.__setitem__(1, Layer(D))),
        f"layer 'blocks.1' was replaced or removed {CHANGED}",
    ),
    "a layer less": (
        partial(with_other_layers, lambda blocks: blocks.__delitem__(2)),
        f"layer 'blocks.2' was replaced or removed {CHANGED}",
    ),
    "another list": (with_another_list, f"replaced or removed {CHANGED}"),
    "a layer more": (
        partial(with_other_layers, lambda blocks: blocks.append(Layer(D))),
        f"'blocks' had 3 layers and has 4 {CHANGED}",
    ),
}


#: Modules of PyTorch script functions when they are imported. Releases differ in the warning's category.
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@POLICIES
@pytest.mark.parametrize("name", REFUSALS)
def test_what_is_refused_names_the_fix_and_leaves_the_model_as_it_was(name: str, activations: str) -> None:
    use, match = REFUSALS[name]
    with streamed(plain_layers(), layers="blocks", activations=activations) as model:
        with pytest.raises((RuntimeError, ValueError), match=match) as raised:
            use(model)
        assert "\n" not in str(raised.value)
        for module in model.modules():
            module._forward_hooks.clear()
        model.zero_grad()
        assert_equal(trained(model), trained(plain_layers()))
