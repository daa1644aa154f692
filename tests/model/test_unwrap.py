"""A plain model comes back, with the trained weights."""

from __future__ import annotations

import gc
import mmap
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import streamer
from streamer.backends.base import Lane
from streamer.backends.thread import ThreadBackend
from tests.models import Stack, numbers
from tests.reference import attached

#: An epsilon with which Adam does not make a whole step of a gradient that is all rounding.
CALM = {"lr": 1e-2, "eps": 1e-2}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.norm(self.linear(x)))


class Net(Stack):
    """Embedding and head are tied; inputs are cast."""

    def __init__(self, *, buffers: bool = False) -> None:
        make = Block if buffers else lambda: nn.Sequential(nn.Linear(6, 6), nn.Tanh())
        super().__init__(make, width=6)
        self.head = nn.Linear(6, 6, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.to(self.embed.weight.dtype)).float()


def net(**options: Any) -> Net:
    return Net(**options)


def batch(step: int) -> torch.Tensor:
    return numbers(4, 6, seed=step)


def wrap(model: Net, **options: Any) -> Net:
    return streamer.wrap(model, **({"layers": "blocks", "device": "cpu"} | options))


def train(model: Net, optimizer: torch.optim.Optimizer, *, steps: int = 3) -> None:
    for step in range(steps):
        model(batch(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def train_wrapped(model: Net, *, steps: int = 3) -> None:
    train(model, streamer.AdamW(model.parameters(), **CALM), steps=steps)


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_equal(actual: object, expected: object) -> None:
    """To the bit, dtypes too."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def test_everything_that_wrap_attached_is_gone() -> None:
    model = net(buffers=True)
    calls: list[str] = []
    model.blocks[1].register_forward_hook(lambda *_: calls.append("hook"))
    model.register_forward_pre_hook(lambda *_: calls.append("pre-hook"))
    before = attached(model)
    params = list(model.named_parameters(remove_duplicate=False))

    assert wrap(model) is model
    assert attached(model) != before
    train_wrapped(model, steps=1)
    assert calls == ["pre-hook", "hook"]
    assert streamer.unwrap(model) is model

    assert attached(model) == before
    after = list(model.named_parameters(remove_duplicate=False))
    assert [(name, id(param)) for name, param in after] == [(name, id(param)) for name, param in params]
    assert [param.grad for param in model.parameters()] == [None] * len(list(model.parameters()))
    assert model.head.weight is model.embed.weight
    assert type(model) is Net
    calls.clear()
    model(batch(0))
    assert calls == ["pre-hook", "hook"]


@pytest.mark.parametrize(
    ("plain_dtype", "dtype", "use"),
    [
        (torch.float32, None, "nothing"),
        (torch.float32, torch.bfloat16, "training forward"),
        (torch.float32, torch.float16, "inference"),
        (torch.bfloat16, None, "training forward"),
        (torch.float16, None, "nothing"),
    ],
)
def test_weights_are_equal_after_no_training(
    plain_dtype: torch.dtype, dtype: torch.dtype | None, use: str
) -> None:
    model = net().to(plain_dtype)
    expected = values(model)
    wrap(model, dtype=dtype)
    if use == "inference":
        with torch.no_grad():
            model(batch(0))
    elif use == "training forward":
        model(batch(0)).sum().backward()
    streamer.unwrap(model)
    # the exact fp32 weights come back, also where bf16 or fp16 was streamed
    assert_equal(values(model), expected)


def test_unwrap_gives_the_exact_masters() -> None:
    """fp32 masters that saw the same gradients, rounded to the streamed dtype, are where the model is."""
    dtype = torch.float16  # of bf16 test_parity.py has it
    model = wrap(net(), dtype=dtype)
    masters = [param.detach().float().clone() for param in model.parameters()]
    for master, param in zip(masters, net().parameters(), strict=True):
        master.copy_(param.detach())
    reference = torch.optim.AdamW(masters, lr=1e-4)
    optimizer = streamer.AdamW(model.parameters(), lr=1e-4)
    for step in range(5):
        (model(batch(step)).square().mean() * 100).backward()
        for master, param in zip(masters, model.parameters(), strict=True):
            assert param.grad is not None and param.grad.dtype == dtype
            master.grad = param.grad.float()
        optimizer.step()
        optimizer.zero_grad()
        reference.step()
    streamed = values(model)
    streamer.unwrap(model)
    for (name, param), master in zip(model.named_parameters(), masters, strict=True):
        assert param.dtype == torch.float32
        # an update of rounded weights would be off by the last place of dtype, 1e-3 of the weight
        torch.testing.assert_close(param.detach(), master, rtol=1e-6, atol=1e-7)
        assert not torch.equal(param.detach().to(dtype).float(), param.detach()), "the low bits are there"
        assert torch.equal(param.detach().to(dtype), streamed[name])


def test_what_comes_back_is_what_plain_training_gives() -> None:
    slow = ThreadBackend(delays={Lane.HOST: lambda: 0.005})
    model, plain = wrap(net(buffers=True), backend=slow), net(buffers=True)
    train_wrapped(model, steps=2)  # returns while the last updates are queued
    streamer.unwrap(model)
    train(plain, torch.optim.AdamW(plain.parameters(), **CALM), steps=2)
    torch.testing.assert_close(values(model), values(plain), rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_state_dict_has_the_same_keys_in_the_same_order(dtype: torch.dtype | None) -> None:
    model = net(buffers=True).eval()  # batch norm refuses to train bf16 weights with fp32 statistics
    plain = model.state_dict()
    expected = [(name, tuple(value.shape)) for name, value in plain.items()]
    part = list(model.blocks[0].state_dict(prefix="x."))
    wrap(model, dtype=dtype)
    for _ in range(2):
        state = model.state_dict()
        assert [(name, tuple(value.shape)) for name, value in state.items()] == expected
        assert {value.device.type for value in state.values()} == {"cpu"}
        assert state._metadata == plain._metadata  # type: ignore[attr-defined]
        assert list(model.blocks[0].state_dict(prefix="x.")) == part
        if dtype is None:
            train_wrapped(model, steps=1)
    streamer.unwrap(model)
    assert [(name, tuple(value.shape)) for name, value in model.state_dict().items()] == expected


def test_a_model_that_is_dropped_ends_its_threads() -> None:
    model = wrap(net())
    train_wrapped(model, steps=1)
    streamer.synchronize(model)  # what is queued still needs the model
    dropped = weakref.ref(model)
    del model
    gc.collect()
    assert dropped() is None


def test_an_old_optimizer_does_not_hang_after_unwrap() -> None:
    model = wrap(net())
    optimizer = streamer.AdamW(model.parameters())
    train(model, optimizer, steps=1)
    streamer.unwrap(model)
    # the model goes on as a plain one, and the loop still calls the optimizer of before
    train(model, torch.optim.AdamW(model.parameters()), steps=1)
    finished = threading.Event()
    errors: list[str] = []

    def use() -> None:
        try:
            optimizer.zero_grad()
            assert optimizer.state_dict()["state"][0]["exp_avg"].any(), "what it held can still be read"
            optimizer.step()
        except RuntimeError as error:
            errors.append(str(error))
        finished.set()

    threading.Thread(target=use, daemon=True).start()
    assert finished.wait(5), "it waits for lanes that have ended"
    assert errors == [
        "the model that this optimizer updates was unwrapped: create a new optimizer, of torch.optim for a "
        "plain model"
    ]


@pytest.mark.parametrize("activations", ["recompute", "keep"])
def test_a_backward_after_unwrap_says_so(activations: str) -> None:
    model = wrap(net(), activations=activations)
    loss = model(batch(0)).sum()
    streamer.unwrap(model)
    with pytest.raises(RuntimeError, match="the model was unwrapped since the forward that this backward"):
        loss.backward()


@pytest.mark.parametrize("update", ["step", "backward"])
def test_all_memory_is_given_back_at_once(monkeypatch: pytest.MonkeyPatch, update: str) -> None:
    """Without the garbage collector, and although an optimizer of the model still exists."""
    mappings: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()

    class Mapping(mmap.mmap):
        def __init__(self, *_: Any, **__: Any) -> None:
            mappings.add(self)

    monkeypatch.setattr(mmap, "mmap", Mapping)
    model = wrap(net(), update=update)
    optimizer = streamer.AdamW(model.parameters())
    for _ in range(2 if update == "step" else 1):  # the second one makes room for sums
        model(batch(0)).square().mean().backward()
    optimizer.step()
    assert len(mappings) > 8
    gc.disable()
    try:
        streamer.unwrap(model)
        optimizer.state.clear()
        assert len(mappings) == 0
    finally:
        gc.enable()
