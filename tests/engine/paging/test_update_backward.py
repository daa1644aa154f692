"""``update="backward"``: the plain result, gradients of a few layers, and errors where it ends."""

from __future__ import annotations

import copy
import warnings
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import streamer
from tests.reference import History, assert_parity, assert_same, language_loss, streamed, tiny_gpt, train

gpt = partial(tiny_gpt, 4, width=20, dropout=0.1)


def in_backward(**options: Any) -> AbstractContextManager[nn.Module]:
    return streamed(gpt(), update="backward", **options)


def groups(model: nn.Module) -> list[dict[str, Any]]:
    params = list(model.parameters())
    return [
        {"params": [p for p in params if p.dim() > 1], "weight_decay": 0.2, "lr": 2e-3},
        {"params": [p for p in params if p.dim() <= 1], "weight_decay": 0.0, "betas": (0.8, 0.99)},
    ]


def trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> History:
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    history = train(model, optimizer, None, steps=6, schedule=schedule)
    history.first_gradients = {}  # nobody sees those of layers
    return history


@pytest.mark.parametrize(
    ("activations", "num_slots", "frozen"), [("keep", 1, False), ("recompute", 2, True), ("keep", 4, False)]
)
def test_it_is_the_plain_result(activations: str, num_slots: int, frozen: bool) -> None:
    plain = gpt()
    if frozen:
        plain.transformer.h[1].requires_grad_(False)
        plain.transformer.h[2].mlp.c_fc.bias.requires_grad_(False)
    with streamed(plain, update="backward", activations=activations, num_slots=num_slots) as model:
        actual = trained(model, streamer.AdamW(groups(model), lr=1e-3))
    assert_parity(actual, trained(plain, torch.optim.AdamW(groups(plain), lr=1e-3)))


@pytest.mark.parametrize(
    ("dtype", "state_dtype"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, "int8")],
    ids=str,
)
def test_it_equals_the_update_in_step_to_the_bit(dtype: torch.dtype, state_dtype: Any) -> None:
    def run(update: str) -> History:
        with streamed(gpt(), update=update, dtype=dtype) as model:
            return trained(model, streamer.AdamW(groups(model), lr=1e-3, state_dtype=state_dtype))

    assert_same(run("backward"), run("step"))


class Repeating(nn.Module):
    """Its first layer is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[1](self.layers[0](self.layers[0](x)))


def test_what_it_cannot_do_is_said() -> None:
    with in_backward() as model:
        loss = language_loss(model, 0)
        with pytest.raises(RuntimeError, match="needs its optimizer before backward"):
            loss.backward()
        optimizer = streamer.AdamW(model.parameters())
        before = copy.deepcopy(model.state_dict())
        language_loss(model, 0).backward()
        with pytest.raises(RuntimeError, match=r"needs all gradients before.*wrap with update='step'"):
            streamer.clip_grad_norm_(model, 1.0)
        with pytest.raises(RuntimeError, match=r"'transformer.h.3' was updated already .*update='step'"):
            language_loss(model, 1).backward()
        optimizer.step()
        optimizer.zero_grad()
        language_loss(model, 2).backward()
        with pytest.raises(RuntimeError, match=r"written \(by clip_grad_norm_\?\).*update='step' to clip"):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        optimizer.zero_grad()
        optimizer.step()
        language_loss(model, 2).backward()
        model.lm_head.weight.grad = model.lm_head.weight.grad * 0.5
        with pytest.raises(RuntimeError, match="gradients were written"):
            optimizer.step()
        optimizer.zero_grad()
        optimizer.step()
        language_loss(model, 3).backward()
        (model.transformer.wte.weight.square().sum() * 1e-3).backward()
        optimizer.step()
        after = model.state_dict()
        assert not any(torch.equal(after[name], before[name]) for name in before)
        with pytest.raises(RuntimeError, match=r"'transformer.h.1.*from outside of its layer.*update='step'"):
            model.transformer.h[1].mlp.c_fc.weight.square().sum().backward()
    with streamed(Repeating(), layers="layers", update="backward") as repeating:
        optimizer = streamer.AdamW(repeating.parameters())
        with pytest.raises(RuntimeError, match=r"'layers.0' was updated already .*takes part once in each"):
            repeating(torch.randn(2, 4)).sum().backward()
    with pytest.raises(ValueError, match=r"without which float16 overflows: .*dtype=torch.bfloat16"):
        in_backward(dtype=torch.float16).__enter__()
    with pytest.raises(ValueError, match="update='later' is unknown: use 'step' or 'backward'"):
        streamer.wrap(gpt(), device="cpu", update="later")


def test_a_gradient_put_into_a_layer_by_hand_is_refused() -> None:
    with in_backward() as model:
        optimizer = streamer.AdamW(model.parameters())
        weight = model.transformer.h[1].mlp.c_fc.weight
        for dtype in (torch.float32, torch.bfloat16):
            weight.grad = torch.ones_like(weight, dtype=dtype)
            with pytest.raises(RuntimeError, match=r"update='backward' has no room"):
                optimizer.step()


def spoiled(model: nn.Module, step: int, layer: int) -> torch.Tensor:
    """A loss whose gradient is infinite in ``layer`` and, from there on, in all layers before it."""

    def spoil(module: nn.Module, args: object, output: torch.Tensor) -> None:
        output.register_hook(lambda gradient: gradient * torch.inf)

    handle = model.transformer.h[layer].register_forward_hook(spoil)
    loss = language_loss(model, step)
    handle.remove()
    return loss


@pytest.mark.parametrize("skip_nonfinite", [True, False])
def test_layers_whose_gradient_is_not_finite_are_left_alone(skip_nonfinite: bool) -> None:
    with in_backward(dtype=torch.bfloat16) as model:
        optimizer = streamer.AdamW(model.parameters(), lr=1e-2, skip_nonfinite=skip_nonfinite)
        language_loss(model, 0).backward()
        optimizer.step()
        before = copy.deepcopy((model.state_dict(), optimizer.state_dict()["state"]))
        spoiled(model, 1, layer=2).backward()
        streamer.synchronize(model)
        names = "transformer.h.2, transformer.h.1, transformer.h.0, parameters outside of the layers"
        message = f"the gradient of {names} is NaN or infinite: not updated"
        assert streamer.stats(model).skipped_steps == 1, "said before the step is made"
        if skip_nonfinite:
            with pytest.warns(UserWarning) as said:
                optimizer.step()
            assert [str(warning.message) for warning in said] == [message]
            assert said[0].filename == __file__
        else:
            with pytest.raises(RuntimeError, match=message):
                optimizer.step()
        assert streamer.stats(model).skipped_steps == int(skip_nonfinite)
        after = model.state_dict()
        changed = {name for name in after if not torch.equal(after[name], before[0][name])}
        assert changed and all(name.startswith("transformer.h.3.") for name in changed)
        state = optimizer.state_dict()["state"]
        for number, (name, _) in enumerate(model.named_parameters()):
            assert state[number]["step"] == (2 if name.startswith("transformer.h.3.") else 1), name
        optimizer.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            language_loss(model, 3).backward()
            optimizer.step()
        assert streamer.stats(model).skipped_steps == int(skip_nonfinite)


def test_hyperparameters_changed_between_backward_and_step_are_an_error() -> None:
    with in_backward() as model:
        optimizer = streamer.AdamW(model.parameters(), lr=1e-3)
        language_loss(model, 0).backward()
        optimizer.param_groups[0]["lr"] = 5e-4
        for _ in range(2):
            with pytest.raises(RuntimeError, match="changed between backward and step"):
                optimizer.step()
        optimizer.param_groups[0]["lr"] = 1e-3
        optimizer.step()
        optimizer.param_groups[0]["lr"] = 5e-4
        language_loss(model, 1).backward()
        optimizer.step()


def two_optimizers(model: nn.Module, lr: float = 1e-2) -> list[streamer.AdamW]:
    """One for the weights of all units, one for their biases."""
    params = list(model.parameters())
    return [streamer.AdamW([p for p in params if (p.dim() > 1) is large], lr=lr) for large in (True, False)]


def test_a_layer_is_updated_by_all_its_optimizers_or_by_none() -> None:
    with in_backward(num_slots=4) as model:
        first, second = two_optimizers(model)
        second.param_groups[0]["lr"] = -1.0
        before = copy.deepcopy(model.state_dict())
        with pytest.raises(ValueError, match="lr=-1.0 is out of range"):
            language_loss(model, 0).backward()
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        assert {int(state["step"]) for state in first.state.values()} == {0}
        second.param_groups[0]["lr"] = 1e-2
        for optimizer in (first, second):
            optimizer.zero_grad()
        language_loss(model, 0).backward()
        for optimizer in (first, second):
            optimizer.step()
        shown = copy.deepcopy(gpt()).eval()
        shown.load_state_dict(model.state_dict())
        torch.testing.assert_close(language_loss(model.eval(), 1), language_loss(shown, 1))


def test_a_layer_waits_for_the_step_of_each_of_its_optimizers() -> None:
    with in_backward() as model:
        first, second = two_optimizers(model)
        for step in range(3):
            language_loss(model, step).backward()
            first.step()
            if step < 2:
                second.step()
        with pytest.raises(RuntimeError, match=r"updated already since the last step\(\) of its optimizer"):
            language_loss(model, 3).backward()
        succeeding = streamer.AdamW(second.param_groups[0]["params"], lr=1e-2)
        for step in (4, 5):
            language_loss(model, step).backward()
            first.step()
            succeeding.step()


def test_after_a_backward_that_fails_training_goes_on_when_gradients_are_dropped() -> None:
    with in_backward() as model:
        optimizer = streamer.AdamW(model.parameters(), lr=1e-3)

        def fail(*_: object) -> None:
            raise ValueError("a hook that fails")

        handle = model.transformer.h[1].mlp.c_fc.register_full_backward_hook(fail)
        for drop in (optimizer.zero_grad, model.zero_grad):
            with pytest.raises(ValueError, match="a hook that fails"):
                language_loss(model, 0).backward()
            drop()
        handle.remove()
        language_loss(model, 1).backward()
        optimizer.zero_grad()  # nothing has failed, and these layers have been updated
        with pytest.raises(RuntimeError, match="was updated already"):
            language_loss(model, 2).backward()
        optimizer.step()


def test_gradients_of_inputs_alone_update_nothing() -> None:
    with in_backward() as model:
        hidden = torch.randn(2, 16, 20, requires_grad=True)
        (gradient,) = torch.autograd.grad(model.transformer.h[0](hidden).sum(), hidden)
        assert gradient.any()
