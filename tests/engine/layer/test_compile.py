"""`torch.compile` of the layers: once for all of one structure, with the same numbers, never in the way."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor.exc import InductorError

import streamer
from models.gpt2 import GPT
from streamer.backends.thread import ThreadBackend
from tests.reference import (
    VOCAB,
    History,
    LossOf,
    assert_parity,
    assert_same,
    batch,
    language_loss,
    train,
    train_plain,
    train_streamed,
)

LAYERS = {"layers": "transformer.h"}


@pytest.fixture(autouse=True)
def nothing_compiled_before() -> Iterator[None]:
    torch._dynamo.reset()
    with warnings.catch_warnings():
        # of the compiler's own modules, when they are imported
        warnings.simplefilter("ignore", DeprecationWarning)
        yield
    torch._dynamo.reset()


def gpt(layers: int = 4, dropout: float = 0.0) -> GPT:
    torch.manual_seed(0)
    return GPT(vocab_size=VOCAB, block_size=16, n_layer=layers, n_head=2, n_embd=32, dropout=dropout)


@pytest.mark.parametrize("num_slots", [1, 2])
@pytest.mark.parametrize("activations", ["recompute", "keep"])
def test_one_compilation_serves_all_layers_with_the_same_numbers(activations: str, num_slots: int) -> None:
    compiled = CompileCounterWithBackend("aot_eager")
    actual = train_streamed(
        gpt(),
        steps=3,
        compile=compiled,
        activations=activations,
        num_slots=num_slots,
        backend=ThreadBackend(poison=True),
        **LAYERS,
    )
    assert compiled.frame_count == 1
    assert_parity(actual, train_plain(gpt(), steps=3))
    assert_same(actual, train_streamed(gpt(), steps=3, activations=activations, **LAYERS))


def test_dropout_is_the_same_when_a_layer_runs_again() -> None:
    options = {"steps": 3, "compile": "aot_eager", **LAYERS}
    kept = train_streamed(gpt(dropout=0.2), activations="keep", **options)
    assert_same(train_streamed(gpt(dropout=0.2), activations="recompute", **options), kept)
    assert_parity(kept, train_plain(gpt(dropout=0.2), steps=3))


def test_inference_is_compiled_too() -> None:
    tokens = torch.arange(16)[None]
    expected = gpt().eval()(tokens)
    compiled = CompileCounterWithBackend("aot_eager")
    model = streamer.wrap(gpt().eval(), device="cpu", compile=compiled, **LAYERS)
    with torch.no_grad():
        assert torch.equal(model(tokens), expected)
    assert compiled.frame_count == 1
    streamer.unwrap(model)


class Mixed(nn.Module):
    """Layers of two widths inside and of two classes."""

    def __init__(self) -> None:
        super().__init__()
        shapes = (8, 16, 8, 16)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 4)) for width in shapes
        )
        self.layers.append(nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_layers_of_several_structures_are_compiled_each_once() -> None:
    compiled = CompileCounterWithBackend("aot_eager")
    torch.manual_seed(0)
    model, plain = Mixed(), Mixed()
    plain.load_state_dict(model.state_dict())
    streamer.wrap(model, layers="layers", device="cpu", compile=compiled)
    x = torch.randn(2, 3, 4, requires_grad=True)
    for _ in range(2):
        actual, expected = model(x), plain(x)
        assert torch.equal(actual, expected)
        actual.sum().backward()
        expected.sum().backward()
    assert compiled.frame_count == 3
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-6, atol=1e-6)
    streamer.unwrap(model)


def test_the_default_backend_gives_the_same_training() -> None:
    actual = train_streamed(gpt(layers=2), steps=3, compile=True, **LAYERS)
    expected = train_plain(gpt(layers=2), steps=3)
    assert torch.tensor(actual.losses).allclose(torch.tensor(expected.losses), rtol=1e-5, atol=0)
    assert torch.tensor(actual.norms).allclose(torch.tensor(expected.norms), rtol=1e-5, atol=0)
    for name, gradient in expected.first_gradients.items():
        torch.testing.assert_close(actual.first_gradients[name], gradient, rtol=1e-4, atol=1e-7)


# The user's own torch.compile

#: PyTorch's, of a tensor that goes from one graph to the next.
TORCHS_OWN_WARNING = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")


def of_tokens(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def in_place(model: nn.Module, backend: str) -> None:
    model.compile(backend=backend)


def layers_in_place(model: nn.Module, backend: str) -> None:
    for block in model.transformer.h:
        block.compile(backend=backend)


def layers(model: nn.Module, backend: str) -> None:
    for number, block in enumerate(model.transformer.h):
        model.transformer.h[number] = torch.compile(block, backend=backend)


def around(model: nn.Module, backend: str) -> LossOf:
    compiled = torch.compile(model, backend=backend)
    return lambda _, step: language_loss(compiled, step)


def loss_alone(model: nn.Module, backend: str) -> LossOf:
    cross_entropy = torch.compile(F.cross_entropy, backend=backend)

    def loss_of(model: nn.Module, step: int) -> torch.Tensor:
        tokens = batch(step)
        return cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    return loss_of


def forward_and_loss(model: nn.Module, backend: str) -> LossOf:
    compiled = torch.compile(of_tokens, backend=backend)
    return lambda model, step: compiled(model, batch(step))


def all_but_the_data(model: nn.Module, backend: str) -> LossOf:
    def forward_and_backward(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        loss = of_tokens(model, tokens)
        loss.backward()
        streamer.clip_grad_norm_(model, 1e9)
        return loss.detach().requires_grad_()  # the loop goes backward once more, through nothing

    compiled = torch.compile(forward_and_backward, backend=backend)
    return lambda model, step: compiled(model, batch(step))


def train_compiled(
    compile: Callable[[nn.Module, str], LossOf | None], backend: str, *, is_wrapped: bool, **options: Any
) -> History:
    """Five steps of what the user compiles before or after `wrap`; names as if nothing had been compiled."""
    model, loss_of = gpt(layers=2), None
    if not is_wrapped:
        loss_of = compile(model, backend)
    streamer.wrap(model, device="cpu", **options)
    if is_wrapped:
        loss_of = compile(model, backend)
    optimizer = streamer.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    clip = partial(streamer.clip_grad_norm_, model, 1.0)
    history = train(model, optimizer, clip, steps=3, loss_of=loss_of or language_loss)
    streamer.unwrap(model)
    for tensors in (history.first_gradients, history.weights):
        for name in list(tensors):
            tensors[name.replace("_orig_mod.", "")] = tensors.pop(name)
    return history


@TORCHS_OWN_WARNING
@pytest.mark.parametrize(
    ("compile", "is_wrapped", "activations"),
    [
        (around, True, "recompute"),
        (around, False, "keep"),
        (in_place, True, "recompute"),
        (layers_in_place, True, "recompute"),
        (layers_in_place, False, "recompute"),
        (layers_in_place, False, "keep"),
        (layers, False, "recompute"),
        (layers, False, "keep"),
        (loss_alone, True, "recompute"),
        (forward_and_loss, True, "recompute"),
        (forward_and_loss, True, "keep"),
        (all_but_the_data, True, "recompute"),
    ],
)
def test_what_users_compile_trains_as_plain(compile: Any, is_wrapped: bool, activations: str) -> None:
    options = {"activations": activations, **LAYERS}
    actual = train_compiled(compile, "eager", is_wrapped=is_wrapped, **options)
    assert_parity(actual, train_plain(gpt(layers=2), steps=3))
    assert_same(actual, train_streamed(gpt(layers=2), steps=3, **options))


@TORCHS_OWN_WARNING
def test_a_model_that_users_compile_with_the_default_backend() -> None:
    actual = train_compiled(forward_and_loss, "inductor", is_wrapped=True, **LAYERS)
    expected = train_plain(gpt(layers=2), steps=3)
    assert torch.tensor(actual.losses).allclose(torch.tensor(expected.losses), rtol=1e-5, atol=0)
    for name, gradient in expected.first_gradients.items():
        torch.testing.assert_close(actual.first_gradients[name], gradient, rtol=1e-4, atol=1e-7)


@TORCHS_OWN_WARNING
def test_a_model_compiled_whole_is_told_why_not() -> None:
    model = streamer.wrap(gpt(layers=2), device="cpu", **LAYERS)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"wrap\(compile=True\) compiles layers"):
        compiled(batch(0)[:, :-1])
    streamer.unwrap(model)


# What cannot be compiled


def no_forward(graph: Any, inputs: Any) -> Any:
    raise InductorError(RuntimeError("no working C++ compiler"), None)


def no_backward(graph: Any, inputs: Any) -> Any:
    raise InductorError(RuntimeError("no backward of this"), None)


FAILS = "torch.compile fails on Block, whose layers run as they are from now on .*: .*"


@pytest.mark.parametrize("activations", ["recompute", "keep"])
def test_without_a_compiler_layers_run_as_they_are_which_is_said_once(activations: str) -> None:
    options = {"steps": 3, "activations": activations, **LAYERS}
    with pytest.warns(UserWarning, match=FAILS + "no working C") as caught:
        actual = train_streamed(gpt(), compile=no_forward, **options)
    assert [Path(warning.filename).name for warning in caught] == ["gpt2.py"], "which calls the layer"
    assert_same(actual, train_streamed(gpt(), **options))


def test_a_backward_that_cannot_be_compiled_is_run_as_it_is() -> None:
    backend = aot_autograd(fw_compiler=lambda graph, inputs: graph, bw_compiler=no_backward)
    with pytest.warns(UserWarning, match=FAILS + "no backward of this") as caught:
        actual = train_streamed(gpt(), steps=3, compile=backend, **LAYERS)
    assert [Path(warning.filename).name for warning in caught] == ["reference.py"], "which calls backward"
    assert_same(actual, train_streamed(gpt(), steps=3, **LAYERS))


def assert_next_step_is_plain(model: nn.Module, plain: nn.Module, tokens: torch.Tensor) -> None:
    """The gradients of the wrapped ``model``, which is unwrapped in the end, are those of ``plain``."""
    model.zero_grad()
    for each in (model, plain):
        torch.manual_seed(0)
        each(tokens).sum().backward()
    expected = dict(plain.named_parameters())
    assert all(torch.equal(param.grad, expected[name].grad) for name, param in model.named_parameters())
    streamer.unwrap(model)


def test_what_drew_random_numbers_compiled_is_not_run_again_as_it_is() -> None:
    """Compiled code may draw others, so that gradients would be those of another mask."""
    backend = aot_autograd(fw_compiler=lambda graph, inputs: graph, bw_compiler=no_backward)
    model = streamer.wrap(gpt(dropout=0.1), device="cpu", compile=backend, **LAYERS)
    tokens = torch.arange(16)[None]
    with (
        pytest.warns(UserWarning, match=FAILS),
        pytest.raises(RuntimeError, match=r"layer 'transformer\.h\.3' drew random numbers in its compiled"),
    ):
        model(tokens).sum().backward()
    assert_next_step_is_plain(model, gpt(dropout=0.1), tokens)


class Broken(nn.Module):
    """Draws random numbers and counts a batch on both sides of what cannot be compiled in one piece."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.first, self.second = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.dropout(self.first(self.linear(x)))
        torch._dynamo.graph_break()
        return x + self.dropout(self.second(x))


@pytest.mark.parametrize("activations", ["recompute", "keep"])
def test_a_forward_that_fails_half_way_begins_anew(activations: str) -> None:
    graphs: list[Any] = []

    def second_fails(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph if len(graphs) == 1 else no_forward(graph, inputs)

    def run(**options: Any) -> tuple[torch.Tensor, ...]:
        torch.manual_seed(0)
        model = nn.Sequential(Broken(), Broken())
        x = torch.randn(8, 4)
        if options:
            streamer.wrap(model, layers="", device="cpu", activations=activations, **options)
        loss = model(x).square().sum()
        loss.backward()
        found = [loss.detach(), *(param.grad.clone() for param in model.parameters())]
        found += [buffer.clone() for buffer in model.buffers()]
        if options:
            streamer.unwrap(model)
        return (*found, torch.rand(3))

    expected = run()
    with pytest.warns(UserWarning, match="torch.compile fails on Broken"):
        actual = run(compile=second_fails)
    assert len(graphs) == 2
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(actual, expected, strict=True))


def test_a_kept_graph_whose_backward_cannot_be_compiled_says_so_and_the_next_step_works() -> None:
    backend = aot_autograd(fw_compiler=lambda graph, inputs: graph, bw_compiler=no_backward)
    model = streamer.wrap(gpt(), device="cpu", compile=backend, activations="keep", **LAYERS)
    tokens = torch.arange(16)[None]
    with (
        pytest.warns(UserWarning, match=FAILS),
        pytest.raises(InductorError, match="no backward of this"),
    ):
        model(tokens).sum().backward()
    assert_next_step_is_plain(model, gpt(), tokens)


def test_an_error_of_the_layer_itself_comes_through() -> None:
    class Picky(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.shape[0] > 2:
                raise ValueError("at most two rows")
            return super().forward(x)

    model = nn.Sequential(Picky(4, 4), Picky(4, 4))
    streamer.wrap(model, layers="", device="cpu", compile="aot_eager")
    with pytest.raises(ValueError, match="at most two rows"):
        model(torch.ones(3, 4))
    model(torch.ones(2, 4)).sum().backward()
    streamer.unwrap(model)


@pytest.mark.parametrize(
    ("compile", "match"),
    [
        (3, "use True, False, or a backend of torch.compile"),
        (None, "use True, False, or a backend of torch.compile"),
        ([True], "use True, False, or a backend of torch.compile"),
        ("", "compile='' is no backend of torch.compile; there are: .*inductor"),
        ("nonsense", "compile='nonsense' is no backend of torch.compile; there are: .*inductor"),
    ],
)
def test_what_is_no_backend_is_refused(compile: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        streamer.wrap(gpt(), device="cpu", compile=compile, **LAYERS)
