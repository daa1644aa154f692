"""One shard's update: every parameter as if it were alone, in one launch, whatever the moments' dtype."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import streamer_native as native
from streamer.optim.update import ParamUpdate, UnitUpdate, update_shard
from streamer.store.host import HostStore
from streamer.store.layout import Layout, Param, Slice
from streamer.store.purposes import GRADIENTS, MOMENTS, SUMS
from streamer.store.shard import HostShard

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SIZES = (300, 5, 4096, 33, 257, 1000)
CALM = native.Hyper(1e-3, 0.9, 0.999, 1e-8, 0.1, 1)
OTHERS = [CALM, CALM, CALM._replace(lr=1e-2), CALM._replace(step=7), CALM._replace(beta1=0.8), CALM]


def shard_of(
    dtypes: list[torch.dtype], state_dtype: torch.dtype, sizes: tuple[int, ...] = SIZES
) -> HostShard:
    """A shard whose parameters hold the same values wherever they lie; weights are their own masters."""
    layout = Layout.of(
        Param(str(i), (n,), dtype, True) for i, (n, dtype) in enumerate(zip(sizes, dtypes, strict=True))
    )
    store = HostStore([layout], lambda nbytes, *, pinned: torch.zeros(nbytes, dtype=torch.uint8))
    store.add([GRADIENTS, SUMS, *MOMENTS[state_dtype]])
    (shard,) = store.shards
    for slice in layout.slices:
        generator = torch.Generator().manual_seed(slice.numel)
        shard.load(slice, torch.randn(slice.numel, generator=generator))
        slice.view(shard.gradient).copy_(torch.randn(slice.numel, generator=generator) * 0.01)
    return shard


def moments(shard: HostShard, slice: Slice, state_dtype: torch.dtype) -> list[torch.Tensor]:
    """One parameter's moments, and its scales in 8 bits."""
    return [purpose.part(slice, shard[purpose]).clone() for purpose in MOMENTS[state_dtype]]


def bits(shard: HostShard) -> list[torch.Tensor]:
    return [piece.clone().view(torch.uint8) for piece in shard.held.values()]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the native functions called, in order."""
    called: list[str] = []

    def counted(name: str, function: Callable[..., None], *args: Any, **options: Any) -> None:
        called.append(name)
        function(*args, **options)

    for name in ("adamw_fp32", "adamw_fp16", "adamw_split", "adamw_split_bf16", "adamw_split_int8"):
        monkeypatch.setattr(native, name, partial(counted, name, getattr(native, name)))
    return called


@pytest.mark.parametrize(
    ("dtype", "state_dtype", "function"),
    [
        (FP32, FP32, "adamw_fp32"),
        (FP16, FP32, "adamw_fp16"),
        (BF16, FP32, "adamw_split"),
        (BF16, BF16, "adamw_split_bf16"),
        (BF16, torch.int8, "adamw_split_int8"),
    ],
)
def test_one_launch_updates_each_parameter_as_if_alone_and_skips_the_rest(
    dtype: torch.dtype, state_dtype: torch.dtype, function: str, launches: list[str]
) -> None:
    shard = shard_of([dtype] * len(SIZES), state_dtype)
    before = shard_of([dtype] * len(SIZES), state_dtype)
    updates = [
        ParamUpdate(slice, hyper)
        for slice, hyper in zip(shard.layout.slices, OTHERS, strict=True)
        if slice.numel != 33
    ]
    update_shard(shard, UnitUpdate.of(updates, state_dtype), 0.5)
    assert launches == [function]
    for slice, hyper in zip(shard.layout.slices, OTHERS, strict=True):
        after = moments(shard, slice, state_dtype)
        if slice.numel == 33:
            assert torch.equal(shard.exact(slice), before.exact(slice))
            assert not any(bool(moment.any()) for moment in after)
            continue
        alone = shard_of([dtype], state_dtype, (slice.numel,))
        (only,) = alone.layout.slices
        update_shard(alone, UnitUpdate.of([ParamUpdate(only, hyper)], state_dtype), 0.5)
        assert torch.equal(shard.exact(slice), alone.exact(only))
        assert not torch.equal(shard.exact(slice), before.exact(slice))
        # what is rounded stochastically depends on the place in the shard, the rest does not
        for purpose, mine, theirs in zip(
            MOMENTS[state_dtype], after, moments(alone, only, state_dtype), strict=True
        ):
            if purpose.dtype == FP32:
                assert torch.equal(mine, theirs)


def test_an_fp32_sum_takes_the_place_of_the_gradient() -> None:
    for dtype, state_dtype in ((FP16, FP32), (BF16, FP32), (BF16, BF16), (BF16, torch.int8)):
        plain, summed = (shard_of([dtype] * len(SIZES), state_dtype) for _ in range(2))
        for slice in plain.layout.slices:
            slice.state(summed.sums).copy_(slice.view(summed.gradient))
            if slice.numel != 4096:  # one parameter has no sum
                slice.view(summed.gradient).fill_(9.0)
        slices = plain.layout.slices
        update_shard(plain, UnitUpdate.of([ParamUpdate(slice, CALM) for slice in slices], state_dtype), 0.5)
        updates = [ParamUpdate(slice, CALM, summed=slice.numel != 4096) for slice in slices]
        update_shard(summed, UnitUpdate.of(updates, state_dtype), 0.5)
        for slice in slices:
            assert torch.equal(plain.exact(slice), summed.exact(slice)), (dtype, state_dtype, slice.numel)


def test_garbage_in_the_padding_of_a_gradient_spoils_no_scale() -> None:
    clean, dirty = shard_of([BF16], torch.int8, (5,)), shard_of([BF16], torch.int8, (5,))
    dirty.gradient.view(BF16)[5:].fill_(1e9)
    for shard in (clean, dirty):
        update_shard(shard, UnitUpdate.of([ParamUpdate(shard.layout.slices[0], CALM)], torch.int8), 1.0)
    dirty.gradient.copy_(clean.gradient)
    assert all(torch.equal(a, b) for a, b in zip(bits(clean), bits(dirty), strict=True))


@pytest.mark.parametrize("state_dtype", [BF16, torch.int8])
def test_the_seed_reaches_the_rounding(state_dtype: torch.dtype) -> None:
    shards = [shard_of([BF16] * len(SIZES), state_dtype) for _ in range(3)]
    for shard, seed in zip(shards, (1, 1, 2), strict=True):
        updates = [ParamUpdate(slice, CALM) for slice in shard.layout.slices]
        update_shard(shard, UnitUpdate.of(updates, state_dtype), 1.0, seed=seed)
    second = [shard.held["exp_avg_sq"] for shard in shards]
    assert torch.equal(second[0], second[1])
    assert not torch.equal(second[0], second[2])


def test_update_bytes_by_layout() -> None:
    for dtype, state_dtype, expected in (
        (FP32, FP32, 28),
        (FP16, FP32, 30),
        (BF16, FP32, 26),
        (BF16, BF16, 18),
        (BF16, torch.int8, 14),
    ):
        run = ParamUpdate(Layout.of([Param("w", (64,), dtype, True)]).slices[0], CALM)
        whole = range(1 << 40)
        assert UnitUpdate.of([run], state_dtype).launches.nbytes(whole) == 64 * expected
        if dtype != FP32:
            assert UnitUpdate.of([run._replace(summed=True)], state_dtype).launches.nbytes(whole) == 64 * (
                expected + 2
            )
            assert UnitUpdate.of([run], state_dtype).launches.nbytes(range(48, 1 << 40)) == 16 * expected, (
                "a rank's share"
            )
