"""What a step will take, by running it: the executor on the virtual backend is the plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from streamer.backends.base import Lane
from streamer.backends.virtual import VirtualBackend
from streamer.engine.executor import Executor


@dataclass(frozen=True)
class Prediction:
    """One step in seconds: all of it, and by lane how long it works and how long compute waits for it; and
    the FLOPs that it executes, by PyTorch's formulas."""

    seconds: float
    flops: int
    busy_seconds: Mapping[Lane, float]
    exposed_seconds: Mapping[Lane, float]

    @property
    def binding_lane(self) -> Lane:
        """The lane that works longest: no order of the same work could make the step shorter than that."""
        return max(Lane, key=lambda lane: self.busy_seconds[lane])


def predict_step(executor: Executor, step: Callable[[], object], *, warmup: int = 2) -> Prediction:
    """Run ``step`` (forward, backward, update) on the virtual backend of ``executor`` and time one of them.

    The ``warmup`` steps before it let the executor learn its order. Compute time is that of the operations of
    the layers, the head and the loss: see `streamer.backends.operations`.
    """
    backend, trace = executor.backend, executor.issuer.trace
    assert isinstance(backend, VirtualBackend), "another has a clock of its own"

    def busy_seconds() -> dict[Lane, float]:
        backend.let_caller_compute()
        return trace.busy_seconds | {Lane.COMPUTE: trace.busy_seconds[Lane.COMPUTE] + backend.caller_seconds}

    with backend.counting_caller():
        for _ in range(warmup):
            step()
        busy, exposed = busy_seconds(), dict(trace.exposed_seconds)
        before, flops = backend.now(), backend.flops
        step()
        after = busy_seconds()
    return Prediction(
        seconds=backend.now() - before,
        flops=backend.flops - flops,
        busy_seconds={lane: after[lane] - busy[lane] for lane in Lane},
        exposed_seconds={lane: trace.exposed_seconds[lane] - exposed[lane] for lane in Lane},
    )
