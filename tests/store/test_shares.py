"""The shares of ranks: they cover a unit's state once, and updates of them are the update of the whole."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial

import pytest
import torch

from streamer.backends.direct_io import ALIGNMENT
from streamer.backends.disk import Extent
from streamer.optim.update import ParamUpdate, UnitUpdate, update_shard
from streamer.store import weights_on_disk
from streamer.store.host import HostStore
from streamer.store.layout import Layout, Param
from streamer.store.on_disk import chunks_of
from streamer.store.placement import weights_on_disk_bytes
from streamer.store.purposes import ALL_MOMENTS, GRADIENTS, MOMENTS, SUMS
from streamer.store.shares import Division, Share, shares_of
from streamer.store.weights_on_disk import WeightsInScratch
from streamer_native import BLOCK, QUANTUM, Hyper

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


@pytest.mark.parametrize("most", [BLOCK, 3 * BLOCK, 1 << 23])
@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_chunks_of_state_on_disk_are_each_in_one_share(size: int, most: int) -> None:
    of = layout(torch.bfloat16, torch.float32)
    chunks = chunks_of(of, most=most, division=Division(size))
    assert [element for chunk in chunks for element in range(chunk.start, chunk.stop)] == [
        *range(of.state_numel)
    ]
    assert [block for chunk in chunks for block in range(chunk.first_block, chunk.stop_block)] == [
        *range(of.state_blocks)
    ]
    for chunk in chunks:
        assert chunk.stop - chunk.start <= most
        # 8-bit blocks are whole, and belong to the elements
        inside = next(each for each in reversed(of.trainable) if each.index <= chunk.start)
        assert chunk.first_block == inside.block + (chunk.start - inside.index) // QUANTUM
    owners = [
        [chunk.start in share.elements and chunk.stop <= share.stop for share in shares_of(of, size)]
        for chunk in chunks
    ]
    assert all(sum(owner) == 1 for owner in owners)


@pytest.mark.parametrize("division", [Division(1, 3), Division(2, 2)])
def test_each_machine_has_the_chunks_that_its_ranks_update(division: Division) -> None:
    of = layout(torch.bfloat16, torch.float32)
    of_machines = [
        chunks_of(of, most=BLOCK, division=division, machine=machine) for machine in range(division.machines)
    ]
    for chunks, parts in zip(of_machines, division.parts(of), strict=True):
        found = [element for chunk in chunks for element in range(chunk.start, chunk.stop)]
        assert found == [element for part in parts for element in part.elements]
        assert [chunk.number for chunk in chunks] == [*range(len(chunks))]
    every = {(chunk.start, chunk.stop) for chunks in of_machines for chunk in chunks}
    assert every == {(chunk.start, chunk.stop) for chunk in chunks_of(of, most=BLOCK, division=division)}


class Drive:
    """Blocks that several ranks read and write, of which each has extents of the same numbers."""

    is_shared = True

    def __init__(self, blocks: dict[int, torch.Tensor]) -> None:
        self.blocks, self.numbers = blocks, dict[Extent, int]()

    def padded(self, nbytes: int) -> int:
        return -(-nbytes // ALIGNMENT) * ALIGNMENT

    def extent(self, nbytes: int) -> Extent:
        extent = Extent(nbytes, self.padded(nbytes), ())
        self.numbers[extent] = len(self.numbers)
        return extent

    def read(self, extent: Extent, into: torch.Tensor, part: range | None = None) -> None:
        moved = range(extent.padded_bytes) if part is None else part
        assert moved.start % ALIGNMENT == moved.stop % ALIGNMENT == 0
        into.copy_(self.blocks[self.numbers[extent]][moved.start : moved.stop])

    def write(self, extent: Extent, source: torch.Tensor, part: range | None = None) -> None:
        assert source.numel() == extent.padded_bytes and part is None
        self.blocks[self.numbers[extent]] = source.clone()


@pytest.mark.parametrize("size", [1, 2, 3, 8])
@pytest.mark.parametrize("piece", [1 << 13, 64 << 20])
def test_weights_on_disk_are_what_each_rank_has_written_of_its_share(
    size: int, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights_on_disk, "WEIGHTS_PIECE", piece)
    of, blocks = layout(torch.bfloat16, torch.float32), dict[int, torch.Tensor]()

    def uint8(nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    ranks = [
        WeightsInScratch(of, Drive(blocks), uint8, share=share, ranks=size) for share in shares_of(of, size)
    ]

    def buffer() -> torch.Tensor:
        # what is in a buffer beside the weights is never theirs
        return torch.randint(0, 256, (ranks[0].padded_bytes,), dtype=torch.uint8)

    first, second = buffer(), buffer()
    ranks[0].store(first)
    for rank, share in zip(ranks, shares_of(of, size), strict=True):
        into = buffer()
        rank.fetch(into, own=True)
        assert torch.equal(into[share.gradient], first[share.gradient])
        into[share.gradient] = second[share.gradient]
        rank.store(into, own=True)
    expected = torch.cat([second[: of.grad_nbytes], first[of.grad_nbytes : of.nbytes]])
    for rank in ranks:
        into = buffer()
        rank.fetch(into)
        assert torch.equal(into[: of.nbytes], expected)
        for each in of.slices:
            assert torch.equal(rank.read(each).view(torch.uint8), each.view(expected).view(torch.uint8))
        assert rank.disk_bytes == sum(len(block) for block in blocks.values())
        assert rank.disk_bytes == weights_on_disk_bytes(of, size)
    assert sum(rank.own_written_bytes for rank in ranks) <= ranks[0].disk_bytes


def test_a_unit_that_is_frozen_has_nothing_to_share() -> None:
    of = Layout.of([Param("a", (4,), torch.float32, trainable=False)])
    assert shares_of(of, 2) == [Share(0, 0, 0, 0, 0, 0)] * 2


def ranks_of(of: Layout, size: int) -> list[HostStore]:
    """The stores of so many ranks, which share the memory."""
    buffers = dict[int, torch.Tensor]()

    def allocate(count: Iterator[int], nbytes: int, *, pinned: bool) -> torch.Tensor:
        return buffers.setdefault(next(count), torch.zeros(nbytes, dtype=torch.uint8))

    return [
        HostStore([of], partial(allocate, itertools.count()), division=Division(size), rank=rank)
        for rank in range(size)
    ]


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
    alone, together = ranks_of(of, 1), ranks_of(of, 3)
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(each.numel, generator=generator) for each in of.slices]
    gradient = [torch.randn(each.numel, generator=generator) for each in of.slices]
    for stores in (alone, together):
        for store in stores:
            store.add([GRADIENTS, SUMS, *MOMENTS[state_dtype]])
        (shard,) = stores[0].shards
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
        for store in (*alone, *together):
            update_shard(store.shards[0], UnitUpdate.of(updates, state_dtype), 0.5, seed=3)
    (whole,), (shared,) = alone[0].shards, together[0].shards
    assert whole.held.keys() == shared.held.keys() > {purpose.name for purpose in MOMENTS[state_dtype]}
    assert {purpose.name for purpose in ALL_MOMENTS} & whole.held.keys()
    for name, piece in whole.held.items():
        assert torch.equal(piece.view(torch.uint8), shared.held[name].view(torch.uint8)), name
