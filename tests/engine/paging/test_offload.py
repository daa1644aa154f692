"""Saved inputs that wait in host memory: plain PyTorch's results, and a device that does not fill."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import nn
from transformers import T5Config, T5ForConditionalGeneration

import streamer
from streamer.backends.thread import ThreadBackend
from streamer.engine.handle import wrapped
from streamer.engine.paging.saved_inputs import OUTGOING
from streamer.engine.schedule.op import OpKind
from streamer.planner.measure import Tracker
from tests.models import WIDTH, Layer, Layers, numbers
from tests.reference import (
    VOCAB,
    History,
    assert_parity,
    assert_same,
    batch,
    language_loss,
    streamed,
    tiny_gpt,
    train_plain,
    train_streamed,
)

LAYERS = 5
OFFLOAD = {"activations": "recompute+offload"}
gpt = partial(tiny_gpt, LAYERS, dropout=0.1)


@cache
def plain() -> History:
    return train_plain(gpt(), max_norm=0.5, steps=3)


@pytest.mark.parametrize("num_slots", [1, LAYERS])
def test_training_equals_plain_pytorch(num_slots: int) -> None:
    assert_parity(train_streamed(gpt(), max_norm=0.5, steps=3, num_slots=num_slots, **OFFLOAD), plain())


class Between(Layers):
    """``between`` is what happens to hidden states on their way to the next layer."""

    def __init__(self, between: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__(count=LAYERS)
        self.between = between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(self.between(x))
        return x


def stack(layers: int = LAYERS) -> Layers:
    return Layers(count=layers)


def stack_loss(model: nn.Module, step: int) -> torch.Tensor:
    x = numbers(64, 16, WIDTH, seed=step).requires_grad_()
    return model(x * 1).square().mean()


class TakesTwo(Layer):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * y


class TwoViews(Layers):
    """Each layer is called with two views of one tensor."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            both = torch.stack([x, x.tanh()])
            x = layer(both[0], both[1])
        return x


def t5() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 4, "num_heads": 4}
    return T5ForConditionalGeneration(
        T5Config(vocab_size=VOCAB, decoder_start_token_id=0, pad_token_id=0, **sizes)
    )


def t5_loss(model: nn.Module, step: int) -> torch.Tensor:
    tokens = batch(step)
    result: torch.Tensor = model(input_ids=tokens, labels=tokens).loss
    return result


STACKS: dict[str, Callable[[], nn.Module]] = {
    "with gaps": lambda: Between(lambda x: torch.cat([x, x], dim=-1)[..., 3 : 3 + WIDTH]),
    "expanded": lambda: Between(lambda x: x[:1].expand(2, -1, -1)),
    "two views": lambda: TwoViews(TakesTwo, count=LAYERS),
}
CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "updates in backward": (gpt, {"update": "backward", "clip": False}),
    "micro-batches": (gpt, {"micro_batch_size": 1}),
    "bf16": (gpt, {"dtype": torch.bfloat16}),
    "T5": (t5, {"loss_of": t5_loss}),
    **{name: (make, {"loss_of": stack_loss}) for name, make in STACKS.items()},
}


@pytest.mark.parametrize("name", CASES)
def test_it_changes_nothing(name: str) -> None:
    make, options = CASES[name]
    model = make()
    assert_same(
        train_streamed(model, steps=2, **OFFLOAD, **options), train_streamed(model, steps=2, **options)
    )


def ops_of(model: nn.Module) -> Counter[OpKind]:
    streamer.synchronize(model)
    return Counter(record.op.kind for record in wrapped(model).executor.issuer.trace.records())


def test_what_several_layers_are_given_leaves_once() -> None:
    with streamed(t5(), **OFFLOAD) as model:
        t5_loss(model, 0).backward()
        # hidden states; in the decoder the encoder's output; and the biases that first layers make and the
        # others hand on, of the encoder's attention and of the decoder's two
        assert ops_of(model)[OpKind.OFFLOAD_INPUT] == (2 + 1) + (4 + 1 + 2)


def peaks(layers: int, activations: str) -> tuple[int, int, int]:
    """Of one step: bytes of the tensors that it makes, of those that wait for backward, of host memory."""
    with streamed(stack(layers), activations=activations) as model:
        stack_loss(model, 0).backward()  # makes room in host memory
        with Tracker() as tracker:
            stack_loss(model, 0).backward()
        stats = streamer.stats(model)
        owned = sum(stats.device_bytes.values())
        assert stats.device_bytes_now == owned
        return tracker.peak, stats.device_bytes_peak - owned, stats.host_bytes.get("saved inputs", 0)


def test_the_device_does_not_fill_with_depth() -> None:
    saved = 64 * 16 * WIDTH * 4
    deep, shallow = peaks(24, "recompute"), peaks(8, "recompute")
    assert deep[1:] == (24 * saved, 0)
    assert deep[0] - shallow[0] >= 16 * saved
    deep, shallow = peaks(24, "recompute+offload"), peaks(8, "recompute+offload")
    # a layer keeps its random state, of 5 KB
    assert deep[0] - shallow[0] < 16 * saved / 10
    # those that leave, one that is used and one that comes; no layer's own is the user's, who has made it
    assert deep[1] == shallow[1] <= (OUTGOING + 2) * saved
    assert (deep[2], shallow[2]) == (24 * saved, 8 * saved)


def test_an_input_that_is_written_while_it_leaves_is_refused() -> None:
    model = stack()
    with streamed(model, **OFFLOAD) as mine:
        layers, x = mine.layers, torch.randn(2, 3, WIDTH)
        first = layers[0](x)
        second = layers[1](first)
        with torch.no_grad():
            first.add_(1)
        with pytest.raises(
            RuntimeError, match="modified by an inplace operation: an input of shape .2, 3, 16"
        ):
            second.sum().backward()


def test_an_input_that_is_written_when_it_has_left_is_the_one_that_was_saved() -> None:
    def gradient(model: Any, *, is_written: bool) -> torch.Tensor:
        first = model.layers[0](torch.ones(2, 3, WIDTH))
        x = first
        for layer in model.layers[1:]:
            x = layer(x)
        if is_written:
            with torch.no_grad():
                first.zero_()
        x.sum().backward()
        result: torch.Tensor = model.layers[1].linear.weight.grad
        return result

    expected = gradient(stack(), is_written=False)
    with streamed(stack(), **OFFLOAD) as mine:
        assert torch.equal(gradient(mine, is_written=True), expected)


@pytest.mark.parametrize("later", [0, 3])
def test_a_tensor_that_is_written_between_two_layers_leaves_again(later: int) -> None:
    """The first of them has it saved, and does not need it: no gradient goes through that."""

    def gradients(model: Any) -> list[torch.Tensor]:
        x = torch.linspace(-1, 1, 6 * WIDTH).view(2, 3, WIDTH).requires_grad_()
        hidden = x * 2
        aside = model.layers[0](hidden)
        for layer in model.layers[1 : 1 + later]:  # until it has left
            aside = layer(aside)
        with torch.no_grad():
            hidden.add_(1)
        model.layers[4](hidden).square().sum().backward()
        assert aside.grad_fn is not None
        return [x.grad, *(param.grad for param in model.layers[4].parameters())]

    expected = gradients(stack())
    with streamed(stack(), **OFFLOAD) as mine:
        assert all(map(torch.equal, gradients(mine), expected))


def host_places(model: nn.Module) -> int:
    return streamer.stats(model).host_bytes.get("saved inputs", 0)


def test_places_are_used_again_and_grow_with_the_batch() -> None:
    held = []
    with streamed(stack(), **OFFLOAD) as mine:
        for size, with_backward in [(4, True), (2, True), (4, False), (4, True), (8, True), (2, True)]:
            loss = mine(torch.randn(size, 3, WIDTH, requires_grad=True) * 1).sum()
            if with_backward:
                loss.backward()
            del loss
            held.append(host_places(mine))
    assert held == [LAYERS * rows * 3 * WIDTH * 4 for rows in (4, 4, 4, 4, 8, 8)]


def test_after_a_backward_that_fails_nothing_is_held() -> None:
    def fail(*_: object) -> None:
        raise ValueError("no gradient")

    with streamed(stack(), **OFFLOAD) as mine:
        hook = mine.layers[3].linear.register_full_backward_hook(fail)
        with hook, pytest.raises(ValueError, match="no gradient"):
            mine(torch.randn(2, 3, WIDTH)).sum().backward()
        mine.zero_grad()
        stats = streamer.stats(mine)
        assert stats.device_bytes_now == sum(stats.device_bytes.values())


def test_too_little_host_memory_is_said_before_it_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was saved before is given up, and training goes on when there is room."""
    model = nn.ModuleDict({"layers": nn.ModuleList([TakesTwo()])})
    match = "in addition to 384 bytes .* needs 384 bytes and has 116 bytes .*: take a"
    with streamed(model, layers="layers", **OFFLOAD) as mine:
        x = torch.randn(2, 3, WIDTH, requires_grad=True)
        monkeypatch.setattr(ThreadBackend, "host_available", lambda self: 500 - host_places(mine))
        for _ in range(2):
            with pytest.raises(MemoryError, match=match):
                mine["layers"][0](x * 1, x * 2)
        monkeypatch.undo()
        mine["layers"][0](x * 1, x * 2).sum().backward()
        assert host_places(mine) == 2 * 384
        stats = streamer.stats(mine)
        assert stats.device_bytes_now == sum(stats.device_bytes.values())


# --- by layer -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "activations",
    [
        ["keep", "recompute+offload", "recompute", "keep", "recompute"],
        lambda i: "keep" if i > 2 else "recompute",
    ],
    ids=["list", "function"],
)
def test_policies_by_layer(activations: Any) -> None:
    runs = []

    def count(*_: object) -> None:
        runs.append(1)

    with streamed(gpt(), activations=activations) as model:
        for block in model.transformer.h:
            block.mlp.register_forward_pre_hook(count)
        language_loss(model, 0).backward()
    kept = [activations(i) if callable(activations) else activations[i] for i in range(LAYERS)].count("keep")
    assert len(runs) == kept + 2 * (LAYERS - kept)
    assert_parity(train_streamed(gpt(), activations=activations, max_norm=0.5, steps=3), plain())


@pytest.mark.parametrize(
    ("activations", "match"),
    [
        (["keep"], r"activations=\[...\] has 1 entries, and there are 5 layers: use one for each"),
        (lambda i: None, r"activations\(0\)=None is unknown: use one of 'recompute', "),
    ],
)
def test_wrong_policies_by_layer(activations: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        streamer.wrap(gpt(), device="cpu", activations=activations)
