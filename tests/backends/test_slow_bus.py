"""A thread backend whose bus is slowed to a set bandwidth, by a clock of its own."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from streamer.backends.base import Lane
from streamer.backends.thread import ThreadBackend


class Clock:
    """Time passes while somebody sleeps or works, and in no other way."""

    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        # as a real one may: it ends early, once
        self.now += seconds / 2 if len(self.slept) == 1 else seconds

    def working(self, seconds: float) -> Callable[[], None]:
        def work() -> None:
            self.now += seconds

        return work


@pytest.mark.parametrize(
    ("lane", "nbytes", "works", "takes"),
    [
        (Lane.H2D, 1000, 0.5, 10.0),  # the bus is what takes long
        (Lane.D2H, 1000, 0.5, 4.0),
        (Lane.H2D, 1000, 12.0, 12.0),  # memory is
        (Lane.HOST, 1000, 0.5, 0.5),  # no bus
    ],
)
def test_a_copy_takes_as_long_as_its_bytes_on_the_bus(
    lane: Lane, nbytes: int, works: float, takes: float
) -> None:
    clock = Clock()
    rates = {Lane.H2D: 100.0, Lane.D2H: 250.0}
    backend = ThreadBackend(bytes_per_second=rates, clock=clock, sleep=clock.sleep)
    backend.submit(lane, clock.working(works), (), nbytes).wait()
    backend.close()
    assert clock.now - 100.0 == takes
    assert sum(clock.slept[1:], start=0.5 * sum(clock.slept[:1])) == takes - works


def test_other_lanes_are_not_slowed_and_an_error_is_not_slept_over() -> None:
    clock = Clock()
    backend = ThreadBackend(bytes_per_second={Lane.H2D: 1.0}, clock=clock, sleep=clock.sleep)
    backend.submit(Lane.D2H, clock.working(1.0), (), 1000).wait()
    with pytest.raises(ZeroDivisionError):
        backend.submit(Lane.H2D, lambda: 1 / 0, (), 1000).wait()
    backend.close()
    assert clock.slept == []


@pytest.mark.parametrize(
    ("lane", "rate"), [(Lane.HOST, 1.0), (Lane.COMPUTE, 1.0), (Lane.H2D, 0.0), (Lane.D2H, math.nan)]
)
def test_other_lanes_and_rates_are_refused(lane: Lane, rate: float) -> None:
    with pytest.raises(ValueError, match=rf"bytes_per_second of {lane.name} is {rate}: give one above 0"):
        ThreadBackend(bytes_per_second={lane: rate})
