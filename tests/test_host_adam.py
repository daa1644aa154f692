"""One shard's update: every parameter as if it were alone, in one launch, whatever the moments' dtype."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import streamer_native as native
from streamer.host_adam import (
    EXP_AVG_SCALES,
    EXP_AVG_SQ_SCALES,
    Run,
    first_scales,
    merge,
    num_scales,
    update_bytes,
    update_shard,
)
from streamer.memory.host import EXACT_REMAINDER, EXP_AVG, EXP_AVG_SQ, HostShard
from streamer.memory.layout import Layout, Param

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
    numel = layout.state_numel
    second_dtype = torch.uint8 if state_dtype == torch.int8 else state_dtype
    shard = HostShard(
        layout,
        weight=torch.zeros(layout.nbytes, dtype=torch.uint8),
        gradient=torch.zeros(layout.grad_nbytes, dtype=torch.uint8),
        remainder=torch.full((numel,), EXACT_REMAINDER - (1 << 16), dtype=torch.int16).view(torch.uint16),
        master=torch.zeros(numel),
        state={
            EXP_AVG: torch.zeros(numel, dtype=state_dtype),
            EXP_AVG_SQ: torch.zeros(numel, dtype=second_dtype),
        },
    )
    for name in (EXP_AVG_SCALES, EXP_AVG_SQ_SCALES):
        shard.state[name] = torch.zeros(num_scales(layout))
    for slice in layout.slices:
        generator = torch.Generator().manual_seed(slice.numel)
        shard.load(slice, torch.randn(slice.numel, generator=generator))
        slice.view(shard.gradient).copy_(torch.randn(slice.numel, generator=generator) * 0.01)
    return shard


def bits(shard: HostShard) -> list[torch.Tensor]:
    return [
        t.clone().view(torch.uint8)
        for t in (shard.weight, shard.remainder, shard.master, *shard.state.values())
    ]


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
    runs = [
        Run.of(slice, hyper)
        for slice, hyper in zip(shard.layout.slices, OTHERS, strict=True)
        if slice.numel != 33
    ]
    update_shard(shard, merge(runs), 0.5)
    assert launches == [function]
    for slice, hyper in zip(shard.layout.slices, OTHERS, strict=True):
        if slice.numel == 33:
            assert torch.equal(shard.exact(slice), before.exact(slice))
            assert not slice.state(shard.state[EXP_AVG]).any()
            continue
        alone = shard_of([dtype], state_dtype, (slice.numel,))
        (only,) = alone.layout.slices
        update_shard(alone, [Run.of(only, hyper)], 0.5)
        assert torch.equal(shard.exact(slice), alone.exact(only))
        assert not torch.equal(shard.exact(slice), before.exact(slice))
        if state_dtype == FP32:
            assert torch.equal(slice.state(shard.state[EXP_AVG_SQ]), only.state(alone.state[EXP_AVG_SQ]))
        if state_dtype == torch.int8:
            blocks = -(-slice.numel // native.QUANTUM)
            first = first_scales(shard.layout)[slice.index]
            for name in (EXP_AVG_SCALES, EXP_AVG_SQ_SCALES):
                assert torch.equal(shard.state[name][first : first + blocks], alone.state[name][:blocks])


def test_a_parameter_that_is_skipped_keeps_its_8_bit_moments() -> None:
    shard = shard_of([BF16] * len(SIZES), torch.int8)
    slices = shard.layout.slices
    update_shard(shard, merge([Run.of(slice, CALM) for slice in slices]), 1.0)
    skipped, first = slices[2], first_scales(shard.layout)[slices[2].index]
    kept = [
        skipped.state(shard.state[EXP_AVG]).clone(),
        skipped.state(shard.state[EXP_AVG_SQ]).clone(),
        shard.state[EXP_AVG_SCALES][first : first + 16].clone(),
    ]
    assert all(bool(tensor.any()) for tensor in kept)
    update_shard(shard, merge([Run.of(s, CALM._replace(step=2)) for s in slices if s is not skipped]), 9.0)
    assert torch.equal(skipped.state(shard.state[EXP_AVG]), kept[0])
    assert torch.equal(skipped.state(shard.state[EXP_AVG_SQ]), kept[1])
    assert torch.equal(shard.state[EXP_AVG_SCALES][first : first + 16], kept[2])


def test_garbage_in_the_padding_of_a_gradient_spoils_no_scale() -> None:
    clean, dirty = shard_of([BF16], torch.int8, (5,)), shard_of([BF16], torch.int8, (5,))
    dirty.gradient.view(BF16)[5:].fill_(1e9)
    for shard in (clean, dirty):
        update_shard(shard, [Run.of(shard.layout.slices[0], CALM)], 1.0)
    assert all(torch.equal(a, b) for a, b in zip(bits(clean), bits(dirty), strict=True))


@pytest.mark.parametrize(
    ("dtypes", "expected"),
    [
        ([BF16, BF16, FP32, FP32, FP16, FP16], ["adamw_split", "adamw_fp32", "adamw_fp16"]),
        # bf16 that lies at two distances between its places in the weights and in the state
        ([BF16, FP32, BF16, BF16, BF16, BF16], ["adamw_split", "adamw_fp32", "adamw_split"]),
    ],
)
def test_a_unit_of_mixed_dtypes_takes_a_launch_for_each(
    dtypes: list[torch.dtype], expected: list[str], launches: list[str]
) -> None:
    shard = shard_of(dtypes, FP32)
    update_shard(shard, merge([Run.of(slice, CALM) for slice in shard.layout.slices]), 1.0)
    assert launches == expected
    for slice in shard.layout.slices:
        alone = shard_of([slice.param.dtype], FP32, (slice.numel,))
        update_shard(alone, [Run.of(alone.layout.slices[0], CALM)], 1.0)
        assert torch.equal(shard.exact(slice), alone.exact(alone.layout.slices[0]))


def test_the_seed_reaches_the_rounding() -> None:
    shards = [shard_of([BF16] * len(SIZES), BF16) for _ in range(3)]
    for shard, seed in zip(shards, (1, 1, 2), strict=True):
        update_shard(shard, [Run.of(slice, CALM) for slice in shard.layout.slices], 1.0, seed)
    second = [shard.state[EXP_AVG_SQ] for shard in shards]
    assert torch.equal(second[0], second[1])
    assert not torch.equal(second[0], second[2])


def test_short_moments_of_fp32_parameters_are_refused() -> None:
    shard = shard_of([FP32], BF16, (5,))
    with pytest.raises(ValueError, match="leave state_dtype at float32"):
        update_shard(shard, [Run.of(shard.layout.slices[0], CALM)], 1.0)


@pytest.mark.parametrize("sizes", [(1,) * 50, (256, 256), (255, 257, 1), (10_000, 33, 31, 513), SIZES])
def test_scales_of_parameters_are_apart_and_fit(sizes: tuple[int, ...]) -> None:
    layout = Layout.of(Param(str(i), (n,), BF16, i != 1) for i, n in enumerate(sizes))
    taken: list[int] = []
    for slice in layout.trainable:
        first = first_scales(layout)[slice.index]
        taken.extend(range(first, first - (-slice.numel // native.QUANTUM)))
    assert len(set(taken)) == len(taken)
    assert min(taken) >= 0
    assert max(taken) < num_scales(layout)


def test_update_bytes_by_layout() -> None:
    for dtype, state_dtype, expected in (
        (FP32, FP32, 28),
        (FP16, FP32, 30),
        (BF16, FP32, 26),
        (BF16, BF16, 18),
        (BF16, torch.int8, 14),
    ):
        assert update_bytes([Run(dtype, 0, 0, 64, CALM)], state_dtype) == 64 * expected
