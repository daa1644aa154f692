"""Ranks: processes that train one model together, the memory that those of one machine share, and the places
where they wait for one another.

Ranks run one program, so each comes to the same *meetings* in the same order. A meeting says in words what
it is for, and ends when all ranks have come to it. Where the words differ, or the orders, the ranks have come
apart: each of them raises `RanksError` with what every rank was about to do, in place of waiting for ever. So
it does for a rank that has ended, or that does not come within the group's timeout.

Meetings are kept in a table in shared memory, in several `Channel`s, because each rank has several threads
that meet others: the caller's, and those of the lanes COLLECTIVE and BARRIER, which are given their work by
the caller in an order that is the program's too. Ranks of other machines have their rows in the table as
well, which a `Relay` brings.

Shared memory is a file without a name (memfd_create), which other ranks open through /proc: nothing is left
of it when the last process has ended, however it ends.
"""

from __future__ import annotations

import enum
import os
import pickle
import select
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from streamer.backends.base import Failure, Process
from streamer.backends.host_memory import map_file, touch
from streamer.backends.machines import (
    ENDED,
    LEFT,
    UNHEARD,
    Bell,
    Placement,
    Relay,
    groups_of,
    is_mesh,
    machine_id,
    members_of,
    place,
    seconds_until_gone,
    store_of,
)
from streamer.errors import RanksError, shortened
from streamer.torch_private import all_gather_flat, group_timeout

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


T = TypeVar("T")


class Channel(enum.IntEnum):
    """Meetings that come one after the other, in one thread of each rank."""

    CALLER = 0
    COLLECTIVE = 1
    BARRIER = 2
    MACHINE = 3  # in the thread of COLLECTIVE too, of one machine's ranks alone


class Turn(NamedTuple):
    """Work of a lane with a meeting in it: the meeting's channel, and the work's number among all such work
    of this rank, whatever its channel, in the order in which the caller has issued it."""

    channel: Channel
    number: int


_OF_CALLER = Turn(Channel.CALLER, 0)


#: Bytes of what a meeting is for, of what a rank brings to it, and of the error that ends a rank, at most.
WORDS, BROUGHT, ERROR = 1 << 8, 1 << 18, 1 << 11
#: Seconds of sleep between two looks at the table: at first, and at most.
FIRST_PAUSE, LONGEST_PAUSE = 2e-5, 1e-3
#: Seconds between two looks at whether the other processes are alive.
LOOK_SECONDS = 0.02
#: Bytes that are copied from machine to machine at a time.
REPLICATED = 1 << 24
#: What is gathered through a buffer begins in it at a multiple of this many bytes.
GATHER_ALIGN = 64
#: What was done where a rank has ended.
AVERAGING, GATHERING = "Gradients were being averaged", "Parts of machines were being gathered"
UNSHARDING = "The ranks' parts of a layer were being gathered"
#: How the words of a meeting for one layer's gradient begin, and those of one for its weights.
LAYER_AVERAGED, LAYER_GATHERED = "averaging the gradient of '", "gathering '"
#: What helps where they differ, since ranks have run other layers.
ONE_SEED = (
    "All ranks must run the same layers: where a model skips some at random (LayerDrop), all ranks need one "
    "seed for that, so add torch.manual_seed(step) before each forward"
)
#: Seconds that a process may take to end after its connections are closed.
CLOSING_SECONDS = 1.0

#: More work with a meeting in it than a program issues.
ISSUED = 1 << 32

#: A rank's row of the table: how many meetings of each channel it has come to; how far its program is, as
#: many times `ISSUED` as meetings of CALLER that it has come to, and one for each that it has issued to a
#: lane; whether it has left or ended, the error that ends it; of the last two meetings of each channel what
#: they were for, what it brought.
_ROW = np.dtype(
    [
        ("come", np.int64, len(Channel)),
        ("order", np.int64),
        ("left", np.int64),
        ("error", f"S{ERROR}"),
        ("words", f"S{WORDS}", (len(Channel), 2)),
        ("nbytes", np.int64, (len(Channel), 2)),
        ("brought", np.uint8, (len(Channel), 2, BROUGHT)),
    ]
)


class Ranks:
    """The ranks of ``group``, a process group of torch.distributed, or a mesh with a row for each machine.

    Every method that says so is a meeting: all ranks call it, in the same order.
    """

    def __init__(self, group: ProcessGroup | DeviceMesh, device: torch.device) -> None:
        """A meeting. Raises ValueError where torch.distributed has no such group, the caller is not of it, or
        machines have unequally many ranks."""
        if not (dist.is_available() and dist.is_initialized()):
            raise ValueError(
                "process_group= needs torch.distributed.init_process_group() first, in each of the processes "
                "that torchrun starts"
            )
        self._members = members_of(group)
        if dist.get_rank() not in self._members:
            raise ValueError("this process is not of the process_group that it was given")
        self.rank, self.size = self._members.index(dist.get_rank()), len(self._members)
        self._groups = groups_of(group)
        self._device = device
        self._process = Process()
        # those of a mesh have PyTorch's default, whatever init_process_group was told
        known = self._groups if len(self._groups) == 1 else [*self._groups, dist.group.WORLD]
        self._timeout: timedelta = min(group_timeout(each, device) for each in known)
        self._place(
            place(group, self.rank, self._exchange(machine_id())),
            are_replicas=is_mesh(group) and group.ndim == 2,
        )
        self._collectives: ProcessGroup | None = None
        self._replicas: ProcessGroup | None = None
        self._relay: Relay | None = None
        self._bell: Bell | None = None
        self._table: Any = None
        self._watched: dict[int, int] = {}
        self._is_leaving = False
        self._failed: Failure | None = None
        #: whether the others know how `agree` has ended here, or would have
        self.has_agreed = False

    def _place(self, placement: Placement, *, are_replicas: bool) -> None:
        self._placement = placement
        self.machine, self.machines = placement.machine, len(placement.rows)
        #: which of this machine's ranks, that share its memory, this is, and how many they are
        self.local_rank, self.local_size = placement.row.index(self.rank), len(placement.row)
        #: the machines that divide the optimizer's state among them; 1 where each has the whole
        self.state_machines = 1 if are_replicas else self.machines

    @property
    def leads(self) -> bool:
        """Whether this is the rank that does what is done once for all: choose, write files."""
        return self.rank == 0

    def place_of(self, rank: int) -> tuple[int, int]:
        """The number of the machine of ``rank``, and its number among the ranks of that machine."""
        return self._placement.place_of(rank)

    @property
    def leads_machine(self) -> bool:
        """Whether this is the rank that does what is done once on each machine: write what they share."""
        return self.local_rank == 0

    def agree(self, told: Sequence[str], failed: BaseException | None = None) -> None:
        """Compare what each rank is about to wrap, a line for everything that must be the same, and begin.

        A meeting, the first one. Raises ValueError, naming the first line that differs, and RanksError where
        another rank has ``failed``; then nothing was begun.
        """
        everyone = self._exchange_before([*told], failed)
        self.has_agreed = True
        if failed is not None:
            return
        first = everyone[0]
        for rank, lines in enumerate(everyone):
            if lines != first:
                at = next(
                    (i for i, pair in enumerate(zip(first, lines, strict=False)) if pair[0] != pair[1]),
                    min(len(first), len(lines)),
                )
                there, lead = ([*each, "nothing more"][min(at, len(each))] for each in (lines, first))
                raise ValueError(
                    f"the ranks were not given the same: rank 0 has '{lead}' where rank {rank} has '{there}'"
                )
        self._begin()

    def as_first(self, value: T) -> T:
        """What rank 0 has for ``value``. A meeting, before `agree`. RanksError where a rank has failed."""
        first: T = self._exchange_before(value)[0]
        return first

    def _exchange_before(self, value: object, failed: BaseException | None = None) -> list[Any]:
        """`_exchange` with ranks that may have ``failed`` before they came: these come to none after this."""
        everyone = self._exchange((None if failed is None else self.line_of(failed), value))
        if failed is None:
            errors = [error for error, _ in everyone]
            self.has_agreed = any(errors)
            _raise_failures(errors, "wrap")
        return [brought for _, brought in everyone]

    def _begin(self) -> None:
        # groups of its own: the user's collectives must not come between those of the lane
        self._collectives = self._new_group(self._placement.row)
        if self.machines > 1:
            self._replicas = self._new_group(self._placement.column)
        file, told = -1, _Told()
        if self.leads_machine:
            with _telling() as told:
                file = _memory_file(_ROW.itemsize * self.size)
                self._bell = Bell() if self.machines > 1 else None
        rung = -1 if self._bell is None else self._bell.number
        everyone = self._exchange((os.getpid(), file, rung, os.urandom(8).hex(), told.error))
        _raise_failures([error for *_, error in everyone], "making shared memory")
        name = everyone[0][3]
        pid, number, rung, *_ = everyone[self._placement.row[0]]
        with _telling() as opened:
            block = _open(pid, number, _ROW.itemsize * self.size)
            self._table = block.numpy().view(_ROW)
            self._watched = {
                rank: os.pidfd_open(everyone[rank][0]) for rank in self._placement.row if rank != self.rank
            }
            if self.machines > 1:
                self._bell = self._bell or Bell(_path(pid, rung))
                if self.leads_machine:
                    store = store_of(name, self._timeout)
                    beside = self._timeout, self._has_gone, self._bell
                    self._relay = Relay(self._table, self._placement, store, *beside)
        errors = self._exchange(opened.error)
        if self.leads_machine:
            os.close(file)
        _raise_failures(errors, "opening shared memory")
        if self._relay is not None:
            self._relay.start()

    def _new_group(self, ranks: Sequence[int]) -> ProcessGroup:
        members = [self._members[rank] for rank in ranks]
        group: ProcessGroup = dist.new_group(members, use_local_synchronization=True, timeout=self._timeout)
        return group

    def _exchange(self, value: object) -> list[Any]:
        """What each rank has given, by torch.distributed: before there is a table."""
        values = [value]
        # NCCL sends objects by way of the current device
        with torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext():
            for group in self._groups:
                parts: list[Any] = [None] * dist.get_world_size(group)
                dist.all_gather_object(parts, values, group=group)
                values = [each for part in parts for each in part]
        return values

    def shared(self, nbytes: int, *, in_forks: bool, touched: bool = True) -> torch.Tensor:
        """A zeroed flat uint8 tensor of ``nbytes`` that all ranks of a machine see. It takes memory once
        there, and at once if ``touched``. A meeting. Raises RanksError where a rank cannot have it."""
        if not nbytes:
            return torch.zeros(0, dtype=torch.uint8)
        file, told = -1, _Told()
        block = torch.zeros(0, dtype=torch.uint8)
        if self.leads_machine:
            with _telling() as told:
                file = _memory_file(nbytes)
                block = map_file(file, nbytes, in_forks=in_forks)
                if touched:
                    touch(block.numpy())
        what = f"taking {nbytes} bytes of shared memory"
        everyone = self.meet(what, (os.getpid(), file, told.error))
        _raise_failures([error for *_, error in everyone], what)
        pid, number, _ = everyone[self._placement.row[0]]
        if not self.leads_machine:
            with _telling() as told:
                block = _open(pid, number, nbytes, in_forks=in_forks)
        errors = self.meet("opening shared memory", told.error)
        if self.leads_machine:
            os.close(file)
        _raise_failures(errors, what)
        return block

    def open_files(self, words: str, make: Callable[[], tuple[Sequence[int], T]]) -> tuple[list[str], T]:
        """Where the others of a machine find, under /proc, the files that ``make`` has opened on its first
        rank, which needs no such places, and what else ``make`` tells of them. A meeting; see
        `led_on_machine`. The first rank keeps the files open until the next meeting at least."""
        pid, numbers, told = self.led_on_machine(words, lambda: (os.getpid(), *make()))
        return [] if self.leads_machine else [_path(pid, number) for number in numbers], told

    # meetings

    def led(self, words: str, work: Callable[[], T]) -> T:
        """What ``work`` returns on the first rank, which alone does it. A meeting.

        Raises, where that fails, the error itself on the first rank and RanksError on the others.
        """
        return self._led(words, work, 0)

    def led_on_machine(self, words: str, work: Callable[[], T]) -> T:
        """What ``work`` returns on the first rank of this machine; the first one of each machine does it, as
        its own is. A meeting of all.

        Raises, where that fails on any machine, the error itself on the rank that has met it and RanksError
        on the others, which names that rank and its machine.
        """
        return self._led(words, work, self._placement.row[0])

    def _led(self, words: str, work: Callable[[], T], leader: int) -> T:
        """What ``work`` returns on ``leader``, which may be another one for other ranks; each leader does
        its own."""
        told: tuple[str | None, T | None] = None, None
        if self.rank == leader:
            try:
                told = None, work()
            except Exception as error:
                self.meet_failed(words, (self.line_of(error), None), patient=True)
                raise
        everyone = self.meet(words, told, patient=True)
        _raise_failures([error for error, _ in everyone], words)
        result: T = everyone[leader][1]
        return result

    def line_of(self, error: BaseException) -> str:
        """What others are told of an ``error`` of this rank, with this machine if there are others."""
        here = "" if self.machines == 1 else f" (machine {self.machine}, '{os.uname().nodename}')"
        return f"{_in_a_line(error)}{here}"

    def tell(self, error: BaseException) -> None:
        """This rank cannot go on after ``error``: whoever waits for it is told so, whatever it does next. May
        be called by any thread, and again."""
        if self._failed is None:
            told = self.line_of(error)
            self._failed = Failure(RanksError(f"rank {self.rank} has failed: {told}"))
            if self._table is not None:
                self._table["error"][self.rank] = told.encode()[:ERROR]
                self._tell_all()

    def issue(self, channel: Channel) -> Turn:
        """The caller is about to give a lane work with a meeting of ``channel`` in it; its turn."""
        self._table["order"][self.rank] += 1
        return Turn(channel, int(self._table["order"][self.rank]) % ISSUED)

    def meet(
        self, words: str, brought: object = None, *, turn: Turn = _OF_CALLER, patient: bool = False
    ) -> list[Any]:
        """Wait until all ranks are here, or of MACHINE all of this machine; what each has ``brought``. A
        meeting, for what ``words`` say; ``patient`` where ranks may take longer than the group's timeout.
        Work of a lane says its ``turn``.

        Raises RanksError if the ranks have come apart, one of them has ended, or does not come in time.
        """
        self._process.check()
        if self._failed is not None:
            raise self._failed.again()
        try:
            return self._meet(words, brought, turn, patient=patient)
        except RanksError as error:
            # nobody may wait for the work that has met it: whatever comes next is told
            self._fail(error)
            raise

    def meet_failed(self, words: str, brought: object, *, patient: bool) -> None:
        """Come to a meeting with what others are told of an error, which the caller raises then, whatever
        comes of the meeting."""
        with suppress(RanksError):
            self.meet(words, brought, patient=patient)

    def _fail(self, error: RanksError) -> None:
        """Come to no meeting any more, which the others are to know before this process has ended."""
        self._failed = self._failed or Failure(error)
        self._table["left"][self.rank] = self._table["left"][self.rank] or LEFT
        self._tell_all()

    def _tell_all(self) -> None:
        """All are to know what this rank has written into its row, though its process may end at once."""
        self._ring()
        if self._relay is not None:
            self._relay.tell()

    def _ring(self) -> None:
        """Other machines are to know what this rank has written into its row."""
        if (bell := self._bell) is not None:
            bell.ring()

    def _meet(self, words: str, brought: object, turn: Turn, *, patient: bool) -> list[Any]:
        channel = turn.channel
        mine, number = self._table[self.rank], int(self._table["come"][self.rank, channel]) + 1
        place = channel, number % 2
        data = pickle.dumps(brought)
        if len(data) > BROUGHT:
            raise RanksError(f"{words}: {len(data)} bytes are more than a meeting can pass on ({BROUGHT})")
        mine["words"][place] = words.encode()[:WORDS]
        mine["nbytes"][place] = len(data)
        mine["brought"][place][: len(data)] = np.frombuffer(data, np.uint8)
        if channel is Channel.CALLER:
            mine["order"] += ISSUED
        mine["come"][channel] = number
        if channel is not Channel.MACHINE:
            self._ring()
        self._await(turn, number, words, patient=patient)
        if self._relay is not None and channel is not Channel.MACHINE:
            # those of other machines may wait still, and this process may end at once
            self._relay.tell()
        self._check_words(place)
        return [self._brought(rank, place) for rank in self._of(channel)]

    def _of(self, channel: Channel) -> Sequence[int]:
        """The ranks that meet in ``channel``."""
        return self._placement.row if channel is Channel.MACHINE else range(self.size)

    def least(self, what: str, count: int) -> int:
        """The least ``count`` that a rank has of ``what``. A meeting."""
        return int(min(self.meet(f"agreeing on {what}", count)))

    def of_shares(self, everyone: Sequence[T]) -> list[T]:
        """Of what all ranks have brought to a meeting, what the first machine's have: each machine's ranks
        have the same shares, and all take the same numbers of them."""
        return [everyone[rank] for rank in self._placement.rows[0]]

    def _brought(self, rank: int, place: tuple[int, int]) -> Any:
        row = self._table[rank]
        return pickle.loads(row["brought"][place][: int(row["nbytes"][place])].tobytes())

    def _await(self, turn: Turn, number: int, words: str, *, patient: bool) -> None:
        come, channel = self._table["come"], turn.channel
        pause, began = FIRST_PAUSE, time.monotonic()
        looked = began
        while behind := [rank for rank in self._of(channel) if come[rank, channel] < number]:
            self._check_order(turn, number)
            time.sleep(pause)
            pause = min(LONGEST_PAUSE, 1.5 * pause)
            now = time.monotonic()
            if now - looked < LOOK_SECONDS:
                continue
            looked = now
            if self._is_leaving:
                raise RanksError(f"{words}: this rank has left")
            if failed := self._error_of(behind):
                raise RanksError(failed)
            gone = [rank for rank in behind if self._has_gone(rank) and come[rank, channel] < number]
            if gone:
                self._check_order(turn, number)
                raise RanksError(self._apart(self._how(gone)))
            if not patient and now - began > self._timeout.total_seconds():
                late = ", ".join(map(str, behind))
                raise RanksError(
                    self._apart(f"rank {late} did not come within {self._timeout.total_seconds():.0f} s")
                )

    def _check_order(self, turn: Turn, number: int) -> None:
        """Raise RanksError if another rank has come to a meeting in the program's order that this rank, which
        waits for the ``number``-th one of its channel, has passed by: neither would ever come to the
        other's."""
        order = self._table["order"]
        come_here, issued_here = divmod(int(order[self.rank]), ISSUED)
        for rank in self._of(turn.channel):
            # one number, read at once: the other rank goes on meanwhile
            come, issued = divmod(int(order[rank]), ISSUED)
            if turn.channel is Channel.CALLER:
                # it has issued what this rank, which waits, has not, and is not here
                is_apart = issued > issued_here and come < number
            else:
                # it has come to the caller's next meeting, and has not issued this one
                is_apart = come > come_here and issued < turn.number
            if is_apart:
                raise self._come_apart()

    def _check_words(self, place: tuple[Channel, int]) -> None:
        if len({bytes(self._table[rank]["words"][place]) for rank in self._of(place[0])}) > 1:
            raise self._come_apart(place)

    def _come_apart(self, place: tuple[int, int] | None = None) -> RanksError:
        """The error for ranks that do other things; in the meetings at ``place``, if that is known."""
        told = self._apart("the ranks have come apart", place)
        is_in_layers = LAYER_AVERAGED in told or LAYER_GATHERED in told
        return RanksError(f"{told}. {ONE_SEED}" if is_in_layers else told)

    def _apart(self, what: str, place: tuple[int, int] | None = None) -> str:
        def at(rank: int) -> str:
            if place is not None:
                return bytes(self._table[rank]["words"][place]).decode(errors="replace")
            found = [
                bytes(self._table[rank]["words"][channel, int(self._table["come"][rank, channel]) % 2])
                for channel in Channel
                if self._table["come"][rank, channel]
            ]
            return ", ".join(words.decode(errors="replace") for words in found) or "nothing"

        return f"{what}. Last came rank " + "; rank ".join(f"{r} to: {at(r)}" for r in range(self.size))

    def _error_of(self, ranks: Iterable[int]) -> str:
        """The error that one of ``ranks`` has told the others of, and after which it comes to nothing."""
        for rank in ranks:
            if failed := bytes(self._table["error"][rank]):
                return f"rank {rank} has failed: {failed.decode(errors='replace')}"
        return ""

    def _how(self, gone: Sequence[int]) -> str:
        """Why ranks have ``gone``: because another one has ended, which may have come where these have not,
        or of themselves."""
        left = self._table["left"]
        found = [*gone, *(rank for rank in range(self.size) if rank != self.rank and self._has_gone(rank))]
        rank = max(found, key=lambda rank: int(left[rank]))
        if left[rank] == UNHEARD:
            return f"rank {rank} has ended, or is not reached: nothing is heard of its machine any more"
        return f"rank {rank} has ended, or has unwrapped its model"

    def _has_gone(self, rank: int) -> bool:
        """Whether ``rank`` has left or ended."""
        if self._table["left"][rank]:
            return True
        if (watched := self._watched.get(rank)) is None:
            return False
        poll = select.poll()
        poll.register(watched, select.POLLIN)
        if not poll.poll(0):
            return False
        # the others, which leave because of that, are told apart from the one that has ended
        self._table["left"][rank] = self._table["left"][rank] or ENDED
        return True

    # collectives, called by work of the COLLECTIVE lane

    def average(self, tensor: torch.Tensor, owner: int | None = None, on_machine: int | None = None) -> None:
        """Let ``tensor`` be the mean over all ranks; with an ``owner`` on that rank of each machine alone, or
        of one machine alone if ``on_machine`` is given too, each for half the traffic: on the others it may
        hold anything then. Raises RanksError where a rank has ended."""
        if self.size == 1:
            return
        # of several machines one rank each adds up what is for all: rings in another order for each of the
        # ranks of a machine could come to other last bits
        owner_here = 0 if owner is None and self.machines > 1 else owner

        def work() -> None:
            if self.local_size > 1 and owner_here is None:
                dist.all_reduce(tensor, group=self._collectives)
            elif self.local_size > 1:
                dist.reduce(tensor, group_dst=owner_here, group=self._collectives)
            if self.machines > 1 and owner_here == self.local_rank:
                if on_machine is None:
                    dist.all_reduce(tensor, group=self._replicas)
                else:
                    dist.reduce(tensor, group_dst=on_machine, group=self._replicas)
            if self.machines > 1 and self.local_size > 1 and owner is None:
                dist.broadcast(tensor, group_src=0, group=self._collectives)

        self._collective(work)
        if owner in (None, self.local_rank) and on_machine in (None, self.machine):
            tensor.mul_(1 / self.size)

    def gathered(self, number: torch.Tensor, *, of_machines: bool = False) -> torch.Tensor:
        """A scalar of each rank of this machine, [local_size], or of those of all machines, [size], in the
        same order on all of them. Raises RanksError where a rank has ended."""
        numbers = number.view(1)
        if self.local_size > 1:
            numbers = self._all_gathered(numbers, self.local_size, self._collectives)
        if of_machines and self.machines > 1:
            numbers = self._all_gathered(numbers, self.machines, self._replicas)
        return numbers

    def _all_gathered(self, mine: torch.Tensor, size: int, group: ProcessGroup | None) -> torch.Tensor:
        found = mine.new_empty(size * mine.numel())
        places = [*found.split(mine.numel())]
        self._collective(lambda: dist.all_gather(places, mine, group=group))
        return found

    def all_gather(self, whole: torch.Tensor) -> None:
        """Let ``whole``, flat uint8 on the device, be the same on all ranks of this machine: of as many equal
        parts as they are, each has the one of its number. Raises RanksError where a rank has ended."""
        mine = whole.chunk(self.local_size)[self.local_rank]
        self._collective(partial(all_gather_flat, whole, mine, group=self._collectives), UNSHARDING)

    def gather(self, pieces: Sequence[torch.Tensor], buffer: torch.Tensor) -> None:
        """Let each of ``pieces``, flat uint8 in host memory, be what the machine of its number has there: the
        rank of that machine that is of this one's column. They pass through ``buffer``, flat uint8 on the
        device. Returns when they are there. Raises RanksError where a rank has ended."""
        longest = max(piece.numel() for piece in pieces)
        room = buffer.numel() // (self.machines + 1) // GATHER_ALIGN * GATHER_ALIGN
        for at in range(0, longest, room):
            length = min(room, longest - at)
            sent, got = buffer[:length], buffer[room : room + self.machines * length]
            own = pieces[self.machine][at : at + length]
            sent[: own.numel()].copy_(own, non_blocking=True)
            self._collective(partial(all_gather_flat, got, sent, group=self._replicas), GATHERING)
            for machine, (piece, found) in enumerate(zip(pieces, got.split(length), strict=True)):
                into = piece[at : at + length]
                if machine != self.machine:
                    into.copy_(found[: into.numel()], non_blocking=True)
        if buffer.device.type == "cuda":
            # who is told so reads them by way of other streams and processes
            torch.cuda.current_stream(buffer.device).synchronize()

    def of_machines(
        self, mine: torch.Tensor, sizes: Sequence[int], *, to: int | None = None
    ) -> list[torch.Tensor]:
        """What each machine has, flat uint8 on the host, of so many bytes each; ``mine`` is this one's. The
        ranks of a column call it, not while the COLLECTIVE lane has work. With ``to`` that of this machine
        alone is told, the others only of their own."""
        found = []
        for machine, nbytes in enumerate(sizes):
            is_told = to is None or to == self.machine
            if machine == self.machine:
                found.append(mine)
            else:
                found.append(torch.empty(nbytes if is_told else 0, dtype=torch.uint8))
            passes = to is None or (machine != to and self.machine in (machine, to))
            if passes and nbytes:
                pieces = found[-1].split(REPLICATED)
                self._collective(partial(self._pass_on, pieces, machine, to=to), GATHERING)
        return found

    def _pass_on(self, pieces: Sequence[torch.Tensor], machine: int, *, to: int | None) -> None:
        for piece in pieces:
            # NCCL sends from the device; a tensor of the CPU is its own copy
            sent = piece.to(self._device)
            if to is None:
                dist.broadcast(sent, group_src=machine, group=self._replicas)
            elif self.machine == machine:
                dist.send(sent, group_dst=to, group=self._replicas)
            else:
                dist.recv(sent, group_src=machine, group=self._replicas)
            if machine != self.machine:
                piece.copy_(sent)

    def over_network(self, nbytes: int) -> int:
        """``nbytes`` that are sent to other machines, as a plan counts them: see `VirtualRanks`."""
        return nbytes

    def _collective(self, work: Callable[[], object], what: str = AVERAGING) -> None:
        try:
            work()
        except RuntimeError as error:
            gone = self._await_gone()
            # why one has failed is told of it, where that is known, rather than that it has ended
            why = self._error_of(range(self.size)) or (self._how(gone) if gone else "a collective has failed")
            failed = RanksError(f"{why}. {what} ({_in_a_line(error)})")
            self._fail(failed)
            raise failed from error

    def _await_gone(self) -> list[int]:
        """The ranks that have ended, where a connection was closed: that is shortly before a process has
        ended, and a process of another machine is not seen to end but missed."""
        seconds = CLOSING_SECONDS
        if self.machines > 1:
            seconds += seconds_until_gone(self._timeout)
        until = time.monotonic() + seconds
        while True:
            gone = [rank for rank in range(self.size) if rank != self.rank and self._has_gone(rank)]
            if gone or time.monotonic() > until:
                return gone
            time.sleep(LOOK_SECONDS)

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Let ``tensor`` be that of rank 0; not while the COLLECTIVE lane has work."""
        if self.machines > 1 and self.leads_machine:
            dist.broadcast(tensor, group_src=0, group=self._replicas)
        if self.local_size > 1:
            dist.broadcast(tensor, group_src=0, group=self._collectives)

    def replicate(self, shared: Iterable[torch.Tensor]) -> None:
        """Let tensors in the memory that a machine's ranks share be those of the first machine. A meeting."""
        if self.machines == 1:
            return
        if self.leads_machine:
            for tensor in shared:
                for piece in tensor.view(torch.uint8).split(REPLICATED):
                    # NCCL sends from the device; a tensor of the CPU is its own copy
                    sent = piece.to(self._device)
                    dist.broadcast(sent, group_src=0, group=self._replicas)
                    if self.machine:
                        piece.copy_(sent)
        self.meet("taking over what the first machine has")

    def leave(self) -> None:
        """Tell the others that this rank comes to no meeting any more. May be called again; in a forked
        process it does nothing."""
        if not self._process.is_this():
            return
        self._is_leaving = True
        if self._table is not None:
            self._table["left"][self.rank] = LEFT
            self._ring()
        if self._relay is not None:
            self._relay.leave()
            self._relay = None
        if self._bell is not None:
            self._bell.close()
            self._bell = None
        while self._watched:
            with suppress(OSError):
                os.close(self._watched.popitem()[1])


class _Told:
    error: str | None = None


class _telling:
    """A block whose error is to be told to the other ranks, which wait for this one."""

    def __enter__(self) -> _Told:
        self._told = _Told()
        return self._told

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if isinstance(error, Exception):
            self._told.error = _in_a_line(error)
            return True
        return False


def alone_among() -> int:
    """How many ranks torch.distributed has in this process; 1 where it was not begun."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


@contextmanager
def together(ranks: Ranks | None, words: str, *, patient: bool = False) -> Iterator[None]:
    """A block that all ranks meet at the end of: where it fails on one, all raise, the others RanksError."""
    try:
        yield
    except Exception as error:
        if ranks is not None:
            ranks.meet_failed(words, ranks.line_of(error), patient=patient)
        raise
    if ranks is not None:
        _raise_failures(ranks.meet(words, patient=patient), words)


def _raise_failures(errors: Sequence[str | None], words: str) -> None:
    failed = [f"rank {rank}: {error}" for rank, error in enumerate(errors) if error is not None]
    if failed:
        raise RanksError(f"{words} has failed on {shortened(failed, most=2)}")


def _in_a_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:2048]


def _memory_file(nbytes: int) -> int:
    """A file without a name, of ``nbytes``, in memory."""
    file = os.memfd_create("streamer", os.MFD_CLOEXEC)
    try:
        os.ftruncate(file, nbytes)
    except BaseException:
        os.close(file)
        raise
    return file


def _path(pid: int, number: int) -> str:
    """Where a file without a name is found that another process has open."""
    return f"/proc/{pid}/fd/{number}"


def _open(pid: int, number: int, nbytes: int, *, in_forks: bool = False) -> torch.Tensor:
    """Memory that another process has open as file ``number``."""
    file = os.open(_path(pid, number), os.O_RDWR | os.O_CLOEXEC)
    try:
        return map_file(file, nbytes, in_forks=in_forks)
    finally:
        os.close(file)
