"""sum_squares against float64; accumulate and add against PyTorch's additions, and what they return."""

import numba
import numpy as np
import pytest
import torch

import streamer_native
from tests.native.test_adam import BLOCK, normal

SIZES = [0, 1, 5, BLOCK, BLOCK + 1, 5 * BLOCK + 123]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
HALVES = DTYPES[1:]


def as_torch(values, dtype):
    return torch.from_numpy(values).to(dtype)


def as_native(tensor):
    """The NumPy array that shares the memory of `tensor`; of bfloat16, the bits."""
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def exact_sum(tensor):
    return float(tensor.double().square().sum())


def every_pattern(dtype, seed):
    """Every bit pattern of a 16-bit dtype, twenty times, in an order of its own."""
    every = np.arange(1 << 16, dtype=np.uint16)
    rng = np.random.default_rng(seed)
    return torch.from_numpy(np.concatenate([rng.permutation(every) for _ in range(20)])).view(dtype)


def assert_same(actual, expected):
    """Equal to the bit, except that any NaN equals any NaN."""
    assert torch.equal(actual.isnan(), expected.isnan())
    bits = torch.int32 if actual.dtype == torch.float32 else torch.int16
    finite = ~expected.isnan()
    assert torch.equal(actual.view(bits)[finite], expected.view(bits)[finite])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_sum_squares_agrees_with_float64(size, dtype):
    grad = as_torch(normal(size, seed=0), dtype)
    assert streamer_native.sum_squares(as_native(grad)) == pytest.approx(exact_sum(grad), rel=1e-12)


@pytest.mark.parametrize("value", [3e38, 1e-30, 1e-42], ids=["square overflows", "underflows", "denormal"])
def test_a_square_outside_float32_is_summed_all_the_same(value):
    grad = np.full(BLOCK + 3, value, dtype=np.float32)
    expected = grad.size * float(grad[0]) ** 2
    assert streamer_native.sum_squares(grad) == pytest.approx(expected, rel=1e-12)
    assert streamer_native.accumulate(grad, np.zeros_like(grad)) == pytest.approx(expected, rel=1e-12)
    assert expected > 0


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("position", [0, 17, BLOCK - 1, BLOCK, 2 * BLOCK + 6])
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_non_finite_element_is_never_lost(bad, position, dtype):
    values = normal(2 * BLOCK + 7, seed=0)
    values[position] = bad
    grad = as_native(as_torch(values, dtype))
    assert not np.isfinite(streamer_native.sum_squares(grad))
    clean = as_native(as_torch(normal(2 * BLOCK + 7, seed=0), dtype))
    assert not np.isfinite(streamer_native.accumulate(clean, grad))
    if dtype in HALVES:
        assert not np.isfinite(streamer_native.add(np.empty_like(values), grad, clean.view(grad.dtype)))


@pytest.mark.parametrize("dtype", HALVES)
def test_an_element_of_any_exponent_is_squared_or_reported(dtype):
    for one in every_pattern(dtype, 0)[: 1 << 16 : 31].split(1):
        total = streamer_native.sum_squares(as_native(one))
        value = float(one)
        assert total == value * value if np.isfinite(value) else not np.isfinite(total)


def test_an_addition_that_overflows_is_reported_by_its_sum():
    largest = torch.tensor([torch.finfo(torch.bfloat16).max], dtype=torch.bfloat16)
    assert streamer_native.accumulate(as_native(largest.clone()), as_native(largest)) == np.inf
    largest = torch.tensor([65504.0], dtype=torch.float16)
    assert streamer_native.accumulate(as_native(largest.clone()), as_native(largest)) == np.inf
    assert streamer_native.accumulate(np.array([65504], np.float32), as_native(largest)) == 131008.0**2


@pytest.mark.skipif(numba.config.NUMBA_NUM_THREADS < 2, reason="Numba has one thread here")
def test_sums_do_not_depend_on_the_number_of_threads():
    grad = normal(50 * BLOCK + 1, seed=0)
    before = streamer_native.get_num_threads()
    sums = []
    try:
        for threads in (1, 2):
            streamer_native.set_num_threads(threads)
            sums.append((streamer_native.sum_squares(grad), streamer_native.accumulate(grad.copy(), grad)))
    finally:
        streamer_native.set_num_threads(before)
    assert sums[0] == sums[1]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("into_dtype", "dtype"),
    [(torch.float32, dtype) for dtype in DTYPES] + [(dtype, dtype) for dtype in HALVES],
)
def test_accumulate_is_torchs_addition_and_returns_the_sum_of_squares(size, into_dtype, dtype):
    into, grad = as_torch(normal(size, 1), into_dtype), as_torch(normal(size, 2, 0.1), dtype)
    expected = into + grad
    total = streamer_native.accumulate(as_native(into), as_native(grad))
    assert_same(into, expected)
    assert total == pytest.approx(exact_sum(expected), rel=1e-12)


@pytest.mark.parametrize("dtype", HALVES)
def test_accumulate_into_16_bits_over_all_kinds_of_patterns(dtype):
    into, grad = every_pattern(dtype, 1), every_pattern(dtype, 2)
    # Near in exponent, so that many sums lie half-way between two neighbours.
    near = torch.from_numpy(np.random.default_rng(3).integers(0, 1 << 9, 10 << 16).astype(np.int16))
    grad.view(torch.int16)[: 10 << 16] = into.view(torch.int16)[: 10 << 16] ^ near
    expected = (into.float() + grad.float()).to(dtype)
    assert expected.isnan().any() and expected.isinf().any()
    streamer_native.accumulate(as_native(into), as_native(grad))
    assert_same(into, expected)
    if dtype == torch.bfloat16:
        assert (as_native(into)[expected.isnan().numpy()] == 0x7FC0).all()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", HALVES)
def test_add_writes_the_sum_of_two_whatever_was_there_and_returns_the_sum_of_squares(size, dtype):
    into = torch.full((size + 2,), torch.nan)
    patterns = every_pattern(dtype, 1)[:size], every_pattern(dtype, 2)[:size]
    numbers = as_torch(normal(size, 1), dtype), as_torch(normal(size, 2), dtype)
    for first, second in (patterns, numbers):
        total = streamer_native.add(into[1:-1].numpy(), as_native(first), as_native(second))
        assert_same(into[1:-1], first.float() + second.float())
        assert into[[0, -1]].isnan().all(), "written outside the slice"
    assert total == pytest.approx(exact_sum(into[1:-1]), rel=1e-12)
