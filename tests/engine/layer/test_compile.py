"""`torch.compile` of the layers: once for all of one structure, with the same numbers, never in the way."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor.exc import InductorError

import streamer
from streamer.backends.thread import ThreadBackend
from tests.reference import (
    History,
    LossOf,
    assert_as_plain,
    assert_parity,
    assert_refused,
    assert_same,
    batch,
    gradients,
    language_loss,
    streamed,
    tiny_gpt,
    train,
    train_plain,
    train_streamed,
)

LAYERS = {"layers": "transformer.h"}
TOKENS = torch.arange(16)[None]


@pytest.fixture(autouse=True)
def nothing_compiled_before() -> Iterator[None]:
    torch._dynamo.reset()
    with warnings.catch_warnings():
        # of the compiler's own modules, when they are imported
        warnings.simplefilter("ignore", DeprecationWarning)
        yield
    torch._dynamo.reset()


@cache
def plain() -> History:
    return train_plain(tiny_gpt(2), steps=3)


@cache
def uncompiled(activations: str) -> History:
    return train_streamed(tiny_gpt(2), steps=3, activations=activations, **LAYERS)


@pytest.mark.parametrize(("activations", "num_slots"), [("keep", 1)])
def test_one_compilation_serves_all_layers_with_the_same_numbers(activations: str, num_slots: int) -> None:
    """Those that dropout draws too."""
    compiled, model = CompileCounterWithBackend("aot_eager"), tiny_gpt(3, dropout=0.2)
    options = {"steps": 2, "activations": activations, **LAYERS}
    poisoned = ThreadBackend(poison=True)
    actual = train_streamed(model, compile=compiled, num_slots=num_slots, backend=poisoned, **options)
    assert compiled.frame_count == 1
    assert_parity(actual, train_plain(model, steps=2))
    assert_same(actual, train_streamed(model, **options))


def test_inference_is_compiled_too() -> None:
    compiled = CompileCounterWithBackend("aot_eager")
    with torch.no_grad():
        assert_as_plain(tiny_gpt().eval(), lambda model: model(TOKENS), compile=compiled, **LAYERS)
    assert compiled.frame_count == 1


def mixed() -> nn.Module:
    """Layers of two widths and of two classes."""
    torch.manual_seed(0)
    widths = (8, 16, 8, 16)
    layers = [nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 4)) for width in widths]
    return nn.Sequential(*layers, nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True))


def test_layers_of_several_structures_are_compiled_each_once() -> None:
    def use(model: nn.Module) -> Any:
        x = torch.randn(2, 3, 4, requires_grad=True)
        outputs = []
        for _ in range(2):
            outputs.append(model(x))
            outputs[-1].sum().backward()
        return outputs, gradients(model)

    compiled = CompileCounterWithBackend("aot_eager")
    assert_as_plain(mixed(), use, rtol=1e-6, atol=1e-6, layers="", compile=compiled)
    assert compiled.frame_count == 3


def test_the_default_backend_gives_the_same_training() -> None:
    actual = train_streamed(tiny_gpt(2), steps=3, compile=True, **LAYERS)
    torch.testing.assert_close(actual.losses, plain().losses, rtol=1e-5, atol=0)
    torch.testing.assert_close(actual.norms, plain().norms, rtol=1e-5, atol=0)
    torch.testing.assert_close(actual.first_gradients, plain().first_gradients, rtol=1e-4, atol=1e-7)


# The user's own torch.compile

#: PyTorch's, of a tensor that goes from one graph to the next.
TORCHS_OWN_WARNING = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")


def of_tokens(model: nn.Module, tokens: torch.Tensor, loss_of: Any = F.cross_entropy) -> torch.Tensor:
    return loss_of(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def layers_in_place(model: nn.Module) -> None:
    for block in model.transformer.h:
        block.compile(backend="eager")


def layers(model: nn.Module) -> None:
    for number, block in enumerate(model.transformer.h):
        model.transformer.h[number] = torch.compile(block, backend="eager")


def around(model: nn.Module) -> LossOf:
    compiled = torch.compile(model, backend="eager")
    return lambda _, step: language_loss(compiled, step)


def loss_alone(model: nn.Module) -> LossOf:
    cross_entropy = torch.compile(F.cross_entropy, backend="eager")
    return lambda model, step: of_tokens(model, batch(step), cross_entropy)


def all_but_the_data(model: nn.Module) -> LossOf:
    def forward_and_backward(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        loss = of_tokens(model, tokens)
        loss.backward()
        streamer.clip_grad_norm_(model, 1e9)
        return loss.detach().requires_grad_()  # the loop goes backward once more, through nothing

    compiled = torch.compile(forward_and_backward, backend="eager")
    return lambda model, step: compiled(model, batch(step))


def train_compiled(
    compile: Callable[[nn.Module], LossOf | None], *, is_wrapped: bool, **options: Any
) -> History:
    """Three steps of what the user compiles before or after `wrap`; names as if nothing had been compiled."""
    model, loss_of = tiny_gpt(2), None
    if not is_wrapped:
        loss_of = compile(model)
    streamer.wrap(model, device="cpu", **options)
    if is_wrapped:
        loss_of = compile(model)
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
        (layers_in_place, True, "recompute"),
        (layers, False, "keep"),
        (loss_alone, True, "recompute"),
        (all_but_the_data, True, "recompute"),
    ],
)
def test_what_users_compile_trains_as_plain(compile: Any, is_wrapped: bool, activations: str) -> None:
    actual = train_compiled(compile, is_wrapped=is_wrapped, activations=activations, **LAYERS)
    assert_parity(actual, plain())
    assert_same(actual, uncompiled(activations))


def test_a_model_compiled_whole_is_told_why_not() -> None:
    def use(model: nn.Module) -> None:
        torch.compile(model, backend="eager", fullgraph=True)(TOKENS)

    match = r"wrap\(compile=True\) compiles layers"
    assert_refused(tiny_gpt(2), use, match, torch._dynamo.exc.Unsupported, **LAYERS)


# What cannot be compiled


def no_forward(graph: Any, inputs: Any) -> Any:
    raise InductorError(RuntimeError("no working C++ compiler"), None)


def no_backward(graph: Any, inputs: Any) -> Any:
    raise InductorError(RuntimeError("no backward of this"), None)


@pytest.mark.parametrize(("grad", "activations"), [(True, "recompute"), (False, "keep")])
def test_a_forward_that_fails_to_compile_says_what_to_do(grad: bool, activations: str) -> None:
    match = r"fails on layer 'transformer\.h\.0', a Block: wrap with compile=False .*no working C"
    with (
        streamed(tiny_gpt(), compile=no_forward, activations=activations, **LAYERS) as model,
        torch.set_grad_enabled(grad),
        pytest.raises(RuntimeError, match=match),
    ):
        model(TOKENS)


ONLY_FORWARD = aot_autograd(fw_compiler=lambda graph, inputs: graph, bw_compiler=no_backward)


def test_a_backward_that_fails_to_compile_says_what_to_do() -> None:
    with streamed(tiny_gpt(), compile=ONLY_FORWARD, **LAYERS) as model:
        with pytest.raises(RuntimeError, match="wrap with compile=False"):
            model(TOKENS).sum().backward()
        # without gradients nothing of backward is compiled
        with torch.no_grad():
            assert torch.equal(model(TOKENS), tiny_gpt()(TOKENS))


def test_an_error_of_the_layer_itself_comes_through() -> None:
    class Picky(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.shape[0] > 2:
                raise ValueError("at most two rows")
            return super().forward(x)

    with streamed(nn.Sequential(Picky(4, 4), Picky(4, 4)), layers="", compile="aot_eager") as model:
        with pytest.raises(ValueError, match="at most two rows"):
            model(torch.ones(3, 4))
        model(torch.ones(2, 4)).sum().backward()


@pytest.mark.parametrize(
    ("compile", "match"),
    [
        (None, "use True, False, or a backend of torch.compile"),
        ("nonsense", "compile='nonsense' is not a backend of torch.compile; there are: .*inductor"),
    ],
)
def test_what_is_no_backend_is_refused(compile: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        streamer.wrap(tiny_gpt(), device="cpu", compile=compile, **LAYERS)
