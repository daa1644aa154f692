"""Several backward calls before a step: summed in fp32 beside short parameters, whatever else happens."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import nn

import streamer
from streamer.backends.thread import ThreadBackend
from streamer.engine.handle import wrapped
from streamer.store.purposes import SUMS
from tests.models import Layers, numbers
from tests.reference import LossOf, gradients, language_loss, streamed, tiny_gpt

IN_A_LAYER = "transformer.h.1.mlp.c_fc.weight"
NO_LIMIT = float("inf")
#: Tied, the two uses of one weight are added before they reach its gradient, in a dtype that varies.
gpt = partial(tiny_gpt, width=20, tied=False)


def in_bf16(**options: Any) -> AbstractContextManager[nn.Module]:
    return streamed(gpt(), dtype=torch.bfloat16, **options)


def backwards(model: nn.Module, steps: Iterable[int], loss_of: LossOf = language_loss) -> None:
    for step in steps:
        loss_of(model, step).backward()


def one_by_one(model: nn.Module, loss_of: LossOf = language_loss) -> list[dict[str, torch.Tensor]]:
    """The gradients of each of four backward calls alone, in the parameters' dtype."""
    found = []
    for step in range(4):
        backwards(model, [step], loss_of)
        found.append(gradients(model))
        model.zero_grad()
    return found


@cache
def singles(dtype: torch.dtype = torch.bfloat16) -> list[dict[str, torch.Tensor]]:
    return one_by_one(gpt().to(dtype))


def summed(parts: Iterable[torch.Tensor]) -> torch.Tensor:
    """In fp32, one after another."""
    total, *rest = (part.float() for part in parts)
    for part in rest:
        total = total + part
    return total


@pytest.mark.parametrize(
    ("dtype", "num_slots", "activations"),
    [(torch.bfloat16, 1, "recompute"), (torch.bfloat16, 2, "keep"), (torch.float16, 2, "recompute")],
)
def test_gradients_are_summed_in_fp32(dtype: torch.dtype, num_slots: int, activations: str) -> None:
    with streamed(gpt(), dtype=dtype, num_slots=num_slots, activations=activations) as model:
        for _ in range(2):  # the second time where sums have been
            backwards(model, [0])
            for name, single in gradients(model).items():
                assert single.dtype == dtype
                assert torch.equal(single, singles(dtype)[0][name]), "a lone gradient is held as it was"
            backwards(model, [1, 2, 3])
            for name, total in gradients(model).items():
                assert total.dtype == torch.float32
                assert torch.equal(total, summed(single[name] for single in singles(dtype))), name
            model.zero_grad()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_grad_dtype_none_adds_as_pytorch_does(dtype: torch.dtype) -> None:
    plain = gpt().to(dtype)
    backwards(plain, range(4))
    with streamed(gpt(), dtype=dtype, grad_dtype=None) as model:
        backwards(model, range(4))
        assert "gradient sums" not in streamer.stats(model).host_bytes
        torch.testing.assert_close(gradients(model), gradients(plain), rtol=0, atol=0)


class Two(nn.Module):
    """A layer of two parameters, of which each call uses those it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.randn(8, 8) / 3) for _ in range(2))

    def forward(self, x: torch.Tensor, which: str) -> torch.Tensor:
        return x + sum(torch.tanh(x @ getattr(self, key)) for key in which)


@pytest.mark.parametrize("uses", [("a", "b", "ab"), ("b", "", "ab")])
def test_parameters_that_take_part_now_and_then(uses: tuple[str, ...]) -> None:
    x = numbers(4, 8).bfloat16().requires_grad_()
    plain = Layers(Two, "").bfloat16()
    found: dict[str, list[torch.Tensor]] = {}
    for which in uses:
        plain.args = (which,)
        plain(x).sum().backward()
        for name, gradient in gradients(plain).items():
            found.setdefault(name, []).append(gradient)
        plain.zero_grad()
    with streamed(Layers(Two, ""), dtype=torch.bfloat16) as model:
        for which in uses:
            model.args = (which,)
            model(x).sum().backward()
        actual = gradients(model)
        norm = streamer.clip_grad_norm_(model, NO_LIMIT)
        optimizer = streamer.AdamW(model.parameters(), lr=1e-2)
        optimizer.step()
        streamer.synchronize(model)
        for name, param in model.named_parameters():
            assert optimizer.state[param].get("step", 0) == (name in found), name
    assert set(actual) == set(found)
    sums = {name: summed(each) for name, each in found.items()}
    for name, total in sums.items():
        assert torch.equal(actual[name].float(), total), name
        assert (actual[name].dtype == torch.float32) == (len(found[name]) > 1), name
    torch.testing.assert_close(norm, nn.utils.get_total_norm(list(sums.values())), rtol=1e-6, atol=0)


def test_a_step_from_sums_is_that_of_one_fp32_gradient() -> None:
    """lr and eps such that the size of the gradient shows in the weights."""
    settings = {"lr": 1e-2, "eps": 1e-2}
    model = streamer.wrap(gpt(), device="cpu", dtype=torch.bfloat16)
    optimizer = streamer.AdamW(model.parameters(), **settings)
    backwards(model, range(3))
    masters = gpt()  # which begin at the fp32 weights
    for name, total in gradients(model).items():
        masters.get_parameter(name).grad = total
    streamer.clip_grad_norm_(model, 0.5)
    optimizer.step()
    streamer.unwrap(model)
    nn.utils.clip_grad_norm_(masters.parameters(), 0.5)
    torch.optim.AdamW(masters.parameters(), **settings).step()
    torch.testing.assert_close(model.state_dict(), masters.state_dict(), rtol=1e-6, atol=1e-7)


def test_clipping_between_backwards_scales_what_is_there() -> None:
    def clipped(model: nn.Module, clip: Callable[[float], torch.Tensor]) -> dict[str, torch.Tensor]:
        backwards(model, range(2))
        clip(0.1)
        backwards(model, [2])
        clip(1e9)
        return gradients(model)

    plain = gpt()
    expected = clipped(plain, lambda norm: nn.utils.clip_grad_norm_(plain.parameters(), norm))
    with in_bf16() as model:
        actual = clipped(model, lambda norm: streamer.clip_grad_norm_(model, norm))
    for name, gradient in expected.items():
        error = (actual[name] - gradient).norm() / gradient.norm()
        assert error < 0.05, f"{name}: what was not clipped would be ten times as large"


def test_gradients_written_between_backwards_count() -> None:
    def check_norm() -> None:
        norm = streamer.clip_grad_norm_(model, NO_LIMIT)
        expected = nn.utils.get_total_norm([param.grad for param in model.parameters()])
        torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0)

    with in_bf16() as model:
        weight = model.get_parameter(IN_A_LAYER)
        backwards(model, range(2))
        with torch.no_grad():
            weight.grad.mul_(0.5)
        backwards(model, [2])
        half = 0.5 * summed(single[IN_A_LAYER] for single in singles()[:2])
        assert torch.equal(weight.grad, half + singles()[2][IN_A_LAYER].float())
        # also where nothing is added afterwards, and the sums' own norm is no longer true
        streamer.clip_grad_norm_(model, NO_LIMIT)
        with torch.no_grad():
            weight.grad[3, 7] = 64.0
        check_norm()
        weight.grad = torch.ones_like(weight, dtype=torch.float32)
        backwards(model, [0])
        assert torch.equal(weight.grad, 1 + singles()[0][IN_A_LAYER].float())
        check_norm()


def test_no_room_for_sums_is_said_and_what_was_there_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    with in_bf16() as model:
        backwards(model, [0])
        before = gradients(model)
        with monkeypatch.context() as patch:
            executor = wrapped(model).executor
            staging = 2 * max(unit.layout.grad_nbytes for unit in executor.units)
            sums = SUMS.nbytes(executor.root.layout) + sum(SUMS.nbytes(u.layout) for u in executor.units)
            for free in (staging - 1, sums - 1):
                patch.setattr(ThreadBackend, "host_available", lambda self, free=free: free)
                with pytest.raises(MemoryError, match=rf"second backward .* and has {free} bytes .*: wrap"):
                    backwards(model, [1])
        layers = {name: gradient for name, gradient in gradients(model).items() if ".h." in name}
        assert layers and all(torch.equal(layers[name], before[name]) for name in layers)
        model.zero_grad()
        backwards(model, range(2))


@pytest.mark.parametrize("grad_dtype", [torch.bfloat16, "float16"], ids=str)
def test_another_grad_dtype_is_refused(grad_dtype: object) -> None:
    with pytest.raises(ValueError, match="grad_dtype=.*use torch.float32, or None"):
        streamer.wrap(gpt(), device="cpu", grad_dtype=grad_dtype)


@pytest.mark.parametrize("where", [IN_A_LAYER, "lm_head.weight"])
def test_gradients_of_either_dtype_can_be_put_in_place(where: str) -> None:
    with in_bf16() as model:
        weight = model.get_parameter(where)
        for _ in range(2):
            backwards(model, range(2))
            assert weight.grad.dtype == torch.float32
            weight.grad = weight.grad.to(torch.bfloat16)
            streamer.clip_grad_norm_(model, 1.0)
            model.zero_grad()
            backwards(model, [0])
            assert weight.grad.dtype == torch.bfloat16, "a lone gradient is as it was, whatever was before"
            weight.grad = torch.ones_like(weight)
            backwards(model, [1])
            assert weight.grad.dtype == torch.float32
            model.zero_grad()
