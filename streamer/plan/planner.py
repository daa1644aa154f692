"""What a step will take, by running it: the executor on the virtual backend is the plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from streamer.backends.base import Lane
from streamer.engine.executor import Executor


@dataclass(frozen=True)
class Prediction:
    """One step in seconds: all of it, and by lane how long it works and how long compute waits for it."""

    seconds: float
    busy_seconds: Mapping[Lane, float]
    exposed_seconds: Mapping[Lane, float]

    @property
    def binding_lane(self) -> Lane:
        """The lane that works longest: no order of the same work could make the step shorter than that."""
        return max(Lane, key=lambda lane: self.busy_seconds[lane])


def predict_step(executor: Executor, step: Callable[[], object], *, warmup: int = 2) -> Prediction:
    """Run ``step`` (forward, backward, update) on the virtual backend of ``executor`` and time one of them.

    The ``warmup`` steps before it let the executor learn its order. Only what runs in layers costs compute
    time; embeddings, head and loss are not counted.
    """
    trace = executor.issuer.trace
    for _ in range(warmup):
        step()
    before = _now(executor)
    busy, exposed = dict(trace.busy_seconds), dict(trace.exposed_seconds)
    step()
    return Prediction(
        seconds=_now(executor) - before,
        busy_seconds={lane: trace.busy_seconds[lane] - busy[lane] for lane in Lane},
        exposed_seconds={lane: trace.exposed_seconds[lane] - exposed[lane] for lane in Lane},
    )


def _now(executor: Executor) -> float:
    """When compute is done with what it has been given, on the virtual clock."""
    ends = [record.span.end for record in executor.issuer.trace.records() if record.op.lane is Lane.COMPUTE]
    return max(ends, default=0.0)
