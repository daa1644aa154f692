"""The CPU as its own accelerator: one thread per lane, so that every order of events can really happen.

The "device" is ordinary memory kept apart from the host shards. Copies and updates run in threads, the
layers run in the caller's. Delays per lane and poisoned slots bring races to light in ordinary tests; a bus
of a set bandwidth shows what a slow one costs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from streamer.backends.base import Backend, Event, Lane, Process, Span
from streamer.backends.host_memory import available_bytes
from streamer.backends.mapping import mapped, reserved
from streamer.backends.worker import HostEvent, Worker

Delay = Callable[[], float]


class ThreadBackend(Backend):
    """Lanes as threads on the CPU.

    ``delays`` gives, per lane, a function that returns the seconds to wait before each piece of work.
    ``poison`` fills slots with NaN when they are given up.

    ``bytes_per_second`` gives, for H2D, D2H or both, the bandwidth of a slower bus than memory is: a copy of
    n bytes then lasts at least ``n / bandwidth`` seconds, its lane asleep once the bytes are there. A
    bandwidth above that of memory changes nothing. ``clock`` (seconds) and ``sleep`` are what that goes by.
    Raises ValueError for other lanes, and for a bandwidth that is not above 0.
    """

    def __init__(
        self,
        *,
        delays: Mapping[Lane, Delay] | None = None,
        poison: bool = False,
        bytes_per_second: Mapping[Lane, float] | None = None,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.device = torch.device("cpu")
        self.poison = poison
        self._bytes_per_second = dict(bytes_per_second or {})
        for lane, rate in self._bytes_per_second.items():
            if lane not in (Lane.H2D, Lane.D2H) or not rate > 0:
                raise ValueError(
                    f"bytes_per_second of {lane.name} is {rate}: give one above 0, for Lane.H2D or Lane.D2H"
                )
        self._clock = clock
        self._sleep = sleep
        self._process = Process()
        self._delays = dict(delays or {})
        self._workers = {
            lane: Worker(lane, delay=self._delays.get(lane)) for lane in (Lane.H2D, Lane.D2H, Lane.HOST)
        }

    def submit(self, lane: Lane, work: Callable[[], object], waits: Sequence[Event], nbytes: int) -> Event:
        if lane is not Lane.COMPUTE:
            rate = self._bytes_per_second.get(lane)
            return self._workers[lane].submit(
                work if rate is None else self._lasting(work, nbytes / rate), waits
            )
        self._process.check()
        done = HostEvent(lane)
        ready = time.perf_counter()
        for event in waits:
            event.wait()
        if lane in self._delays:
            time.sleep(self._delays[lane]())
        start = time.perf_counter()
        work()
        done.finish(Span(ready, start, time.perf_counter()))
        return done

    def _lasting(self, work: Callable[[], object], seconds: float) -> Callable[[], None]:
        """``work`` that ends no earlier than ``seconds`` after it began."""

        def lasting() -> None:
            end = self._clock() + seconds
            work()
            # a sleep may end early
            while (left := end - self._clock()) > 0:
                self._sleep(left)

        return lasting

    def copy(self, into: torch.Tensor, source: torch.Tensor) -> None:
        # NumPy copies on this thread alone; PyTorch would start a team of threads in every lane
        np.copyto(into.numpy(), source.numpy())

    def device_buffer(self, nbytes: int) -> torch.Tensor:
        # not from the C library's heap, which keeps what is freed
        return mapped(nbytes, in_forks=True)

    def host_buffer(self, nbytes: int, *, pinned: bool = True) -> torch.Tensor:
        return mapped(nbytes, in_forks=True)

    def host_reserve(self, nbytes: int) -> torch.Tensor:
        return reserved(nbytes, in_forks=True)

    def device_available(self) -> int:
        available = self.host_available()
        return available if self.device_limit is None else min(available, self.device_limit)

    def host_available(self) -> int:
        return available_bytes()

    def close(self) -> None:
        Worker.close_all(self._workers.values())
