"""Reads and writes turned into waits.

[Note: hazards]
Lanes run their work in order and know nothing of one another. An op must wait

- for the last write of whatever it reads (read after write), and
- for every read, since that write, of whatever it writes (write after read).

A wait on the op's own lane is implied by the lane's order, and of several reads on one lane the last
one stands for all. A write never has to wait for an earlier write alone: each resource has one writing
lane, and what else writes it (HOST adding to a gradient that D2H has brought, the caller's thread) reads
it in the same op, so that it waits for the write and is itself waited for as a read.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from streamer.backends.base import Event, Lane
from streamer.engine.op import Op, Resource


@dataclass
class _Uses:
    write: Event | None = None
    reads: dict[Lane, Event] = field(default_factory=dict)


class Hazards:
    """The last uses of every resource. The two flags exist to show in tests that either kind is needed."""

    def __init__(self, *, read_after_write: bool = True, write_after_read: bool = True) -> None:
        self._read_after_write = read_after_write
        self._write_after_read = write_after_read
        self._uses: dict[Resource, _Uses] = {}

    def waits(self, op: Op) -> list[Event]:
        """The events that ``op`` must wait for, each once, none of its own lane."""
        waits: dict[int, Event] = {}
        if self._read_after_write:
            for resource in op.reads:
                write = self._uses.get(resource, _Uses()).write
                if write is not None and write.lane is not op.lane:
                    waits[id(write)] = write
        if self._write_after_read:
            for resource in op.writes:
                for lane, read in self._uses.get(resource, _Uses()).reads.items():
                    if lane is not op.lane:
                        waits[id(read)] = read
        return list(waits.values())

    def record(self, op: Op, done: Event) -> None:
        """Note that ``op`` has been submitted and that ``done`` is its end."""
        for resource in op.writes:
            self._uses[resource] = _Uses(write=done)
        for resource in op.reads:
            self._uses.setdefault(resource, _Uses()).reads[op.lane] = done

    def written(self) -> list[Resource]:
        """All resources that have been written."""
        return [resource for resource, uses in self._uses.items() if uses.write is not None]
