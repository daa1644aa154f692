"""What ranks exchange: values of any length, in the order of the ranks; who does something else is named."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from streamer.backends.ranks import MESSAGE, Channel, Ranks
from streamer.errors import RanksError
from tests.ranks.common import run_ranks


def value_of(rank: int) -> bytes:
    """Of one rank it fits into a message, of another it does so to the byte or nearly, of the last it does
    not."""
    return bytes([rank]) * (MESSAGE - 64, MESSAGE, 100 * MESSAGE)[rank]


def exchanges(rank: int) -> tuple[list[Any], list[Any], str]:
    ranks = Ranks(dist.group.WORLD, torch.device("cpu"))
    of_all = ranks.exchange("values", value_of(rank))
    of_two = ranks.exchange("two", rank, channel=Channel.BARRIER, of=(0, 2)) if rank != 1 else []
    try:
        ranks.exchange("one thing" if rank else "another thing")
    except RanksError as error:
        return of_all, of_two, str(error)
    return of_all, of_two, ""


def test_values_of_any_length_come_in_the_order_of_the_ranks() -> None:
    for rank, (of_all, of_two, error) in enumerate(run_ranks(3, exchanges)):
        assert of_all == [*map(value_of, range(3))]
        assert of_two == ([] if rank == 1 else [0, 2])
        assert error == (
            "the ranks do not do the same. Last came rank 0 to: another thing; rank 1, 2 to: one thing"
        )


def test_a_rank_that_is_alone_waits_for_nobody() -> None:
    alone = Ranks()
    assert alone.is_alone and alone.is_first and alone.is_first_of_machine
    assert alone.exchange("a value", 3) == [3]
    assert alone.on_first("work", lambda: 4) == 4
    assert alone.least("slots", 5) == 5
