"""What goes to disk, and what stays in memory: [Note: placement]."""

from __future__ import annotations

import random

import pytest
import torch

from streamer.store.layout import Layout, Param
from streamer.store.placement import Way, make_room, place, place_moments, ring_bytes, state_sizes
from streamer.store.purposes import FP32, MOMENTS
from streamer.store.shares import Division

ALONE = Division()


def test_the_first_way_that_fits_and_of_it_what_comes_first_stays() -> None:
    ways = [Way(100), Way(60, {0: 30, 1: 10}), Way(20, {2: 10, 0: 40, 1: 10})]
    assert place(ways, 100) == (0, frozenset())
    assert place(ways, 99) == (1, {1})
    # unit 1 has room where unit 0 has none
    assert place(ways, 89) == (1, {0})
    assert place(ways, 69) == (1, {0, 1})
    assert place(ways, 59) == (2, {0})
    assert place(ways, 39) == (2, {0, 1})
    assert place(ways, 20) == (2, {0, 1, 2})
    with pytest.raises(MemoryError, match="host_memory needs 20 bytes and has 19 bytes .*: give more"):
        place(ways, 19, "give more")


def layouts(*numels: int) -> list[Layout]:
    return [Layout.of([Param("p", (numel,), torch.bfloat16, True)]) for numel in numels]


def test_moments_are_in_memory_where_all_of_them_fit() -> None:
    of, purposes = layouts(900, 900, 900, 64), MOMENTS[FP32]
    sizes = state_sizes(of, purposes, ALONE)
    assert list(sizes) == [3, 0, 1, 2], "the root is first, as in a forward"
    everything, ring = sum(sizes.values()), ring_bytes(of, purposes, ALONE)
    assert place_moments(of, purposes, everything, division=ALONE) == frozenset()
    assert ring > everything, "of layers as small as these"
    with pytest.raises(MemoryError, match="with what can be on disk there"):
        place_moments(of, purposes, everything - 1, division=ALONE)


def test_beside_the_ring_the_first_moments_stay() -> None:
    of, purposes = layouts(*[200_000] * 6, 64), MOMENTS[FP32]
    sizes, ring = state_sizes(of, purposes, ALONE), ring_bytes(of, purposes, ALONE)
    room = ring + sizes[6] + 2 * sizes[0]
    assert place_moments(of, purposes, room, division=ALONE) == {2, 3, 4, 5}
    assert place_moments(of, purposes, room - 1, division=ALONE) == {1, 2, 3, 4, 5}
    # of two ranks each has a ring
    two = Division(2)
    room = 2 * ring_bytes(of, purposes, two) + sizes[6] + 2 * sizes[0]
    assert place_moments(of, purposes, room, division=two) == {2, 3, 4, 5}
    with pytest.raises(MemoryError, match="give disk= a folder for what must be written"):
        place_moments(of, purposes, room, may_write=False, division=ALONE)


@pytest.mark.parametrize("seed", range(50))
def test_room_is_made_by_what_is_needed_last(seed: int) -> None:
    draw = random.Random(seed)
    count, size = draw.randint(1, 8), draw.randint(1, 100)
    movable = dict.fromkeys(range(count), size)
    ring = draw.randint(0, 50)
    ring_now = draw.randint(0, ring)
    lacking = draw.randint(1, count * size)
    gone = make_room(movable, lacking, ring=ring, ring_now=ring_now)
    more = lacking + ring - ring_now
    expected = -(-more // size)
    assert gone == (frozenset(range(count - expected, count)) if expected <= count else frozenset())
