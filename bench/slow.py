"""A bus and a disk that are slowed to constant rates."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from streamer.backends.base import COPIES, Event, Lane
from streamer.backends.disk import Direction, Extent, Scratch
from streamer.backends.thread import SHORT_COPY, ThreadBackend

Clock = Callable[[], float]
Sleep = Callable[[float], None]


class SlowBus(ThreadBackend):
    """A copy of n bytes in either direction takes at least ``n / bytes_per_second`` seconds."""

    def __init__(
        self, bytes_per_second: float, clock: Clock = time.perf_counter, sleep: Sleep = time.sleep
    ) -> None:
        super().__init__()
        self._rate, self._clock, self._sleep = bytes_per_second, clock, sleep

    def queue(self, lane: Lane, work: Callable[[], object], waits: Sequence[Event], nbytes: int) -> Event:
        if lane not in COPIES:
            return super().queue(lane, work, waits, nbytes)

        def lasting() -> None:
            end = self._clock() + nbytes / self._rate
            work()
            # a sleep may end early
            while (left := end - self._clock()) > 0:
                self._sleep(left)

        # never in the caller's thread
        return super().queue(lane, lasting, waits, max(nbytes, SHORT_COPY + 1))


class SlowDisk(Scratch):
    """A transfer of n bytes takes at least ``n / rate`` seconds, with the rate of its direction."""

    def __init__(
        self,
        *args: Any,
        rates: Mapping[Direction, float],
        clock: Clock = time.perf_counter,
        sleep: Sleep = time.sleep,
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        self._rates, self._clock, self._sleep = rates, clock, sleep

    def _transfer(
        self, extent: Extent, buffer: torch.Tensor, direction: Direction, part: range | None
    ) -> None:
        nbytes = extent.padded_bytes if part is None else len(part)
        end = self._clock() + nbytes / self._rates.get(direction, float("inf"))
        super()._transfer(extent, buffer, direction, part)
        while direction in self._rates and (left := end - self._clock()) > 0:
            self._sleep(left)
