"""How long a copy takes that nothing waits for: what the copies of a run are measured against.

On CUDA a plain `Tensor.copy_` between page-locked host memory of the exact size and the device, on a stream
of its own, many in a row, each between two CUDA events: the time it takes to launch one is hidden. On the
other backends the lane's own copy with nothing else under way: seconds of a thread, or of the virtual clock.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from functools import partial

import torch

from streamer.backends.base import Backend, Lane
from streamer.backends.cuda import CudaBackend

REPEATS = 20
#: Host bytes to go through before coming back to the first: what was copied just now would be in a cache.
HOST_BYTES = 256 << 20

#: What a copy goes into and what it comes from, one pair for each time that it is repeated.
Pairs = list[tuple[torch.Tensor, torch.Tensor]]


class RawCopies:
    """Copies on ``backend``, whose lanes must be idle. Keep it until the backend is closed: page-locked
    memory is unregistered there, and must not have become somebody else's before.

    ``measured`` are, by bytes, the median seconds of a copy in each direction, alone and beside the other.
    """

    def __init__(self, backend: Backend) -> None:
        self.measured: dict[int, dict[str, float]] = {}
        self._backend = backend
        self._hosts: list[torch.Tensor] = []

    def seconds(self, lane: Lane, nbytes: int) -> float:
        """Of a copy on ``lane`` (H2D or D2H) with nothing beside it, measured when it is first asked for.

        That takes up to 512 MiB of host memory, or two such copies, and two on the device.
        """
        if nbytes not in self.measured:
            self.measured[nbytes] = self._measure(nbytes)
        return self.measured[nbytes][f"{lane.value}_seconds"]

    def _measure(self, nbytes: int) -> dict[str, float]:
        pairs = {lane: self._pairs(lane, nbytes) for lane in (Lane.H2D, Lane.D2H)}
        run = _on_streams if isinstance(self._backend, CudaBackend) else _in_lanes
        run(self._backend, pairs, nbytes)  # the first time is slower than all others
        alone = {lane: run(self._backend, {lane: pairs[lane]}, nbytes)[lane] for lane in pairs}
        both = run(self._backend, pairs, nbytes)
        return {
            "h2d_seconds": alone[Lane.H2D],
            "d2h_seconds": alone[Lane.D2H],
            "h2d_beside_d2h_seconds": both[Lane.H2D],
            "d2h_beside_h2d_seconds": both[Lane.D2H],
        }

    def _pairs(self, lane: Lane, nbytes: int) -> Pairs:
        on_device = self._backend.device_buffer(nbytes)
        count = max(1, min(REPEATS, HOST_BYTES // nbytes))
        hosts = [self._backend.host_buffer(nbytes) for _ in range(count)]
        self._hosts += hosts
        for host in hosts:
            host.fill_(1)  # pages that were never written may all be one page of zeros
        in_turn = itertools.islice(itertools.cycle(hosts), REPEATS)
        return [(on_device, host) if lane is Lane.H2D else (host, on_device) for host in in_turn]


def _in_lanes(backend: Backend, pairs: dict[Lane, Pairs], nbytes: int) -> dict[Lane, float]:
    events = {
        lane: [backend.submit(lane, partial(backend.copy, *pair), (), nbytes) for pair in mine]
        for lane, mine in pairs.items()
    }
    seconds: dict[Lane, list[float]] = {lane: [] for lane in pairs}
    for lane, mine in events.items():
        for event in mine:
            event.wait()
            span = event.span()
            assert span is not None, "it has been waited for"
            seconds[lane].append(span.end - span.start)
    return {lane: statistics.median(values) for lane, values in seconds.items()}


def _on_streams(backend: Backend, pairs: dict[Lane, Pairs], nbytes: int) -> dict[Lane, float]:
    streams = {lane: torch.cuda.Stream(backend.device) for lane in pairs}
    marks = {lane: [torch.cuda.Event(enable_timing=True) for _ in range(REPEATS + 1)] for lane in pairs}
    torch.cuda.synchronize(backend.device)
    for lane, stream in streams.items():
        marks[lane][0].record(stream)
    for repeat in range(REPEATS):
        # in turn, so that neither direction is alone for long at the beginning
        for lane, stream in streams.items():
            into, source = pairs[lane][repeat]
            with torch.cuda.stream(stream):
                into.copy_(source, non_blocking=True)
            marks[lane][repeat + 1].record(stream)
    torch.cuda.synchronize(backend.device)
    return {lane: _median_between(marks[lane]) for lane in pairs}


def _median_between(marks: Sequence[torch.cuda.Event]) -> float:
    return statistics.median(begin.elapsed_time(end) / 1e3 for begin, end in itertools.pairwise(marks))
