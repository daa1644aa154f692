"""A bus and a disk that are slowed to a set rate, by a clock of the test's own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from bench.slow import SlowBus, SlowDisk
from streamer.backends.base import Lane
from streamer.backends.direct_io import ALIGNMENT
from streamer.backends.disk import Direction
from streamer.backends.host_memory import mapped


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
    ("lane", "works", "takes"),
    [
        (Lane.H2D, 0.5, 10.0),  # the bus is what takes long
        (Lane.D2H, 12.0, 12.0),  # memory is
        (Lane.HOST, 0.5, 0.5),  # no bus
    ],
)
def test_a_copy_takes_as_long_as_its_bytes_on_the_bus(lane: Lane, works: float, takes: float) -> None:
    clock = Clock()
    backend = SlowBus(100.0, clock=clock, sleep=clock.sleep)
    backend.submit(lane, clock.working(works), (), 1000).wait()
    backend.close()
    assert clock.now - 100.0 == takes


@pytest.mark.parametrize(
    ("rates", "writes", "reads"),
    [
        ({Direction.READ: 8192.0}, 0.0, 1.0),
        ({Direction.WRITE: 4096.0, Direction.READ: 16384.0}, 2.0, 0.5),
    ],
)
def test_a_transfer_takes_as_long_as_its_bytes(
    tmp_path: Path, rates: dict[Direction, float], writes: float, reads: float
) -> None:
    clock = Clock()
    scratch = SlowDisk([tmp_path], direct_io=False, rates=rates, clock=clock, sleep=clock.sleep)
    extent, buffer = scratch.extent(5000), mapped(2 * ALIGNMENT, in_forks=False)  # 8192 with its padding
    scratch.allocate()
    scratch.write(extent, buffer)
    assert clock.now == 100 + writes
    scratch.read(extent, buffer)
    assert clock.now == 100 + writes + reads
    # a part is half of it
    scratch.read(extent, buffer, range(ALIGNMENT, 2 * ALIGNMENT))
    assert clock.now == 100 + writes + 1.5 * reads
    scratch.close()
