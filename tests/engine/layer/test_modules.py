"""Modules of many kinds as layers, and wrapped models inside of larger ones, train as in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import streamer
from tests.models import WIDTH, Layer, Stack, numbers
from tests.reference import (
    POLICIES,
    LossOf,
    assert_as_plain,
    assert_equal,
    assert_parity,
    gradients,
    in_turn,
    streamed,
    train_plain,
    train_streamed,
)

TIME = 5
PADDING = torch.tensor([[0, 0, 0, 0, 0], [0, 0, 0, 1, 1], [0, 0, 0, 0, 1]]).bool()
CAUSAL = nn.Transformer.generate_square_subsequent_mask(TIME)


def batch(step: int) -> torch.Tensor:
    return torch.randn(3, TIME, WIDTH, generator=torch.Generator().manual_seed(step))


def distance(out: torch.Tensor) -> torch.Tensor:
    """From a target: of the mean square of what a LayerNorm returns, gradients are but rounding errors."""
    return (out - torch.linspace(-1, 1, out.shape[-1])).square().mean()


def loss_on(model: nn.Module, step: int) -> torch.Tensor:
    return distance(model(batch(step)))


def twice(model: nn.Module, step: int) -> torch.Tensor:
    return distance(model(batch(step))) + distance(model(batch(step) + 1))


def assert_trains(model: nn.Module, loss_of: LossOf = loss_on, **options: Any) -> None:
    """Three steps of training equal plain PyTorch's."""
    expected = train_plain(model, loss_of=loss_of, steps=3)
    assert_parity(train_streamed(model, loss_of=loss_of, steps=3, **options), expected)


# --- PyTorch's transformers -----------------------------------------------------------------------------


def encoder(*, nested: bool = False, **options: Any) -> nn.Module:
    """Without a bias there is none on attention's keys, whose gradient is nothing but rounding errors."""
    torch.manual_seed(0)
    options = {"dropout": 0.1, "batch_first": True, "bias": False} | options
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, **options)
    return nn.TransformerEncoder(layer, 3, norm=nn.LayerNorm(WIDTH), enable_nested_tensor=nested)


def decoder() -> nn.Module:
    torch.manual_seed(0)
    return nn.TransformerDecoder(
        nn.TransformerDecoderLayer(WIDTH, 2, 32, 0.1, batch_first=True, bias=False), 3
    )


def padded(model: nn.Module, step: int) -> torch.Tensor:
    return distance(model(batch(step), src_key_padding_mask=PADDING)[~PADDING])


def causal(model: nn.Module, step: int) -> torch.Tensor:
    return distance(model(batch(step), mask=CAUSAL, is_causal=True))


def crossing(model: nn.Module, step: int) -> torch.Tensor:
    out = model(batch(step), batch(step + 100), CAUSAL, memory_key_padding_mask=PADDING, tgt_is_causal=True)
    return distance(out)


def translating(model: nn.Module, step: int) -> torch.Tensor:
    out = model(batch(step), batch(step + 100), tgt_mask=CAUSAL, src_key_padding_mask=PADDING)
    return distance(out)


def transformer() -> nn.Module:
    torch.manual_seed(0)
    return nn.Transformer(WIDTH, 2, 2, 3, 32, 0.1, batch_first=True, bias=False)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True, but:UserWarning")
@pytest.mark.parametrize(
    ("make", "loss_of", "layers", "activations"),
    [
        (encoder, padded, "layers", "recompute"),
        (partial(encoder, norm_first=True), causal, "layers", "keep"),
        (decoder, crossing, "layers", "recompute"),
        (transformer, translating, ["encoder.layers", "decoder.layers"], "keep"),
    ],
)
def test_transformers(make: Callable[[], nn.Module], loss_of: LossOf, layers: Any, activations: str) -> None:
    assert_trains(make(), loss_of, layers=layers, activations=activations)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize(
    ("loss_of", "nested", "size"), [(loss_on, False, None), (padded, True, 2), (causal, False, 2)]
)
def test_an_encoder_in_evaluation(
    size: int | None, nested: bool, loss_of: LossOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its layers give their weights to one fused function then, and the encoder may leave padding out."""
    model = encoder(nested=nested, bias=True).eval()
    fused, calls = torch._transformer_encoder_layer_fwd, []
    monkeypatch.setattr(
        torch, "_transformer_encoder_layer_fwd", lambda *args: calls.append(args[0].is_nested) or fused(*args)
    )
    with torch.no_grad():
        expected = loss_of(model, 0)
    in_plain, calls[:] = list(calls), []
    is_nested = nested and loss_of is padded
    slices = 1 if size is None or is_nested else 2
    with streamed(model, layers="layers", num_slots=1, micro_batch_size=size) as wrapped:
        with torch.no_grad():
            assert torch.equal(loss_of(wrapped, 0), expected)
        with torch.inference_mode():
            assert torch.equal(loss_of(wrapped, 0), expected)
        assert in_plain == 3 * [is_nested]
        assert calls == 6 * slices * [is_nested]


# --- layers of other kinds ------------------------------------------------------------------------------


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.2), nn.Linear(WIDTH, WIDTH)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x)


class Rotary(nn.Module):
    """One for all layers, with a table and a count of its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.linspace(-1, 1, WIDTH))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * self.table + 0.01 * self.calls


class Sharing(Layer):
    def __init__(self, rotary: nn.Module, dropout: nn.Module) -> None:
        super().__init__()
        self.rotary, self.dropout = rotary, dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.dropout(self.rotary(x)))


def sharing() -> nn.Module:
    rotary, dropout = Rotary(), nn.Dropout(0.2)
    model = Stack(lambda: Sharing(rotary, dropout))
    model.rotary = rotary
    return model


class Odd(Layer):
    """Uses its weight as an item of a list and only as a parameter; has a parameter without elements and one
    without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.held = [self.linear.weight]
        self.nothing = nn.Parameter(torch.zeros(0, 3))
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if isinstance(self.linear.weight, nn.Parameter):
            x = super().forward(x) * self.scale + self.nothing.sum()
        return x + torch.tanh(x @ self.held[0])


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRU(WIDTH, WIDTH, 2, batch_first=True, dropout=0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.cell(x)[0]


KINDS = (Residual, Odd, Recurrent)
LAYERS = {kind.__name__: partial(Stack, kind) for kind in KINDS} | {"sharing": sharing}


@POLICIES
@pytest.mark.parametrize("layers", LAYERS)
def test_layers(layers: str, activations: str) -> None:
    # a recurrence adds its weights' gradients up over time, and over two calls in another order
    loss_of = loss_on if layers == "Recurrent" else twice
    assert_trains(LAYERS[layers](), loss_of, layers="blocks", activations=activations)


# --- sparse tensors -------------------------------------------------------------------------------------

NODES = 6


class Sparse(nn.Module):
    """Averages nodes over their neighbours, by a sparse argument and a sparse buffer, and multiplies by a
    sparse matrix that has a parameter as its values."""

    def __init__(self, layout: str, is_coalesced: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.values = nn.Parameter(torch.randn(WIDTH))
        self.register_buffer("own", adjacency(layout))
        self.is_coalesced = is_coalesced

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        places = torch.stack([torch.arange(WIDTH), torch.arange(WIDTH).roll(3)])
        options = {"is_coalesced": self.is_coalesced, "check_invariants": True}
        matrix = torch.sparse_coo_tensor(places, self.values, (WIDTH, WIDTH), **options)
        x = x + torch.tanh(edges @ self.linear(x) + self.own @ x)
        return x + torch.sparse.mm(matrix, x.t()).t(), edges


def adjacency(layout: str) -> torch.Tensor:
    dense = numbers(NODES, NODES)
    dense = dense * (dense > 0.5)
    return dense.to_sparse() if layout == "coo" else dense.to_sparse_csr()


class Graph(nn.Module):
    def __init__(self, layout: str = "coo", is_coalesced: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Sparse(layout, is_coalesced) for _ in range(3))
        self.register_buffer("edges", adjacency(layout))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        edges = self.edges
        for layer in self.layers:
            x, edges = layer(x, edges)
        return x


SPARSE = pytest.mark.filterwarnings("ignore:Sparse C.. tensor support is in beta state:UserWarning")


@SPARSE
@pytest.mark.parametrize(
    ("layout", "is_coalesced", "activations"),
    [
        ("coo", False, "recompute"),
        ("csr", True, "keep"),
        ("csr", False, "recompute+offload"),
        ("coo", True, "keep"),
    ],
)
def test_sparse_tensors(layout: str, is_coalesced: bool, activations: str) -> None:
    """With one slot the weight of another layer is in its place in backward."""

    def steps(model: nn.Module) -> Any:
        return [one_step_of(model, numbers(NODES, WIDTH, seed=step)) for step in range(2)]

    model = streamer.wrap(
        Graph(layout, is_coalesced), device="cpu", layers="layers", num_slots=1, activations=activations
    )
    actual = steps(model)  # PyTorch copies not all sparse tensors: the model is made twice
    streamer.unwrap(model)
    assert_equal(actual, steps(Graph(layout, is_coalesced)))


def one_step_of(model: nn.Module, x: torch.Tensor) -> Any:
    loss = distance(model(x))
    loss.backward()
    found = loss, gradients(model)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    model.zero_grad()
    return found


@SPARSE
def test_a_step_that_cannot_be_planned_is_refused_with_a_way_out() -> None:
    match = "planned without values, .* sparse .*: set activations, num_slots and micro_batch_size yourself"
    with pytest.raises(ValueError, match=match):
        streamer.wrap(Graph(), device="cpu", layers="layers", example=torch.zeros(NODES, WIDTH))


# --- layers that know one another -----------------------------------------------------------------------


class Calling(Layer):
    """Calls what is in ``others`` first, which are no modules of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.others: list[Callable[[torch.Tensor], torch.Tensor]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for other in self.others:
            x = x + torch.tanh(other(x))
        return super().forward(x)


def calling_parts() -> nn.Module:
    model = Stack(Calling)
    for index in (1, 2):
        model.blocks[index].others = [model.blocks[index - 1].linear]
    return model


def times_weight(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return x @ linear.weight


def reading_weights() -> nn.Module:
    model = Stack(Calling)
    for index in (1, 2):
        model.blocks[index].others = [partial(times_weight, model.blocks[index - 1].linear)]
    return model


class Reusing(Stack):
    """Calls a part of a layer, and reads a weight of one, outside of it."""

    def __init__(self) -> None:
        super().__init__(Layer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[0].linear(super().forward(x)) @ self.blocks[2].linear.weight


def first_gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    loss_on(model, 0).backward()
    return gradients(model)


@pytest.mark.parametrize(
    ("make", "activations"), in_turn([calling_parts, reading_weights, Reusing], ["recompute", "keep"])
)
def test_layers_that_use_others(make: Callable[[], nn.Module], activations: str) -> None:
    options = {"layers": "blocks", "activations": activations}
    assert_as_plain(make(), partial(loss_on, step=0), **options)
    # the parts of some gradients are added in another order
    assert_as_plain(make(), first_gradients, rtol=1e-5, atol=1e-7, **options)


@pytest.mark.parametrize(("make", "num_slots"), [(streamer.AdamW, 1), (torch.optim.AdamW, 3)])
def test_a_step_inside_of_a_layer_is_refused(make: Any, num_slots: int) -> None:
    """Plain PyTorch changes the weights at once, and the rest of the layer runs on the new ones."""
    with streamed(Stack(Layer), layers="blocks", num_slots=num_slots) as model:
        optimizer = make(model.parameters(), lr=0.1)
        loss_on(model, 0).backward()
        before = {name: param.clone() for name, param in model.state_dict().items()}
        within = model.blocks[2].linear.register_forward_hook(lambda *_: optimizer.step())
        with (
            pytest.raises(RuntimeError, match=r"step\(\) is called inside of layer 'blocks.2'.*has returned"),
            torch.no_grad(),
        ):
            loss_on(model, 0)
        within.remove()
        assert all(torch.equal(param, before[name]) for name, param in model.state_dict().items())


# --- a wrapped model in a larger one --------------------------------------------------------------------


class Larger(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.before = nn.Linear(WIDTH, WIDTH)
        self.inner = inner
        self.after = nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(self.inner(self.before(x)))


Optimizers = Callable[[Larger, Any], Any]


class Both:
    """One optimizer for the wrapped model, one for the rest."""

    def __init__(self, model: Larger, kind: Any) -> None:
        rest = [*model.before.parameters(), *model.after.parameters()]
        self.all = [kind(model.inner.parameters(), lr=1e-2), torch.optim.AdamW(rest, lr=1e-2)]

    def step(self) -> None:
        for optimizer in self.all:
            optimizer.step()


def one_for_all(model: Larger, kind: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


@pytest.mark.parametrize("make", [Both, one_for_all])
def test_a_wrapped_model_in_a_larger_one(make: Optimizers) -> None:
    def trained(inner: nn.Module, kind: Any) -> Any:
        model, losses = Larger(inner), []
        optimizer = make(model, kind)
        for step in range(4):
            torch.manual_seed(step)
            losses.append(loss_on(model, step))
            losses[-1].backward()
            optimizer.step()
            model.zero_grad()
        return losses, loss_on(model.eval(), 99), dict(model.state_dict())

    expected = trained(Stack(Residual), torch.optim.AdamW)
    with streamed(Stack(Residual), layers="blocks") as model:
        assert_equal(trained(model, streamer.AdamW), expected, rtol=1e-5, atol=1e-5)
        larger = Larger(model)
        larger.requires_grad_(False)
        assert not loss_on(larger, 0).requires_grad
        larger.requires_grad_(True)
        larger.load_state_dict({name: torch.zeros_like(v) for name, v in larger.state_dict().items()})
        assert not larger(batch(0)).any()
        with pytest.raises(ValueError, match="belongs to no wrapped model.*leave out parameters"):
            streamer.AdamW(larger.parameters())
