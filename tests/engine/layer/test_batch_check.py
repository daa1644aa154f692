"""A layer that is cut along what is not its batch is refused at its first cut, and checked no more."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

import streamer
from tests.engine.layer.common import WIDTH, Layer, Stack
from tests.engine.layer.test_micro_batches import train_in_slices
from tests.reference import (
    POLICIES,
    assert_as_plain,
    assert_parity,
    assert_refused,
    streamed,
    train_streamed,
)

TIME, BATCH = 6, 4


def encoder(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    # a bias of keys has a gradient of rounding alone
    settings = {"dropout": 0.0, "bias": False} | options
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, **settings)
    return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(7))


def step_on(x: torch.Tensor, model: nn.Module, *args: Any) -> Any:
    """What ``model`` returns, and its gradients."""
    x = x.clone().requires_grad_()
    out = model(x, *args)
    out.square().mean().backward()
    return {"out": out, "x": x.grad, **{name: param.grad for name, param in model.named_parameters()}}


TIME_FIRST, BATCH_FIRST = numbers(TIME, BATCH, WIDTH), numbers(BATCH, TIME, WIDTH)
CLOSE = {"rtol": 1e-4, "atol": 1e-6}


class Packed(nn.Module):
    """Attention within each of the sequences whose tokens lie one after another, [tokens, width]."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)

    def forward(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        parts = []
        for start, end in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True):
            q, k, v = self.qkv(x[start:end]).unflatten(-1, (3, 2, -1)).permute(1, 2, 0, 3)
            parts.append(scaled_dot_product_attention(q, k, v).transpose(0, 1).flatten(1))
        return x + torch.cat(parts)


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


class Several(nn.Module):
    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(make() for _ in range(3))

    def forward(self, x: torch.Tensor, *args: Any) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, *args)
        return x


ENDS = torch.tensor([0, 3, 9])
WRONG: dict[str, tuple[nn.Module, torch.Tensor, tuple[Any, ...], dict[str, int], str]] = {
    # a model, its hidden states and other arguments, batch_dims under which it is right, the error
    "time first": (
        encoder(),
        TIME_FIRST,
        (),
        {"layers": 1},
        r"^micro_batch_size: layer 'layers.0' computes other values .* 'src' of shape \(6, 4, 16\) was cut "
        r"along dimension 0, in slices of 2: wrap with batch_dims=\{'layers': 1\} if dimension 1 is the "
        r"batch, \{'layers': None\} to leave",
    ),
    "one sequence": (
        encoder(),
        numbers(TIME, WIDTH),
        (),
        {"layers": None},
        r"'src' of shape \(6, 16\) was cut along dimension 0, in slices of 2: wrap with batch_dims="
        r"\{'layers': None\} to leave",
    ),
    "packed tokens": (
        Several(Packed),
        numbers(9, WIDTH),
        (ENDS,),
        {"layers": None},
        r"'x' of shape \(9, 16\) was cut along dimension 0, .* batch_dims=\{'layers': None\}",
    ),
    "causal": (Several(Residual), 1000 * numbers(TIME, WIDTH), (), {"layers": None}, "computes other values"),
}


@pytest.mark.parametrize(
    ("name", "grad"), [*((name, True) for name in WRONG), ("time first", False), ("one sequence", False)]
)
def test_a_wrong_cut_is_refused_and_batch_dims_make_it_right(name: str, grad: bool) -> None:
    model, x, args, batch_dims, match = WRONG[name]

    def use(model: nn.Module) -> Any:
        return step_on(x, model, *args) if grad else model(x, *args)

    options: dict[str, Any] = {"layers": "layers", "micro_batch_size": 2}
    with torch.set_grad_enabled(grad):
        if grad:
            assert_refused(model, use, match, Exception, **options)
        else:
            with pytest.warns(UserWarning, match="runs its whole batch without gradients"):
                assert_as_plain(model, use, **options)
        assert_as_plain(model, use, batch_dims=batch_dims, **CLOSE, **options)


@pytest.mark.parametrize(("causal", "dtype"), [(False, torch.float32), (True, torch.bfloat16)])
def test_what_adds_little_to_large_hidden_states_is_refused(causal: bool, dtype: torch.dtype) -> None:
    model = Several(partial(Residual, causal=causal)).to(dtype)
    options: dict[str, Any] = {"layers": "layers", "micro_batch_size": 2}
    assert_refused(model, partial(step_on, 30 * numbers(TIME, WIDTH).to(dtype)), "other values", **options)
    assert_as_plain(model, lambda model: model(30 * BATCH_FIRST.to(dtype)), **CLOSE, **options)


def test_each_list_has_a_dimension_of_its_own() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.time_first, self.batch_first = encoder(), encoder(batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.batch_first(self.time_first(x).transpose(0, 1))
            return out

    paths = ["time_first.layers", "batch_first.layers"]
    for dims in ({"time_first": 1}, {"": None, paths[0]: 1}):
        options: dict[str, Any] = {"layers": paths, "micro_batch_size": 2, "batch_dims": dims}
        assert_as_plain(Two(), partial(step_on, TIME_FIRST), **CLOSE, **options)
    with pytest.raises(ValueError, match="'time_frist.*are in 'time_first.layers', 'batch_first.layers'"):
        options = {"layers": paths, "micro_batch_size": 2, "batch_dims": {"time_frist.layers": 1}}
        streamer.wrap(Two(), device="cpu", **options)


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
    x = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(step))
    return model(x).square().mean()


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


DROPOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dropout": lambda x: nn.functional.dropout(x, 0.5),
    "channels": lambda x: nn.functional.dropout1d(x, 0.5),
    "attention": lambda x: scaled_dot_product_attention(x, x, x, dropout_p=0.5),
}


@pytest.mark.parametrize("name", DROPOUTS)
def test_dropout_that_evaluation_does_not_switch_off_is_left_out(name: str) -> None:
    class Drops(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(DROPOUTS[name](x))

    def of(model: nn.Module, step: int) -> torch.Tensor:
        return model(BATCH_FIRST).square().mean()

    expected = train_in_slices(Several(Drops), 2, "layers", loss_of=of)
    options: dict[str, Any] = {"layers": "layers", "micro_batch_size": 2, "loss_of": of}
    assert_parity(train_streamed(Several(Drops), steps=3, max_norm=0.5, **options), expected)


def test_noise_in_evaluation_is_refused_unless_the_batch_is_named() -> None:
    class Noisy(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x + torch.randn_like(x))

    options: dict[str, Any] = {"layers": "layers", "micro_batch_size": 2}
    match = r"\{'layers': 0\} if dimension 0 is the batch and .* adds noise in evaluation"
    assert_refused(Several(Noisy), lambda model: model(BATCH_FIRST), match, **options)
    with streamed(Several(Noisy), batch_dims={"layers": 0}, **options) as mine:
        mine(BATCH_FIRST)


def test_hooks_inside_of_a_layer_are_not_called_by_the_check() -> None:
    seen: list[int] = []
    with streamed(Stack(Layer), layers="blocks", micro_batch_size=2, activations="keep") as model:
        linear = model.blocks[0].linear
        first = linear.register_forward_hook(lambda *_: seen.append(1))
        linear.register_forward_hook(lambda *_: seen.append(2))
        model(numbers(4, WIDTH))
        assert seen == [1, 2, 1, 2]
        first.remove()
        model(numbers(4, WIDTH))
        assert seen == [1, 2, 1, 2, 2, 2]


def test_padding_that_is_nan_passes() -> None:
    class Masked(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).masked_fill(x[..., :1] > 0.5, float("nan"))

    model = Several(Masked)
    with torch.no_grad():
        expected = model(BATCH_FIRST)
    assert expected.isnan().any() and not expected.isnan().all()
    with streamed(model, layers="layers", micro_batch_size=2) as mine, torch.no_grad():
        torch.testing.assert_close(mine(BATCH_FIRST), expected, equal_nan=True)


# --- what fails in a slice ------------------------------------------------------------------------------


class Fails(Layer):
    error: type[Exception] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.error is not None:
            raise self.error("here")
        return super().forward(x)


def test_an_error_in_a_slice_mentions_that_the_batch_was_cut() -> None:
    def notes(model: nn.Module, x: torch.Tensor, error: type[Exception]) -> list[str]:
        model.blocks[1].error = error
        with pytest.raises(error, match="here") as raised:
            model(x)
        model.blocks[1].error = None
        return getattr(raised.value, "__notes__", [])

    with streamed(Stack(Fails), layers="blocks", micro_batch_size=2) as model:
        note = (
            "micro_batch_size: layer 'blocks.1' was run on a part of its batch; 'x' of shape (4, 16) was cut "
            "along dimension 0, in slices of 2: wrap with batch_dims={'blocks': None} to leave these layers "
            "uncut"
        )
        assert notes(model, numbers(4, WIDTH), KeyError) == [note]
        assert notes(model, numbers(2, WIDTH), KeyError) == []
        assert notes(model, numbers(4, WIDTH), torch.OutOfMemoryError) == []
        model(numbers(4, WIDTH)).sum()
