"""Training a part of a model: what is frozen costs its loads and nothing else, and is never gone back to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import streamer
from models.gpt2 import GPT
from streamer.backends.thread import ThreadBackend
from streamer.engine.schedule.op import ROOT, Op, OpKind
from tests.models import WIDTH, Layer, Layers, numbers
from tests.reference import (
    POLICIES,
    assert_as_plain,
    assert_parity,
    in_turn,
    language_loss,
    streamed,
    tiny_gpt,
    train,
    train_plain,
    train_streamed,
)

LAYERS = 4
gpt = partial(tiny_gpt, LAYERS, 16, dropout=0.1, tied=False)


def trained(*names: str, inverted: bool = False) -> GPT:
    """A model of whose parameters those are trained that have one of ``names`` in theirs."""
    model = gpt()
    for name, param in model.named_parameters():
        param.requires_grad_(any(part in name for part in names) is not inverted)
    return model


#: The other way around: what is frozen.
frozen = partial(trained, inverted=True)


def early_exit(model: nn.Module, step: int) -> torch.Tensor:
    """The loss does not depend on the layers after the second."""
    outputs: list[torch.Tensor] = []
    handle = model.transformer.h[1].register_forward_hook(lambda module, args, output: outputs.append(output))
    language_loss(model, step)
    handle.remove()
    return outputs[0].square().mean()


def units(ops: Sequence[Op], kind: OpKind) -> set[int]:
    return {op.unit for op in ops if op.kind is kind and op.unit != ROOT}


CASES: dict[str, tuple[Callable[[], GPT], Callable[..., torch.Tensor], set[int], set[int]]] = {
    # what is trained, the loss, the layers that backward goes through, the layers that are updated
    "neither of them": (partial(frozen, "wte", "wpe", "h.0", "h.1"), language_loss, {2, 3}, {2, 3}),
    "not those in the middle": (partial(frozen, "h.1", "h.2"), language_loss, {0, 1, 2, 3}, {0, 3}),
    "the embeddings": (partial(trained, "wte", "wpe"), language_loss, {0, 1, 2, 3}, set()),
    "the head": (partial(trained, "lm_head", "ln_f"), language_loss, set(), set()),
    "one layer": (partial(trained, "h.2"), language_loss, {2, 3}, {2}),
    "biases": (partial(trained, "bias"), language_loss, {0, 1, 2, 3}, {0, 1, 2, 3}),
    "what an early exit needs": (partial(frozen, "wpe"), early_exit, {0, 1}, {0, 1}),
}


@pytest.mark.parametrize(("case", "activations"), in_turn(CASES, ["recompute", "keep"]))
def test_training_a_part(case: str, activations: str, issued: list[Op]) -> None:
    make, loss_of, gone_through, updated = CASES[case]
    model = make()
    expected = train_plain(model, loss_of=loss_of, steps=2)
    backend = ThreadBackend(poison=True)
    actual = train_streamed(model, loss_of=loss_of, steps=2, activations=activations, backend=backend)
    assert_parity(actual, expected)
    assert units(issued, OpKind.FORWARD) == {0, 1, 2, 3}
    assert units(issued, OpKind.BACKWARD) == gone_through
    assert units(issued, OpKind.OFFLOAD_GRAD) == units(issued, OpKind.STEP) == updated
    # no more leaves than what is trained
    sizes = {op.unit: op.nbytes for op in issued if op.kind is OpKind.OFFLOAD_GRAD}
    assert {unit: nbytes for unit, nbytes in sizes.items() if unit != ROOT} == {
        unit: sum(padded(p.numel()) * 4 for p in model.transformer.h[unit].parameters() if p.requires_grad)
        for unit in updated
    }


def padded(numel: int) -> int:
    return -(-numel // 32) * 32


@POLICIES
def test_frozen_layers_at_the_beginning_save_nothing(activations: str) -> None:
    """They are not gone back to: nothing of them is kept on the device."""
    kept = []
    for model in (frozen("wte", "wpe", "h.0", "h.1"), frozen("wte", "wpe"), trained("lm_head")):
        with streamed(model, activations=activations) as wrapped:
            loss = language_loss(wrapped, 0)
            stats = streamer.stats(wrapped)
            kept.append(stats.device_bytes_now - sum(stats.device_bytes.values()))
            loss.backward()
    half, all_of_it, nothing = kept
    assert half * 2 == all_of_it > 0
    assert nothing == 0


# --- requires_grad between steps ----------------------------------------------------------------------


def thawing(model: nn.Module, step: int) -> torch.Tensor:
    """Gradual unfreezing (ULMFiT) of what was wrapped trainable, the last layers first."""
    for index, layer in enumerate(model.transformer.h):
        layer.requires_grad_(index >= LAYERS - 1 - step)
    model.transformer.wte.requires_grad_(step > 2)
    return language_loss(model, step)


def freezing(model: nn.Module, step: int) -> torch.Tensor:
    model.transformer.wpe.requires_grad_(step < 1)
    for index, layer in enumerate(model.transformer.h):
        layer.requires_grad_(index >= step)
    return language_loss(model, step)


def frozen_with_a_gradient(model: nn.Module, step: int) -> torch.Tensor:
    """What is frozen after a first backward still has that one's gradient."""
    model.requires_grad_(True)
    if step % 2:
        return language_loss(model, step)
    language_loss(model, step + 100).backward()
    model.transformer.h[step % LAYERS].requires_grad_(False)
    model.transformer.h[0].mlp.c_fc.bias.requires_grad_(False)
    model.transformer.wpe.requires_grad_(False)
    return language_loss(model, step)


@pytest.mark.parametrize(
    ("loss_of", "activations"), [(thawing, "keep"), (freezing, "recompute"), (frozen_with_a_gradient, "keep")]
)
def test_what_was_wrapped_trainable_is_frozen_and_unfrozen_at_will(loss_of: Any, activations: str) -> None:
    expected = train_plain(gpt(tied=True), loss_of=loss_of, steps=4)
    actual = train_streamed(gpt(tied=True), loss_of=loss_of, steps=4, activations=activations)
    assert_parity(actual, expected)


def test_freezing_and_unfreezing_with_updates_on_landing() -> None:
    plain = gpt()
    expected = train(plain, torch.optim.AdamW(plain.parameters(), lr=1e-3), None, steps=4, loss_of=thawing)
    with streamed(gpt(), update="backward") as model:
        optimizer = streamer.AdamW(model.parameters(), lr=1e-3)
        actual = train(model, optimizer, None, steps=4, loss_of=thawing)
    actual.first_gradients = expected.first_gradients  # those of layers are used up when backward ends
    assert_parity(actual, expected)


def test_unfreezing_what_was_wrapped_frozen() -> None:
    """Evaluating does not need its gradient; training does."""
    name = "transformer.h.0.mlp.c_fc.weight"
    with streamed(frozen(name)) as model:
        param = model.get_parameter(name).requires_grad_(True)
        with torch.no_grad():
            language_loss(model, 0)
        match = rf"'{name}' was frozen.*set requires_grad before streamer\.wrap"
        with pytest.raises(ValueError, match=match):
            language_loss(model, 0).backward()
        param.requires_grad_(False)
        language_loss(model, 0).backward()


# --- models whose parts reach into one another --------------------------------------------------------


class Scaled(Layer):
    """A layer that uses a parameter of another module."""

    def __init__(self, scale: nn.Parameter) -> None:
        super().__init__()
        self.scale = [scale]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale[0]


def test_frozen_layers_that_use_a_trained_parameter_of_another_module() -> None:
    scale = nn.Parameter(torch.ones(WIDTH))
    model = Layers(lambda: Scaled(scale).requires_grad_(False))
    model.scale = scale

    def use(model: nn.Module) -> torch.Tensor:
        model(numbers(2, WIDTH)).sum().backward()
        return model.scale.grad

    # its parts are added in another order
    assert_as_plain(model, use, rtol=1e-5, atol=1e-7, layers="layers")
