"""split and join against their definition and against PyTorch's cast; the narrowing helper likewise."""

import numba
import numpy as np
import pytest
import torch

import streamer_native
from streamer_native.bfloat16 import narrow_to_even

INF_BITS = 0x7F800000


def patterns() -> np.ndarray:
    """float32 bits, uint32: every upper half with each edge of the lower half, and a random sample."""
    upper = np.arange(1 << 16, dtype=np.uint32)[:, None] << np.uint32(16)
    lower = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=np.uint32)
    sample = np.random.default_rng(0).integers(0, 1 << 32, 1 << 20, dtype=np.uint32)
    return np.concatenate([(upper | lower).reshape(-1), sample])


def is_nan(bits: np.ndarray) -> np.ndarray:
    return (bits & 0x7FFFFFFF) > INF_BITS


def split(bits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    weight = np.empty(bits.size, dtype=np.uint16)
    remainder = np.empty(bits.size, dtype=np.uint16)
    streamer_native.split(bits.view(np.float32), weight, remainder)
    return weight, remainder


def exact(bits: np.ndarray) -> np.ndarray:
    """What comes back of a master: NaN as the plain one, below half of bfloat16's smallest number zero."""
    is_tiny = (bits & 0x7FFFFFFF) < 0x8000
    kept = np.where(is_tiny, bits & np.uint32(0x80000000), bits)
    return np.where(is_nan(bits), np.uint32(0x7FC00000), kept)


def join(weight: np.ndarray, remainder: np.ndarray) -> np.ndarray:
    back = np.zeros(weight.size, dtype=np.uint32)
    streamer_native.join(weight, remainder, back.view(np.float32))
    return back


def test_split_is_its_definition_and_join_brings_every_number_back():
    bits = patterns()
    weight, remainder = split(bits)
    t = np.where(is_nan(bits), np.uint32(0x7FC00000), bits) + np.uint32(0x8000)
    assert np.array_equal(weight, (t >> 16).astype(np.uint16))
    assert np.array_equal(remainder, (t & 0xFFFF).astype(np.uint16))
    assert np.array_equal(join(weight, remainder), exact(bits))


def test_a_weight_that_was_written_is_the_master_to_half_a_unit_whatever_the_remainder():
    weight = np.repeat(np.arange(1 << 16, dtype=np.uint16), 6)
    remainder = np.tile(np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=np.uint16), 1 << 16)
    written = weight.astype(np.uint32) << np.uint32(16)
    found = join(weight, remainder)
    is_finite = (written & 0x7FFFFFFF) < INF_BITS
    assert not is_nan(found[is_finite]).any(), "zeros, of which half of the remainders would make a NaN"
    assert np.array_equal(found[weight % 0x8000 == 0], written[weight % 0x8000 == 0])
    distance = np.abs(found.astype(np.int64) - written.astype(np.int64))
    assert (distance[is_finite] <= 0x8000).all()
    assert is_nan(found[is_nan(written)]).all()


def test_the_weight_is_torchs_bfloat16_but_for_ties():
    bits = patterns()
    bits = bits[~is_nan(bits)]
    weight, _ = split(bits)
    cast = torch.from_numpy(bits.view(np.float32)).bfloat16().view(torch.uint16).numpy()
    tie_to_even_below = ((bits & 0xFFFF) == 0x8000) & ((bits >> 16) % 2 == 0)
    assert tie_to_even_below.any()
    assert np.array_equal(weight, cast + tie_to_even_below.astype(np.uint16))


@pytest.mark.parametrize("nan", [0x7FC00000, 0xFFC00000, 0x7F800001, 0x7FFF8000, 0xFFFFFFFF])
def test_the_weight_of_a_nan_is_nan(nan):
    weight, _ = split(np.array([nan], dtype=np.uint32))
    assert is_nan(weight.astype(np.uint32) << np.uint32(16)).all()


@pytest.mark.parametrize("size", [0, 1, 3, 16383, 16384, 16385, 3 * 16384 + 7])
def test_sizes_around_a_block(size):
    bits = np.random.default_rng(size).integers(0, 1 << 32, size + 2, dtype=np.uint32)
    weight = np.full(size + 2, 7, dtype=np.uint16)
    remainder = np.full(size + 2, 7, dtype=np.uint16)
    streamer_native.split(bits[1:-1].view(np.float32), weight[1:-1], remainder[1:-1])
    back = np.full(size + 2, 7, dtype=np.uint32)
    streamer_native.join(weight[1:-1], remainder[1:-1], back[1:-1].view(np.float32))
    assert np.array_equal(back[1:-1], exact(bits[1:-1]))
    for array in (weight, remainder, back):
        assert (array[0], array[-1]) == (7, 7), "written outside the slice"


def test_narrow_to_even_is_torchs_cast():
    @numba.njit
    def narrow(values, out):
        for i in range(values.size):
            out[i] = narrow_to_even(values[i])

    bits = patterns()
    narrowed = np.empty(bits.size, dtype=np.uint16)
    narrow(bits.view(np.float32), narrowed)
    cast = torch.from_numpy(bits.view(np.float32)).bfloat16().view(torch.uint16).numpy()
    nan = is_nan(bits)
    assert np.array_equal(narrowed[~nan], cast[~nan])
    # Which NaN torch gives depends on the machine and on the position in the tensor; that it is NaN does not.
    assert is_nan(cast[nan].astype(np.uint32) << np.uint32(16)).all()
    assert (narrowed[nan] == 0x7FC0).all()
