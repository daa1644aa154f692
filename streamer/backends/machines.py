"""Ranks of several machines: which of them share one machine's memory, and how the table of their meetings
gets from machine to machine.

Every machine has a table of its own with a row for each rank of all machines (`streamer.backends.ranks`). The
ranks of the machine write their rows themselves. The rows of the others are copies, which the `Relay` of the
machine's first rank fetches, as it passes its own machine's rows on, through the store of torch.distributed:
so a meeting is the same wherever its ranks are. The store is slow: gradients go by collectives.

The relay sleeps until a rank of its machine rings its `Bell`, as each does when it comes to a meeting. While
that rank waits for other machines the relay asks the store again and again, for the store wakes nobody.
"""

from __future__ import annotations

import os
import pickle
import select
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import numpy as np
import torch.distributed as dist

from streamer.torch_private import group_store

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.distributed_c10d import Store

#: Seconds without a word from a machine after which its ranks have ended, at most; how many words of it are
#: expected in that time.
GONE_SECONDS, WORDS_EXPECTED = 30.0, 8
#: Seconds that a machine that leaves waits until the others have read its last word, and between two looks.
FAREWELL_SECONDS, FAREWELL_PAUSE = 2.0, 1e-3
#: Seconds between two looks at the store while a rank waits for other machines, at first and at most, and how
#: much longer each pause is than the one before, so that a look comes too late by a tenth of the wait.
FIRST_PAUSE, LONGEST_PAUSE, LONGER = 2e-5, 2e-2, 1.1
#: Seconds between two looks while none does: at who has ended without a word, and whether to say a new one.
IDLE_PAUSE = 0.1
#: The system waits for a bell for whole milliseconds, rounded up. This many seconds or less are slept.
SLEPT = 1e-3

#: In the table: a rank that says so comes to no meeting any more; a rank was found to have ended; nothing is
#: heard of its machine.
LEFT, ENDED, UNHEARD = 1, 2, 3

#: What to give `streamer.wrap` for ranks of several machines.
AS_MESH = 'process_group=init_device_mesh("cuda", (machines, ranks_per_machine))'


def seconds_until_gone(timeout: timedelta) -> float:
    """Seconds without a word from a machine after which its ranks are taken to have ended, among ranks that
    otherwise wait for one another for ``timeout``."""
    return min(GONE_SECONDS, timeout.total_seconds() / 2)


def machine_id() -> str:
    """What processes of one machine have in common, and no others."""
    booted = Path("/proc/sys/kernel/random/boot_id")
    return booted.read_text().strip() if booted.exists() else os.uname().nodename


@dataclass(frozen=True)
class Placement:
    """Which ranks are on which machine. Ranks are numbered as the group or the mesh has them."""

    #: by machine the numbers of its ranks, as many on each
    rows: tuple[tuple[int, ...], ...]
    rank: int

    @property
    def machine(self) -> int:
        """The number of the machine of this rank."""
        return self.place_of(self.rank)[0]

    def place_of(self, rank: int) -> tuple[int, int]:
        """The number of the machine of ``rank``, and its number among the ranks of that machine."""
        return next((number, row.index(rank)) for number, row in enumerate(self.rows) if rank in row)

    @property
    def row(self) -> tuple[int, ...]:
        """The ranks of this machine, which share its memory."""
        return self.rows[self.machine]

    @property
    def column(self) -> tuple[int, ...]:
        """The ranks that update the same share, one of each machine."""
        return tuple(row[self.row.index(self.rank)] for row in self.rows)


def is_mesh(group: ProcessGroup | DeviceMesh) -> TypeGuard[DeviceMesh]:
    """Whether ``group`` is a mesh. PyTorch may be built without torch.distributed, and then nothing is."""
    from torch.distributed.device_mesh import DeviceMesh

    return isinstance(group, DeviceMesh)


def members_of(group: ProcessGroup | DeviceMesh) -> list[int]:
    """The ranks of ``group`` by their numbers in the process group of all processes.

    Raises ValueError for a mesh of more than two dimensions.
    """
    if not is_mesh(group):
        return dist.get_process_group_ranks(cast("ProcessGroup", group))
    if group.ndim > 2:
        raise ValueError(
            f"process_group= is a mesh of {group.ndim} dimensions, where streamer has two, over machines and "
            f"over the ranks of one: give wrap {AS_MESH}, or the submesh of these two"
        )
    return [int(rank) for rank in group.mesh.flatten()]


def groups_of(group: ProcessGroup | DeviceMesh) -> list[ProcessGroup]:
    """The process groups by which all ranks of ``group`` are reached, one after the other: that of this
    rank's row first, then that of its column."""
    if not is_mesh(group):
        return [cast("ProcessGroup", group)]
    return [group.get_group(dim) for dim in reversed(range(group.ndim))]


def place(group: ProcessGroup | DeviceMesh, rank: int, machines: Sequence[str]) -> Placement:
    """Where the ranks of ``group`` are, of which each has told the ``machines``' names.

    Rows of a mesh are taken for machines as they are. Raises ValueError, on all ranks alike, where the ranks
    of a row are on several machines, or a process group has more ranks on one machine than on another.
    """
    if is_mesh(group) and group.ndim == 2:
        length = group.size(1)
        numbers = range(len(machines))
        rows = [tuple(numbers[start : start + length]) for start in numbers[::length]]
        for row in rows:
            if len(there := {machines[number] for number in row}) > 1:
                raise ValueError(
                    f"ranks {', '.join(map(str, row))} are a row of the mesh and on {len(there)} machines, "
                    f"which share no memory: let each row have the ranks of one machine, {AS_MESH}"
                )
        return Placement(tuple(rows), rank)
    counts = Counter(machines)
    if len({*counts.values()}) > 1:
        raise ValueError(
            f"the ranks of process_group are on {len(counts)} machines, {min(counts.values())} on one and "
            f"{max(counts.values())} on another: start as many on each (torchrun --nproc-per-node), or give "
            f"wrap {AS_MESH} of those that it is to have"
        )
    by_machine = {name: tuple(n for n, each in enumerate(machines) if each == name) for name in counts}
    return Placement(tuple(by_machine.values()), rank)


def store_of(name: str, timeout: timedelta) -> Store:
    """A connection of its own to the store of torch.distributed, for keys that begin with ``name``."""
    from torch.distributed.distributed_c10d import PrefixStore

    store = PrefixStore(f"streamer/{name}", group_store(dist.group.WORLD))
    store.set_timeout(timeout)
    return store


class Bell:
    """Wakes the relay of a machine: a pipe, which the other ranks of that machine open by its ``path``. What
    becomes of one of them changes nothing for the others."""

    def __init__(self, path: str | None = None) -> None:
        # file objects: once closed they are not the number of what is opened next
        self._heard: FileIO | None = None
        if path is None:
            heard, rung = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
            self._heard = FileIO(heard, "rb")
        else:
            rung = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        self._rung = FileIO(rung, "wb")
        #: nobody rings it any more, or waits for it
        self.close = weakref.finalize(self, _close, self._rung, self._heard)
        self.close.atexit = False  # the relay may wait for it until the process has ended

    @property
    def number(self) -> int:
        """The file by which others ring it, as long as this process has it open."""
        return self._rung.fileno()

    def ring(self) -> None:
        """End the relay's wait, or its next one."""
        # where the relay's process has ended nobody hears; a pipe that is full has been rung
        with suppress(BrokenPipeError):
            self._rung.write(b"\0")

    def wait(self, seconds: float) -> None:
        """Return after so many seconds, or soon after the bell is rung. It is silent then."""
        assert self._heard is not None, "it is heard where it was made"
        if seconds <= SLEPT:
            time.sleep(seconds)
            seconds = 0.0
        poll = select.poll()
        poll.register(self._heard, select.POLLIN)
        if poll.poll(1e3 * seconds):
            self._heard.read(select.PIPE_BUF)


def _close(*files: FileIO | None) -> None:
    for file in files:
        if file is not None:
            file.close()


#: So many channels of meetings come first of which other machines are told: see `streamer.backends.ranks`.
PASSED_ON = 3

#: What a machine tells of one of its ranks: its number, the fields ``come``, ``order``, ``left`` and
#: ``error`` of its row, and of the last two meetings of each channel what they were for and what it brought.
_Told = tuple[int, list[int], int, int, bytes, list[tuple[bytes, bytes]]]


class Relay:
    """Passes the rows of this machine's ranks on to the other machines, and brings theirs into the table.

    A machine's word in the store is replaced by its next one. None is lost: a rank comes to no meeting before
    all have come to the last, so a word holds the last two. Each says something new at least so often that a
    machine without a new one must have ended.
    """

    def __init__(
        self,
        table: Any,
        placement: Placement,
        store: Store,
        timeout: timedelta,
        watch: Callable[[int], object],
        bell: Bell,
    ) -> None:
        """Says this machine's first word. ``watch`` marks a rank of this machine that has ended; ``bell`` is
        rung by a rank that has changed its row."""
        self._table = table
        self._rows = placement.rows
        self._machine = placement.machine
        self._store = store
        self._gone_seconds = seconds_until_gone(timeout)
        self._watch = watch
        self._bell = bell
        self._heard: dict[int, tuple[bytes, float]] = {}
        #: the machines whose last word was heard
        self._farewells: set[int] = set()
        self._sent: tuple[object, ...] = ()
        #: held while a word is said, by the relay's thread or by that of a rank that goes on
        self._saying = threading.Lock()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="streamer relay", daemon=True)
        self._send(is_last=False)

    def start(self) -> None:
        """Listen to the other machines, each of which has said its first word."""
        self._thread.start()

    def tell(self) -> None:
        """The rank of this process goes on, and may have ended before the relay's thread looks again: say now
        to which meeting it has come."""
        # a store that is gone has nobody to tell
        with suppress(RuntimeError):
            self._send(is_last=False)

    def leave(self) -> None:
        """Say a last word. The first machine, where the store is, waits a little until the others have heard
        it, after which they leave the store alone."""
        self._stopped.set()
        self._bell.ring()
        if self._thread.ident is None:
            return
        self._thread.join(FAREWELL_SECONDS)
        if self._thread.is_alive() or 0 in self._farewells:
            return
        # a store that is gone has nobody to tell
        with suppress(RuntimeError):
            self._send(is_last=True)
            until = time.monotonic() + FAREWELL_SECONDS
            while not self._machine and time.monotonic() < until:
                if all(map(self._has_heard, self._others())):
                    return
                time.sleep(FAREWELL_PAUSE)

    def _others(self) -> list[int]:
        return [machine for machine in range(len(self._rows)) if machine != self._machine]

    def _has_heard(self, machine: int) -> bool:
        """Whether ``machine`` has said its last word, as it does when it has heard that of this one."""
        is_last, _, _ = pickle.loads(self._store.get(str(machine)))
        return bool(is_last) or self._has_left(machine)

    def _has_left(self, machine: int) -> bool:
        return all(self._table["left"][rank] for rank in self._rows[machine])

    def _run(self) -> None:
        pause, listened = FIRST_PAUSE, 0.0
        try:
            while not self._stopped.is_set():
                is_awaited = self._is_awaited()
                self._bell.wait(pause if is_awaited else IDLE_PAUSE)
                has_news = self._send(is_last=False)
                now = time.monotonic()
                if self._is_awaited() or now - listened >= IDLE_PAUSE:
                    listened = now
                    has_news |= any([self._listen(machine, now) for machine in self._others()])
                if 0 in self._farewells:
                    # nobody meets without the first machine, whose store may be gone after this
                    self._send(is_last=True)
                    return
                pause = FIRST_PAUSE if has_news or not is_awaited else min(LONGEST_PAUSE, LONGER * pause)
        except RuntimeError:
            # the store is on the first machine: where it does not answer, that machine is gone
            for machine in [0] if self._machine else self._others():
                self._miss(machine)

    def _is_awaited(self) -> bool:
        """Whether a rank of this machine waits for one of another machine."""
        come = self._table["come"][:, :PASSED_ON]
        here = come[[*self._rows[self._machine]]].max(axis=0)
        return bool((come < here).any())

    def _send(self, *, is_last: bool) -> bool:
        """Say a word if there is something new to say. Whether there was."""
        with self._saying:
            return self._say(is_last=is_last)

    def _say(self, *, is_last: bool) -> bool:
        mine = self._rows[self._machine]
        for rank in mine:
            self._watch(rank)
        beat = int(time.monotonic() / self._gone_seconds * WORDS_EXPECTED)
        come, left = self._table["come"][[*mine], :PASSED_ON], self._table["left"][[*mine]]
        errors = self._table["error"][[*mine]]
        news = (is_last, beat, come.tolist(), left.tolist(), errors.tolist())
        if news == self._sent:
            return False
        told = [self._told(rank, is_last=is_last) for rank in mine]
        word: Any = pickle.dumps((is_last, beat, told))  # PyTorch names str alone
        self._store.set(str(self._machine), word)
        self._sent = news
        return True

    def _told(self, rank: int, *, is_last: bool) -> _Told:
        row = self._table[rank]
        # a rank writes what it brings, then that it has come, last that it has left: they are read the other
        # way round, so that who has left is not taken to have stayed away from its last meeting
        left, come, order = int(row["left"]), row["come"][:PASSED_ON].tolist(), int(row["order"])
        error = bytes(row["error"])
        brought = [
            (bytes(row["words"][place]), row["brought"][place][: int(row["nbytes"][place])].tobytes())
            for place in np.ndindex(PASSED_ON, 2)
        ]
        return rank, come, order, left or (LEFT if is_last else 0), error, brought

    def _listen(self, machine: int, now: float) -> bool:
        """Bring the last word of ``machine`` into the table. Whether it was new."""
        word = self._store.get(str(machine))
        before, since = self._heard.get(machine, (b"", now))
        if word == before:
            if now - since > self._gone_seconds and not self._has_left(machine):
                self._miss(machine)
            return False
        self._heard[machine] = word, now
        is_last, _, told = pickle.loads(word)
        for each in told:
            self._take(*each)
        if is_last:
            self._farewells.add(machine)
        return True

    def _take(
        self,
        rank: int,
        come: list[int],
        order: int,
        left: int,
        error: bytes,
        brought: list[tuple[bytes, bytes]],
    ) -> None:
        row = self._table[rank]
        for place, (words, data) in zip(np.ndindex(PASSED_ON, 2), brought, strict=True):
            row["words"][place] = words
            row["nbytes"][place] = len(data)
            row["brought"][place][: len(data)] = np.frombuffer(data, np.uint8)
        row["error"] = error
        row["order"], row["come"][:PASSED_ON], row["left"] = order, come, max(left, int(row["left"]))

    def _miss(self, machine: int) -> None:
        for rank in self._rows[machine]:
            self._table["left"][rank] = self._table["left"][rank] or UNHEARD
