"""A layer that is cut along what is not its batch is refused at its first cut, and checked no more."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import dropout, dropout1d, scaled_dot_product_attention

import streamer
from tests.engine.layer.test_micro_batches import train_in_slices
from tests.engine.layer.test_modules import encoder
from tests.models import WIDTH, Layer, Layers, Stack, numbers
from tests.reference import POLICIES, assert_as_plain, assert_parity, assert_refused, streamed, train_streamed

TIME, BATCH = 6, 4
TIME_FIRST, BATCH_FIRST = numbers(TIME, BATCH, WIDTH), numbers(BATCH, TIME, WIDTH)
CLOSE = {"rtol": 1e-4, "atol": 1e-6}
OPTIONS: dict[str, Any] = {"layers": "layers", "micro_batch_size": 2}


def step_on(x: torch.Tensor, model: nn.Module) -> Any:
    """What ``model`` returns, and its gradients."""
    x = x.clone().requires_grad_()
    out = model(x)
    out.square().mean().backward()
    return {"out": out, "x": x.grad, **{name: param.grad for name, param in model.named_parameters()}}


class Packed(Layer):
    """Sums within each of the sequences whose tokens lie one after another, [tokens, width]."""

    def forward(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        spans = zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True)
        return x + torch.cat([self.linear(x[start:end]).cumsum(0) for start, end in spans])


class Residual(nn.Module):
    """A block whose attention adds little to large hidden states, [batch, time, width] or with time first."""

    def __init__(self, *, causal: bool = True) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.causal = causal

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        return x + 0.1 * self.out(scaled_dot_product_attention(q, k, v, is_causal=self.causal))


def time_first() -> nn.Module:
    return encoder(dropout=0.0, batch_first=False)


WRONG: dict[str, tuple[Callable[[], nn.Module], torch.Tensor, dict[str, int | None], str]] = {
    # a model, its hidden states, batch_dims under which it is right, the error
    "time first": (
        time_first,
        TIME_FIRST,
        {"layers": 1},
        r"^micro_batch_size: layer 'layers.0' computes other values .* 'src' of shape \(6, 4, 16\) was cut "
        r"along dimension 0, in slices of 2: wrap with batch_dims=\{'layers': 1\} if dimension 1 is the "
        r"batch, \{'layers': None\} to leave",
    ),
    "one sequence": (
        time_first,
        numbers(TIME, WIDTH),
        {"layers": None},
        r"'src' of shape \(6, 16\) was cut along dimension 0, in slices of 2: wrap with batch_dims="
        r"\{'layers': None\} to leave",
    ),
    "packed tokens": (
        partial(Layers, Packed, torch.tensor([0, 3, 9])),
        numbers(9, WIDTH),
        {"layers": None},
        r"'x' of shape \(9, 16\) was cut along dimension 0, .* batch_dims=\{'layers': None\}",
    ),
    "causal": (
        partial(Layers, Residual),
        1000 * numbers(TIME, WIDTH),
        {"layers": None},
        "computes other values",
    ),
}


@pytest.mark.parametrize(
    ("name", "grad"), [*((name, True) for name in WRONG), ("time first", False), ("one sequence", False)]
)
def test_a_wrong_cut_is_refused_and_batch_dims_make_it_right(name: str, grad: bool) -> None:
    make, x, batch_dims, match = WRONG[name]
    model, use = make(), partial(step_on, x) if grad else lambda model: model(x)
    with torch.set_grad_enabled(grad):
        if grad:
            assert_refused(model, use, match, Exception, **OPTIONS)
        else:
            with pytest.warns(UserWarning, match="runs its whole batch without gradients"):
                assert_as_plain(model, use, **OPTIONS)
        assert_as_plain(model, use, batch_dims=batch_dims, **CLOSE, **OPTIONS)


@pytest.mark.parametrize(("causal", "dtype"), [(False, torch.float32), (True, torch.bfloat16)])
def test_what_adds_little_to_large_hidden_states_is_refused(causal: bool, dtype: torch.dtype) -> None:
    model = Layers(partial(Residual, causal=causal)).to(dtype)
    assert_refused(model, partial(step_on, 30 * numbers(TIME, WIDTH).to(dtype)), "other values", **OPTIONS)
    assert_as_plain(model, lambda model: model(30 * BATCH_FIRST.to(dtype)), **CLOSE, **OPTIONS)


def test_each_list_has_a_dimension_of_its_own() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.time_first, self.batch_first = time_first(), encoder(dropout=0.0)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.batch_first(self.time_first(x).transpose(0, 1))
            return out

    paths = ["time_first.layers", "batch_first.layers"]
    options: dict[str, Any] = {"layers": paths, "micro_batch_size": 2}
    for dims in ({"time_first": 1}, {"": None, paths[0]: 1}):
        assert_as_plain(Two(), partial(step_on, TIME_FIRST), batch_dims=dims, **CLOSE, **options)
    with pytest.raises(ValueError, match="'time_frist.*are in 'time_first.layers', 'batch_first.layers'"):
        streamer.wrap(Two(), device="cpu", batch_dims={"time_frist.layers": 1}, **options)


# --- what the check leaves ------------------------------------------------------------------------------


class Counts(Layer):
    """Draws random numbers in training, and counts its runs where only evaluation is on."""

    runs: Counter[bool] = Counter()

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(WIDTH), nn.Dropout(0.3)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        type(self).runs[self.training] += 1
        self.count += 1
        return x + super().forward(self.drop(self.norm(x)))


class Others(Counts):
    """Another kind of layer."""


def loss(model: nn.Module, step: int) -> torch.Tensor:
    return model(numbers(6, WIDTH, seed=step)).square().mean()


@POLICIES
def test_training_equals_plain_pytorch_on_slices_with_the_same_random_numbers(activations: str) -> None:
    """Running statistics, buffers and dropout are those of a run without the check."""
    expected = train_in_slices(Stack(Counts), 3, "blocks", loss_of=loss)
    options = {"micro_batch_size": 3, "activations": activations, "layers": "blocks"}
    actual = train_streamed(Stack(Counts), steps=3, max_norm=0.5, loss_of=loss, **options)
    assert_parity(actual, expected)


def test_each_kind_of_layer_is_checked_once() -> None:
    kinds = iter([Counts, Counts, Others, Counts, Others])
    model = Stack(lambda: next(kinds)(), 5)
    with streamed(model, layers="blocks", micro_batch_size=3, activations="keep") as mine:
        for step in range(3):
            Counts.runs, Others.runs = Counter(), Counter()
            loss(mine, step).backward()
            assert (Counts.runs[True], Others.runs[True]) == (3 * 2, 2 * 2)
            # two slices together, and each of them
            assert (Counts.runs[False], Others.runs[False]) == ((3, 3) if step == 0 else (0, 0))
        assert all(module.training for module in mine.modules())
        # a dimension that is named is not checked
    Counts.runs = Counter()
    with streamed(Stack(Counts), layers="blocks", micro_batch_size=3, batch_dims={"blocks": 0}) as mine:
        loss(mine, 0)
        assert Counts.runs[False] == 0


class Drops(Layer):
    """Dropout that evaluation does not switch off."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(scaled_dot_product_attention(dropout1d(dropout(x)), x, x, dropout_p=0.5))


class Noisy(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + torch.randn_like(x))


def test_dropout_that_evaluation_does_not_switch_off_is_left_out() -> None:
    def of(model: nn.Module, step: int) -> torch.Tensor:
        return model(BATCH_FIRST).square().mean()

    expected = train_in_slices(Layers(Drops), 2, "layers", loss_of=of)
    actual = train_streamed(Layers(Drops), steps=3, max_norm=0.5, loss_of=of, **OPTIONS)
    assert_parity(actual, expected)


def test_noise_in_evaluation_is_refused_unless_the_batch_is_named() -> None:
    match = r"\{'layers': 0\} if dimension 0 is the batch and .* adds noise in evaluation"
    assert_refused(Layers(Noisy), lambda model: model(BATCH_FIRST), match, **OPTIONS)
    with streamed(Layers(Noisy), batch_dims={"layers": 0}, **OPTIONS) as mine:
        mine(BATCH_FIRST)


class Rounds(Layer):
    """Its result depends on the length of the batch by as much as bf16 rounds."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (1 + 2**-7 * (len(x) > 2))


def test_rounding_to_bf16_is_none_of_its_business_under_autocast() -> None:
    with streamed(Layers(Rounds), **OPTIONS) as mine:
        with pytest.raises(ValueError, match="computes other values for two slices"):
            mine(BATCH_FIRST)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            mine(BATCH_FIRST)


def test_hooks_inside_of_a_layer_are_not_called_by_the_check() -> None:
    seen: list[int] = []
    with streamed(Layers(), activations="keep", **OPTIONS) as model:
        linear = model.layers[0].linear
        first = linear.register_forward_hook(lambda *_: seen.append(1))
        linear.register_forward_hook(lambda *_: seen.append(2))
        model(numbers(4, WIDTH))
        assert seen == [1, 2, 1, 2]
        first.remove()
        model(numbers(4, WIDTH))
        assert seen == [1, 2, 1, 2, 2, 2]


class Masked(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).masked_fill(x[..., :1] > 0.5, float("nan"))


def test_padding_that_is_nan_passes() -> None:
    with torch.no_grad(), streamed(Layers(Masked), **OPTIONS) as mine:
        expected = Layers(Masked)(BATCH_FIRST)
        assert expected.isnan().any() and not expected.isnan().all()
        torch.testing.assert_close(mine(BATCH_FIRST), expected, equal_nan=True)


class Fails(Layer):
    error: type[Exception] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.error is not None:
            raise self.error("here")
        return super().forward(x)


def test_an_error_in_a_slice_mentions_that_the_batch_was_cut() -> None:
    note = (
        "micro_batch_size: layer 'layers.1' was run on a part of its batch; 'x' of shape (4, 16) was cut "
        "along dimension 0, in slices of 2: wrap with batch_dims={'layers': None} to leave these layers uncut"
    )
    with streamed(Layers(Fails), **OPTIONS) as model:
        for size, error, notes in ((4, KeyError, [note]), (2, KeyError, []), (4, torch.OutOfMemoryError, [])):
            model.layers[1].error = error
            with pytest.raises(error, match="here") as raised:
                model(numbers(size, WIDTH))
            assert getattr(raised.value, "__notes__", []) == notes
        model.layers[1].error = None
        model(numbers(4, WIDTH)).sum()
