"""The shares of ranks: they cover a unit's state once, and updates of them are the update of the whole."""

from __future__ import annotations

import pytest
import torch

from streamer.memory.host import HostStore
from streamer.memory.layout import Layout, Param
from streamer.memory.purposes import ALL_MOMENTS, GRADIENTS, MOMENTS, SUMS
from streamer.memory.shares import Share, shares_of
from streamer.optim.update import ParamUpdate, update_shard
from streamer_native import BLOCK, Hyper

#: Parameters of less than a block, of blocks and a rest, and without elements.
SHAPES = [(7,), (3, BLOCK), (BLOCK + 1,), (0,), (5, 1000), (2, BLOCK), (1,)]


def layout(*dtypes: torch.dtype) -> Layout:
    return Layout.of(
        Param(f"{number}", shape, dtypes[number % len(dtypes)], trainable=number != 4)
        for number, shape in enumerate(SHAPES)
    )


@pytest.mark.parametrize("dtypes", [(torch.float32,), (torch.bfloat16,), (torch.bfloat16, torch.float32)])
@pytest.mark.parametrize("size", [1, 2, 3, 8, 64])
def test_shares_cover_the_state_once(size: int, dtypes: tuple[torch.dtype, ...]) -> None:
    of = layout(*dtypes)
    shares = shares_of(of, size)
    assert [element for share in shares for element in share.elements] == [*range(of.state_numel)]
    whole = range(of.grad_nbytes)
    assert [byte for share in shares for byte in whole[share.gradient]] == [*whole]
    for share in shares[1:]:
        at = [(share.start - each.index, share.first_byte - each.offset, each) for each in of.trainable]
        assert share.start in (0, of.state_numel) or any(
            elements >= 0 and not elements % BLOCK and nbytes == elements * each.dtype.itemsize
            for elements, nbytes, each in at
        )
    # as even as blocks and parameters allow
    assert max(share.stop - share.start for share in shares) <= of.state_numel // size + 2 * BLOCK


def test_a_unit_that_is_frozen_has_nothing_to_share() -> None:
    of = Layout.of([Param("a", (4,), torch.float32, trainable=False)])
    assert shares_of(of, 2) == [Share(0, 0, 0, 0)] * 2


@pytest.mark.parametrize(
    ("dtype", "state_dtype"),
    [
        (torch.float32, torch.float32),
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.int8),
    ],
)
@pytest.mark.parametrize("summed", [False, True])
def test_updates_of_shares_are_the_update_of_the_whole(
    dtype: torch.dtype, state_dtype: torch.dtype, *, summed: bool
) -> None:
    of = layout(dtype)
    stores = [HostStore([of], lambda n, *, pinned: torch.zeros(n, dtype=torch.uint8)) for _ in range(2)]
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(each.numel, generator=generator) for each in of.slices]
    gradient = [torch.randn(each.numel, generator=generator) for each in of.slices]
    for store in stores:
        store.add([GRADIENTS, SUMS, *MOMENTS[state_dtype]])
        (shard,) = store.shards
        for each, weight, grad in zip(of.slices, weights, gradient, strict=True):
            shard.load(each, weight.view(each.param.shape))
            if each.param.trainable:
                each.view(shard.gradient).copy_(grad.view(each.param.shape))
                if shard.sums.numel():
                    each.state(shard.sums).copy_(grad.view(each.param.shape))
    for step in (1, 2):
        hyper = Hyper(1e-2, 0.9, 0.99, 1e-8, 0.1, step)
        updates = [
            ParamUpdate(each, hyper, summed=summed and dtype != torch.float32) for each in of.trainable
        ]
        for store, shares in zip(stores, (1, 3), strict=True):
            (shard,) = store.shards
            for shard.share in shares_of(of, shares):
                update_shard(shard, updates, state_dtype, 0.5, seed=3)
    (whole,), (shared,) = (store.shards for store in stores)
    assert whole.held.keys() == shared.held.keys() > {purpose.name for purpose in MOMENTS[state_dtype]}
    assert {purpose.name for purpose in ALL_MOMENTS} & whole.held.keys()
    for name, piece in whole.held.items():
        assert torch.equal(piece.view(torch.uint8), shared.held[name].view(torch.uint8)), name
