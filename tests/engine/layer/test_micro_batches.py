"""A batch that layers run in slices: plain PyTorch's results, and weights that cross the bus once for all."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import streamer
from streamer.engine.handle import wrapped
from streamer.engine.schedule.op import OpKind
from streamer.planner.measure import Tracker
from tests.models import WIDTH, Layer, Layers, numbers
from tests.reference import (
    POLICIES,
    History,
    assert_as_plain,
    assert_parity,
    assert_refused,
    gradients,
    in_turn,
    language_loss,
    streamed,
    tiny_gpt,
    train,
    train_plain,
    train_streamed,
)

TIME = 5
OPTIONS: dict[str, Any] = {"layers": "layers"}


def sliced(forward: Callable[..., Any], size: int) -> Callable[..., Any]:
    def run(x: torch.Tensor) -> Any:
        results = [forward(piece) for piece in x.split(size)]
        is_tensor = isinstance(results[0], torch.Tensor)
        return torch.cat(results) if is_tensor else tuple(map(torch.cat, zip(*results, strict=True)))

    return run


def train_in_slices(model: nn.Module, size: int, layers: str = "transformer.h", **options: Any) -> History:
    """By PyTorch alone, each block running its slices one after another."""
    model = copy.deepcopy(model)
    for layer in model.get_submodule(layers):  # type: ignore[attr-defined]
        layer.forward = sliced(layer.forward, size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    clip = lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)  # noqa: E731
    return train(model, optimizer, clip, steps=3, **options)


@pytest.mark.parametrize(
    ("activations", "size", "num_slots"), [("recompute", 2, 1), ("keep", 3, 2), ("recompute+offload", 3, 3)]
)
def test_training_equals_plain_pytorch_on_slices(activations: str, size: int, num_slots: int) -> None:
    """Dropout's draws too; to the bit, since two slices have but one order of addition."""
    options = {"num_slots": num_slots, "micro_batch_size": size, "activations": activations}
    actual = train_streamed(tiny_gpt(dropout=0.1), layers="transformer.h", steps=3, max_norm=0.5, **options)
    assert_parity(actual, train_in_slices(tiny_gpt(dropout=0.1), size))


@pytest.mark.parametrize("size", [None, 1])
def test_weights_cross_the_bus_twice_a_step_and_gradients_once(size: int | None) -> None:
    with streamed(tiny_gpt(dropout=0.1), micro_batch_size=size, num_slots=1) as model:
        executor = wrapped(model).executor
        language_loss(model, 0).backward()
        streamer.synchronize(model)
        ops = Counter(record.op.kind for record in executor.issuer.trace.records() if record.op.unit >= 0)
        assert ops[OpKind.UNSHARD] == 2 * 3 - 1
        assert ops[OpKind.OFFLOAD_GRAD] == 3


@pytest.mark.parametrize(("activations", "grad_dtype"), [("recompute", torch.float32), ("keep", None)])
def test_gradients_in_bf16_are_added_up_in_fp32_and_rounded_once(
    activations: str, grad_dtype: torch.dtype | None
) -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"layers": nn.ModuleList([Layer()])}).bfloat16()
    x, towards = torch.randn(2, 8, TIME, WIDTH).bfloat16()
    plain = copy.deepcopy(model)["layers"][0]
    parts = []
    for piece, gradient in zip(x.split(1), towards.split(1), strict=True):
        plain(piece).backward(gradient)
        parts.append(plain.linear.weight.grad)
        plain.zero_grad()
    total = parts[0].float() if grad_dtype else parts[0].clone()
    for part in parts[1:]:
        total += part
    assert not torch.equal(sum(parts[1:], parts[0]), total.bfloat16()) or grad_dtype is None
    options = {"micro_batch_size": 1, "activations": activations, "grad_dtype": grad_dtype}
    with streamed(model, layers="layers", **options) as mine:
        mine["layers"][0](x).backward(towards)
        gradient = mine["layers"][0].linear.weight.grad
        assert gradient.dtype == torch.bfloat16
        assert torch.equal(gradient, total.bfloat16())


# --- what is cut ----------------------------------------------------------------------------------------


class Attention(nn.Module):
    """A layer that takes more than its hidden states."""

    def __init__(self, heads: int = 2) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)  # the gradient of a key's bias is rounding alone
        self.heads = heads

    def forward(
        self,
        x: torch.Tensor,
        mask: torch.Tensor | None = None,
        *,
        places: torch.Tensor | None = None,
        scale: torch.Tensor | None = None,
        rotary: tuple[torch.Tensor, ...] = (),
        alibi: torch.Tensor | None = None,
    ) -> Any:
        batch, time, _ = x.shape
        if places is not None:
            x = x + places
        if scale is not None:
            x = x * scale.view(-1, 1, 1)
        for table in rotary:
            x = x * table
        q, k, v = self.qkv(x).view(batch, time, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = q @ k.mT
        if alibi is not None:
            scores = scores + alibi.view(batch, self.heads, 1, time)
        if mask is not None:
            scores = scores + mask
        return x + (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


def batch_of(step: int, *shape: int) -> torch.Tensor:
    return numbers(*(shape or (6, TIME, WIDTH)), seed=step).requires_grad_()


def sliced_loss_of(model: nn.Module, step: int) -> torch.Tensor:
    return (model(batch_of(step)) - torch.linspace(-1, 1, WIDTH)).square().mean()


def square(model: nn.Module, step: int = 0) -> torch.Tensor:
    """A batch as long as its sequences."""
    return model(batch_of(step, TIME, TIME, WIDTH)).square().mean()


def assert_close_to_plain(model: nn.Module, of: Any = sliced_loss_of, **options: Any) -> None:
    """The whole batch in plain PyTorch, up to the order of additions."""
    expected = train_plain(model, loss_of=of, steps=2, max_norm=1e9)
    actual = train_streamed(model, loss_of=of, steps=2, max_norm=1e9, **OPTIONS, **options)
    torch.testing.assert_close(torch.tensor(actual.losses), torch.tensor(expected.losses), rtol=1e-6, atol=0)
    assert actual.first_gradients.keys() == expected.first_gradients.keys()
    for name, gradient in expected.first_gradients.items():
        largest = gradient.abs().max().item()
        torch.testing.assert_close(actual.first_gradients[name], gradient, rtol=0, atol=2e-6 * largest)


@pytest.mark.parametrize(
    ("args", "kwargs", "size"),
    [
        ((numbers(6, 1, TIME, TIME),), {}, 4),
        ((numbers(1, 1, TIME, TIME),), {}, 1),
        ((numbers(TIME, TIME),), {}, 4),
        ((), {"places": numbers(TIME, WIDTH), "scale": numbers(6)}, 1),
        ((), {"places": nn.Parameter(numbers(1, TIME, WIDTH))}, 4),
        ((), {"rotary": (numbers(1, TIME, WIDTH), numbers(6, TIME, WIDTH))}, 4),
    ],
    ids=["mask", "shared mask", "mask without a batch", "per channel and sample", "trained", "in a tuple"],
)
def test_arguments_that_begin_with_the_batch_are_cut(args: Any, kwargs: dict[str, Any], size: int) -> None:
    assert_close_to_plain(Layers(Attention, *args, **kwargs), micro_batch_size=size)


def test_a_mask_as_long_as_the_batch_is_cut_only_if_it_has_a_batch() -> None:
    assert_close_to_plain(Layers(Attention, numbers(TIME, 1, TIME, TIME)), square, micro_batch_size=1)
    model, options = Layers(Attention, numbers(TIME, TIME)), {"micro_batch_size": 1, **OPTIONS}
    assert_close_to_plain(model, square, micro_batch_size=1, batch_dims={"mask": None})
    assert_refused(
        model, square, r"batch_dims=\{'mask': None\} if 'mask' has no batch", RuntimeError, **options
    )
    with torch.no_grad(), pytest.warns(UserWarning, match="runs its whole batch without gradients"):
        assert_as_plain(model, square, **options)


class TimeFirst(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x)).cumsum(0)


class Takes(Layer):
    """Adds its argument: by head, or by sample."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x: torch.Tensor, bias: Any = None, scales: Any = None) -> torch.Tensor:
        hidden = super().forward(x)
        if scales is not None:
            hidden = hidden * torch.tensor(scales[: len(x)]).view(-1, 1, 1)
        return hidden if bias is None else hidden + (bias * self.scale.view(-1, 1, 1)).sum(0)


def time_first(model: nn.Module, step: int = 0) -> torch.Tensor:
    return model(batch_of(step, TIME, 6, WIDTH)).square().mean()


MASK = Layers(Attention, numbers(6, 1, TIME, TIME))
NAMED: dict[str, tuple[nn.Module, int, dict[str, int] | None, dict[str, int | None] | None, str | None]] = {
    # a model, the size, batch_dims that are refused, those that are right, the error
    "several entries per sample": (
        Layers(Attention, alibi=numbers(12, 1, TIME)),
        2,
        None,
        {"alibi": 0},
        None,
    ),
    "as many heads as samples": (
        Layers(Takes, bias=numbers(6, TIME, WIDTH)),
        1,
        None,
        {"bias": None},
        "was run on a part of its batch",
    ),
    "a list with an entry per sample": (
        Layers(Takes, scales=[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]),
        2,
        None,
        None,
        "other values for two slices",
    ),
    "beside named hidden states": (
        MASK,
        1,
        {"x": 0},
        {"x": 0, "mask": 0},
        r"'mask' \(6, 1, 5, 5\) is the batch, .*add 'mask': 0 to it if it is",
    ),
}


@pytest.mark.parametrize("name", NAMED)
def test_batch_dims_name_the_batch_of_arguments(name: str) -> None:
    model, size, wrong, right, match = NAMED[name]
    if match is not None:
        options = {"micro_batch_size": size, "batch_dims": wrong, **OPTIONS}
        assert_refused(model, partial(sliced_loss_of, step=0), match, Exception, **options)
    if right is not None:
        assert_close_to_plain(model, micro_batch_size=size, batch_dims=right)


def test_a_batch_in_another_dimension() -> None:
    assert_close_to_plain(Layers(TimeFirst), time_first, micro_batch_size=4, batch_dims={"x": 1})


# --- what is returned -----------------------------------------------------------------------------------


class Several(Layer):
    """Returns more than hidden states; ``what`` it returns beside them is set by the test."""

    what: Callable[..., Any]

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> Any:
        hidden = super().forward(x)
        return hidden, type(self).what(self, hidden, mask)


def returning(what: Callable[..., Any]) -> type[Several]:
    return type("Returning", (Several,), {"what": staticmethod(what)})


def use_all(model: nn.Module, step: int) -> torch.Tensor:
    x = batch_of(step)
    total = torch.zeros(())
    for layer in model.layers:
        x, more = layer(x, *model.args)
        if more is not None:
            total = total + (more.float() * torch.linspace(0, 1, more.numel()).view(more.shape)).sum()
    return x.square().mean() + total


def of_pairs(layer: nn.Module, hidden: torch.Tensor, mask: Any) -> torch.Tensor:
    return hidden.unflatten(0, (-1, 2)).mean((1, 2)).repeat_interleave(2, 0)


MORE: list[Callable[..., Any]] = [
    lambda layer, hidden, mask: None,
    of_pairs,
    lambda layer, hidden, mask: hidden.mean(-1),
    lambda layer, hidden, mask: (hidden > 0).long(),
    lambda layer, hidden, mask: mask,
    lambda layer, hidden, mask: layer.linear.weight.square(),
    lambda layer, hidden, mask: mask[:1] * layer.linear.bias,
    # the same in each slice, and as long
    lambda layer, hidden, mask: layer.linear.bias[:2] * 2,
]


@pytest.mark.parametrize(
    ("what", "size", "activations"), in_turn(MORE, [2, 4], ["recompute", "keep", "keep", "recompute"])
)
def test_what_is_returned_is_put_together(what: Callable[..., Any], size: int, activations: str) -> None:
    model = Layers(returning(what), numbers(TIME, WIDTH))
    assert_close_to_plain(model, use_all, micro_batch_size=size, activations=activations)


@pytest.mark.parametrize(
    ("size", "what"),
    [
        (3, lambda layer, hidden, mask: hidden[..., :3].softmax(-1).mean((0, 1))),
        (1, lambda layer, hidden, mask: hidden.mean().reshape(1)),
        (1, lambda layer, hidden, mask: hidden[:, -1][None]),
        (2, lambda layer, hidden, mask: hidden.transpose(0, 1).flatten(0, 1) * 2),
        (2, lambda layer, hidden, mask: torch.normal(hidden.flatten(0, 1), 1.0)),
    ],
    ids=["as many experts", "one number", "a view", "first tokens first", "several per sample, at random"],
)
def test_what_is_as_long_as_a_slice_by_chance_is_refused(what: Callable[..., Any], size: int) -> None:
    """In training; inference runs the whole batch."""
    model = Layers(returning(what))
    apart = r"layers\.0' cannot be put together: .*(not one per sample and not the same in each|share memory)"
    match = f"{apart}|adds noise in evaluation"
    options = {"micro_batch_size": size, **OPTIONS}
    assert_refused(model, partial(sliced_loss_of, step=0), match, **options)
    with torch.no_grad(), pytest.warns(UserWarning, match="runs its whole batch without gradients"):
        assert_as_plain(model, partial(sliced_loss_of, step=0), **options)


# --- without gradients ----------------------------------------------------------------------------------


def test_inference_runs_in_slices_too() -> None:
    model = Layers(Attention, numbers(6, 1, TIME, TIME))
    x = numbers(6, TIME, WIDTH)
    seen: list[int] = []
    with streamed(model, layers="layers", micro_batch_size=4) as mine, torch.no_grad():
        hook = mine.layers[0].qkv.register_forward_pre_hook(lambda _, args: seen.append(len(args[0])))
        torch.testing.assert_close(mine(x), model(x), rtol=1e-6, atol=1e-6)
        hook.remove()
    assert seen == [4, 2]


@POLICIES
def test_autograd_grad_and_a_second_backward(activations: str) -> None:
    def use(model: nn.Module) -> Any:
        x = numbers(6, TIME, WIDTH).requires_grad_()
        loss = model(x).square().sum()
        of_input = [torch.autograd.grad(loss, x, retain_graph=True) for _ in range(2)]
        for _ in range(2):
            loss.backward(inputs=[x], retain_graph=True)
        loss.backward()
        return of_input, x.grad, gradients(model)

    options = {"layers": "layers", "micro_batch_size": 4, "activations": activations}
    assert_as_plain(Layers(Layer), use, rtol=1.3e-6, atol=1e-5, **options)


def test_the_working_set_is_that_of_a_slice() -> None:
    x = numbers(16, 128, WIDTH)

    def peak(size: int | None) -> int:
        with streamed(Layers(Attention), layers="layers", micro_batch_size=size) as model:
            with Tracker() as tracker:
                model(x).sum().backward()
            return tracker.peak

    # the scores of one layer: [16, 2, 128, 128] in fp32
    assert peak(None) > 3 * 16 * 2 * 128 * 128 * 4
    assert peak(2) < peak(None) / 4


# --- what cannot be -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"micro_batch_size": 0}, r"micro_batch_size=0: it must be an integer of 1 or more, or None"),
        ({"micro_batch_size": True}, r"micro_batch_size=True: it must be an integer of 1 or more, or None"),
        ({"batch_dims": {"mask": 0}}, "set micro_batch_size too"),
        ({"micro_batch_size": 1, "batch_dims": {"mask": 0.0}}, "use a dict from the names of arguments"),
        (
            {"micro_batch_size": 1, "batch_dims": {"masks": 0}},
            "no layer takes an argument 'masks', .* first layer takes 'x', 'mask', .* are in 'layers'",
        ),
    ],
)
def test_options(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        streamer.wrap(Layers(Attention), layers="layers", device="cpu", **options)


class Holder:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class Opens(Layer):
    def forward(self, x: torch.Tensor, held: Holder) -> torch.Tensor:
        return super().forward(x) * held.tensor


MASKED = Layers(Attention, numbers(TIME, TIME))


APART = r"layers\.0' cannot be put together: .*without micro_batch_size"
REFUSED: dict[str, tuple[nn.Module, dict[str, int], str]] = {
    # a model, batch_dims, the error
    "numbers that differ": (
        Layers(returning(lambda layer, hidden, mask: {"samples": len(hidden)})),
        {},
        "returns other numbers, or more",
    ),
    "a mean over the batch": (Layers(returning(lambda layer, hidden, mask: hidden.mean())), {}, APART),
    "too many dimensions": (MASKED, {"mask": 4}, r"'mask' has shape \(5, 5\), .* no dimension 4"),
    "another length": (MASKED, {"mask": 1}, r"5 long \(the shape is \(5, 5\)\), which the batch of 6"),
    "too many of the states": (MASKED, {"x": 3}, r"states has shape \(6, 5, 16\), .* no dimension 3"),
    "a batch inside an object": (Layers(Opens, Holder(numbers(6, 1, 1))), {}, "on a part of its batch"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_cut_or_put_together_is_refused(name: str) -> None:
    model, batch_dims, match = REFUSED[name]
    options = {"layers": "layers", "micro_batch_size": 4, "batch_dims": batch_dims or None}
    assert_refused(model, partial(sliced_loss_of, step=0), match, Exception, **options)
