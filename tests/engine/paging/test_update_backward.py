"""``update="backward"``: the plain result, gradients of a few layers, and errors where it ends."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import nn

import streamer
from models.gpt2 import GPT
from streamer.backends.base import Lane
from streamer.backends.thread import ThreadBackend
from streamer.engine.paging.handle import wrapped
from streamer.engine.schedule.op import Op
from tests.reference import VOCAB, History, assert_parity, assert_same, language_loss, streamed, train


@cache
def gpt(layers: int = 4) -> GPT:
    torch.manual_seed(0)
    return GPT(vocab_size=VOCAB, block_size=16, n_layer=layers, n_head=2, n_embd=20, dropout=0.1)


def groups(model: nn.Module) -> list[dict[str, Any]]:
    params = list(model.parameters())
    return [
        {"params": [p for p in params if p.dim() > 1], "weight_decay": 0.2, "lr": 2e-3},
        {"params": [p for p in params if p.dim() <= 1], "weight_decay": 0.0, "betas": (0.8, 0.99)},
    ]


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 6) -> History:
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    history = train(model, optimizer, None, steps=steps, schedule=schedule)
    history.first_gradients = {}  # nobody sees those of layers
    return history


def run(
    update: str = "backward",
    *,
    layers: int = 4,
    steps: int = 6,
    state_dtype: Any = torch.float32,
    **options: Any,
) -> History:
    with streamed(gpt(layers), layers="transformer.h", update=update, **options) as model:
        return trained(model, streamer.AdamW(groups(model), lr=1e-3, state_dtype=state_dtype), steps)


@pytest.mark.parametrize(
    ("activations", "num_slots"), [("recompute", 1), ("keep", 1), ("recompute", 2), ("keep", 4)]
)
def test_it_is_the_plain_result(activations: str, num_slots: int) -> None:
    reference = copy.deepcopy(gpt())
    expected = trained(reference, torch.optim.AdamW(groups(reference), lr=1e-3))
    assert_parity(run(activations=activations, num_slots=num_slots), expected)


@pytest.mark.parametrize(
    ("dtype", "state_dtype"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, "int8"),
    ],
    ids=str,
)
def test_it_equals_the_update_in_step_to_the_bit(dtype: torch.dtype, state_dtype: Any) -> None:
    options = {"dtype": dtype, "state_dtype": state_dtype}
    assert_same(run("backward", **options), run("step", **options))


def always(seconds: float) -> Callable[[], float]:
    return lambda: seconds


@pytest.mark.parametrize("lane", Lane, ids=str)
def test_a_slow_lane_changes_nothing(lane: Lane) -> None:
    """With more layers than the ring has buffers, so that each is used twice in a backward."""
    backend = ThreadBackend(delays={lane: always(0.004)}, poison=True)
    assert_same(run(backend=backend, layers=7, steps=3), undisturbed(7, 3))


@pytest.mark.parametrize("seed", range(4))
def test_random_delays_change_nothing(seed: int) -> None:
    draw = random.Random(seed)
    scale = {lane: draw.choice([0.0, 0.001, 0.004]) for lane in Lane}
    delays = {lane: partial(lambda lane: draw.random() * scale[lane], lane) for lane in Lane}
    backend = ThreadBackend(delays=delays, poison=True)
    activations = "keep" if seed % 2 else "recompute"
    actual = run(backend=backend, num_slots=1 + seed % 3, activations=activations, layers=7, steps=3)
    assert_same(actual, undisturbed(7, 3))


@cache
def undisturbed(layers: int, steps: int) -> History:
    return run("step", layers=layers, steps=steps)


def test_gradient_memory_does_not_grow_with_depth() -> None:
    layer = sum(param.nbytes for param in gpt().transformer.h[0].parameters())
    padded = {}
    for layers in (4, 8, 16):
        with streamed(gpt(layers), layers="transformer.h", update="backward") as model:
            optimizer = streamer.AdamW(model.parameters())
            language_loss(model, 0).backward()
            optimizer.step()
            held = streamer.stats(model).host_bytes
            padded[layers] = held["gradient staging"]
            root = wrapped(model).executor.root.layout
            assert held["gradients"] == root.grad_nbytes
            assert {k: v for k, v in held.items() if not k.startswith("exp")} == wrapped(model).planned.host
            assert all(param.grad is None for param in model.transformer.h.parameters())
    assert len(set(padded.values())) == 1
    assert 4 * layer <= padded[4] < 4.5 * layer


def test_golden_of_a_step_of_three_layers_through_two_slots(issued: list[Op]) -> None:
    with streamed(gpt(3), layers="transformer.h", update="backward") as model:
        optimizer = streamer.AdamW(model.parameters())
        for step in range(2):
            issued.clear()
            language_loss(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        step_ops = " ".join(map(str, issued))
    assert step_ops == (
        "rootF 0F@0 2UNSHARD@0 1F@1 2F@0 "
        "2B@0 2OFFLOAD_GRAD@1 2STEP 0UNSHARD@0 1B@1 1OFFLOAD_GRAD@0 1STEP 1UNSHARD@1 "
        "0B@0 0OFFLOAD_GRAD@1 0STEP 0UNSHARD@0 SYNC SYNC rootCOLLECT rootOFFLOAD_GRAD rootSTEP rootUNSHARD"
    )


class Repeating(nn.Module):
    """Its first layer is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[1](self.layers[0](self.layers[0](x)))


def test_what_it_cannot_do_is_said() -> None:
    def model_of(**options: Any) -> Any:
        return streamed(gpt(), layers="transformer.h", update="backward", **options)

    with model_of() as model:
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
        with pytest.raises(RuntimeError, match="updates layers by streamer.AdamW, not SGD"):
            torch.optim.SGD(model.parameters(), lr=0.1).step()
        with pytest.raises(RuntimeError, match=r"'transformer.h.1.*from outside of its layer.*update='step'"):
            model.transformer.h[1].mlp.c_fc.weight.square().sum().backward()
    with streamed(Repeating(), layers="layers", update="backward") as repeating:
        optimizer = streamer.AdamW(repeating.parameters())
        with pytest.raises(RuntimeError, match=r"'layers.0' was updated already .*takes part once in each"):
            repeating(torch.randn(2, 4)).sum().backward()
    with pytest.raises(ValueError, match=r"without which float16 overflows: .*dtype=torch.bfloat16"):
        model_of(dtype=torch.float16).__enter__()
    with pytest.raises(ValueError, match="update='later' is unknown: use 'step' or 'backward'"):
        streamer.wrap(gpt(), layers="transformer.h", device="cpu", update="later")


def test_a_gradient_put_into_a_layer_by_hand_is_refused() -> None:
    with streamed(gpt(), layers="transformer.h", update="backward") as model:
        optimizer = streamer.AdamW(model.parameters())
        weight = model.transformer.h[1].mlp.c_fc.weight
        for dtype in (torch.float32, torch.bfloat16):
            weight.grad = torch.ones_like(weight, dtype=dtype)
            with pytest.raises(RuntimeError, match=r"update='backward' has no room"):
                optimizer.step()


def test_an_optimizer_that_is_gone_updates_nothing() -> None:
    with streamed(gpt(), layers="transformer.h", update="backward") as model:
        optimizer = streamer.AdamW(model.parameters())
        language_loss(model, 0).backward()
        optimizer.step()
        del optimizer
        with pytest.raises(RuntimeError, match="needs its optimizer"):
            language_loss(model, 1).backward()


def spoiled(model: nn.Module, step: int, layer: int) -> torch.Tensor:
    """A loss whose gradient is infinite in ``layer`` and, from there on, in all layers before it."""
    handle = model.transformer.h[layer].register_forward_hook(lambda m, i, out: _Infinite.apply(out))
    loss = language_loss(model, step)
    handle.remove()
    return loss


class _Infinite(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * torch.inf


@pytest.mark.parametrize("skip_nonfinite", [True, False])
def test_layers_whose_gradient_is_not_finite_are_left_alone(skip_nonfinite: bool) -> None:
    with streamed(gpt(), layers="transformer.h", update="backward", dtype=torch.bfloat16) as model:
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


def test_only_what_is_in_no_layer_is_not_finite() -> None:
    with streamed(gpt(), layers="transformer.h", update="backward") as model:
        optimizer = streamer.AdamW(model.parameters(), lr=1e-2)
        before = copy.deepcopy(model.state_dict())
        spoil = torch.zeros(64, 20).index_fill(0, torch.tensor(3), torch.nan)
        model.lm_head.weight.register_hook(lambda gradient: gradient + spoil)
        language_loss(model, 0).backward()
        with pytest.warns(UserWarning) as said:
            optimizer.step()
        expected = "the gradient of parameters outside of the layers is NaN or infinite: not updated"
        assert [str(warning.message) for warning in said] == [expected]
        after = model.state_dict()
        changed = {name for name in after if not torch.equal(after[name], before[name])}
        assert changed == {name for name in after if name.startswith("transformer.h.")}


def test_hyperparameters_changed_between_backward_and_step_are_an_error() -> None:
    with streamed(gpt(), layers="transformer.h", update="backward") as model:
        optimizer = streamer.AdamW(model.parameters(), lr=1e-3)
        language_loss(model, 0).backward()
        optimizer.param_groups[0]["lr"] = 5e-4
        with pytest.raises(RuntimeError, match="changed between backward and step"):
            optimizer.step()
        optimizer.step()
        language_loss(model, 1).backward()
        optimizer.step()


def test_an_older_optimizer_that_is_still_there_is_not_asked() -> None:
    with streamed(gpt(), layers="transformer.h", update="backward") as model:
        older = streamer.AdamW(model.parameters(), lr=1.0)
        optimizer = streamer.AdamW(model.parameters(), lr=1e-3)
        actual = trained(model, optimizer, steps=3)
        assert not older.state
    with streamed(gpt(), layers="transformer.h") as model:
        assert_same(actual, trained(model, streamer.AdamW(model.parameters(), lr=1e-3), steps=3))


def test_after_a_backward_that_fails_training_goes_on_when_gradients_are_dropped() -> None:
    with streamed(gpt(), layers="transformer.h", update="backward") as model:
        optimizer = streamer.AdamW(model.parameters(), lr=1e-3)

        def fail(gradient: torch.Tensor) -> None:
            raise ValueError("a hook that fails")

        handle = model.transformer.h[1].mlp.c_fc.weight.register_hook(fail)
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
    with streamed(gpt(), layers="transformer.h", update="backward") as model:
        hidden = torch.randn(2, 16, 20, requires_grad=True)
        (gradient,) = torch.autograd.grad(model.transformer.h[0](hidden).sum(), hidden)
        assert gradient.any()


def test_frozen_and_unused_parameters() -> None:
    plain = copy.deepcopy(gpt())
    plain.transformer.h[1].requires_grad_(False)
    plain.transformer.h[2].mlp.c_fc.bias.requires_grad_(False)
    reference = copy.deepcopy(plain)
    expected = trained(reference, torch.optim.AdamW(reference.parameters(), lr=1e-3))
    with streamed(plain, layers="transformer.h", update="backward") as model:
        actual = trained(model, streamer.AdamW(model.parameters(), lr=1e-3))
    assert_parity(actual, expected)
