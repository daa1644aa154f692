"""Layers that run again in backward: plain PyTorch's gradients, nothing kept, nothing run for nothing."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
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

from models.gpt2 import GPT
from streamer.engine.owners import Owners, holders
from streamer.plan.tracker import Tracker
from tests.reference import VOCAB, language_loss, streamed

D = 8
Forward = Callable[["Layer", torch.Tensor], torch.Tensor]
POLICIES = pytest.mark.parametrize("activations", ["recompute", "recompute+offload"])


class Layer(nn.Module):
    def __init__(self, run: Forward) -> None:
        super().__init__()
        self.run = run
        self.up, self.down = nn.Linear(D, D), nn.Linear(D, D)
        self.scale = nn.Parameter(torch.randn(D))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(self, x)


class Net(nn.Module):
    def __init__(self, run: Forward, layers: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(D, D)
        self.blocks = nn.ModuleList(Layer(run) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return x


def inputs(size: int = 4) -> torch.Tensor:
    return torch.randn(size, D, generator=torch.Generator().manual_seed(0)).requires_grad_()


def square(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).abs().square().sum()


def backward(model: nn.Module, x: torch.Tensor) -> None:
    square(model, x).backward()


def gradients(model: nn.Module, train: Callable[[nn.Module, torch.Tensor], None]) -> list[torch.Tensor]:
    """Those of the inputs and of all parameters, zeros for None, after ``train``."""
    torch.manual_seed(1)
    x = inputs()
    train(model, x)
    return [torch.zeros(()) if p.grad is None else p.grad.clone() for p in (x, *model.parameters())]


def assert_equal_to_plain(
    run: Forward,
    train: Callable[[nn.Module, torch.Tensor], None] = backward,
    activations: str = "recompute",
    **options: Any,
) -> None:
    model = Net(run)
    # first: TorchScript runs other code when it has run before
    with streamed(model, layers="blocks", activations=activations, **options) as wrapped_model:
        actual = gradients(wrapped_model, train)
    expected = gradients(model, train)
    names = ["inputs", *dict(model.named_parameters())]
    pairs = zip(names, actual, expected, strict=True)
    assert [name for name, mine, theirs in pairs if not torch.equal(mine, theirs)] == []


def tanh(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(layer.up(x))


# --- layers that make it hard ---------------------------------------------------------------------------


def hook_on_its_input(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    x.register_hook(lambda gradient: 2 * gradient)
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
@POLICIES
@pytest.mark.parametrize("run", HARD, ids=lambda run: run.__name__)
def test_gradients_are_plain_pytorchs(run: Forward, activations: str) -> None:
    assert_equal_to_plain(run, activations=activations)


def test_torch_script_that_is_compiled_between_forward_and_backward() -> None:
    """It runs as it is once, and later as one operation that saves other tensors of the same shapes."""
    # not from source, which torch.jit.script would look up
    code = "def gate(x, y):\n    z = x + y\n    return z * torch.sigmoid(z) * torch.tanh(z)\n"
    gate = torch.jit.CompilationUnit(code).gate
    assert_equal_to_plain(lambda layer, x: layer.down(gate(layer.up(x), layer.scale)))


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


# --- what is kept ---------------------------------------------------------------------------------------


@POLICIES
def test_what_a_hook_has_recorded_stays_readable(activations: str) -> None:
    recorded: list[torch.Tensor] = []

    def record(module: nn.Module, args: tuple[torch.Tensor], output: torch.Tensor) -> None:
        recorded.append(args[0])

    plain = Net(tanh)
    plain.blocks[1].up.register_forward_hook(record)
    model = copy.deepcopy(plain)
    plain(inputs())
    with streamed(model, layers="blocks", activations=activations) as model:
        loss = square(model, inputs())
        assert torch.equal(recorded[1], recorded[0])
        loss.backward()
        assert torch.equal(recorded[1], recorded[0])


def keeps_a_leaf(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    hidden = tanh(layer, x).detach().requires_grad_()
    return x + hidden * 0.5


@pytest.mark.parametrize("run", [several, checkpoints, custom_function, keeps_a_leaf])
def test_forward_keeps_inputs_and_nothing_else(run: Forward) -> None:
    x, count = inputs(size=64), 3
    with streamed(Net(run, layers=count), layers="blocks") as model:
        for _ in range(2):  # what is allocated once
            backward(model, x)
        gc.collect()
        with Tracker() as counted:
            after: list[int] = []
            for _ in range(3):
                before, hidden = counted.now, model(x)
                # the first of them is what the embedding returns; leaves show one number each
                numbers = counted.now - before - (count + 1) * hidden.nbytes
                assert 0 <= numbers <= count * x.element_size()
                hidden.sum().backward()
                del hidden
                after.append(counted.now)
        assert after[2] == after[1]


def test_garbage_makes_no_room_for_new_owners() -> None:
    slot = torch.zeros(64, dtype=torch.uint8)
    cycle: list[Any] = [slot[:8]]
    cycle.append(cycle)
    owners = Owners(slot)
    with owners.counted():
        assert not owners.are_more()
        del cycle
        gc.collect()
        assert not owners.are_more()
        view = slot[8:]
    assert owners.are_more()
    del view
    assert not owners.are_more()


def test_holders_are_counted() -> None:
    tensors = [torch.zeros(1)]
    before = holders(tensors)
    other = tensors[0]
    assert holders(tensors) != before
    del other
    assert holders(tensors) == before


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
    torch.manual_seed(0)
    model = GPT(vocab_size=VOCAB, block_size=16, n_layer=3, n_head=2, n_embd=16, dropout=0.1)
    with streamed(model, layers="transformer.h", **options) as wrapped_model:
        actual = flops(wrapped_model)
    model.transformer.h = nn.ModuleList(map(Checkpointed, model.transformer.h))
    assert actual == flops(model)


def test_numbers_in_a_layer_do_not_have_it_run_as_a_whole() -> None:
    runs = 0

    def run(layer: Layer, x: torch.Tensor) -> torch.Tensor:
        nonlocal runs
        hidden = tanh(layer, x) * 0.5 / 3
        runs += 1
        return hidden

    with streamed(Net(run), layers="blocks") as model:
        backward(model, inputs())
    assert runs == 3
