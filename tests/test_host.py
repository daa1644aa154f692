"""Host shards: what is streamed, and the exact fp32 beside it."""

from __future__ import annotations

import pytest
import torch

from streamer.memory.host import (
    ADAMW_PURPOSES,
    EXP_AVG,
    EXP_AVG_SQ,
    GRADIENTS,
    MASTERS,
    MODEL_PURPOSES,
    REMAINDERS,
    STAGING,
    WEIGHTS,
    HostStore,
    host_bytes,
)
from streamer.memory.layout import Layout, Param

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
DTYPES = (FP32, BF16, FP16)


def zeros(nbytes: int) -> torch.Tensor:
    return torch.zeros(nbytes, dtype=torch.uint8)


def layout_of(*dtypes: torch.dtype, shape: tuple[int, ...] = (40, 50), frozen: int = 0) -> Layout:
    """One parameter of each dtype, the last ``frozen`` of them not trained."""
    last = len(dtypes) - frozen
    return Layout.of([Param(f"p{i}", shape, dtype, i < last) for i, dtype in enumerate(dtypes)])


def store_of(*layouts: Layout) -> HostStore:
    return HostStore(layouts, zeros)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view({2: torch.int16, 4: torch.int32}[tensor.dtype.itemsize])


def random_patterns(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """fp32 of uniformly random bits, the first rows denormals, zeros, infinities, NaNs and ties."""
    generator = torch.Generator().manual_seed(seed)
    patterns = torch.randint(-(1 << 31), 1 << 31, shape, generator=generator, dtype=torch.int64)
    flat = patterns.view(-1)
    flat[:200] = torch.randint(1, 1 << 23, (200,), generator=generator)  # positive denormals
    flat[200:400] = flat[:200] - (1 << 31)  # and negative ones
    special = [0, -(1 << 31), 0x7F800000, 0x7FC00001, 0x7F800001, 0x7F7FFFFF, 0x3F808000, 0x3F818000, 1]
    flat[400 : 400 + len(special)] = torch.tensor(special)
    return patterns.to(torch.int32).view(torch.float32)


def finite_values(shape: tuple[int, ...] = (40, 50), seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", DTYPES)
def test_exact_fp32_comes_back_to_the_bit(dtype: torch.dtype) -> None:
    shard = store_of(layout_of(dtype)).shards[0]
    (slice,) = shard.layout.slices
    values = random_patterns((40, 50))
    shard.load(slice, values)
    exact = shard.exact(slice)
    assert (exact.dtype, exact.shape) == (FP32, values.shape)
    assert torch.equal(bits(exact), bits(values))


@pytest.mark.parametrize("dtype", DTYPES)
def test_streamed_weight_is_the_rounded_master(dtype: torch.dtype) -> None:
    shard = store_of(layout_of(dtype)).shards[0]
    (slice,) = shard.layout.slices
    values = finite_values()
    shard.load(slice, values)
    # random values have no ties, so every rounding to nearest agrees
    assert torch.equal(slice.view(shard.weight), values.to(dtype))


def test_bf16_ties_round_away_from_zero() -> None:
    shard = store_of(layout_of(BF16, shape=(4,))).shards[0]
    (slice,) = shard.layout.slices
    ties = torch.tensor([0x3F808000, 0x3F818000], dtype=torch.int32).view(FP32)
    shard.load(slice, torch.cat([ties, -ties]))
    away = torch.tensor([0x3F81, 0x3F82], dtype=torch.int16).view(BF16)
    assert torch.equal(slice.view(shard.weight), torch.cat([away, -away]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_loading_the_streamed_dtype_gives_itself(dtype: torch.dtype) -> None:
    shard = store_of(layout_of(dtype)).shards[0]
    (slice,) = shard.layout.slices
    shard.load(slice, finite_values(seed=1))  # leaves remainders that the next load must not keep
    values = finite_values(seed=2).to(dtype)
    shard.load(slice, values)
    assert torch.equal(bits(slice.view(shard.weight)), bits(values))
    assert torch.equal(bits(shard.exact(slice)), bits(values.to(FP32)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rebase_takes_the_written_weight_as_master(dtype: torch.dtype) -> None:
    shard = store_of(layout_of(dtype)).shards[0]
    (slice,) = shard.layout.slices
    shard.load(slice, finite_values(seed=1))
    written = finite_values(seed=2).to(dtype)
    slice.view(shard.weight).copy_(written)
    if dtype is not FP32:
        assert not torch.equal(shard.exact(slice), written.to(FP32)), "stale until it is rebased"
    shard.rebase(slice)
    assert torch.equal(bits(shard.exact(slice)), bits(written.to(FP32)))


def test_double_precision_is_rounded_once() -> None:
    shard = store_of(layout_of(BF16)).shards[0]
    (slice,) = shard.layout.slices
    values = finite_values().double() / 3
    shard.load(slice, values)
    assert torch.equal(shard.exact(slice), values.float())


@pytest.mark.parametrize("dtype", DTYPES)
def test_frozen_parameter_has_no_master(dtype: torch.dtype) -> None:
    layout = layout_of(dtype, frozen=1)
    assert host_bytes([layout], (REMAINDERS, MASTERS, GRADIENTS, EXP_AVG)) == dict.fromkeys(
        (REMAINDERS, MASTERS, GRADIENTS, EXP_AVG), 0
    )
    shard = store_of(layout).shards[0]
    (slice,) = layout.slices
    values = finite_values()
    shard.load(slice, values)
    exact = shard.exact(slice)
    assert exact.dtype == dtype
    assert torch.equal(exact, values.to(dtype))


def test_neighbours_of_other_dtypes_are_left_alone() -> None:
    shards = store_of(layout_of(BF16, FP32, FP16, BF16, FP16, frozen=2), layout_of(FP16, BF16)).shards
    places = [(shard, slice) for shard in shards for slice in shard.layout.slices]
    values = [random_patterns((40, 50), seed) for seed in range(len(places))]
    for (shard, slice), value in zip(places, values, strict=True):
        shard.load(slice, value)
    for (shard, slice), value in zip(places, values, strict=True):
        expected = value if slice.param.trainable else value.to(slice.param.dtype)
        assert torch.equal(bits(shard.exact(slice)), bits(expected)), slice.param.name


def test_exact_is_a_copy() -> None:
    for dtype in DTYPES:
        shard = store_of(layout_of(dtype)).shards[0]
        (slice,) = shard.layout.slices
        values = finite_values()
        shard.load(slice, values)
        shard.exact(slice).fill_(7)
        assert torch.equal(shard.exact(slice), values)


MANY = (
    layout_of(BF16, BF16),
    layout_of(BF16, FP32, shape=(3,)),
    layout_of(FP16, shape=(130,)),
    layout_of(FP32, BF16, frozen=2),
    layout_of(FP32, FP16, frozen=1),
)


def test_bytes_by_purpose_are_the_planned_ones() -> None:
    store = store_of(*MANY)
    assert store.bytes_by_purpose() == host_bytes(MANY, MODEL_PURPOSES)
    store.add_state(ADAMW_PURPOSES)
    assert store.bytes_by_purpose() == host_bytes(MANY, (*MODEL_PURPOSES, *ADAMW_PURPOSES))
    store.staging(2)
    largest = max(layout.grad_nbytes for layout in MANY)
    assert store.bytes_by_purpose() == host_bytes(MANY, (*MODEL_PURPOSES, *ADAMW_PURPOSES)) | {
        STAGING: 2 * largest
    }


def test_twelve_bytes_a_parameter_and_two_of_gradient() -> None:
    numel = 64 * 64
    assert host_bytes([layout_of(BF16, shape=(64, 64))], (*MODEL_PURPOSES, *ADAMW_PURPOSES)) == {
        WEIGHTS: 2 * numel,
        REMAINDERS: 2 * numel,
        MASTERS: 0,
        GRADIENTS: 2 * numel,
        EXP_AVG: 4 * numel,
        EXP_AVG_SQ: 4 * numel,
    }


def test_purposes_that_take_nothing_are_left_out() -> None:
    assert list(store_of(layout_of(FP32)).bytes_by_purpose()) == [WEIGHTS, GRADIENTS]
    assert list(store_of(layout_of(FP16)).bytes_by_purpose()) == [WEIGHTS, MASTERS, GRADIENTS]


def test_shards_are_aligned_and_apart() -> None:
    store = store_of(*MANY)
    store.add_state(ADAMW_PURPOSES)
    for number, shard in enumerate(store.shards, start=1):
        for tensor in (shard.weight, shard.gradient, shard.remainder, shard.master, *shard.state.values()):
            assert tensor.numel() == 0 or tensor.data_ptr() % 64 == 0
            tensor.view(torch.uint8).fill_(number)
        assert (shard.weight.numel(), shard.gradient.numel()) == (
            shard.layout.nbytes,
            shard.layout.grad_nbytes,
        )
    for number, shard in enumerate(store.shards, start=1):
        for tensor in (shard.weight, shard.gradient, shard.remainder, shard.master, *shard.state.values()):
            assert bool((tensor.view(torch.uint8) == number).all())


def test_state_is_given_once() -> None:
    store = store_of(layout_of(FP32))
    store.add_state(ADAMW_PURPOSES)
    store.shards[0].state[EXP_AVG].fill_(3.0)
    store.add_state(ADAMW_PURPOSES)
    state = store.shards[0].state
    assert sorted(state) == sorted(ADAMW_PURPOSES)
    assert bool((state[EXP_AVG] == 3).all())
    assert not state[EXP_AVG_SQ].any()


def test_staging_holds_any_gradient() -> None:
    store = store_of(*MANY)
    largest = max(layout.grad_nbytes for layout in MANY)
    assert [buffer.numel() for buffer in store.staging(3)] == [largest] * 3
    assert store_of(layout_of(FP32, frozen=1)).staging(2) == []
