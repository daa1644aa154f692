"""Layers that run again in backward: plain PyTorch's gradients, nothing run for nothing."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from streamer.engine.layer import parameter_gradients
from tests.engine.layer.common import Stack
from tests.reference import (
    assert_as_plain,
    assert_refused,
    gradients,
    language_loss,
    streamed,
    tiny_gpt,
)

D = 8
Forward = Callable[["Layer", torch.Tensor], torch.Tensor]
OFFLOADED_OR_NOT = pytest.mark.parametrize("activations", ["recompute", "recompute+offload"])


class Layer(nn.Module):
    def __init__(self, run: Forward) -> None:
        super().__init__()
        self.run = run
        self.up, self.down = nn.Linear(D, D), nn.Linear(D, D)
        self.scale = nn.Parameter(torch.randn(D))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(self, x)


class Net(Stack):
    def __init__(self, run: Forward, layers: int = 3) -> None:
        super().__init__(partial(Layer, run), layers, width=D)


def inputs(size: int = 4) -> torch.Tensor:
    return torch.randn(size, D, generator=torch.Generator().manual_seed(0)).requires_grad_()


def square(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).abs().square().sum()


def backward(model: nn.Module, x: torch.Tensor) -> None:
    square(model, x).backward()


def assert_equal_to_plain(
    run: Forward,
    train: Callable[[nn.Module, torch.Tensor], None] = backward,
    activations: str = "recompute",
    depth: int = 3,
) -> None:
    def use(model: nn.Module) -> Any:
        x = inputs()
        train(model, x)
        return x.grad, gradients(model)

    assert_as_plain(Net(run, depth), use, layers="blocks", activations=activations)


def tanh(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(layer.up(x))


# --- layers that make it hard ---------------------------------------------------------------------------


def hook_on_its_input(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    x.register_hook(lambda gradient: 2 * gradient)
    return layer.down(tanh(layer, x))


def hook_on_what_others_use_too(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    x.register_hook(lambda gradient: gradient * gradient)
    return layer.down(tanh(layer, x))


def hook_on_its_weight(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    layer.up.weight.register_hook(lambda gradient: 2 * gradient)
    return layer.down(tanh(layer, x))


def hook_that_holds_a_view_of_a_weight(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    hidden, scale = tanh(layer, x), layer.scale.detach()[:]
    hidden.register_hook(lambda gradient: scale * gradient)
    return layer.down(hidden)


def hook_that_holds_its_input(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    hidden = tanh(layer, x)
    hidden.register_hook(lambda gradient: x.detach() * gradient)
    return layer.down(hidden)


def nested(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    parts = layer.up(torch.nested.as_nested_tensor([x[:1], x[1:]])).unbind()
    return layer.down(torch.tanh(torch.cat(parts)))


def jagged(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    parts = torch.nested.as_nested_tensor([x[:1], x[1:]], layout=torch.jagged)
    return layer.down(torch.tanh(layer.up(parts)).values())


def checkpoints(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    def run(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.sin(F.linear(x, weight)) * layer.scale

    hidden = checkpoint(run, tanh(layer, x), layer.down.weight.t(), use_reentrant=False)
    return hidden + checkpoint(run, x, layer.down.weight, use_reentrant=True)


def saves_on_the_host(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    with save_on_cpu():
        hidden = tanh(layer, x)
    return layer.down(hidden) * hidden


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        ctx.x, ctx.scale = x, scale.view(-1)
        return x * scale

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return gradient * ctx.scale, (gradient * ctx.x).sum(0)


def custom_function(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    return Scale.apply(tanh(layer, x), layer.scale)


def catches_everything(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    try:
        hidden = tanh(layer, x)
        return layer.down(hidden) * hidden
    except BaseException:
        return x


def writes_a_part(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    hidden = layer.up(x) * 0.5
    hidden[:, :4].mul_(layer.scale[:4])
    hidden[:, 4:] = x[:, 4:]
    return layer.down(hidden)


def returns_what_it_is_given(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    layer.up(x)
    return x


def dead_branches(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    layer.down(tanh(layer, x))
    hidden = torch.cat([tanh(layer, x[:0]), tanh(layer, x)])
    layer.down(hidden)
    return hidden


def complex_numbers(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    return torch.fft.fft(torch.tanh(layer.up(x.real))).conj() * torch.complex(layer.scale, layer.scale)


HARD = [
    hook_on_its_input,
    hook_on_its_weight,
    hook_that_holds_a_view_of_a_weight,
    hook_that_holds_its_input,
    nested,
    jagged,
    checkpoints,
    saves_on_the_host,
    custom_function,
    catches_everything,
    writes_a_part,
    returns_what_it_is_given,
    dead_branches,
    complex_numbers,
]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@OFFLOADED_OR_NOT
@pytest.mark.parametrize("run", HARD, ids=lambda run: run.__name__)
def test_gradients_are_plain_pytorchs(run: Forward, activations: str) -> None:
    assert_equal_to_plain(run, activations=activations)


def test_small_gradients_go_to_the_slot_together(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[int] = []

    def foreach_copy(places: list[torch.Tensor], gradients: list[torch.Tensor]) -> None:
        copied.append(len(places))
        for place, gradient in zip(places, gradients, strict=True):
            place.copy_(gradient)

    monkeypatch.setattr(torch, "_foreach_copy_", foreach_copy)
    # biases and scale wait, matrices do not
    monkeypatch.setattr(parameter_gradients, "SMALL_BYTES", torch.float32.itemsize * D)
    assert_equal_to_plain(lambda layer, x: layer.scale * layer.down(tanh(layer, x)))
    assert copied == [3] * 3


def with_residuals(model: nn.Module, x: torch.Tensor) -> None:
    def run(x: torch.Tensor) -> torch.Tensor:
        x = model.embed(x)
        for block in model.blocks:
            x = x + block(x)
        return x

    backward(run, x)  # type: ignore[arg-type]


def test_a_hook_on_the_input_hears_of_each_slice() -> None:
    heard: list[int] = []

    def run(layer: Layer, x: torch.Tensor) -> torch.Tensor:
        x.register_hook(lambda gradient: heard.append(len(gradient)))
        return tanh(layer, x)

    with streamed(Net(run, layers=1), layers="blocks", micro_batch_size=3) as model:
        backward(model, inputs(6))
    assert heard == [3, 3]


@pytest.mark.parametrize("activations", ["recompute", "recompute+offload", "keep"])
def test_a_hook_on_the_input_hears_of_all_of_its_gradient(activations: str) -> None:
    assert_equal_to_plain(hook_on_what_others_use_too, with_residuals, activations)


def to_and_fro(model: nn.Module, x: torch.Tensor) -> None:
    """The second layer is in one slot in forward and in the other in backward."""
    first, second = model.blocks[0], model.blocks[1]
    backward(lambda x: first(second(first(x))), x)  # type: ignore[arg-type]


def test_weights_that_a_layer_holds_in_a_slot_that_another_layer_gets() -> None:
    assert_equal_to_plain(hook_that_holds_a_view_of_a_weight, to_and_fro, depth=4)


@pytest.mark.parametrize(
    "code, run_with",
    [
        (
            "z = x + y\n    return z * torch.sigmoid(z) * torch.tanh(z)",
            lambda gate, layer, x: layer.down(gate(layer.up(x), layer.scale)),
        ),
        # what it saves comes in another order later
        ("return x * y + y", lambda gate, layer, x: gate(x, layer.scale)),
        ("return x * y + y", lambda gate, layer, x: gate(layer.up(x), layer.down(x))),
        ("return x * y + y", lambda gate, layer, x: x + gate(layer.up.bias, layer.scale)),
        ("return x * y + y", lambda gate, layer, x: gate(*layer.up(x).chunk(2, -1)).repeat(1, 2)),
        # and here another in place of the only one
        ("return torch.softmax(x, 1) + y", lambda gate, layer, x: gate(layer.up(x), layer.down(x))),
    ],
    ids=["others", "input and weight", "computed", "weights", "views", "one"],
)
def test_torch_script_that_is_compiled_between_forward_and_backward(code: str, run_with: Any) -> None:
    """It runs as it is once, and later as one operation that saves other tensors of the same shapes."""
    # not from source, which torch.jit.script would look up
    gate = torch.jit.CompilationUnit(f"def gate(x, y):\n    {code}\n").gate
    assert_equal_to_plain(lambda layer, x: run_with(gate, layer, x))


def several(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    hidden = torch.sigmoid(layer.down(tanh(layer, x)))
    return layer.down(hidden * hidden * 0.5)


# --- what holds around the forward only -----------------------------------------------------------------


def attention(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    heads = layer.up(x).view(1, 4, 2, 4).transpose(1, 2)
    return layer.down(F.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).reshape(4, D))


def in_another_way(model: nn.Module, x: torch.Tensor) -> None:
    with sdpa_kernel(SDPBackend.MATH):
        loss = square(model, x)
    loss.backward()


def backward_in_another_way(model: nn.Module, x: torch.Tensor) -> None:
    loss = square(model, x)
    with sdpa_kernel(SDPBackend.MATH):
        loss.backward()
        assert not torch.backends.cuda.flash_sdp_enabled()


@pytest.mark.parametrize("train", [in_another_way, backward_in_another_way])
def test_the_choice_of_attention_is_that_of_the_forward(train: Any) -> None:
    assert_equal_to_plain(attention, train)
    assert torch.backends.cuda.flash_sdp_enabled()


class SigmoidForTanh(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return 2 * torch.sigmoid(*args) if func is torch.tanh else func(*args, **(kwargs or {}))


def test_what_computes_something_else_again_is_refused() -> None:
    with streamed(Net(several), layers="blocks") as model:
        with SigmoidForTanh():
            loss = square(model, inputs())
        with pytest.raises(RuntimeError, match="'blocks.2' did not do the same when it ran again.*a mode"):
            loss.backward()


def saved_and_written(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    return layer.down(tanh(layer, x).mul_(2))


def written_by_the_caller(model: nn.Module, x: torch.Tensor) -> None:
    x = model.embed(x)
    for block in model.blocks:
        x = block(x).add_(1)
    x.sum().backward()


@pytest.mark.parametrize(
    ("run", "train", "activations"),
    [
        (saved_and_written, backward, "recompute"),
        (saved_and_written, backward, "keep"),
        (tanh, written_by_the_caller, "keep"),
    ],
)
def test_what_is_written_after_it_was_saved_is_refused_as_by_plain_pytorch(
    run: Forward, train: Callable[[nn.Module, torch.Tensor], None], activations: str
) -> None:
    use, match = partial(train, x=inputs()), "modified by an inplace operation"
    with pytest.raises(RuntimeError, match=match):
        use(Net(run))
    assert_refused(Net(run), use, match, RuntimeError, layers="blocks", activations=activations)


# --- several backwards ----------------------------------------------------------------------------------


def twice(model: nn.Module, x: torch.Tensor) -> None:
    loss = square(model, x)
    loss.backward(retain_graph=True)
    loss.backward()


def of_some(model: nn.Module, x: torch.Tensor) -> None:
    loss = square(model, x)
    loss.backward(inputs=[model.blocks[1].up.weight], retain_graph=True)
    loss.backward(inputs=[model.blocks[0].up.bias, x])


def often_in_one_forward(model: nn.Module, x: torch.Tensor) -> None:
    first, second = model.blocks[0], model.blocks[1]
    backward(lambda x: second(first(second(first(x)))), x)  # type: ignore[arg-type]


@pytest.mark.parametrize("train", [twice, of_some, often_in_one_forward])
def test_graphs_that_are_gone_through_again(train: Any) -> None:
    assert_equal_to_plain(lambda layer, x: layer.down(tanh(layer, x)) * 0.5, train)


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


@pytest.mark.parametrize("options", [{}, {"micro_batch_size": 2}], ids=str)
def test_a_step_runs_as_much_as_under_pytorchs_checkpoint(options: dict[str, Any]) -> None:
    model = tiny_gpt(dropout=0.1)
    with streamed(model, layers="transformer.h", **options) as wrapped_model:
        language_loss(wrapped_model, 0)  # how a batch is cut is checked once
        actual = flops(wrapped_model)
    model.transformer.h = nn.ModuleList(map(Checkpointed, model.transformer.h))
    assert actual == flops(model)


def with_numbers(layer: Layer, x: torch.Tensor, elsewhere: nn.Parameter) -> torch.Tensor:
    return tanh(layer, x) * 0.5 / 3


def with_a_parameter_from_elsewhere(layer: Layer, x: torch.Tensor, elsewhere: nn.Parameter) -> torch.Tensor:
    return torch.tanh(layer.up(x) * elsewhere)


@pytest.mark.parametrize("part", [with_numbers, with_a_parameter_from_elsewhere])
def test_what_does_not_have_a_layer_run_as_a_whole(part: Any) -> None:
    runs, elsewhere = 0, nn.Parameter(torch.ones(D))

    def run(layer: Layer, x: torch.Tensor) -> torch.Tensor:
        nonlocal runs
        hidden: torch.Tensor = part(layer, x, elsewhere)
        runs += 1
        return hidden

    with streamed(Net(run), layers="blocks") as model:
        backward(model, inputs())
    assert runs == 3


def test_a_layer_that_catches_exceptions_does_not_see_its_second_run_end() -> None:
    failures: list[Exception] = []

    def run(layer: Layer, x: torch.Tensor) -> torch.Tensor:
        try:
            return tanh(layer, x)
        except Exception as error:
            failures.append(error)
            raise

    with streamed(Net(run), layers="blocks") as model:
        backward(model, inputs())
    assert failures == []
