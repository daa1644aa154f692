"""Host shards: what is streamed, and the exact fp32 beside it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from streamer.store.host import HostStore
from streamer.store.layout import Layout, Param, Slice
from streamer.store.ledger import Ledger
from streamer.store.purposes import (
    GRADIENTS,
    MASTERS,
    MODEL,
    MOMENTS,
    REMAINDERS,
    SAVED_INPUTS,
    STAGING,
    SUMS,
    WEIGHTS,
    host_bytes,
)
from streamer.store.shard import HostShard

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
DTYPES = (FP32, BF16, FP16)
#: half of bfloat16's smallest number: masters below it are zero
SMALLEST = 2.0**-134


def zeros(nbytes: int, *, pinned: bool) -> torch.Tensor:
    return torch.zeros(nbytes, dtype=torch.uint8)


def layout_of(*dtypes: torch.dtype, shape: tuple[int, ...] = (40, 50), frozen: int = 0) -> Layout:
    """One parameter of each dtype, the last ``frozen`` of them not trained."""
    last = len(dtypes) - frozen
    return Layout.of([Param(f"p{i}", shape, dtype, i < last) for i, dtype in enumerate(dtypes)])


def store_of(*layouts: Layout) -> HostStore:
    store = HostStore(layouts, zeros)
    store.add([GRADIENTS])
    return store


def one(dtype: torch.dtype, **options: Any) -> tuple[HostShard, Slice]:
    """A shard of one parameter."""
    (shard,) = store_of(layout_of(dtype, **options)).shards
    return shard, shard.layout.slices[0]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view({2: torch.int16, 4: torch.int32}[tensor.dtype.itemsize])


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same bits, but for NaN, which need only be NaN."""
    other = torch.where(one.isnan() & other.isnan(), one, other)
    return torch.equal(bits(one), bits(other))


def random_patterns(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """fp32 of uniformly random bits, the first rows denormals, zeros, infinities, NaNs and ties."""
    generator = torch.Generator().manual_seed(seed)
    patterns = torch.randint(-(1 << 31), 1 << 31, shape, generator=generator, dtype=torch.int64)
    flat = patterns.view(-1)
    flat[:200] = torch.randint(1, 1 << 23, (200,), generator=generator)  # positive denormals
    flat[200:400] = flat[:200] - (1 << 31)  # and negative ones
    special = [0, -(1 << 31), 0x7F800000, 0x7FC00001, 0x7F800001, 0x7F7FFFFF, 0x3F808000, 0x3F818000, 1]
    flat[400 : 400 + len(special)] = torch.tensor(special)
    values = patterns.to(torch.int32).view(torch.float32)
    return torch.where(values.abs() < SMALLEST, values * 0, values)


def finite_values(shape: tuple[int, ...] = (40, 50), seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", DTYPES)
def test_exact_fp32_comes_back_to_the_bit(dtype: torch.dtype) -> None:
    shard, slice = one(dtype)
    values = random_patterns((40, 50))
    shard.load(slice, values)
    exact = shard.exact(slice)
    assert (exact.dtype, exact.shape) == (FP32, values.shape)
    assert same(exact, values)
    assert same(shard.joined(slice), values), "on any thread"
    exact.fill_(7)
    assert same(shard.exact(slice), values), "it was a copy"


@pytest.mark.parametrize("dtype", DTYPES)
def test_streamed_weight_is_the_rounded_master(dtype: torch.dtype) -> None:
    shard, slice = one(dtype)
    values = finite_values()
    shard.load(slice, values)
    # random values have no ties, so every rounding to nearest agrees
    assert torch.equal(slice.view(shard.weight), values.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_loading_the_streamed_dtype_gives_itself(dtype: torch.dtype) -> None:
    shard, slice = one(dtype)
    shard.load(slice, finite_values(seed=1))  # leaves remainders that the next load must not keep
    values = finite_values(seed=2).to(dtype)
    shard.load(slice, values)
    assert torch.equal(bits(slice.view(shard.weight)), bits(values))
    assert torch.equal(bits(shard.exact(slice)), bits(values.to(FP32)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_weight_that_was_written_is_the_master_and_others_keep_theirs(dtype: torch.dtype) -> None:
    """[Note: masters]"""
    shard, slice = one(dtype)
    masters, written = finite_values(seed=1), finite_values(seed=2).to(dtype)
    shard.load(slice, masters)
    weight = slice.view(shard.weight)
    before = weight.clone()
    weight.copy_(written)
    weight[:20] = before[:20]
    for exact in (shard.exact(slice), shard.joined(slice)):
        assert torch.equal(exact[:20], masters[:20])
        half = torch.finfo(dtype).eps / 2 if dtype == BF16 else 0.0
        torch.testing.assert_close(exact[20:], written[20:].to(FP32), rtol=half, atol=0)
    assert torch.equal(shard.values(slice, dtype), weight), "in its own dtype it is what runs"


def test_double_precision_is_rounded_once() -> None:
    shard, slice = one(BF16)
    values = finite_values().double() / 3
    shard.load(slice, values)
    assert torch.equal(shard.exact(slice), values.float())


@pytest.mark.parametrize("dtype", DTYPES)
def test_frozen_parameter_has_no_master(dtype: torch.dtype) -> None:
    shard, slice = one(dtype, frozen=1)
    purposes = (REMAINDERS, MASTERS, GRADIENTS, SUMS, *MOMENTS[torch.int8])
    assert host_bytes([shard.layout], purposes) == {purpose.name: 0 for purpose in purposes}
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
        assert same(shard.exact(slice), expected), slice.param.name


MANY = (
    layout_of(BF16, BF16),
    layout_of(BF16, FP32, shape=(3,)),
    layout_of(FP16, shape=(130,)),
    layout_of(FP32, BF16, frozen=2),
    layout_of(FP32, FP16, frozen=1),
)


def test_shards_are_aligned_and_apart() -> None:
    store = store_of(*MANY)
    store.add([SUMS, *MOMENTS[torch.int8]])

    def pieces(shard: HostShard) -> list[torch.Tensor]:
        assert len(shard.held) == 9
        return list(shard.held.values())

    for number, shard in enumerate(store.shards, start=1):
        for tensor in pieces(shard):
            assert tensor.numel() == 0 or tensor.data_ptr() % 64 == 0
            tensor.view(torch.uint8).fill_(number)
        assert (shard.weight.numel(), shard.gradient.numel()) == (
            shard.layout.nbytes,
            shard.layout.grad_nbytes,
        )
    for number, shard in enumerate(store.shards, start=1):
        for tensor in pieces(shard):
            assert bool((tensor.view(torch.uint8) == number).all())


def test_bytes_by_purpose_are_the_planned_ones_and_moments_make_room_for_others() -> None:
    store = store_of(*MANY)
    for state_dtype in MOMENTS:
        assert not store.holds(MOMENTS[state_dtype])
        store.add(MOMENTS[state_dtype])
        assert store.bytes_by_purpose() == host_bytes(MANY, (*MODEL, GRADIENTS, *MOMENTS[state_dtype]))
        assert [other for other in MOMENTS if store.holds(MOMENTS[other])] == [state_dtype]
        store.drop(MOMENTS[state_dtype])
    assert store.bytes_by_purpose() == host_bytes(MANY, (*MODEL, GRADIENTS))
    store.staging(2, 4096)
    assert store.bytes_by_purpose()[STAGING] == 2 * 4096


def test_gradients_of_some_shards_alone() -> None:
    store = HostStore(MANY, zeros)
    store.add([GRADIENTS], only=store.shards[-1:])
    assert [shard.gradient.numel() for shard in store.shards] == [0, 0, 0, 0, MANY[-1].grad_nbytes]
    assert store.bytes_by_purpose()["gradients"] == host_bytes(MANY[-1:], [GRADIENTS])["gradients"]


def test_only_what_crosses_the_bus_is_pinned() -> None:
    asked: dict[bool, int] = {True: 0, False: 0}

    def allocate(nbytes: int, *, pinned: bool) -> torch.Tensor:
        asked[pinned] += nbytes
        return zeros(nbytes, pinned=pinned)

    def pin(buffer: torch.Tensor) -> None:
        asked[True] += buffer.numel()
        asked[False] -= buffer.numel()

    store = HostStore(MANY, allocate)
    store.pin(pin)
    store.add([GRADIENTS, SUMS, *MOMENTS[FP32]])
    store.staging(2, 4096)
    assert Ledger({}, store.bytes_by_purpose() | {SAVED_INPUTS: 7}).pinned_host_bytes == asked[True] + 7
    crossing = host_bytes(MANY, [WEIGHTS, GRADIENTS, SUMS])
    staying = host_bytes(MANY, [REMAINDERS, MASTERS, *MOMENTS[FP32]])
    assert asked == {True: sum(crossing.values()) + 2 * 4096, False: sum(staying.values())}
