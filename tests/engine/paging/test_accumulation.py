"""Several backward calls before a step: summed in fp32 beside short parameters, whatever else happens."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import nn

import streamer
from models.gpt2 import GPT
from streamer.backends.thread import ThreadBackend
from streamer.engine.paging.handle import wrapped
from streamer.engine.schedule.op import Op, OpKind
from streamer.plan.ledger import accumulation
from tests.reference import VOCAB, language_loss, streamed

SHORT = [torch.bfloat16, torch.float16]


@cache
def gpt() -> GPT:
    torch.manual_seed(0)
    # tied, the two uses of one weight are added before they reach its gradient, in a dtype that varies
    return GPT(vocab_size=VOCAB, block_size=16, n_layer=3, n_head=2, n_embd=20, tied=False)


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def backwards(model: nn.Module, steps: range) -> None:
    for step in steps:
        torch.manual_seed(step)
        language_loss(model, step).backward()


def one_by_one(model: nn.Module, steps: range) -> list[dict[str, torch.Tensor]]:
    """The gradients of each backward alone, in the parameters' dtype."""
    result = []
    for step in steps:
        backwards(model, range(step, step + 1))
        result.append(gradients(model))
        model.zero_grad()
    return result


@pytest.mark.parametrize("dtype", SHORT, ids=str)
@pytest.mark.parametrize("num_slots", [1, 2])
@pytest.mark.parametrize("activations", ["recompute", "keep"])
def test_gradients_are_summed_in_fp32(dtype: torch.dtype, num_slots: int, activations: str) -> None:
    # dropout apart, a plain model in that dtype gives each single gradient to the bit
    singles = one_by_one(copy.deepcopy(gpt()).to(dtype), range(4))
    options = {"dtype": dtype, "num_slots": num_slots, "activations": activations}
    with streamed(gpt(), layers="transformer.h", **options) as model:
        backwards(model, range(1))
        first = gradients(model)
        assert all(torch.equal(first[name], singles[0][name]) for name in singles[0])
        assert all(param.grad.dtype == dtype for param in model.parameters())
        backwards(model, range(1, 4))
        sums = gradients(model)
        for name, total in sums.items():
            expected = singles[0][name].float()
            for single in singles[1:]:
                expected = expected + single[name].float()
            assert total.dtype == torch.float32
            assert torch.equal(total, expected), name
        model.zero_grad()
        backwards(model, range(1))
        again = gradients(model)
        assert all(torch.equal(again[name], first[name]) for name in first), "a lone one is held as it was"


@pytest.mark.parametrize("dtype", [torch.float32, *SHORT], ids=str)
def test_grad_dtype_none_adds_as_pytorch_does(dtype: torch.dtype) -> None:
    plain = copy.deepcopy(gpt()).to(dtype)
    backwards(plain, range(4))
    expected = gradients(plain)
    with streamed(gpt(), layers="transformer.h", dtype=dtype, grad_dtype=None) as model:
        backwards(model, range(4))
        actual = gradients(model)
        assert "gradient sums" not in streamer.stats(model).host_bytes
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


def test_a_model_of_two_dtypes() -> None:
    mixed = copy.deepcopy(gpt()).bfloat16()
    for name, param in mixed.named_parameters():
        if "ln_" in name:
            param.data = param.data.float()

    def loss(model: nn.Module, step: int) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return language_loss(model, step)

    def summed(model: nn.Module) -> dict[str, torch.Tensor]:
        for step in range(3):
            loss(model, step).backward()
        return gradients(model)

    singles = []
    plain = copy.deepcopy(mixed)
    for step in range(3):
        loss(plain, step).backward()
        singles.append(gradients(plain))
        plain.zero_grad()
    with streamed(mixed, layers="transformer.h") as model:
        actual = summed(model)
    for name, total in actual.items():
        a, b, c = (single[name].float() for single in singles)
        assert torch.equal(total, a + b + c), name


class Two(nn.Module):
    """A layer of two parameters, of which each call uses those it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(8, 8) / 3)
        self.b = nn.Parameter(torch.randn(8, 8) / 3)

    def forward(self, x: torch.Tensor, which: str) -> torch.Tensor:
        return x + sum(torch.tanh(x @ getattr(self, key)) for key in which)


class Choosing(nn.Module):
    """Three of them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Two() for _ in range(3))
        self.head = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor, which: str) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, which)
        return self.head(x)


@pytest.mark.parametrize("uses", [("a", "b", "ab"), ("ab", "a", "b"), ("a", "ab", "a"), ("b", "", "ab")])
def test_parameters_that_take_part_now_and_then(uses: tuple[str, ...]) -> None:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1)).bfloat16()
    plain, sums = Choosing().bfloat16(), dict[str, torch.Tensor]()
    counts = dict[str, int]()
    for which in uses:
        plain(x, which).sum().backward()
        for name, gradient in gradients(plain).items():
            counts[name] = counts.get(name, 0) + 1
            sums[name] = sums[name] + gradient.float() if name in sums else gradient.float()
        plain.zero_grad()
    with streamed(Choosing(), layers="layers", dtype=torch.bfloat16) as model:
        for which in uses:
            model(x, which).sum().backward()
        actual = gradients(model)
        norm = streamer.clip_grad_norm_(model, float("inf"))
        optimizer = streamer.AdamW(model.parameters(), lr=1e-2)
        optimizer.step()
        streamer.synchronize(model)
        for name, param in model.named_parameters():
            assert optimizer.state[param].get("step", 0) == (name in sums), name
    assert set(actual) == set(sums)
    for name, total in sums.items():
        assert torch.equal(actual[name].float(), total), name
        assert (actual[name].dtype == torch.float32) == (counts[name] > 1), name
    expected = torch.stack([total.norm() for total in sums.values()]).norm()
    torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0)


def test_a_step_from_sums_is_that_of_one_fp32_gradient() -> None:
    """lr and eps such that the size of the gradient shows in the weights."""
    settings = {"lr": 1e-2, "eps": 1e-2}
    with streamed(gpt(), layers="transformer.h", dtype=torch.bfloat16) as model:
        optimizer = streamer.AdamW(model.parameters(), **settings)
        backwards(model, range(3))
        sums = gradients(model)
        streamer.clip_grad_norm_(model, 0.5)
        optimizer.step()
        summed = streamer.unwrap(model)
        actual = {name: param.detach().clone() for name, param in summed.named_parameters()}
        streamer.wrap(model, device="cpu")  # for the context's end
    # masters begin at the fp32 weights
    masters = copy.deepcopy(gpt())
    for name, param in masters.named_parameters():
        param.grad = sums[name]
    torch.nn.utils.clip_grad_norm_(masters.parameters(), 0.5)
    torch.optim.AdamW(masters.parameters(), **settings).step()
    for name, param in masters.named_parameters():
        torch.testing.assert_close(actual[name], param.detach(), rtol=1e-6, atol=1e-7, msg=name)


def test_clipping_between_backwards_scales_what_is_there() -> None:
    def steps(model: nn.Module, clip: Callable[[float], torch.Tensor]) -> dict[str, torch.Tensor]:
        backwards(model, range(2))
        clip(0.1)
        backwards(model, range(2, 3))
        clip(1e9)
        return gradients(model)

    plain = copy.deepcopy(gpt()).bfloat16().float()
    clip = torch.nn.utils.clip_grad_norm_
    expected = steps(plain, lambda norm: clip(plain.parameters(), norm))
    with streamed(gpt(), layers="transformer.h", dtype=torch.bfloat16) as model:
        actual = steps(model, lambda norm: streamer.clip_grad_norm_(model, norm))
    for name, gradient in expected.items():
        error = (actual[name] - gradient).norm() / gradient.norm()
        assert error < 0.05, f"{name}: what was not clipped would be ten times as large"


def test_a_penalty_on_weights_outside_of_their_layer() -> None:
    def loss(model: nn.Module, step: int) -> torch.Tensor:
        weight = model.transformer.h[1].mlp.c_fc.weight
        return language_loss(model, step) + (weight.cpu().float() ** 2).sum()

    plain, name = copy.deepcopy(gpt()).bfloat16(), "transformer.h.1.mlp.c_fc.weight"
    singles = [one_by_one(plain, range(step, step + 1))[0][name].float() for step in range(2)]
    penalty = 2 * plain.get_parameter(name).detach().float()
    with streamed(gpt(), layers="transformer.h", dtype=torch.bfloat16) as model:
        for step in range(2):
            torch.manual_seed(step)
            loss(model, step).backward()
        actual = model.get_parameter(name).grad
        expected = singles[0] + singles[1] + 2 * penalty
        # the penalty's own gradient is rounded to bf16, and so is its first sum with the layer's
        torch.testing.assert_close(actual.float(), expected, rtol=2**-7, atol=1e-3)


def test_gradients_written_between_backwards_count() -> None:
    name = "transformer.h.1.mlp.c_fc.weight"
    singles = one_by_one(copy.deepcopy(gpt()).bfloat16(), range(3))
    with streamed(gpt(), layers="transformer.h", dtype=torch.bfloat16) as model:
        weight = model.get_parameter(name)
        backwards(model, range(2))
        with torch.no_grad():
            weight.grad.mul_(0.5)
        backwards(model, range(2, 3))
        half = 0.5 * (singles[0][name].float() + singles[1][name].float())
        assert torch.equal(weight.grad, half + singles[2][name].float())
        # also where nothing is added afterwards, and the sums' own norm is no longer true
        streamer.clip_grad_norm_(model, float("inf"))
        with torch.no_grad():
            weight.grad[3, 7] = 64.0
        norm = streamer.clip_grad_norm_(model, float("inf"))
        expected = torch.nn.utils.get_total_norm([param.grad for param in model.parameters()])
        torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0)
        weight.grad = torch.ones_like(weight, dtype=torch.float32)
        backwards(model, range(1))
        assert torch.equal(weight.grad, 1 + singles[0][name].float())
        norm = streamer.clip_grad_norm_(model, float("inf"))
        expected = torch.nn.utils.get_total_norm([param.grad for param in model.parameters()])
        torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0)


def test_zeroed_gradients_are_added_to() -> None:
    singles = one_by_one(copy.deepcopy(gpt()).bfloat16(), range(2))
    with streamed(gpt(), layers="transformer.h", dtype=torch.bfloat16) as model:
        backwards(model, range(1))
        model.zero_grad(set_to_none=False)
        backwards(model, range(1, 2))
        for name, gradient in gradients(model).items():
            assert torch.equal(gradient.float(), singles[1][name].float()), name


def test_other_optimizers_get_the_dtype_they_expect() -> None:
    singles = one_by_one(copy.deepcopy(gpt()).bfloat16(), range(2))
    plain = copy.deepcopy(gpt()).bfloat16()
    for name, param in plain.named_parameters():
        param.grad = (singles[0][name].float() + singles[1][name].float()).bfloat16()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    with streamed(gpt(), layers="transformer.h", dtype=torch.bfloat16) as model:
        backwards(model, range(2))
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        actual = model.state_dict()
        for name, weight in plain.state_dict().items():
            assert torch.equal(actual[name], weight), name


def test_accumulation_moves_no_weight_that_the_forwards_do_not_need(issued: list[Op]) -> None:
    with streamed(gpt(), layers="transformer.h", dtype=torch.bfloat16) as model:
        streamer.AdamW(model.parameters())
        backwards(model, range(2))
        issued.clear()
        backwards(model, range(2, 5))
        kinds = [op.kind for op in issued]
        # three layers through two slots: of four visits out and back two find the layer still there
        assert kinds.count(OpKind.UNSHARD) == 3 * 2
        assert kinds.count(OpKind.ACCUMULATE) == kinds.count(OpKind.OFFLOAD_GRAD) == 3 * 3
        assert OpKind.STEP not in kinds and OpKind.NORM not in kinds


@pytest.mark.parametrize("dtype", [torch.float32, *SHORT], ids=str)
@pytest.mark.parametrize("num_slots", [1, 2, 3])
def test_planned_bytes_are_what_accumulation_takes(dtype: torch.dtype, num_slots: int) -> None:
    with streamed(gpt(), layers="transformer.h", dtype=dtype, num_slots=num_slots) as model:
        backwards(model, range(1))
        before = streamer.stats(model)
        backwards(model, range(1, 2))
        after = streamer.stats(model)
        executor = wrapped(model).executor
        more = accumulation(executor.units, executor.root, num_slots=num_slots, sum_in_fp32=True)
        assert after.host_bytes == {**before.host_bytes, **more.host}
        assert Counter(after.device_bytes) == Counter(before.device_bytes) + Counter(more.device)
        backwards(model, range(2, 4))
        assert streamer.stats(model).host_bytes == after.host_bytes


def test_no_room_for_sums_is_said_and_what_was_there_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    with streamed(gpt(), layers="transformer.h", dtype=torch.bfloat16) as model:
        backwards(model, range(1))
        before = gradients(model)
        with monkeypatch.context() as patch:
            executor = wrapped(model).executor
            takes = accumulation(executor.units, executor.root, num_slots=2, sum_in_fp32=True).host
            for free in (takes["gradient staging"] - 1, takes["gradient sums"] - 1):
                patch.setattr(ThreadBackend, "host_available", lambda self, free=free: free)
                with pytest.raises(MemoryError, match=rf"second backward .* and has {free} bytes .*: wrap"):
                    backwards(model, range(1, 2))
        layers = {name: gradient for name, gradient in gradients(model).items() if ".h." in name}
        assert layers and all(torch.equal(layers[name], before[name]) for name in layers)
        model.zero_grad()
        backwards(model, range(2))


@pytest.mark.parametrize("grad_dtype", [torch.bfloat16, torch.float64, "float32"], ids=str)
def test_another_grad_dtype_is_refused(grad_dtype: object) -> None:
    with pytest.raises(ValueError, match="grad_dtype=.*use torch.float32, or None"):
        streamer.wrap(copy.deepcopy(gpt()), layers="transformer.h", device="cpu", grad_dtype=grad_dtype)


def test_unwrap_leaves_parameters_that_take_gradients_of_their_dtype() -> None:
    model = streamer.wrap(copy.deepcopy(gpt()), layers="transformer.h", device="cpu", dtype=torch.bfloat16)
    backwards(model, range(2))
    model.zero_grad()
    backwards(model, range(1))
    streamer.unwrap(model)
    for dtype in (torch.float32, torch.bfloat16):
        model.to(dtype).zero_grad()
        backwards(model, range(1))
        assert all(param.grad.dtype == dtype for param in model.parameters())
        torch.optim.AdamW(model.parameters()).step()


@pytest.mark.parametrize("where", ["transformer.h.1.mlp.c_fc.weight", "lm_head.weight"])
def test_gradients_of_either_dtype_can_be_put_in_place(where: str) -> None:
    with streamed(gpt(), layers="transformer.h", dtype=torch.bfloat16) as model:
        weight = model.get_parameter(where)
        for _ in range(2):
            backwards(model, range(2))
            assert weight.grad.dtype == torch.float32
            weight.grad = weight.grad.to(torch.bfloat16)
            streamer.clip_grad_norm_(model, 1.0)
            model.zero_grad()
            backwards(model, range(1))
            assert weight.grad.dtype == torch.bfloat16, "a lone gradient is as it was, whatever was before"
            weight.grad = torch.ones_like(weight)
            backwards(model, range(1, 2))
            assert weight.grad.dtype == torch.float32
            model.zero_grad()


def test_an_fp32_gradient_where_none_are_summed_is_rounded() -> None:
    with streamed(gpt(), layers="transformer.h", dtype=torch.bfloat16, grad_dtype=None) as model:
        backwards(model, range(1))
        weight = model.transformer.h[1].mlp.c_fc.weight
        weight.grad = torch.full_like(weight, 1 / 3, dtype=torch.float32)
        streamer.clip_grad_norm_(model, float("inf"))
        assert torch.equal(weight.grad, torch.full_like(weight, 1 / 3))


def test_the_roots_sums_cross_the_bus_only_while_there_are_any(monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[int] = []
    copy_ = ThreadBackend.copy

    def note(self: ThreadBackend, into: torch.Tensor, source: torch.Tensor) -> None:
        moved.append(into.numel())
        copy_(self, into, source)

    with streamed(gpt(), layers="transformer.h", dtype=torch.bfloat16) as model:
        optimizer = streamer.AdamW(model.parameters())
        executor = wrapped(model).executor
        sums = 4 * executor.root.layout.state_numel
        for count, expected in ((1, 0), (3, 1), (1, 0)):
            backwards(model, range(count))
            with monkeypatch.context() as patch:
                patch.setattr(ThreadBackend, "copy", note)
                optimizer.step()
                optimizer.zero_grad()
                streamer.synchronize(model)
            assert moved.count(sums) == expected
            moved.clear()


def test_gradients_that_show_one_anothers_places() -> None:
    def swapped(model: nn.Module) -> dict[str, torch.Tensor]:
        backwards(model, range(1))
        mlps = [layer.mlp.c_fc.weight for layer in model.transformer.h]
        mlps[0].grad, mlps[1].grad = mlps[1].grad, mlps[0].grad
        one, other = model.transformer.h[2].ln_1.weight, model.transformer.h[2].ln_2.weight
        one.grad, other.grad = other.grad, one.grad
        square = model.transformer.h[2].attn.c_proj.weight
        square.grad = square.grad.T
        return gradients(model)

    expected = swapped(copy.deepcopy(gpt()))
    with streamed(gpt(), layers="transformer.h") as model:
        swapped(model)
        streamer.clip_grad_norm_(model, float("inf"))  # which takes them over
        actual = gradients(model)
    assert all(torch.equal(actual[name], expected[name]) for name in expected)
