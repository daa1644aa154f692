"""Derives the waits of ops from their reads and writes. Nothing else adds waits.

[Note: hazards]
Lanes run their work in order, independently of one another. An op must wait

- for the last write of each place that it reads (read after write), and
- for every read, since the last write, of each place that it writes (write after read).

Waits on the op's own lane are implied by the lane's order. Of several reads on one lane only the last one
counts. A write never waits for an earlier write directly: each place has one writing lane. Other writers
(HOST adds to a gradient that D2H has copied; the caller's thread) also read the place in the same op, so they
wait for the write, and later ops wait for their read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TypeVar

from streamer.backends.base import Backend, Event, Lane, Lock
from streamer.engine.schedule import op as ops
from streamer.engine.schedule.op import Op, Place
from streamer.engine.schedule.trace import Trace


@dataclass
class _Uses:
    write: Event | None = None
    reads: dict[Lane, Event] = field(default_factory=dict)


_UNUSED = _Uses()


class Hazards:
    """The last uses of every place. The two flags let tests prove that both kinds of waits are needed."""

    def __init__(self, *, read_after_write: bool = True, write_after_read: bool = True) -> None:
        self._read_after_write = read_after_write
        self._write_after_read = write_after_read
        self._uses: dict[Place, _Uses] = {}

    def waits(self, op: Op) -> list[Event]:
        """The events that ``op`` must wait for, each once, without those of its own lane."""
        waits: dict[int, Event] = {}
        if self._read_after_write:
            for place in op.reads:
                write = self._uses.get(place, _UNUSED).write
                if write is not None and write.lane is not op.lane:
                    waits[id(write)] = write
        if self._write_after_read:
            for place in op.writes:
                for lane, read in self._uses.get(place, _UNUSED).reads.items():
                    if lane is not op.lane:
                        waits[id(read)] = read
        return list(waits.values())

    def record(self, op: Op, done: Event) -> None:
        """Record that ``op`` was submitted; ``done`` is its end."""
        for place in op.writes:
            self._uses[place] = _Uses(write=done)
        for place in op.reads:
            self._uses.setdefault(place, _Uses()).reads[op.lane] = done

    def events(self) -> list[Event]:
        """The ends of all uses that later ops may wait for."""
        uses = self._uses.values()
        return [event for use in uses for event in (use.write, *use.reads.values()) if event is not None]

    def forget_failed(self) -> None:
        """Drop uses that have failed, so that later ops do not wait for them."""
        for use in self._uses.values():
            if use.write is not None and use.write.failed():
                use.write = None
            use.reads = {lane: read for lane, read in use.reads.items() if not read.failed()}

    def written(self) -> list[Place]:
        """All places that have been written."""
        return [place for place, uses in self._uses.items() if uses.write is not None]


T = TypeVar("T")


class Issuer:
    """Submits ops to a backend, with the waits for their reads and writes. [Note: hazards]

    Any thread may issue. No lock is held while work runs, or while the caller waits. So an op of COMPUTE is
    recorded after its work; until then its slot is marked as in use. [Note: threads]
    """

    def __init__(self, backend: Backend, hazards: Hazards) -> None:
        self.backend = backend
        self.trace = Trace()
        self._hazards = hazards
        #: held while an op gets its waits and is queued; the garbage collector may interrupt that
        self._lock = Lock()
        #: the number of ops that were issued, and of those that `synchronize` has waited for
        self._issued = self._awaited = 0
        #: by unit, issues an update that was deferred until its weights are read or waited for
        self.deferred: dict[int, Callable[[], None]] = {}

    def issue(self, op: Op, work: Callable[[], object]) -> Event:
        """Submit ``work`` as ``op``, on any lane except COMPUTE. Returns the event of its end."""
        with self._lock:
            waits = self._begin(op)
            event = self.backend.submit(op.lane, work, waits, op.nbytes)
            self._record(op, event, waits)
            return event

    def _begin(self, op: Op) -> Sequence[Event]:
        """The events to wait for of ``op``, which is about to be submitted."""
        with self._lock:
            self._issued += 1
            return self._hazards.waits(op)

    def _record(self, op: Op, event: Event, waits: Sequence[Event]) -> None:
        self._hazards.record(op, event)
        self.trace.add(op, event, waits)

    @contextmanager
    def computing(self, op: Op) -> Iterator[None]:
        """Run the block as ``op`` on COMPUTE. The op is recorded even if the block raises: it may have
        enqueued kernels that read a slot."""
        waits = self._begin(op)
        event: Event | None = None
        try:
            with self.backend.computing(waits) as event:
                yield
        finally:
            if event is not None:
                with self._lock:
                    self._record(op, event, waits)

    def mark(self, op: Op) -> Event:
        """Make COMPUTE wait for the places that ``op`` reads or writes. Returns an event at that point."""
        waits = self._begin(op)
        while True:
            with self.backend.computing(waits) as event:
                pass
            with self._lock:
                # others may have used its places since then, and its record would hide these uses
                since = self._hazards.waits(op)
                if all(use in waits for use in since):
                    self._record(op, event, waits)
                    return event
                waits = since

    def wait(self, places: Iterable[Place], *, to_write: bool = False) -> None:
        """Block the caller until its own thread may read (or write) ``places``."""
        self._issue_deferred()
        self.mark(ops.sync(tuple(places), to_write=to_write)).wait()

    def _issue_deferred(self) -> None:
        for unit in [*self.deferred]:
            self.deferred.pop(unit)()

    def forget_failures(self) -> bool:
        """Block the caller until all submitted work has ended, and clear its failures; the caller repairs
        their effects. Returns whether something had failed."""
        with self._lock:
            events = self._hazards.events()
        for event in events:
            with suppress(Exception):
                event.wait()
        with self._lock:
            self._hazards.forget_failed()
        return any(event.failed() for event in events)

    def synchronize(self) -> None:
        """Block the caller until all submitted work is done."""
        self._issue_deferred()
        with self._lock:
            issued, written = self._issued, self._hazards.written()
        # `state_dict` calls this for every module
        if issued != self._awaited:
            self.wait(written)
            # the wait is an op too
            self._awaited = issued + 1
