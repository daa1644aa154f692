"""What would give other gradients than plain PyTorch, without a word, gives them or an error."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import MixtralConfig, MixtralForCausalLM

import streamer
from streamer.backends.base import Lane
from streamer.backends.thread import ThreadBackend
from tests.reference import streamed

D = 8
POLICIES = ["recompute", "keep"]


class Net(nn.Module):
    """An embedding, three layers and a head, all linear in parameters of 8 x 8."""

    def __init__(self, make: Callable[[], nn.Module] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(D, D)
        self.blocks = nn.ModuleList(
            make() if make else nn.Sequential(nn.Linear(D, D), nn.Tanh()) for _ in range(3)
        )
        self.head = nn.Linear(D, D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.real)


def inputs(seed: int = 0) -> torch.Tensor:
    return torch.randn(4, D, generator=torch.Generator().manual_seed(seed))


def gradients(model: nn.Module, loss_of: Callable[[nn.Module], torch.Tensor]) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    loss_of(model).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def square(model: nn.Module) -> torch.Tensor:
    return model(inputs()).abs().square().sum()


def assert_equal_to_plain(model: nn.Module, activations: str) -> None:
    expected = gradients(copy.deepcopy(model), square)
    with streamed(model, layers="blocks", activations=activations) as wrapped:
        actual = gradients(wrapped, square)
    assert list(actual) == list(expected)
    assert [name for name in expected if not torch.equal(actual[name], expected[name])] == []


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)


class Fourier(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.fft.fft(self.linear(x.real))


class PythonRandom(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x)) * random.random() + x * np.random.rand()


class Average(Base):
    """Writes a buffer and uses what it has written; ``exchange`` puts another tensor in its place."""

    def __init__(self, exchange: bool = False) -> None:
        super().__init__()
        self.exchange = exchange
        self.register_buffer("mean", torch.ones(D))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.linear(x))
        if self.exchange:
            self.mean = 0.5 * self.mean + x.detach().mean(0)
        else:
            self.mean.mul_(0.5).add_(x.detach().mean(0))
        return x * self.mean


@pytest.mark.parametrize("activations", POLICIES)
@pytest.mark.parametrize("layer", [Fourier, PythonRandom, Average, lambda: Average(exchange=True)])
def test_equal_to_plain_pytorch(layer: Callable[[], nn.Module], activations: str) -> None:
    assert_equal_to_plain(Net(layer), activations)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_slots", [1, 2, 4])
def test_weights_that_are_written_are_those_of_the_next_visit(num_slots: int, dtype: torch.dtype) -> None:
    """Also where every layer stays in its slot: the copy there is old."""

    def results(model: Any, optimizer: torch.optim.Optimizer, synchronize: Callable[[], None]) -> list[Any]:
        found: list[Any] = []

        def look() -> None:
            with torch.no_grad():
                found.append(model(inputs().to(dtype)))

        def write() -> None:
            synchronize()
            with torch.no_grad():
                for layer in (model.embed, model.blocks[0][0], model.blocks[2][0]):
                    layer.bias.add_(0.5)
                    layer.weight[3].zero_()

        for _ in range(2):
            look()
            write()
            look()
            model(inputs(1).to(dtype)).float().square().sum().backward()
            found += [param.grad.clone() for param in model.parameters()]
            write()  # between forward and step
            optimizer.step()
            optimizer.zero_grad()
            write()
        look()
        return found

    model = Net().to(dtype)
    plain = copy.deepcopy(model)
    expected = results(plain, torch.optim.SGD(plain.parameters(), 0.125), lambda: None)
    with streamed(model, layers="blocks", num_slots=num_slots) as mine:
        optimizer = torch.optim.SGD(mine.parameters(), 0.125)
        actual = results(mine, optimizer, lambda: streamer.synchronize(mine))
    differs = [not torch.equal(mine, theirs) for mine, theirs in zip(actual, expected, strict=True)]
    assert [number for number, is_other in enumerate(differs) if is_other] == []


class SideDoor(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.linear(x))
        self.penalty = x.square().mean()
        return x


@pytest.mark.parametrize("activations", POLICIES)
def test_a_tensor_that_leaves_by_a_side_door(activations: str) -> None:
    with streamed(Net(SideDoor), layers="blocks", activations=activations) as model:
        loss = square(model) + sum(block.penalty for block in model.blocks)
        with pytest.raises(RuntimeError, match="blocks.2' computed reached the loss by another way"):
            loss.backward()
        # looked at but not trained on, it is no one's concern
        assert [block.penalty.item() > 0 for block in model.blocks] == [True] * 3
        square(model).backward()


@pytest.mark.parametrize("activations", POLICIES)
def test_router_logits_that_hugging_face_records(activations: str) -> None:
    config = MixtralConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=4,
        output_router_logits=True,
        max_position_embeddings=32,
    )
    tokens = torch.randint(0, 32, (2, 12))
    with streamed(MixtralForCausalLM(config), layers="model.layers", activations=activations) as model:
        loss = model(tokens, labels=tokens).loss
        with pytest.raises(RuntimeError, match="reached the loss by another way.*router logits"):
            loss.backward()


class Boxed(Base):
    def forward(self, box: Any) -> Any:
        return SimpleNamespace(hidden=torch.tanh(self.linear(box.hidden)))


class BoxedNet(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        box = SimpleNamespace(hidden=self.embed(x))
        for block in self.blocks:
            box = block(box)
        return self.head(box.hidden)


@pytest.mark.parametrize("activations", POLICIES)
def test_a_tensor_inside_an_object_that_is_not_opened(activations: str) -> None:
    refusal = pytest.raises(ValueError, match="'blocks.0' is given a tensor inside an object")
    with streamed(BoxedNet(Boxed), layers="blocks", activations=activations) as model, refusal:
        square(model)


class WritesOutput(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
            x += 1
        return self.head(x)


def test_keep_notices_a_saved_tensor_that_was_written() -> None:
    with streamed(WritesOutput(), layers="blocks", activations="keep") as model:
        loss = square(model)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize("activations", [*POLICIES, "recompute+offload"])
@pytest.mark.parametrize("num_slots", [1, 4])
@pytest.mark.parametrize("change", ["our step", "PyTorch's step", "a write"])
def test_weights_that_have_changed_between_forward_and_backward(
    change: str, num_slots: int, activations: str
) -> None:
    """Plain PyTorch says that what backward needs was modified; here no parameter of the root is needed."""

    def change_them(model: Any, optimizer: torch.optim.Optimizer) -> None:
        if change != "a write":
            optimizer.step()
            return
        if model is not plain:
            streamer.synchronize(model)
        with torch.no_grad():
            model[0][1][0].bias.add_(1)
            model[0][1][0].weight.add_(1)

    def step(model: Any, make: Any) -> None:
        optimizer = make(model.parameters(), lr=0.1)
        model(inputs()).sum().backward()
        loss = model(inputs(1)).sum()
        change_them(model, optimizer)
        loss.backward()

    layers = nn.Sequential(nn.Sequential(*Net().blocks), nn.Flatten())
    plain = copy.deepcopy(layers)
    ours = streamer.AdamW if change == "our step" else torch.optim.AdamW
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        step(plain, torch.optim.AdamW)
    refusal = pytest.raises(RuntimeError, match=r"'0\.[12]' have changed since the forward.*run the forward")
    with streamed(layers, layers="0", num_slots=num_slots, activations=activations) as model, refusal:
        step(model, ours)


class WritesWeight(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.linear.weight.clamp_(-0.1, 0.1)
        return self.linear(x)


@pytest.mark.parametrize("activations", POLICIES)
def test_a_layer_that_writes_its_weights(activations: str) -> None:
    with streamed(Net(WritesWeight), layers="blocks", activations=activations) as model:
        for grad in (True, False):
            with torch.set_grad_enabled(grad), pytest.raises(ValueError, match="writes its own weights"):
                model(inputs())


def test_a_write_to_the_root_right_after_a_step_unseen_is_refused_too() -> None:
    with streamed(Net(), layers="blocks") as model:
        optimizer = streamer.AdamW(model.parameters(), lr=1e-2)
        square(model).backward()
        optimizer.step()
        with torch._C.DisableTorchFunctionSubclass():
            torch.autograd.graph.increment_version([model.head.weight])
        with pytest.raises(RuntimeError, match="weights of 'root' were written.*streamer.synchronize"):
            model(inputs())


def test_a_learning_rate_that_is_set_wrong_later_is_refused_before_anything_is_queued() -> None:
    with streamed(Net(), layers="blocks") as model:
        optimizer = streamer.AdamW(model.parameters(), lr=1e-2)
        square(model).backward()
        optimizer.param_groups[0]["lr"] = float("inf")
        with pytest.raises(ValueError, match="lr=inf is out of range"):
            optimizer.step()
        optimizer.param_groups[0]["lr"] = 1e-2
        optimizer.step()
        streamer.synchronize(model)


def unscaled(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(square(model)).backward()
    scaler.unscale_(optimizer)


def written_behind_autograd(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    square(model).backward()
    model.blocks[1][0].weight.grad.data.mul_(1000)


@pytest.mark.parametrize("change", [unscaled, written_behind_autograd])
def test_the_norm_of_gradients_that_were_written_behind_autograd(change: Any) -> None:
    with streamed(Net(), layers="blocks") as model:
        optimizer = streamer.AdamW(model.parameters())
        change(model, optimizer)
        expected = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        actual = streamer.clip_grad_norm_(model, 1e9)
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=0)


def test_a_penalty_on_the_weights_of_layers() -> None:
    def penalised(model: nn.Module) -> torch.Tensor:
        return square(model) + sum(param.square().sum() for param in model.blocks.parameters())

    expected = gradients(Net(), penalised)
    slow = ThreadBackend(delays={Lane.D2H: lambda: 0.02}, poison=True)
    with streamed(Net(), layers="blocks", backend=slow) as model:
        actual = gradients(model, penalised)
    for name, gradient in expected.items():
        torch.testing.assert_close(actual[name], gradient, msg=name)
