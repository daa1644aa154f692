"""`clip_grad_norm_` returns what PyTorch's does on the gradients as they are, whatever happened to them."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import streamer
from streamer.backends.base import Lane
from streamer.backends.thread import ThreadBackend
from streamer.engine.handle import wrapped
from tests.reference import assert_trains_alike, language_loss, streamed, tiny_gpt

Clip = Callable[..., torch.Tensor]


#: Biases of 60, 20 and 80 elements leave padding between parameters, and 8-bit blocks that are not full.
gpt = partial(tiny_gpt, width=20)
#: With this eps the size of a gradient matters to Adam.
CALM = {"lr": 1e-2, "eps": 1.0, "tolerance": 1e-6}
LAYERS = {"layers": "transformer.h"}


def middle(model: nn.Module) -> nn.Parameter:
    """A weight of a layer."""
    return model.transformer.h[1].mlp.c_fc.weight


def put_in_place(model: nn.Module) -> None:
    middle(model).grad = torch.full((80, 20), 3.0)


CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "nothing": lambda model: None,
    "a second backward": lambda model: language_loss(model, 1).backward(),
    "scaled by hand": lambda model: middle(model).grad.mul_(100),
    "dropped": lambda model: setattr(middle(model), "grad", None),
    "replaced": put_in_place,
    "the root's scaled": lambda model: model.lm_head.weight.grad.mul_(100),
}


def a_row_of_the_data(model: nn.Module) -> None:
    middle(model).grad.data[5] *= 100


def a_row_of_the_array(model: nn.Module) -> None:
    gradient = middle(model).grad.detach()
    with torch.no_grad():
        if gradient.dtype == torch.bfloat16:
            gradient = gradient.view(torch.int16)
        gradient.numpy()[5] = 0


CHANGES |= {
    "a row of its .data scaled": a_row_of_the_data,
    "a row of its array set to zero": a_row_of_the_array,
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(
    ("num_slots", "dtype"), [(1, torch.float32), (2, torch.bfloat16), (2, torch.float16)]
)
def test_the_norm_is_that_of_the_gradients_as_they_are(
    change: str, num_slots: int, dtype: torch.dtype
) -> None:
    with streamed(gpt(), layers="transformer.h", num_slots=num_slots, dtype=dtype) as model:
        language_loss(model, 0).backward()
        untouched = streamer.clip_grad_norm_(model, float("inf"))
        CHANGES[change](model)
        gradients = [param.grad.float() for param in model.parameters() if param.grad is not None]
        expected = torch.nn.utils.get_total_norm(gradients)
        actual = streamer.clip_grad_norm_(model, float("inf"))
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=0)
        assert (actual != untouched) == (change != "nothing")


@pytest.mark.parametrize("read", [False, True])
def test_short_gradients_are_not_rounded_by_clipping(read: bool) -> None:
    """The update multiplies them in fp32, unless user code looks at them before: then, as in PyTorch."""
    with streamed(gpt(), layers="transformer.h", dtype=torch.bfloat16) as model:
        optimizer = streamer.AdamW(model.parameters(), betas=(0.5, 0.99))
        language_loss(model, 0).backward()
        params = [middle(model), model.transformer.wte.weight, model.transformer.ln_f.bias]
        gradients = [param.grad.float() for param in params]
        coefficient = 1e-3 / (streamer.clip_grad_norm_(model, 1e-3).item() + 1e-6)
        clipped = [coefficient * gradient for gradient in gradients]
        if read:
            clipped = [param.grad.float() for param in params]
        optimizer.step()
        for param, gradient in zip(params, clipped, strict=True):
            actual = optimizer.state[param]["exp_avg"]
            torch.testing.assert_close(actual, 0.5 * gradient, rtol=1e-6, atol=0)


@pytest.mark.parametrize("of", [middle, lambda model: model.transformer.wte.weight], ids=["layer", "root"])
def test_who_has_the_memory_of_a_gradient_writes_a_part_of_it_after_clipping(
    of: Callable[[nn.Module], nn.Parameter],
) -> None:
    """One that a sample of the gradient misses. It counts, as in PyTorch."""

    def loop(model: nn.Module, optimizer: Any, clip: Clip) -> None:
        language_loss(model, 0).backward()
        gradient = of(model).grad.data
        clip(1e-3)
        gradient[5] *= 1e4
        optimizer.step()

    assert_trains_alike(gpt(), loop, options=LAYERS, **CALM)


def test_a_nan_in_a_part_of_a_gradient_after_clipping_is_noticed() -> None:
    with streamed(gpt(), layers="transformer.h") as model:
        optimizer = streamer.AdamW(model.parameters(), skip_nonfinite=False)
        language_loss(model, 0).backward()
        for param, name in (
            (middle(model), r"transformer\.h\.1"),
            (model.transformer.wte.weight, r"'transformer\.wte\.weight'"),
        ):
            gradient = param.grad.data
            streamer.clip_grad_norm_(model, 1e-3)
            gradient[3, 4] = torch.nan
            with pytest.raises(RuntimeError, match=f"the gradient of {name} is NaN or infinite"):
                optimizer.step()
            gradient[3, 4] = 0


def test_a_norm_that_is_no_number_leaves_no_gradient_that_is_one() -> None:
    """As in PyTorch: whoever steps in spite of it sees that it went wrong."""

    def step(model: nn.Module, clip: Callable[[nn.Module], torch.Tensor]) -> dict[str, torch.Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        language_loss(model, 0).backward()
        with torch.no_grad():
            middle(model).grad[3, 4] = torch.nan
        assert clip(model).isnan()
        optimizer.step()
        return {name: weight.isnan() for name, weight in model.state_dict().items()}

    plain = gpt()
    expected = step(plain, lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
    assert all(spoilt.all() for spoilt in expected.values())
    with streamed(gpt(), layers="transformer.h") as model:
        actual = step(model, lambda model: streamer.clip_grad_norm_(model, 1.0))
    assert [name for name in expected if not torch.equal(actual[name], expected[name])] == []


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("max_norm", [1e-3, 1e9], ids=["clipped", "not clipped"])
def test_what_is_added_after_clipping_is_looked_at_too(max_norm: float, bad: float) -> None:
    """Also where layers alone are trained, so that the root's gradients say nothing, and where their norm was
    below the limit, so that no coefficient is still to be applied."""
    model = gpt().requires_grad_(False)
    model.transformer.h.requires_grad_(True)
    with streamed(model, layers="transformer.h") as mine:
        optimizer = streamer.AdamW(mine.parameters())
        before = copy.deepcopy(mine.state_dict())
        language_loss(mine, 0).backward()
        streamer.clip_grad_norm_(mine, max_norm)
        (language_loss(mine, 1) * bad).backward()
        with pytest.warns(UserWarning, match="is NaN or infinite.*this step is skipped"):
            optimizer.step()
        assert all(torch.equal(value, before[name]) for name, value in mine.state_dict().items())


def written_before(norm_type: float) -> Callable[..., None]:
    def trained(model: nn.Module, optimizer: torch.optim.Optimizer, clip: Clip) -> None:
        language_loss(model, 0).backward()
        with torch.no_grad():
            middle(model).grad.add_(1.0)
        clip(1e-2, norm_type)
        optimizer.step()

    return trained


def put_in_place_after(model: nn.Module, optimizer: torch.optim.Optimizer, clip: Clip) -> None:
    language_loss(model, 0).backward()
    clip(1e-2)
    put_in_place(model)
    optimizer.step()


def clipped_again(model: nn.Module, optimizer: torch.optim.Optimizer, clip: Clip) -> None:
    for step in range(2):
        language_loss(model, step).backward()
        optimizer.step()
        clip(1e-2)
        optimizer.step()
        optimizer.zero_grad()


def joined(join: Callable[[nn.Module], None]) -> Callable[..., None]:
    def trained(model: nn.Module, optimizer: torch.optim.Optimizer, clip: Clip) -> None:
        language_loss(model, 0).backward()
        clip(1e-2)
        optimizer.step()
        join(model)
        clip(1e-2)
        optimizer.step()

    return trained


def one_layer_alone(model: nn.Module) -> None:
    model.transformer.h[0](torch.linspace(-1, 1, 80).view(1, 4, 20)).square().sum().backward()


def twice_and_added(model: nn.Module, optimizer: object, clip: Clip) -> list[torch.Tensor]:
    language_loss(model, 0).backward()
    norms = [clip(1.0), clip(0.5)]
    language_loss(model, 1).backward()
    norms.append(clip(1e9))
    return [*norms, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


#: Loops, and the seconds by which each op of a lane is delayed.
LOOPS: dict[str, tuple[Callable[..., Any], dict[Lane, float]]] = {
    "gradients are written before": (written_before(2.0), {}),
    "gradients are written before a norm of another kind": (written_before(float("inf")), {}),
    "a gradient that is put in place after is not clipped": (put_in_place_after, {}),
    "twice, then a backward adds": (twice_and_added, {}),
    # clipping waits for an update under way, which still reads the gradients
    "clipped again": (clipped_again, dict.fromkeys(Lane, 0.004)),
    "a gradient is replaced": (joined(put_in_place), {Lane.HOST: 0.02}),
    "one layer goes backward": (joined(one_layer_alone), {Lane.HOST: 0.02}),
}


@pytest.mark.parametrize("name", LOOPS)
def test_loops_that_clip_are_those_of_pytorch(name: str) -> None:
    loop, seconds = LOOPS[name]
    backend = ThreadBackend(delays={lane: lambda delay=delay: delay for lane, delay in seconds.items()})
    assert_trains_alike(gpt(), loop, options=LAYERS | {"backend": backend}, **CALM)


def test_a_coefficient_that_is_not_a_number_is_gone_with_its_gradients() -> None:
    with streamed(gpt(), layers="transformer.h") as model:
        optimizer = streamer.AdamW(model.parameters())
        (language_loss(model, 0) * float("nan")).backward()
        streamer.clip_grad_norm_(model, 1.0)
        with pytest.warns(UserWarning, match="this step is skipped"):
            optimizer.step()
        optimizer.zero_grad()
        before = model.lm_head.weight.detach().clone()
        model.lm_head(torch.ones(1, 20)).sum().backward()  # no layer takes part
        optimizer.step()
        streamer.synchronize(model)
        assert not torch.equal(model.lm_head.weight, before)
        assert streamer.stats(model).skipped_steps == 1


@pytest.mark.parametrize("norm_type", [1.0, 3, "inf", -float("inf"), 0.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_norms_other_than_the_second(norm_type: Any, dtype: torch.dtype) -> None:
    with streamed(gpt(), layers="transformer.h", dtype=dtype) as model:
        language_loss(model, 0).backward()
        gradients = [param.grad.float().clone() for param in model.parameters()]
        for scale in (1.0, 0.25):  # what an earlier clipping has left to be applied counts
            wrapped(model).executor.gradients.rescale(scale)
            scaled = [gradient * scale for gradient in gradients]
            expected = torch.nn.utils.get_total_norm(scaled, float(norm_type))
            actual = streamer.clip_grad_norm_(model, 1e9, norm_type)
            torch.testing.assert_close(actual, expected, rtol=1e-5, atol=0)


def test_it_takes_the_parameters_of_a_model_and_no_part_of_them() -> None:
    with streamed(gpt(), layers="transformer.h") as model:
        language_loss(model, 0).backward()
        norm = streamer.clip_grad_norm_(model, 1e9)
        assert torch.equal(streamer.clip_grad_norm_(model.parameters(), 0.5), norm)
        assert streamer.clip_grad_norm_(model, 1e9) == pytest.approx(0.5, rel=1e-4)
        layers = model.transformer.h.parameters()
        for some, match in (
            (layers, "all of its parameters"),
            ([], "all of its"),
            (nn.Linear(1, 1).parameters(), "no wrapped"),
        ):
            with pytest.raises(ValueError, match=match):
                streamer.clip_grad_norm_(some, 1.0)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_norm_that_is_not_finite(value: float) -> None:
    with streamed(gpt(), layers="transformer.h") as model:
        (language_loss(model, 0) * value).backward()
        assert not torch.isfinite(streamer.clip_grad_norm_(model, 1.0))
        with pytest.raises(RuntimeError, match=r"norm of the gradients is .*error_if_nonfinite=False"):
            streamer.clip_grad_norm_(model, 1.0, error_if_nonfinite=True)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", ["a layer", "the root"])
def test_a_step_that_is_not_finite_changes_nothing(value: float, where: str) -> None:
    with streamed(gpt(), layers="transformer.h", dtype=torch.bfloat16) as model:
        optimizer = streamer.AdamW(model.parameters(), lr=1e-2)
        language_loss(model, 0).backward()
        optimizer.step()
        before = copy.deepcopy((model.state_dict(), optimizer.state_dict()["state"]))
        weight = model.transformer.h[1].ln_1.weight if where == "a layer" else model.lm_head.weight
        weight.grad.view(-1)[3] = value
        with pytest.warns(UserWarning, match="this step is skipped, nothing was updated"):
            optimizer.step()
        after = model.state_dict(), optimizer.state_dict()["state"]
        torch.testing.assert_close(after, before, rtol=0, atol=0)
        assert streamer.stats(model).skipped_steps == 1
        strict = streamer.AdamW(model.parameters(), lr=1e-2, skip_nonfinite=False)
        with pytest.raises(RuntimeError, match="nothing was updated; AdamW.skip_nonfinite=True"):
            strict.step()
        torch.testing.assert_close(model.state_dict(), before[0], rtol=0, atol=0)
        strict.zero_grad()
        language_loss(model, 1).backward()
        strict.step()
        assert not torch.equal(model.state_dict()["lm_head.weight"], before[0]["lm_head.weight"])


def test_a_step_reads_the_device_once(monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[str] = []
    for name in ("tolist", "item", "__float__", "__bool__"):
        read = getattr(torch.Tensor, name)

        def counted(self: torch.Tensor, name: str = name, read: Any = read) -> Any:
            reads.append(name)
            return read(self)

        monkeypatch.setattr(torch.Tensor, name, counted)
    with streamed(gpt()) as model:
        optimizer = streamer.AdamW(model.parameters())
        for step in range(3):
            language_loss(model, step).backward()
            reads.clear()
            streamer.clip_grad_norm_(model, 1e-3)
            optimizer.step()
            assert reads == ["tolist"]
            optimizer.zero_grad()
        # what is written after clipping is read again
        language_loss(model, 3).backward()
        streamer.clip_grad_norm_(model, 1e-3)
        model.lm_head.weight.grad[0, 0] = float("nan")
        with pytest.warns(UserWarning, match="NaN or infinite"):
            optimizer.step()
        assert streamer.stats(model).skipped_steps == 1


def test_the_norm_of_many_gradients_is_not_rounded_away() -> None:
    # torch.linalg.vector_norm adds up the 4 million squares of a CPU tensor one after another
    plain = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(2)))
    with streamed(plain, layers="") as model:
        model(torch.randn(64, 2048)).square().mean().backward()
        squares = sum(float(param.grad.double().square().sum()) for param in model.parameters())
        norm = float(streamer.clip_grad_norm_(model, 1.0))
    assert norm == pytest.approx(math.sqrt(squares), rel=1e-6)
