"""The one place where work gets its waits."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from streamer.backends.base import Backend, Event
from streamer.engine import op as ops
from streamer.engine.hazards import Hazards
from streamer.engine.op import Op, Resource
from streamer.engine.trace import Trace

T = TypeVar("T")


class Issuer:
    """Submits ops to a backend, each with the waits that its reads and writes call for. [Note: hazards]"""

    def __init__(self, backend: Backend, hazards: Hazards) -> None:
        self.backend = backend
        self.trace = Trace()
        self._hazards = hazards
        self._all_is_done = False

    def issue(self, op: Op, work: Callable[[], object]) -> Event:
        """Submit ``work`` as ``op``; the event of its end."""
        self._all_is_done = False
        waits = self._hazards.waits(op)
        event = self.backend.submit(op.lane, work, waits, op.nbytes)
        self._hazards.record(op, event)
        self.trace.add(op, event, waits)
        return event

    def compute(self, op: Op, work: Callable[[], T]) -> T:
        """Run ``work`` as ``op`` on COMPUTE and return its result.

        What it raises is raised only after the op is recorded: work that failed may have enqueued
        kernels that read a slot.
        """
        results: list[T] = []
        errors: list[BaseException] = []

        def run() -> None:
            try:
                results.append(work())
            except BaseException as error:  # noqa: BLE001 - raised again below
                errors.append(error)

        self.issue(op, run)
        if errors:
            raise errors.pop()
        return results.pop()

    def wait(self, resources: Iterable[Resource], *, to_write: bool = False) -> None:
        """Block the caller until its own thread may read (or write) ``resources``."""
        self.issue(ops.sync(tuple(resources), to_write=to_write), lambda: None).wait()

    def synchronize(self) -> None:
        """Block the caller until everything that was submitted is done."""
        # every module of a model asks when `state_dict` comes to it
        if not self._all_is_done:
            self.wait(self._hazards.written())
            self._all_is_done = True
