"""Ranks whose lanes are late at random compute the same; without what they wait for they do not."""

from __future__ import annotations

from functools import cache

import pytest

from streamer.backends.base import Lane
from streamer.backends.thread import Delay, ThreadBackend
from streamer.engine.paging.across_ranks import AcrossRanks
from tests.ranks.common import run_ranks
from tests.ranks.programs import (
    CASE_OF_RACES,
    LATE,
    Arrays,
    differing,
    everyone,
    random_delays,
    run,
    train_alone,
)

Found = tuple[list[float], Arrays, Arrays]


def train_late(rank: int, seed: int, machines: int | None, gathers: bool) -> Found:
    """Train with slots that are poisoned, each lane late by other times on each rank."""
    return train_with(rank, random_delays(rank, seed), machines, gathers=gathers)


def train_with(
    rank: int, delays: dict[Lane, Delay], machines: int | None = None, *, gathers: bool = False
) -> Found:
    backend = ThreadBackend(delays=delays, poison=True)
    _, options, more = CASE_OF_RACES
    given = {**options, "process_group": everyone(machines), "backend": backend, "gather_weights": gathers}
    return run([[rank]], given, divisor=1, **more)


def train_without(rank: int, what: str) -> Found | None:
    """Train where ``what`` does nothing, and rank 1 updates late what rank 0 then reads at once. None where
    that is noticed: a layer's weights are others in backward than in forward. A slot in which nobody gathers
    keeps what it held before."""
    setattr(AcrossRanks, what, lambda *_: None)
    try:
        return train_with(rank, {Lane.HOST: lambda: 5 * LATE} if rank else {}, gathers=what == "all_gather")
    except (RuntimeError, ValueError):
        return None


@cache
def one_process() -> Found:
    return train_alone(2, CASE_OF_RACES)


@pytest.mark.parametrize(("seed", "machines", "gathers"), [(0, None, False), (2, 2, False), (0, None, True)])
def test_ranks_that_are_late_compute_the_same(seed: int, machines: int | None, *, gathers: bool) -> None:
    expected = one_process()
    for found in run_ranks(2, train_late, seed, machines, gathers):
        assert not differing(found, expected)


@pytest.mark.parametrize("without", ["after_update", "_average", "all_gather"])
def test_without_what_they_wait_for_they_do_not(without: str) -> None:
    expected = one_process()
    answers = run_ranks(2, train_without, without, timeout=10.0)
    assert any(found is None or differing(found, expected) for found in answers)
