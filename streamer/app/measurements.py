"""How fast this machine is at what a step consists of: by a backend's own lanes, with streamer's kernels.

Every round measures each thing once, alone and beside others, so that whatever else the machine does meets
all alike.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence

from streamer.app import workloads
from streamer.app.visits import Visits
from streamer.app.workloads import Sizes, Work
from streamer.backends.base import Backend, Event, Lane, Span
from streamer.backends.operations import Operations

#: Rates (per second), seconds and shares of `Machine` and `Beside`, by field, one for each round.
Found = dict[str, list[float]]

#: Pairs of lanes that are measured beside one another: fields of `Beside` for the first and the second.
PAIRS = {
    (Lane.COMPUTE, Lane.HOST): ("compute_host", "host_compute"),
    (Lane.COMPUTE, Lane.H2D): ("compute_copy", "copy_compute"),
    (Lane.HOST, Lane.H2D): ("host_copy", "copy_host"),
    (Lane.H2D, Lane.D2H): ("copy_copy", "copy_copy"),
}


class Stopwatch:
    """Times pieces of work on the lanes of ``backend``, which must be idle, each repeated for ``seconds``."""

    def __init__(self, backend: Backend, seconds: float) -> None:
        self._backend = backend
        self._seconds = seconds

    def alone(self, lane: Lane, work: Work) -> float:
        """The median seconds of ``work``."""
        return self.together({lane: work}, {lane: self._once(lane, work)})[lane]

    def together(self, works: Mapping[Lane, Work], alone: Mapping[Lane, float]) -> dict[Lane, float]:
        """The median seconds of each of ``works`` while all are under way; ``alone`` takes so long."""
        # COMPUTE's work is the caller's: so that the others outlast a few pieces of it
        seconds = max(self._seconds, 2 * alone.get(Lane.COMPUTE, 0.0))
        events: dict[Lane, list[Event]] = {}
        for lane in works:
            if lane is not Lane.COMPUTE:
                count = max(2, math.ceil(seconds / alone[lane]))
                events[lane] = [self._submit(lane, works[lane]) for _ in range(count)]
        if Lane.COMPUTE in works:
            others = [theirs[-1] for theirs in events.values()]
            mine: list[Event] = []
            until = time.perf_counter() + seconds
            while len(mine) < 2 or self._goes_on(others, until):
                mine.append(self._submit(Lane.COMPUTE, works[Lane.COMPUTE]))
                mine[-1].wait()
            events[Lane.COMPUTE] = mine
        return while_all_work({lane: list(map(_span, mine)) for lane, mine in events.items()})

    def _goes_on(self, others: Sequence[Event], until: float) -> bool:
        if others:
            return any(event.span() is None for event in others)
        return time.perf_counter() < until

    def _once(self, lane: Lane, work: Work) -> float:
        span = _span(self._submit(lane, work))
        return max(span.end - span.start, 1e-6)

    def _submit(self, lane: Lane, work: Work) -> Event:
        return self._backend.submit(lane, work, (), 0)


class Measurements:
    """All that is measured on ``backend``, which must be idle, a round at a time."""

    def __init__(self, backend: Backend, sizes: Sizes) -> None:
        self._watch = Stopwatch(backend, sizes.seconds)
        # a device's loop runs ahead of it
        self._visits = Visits() if backend.device.type == "cpu" else None
        self._computing = workloads.computing(backend, sizes)
        update_bytes, update = workloads.update(backend, sizes)
        self._lanes: dict[Lane, Work] = {
            Lane.COMPUTE: self._computing["block"],
            Lane.H2D: workloads.copies(backend, Lane.H2D, sizes.copy_bytes),
            Lane.D2H: workloads.copies(backend, Lane.D2H, sizes.copy_bytes),
            Lane.HOST: update,
        }
        self._nbytes = {Lane.H2D: sizes.copy_bytes, Lane.D2H: sizes.copy_bytes, Lane.HOST: update_bytes}
        self._counts = {name: counted(work) for name, work in self._computing.items()}
        for lane, work in self._lanes.items():
            self._watch.alone(lane, work)  # the first time is slower than all others

    def round(self) -> dict[str, float]:
        """What `Machine` and `Beside` are to say of this machine, by field, measured once."""
        seconds = {name: self._watch.alone(Lane.COMPUTE, work) for name, work in self._computing.items()}
        values = _of_compute(seconds, self._counts)
        if self._visits is not None:
            values["seconds_per_visit"] = self._visits.seconds(values["seconds_per_op"])
        alone = {lane: self._watch.alone(lane, work) for lane, work in self._lanes.items()}
        for lane, nbytes in self._nbytes.items():
            values[f"{lane.value}_bytes_per_second"] = nbytes / alone[lane]
        for pair, names in PAIRS.items():
            beside = self._watch.together({lane: self._lanes[lane] for lane in pair}, alone)
            for lane, name in zip(pair, names, strict=True):
                values[name] = min(1.0, alone[lane] / beside[lane])
        return values

    def close(self) -> None:
        """Give back what it holds; the backend is the caller's."""
        if self._visits is not None:
            self._visits.close()


def measure(measurements: Measurements, *, rounds: int, budget_seconds: float) -> Found:
    """``rounds``, or as many (two or more) as there is time for in ``budget_seconds``."""
    began = time.perf_counter()
    found: Found = {}
    for number in range(rounds):
        passed = time.perf_counter() - began
        if number >= 2 and passed * (number + 1) / number > budget_seconds:
            break
        add(found, measurements.round())
    return found


def add(found: Found, values: Mapping[str, float]) -> None:
    """Add a round's ``values``."""
    for name, value in values.items():
        found.setdefault(name, []).append(value)


def counted(work: Work) -> Operations:
    """What ``work`` runs, as the virtual backend counts it."""
    counter = Operations()
    with counter:
        work()
    return counter


def _of_compute(seconds: Mapping[str, float], counts: Mapping[str, Operations]) -> dict[str, float]:
    names = {
        "products": "flops_per_second",
        "fp32 products": "fp32_flops_per_second",
        "attention": "attention_flops_per_second",
    }
    per_op = seconds["small"] / counts["small"].ops
    # of what is large, the launches are not the memory's
    moving = max(seconds["activations"] - per_op * counts["activations"].ops, 0.5 * seconds["activations"])
    return {
        **{field: counts[name].flops / seconds[name] for name, field in names.items() if name in seconds},
        "device_bytes_per_second": counts["activations"].nbytes / moving,
        "seconds_per_op": per_op,
    }


def _span(event: Event) -> Span:
    event.wait()
    span = event.span()
    assert span is not None, "it has been waited for"
    return span


def while_all_work(spans: Mapping[Lane, Sequence[Span]]) -> dict[Lane, float]:
    """The median seconds of the pieces that lie in the time that all lanes have work; where there are none,
    of those that lie in it for the most part."""
    begin = max(mine[0].start for mine in spans.values())
    end = min(mine[-1].end for mine in spans.values())

    def inside(span: Span) -> float:
        return (min(span.end, end) - max(span.start, begin)) / max(span.end - span.start, 1e-9)

    found = {}
    for lane, mine in spans.items():
        most = max(map(inside, mine))
        kept = [span for span in mine if inside(span) >= most - 1e-9]
        found[lane] = max(statistics.median(span.end - span.start for span in kept), 1e-9)
    return found
