"""A layer that computes something else when it runs again in backward is refused, one with noise is not."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from streamer.engine.tensors.samples import SIZE, Sample, Samples
from tests.engine.layer.test_recomputation import (
    Layer,
    Net,
    Scale,
    backward,
    inputs,
    square,
    tanh,
)
from tests.reference import streamed

#: What layers find outside of themselves.
RANDOM = torch.Generator()
CALLS = {"count": 0}

REFUSAL = "'blocks.2' did not do the same when it ran again in backward.*a random number generator"


def counted() -> int:
    CALLS["count"] += 1
    return CALLS["count"]


def noise(x: torch.Tensor) -> torch.Tensor:
    return torch.randn(x.shape, generator=RANDOM)


def multiplied(x: torch.Tensor) -> torch.Tensor:
    return x * torch.bernoulli(torch.full_like(x, 0.5), generator=RANDOM)


def filled(x: torch.Tensor) -> torch.Tensor:
    return x.masked_fill(torch.rand(x.shape, generator=RANDOM) < 0.5, 0)


def complex_noise(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(torch.complex(layer.up(x), noise(x)).conj().exp()).sum(-1)


Run = Callable[[Layer, torch.Tensor], torch.Tensor]
OTHERWISE: dict[str, Run] = {
    "mask in the end": lambda layer, x: multiplied(layer.down(tanh(layer, x))),
    "mask in a branch": lambda layer, x: filled(layer.up(x)) + torch.tanh(layer.down(x)),
    "permutation": lambda layer, x: layer.down(tanh(layer, x))[torch.randperm(len(x), generator=RANDOM)],
    "noise": lambda layer, x: torch.tanh(layer.up(x) + noise(x)),
    "counter": lambda layer, x: torch.tanh(layer.up(x) * counted()),
    "custom function": lambda layer, x: Scale.apply(tanh(layer, x) * counted(), layer.scale),
    "complex noise": complex_noise,
}


@pytest.mark.parametrize(
    "options",
    [{}, {"activations": "recompute+offload"}, {"micro_batch_size": 8, "batch_dims": {"blocks": 0}}],
    ids=str,
)
@pytest.mark.parametrize("name", OTHERWISE)
def test_what_depends_on_something_outside_of_the_layer_is_refused(
    name: str, options: dict[str, Any]
) -> None:
    with streamed(Net(OTHERWISE[name]), **options) as model:
        for _ in range(2):  # in the second step the layer chooses what it looks at
            loss = square(model, inputs(16))
            with pytest.raises(RuntimeError, match=REFUSAL):
                loss.backward()
        for block in model.blocks:
            block.run = tanh
        backward(model, inputs(16))


def test_every_saved_tensor_is_looked_at_in_turn() -> None:
    """A mask that changes nothing that comes after it, among six that do not change at all."""

    def run(layer: Layer, x: torch.Tensor) -> torch.Tensor:
        hidden = layer.up(x)
        total = torch.zeros_like(x)
        for number in range(6):
            mask = torch.rand(x.shape, generator=RANDOM if number == 2 else None) < 0.5
            total = total + hidden.masked_fill(mask, 0)
        return total + torch.tanh(layer.down(x))

    refusals = 0
    with streamed(Net(run, layers=1), layers="blocks") as model:
        for _ in range(9):
            try:
                backward(model, inputs(64))
            except RuntimeError as error:
                assert "did not do the same" in str(error)
                refusals += 1
    assert refusals >= 2  # in the first visit, and when it is its turn


# --- what is no other way -------------------------------------------------------------------------------


def quiet(relative: float) -> Run:
    """A layer with noise from outside, as large as that of kernels that add up in no fixed order."""

    def run(layer: Layer, x: torch.Tensor) -> torch.Tensor:
        hidden = layer.up(x)
        return layer.down(torch.tanh(hidden * (1 + relative * noise(hidden).to(hidden.dtype))))

    return run


@pytest.mark.parametrize(
    "relative, dtype, is_autocast",
    [(1e-6, None, False), (2**-8, torch.bfloat16, False), (2**-8, None, True)],
    ids=["fp32", "bf16", "autocast"],
)
def test_noise_in_the_last_bits_is_none(
    relative: float, dtype: torch.dtype | None, is_autocast: bool
) -> None:
    with streamed(Net(quiet(relative)), dtype=dtype) as model:
        x = inputs(64) if dtype is None else inputs(64).to(dtype)
        for _ in range(10):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_autocast):
                loss = square(model, x)
            loss.backward()


def nan(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(layer.up(x) * math.nan)


def infinite(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    return layer.down((tanh(layer, x) > 0).float().masked_fill(x > 0, -math.inf).exp())


def unwritten(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    """Saves a part of a tensor, of which nobody has written the rest."""
    whole = torch.empty(len(x), 4 * x.shape[1])
    whole.fill_(counted())
    whole[:, : x.shape[1]] = 0.5
    return tanh(layer, x) * whole[:, : x.shape[1]]


@pytest.mark.parametrize("run", [nan, infinite, unwritten])
def test_what_is_the_same_is_told_to_be(run: Run) -> None:
    with streamed(Net(run)) as model:
        for _ in range(2):
            backward(model, inputs(16))


# --- as on a GPU ----------------------------------------------------------------------------------------


def on_the_device(tensor: torch.Tensor) -> Sample:
    sample = Sample.of(tensor)
    assert sample is not None
    return Sample(sample.numbers(), sample.dtype)


def test_samples_on_a_device_are_compared_in_the_end() -> None:
    samples, one = Samples(), torch.randn(100, 30)
    samples.add("alike", on_the_device(one), on_the_device(one * (1 + 1e-6)), is_short=False)
    samples.add("short", on_the_device(one[:10]), on_the_device(one[:10] * 1.01), is_short=True)
    samples.finish()
    samples.add("alike", on_the_device(one), on_the_device(one), is_short=False)
    samples.add("other", on_the_device(one), on_the_device(one.flip(0)), is_short=False)
    with pytest.raises(RuntimeError, match="layer 'other' did not do the same"):
        samples.finish()
    samples.finish()  # what was told is told once


@pytest.mark.parametrize("change", [0.0, math.nan, math.inf])
@pytest.mark.parametrize("count, differs", [(8, False), (9, True)])
def test_a_few_elements_may_be_others(change: float, count: int, differs: bool) -> None:
    one = torch.randn(SIZE) + 5
    other = one.clone()
    other[:count] = change
    samples = Samples()
    samples.add("it", on_the_device(one), on_the_device(other), is_short=True)
    try:
        samples.finish()
    except RuntimeError:
        assert differs
    else:
        assert not differs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.bool, torch.int64])
@pytest.mark.parametrize("shape", [(), (1,), (300,), (64, 64), (3, 1000)])
def test_a_sample_has_elements_of_the_tensor(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (torch.randn(shape) * 100).to(dtype)
    for view in (tensor, tensor.mT if tensor.dim() > 1 else tensor, tensor[..., ::2] if shape else tensor):
        sample = Sample.of(view)
        assert sample is not None
        numbers = sample.numbers()
        known = torch.view_as_real(view) if view.is_complex() else view
        assert torch.isin(numbers, known.to(torch.float64)).all()
        assert len(numbers) <= SIZE * (2 if view.is_complex() else 1)


def test_modules_of_pytorch_are_the_same_again() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.attention = nn.BatchNorm1d(8), nn.MultiheadAttention(8, 2, dropout=0.3)
            self.rnn = nn.GRU(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.norm(x)
            x = x + self.attention(x, x, x)[0]
            return x + self.rnn(x)[0]

    with streamed(nn.Sequential(Block(), Block()), layers="") as model:
        for _ in range(4):
            backward(model, inputs(16))
