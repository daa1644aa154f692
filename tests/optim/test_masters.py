"""An element keeps its remainder while its 16 bits are what they were: no write of anything resets anything.

[Note: masters] in `streamer/store/shard.py` states the rule.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import streamer
from tests.reference import streamed

SHORT = [torch.bfloat16, torch.float16]
WIDTH, STEPS = 16, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.fc(x)) * self.scale


class Model(nn.Module):
    """An embedding and a head, which are the root unit, around three layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 32)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def tiny_model() -> Model:
    torch.manual_seed(0)
    return Model()


Exact = dict[str, torch.Tensor]
Write = Callable[[nn.Module], None]


def wrapped(dtype: torch.dtype, **options: Any) -> AbstractContextManager[nn.Module]:
    return streamed(tiny_model(), layers="layers", dtype=dtype, num_slots=2, **options)


def masters_after(
    dtype: torch.dtype, after_step: Write, *, steps: int = STEPS, lr: float = 1e-6, **options: Any
) -> tuple[Exact, Exact]:
    """The fp32 masters before and after ``steps`` steps, with ``after_step(model)`` after each of them."""
    before = {name: param.detach().clone() for name, param in tiny_model().named_parameters()}
    with wrapped(dtype, **options) as model:
        optimizer = streamer.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
        for step in range(steps):
            tokens = torch.randint(0, 32, (4, 9), generator=torch.Generator().manual_seed(step))
            logits = model(tokens[:, :-1])
            F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
            after_step(model)
    # `wrap` gave the model fp32 parameters back
    return before, {name: param.detach().clone() for name, param in model.named_parameters()}


def nothing(model: nn.Module) -> None:
    pass


@cache
def untouched(dtype: torch.dtype) -> tuple[Exact, Exact]:
    return masters_after(dtype, nothing)


def clamp(model: Any) -> None:
    with torch.no_grad():
        for layer in model.layers:
            layer.scale.clamp_(-100, 100)
        model.head.bias.clamp_(-100, 100)


def clamp_by_data(model: Any) -> None:
    for layer in model.layers:
        layer.scale.data.clamp_(-100, 100)
    model.head.bias.data.clamp_(-100, 100)


def clamp_by_numpy(model: Any) -> None:
    if model.layers[0].scale.dtype == torch.float16:  # NumPy has no bfloat16
        for layer in model.layers:
            values = layer.scale.detach().numpy()
            values.clip(-100, 100, out=values)


def perturb_and_put_back(model: nn.Module) -> None:
    """As sharpness-aware minimization does (Foret et al., 2021)."""
    with torch.no_grad():
        kept = [param.clone() for param in model.parameters()]
        for param in model.parameters():
            param.add_(0.5)
        for param, values in zip(model.parameters(), kept, strict=True):
            param.copy_(values)


def restore_rows(model: Any) -> None:
    """As a trainer does that learns new tokens alone; here nothing in the rows has changed."""
    with torch.no_grad():
        model.embed.weight[5:9] = model.embed.weight[5:9].clone()
        for layer in model.layers:
            layer.fc.weight[:3] = layer.fc.weight[:3].clone()


WRITES = [clamp, clamp_by_data, clamp_by_numpy, perturb_and_put_back, restore_rows]


@pytest.mark.parametrize("dtype", SHORT)
@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__)
def test_a_write_that_changes_no_value_changes_no_master(dtype: torch.dtype, write: Write) -> None:
    before, plain = untouched(dtype)
    _, written = masters_after(dtype, write)
    for name, expected in plain.items():
        assert torch.equal(written[name], expected), name
        assert not torch.equal(expected, before[name]), "the steps are smaller than a unit in the last place"


@pytest.mark.parametrize("dtype", SHORT)
def test_a_second_optimizer_in_a_layer_leaves_the_masters_of_others(dtype: torch.dtype) -> None:
    def run(*, with_second: bool) -> Exact:
        with wrapped(dtype) as model:
            weights = [param for name, param in model.named_parameters() if name.endswith("fc.weight")]
            scales = [param for name, param in model.named_parameters() if name.endswith("scale")]
            optimizer = streamer.AdamW(weights, lr=1e-6)
            second = torch.optim.SGD(scales, lr=0.0)
            for step in range(10):
                torch.manual_seed(step)
                model(torch.randint(0, 32, (4, 8))).float().square().mean().backward()
                optimizer.step()
                if with_second:
                    second.step()
                optimizer.zero_grad()
                second.zero_grad()
        return {name: param.detach().clone() for name, param in model.named_parameters()}

    expected, found = run(with_second=False), run(with_second=True)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("dtype", SHORT)
@pytest.mark.parametrize("value", [0.0, -0.0, 0.375, -3.0])
def test_a_value_that_was_written_is_the_master_but_for_half_a_unit(dtype: torch.dtype, value: float) -> None:
    """Zeros too, as of a mask: their remainders must not make NaN of them."""

    def write(model: Any) -> None:
        with torch.no_grad():
            for layer in model.layers:
                layer.fc.weight[:4] = value
            model.embed.weight[7] = value

    before, found = masters_after(dtype, write, steps=3)
    changed = [found["embed.weight"][7], *(found[f"layers.{n}.fc.weight"][:4] for n in range(3))]
    info = torch.finfo(dtype)
    half = dict(rtol=info.eps / 2, atol=info.smallest_normal * info.eps / 2)
    for each in changed:
        assert torch.allclose(each, torch.full_like(each, value), **half), each
        assert torch.equal(each.to(dtype), torch.full_like(each, value).to(dtype))
    for n in range(3):
        rest = found[f"layers.{n}.fc.weight"][4:]
        assert not torch.equal(rest, before[f"layers.{n}.fc.weight"][4:]), "others keep what they learnt"


@pytest.mark.parametrize("dtype", SHORT)
@pytest.mark.parametrize("how", ["load_state_dict", "copy_", "a step in between"])
def test_fp32_values_that_are_copied_in_are_the_masters(dtype: torch.dtype, how: str) -> None:
    torch.manual_seed(1)
    wanted = {name: param.detach().clone() for name, param in Model().named_parameters()}
    with wrapped(dtype) as model:
        optimizer = streamer.AdamW(model.parameters(), lr=1e-3)
        if how == "a step in between":
            model(torch.zeros(1, 3, dtype=torch.long)).float().sum().backward()
            optimizer.step()
        if how == "copy_":
            with torch.no_grad():
                for name, param in model.named_parameters():
                    param.copy_(wanted[name])
        else:
            model.load_state_dict(wanted)
        shown = {name: param.detach().clone() for name, param in model.named_parameters()}
    for name, param in model.named_parameters():
        assert torch.equal(param, wanted[name]), name
        assert torch.equal(shown[name], wanted[name].to(dtype)) or dtype == torch.bfloat16, name
