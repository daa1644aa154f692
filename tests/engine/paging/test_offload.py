"""Saved inputs that wait in host memory: plain PyTorch's results, and a device that does not fill."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from transformers import T5Config, T5ForConditionalGeneration

import streamer
from streamer.backends.base import Event, Lane
from streamer.backends.thread import ThreadBackend
from streamer.engine.handle import wrapped
from streamer.engine.paging.saved_inputs import OUTGOING, HostPlaces
from streamer.engine.schedule import op as ops
from streamer.engine.schedule.op import OpKind
from streamer.planner.measure import Tracker
from tests.engine.layer.test_micro_batches import WIDTH, Layer
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


def gpt() -> nn.Module:
    return tiny_gpt(LAYERS, dropout=0.1)


@cache
def plain() -> History:
    return train_plain(gpt(), max_norm=0.5, steps=3)


@pytest.mark.parametrize("num_slots", [1, 2, LAYERS])
def test_training_equals_plain_pytorch(num_slots: int) -> None:
    assert_parity(train_streamed(gpt(), max_norm=0.5, steps=3, num_slots=num_slots, **OFFLOAD), plain())


class Stack(nn.Module):
    """``between`` is what happens to hidden states on their way to the next layer."""

    def __init__(
        self, between: Callable[[torch.Tensor], torch.Tensor] = lambda x: x, *, layers: int = LAYERS
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([Layer() for _ in range(layers)])
        self.between = between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(self.between(x))
        return x


def stack_loss(model: nn.Module, step: int) -> torch.Tensor:
    x = torch.randn(64, 16, WIDTH, generator=torch.Generator().manual_seed(step), requires_grad=True)
    return model(x * 1).square().mean()


class TakesTwo(Layer):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * y


class TwoViews(Stack):
    """Each layer is given two views of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([TakesTwo() for _ in range(LAYERS)])

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
    "transposed": lambda: Stack(lambda x: x.transpose(1, 2).contiguous().transpose(1, 2)),
    "with gaps": lambda: Stack(lambda x: torch.cat([x, x], dim=-1)[..., 3 : 3 + WIDTH]),
    "expanded": lambda: Stack(lambda x: x[:1].expand(2, -1, -1)),
    "negated when read": lambda: Stack(lambda x: torch._neg_view(x * 2)),
    "two views": TwoViews,
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


def test_the_last_inputs_of_a_forward_are_not_fetched() -> None:
    with streamed(gpt(), **OFFLOAD) as model:
        language_loss(model, 0).backward()
        ops = ops_of(model)
        assert ops[OpKind.OFFLOAD_INPUT] == LAYERS
        assert ops[OpKind.FETCH_INPUT] == LAYERS - OUTGOING


def test_what_several_layers_are_given_leaves_once() -> None:
    with streamed(t5(), **OFFLOAD) as model:
        t5_loss(model, 0).backward()
        # hidden states; in the decoder the encoder's output; and the biases that first layers make and the
        # others hand on, of the encoder's attention and of the decoder's two
        assert ops_of(model)[OpKind.OFFLOAD_INPUT] == (2 + 1) + (4 + 1 + 2)


def peaks(layers: int, activations: str) -> tuple[int, int, int]:
    """Of one step: bytes of the tensors that it makes, of those that wait for backward, of host memory."""
    with streamed(Stack(layers=layers), activations=activations) as model:
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


class AddsTwice(torch.Tensor):
    def __add__(self, other: torch.Tensor) -> torch.Tensor:
        return super().__add__(2 * other)


@pytest.mark.parametrize("activations", ["recompute", "recompute+offload"])
def test_inputs_and_a_loss_of_a_subclass(activations: str) -> None:
    model = Stack(lambda x: x.as_subclass(AddsTwice))
    options = {"loss_of": stack_loss, "steps": 1}
    assert_parity(train_streamed(model, activations=activations, **options), train_plain(model, **options))


def test_an_input_that_is_written_while_it_leaves_is_refused() -> None:
    model = Stack()
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

    expected = gradient(Stack(), is_written=False)
    with streamed(Stack(), **OFFLOAD) as mine:
        assert torch.equal(gradient(mine, is_written=True), expected)


@pytest.mark.parametrize("later", range(4))
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

    expected = gradients(Stack())
    with streamed(Stack(), **OFFLOAD) as mine:
        assert all(map(torch.equal, gradients(mine), expected))


def host_places(model: nn.Module) -> int:
    return streamer.stats(model).host_bytes.get("saved inputs", 0)


class Watched(ThreadBackend):
    """Notes what is submitted: lane, waits, bytes, end."""

    def __init__(self) -> None:
        super().__init__()
        self.submitted: list[tuple[Lane, Sequence[Event], int, Event]] = []

    def queue(self, lane: Lane, work: Callable[[], object], waits: Sequence[Event], nbytes: int) -> Event:
        event = super().queue(lane, work, waits, nbytes)
        self.submitted.append((lane, waits, nbytes, event))
        return event

    @contextmanager
    def computing(self, waits: Sequence[Event]) -> Iterator[Event]:
        with super().computing(waits) as event:
            yield event
        self.submitted.append((Lane.COMPUTE, waits, 0, event))

    def are_awaited(self, lane: Lane, nbytes: int) -> list[bool]:
        """For each copy of ``nbytes`` on ``lane``, which must begin after all that COMPUTE was given before
        it, whether COMPUTE waits for it."""
        awaited = {id(wait) for on, waits, _, _ in self.submitted if on is Lane.COMPUTE for wait in waits}
        result = []
        last = None
        for on, waits, size, end in self.submitted:
            if (on, size) == (lane, nbytes):
                assert last in waits
                result.append(id(end) in awaited)
            last = end if on is Lane.COMPUTE else last
        return result


def test_memory_of_compute_is_copied_between_its_ops() -> None:
    """On the CPU nothing would go wrong otherwise: nobody else takes memory that a thread still holds."""
    backend, nbytes = Watched(), 3 * 3 * WIDTH * 4
    with streamed(Stack(), **OFFLOAD, backend=backend) as mine:
        hidden = [torch.randn(3, 3, WIDTH, requires_grad=True) * 1]
        for layer in mine.layers:
            hidden.append(layer(hidden[-1]))
        assert backend.are_awaited(Lane.D2H, nbytes) == [True] * (LAYERS - OUTGOING) + [False] * OUTGOING
        # the input of layer 2 comes back, and is given up for that of layer 0
        torch.autograd.grad(hidden[5].sum(), hidden[3])
        torch.autograd.grad(hidden[1].sum(), hidden[0])
        assert backend.are_awaited(Lane.H2D, nbytes) == [True, True]


def test_places_are_used_again_and_grow_with_the_batch() -> None:
    held = []
    with streamed(Stack(), **OFFLOAD) as mine:
        for size, with_backward in [(4, True), (2, True), (4, False), (4, True), (8, True), (2, True)]:
            loss = mine(torch.randn(size, 3, WIDTH, requires_grad=True) * 1).sum()
            if with_backward:
                loss.backward()
            del loss
            held.append(host_places(mine))
    assert held == [LAYERS * rows * 3 * WIDTH * 4 for rows in (4, 4, 4, 4, 8, 8)]


def test_a_place_that_is_too_small_is_given_back_before_a_larger_one_is_made() -> None:
    events: list[tuple[str, int]] = []

    def allocate(nbytes: int) -> torch.Tensor:
        events.append(("made", nbytes))
        return torch.empty(nbytes, dtype=torch.uint8)

    places = HostPlaces(allocate, lambda place, buffer: events.append((f"{place} back", buffer.nbytes)))
    assert [places.take(4), places.take(2)] == [0, 1]
    places.release(0)
    places.release(1)
    assert [places.take(1), places.take(8), places.nbytes] == [1, 0, 10]
    assert events == [("made", 4), ("made", 2), ("0 back", 4), ("made", 8)]


def test_backward_twice_and_two_graphs_in_any_order() -> None:
    def gradients(model: nn.Module) -> list[torch.Tensor]:
        x, y = (torch.linspace(0, 1, 96).view(2, 3, WIDTH).requires_grad_() for _ in range(2))
        first, second = model(x * 2).sum(), model(y * 3).square().sum()
        first.backward(retain_graph=True)
        second.backward()
        first.backward()
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            second.backward()
        return [x.grad, y.grad, *(param.grad.clone() for param in model.parameters())]

    expected = gradients(Stack())
    with streamed(Stack(), **OFFLOAD) as mine:
        for actual, wanted in zip(gradients(mine), expected, strict=True):
            torch.testing.assert_close(actual, wanted)


def drop_gradients(model: nn.Module) -> None:
    model.zero_grad()


@torch.no_grad()
def infer(model: nn.Module) -> None:
    model(torch.randn(2, 3, WIDTH))


@pytest.mark.parametrize("go_on", [drop_gradients, infer])
def test_after_a_backward_that_fails_nothing_is_held(go_on: Callable[[nn.Module], object]) -> None:
    def fail(*_: object) -> None:
        raise ValueError("no gradient")

    with streamed(Stack(), **OFFLOAD) as mine:
        hook = mine.layers[3].linear.register_full_backward_hook(fail)
        with hook, pytest.raises(ValueError, match="no gradient"):
            mine(torch.randn(2, 3, WIDTH)).sum().backward()
        go_on(mine)
        stats = streamer.stats(mine)
        assert stats.device_bytes_now == sum(stats.device_bytes.values())


def test_an_interrupt_while_an_input_leaves_takes_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> Event:
        raise KeyboardInterrupt

    with streamed(Stack(), **OFFLOAD) as mine:
        x = torch.randn(2, 3, WIDTH, requires_grad=True) * 1
        for name in ("offload_input", "saved_input"):
            with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
                patch.setattr(ops, name, interrupted)
                mine(x)
        mine(x).sum().backward()
        assert host_places(mine) == LAYERS * x.nbytes


def test_too_little_host_memory_is_said_before_it_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was saved before is given up, and training goes on when there is room."""
    model = nn.ModuleDict({"layers": nn.ModuleList([TakesTwo()])})
    match = "beside 384 bytes .* needs 384 bytes and has 116 bytes .*: take a"
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
        (["keep"], r"activations=\[...\] has 1 entries, and there are 5 layers: give one for each"),
        (["keep"] * 4 + ["drop"], r"activations\[4\]='drop' is unknown: use one of 'recompute', "),
        (lambda i: None, r"activations\(0\)=None is unknown: use one of 'recompute', "),
    ],
)
def test_wrong_policies_by_layer(activations: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        streamer.wrap(gpt(), device="cpu", activations=activations)
