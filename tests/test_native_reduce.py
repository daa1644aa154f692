"""sum_squares against float64, accumulate against PyTorch's additions."""

import numba
import numpy as np
import pytest
import torch

import streamer_native

BLOCK = 16384
SIZES = [0, 1, 5, BLOCK, BLOCK + 1, 5 * BLOCK + 123]


def normal(size, seed=0):
    return np.random.default_rng(seed).standard_normal(size).astype(np.float32)


def bfloat16_bits(values):
    return torch.from_numpy(values).bfloat16().view(torch.uint16).numpy()


def widened(bits):
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


@pytest.mark.parametrize("size", SIZES)
def test_sum_squares_agrees_with_float64(size):
    grad = normal(size)
    bits = bfloat16_bits(grad)
    expected = np.sum(grad.astype(np.float64) ** 2)
    expected_bf16 = np.sum(widened(bits).astype(np.float64) ** 2)
    assert streamer_native.sum_squares(grad) == pytest.approx(expected, rel=1e-12)
    assert streamer_native.sum_squares(bits) == pytest.approx(expected_bf16, rel=1e-12)


@pytest.mark.parametrize("value", [3e38, 1e-30, 1e-42], ids=["square overflows", "underflows", "denormal"])
def test_a_square_outside_float32_is_summed_all_the_same(value):
    grad = np.full(BLOCK + 3, value, dtype=np.float32)
    expected = grad.size * float(grad[0]) ** 2
    assert streamer_native.sum_squares(grad) == pytest.approx(expected, rel=1e-12)
    assert expected > 0


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("position", [0, 17, BLOCK - 1, BLOCK, 2 * BLOCK + 6])
def test_one_non_finite_element_is_never_lost(bad, position):
    grad = normal(2 * BLOCK + 7)
    grad[position] = bad
    assert not np.isfinite(streamer_native.sum_squares(grad))
    assert not np.isfinite(streamer_native.sum_squares(bfloat16_bits(grad)))


def test_a_bfloat16_of_any_exponent_is_squared_or_reported():
    every_exponent = [upper | lower for upper in range(0, 1 << 16, 1 << 7) for lower in (0, 1, 0x55, 0x7F)]
    for bits in every_exponent:
        value = float(widened(np.array([bits], dtype=np.uint16))[0])
        total = streamer_native.sum_squares(np.array([bits], dtype=np.uint16))
        assert total == value * value if np.isfinite(value) else not np.isfinite(total)


@pytest.mark.skipif(numba.config.NUMBA_NUM_THREADS < 2, reason="Numba has one thread here")
def test_sum_squares_does_not_depend_on_the_number_of_threads():
    grad = normal(50 * BLOCK + 1)
    try:
        streamer_native.set_num_threads(1)
        alone = streamer_native.sum_squares(grad)
        streamer_native.set_num_threads(2)
        assert streamer_native.sum_squares(grad) == alone
    finally:
        streamer_native.set_num_threads(None)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("grad_dtype", ["fp32", "bf16"])
def test_accumulate_into_fp32(size, grad_dtype):
    into, grad = normal(size, seed=1), normal(size, seed=2)
    if grad_dtype == "bf16":
        bits = bfloat16_bits(grad)
        expected = into + widened(bits)
        streamer_native.accumulate(into, bits)
    else:
        expected = into + grad
        streamer_native.accumulate(into, grad)
    assert np.array_equal(into.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("size", SIZES)
def test_accumulate_into_bf16_is_torchs_addition(size):
    into, grad = bfloat16_bits(normal(size, seed=1)), bfloat16_bits(normal(size, seed=2))
    expected = torch.from_numpy(into).view(torch.bfloat16) + torch.from_numpy(grad).view(torch.bfloat16)
    streamer_native.accumulate(into, grad)
    assert np.array_equal(into, expected.view(torch.uint16).numpy())


def test_accumulate_into_bf16_over_all_kinds_of_patterns():
    every = np.arange(1 << 16, dtype=np.uint16)
    rng = np.random.default_rng(3)
    into = np.concatenate([rng.permutation(every) for _ in range(20)])
    grad = np.concatenate([rng.permutation(every) for _ in range(20)])
    # Near in exponent, so that many sums lie half-way between two bfloat16.
    grad[: 10 * every.size] = (into[: 10 * every.size] ^ rng.integers(0, 1 << 10, 10 * every.size)).astype(
        np.uint16
    )
    sums = torch.from_numpy(into).view(torch.bfloat16) + torch.from_numpy(grad).view(torch.bfloat16)
    expected = sums.view(torch.uint16).numpy()
    nan = sums.isnan().numpy()
    streamer_native.accumulate(into, grad)
    assert np.array_equal(into[~nan], expected[~nan])
    assert nan.any()
    assert (into[nan] == 0x7FC0).all()


FLOATS = np.zeros(4, dtype=np.float32)
HALVES = np.zeros(4, dtype=np.uint16)


@pytest.mark.parametrize(
    ("into", "grad", "message"),
    [
        (HALVES, FLOATS, "grad has dtype float32; it must be uint16"),
        (FLOATS, FLOATS[:2], "grad has 2 elements and the first array 4"),
        (FLOATS.astype(np.float64), FLOATS, "into has dtype float64; it must be float32 or uint16"),
        (FLOATS, np.zeros(8, dtype=np.uint16)[::2], "grad is not contiguous"),
    ],
)
def test_accumulate_says_how_to_mend_an_array(into, grad, message):
    with pytest.raises(ValueError, match=message):
        streamer_native.accumulate(into, grad)


def test_sum_squares_says_how_to_mend_an_array():
    with pytest.raises(ValueError, match="grad has dtype float16"):
        streamer_native.sum_squares(np.zeros(4, dtype=np.float16))
