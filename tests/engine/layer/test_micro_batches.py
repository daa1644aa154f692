"""A batch that layers run in slices: plain PyTorch's results, and weights that cross the bus once for all."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import streamer
from models.gpt2 import GPT
from streamer.engine.paging.handle import wrapped
from streamer.engine.schedule.op import OpKind
from streamer.plan.measure import Tracker
from tests.engine.layer.test_modules import TIME, WIDTH, Layer, Normalising, Stack, loss_on
from tests.reference import (
    VOCAB,
    History,
    assert_parity,
    batch,
    language_loss,
    streamed,
    train,
    train_plain,
    train_streamed,
)

POLICIES = pytest.mark.parametrize("activations", ["recompute", "keep"])


def gpt(dropout: float = 0.1) -> GPT:
    torch.manual_seed(0)
    return GPT(vocab_size=VOCAB, block_size=16, n_layer=3, n_head=2, n_embd=32, dropout=dropout)


def sliced(forward: Callable[..., torch.Tensor], size: int) -> Callable[..., torch.Tensor]:
    return lambda x: torch.cat([forward(piece) for piece in x.split(size)])


def train_in_slices(model: nn.Module, size: int, layers: str = "transformer.h", **options: Any) -> History:
    """By PyTorch alone, each block running its slices one after another."""
    model = copy.deepcopy(model)
    for layer in model.get_submodule(layers):  # type: ignore[attr-defined]
        layer.forward = sliced(layer.forward, size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    clip = lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)  # noqa: E731
    return train(model, optimizer, clip, steps=3, **options)


@POLICIES
@pytest.mark.parametrize(("size", "num_slots"), [(2, 1), (2, 2), (3, 2), (3, 3)])
def test_training_equals_plain_pytorch_on_slices(activations: str, size: int, num_slots: int) -> None:
    """Dropout's draws too; to the bit, since two slices have but one order of addition."""
    options = {"num_slots": num_slots, "micro_batch_size": size, "activations": activations}
    actual = train_streamed(gpt(), layers="transformer.h", steps=3, max_norm=0.5, **options)
    assert_parity(actual, train_in_slices(gpt(), size))


@POLICIES
def test_it_equals_the_whole_batch_and_gradient_accumulation_but_for_the_order_of_additions(
    activations: str,
) -> None:
    whole = train_plain(gpt(dropout=0.0), steps=1).first_gradients
    accumulated = copy.deepcopy(gpt(dropout=0.0))
    for tokens in batch(0).split(1):
        loss = F.cross_entropy(accumulated(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        (loss / 4).backward()
    actual = train_streamed(gpt(dropout=0.0), steps=1, micro_batch_size=1, activations=activations)
    for name, param in accumulated.named_parameters():
        gradient = actual.first_gradients[name]
        torch.testing.assert_close(gradient, whole[name], rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(gradient, param.grad, rtol=1e-5, atol=1e-7)


def normalised(norm: Callable[[nn.Module], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer() for _ in range(3)))
    for layer in model:
        norm(layer.linear)
    return model


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("activations", ["recompute", "recompute+offload", "keep"])
@pytest.mark.parametrize("norm", [nn.utils.spectral_norm, nn.utils.parametrizations.spectral_norm])
def test_a_spectral_norm_makes_one_iteration_for_all_slices(
    norm: Callable[[nn.Module], nn.Module], activations: str, grad: bool
) -> None:
    """All see the weight that the whole batch would have seen."""
    plain, x = normalised(norm), torch.randn(5, WIDTH)
    model = streamer.wrap(
        normalised(norm), layers="", device="cpu", activations=activations, micro_batch_size=2
    )
    for _ in range(2):
        with torch.set_grad_enabled(grad):
            actual, expected = model(x), plain(x)
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)
        if grad:
            actual.square().sum().backward()
            expected.square().sum().backward()
        assert len(list(plain.buffers())) == 6
        for mine, theirs in zip(model.buffers(), plain.buffers(), strict=True):
            assert torch.equal(mine, theirs)
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert (mine.grad is not None) == grad
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-5, atol=1e-5)
    streamer.unwrap(model)


@POLICIES
def test_running_statistics_take_in_each_slice(activations: str) -> None:
    """As with gradient accumulation; they are among the weights that are compared."""
    expected = train_in_slices(Stack(Normalising), 2, "blocks", loss_of=loss_on)
    assert any("running_mean" in name for name in expected.weights)
    options = {"layers": "blocks", "micro_batch_size": 2, "activations": activations}
    actual = train_streamed(Stack(Normalising), steps=3, max_norm=0.5, loss_of=loss_on, **options)
    assert_parity(actual, expected)


@pytest.mark.parametrize("size", [4, 5])
def test_a_batch_that_is_no_larger_is_not_cut(size: int) -> None:
    assert_parity(
        train_streamed(gpt(), steps=2, micro_batch_size=size, max_norm=0.5),
        train_plain(gpt(), steps=2, max_norm=0.5),
    )


@pytest.mark.parametrize("size", [None, 1, 3])
def test_weights_cross_the_bus_twice_a_step_and_gradients_once(size: int | None) -> None:
    with streamed(gpt(), micro_batch_size=size, num_slots=1) as model:
        executor = wrapped(model).executor
        language_loss(model, 0).backward()
        streamer.synchronize(model)
        ops = Counter(record.op.kind for record in executor.issuer.trace.records() if record.op.unit >= 0)
        assert ops[OpKind.UNSHARD] == 2 * 3 - 1
        assert ops[OpKind.OFFLOAD_GRAD] == 3


@pytest.mark.parametrize("grad_dtype", [torch.float32, None])
@POLICIES
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


class Caller(nn.Module):
    """Hands every layer what it is made with."""

    def __init__(self, make: Callable[[], nn.Module] = Attention, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([make() for _ in range(3)])
        self.args, self.kwargs = args, kwargs
        self.offset = nn.Parameter(torch.randn(1, TIME, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kwargs = dict(self.kwargs)
        if kwargs.get("places") == "trained":
            kwargs["places"] = self.offset
        for layer in self.layers:
            x = layer(x, *self.args, **kwargs)
            x = x[0] if isinstance(x, tuple) else x
        return x


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    x = torch.randn(6, TIME, WIDTH, generator=torch.Generator().manual_seed(step), requires_grad=True)
    return (model(x) - torch.linspace(-1, 1, WIDTH)).square().mean()


def assert_close_to_plain(model: nn.Module, of: Any = loss_of, **options: Any) -> None:
    """The whole batch in plain PyTorch, up to the order of additions."""
    expected = train_plain(model, loss_of=of, steps=2, max_norm=1e9)
    actual = train_streamed(model, loss_of=of, steps=2, max_norm=1e9, layers="layers", **options)
    torch.testing.assert_close(torch.tensor(actual.losses), torch.tensor(expected.losses), rtol=1e-6, atol=0)
    assert actual.first_gradients.keys() == expected.first_gradients.keys()
    for name, gradient in expected.first_gradients.items():
        largest = gradient.abs().max().item()
        torch.testing.assert_close(actual.first_gradients[name], gradient, rtol=0, atol=2e-6 * largest)


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(7))


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((noise(6, 1, TIME, TIME),), {}),
        ((noise(1, 1, TIME, TIME),), {}),
        ((noise(TIME, TIME),), {}),
        ((), {"places": noise(TIME, WIDTH), "scale": noise(6)}),
        ((), {"places": "trained"}),
        ((), {"rotary": (noise(1, TIME, WIDTH), noise(6, TIME, WIDTH))}),
    ],
    ids=["mask", "shared mask", "mask without a batch", "per channel and sample", "trained", "in a tuple"],
)
def test_arguments_that_begin_with_the_batch_are_cut(args: Any, kwargs: dict[str, Any], size: int) -> None:
    assert_close_to_plain(Caller(Attention, *args, **kwargs), micro_batch_size=size)


def square(model: nn.Module, step: int) -> torch.Tensor:
    """A batch as long as its sequences."""
    x = torch.randn(TIME, TIME, WIDTH, generator=torch.Generator().manual_seed(step))
    return model(x).square().mean()


@pytest.mark.parametrize(
    ("mask", "dim"), [(noise(TIME, TIME), None), (noise(TIME, 1, TIME, TIME), 0)], ids=["without", "with"]
)
def test_a_batch_as_long_as_its_sequences_is_settled_by_batch_dims(
    mask: torch.Tensor, dim: int | None
) -> None:
    model = Caller(Attention, mask)
    assert_close_to_plain(model, square, micro_batch_size=1, batch_dims={"mask": dim})
    with (
        streamed(model, layers="layers", micro_batch_size=1) as wrapped_model,
        pytest.raises(ValueError, match=r"'mask' .* is the batch: wrap with batch_dims=\{'mask': 0\}"),
    ):
        square(wrapped_model, 0)
    with streamed(model, layers="layers", micro_batch_size=1) as mine, torch.no_grad():
        # the whole batch at a time
        assert torch.equal(square(mine, 0), square(model, 0))


def test_an_argument_with_several_entries_per_sample() -> None:
    model = Caller(Attention, alibi=noise(6 * 2, 1, TIME))
    assert_close_to_plain(model, micro_batch_size=2, batch_dims={"alibi": 0})


class TimeFirst(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x)).cumsum(0)


def test_a_batch_in_another_dimension() -> None:
    def of(model: nn.Module, step: int) -> torch.Tensor:
        x = torch.randn(TIME, 6, WIDTH, generator=torch.Generator().manual_seed(step))
        return model(x).square().mean()

    assert_close_to_plain(Caller(TimeFirst), of, micro_batch_size=4, batch_dims={"x": 1})


class Residual(TimeFirst):
    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + residual


@pytest.mark.parametrize("time", [TIME, 6])
@pytest.mark.parametrize("residual_of", [lambda x: x, lambda x: x * 2], ids=["same tensor", "same shape"])
def test_what_has_the_shape_of_the_hidden_states_has_the_batch_where_they_do(
    residual_of: Callable[[torch.Tensor], torch.Tensor], time: int
) -> None:
    def of(model: nn.Module, step: int) -> torch.Tensor:
        x = torch.randn(time, 6, WIDTH, generator=torch.Generator().manual_seed(step))
        for layer in model.layers:  # type: ignore[union-attr]
            x = layer(x, residual_of(x))  # type: ignore[operator]
        return x.square().mean()

    assert_close_to_plain(Caller(Residual), of, micro_batch_size=2, batch_dims={"x": 1})


@pytest.mark.parametrize(
    ("argument", "match"),
    [
        (
            {"bias": noise(6, TIME, TIME)},
            r"dimension of 'bias' \(6, 5, 5\), .* is the batch: wrap with",
        ),
        (
            {"scales": [1.0] * 6},
            r"a list 'scales' as long as the batch of 6, which is not cut: give",
        ),
        ({"rotary": noise(3, 6, TIME, 4)}, r"the batch of 6 is in .* batch_dims=\{'rotary': 1\} if it is"),
    ],
    ids=["as many heads as samples", "a list", "not the first dimension"],
)
def test_what_may_or_may_not_be_the_batch_is_asked(argument: dict[str, Any], match: str) -> None:
    class Takes(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.num_heads = 6

        def forward(self, x: torch.Tensor, bias: Any = 0, scales: Any = (), rotary: Any = 0) -> torch.Tensor:
            return super().forward(x)

    model = Caller(Takes, **argument)
    with (
        streamed(model, layers="layers", micro_batch_size=1) as mine,
        pytest.raises(ValueError, match=match),
    ):
        loss_of(mine, 0)
    batch_dims = dict.fromkeys(argument)
    assert_close_to_plain(model, micro_batch_size=1, batch_dims=batch_dims)


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
    x = torch.randn(6, TIME, WIDTH, generator=torch.Generator().manual_seed(step))
    total = torch.zeros(())
    for layer in model.layers:  # type: ignore[union-attr]
        x, more = layer(x, *model.args)  # type: ignore[misc]
        if more is not None:
            total = total + (more.float() * torch.linspace(0, 1, more.numel()).view(more.shape)).sum()
    return x.square().mean() + total


@POLICIES
@pytest.mark.parametrize(
    "what",
    [
        lambda layer, hidden, mask: None,
        lambda layer, hidden, mask: hidden.mean(-1),
        lambda layer, hidden, mask: (hidden > 0).long(),
        lambda layer, hidden, mask: mask,
        lambda layer, hidden, mask: layer.linear.weight.square(),
        lambda layer, hidden, mask: mask[:1] * layer.linear.bias,
    ],
    ids=["nothing", "per sample", "integers", "its argument", "a function of weights", "the same in each"],
)
def test_what_is_returned_is_put_together(what: Callable[..., Any], activations: str) -> None:
    model = Caller(returning(what), noise(TIME, WIDTH))
    assert_close_to_plain(model, use_all, micro_batch_size=4, activations=activations)


class Skips(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if torch.rand(()) < 0.5 else super().forward(x)


@POLICIES
def test_a_layer_that_is_skipped_for_some_slices(activations: str) -> None:
    expected = train_in_slices(Caller(Skips), 3, "layers", loss_of=loss_of)
    options = {"layers": "layers", "loss_of": loss_of, "steps": 3, "max_norm": 0.5}
    actual = train_streamed(Caller(Skips), micro_batch_size=3, activations=activations, **options)
    assert_parity(actual, expected)


def test_numbers_that_differ_are_refused() -> None:
    model = Caller(returning(lambda layer, hidden, mask: {"samples": len(hidden)}))
    with (
        streamed(model, layers="layers", micro_batch_size=4) as mine,
        pytest.raises(ValueError, match="it returns other numbers, or more tensors, for one than"),
    ):
        loss_of(mine, 0)


@pytest.mark.parametrize("grad", [True, False])
def test_a_mean_over_the_batch_is_refused(grad: bool) -> None:
    model = Caller(returning(lambda layer, hidden, mask: hidden.mean()), noise(TIME, WIDTH))
    with (
        streamed(model, layers="layers", micro_batch_size=4) as wrapped_model,
        torch.set_grad_enabled(grad),
        pytest.raises(ValueError, match=r"layers\.0' cannot be put together: .*without micro_batch_size"),
    ):
        use_all(wrapped_model, 0)


# --- without gradients ----------------------------------------------------------------------------------


def test_inference_runs_in_slices_too() -> None:
    model = Caller(Attention, noise(6, 1, TIME, TIME))
    x = noise(6, TIME, WIDTH)
    seen: list[int] = []
    with streamed(model, layers="layers", micro_batch_size=4) as mine, torch.no_grad():
        hook = mine.layers[0].qkv.register_forward_pre_hook(lambda _, args: seen.append(len(args[0])))
        torch.testing.assert_close(mine(x), model(x), rtol=1e-6, atol=1e-6)
        hook.remove()
    assert seen == [4, 2]


class Appends(Layer):
    def forward(self, x: torch.Tensor, seen: list[torch.Tensor]) -> torch.Tensor:
        seen.append(x)
        return super().forward(x)


def test_a_layer_that_changes_its_arguments_is_not_run_in_slices() -> None:
    with (
        streamed(Caller(Appends, []), layers="layers", micro_batch_size=4) as mine,
        torch.no_grad(),
        pytest.raises(ValueError, match="changes what it is given .* without micro_batch_size"),
    ):
        mine(noise(6, TIME, WIDTH))


class Writes(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(8, TIME, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.cache[: len(x)] = x
        return super().forward(x)


class Replaces(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.state = x + 1
        return super().forward(x)


@pytest.mark.parametrize("make", [Writes, Replaces])
def test_a_layer_that_keeps_a_cache_is_not_run_in_slices(make: type[nn.Module]) -> None:
    with (
        streamed(Caller(make), layers="layers", micro_batch_size=4) as mine,
        torch.no_grad(),
        pytest.raises(ValueError, match="that it keeps, a key/value cache say; .* without micro_batch_size"),
    ):
        mine(noise(6, TIME, WIDTH))


# --- gradients ------------------------------------------------------------------------------------------


@POLICIES
def test_hooks_see_the_gradient_of_the_whole_batch_once(activations: str) -> None:
    model, x = Caller(Layer), noise(6, TIME, WIDTH)
    model(x).square().sum().backward()
    expected = model.layers[1].linear.weight.grad
    model.zero_grad()
    with streamed(model, layers="layers", micro_batch_size=2, activations=activations) as mine:
        seen = []

        def hook(gradient: torch.Tensor) -> torch.Tensor:
            seen.append(gradient)
            return 2 * gradient

        mine.layers[1].linear.weight.register_hook(hook)
        mine(x).square().sum().backward()
        (gradient,) = seen
        torch.testing.assert_close(gradient, expected)
        torch.testing.assert_close(mine.layers[1].linear.weight.grad, 2 * expected)


@POLICIES
def test_autograd_grad_and_a_second_backward(activations: str) -> None:
    model, x = Caller(Layer), noise(6, TIME, WIDTH).requires_grad_()
    wanted = [x, model.layers[0].linear.weight, model.layers[2].linear.bias]
    expected = torch.autograd.grad(model(x).square().sum(), wanted)
    with streamed(model, layers="layers", micro_batch_size=4, activations=activations) as mine:
        loss = mine(x).square().sum()
        wanted = [x, mine.layers[0].linear.weight, mine.layers[2].linear.bias]
        for _ in range(2):
            torch.testing.assert_close(torch.autograd.grad(loss, wanted, retain_graph=True), expected)


class Fragile(nn.Module):
    """Its backward may fail when the gradient of ``y`` has come, and that of ``x`` not yet."""

    fails = False

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = self.linear(x)
        hidden.register_hook(self.hook)
        return hidden + y

    @classmethod
    def hook(cls, gradient: torch.Tensor) -> None:
        if cls.fails:
            raise ValueError("once")


@POLICIES
def test_a_backward_after_one_that_failed_begins_anew(
    activations: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gradients(model: nn.Module, *, fails: bool) -> list[Any]:
        x, y = noise(2, 4, TIME, WIDTH).requires_grad_().unbind()
        loss = model.layers[0](x * 1, y * 1).square().sum()  # type: ignore[index, operator, union-attr]
        if fails:
            monkeypatch.setattr(Fragile, "fails", True)
            with pytest.raises(ValueError, match="once"):
                loss.backward(retain_graph=True)
            monkeypatch.undo()
        return list(torch.autograd.grad(loss, [x, y]))

    model = Caller(Fragile)
    expected = gradients(model, fails=False)
    with streamed(model, layers="layers", micro_batch_size=2, activations=activations) as mine:
        torch.testing.assert_close(gradients(mine, fails=True), expected)


def test_the_working_set_is_that_of_a_slice() -> None:
    x = noise(16, 128, WIDTH)

    def peak(size: int | None) -> int:
        with streamed(Caller(), layers="layers", micro_batch_size=size) as model:
            del model.offset
            with Tracker() as tracker:
                model(x).sum().backward()
            return tracker.peak

    # the scores of one layer: [16, 2, 128, 128] in fp32
    assert peak(None) > 3 * 16 * 2 * 128 * 128 * 4
    assert peak(2) < peak(None) / 4


class Looks(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Embedding(TIME, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.places(torch.arange(TIME))


@POLICIES
def test_sparse_gradients(activations: str) -> None:
    model, x = Caller(Looks), noise(6, TIME, WIDTH)
    model(x).square().sum().backward()
    expected = model.layers[1].places.weight.grad
    model.zero_grad()
    for layer in model.layers:
        layer.places.sparse = True  # type: ignore[union-attr, assignment]
    with streamed(model, layers="layers", micro_batch_size=4, activations=activations) as mine:
        mine(x).square().sum().backward()
        torch.testing.assert_close(mine.layers[1].places.weight.grad.to_dense(), expected)


# --- what cannot be -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"micro_batch_size": 0}, r"micro_batch_size=0: it must be an integer of 1 or more, or None"),
        ({"micro_batch_size": "4"}, r"micro_batch_size='4': it must be an integer of 1 or more, or None"),
        ({"micro_batch_size": True}, r"micro_batch_size=True: it must be an integer of 1 or more, or None"),
        ({"batch_dims": {"mask": 0}}, "give micro_batch_size too"),
        ({"micro_batch_size": 1, "batch_dims": ["mask"]}, "give a dict from the names of arguments"),
        ({"micro_batch_size": 1, "batch_dims": {"mask": 0.0}}, "give a dict from the names of arguments"),
        (
            {"micro_batch_size": 1, "batch_dims": {"masks": 0}},
            "no layer takes an argument 'masks'; the first one takes 'x', 'mask', ",
        ),
    ],
)
def test_options(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        streamer.wrap(Caller(), layers="layers", device="cpu", **options)


@pytest.mark.parametrize(
    ("batch_dims", "match"),
    [
        ({"mask": 4}, r"'mask' has shape \(5, 5\), which has no dimension 4"),
        ({"mask": 1}, r"that dimension is 5 long \(the shape is \(5, 5\)\), which the batch of 6 does not"),
        ({"x": 3}, r"the hidden states has shape \(6, 5, 16\), which has no dimension 3"),
    ],
)
def test_batch_dims_that_an_argument_does_not_have(batch_dims: dict[str, int], match: str) -> None:
    model = Caller(Attention, noise(TIME, TIME))
    with (
        streamed(model, layers="layers", micro_batch_size=2, batch_dims=batch_dims) as mine,
        pytest.raises(ValueError, match=match),
    ):
        loss_of(mine, 0)


class Holder:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def test_a_batch_inside_an_object_is_refused() -> None:
    class Opens(Layer):
        def forward(self, x: torch.Tensor, held: Holder) -> torch.Tensor:
            return super().forward(x) * held.tensor

    with (
        streamed(Caller(Opens, Holder(noise(6, 1, 1))), layers="layers", micro_batch_size=1) as mine,
        pytest.raises(ValueError, match=r"a tensor of shape \(6, 1, 1\) inside an object of its own class"),
    ):
        loss_of(mine, 0)
