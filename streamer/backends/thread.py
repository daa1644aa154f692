"""The CPU as its own accelerator: one thread per lane, so that every order of events can really happen.

The "device" is ordinary memory kept apart from the host shards. Copies and updates run in threads, the
layers run in the caller's. Delays per lane and poisoned slots bring races to light in ordinary tests.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import psutil
import torch

from streamer.backends.base import Backend, Event, Lane, Process, Span
from streamer.backends.mapping import mapped, reserved
from streamer.backends.worker import HostEvent, Worker

Delay = Callable[[], float]


class ThreadBackend(Backend):
    """Lanes as threads on the CPU.

    ``delays`` gives, per lane, a function that returns the seconds to wait before each piece of work.
    ``poison`` fills slots with NaN when they are given up.
    """

    def __init__(self, *, delays: Mapping[Lane, Delay] | None = None, poison: bool = False) -> None:
        self.device = torch.device("cpu")
        self.poison = poison
        self._process = Process()
        self._delays = dict(delays or {})
        self._workers = {
            lane: Worker(lane, delay=self._delays.get(lane)) for lane in (Lane.H2D, Lane.D2H, Lane.HOST)
        }

    def submit(self, lane: Lane, work: Callable[[], object], waits: Sequence[Event], nbytes: int) -> Event:
        if lane is not Lane.COMPUTE:
            return self._workers[lane].submit(work, waits)
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
        return int(psutil.virtual_memory().available)

    def close(self) -> None:
        Worker.close_all(self._workers.values())
