"""The one place where work gets its waits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from streamer.backends.base import Backend, Event, Lane
from streamer.backends.threads import Lock
from streamer.engine import op as ops
from streamer.engine.hazards import Hazards
from streamer.engine.op import Op, OpKind, Resource
from streamer.engine.trace import Trace

T = TypeVar("T")


class Issuer:
    """Submits ops to a backend, each with the waits that its reads and writes call for. [Note: hazards]

    Any thread may issue. No lock is held while work runs or is waited for in the caller's thread. An op of
    COMPUTE is therefore recorded after its work, and until then the visit that issues it keeps its slot from
    others. [Note: threads]
    """

    def __init__(self, backend: Backend, hazards: Hazards) -> None:
        self.backend = backend
        self.trace = Trace()
        self._hazards = hazards
        #: held while an op gets its waits and its place in its lane; the garbage collector may interrupt that
        self._lock = Lock()
        #: ops that were issued, and those of them that were awaited by `synchronize`
        self._issued = self._awaited = 0

    def issue(self, op: Op, work: Callable[[], object]) -> Event:
        """Submit ``work`` as ``op``; the event of its end."""
        with self._lock:
            self._issued += 1
            waits = self._hazards.waits(op)
            if op.lane is not Lane.COMPUTE:
                event = self.backend.submit(op.lane, work, waits, op.nbytes)
                self._record(op, event, waits)
                return event
        while True:
            event = self.backend.submit(op.lane, work, waits, op.nbytes)
            with self._lock:
                # a sync reads and writes what others may have used meanwhile, which its record would hide
                since = self._hazards.waits(op) if op.kind is OpKind.SYNC else waits
                if all(use in waits for use in since):
                    self._record(op, event, waits)
                    return event
                waits = since

    def _record(self, op: Op, event: Event, waits: Sequence[Event]) -> None:
        self._hazards.record(op, event)
        self.trace.add(op, event, waits)

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
        with self._lock:
            issued, written = self._issued, self._hazards.written()
        # every module of a model asks when `state_dict` comes to it
        if issued != self._awaited:
            self.wait(written)
            # the wait is an op too
            self._awaited = issued + 1
