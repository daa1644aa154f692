"""`streamer.chunked_cross_entropy` against PyTorch's `cross_entropy` of all logits."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

from streamer import chunked_cross_entropy
from streamer.planner.measure import Tracker

Loss = Callable[..., torch.Tensor]


def whole(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    softcap: float | None = None,
    reduction: str = "mean",
    **options: Any,
) -> torch.Tensor:
    """The same from all logits."""
    logits = F.linear(hidden, weight, bias)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    loss = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction=reduction, **options)
    return loss.view(targets.shape) if reduction == "none" else loss


def given(
    *shape: int, words: int = 11, width: int = 8, dtype: torch.dtype = torch.float32, scale: float = 1.0
) -> dict[str, torch.Tensor]:
    """Hidden states, weight, bias and targets for tokens of this shape."""
    draws = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        # the same values in every dtype
        return (scale * torch.randn(*shape, generator=draws)).bfloat16().to(dtype).requires_grad_()

    return {
        "hidden": normal(*shape, width),
        "weight": normal(words, width),
        "bias": normal(words),
        "targets": torch.randint(words, shape, generator=draws),
    }


def run(loss_of: Loss, inputs: dict[str, torch.Tensor], incoming: Any = 1.0, **options: Any) -> Any:
    """The loss, and the gradients of the inputs that have some."""
    copies = {
        name: value.detach().clone().requires_grad_(value.requires_grad) for name, value in inputs.items()
    }
    loss = loss_of(**copies, **options)
    if loss.requires_grad:
        (loss * incoming).sum().backward()
    return loss.detach(), {name: value.grad for name, value in copies.items() if value.grad is not None}


def assert_close(actual: Any, expected: Any, tolerance: float = 1e-6) -> None:
    assert actual[1].keys() == expected[1].keys()
    pairs = [(actual[0], expected[0]), *((actual[1][name], expected[1][name]) for name in expected[1])]
    for mine, theirs in pairs:
        assert mine.shape == theirs.shape
        scale = max(1.0, theirs.abs().max().item()) if theirs.numel() else 1.0
        torch.testing.assert_close(
            mine.double(), theirs.double(), rtol=0, atol=tolerance * scale, equal_nan=True
        )


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("bias", [True, False])
def test_losses_and_gradients_are_those_of_all_logits(reduction: str, bias: bool) -> None:
    grid = itertools.product((0.0, 0.1, 1.0), (-100, 3), (None, 2.0), (1, 7, 15, 100))
    for smoothing, ignored, softcap, chunk_size in grid:
        options = {
            "reduction": reduction, "label_smoothing": smoothing, "ignore_index": ignored, "softcap": softcap,
        }  # fmt: skip
        for dtype, tolerance in ((torch.float32, 1e-6), (torch.float64, 1e-14)):
            inputs = given(3, 5, dtype=dtype)
            inputs["targets"][0, 1] = ignored
            inputs["targets"][2] = ignored
            if not bias:
                del inputs["bias"]
            incoming = torch.randn(3, 5) if reduction == "none" else 0.37
            actual = run(chunked_cross_entropy, inputs, incoming, chunk_size=chunk_size, **options)
            assert {actual[0].dtype, *(value.dtype for value in actual[1].values())} == {dtype}
            exact = {n: v.detach().double().requires_grad_(v.requires_grad) if v.is_floating_point() else v
                     for n, v in inputs.items()}  # fmt: skip
            assert_close(actual, run(whole, exact, incoming, **options), tolerance)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_nothing_to_learn_is_as_in_pytorch(reduction: str, smoothing: float) -> None:
    ignored = given(2, 3)
    ignored["targets"].fill_(-100)
    for inputs in (ignored, given(0, 3), given(0)):
        options = {"reduction": reduction, "label_smoothing": smoothing}
        actual, expected = run(chunked_cross_entropy, inputs, **options), run(whole, inputs, **options)
        assert_close(actual, expected)
        assert actual[0].isnan().any() == (reduction == "mean")
        assert all(not value.any() for value in actual[1].values())


def test_a_single_token_without_a_batch() -> None:
    inputs = given(1)
    inputs = inputs | {"hidden": inputs["hidden"].detach()[0], "targets": inputs["targets"][0]}
    plain = F.cross_entropy(F.linear(inputs["hidden"], inputs["weight"], inputs["bias"]), inputs["targets"])
    for reduction in ("mean", "none"):
        torch.testing.assert_close(chunked_cross_entropy(**inputs, reduction=reduction), plain)


def test_large_logits_neither_overflow_nor_vanish() -> None:
    inputs = given(4, 5, scale=40.0)
    assert_close(run(chunked_cross_entropy, inputs, chunk_size=3), run(whole, inputs))
    inputs["bias"].data[2] = -torch.inf
    inputs["targets"][inputs["targets"] == 2] = 1
    assert_close(run(chunked_cross_entropy, inputs, chunk_size=3), run(whole, inputs))


def error_of(result: Any, exact: Any) -> dict[str, float]:
    """Of each gradient, and of the loss, the error as a part of its size."""
    found = {"loss": (result[0], exact[0]), **{name: (result[1][name], exact[1][name]) for name in exact[1]}}
    return {
        name: ((mine.double() - true).norm() / true.norm()).item() for name, (mine, true) in found.items()
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_short_dtypes_are_as_exact_as_all_logits_are(dtype: torch.dtype, reduction: str) -> None:
    inputs = given(40, 10, words=300, dtype=dtype, scale=0.3)
    exact = run(whole, given(40, 10, words=300, dtype=torch.float64, scale=0.3), reduction=reduction)
    plain = run(whole, inputs, reduction=reduction)
    actual = run(chunked_cross_entropy, inputs, reduction=reduction, chunk_size=37)
    assert actual[0].dtype == torch.float32
    assert {value.dtype for value in actual[1].values()} == {dtype}
    theirs, mine = error_of(plain, exact), error_of(actual, exact)
    assert mine["loss"] < theirs["loss"] + 1e-6
    # what each chunk adds to the weight's is rounded before it is added
    assert all(mine[name] < 1.5 * theirs[name] for name in ("hidden", "weight", "bias"))


def test_a_loss_scale_keeps_fp16_gradients_from_vanishing() -> None:
    """The mean over many tokens and words: without the scale no gradient of a logit would be above zero."""
    inputs = given(64, 16, words=2000, dtype=torch.float16, scale=0.1)
    exact = run(whole, given(64, 16, words=2000, dtype=torch.float64, scale=0.1), 2.0**14)
    actual = run(chunked_cross_entropy, inputs, 2.0**14, chunk_size=100)
    plain = error_of(run(whole, inputs, 2.0**14), exact)
    assert all(mine < 1.3 * plain[name] + 1e-4 for name, mine in error_of(actual, exact).items())
    # and one that is too large shows, as the scaler wants it
    assert not run(chunked_cross_entropy, inputs, 2.0**30)[1]["weight"].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_is_that_of_linear(dtype: torch.dtype) -> None:
    inputs = given(6, 7, words=30)
    with torch.autocast("cpu", dtype=dtype):
        expected = run(whole, inputs)
        actual = run(chunked_cross_entropy, inputs, chunk_size=5)
        mixed = run(chunked_cross_entropy, inputs | {"hidden": inputs["hidden"].detach().to(dtype)})
    assert {value.dtype for value in actual[1].values()} == {torch.float32}
    torch.testing.assert_close(actual[0], expected[0], rtol=1e-5, atol=0)
    torch.testing.assert_close(mixed[0], expected[0], rtol=1e-5, atol=0)
    exact = run(whole, given(6, 7, words=30, dtype=torch.float64))
    theirs = error_of(expected, exact)
    assert all(mine < 1.3 * theirs[name] for name, mine in error_of(actual, exact).items())
    wide = given(6, 7, words=30, dtype=torch.float64)
    with torch.autocast("cpu", dtype=dtype):
        assert torch.equal(run(chunked_cross_entropy, wide)[0], run(chunked_cross_entropy, wide)[0])
        assert chunked_cross_entropy(**wide).dtype == torch.float64


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_autocast_around_backward_changes_nothing(reduction: str) -> None:
    inputs = given(3, 5)
    of = [inputs[name] for name in ("hidden", "weight", "bias")]
    loss = chunked_cross_entropy(**inputs, reduction=reduction).sum()
    expected = torch.autograd.grad(loss, of, retain_graph=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = torch.autograd.grad(loss, of)
    assert all(map(torch.equal, actual, expected))


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_only_the_gradients_that_are_wanted_are_computed(reduction: str) -> None:
    product = 2 * 15 * 11 * 8

    def products(*frozen: str) -> float:
        inputs = given(3, 5)
        for name in frozen:
            inputs[name].requires_grad_(False)
        with FlopCounterMode(display=False) as counter:
            found = run(chunked_cross_entropy, inputs, chunk_size=4, reduction=reduction)[1]
        assert found.keys() == {"hidden", "weight", "bias"} - {*frozen}
        return counter.get_total_flops() / product

    again = reduction == "none"
    assert products() == 3 + again
    assert products("weight") == products("hidden") == 2 + again
    assert products("weight", "hidden") == 1 + again
    assert products("weight", "hidden", "bias") == 1
    with torch.no_grad():
        loss = chunked_cross_entropy(**given(3, 5))
    assert not loss.requires_grad
    with torch.inference_mode():
        assert torch.equal(chunked_cross_entropy(**given(3, 5)), loss)


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_backward_can_run_again(reduction: str) -> None:
    inputs = given(3, 5)
    of = [inputs[name] for name in ("hidden", "weight", "bias")]
    loss = chunked_cross_entropy(**inputs, chunk_size=4, reduction=reduction).sum()
    first = torch.autograd.grad(loss, of, retain_graph=True)
    kept = [value.clone() for value in first]
    doubled = torch.autograd.grad(loss * 2, of, retain_graph=True)
    last = torch.autograd.grad(loss * 4, of)
    for number, value in enumerate(kept):
        assert torch.equal(first[number], value)
        assert torch.equal(doubled[number], 2 * value)
        assert torch.equal(last[number], 4 * value)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, of)


def test_hidden_states_need_not_be_contiguous() -> None:
    inputs = given(3, 6)

    def shifted(loss_of: Loss, hidden: torch.Tensor, targets: torch.Tensor, **rest: Any) -> torch.Tensor:
        return loss_of(hidden=hidden[:, :-1], targets=targets[:, 1:], **rest)

    def turned(loss_of: Loss, hidden: torch.Tensor, targets: torch.Tensor, **rest: Any) -> torch.Tensor:
        return loss_of(hidden=hidden.transpose(0, 1), targets=targets.T, **rest)

    for view in (shifted, turned):
        actual = run(partial(view, chunked_cross_entropy), inputs, chunk_size=4)
        assert_close(actual, run(partial(view, whole), inputs))


TOKENS, WORDS, WIDTH, CHUNK = 2048, 1000, 8, 128


@pytest.mark.parametrize(
    ("dtype", "options", "bytes_each"),
    [
        (torch.float32, {}, 4),
        (torch.bfloat16, {}, 6),
        (torch.float64, {"label_smoothing": 0.1}, 8),
        (torch.float32, {"softcap": 5.0}, 8),
        (torch.bfloat16, {"softcap": 5.0}, 8),
        (torch.float16, {}, 6),
        (torch.float32, {"reduction": "none"}, 4),
    ],
)
def test_the_peak_is_a_chunk(dtype: torch.dtype, options: dict[str, Any], bytes_each: int) -> None:
    def peak(loss_of: Loss, **more: Any) -> int:
        inputs = given(TOKENS, words=WORDS, width=WIDTH, dtype=dtype)
        with Tracker() as counted:
            loss_of(**inputs, **options, **more).sum().backward()
        return counted.peak

    # gradients of hidden states, weight and bias, as they are added up and as they are returned; what there
    # is one of for each token or word
    gradients = (TOKENS + 2 * WORDS) * WIDTH * max(4, dtype.itemsize) * 2 + 64 * (TOKENS + WORDS)
    chunk = CHUNK * WORDS * bytes_each
    assert chunk <= peak(chunked_cross_entropy, chunk_size=CHUNK) < 1.1 * chunk + gradients
    assert peak(whole) > 2 * TOKENS * WORDS * max(4, dtype.itemsize)


def test_no_gradients_are_held_where_none_is_wanted() -> None:
    inputs = given(TOKENS, words=WORDS, width=WIDTH)
    with Tracker() as counted, torch.no_grad():
        chunked_cross_entropy(**inputs, chunk_size=CHUNK)
    assert counted.peak < 1.1 * CHUNK * WORDS * 4 + 64 * TOKENS


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"targets": torch.tensor([[1, 11]])}, IndexError, "target 11 is outside of 0 .. 10"),
        ({"targets": torch.tensor([[1, -1]])}, IndexError, "target -1 is outside of 0 .. 10"),
        ({"targets": torch.tensor([1, 2])}, ValueError, r"targets are .* \[2\] .* each token, \[1, 2\]"),
        ({"targets": torch.tensor([[1.0, 2.0]])}, ValueError, "a word's number in torch.int64"),
        ({"weight": torch.zeros(11, 7)}, ValueError, r"they must be \[..., C\] and \[V, C\]"),
        ({"weight": torch.zeros(11, 8).bfloat16()}, ValueError, "are of float32, bfloat16, float32: pass"),
        ({"bias": torch.zeros(8)}, ValueError, r"bias is \[8\]: it must be \[11\]"),
        ({"chunk_size": 0}, ValueError, "chunk_size=0: it must be an integer of 1 or more, in tokens"),
        ({"label_smoothing": 1.5}, ValueError, "label_smoothing=1.5 must be from 0 to 1"),
        ({"softcap": 0.0}, ValueError, "softcap=0.0 must be above 0, or None"),
        ({"reduction": "average"}, ValueError, "reduction='average' is unknown: use one of 'mean', 'sum'"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(changed: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        chunked_cross_entropy(**(given(1, 2) | changed))


def test_gradients_of_gradients_are_refused() -> None:
    inputs = given(3, 5)
    for reduction in ("mean", "none"):
        loss = chunked_cross_entropy(**inputs, reduction=reduction).sum()
        with pytest.raises(RuntimeError, match="create_graph=True: .* has no gradients of gradients"):
            torch.autograd.grad(loss, inputs["hidden"], create_graph=True)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # forward mode's own
def test_transforms_do_not_go_through() -> None:
    inputs = given(3, 5)
    hidden, weight = inputs["hidden"].detach(), inputs["weight"].detach()
    loss_of = partial(chunked_cross_entropy, weight=weight, targets=inputs["targets"])
    with pytest.raises(RuntimeError):
        torch.func.grad(loss_of)(hidden)
    with pytest.raises(RuntimeError), torch.no_grad():
        torch.func.vmap(lambda some: loss_of(some))(hidden[None])
    with pytest.raises(RuntimeError), forward_ad.dual_level(), torch.no_grad():
        loss_of(forward_ad.make_dual(hidden, torch.ones_like(hidden)))
    loss = chunked_cross_entropy(**inputs)
    with pytest.raises(RuntimeError):
        torch.autograd.grad(loss, inputs["hidden"], torch.ones(2), is_grads_batched=True)


@pytest.mark.cuda_values
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_on_a_gpu(dtype: torch.dtype) -> None:
    inputs = {
        name: value.detach().cuda().requires_grad_(value.requires_grad)
        for name, value in given(40, 10, words=300, dtype=dtype, scale=0.3).items()
    }
    options = {"label_smoothing": 0.1, "softcap": 20.0, "ignore_index": 3}
    actual = run(chunked_cross_entropy, inputs, 4.0, chunk_size=37, **options)
    assert_close(actual, run(whole, inputs, 4.0, **options), 1e-5 if dtype == torch.float32 else 2e-2)


def test_meta_tensors_give_shapes() -> None:
    inputs = {name: value.detach().to("meta") for name, value in given(3, 5).items()}
    hidden = inputs["hidden"].requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = chunked_cross_entropy(**inputs, chunk_size=4)
    loss.backward()
    assert (loss.shape, hidden.grad.shape, hidden.grad.device.type) == ((), (3, 5, 8), "meta")


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # dynamo looks at it where it goes on
def test_torch_compile_goes_around_it() -> None:
    def loss_of(hidden: torch.Tensor, **rest: Any) -> torch.Tensor:
        return chunked_cross_entropy(hidden, **rest, chunk_size=4) * 3

    inputs = given(3, 5)
    compiled = torch.compile(loss_of, backend="eager")
    assert_close(run(compiled, inputs), run(loss_of, inputs), tolerance=0)
