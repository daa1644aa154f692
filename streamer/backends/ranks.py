"""Ranks: processes that train one model together, on torch.distributed.

Ranks run the same program, so each makes the same exchanges in the same order. An exchange has a description,
and returns the values of all ranks. If the descriptions differ, the ranks are at different places: each
raises `RanksError` with the descriptions of all. It also raises it if a rank has ended, or does not arrive
within the process group's timeout.

Exchanges are messages between pairs of ranks in gloo groups of their own, which name the rank that does not
answer. Gradients and weights go through the backend of the caller's group, NCCL for GPUs.

The ranks of one machine share host memory and scratch files. These are files without names; the first rank
passes their descriptors to the others through a socket. The system frees them when the last process ends,
however it ends.

A process that trains alone is the only rank: it never waits, and shares nothing.
"""

from __future__ import annotations

import enum
import os
import pickle
import socket
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from streamer.backends.base import Backend, Failure, Process
from streamer.backends.host_memory import map_file, touch
from streamer.backends.machines import Placement, groups_of, is_mesh, machine_name, members_of, place
from streamer.errors import RanksError, shortened
from streamer.torch_private import all_gather_flat, gloo_group, group_timeout, store_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Work
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")

#: Bytes of a message; the rest goes into a second one.
MESSAGE = 1 << 10
#: The timeout for long work, such as writing a checkpoint. Ranks that end are still detected.
PATIENT = timedelta(days=365)
#: Seconds in which a failed collective searches for a rank that has ended, and between two checks.
CLOSING_SECONDS, LOOK_SECONDS = 2.0, 0.02
#: Bytes per message between machines.
REPLICATED = 1 << 24
#: Alignment in bytes of gathered pieces in their buffer.
GATHER_ALIGN = 64
#: The work during which a rank has ended.
AVERAGING, GATHERING = "Gradients were being averaged", "Parts of machines were being gathered"
UNSHARDING = "The ranks' parts of a layer were being gathered"
#: Prefixes of the descriptions of exchanges for one layer's gradient and for its weights.
LAYER_AVERAGED, LAYER_GATHERED = "averaging the gradient of '", "gathering '"
#: The remedy if these differ, since ranks have run different layers.
ONE_SEED = (
    "All ranks must run the same layers: where a model skips some at random (LayerDrop), all ranks need one "
    "seed for that, so add torch.manual_seed(step) before each forward"
)


class Mean(NamedTuple):
    """A tensor to be replaced by its mean over all ranks. With an ``owner`` only that rank of each machine
    gets the mean, with ``on_machine`` only that of one machine, each for half the traffic; on other ranks the
    tensor is then undefined."""

    tensor: torch.Tensor
    owner: int | None = None
    on_machine: int | None = None


class Channel(enum.IntEnum):
    """The threads of a rank that make exchanges, each in its own order: the caller's, and those of two
    lanes."""

    CALLER = 0
    COLLECTIVE = 1
    BARRIER = 2


class Ranks:
    """The ranks of ``group``, a process group of torch.distributed, or a mesh with a row for each machine.

    Some methods are exchanges, as their docstrings say: all ranks call them, in the same order.
    """

    def __init__(
        self, group: ProcessGroup | DeviceMesh | None = None, device: torch.device | None = None
    ) -> None:
        """An exchange. With None, this process is alone. Raises ValueError if torch.distributed has no such
        group, if the caller is not in it, or if machines have different numbers of ranks."""
        self.rank, self.size = 0, 1
        self._device = device or torch.device("cpu")
        self._process = Process()
        self._failed: Failure | None = None
        self._exchanging: dict[Channel, Any] = {}
        self._of_machine: ProcessGroup | None = None
        self._of_column: ProcessGroup | None = None
        if group is None:
            self._place(Placement(((0,),), 0), are_replicas=False)
            return
        if not (dist.is_available() and dist.is_initialized()):
            raise ValueError(
                "process_group= needs torch.distributed.init_process_group() first, in each of the processes "
                "that torchrun starts"
            )
        self._members = members_of(group)
        if dist.get_rank() not in self._members:
            raise ValueError("this process is not in the process_group passed to it")
        self.rank, self.size = self._members.index(dist.get_rank()), len(self._members)
        # the groups of a mesh have PyTorch's default timeout, not that of init_process_group
        known = [dist.group.WORLD] if is_mesh(group) else []
        self._timeout = min(group_timeout(each, self._device) for each in [*known, *groups_of(group)])
        names, tokens = zip(*self._by_callers(group, (machine_name(), os.urandom(8).hex())), strict=True)
        self._place(place(group, self.rank, names), are_replicas=is_mesh(group) and group.ndim == 2)
        # a unique name, since a store keeps entries of earlier groups
        self._store = store_of(f"streamer/{tokens[0]}")
        self._exchanging = {
            channel: gloo_group(self._store, channel.name, self.rank, self.size, self._timeout)
            for channel in Channel
        }
        if self.local_size > 1:
            self._of_machine = self._new_group(self._placement.row)
        if self.machines > 1:
            self._of_column = self._new_group(self._placement.column)

    def _place(self, placement: Placement, *, are_replicas: bool) -> None:
        self._placement = placement
        #: whether there is no other rank
        self.is_alone = self.size == 1
        self.machine, self.machines = placement.machine, len(placement.rows)
        #: this rank's number among the ranks of this machine, which share its memory, and their number
        self.local_rank, self.local_size = placement.row.index(self.rank), len(placement.row)
        #: the number of machines that divide the optimizer's state; 1 if each has the whole
        self.state_machines = 1 if are_replicas else self.machines

    def _by_callers(self, group: ProcessGroup | DeviceMesh, value: object) -> list[Any]:
        """The ``value`` of each rank, by the caller's group."""
        values = [value]
        # NCCL sends objects through the current device
        with torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext():
            for each in groups_of(group):
                parts: list[Any] = [None] * dist.get_world_size(each)
                dist.all_gather_object(parts, values, group=each)
                values = [value for part in parts for value in part]
        return values

    def _new_group(self, ranks: Sequence[int]) -> ProcessGroup:
        # separate groups: the user's collectives must not mix with those of the lane
        members = [self._members[rank] for rank in ranks]
        group: ProcessGroup = dist.new_group(members, self._timeout, use_local_synchronization=True)
        return group

    @property
    def is_first(self) -> bool:
        """Whether this rank does the work that is done once for all ranks: choices, writing files."""
        return self.rank == 0

    @property
    def is_first_of_machine(self) -> bool:
        """Whether this rank does the work that is done once on each machine: writing shared memory."""
        return self.local_rank == 0

    @property
    def row(self) -> Sequence[int]:
        """The ranks of this machine."""
        return self._placement.row

    def place_of(self, rank: int) -> tuple[int, int]:
        """The number of the machine of ``rank``, and its number among the ranks of that machine."""
        return self._placement.place_of(rank)

    def of_shares(self, everyone: Sequence[T]) -> list[T]:
        """The values of the first machine's ranks, from the values of all ranks in an exchange. The ranks of
        each machine have the same shares, and all use these values."""
        return [everyone[rank] for rank in self._placement.rows[0]]

    # exchanges

    def exchange(
        self,
        what: str,
        value: object = None,
        *,
        channel: Channel = Channel.CALLER,
        of: Sequence[int] | None = None,
        patient: bool = False,
    ) -> list[Any]:
        """Wait until all ranks, or those in ``of``, reach this exchange, described by ``what``. Returns the
        value of each. ``patient`` allows them longer than the group's timeout.

        Raises RanksError if a rank does something else, has ended, or does not come in time.
        """
        members = range(self.size) if of is None else of
        if len(members) == 1:
            return [value]
        self._process.check()
        if self._failed is not None:
            raise self._failed.again()
        try:
            found = self._exchange(what, value, members, channel, PATIENT if patient else self._timeout)
            words = {rank: theirs for rank, (theirs, _) in found.items()}
            if len({*words.values()}) > 1:
                raise _apart(words)
        except RanksError as error:
            # other ranks must not wait for later exchanges of this one
            self._fail(error)
            raise
        return [found[rank][1] for rank in members]

    def _exchange(
        self, what: str, value: object, members: Sequence[int], channel: Channel, timeout: timedelta
    ) -> dict[int, tuple[str, Any]]:
        """The description and value of each rank. Each rank sends its message to every other one."""
        if channel not in self._exchanging:
            raise RanksError(f"{what}: this rank has unwrapped its model")
        group, began = self._exchanging[channel], time.monotonic()
        peers = [rank for rank in members if rank != self.rank]
        messages = _messages((what, value))
        heads = {rank: torch.empty(MESSAGE, dtype=torch.uint8) for rank in peers}
        received: dict[int, Work] = {}
        sent: list[tuple[int, Work]] = []
        found = {self.rank: (what, value)}

        @contextmanager
        def with_rank(rank: int) -> Iterator[None]:
            try:
                yield
            except RuntimeError as error:
                is_late = time.monotonic() - began >= timeout.total_seconds()
                raise self._lost(rank, what, timeout if is_late else None) from error

        for rank in peers:
            with with_rank(rank):
                received[rank] = group.recv([heads[rank]], rank, 0)
                sent += [(rank, group.send([each], rank, 0)) for each in messages]
        for rank in peers:
            with with_rank(rank):
                received[rank].wait(timeout)
                rest = torch.empty(_rest_of(heads[rank]), dtype=torch.uint8)
                if rest.numel():
                    group.recv([rest], rank, 0).wait(timeout)
                found[rank] = _value_of(heads[rank], rest)
        for rank, work in sent:
            with with_rank(rank):
                work.wait(timeout)
        return found

    def _lost(self, rank: int, what: str, timeout: timedelta | None) -> RanksError:
        """The error for ``rank``, which has ended, or has not arrived within ``timeout``. It names the error
        of another rank, if one is known, since that may be the cause."""
        if known := self._error_of_others():
            return RanksError(known)
        if timeout is not None:
            return RanksError(f"rank {rank} did not come within {timeout.total_seconds():.0f} s to: {what}")
        return RanksError(f"rank {rank} has ended, or has unwrapped its model. This one came to: {what}")

    def _error_of_others(self) -> str:
        # the store may be of a process that has ended
        with suppress(RuntimeError):
            for rank in range(self.size):
                if rank != self.rank and self._store.check([str(rank)]):
                    return str(self._store.get(str(rank)).decode())
        return ""

    def tell(self, error: BaseException) -> None:
        """Publish ``error``, after which this rank cannot continue: other ranks name it as the reason. Any
        thread may call it, also several times."""
        if not self.is_alone:
            self._fail(RanksError(f"rank {self.rank} has failed: {self.line_of(error)}"))

    def _fail(self, error: RanksError) -> None:
        """Make no more exchanges."""
        if self._failed is None:
            self._failed = Failure(error)
            with suppress(RuntimeError):  # the store may be of a process that has ended
                self._store.set(str(self.rank), str(error))

    def line_of(self, error: BaseException) -> str:
        """One line about an ``error`` of this rank for other ranks; names the machine if there are
        several."""
        here = "" if self.machines == 1 else f" (machine {self.machine}, '{os.uname().nodename}')"
        return f"{_in_a_line(error)}{here}"

    def check_same(self, lines: Sequence[str]) -> None:
        """Compare the models and options that ranks are about to wrap; ``lines`` has one entry for everything
        that must be the same. An exchange. Raises ValueError, naming the first line that differs."""
        first, *others = self.exchange("wrap", [*lines])
        for rank, theirs in enumerate(others, 1):
            if theirs != first:
                pairs = zip([*first, "nothing more"], [*theirs, "nothing more"], strict=False)
                lead, there = next(pair for pair in pairs if pair[0] != pair[1])
                raise ValueError(
                    f"the ranks' options or models differ: rank 0 has '{lead}', rank {rank} has '{there}'"
                )

    def from_first(self, what: str, value: T) -> T:
        """The ``value`` of rank 0. An exchange."""
        first: T = self.exchange(what, value if self.is_first else None)[0]
        return first

    def least(self, what: str, count: int) -> int:
        """The smallest ``count`` of ``what`` among the ranks. An exchange."""
        return int(min(self.exchange(f"agreeing on {what}", count)))

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """A block that ends with a patient exchange. If it fails on one rank, all raise: that rank the error
        itself, the others RanksError with one line about it."""
        failed: Exception | None = None
        try:
            yield
        except Exception as error:  # noqa: BLE001 - is raised when the others know
            failed = error
        self._end(what, failed)

    def on_first(self, what: str, work: Callable[[], T]) -> T:
        """The result of ``work``, which only the first rank does. An exchange, as `together`."""
        return self._on(0, what, work)

    def on_first_of_machine(self, what: str, work: Callable[[], T]) -> T:
        """The result of ``work``, which the first rank of each machine does, for the ranks of this machine.
        An exchange of all ranks, as `together`."""
        return self._on(self.row[0], what, work)

    def _on(self, leader: int, what: str, work: Callable[[], T]) -> T:
        failed, result = None, None
        if self.rank == leader:
            try:
                result = work()
            except Exception as error:  # noqa: BLE001 - is raised when the others know
                failed = error
        found: T = self._end(what, failed, result)[leader]
        return found

    def _end(self, what: str, failed: Exception | None, value: object = None) -> list[Any]:
        """Exchange errors, and values."""
        line = None if failed is None else self.line_of(failed)
        if failed is not None:
            with suppress(RanksError):  # its own error says more
                self.exchange(what, (line, None), patient=True)
            raise failed
        everyone = self.exchange(what, (line, value), patient=True)
        errors = [f"rank {rank}: {error}" for rank, (error, _) in enumerate(everyone) if error is not None]
        if errors:
            raise RanksError(f"{what} has failed on {shortened(errors, most=2)}")
        return [value for _, value in everyone]

    def leave(self) -> None:
        """Make no more exchanges: ranks that wait for this one raise. May be called again; in a forked
        process it does nothing."""
        if self._process.is_this():
            self._exchanging = {}

    # memory and files that a machine's ranks share

    def host_buffer(self, backend: Backend, nbytes: int, *, pinned: bool) -> torch.Tensor:
        """A zeroed flat uint8 tensor of ``nbytes`` that the ranks of a machine share. The memory is taken
        once, and at once. An exchange. Raises RanksError if a rank cannot get it."""
        if self.local_size == 1:
            with self.together(_memory(nbytes)):
                return backend.host_buffer(nbytes, pinned=pinned)
        buffer = self._shared(backend, nbytes)
        with self.together(_memory(nbytes)):
            if self.is_first_of_machine:
                touch(buffer.numpy())
            if pinned:
                backend.pin(buffer)
        return buffer

    def host_reserve(self, backend: Backend, nbytes: int) -> torch.Tensor:
        """The same, not pinned, and taking memory only as it is written."""
        if self.local_size == 1:
            with self.together(_memory(nbytes)):
                return backend.host_reserve(nbytes)
        return self._shared(backend, nbytes)

    def _shared(self, backend: Backend, nbytes: int) -> torch.Tensor:
        if not nbytes:
            return torch.zeros(0, dtype=torch.uint8)

        def make() -> tuple[list[int], None]:
            file = os.memfd_create("streamer", os.MFD_CLOEXEC)
            os.ftruncate(file, nbytes)
            return [file], None

        (file,), _ = self.share_files(_memory(nbytes), make)
        try:
            with self.together(_memory(nbytes)):
                return map_file(file, nbytes, in_forks=backend.device.type == "cpu")
        finally:
            os.close(file)

    def share_files(self, what: str, make: Callable[[], tuple[list[int], T]]) -> tuple[list[int], T]:
        """Descriptors in this process for the files that ``make`` opens on the first rank of the machine, and
        the other result of ``make``. An exchange, as `together`."""
        if self.is_alone:
            return make()
        with ExitStack() as ends:
            listener = ends.enter_context(socket.socket(socket.AF_UNIX))
            # an abstract name: it is in no folder, and is freed with the socket
            name, opened = f"\0streamer-{os.urandom(16).hex()}", list[int]()

            def lead() -> tuple[str, int, T]:
                files, details = make()
                opened.extend(files)
                listener.bind(name)
                listener.listen(self.local_size)
                listener.settimeout(self._timeout.total_seconds())
                return name, len(files), details

            where, count, details = self.on_first_of_machine(what, lead)
            with self.together(what):
                if self.is_first_of_machine:
                    served = 0
                    while served < self.local_size - 1:
                        with listener.accept()[0] as other:
                            # the name is no secret: files go to processes of this user alone
                            if _user_of(other) == os.getuid():
                                socket.send_fds(other, [b"\0"], opened)
                                served += 1
                else:
                    listener.settimeout(self._timeout.total_seconds())
                    listener.connect(where)
                    opened = socket.recv_fds(listener, 1, count)[1]
                    if len(opened) < count:
                        raise RanksError(
                            "the first rank of this machine passes no files: run all ranks as one user"
                        )
            return opened, details

    # collectives, called by work of the COLLECTIVE lane

    def average(self, means: Sequence[Mean]) -> None:
        """Take all ``means``, those of different owners at the same time. Raises RanksError if a rank has
        ended."""
        if self.is_alone:
            return
        with self._collective(AVERAGING):
            if self.local_size > 1:
                for work in [self._begin_sum(mean) for mean in means]:
                    work.wait()
            for mean in means:
                self._over_machines(*mean)

    def _owner_here(self, owner: int | None) -> int | None:
        """The rank of this machine that gets the machine's sum; None for all of them."""
        # one rank of each machine adds up the mean for all of its ranks: rings in another order for each
        # could differ in the last bits
        return 0 if owner is None and self.machines > 1 else owner

    def _begin_sum(self, mean: Mean) -> Work:
        """Begin to add up the tensors of this machine's ranks."""
        owner, group = self._owner_here(mean.owner), self._of_machine
        if owner is None:
            work: Work = dist.all_reduce(mean.tensor, group=group, async_op=True)
        else:
            work = dist.reduce(mean.tensor, group_dst=owner, group=group, async_op=True)
        return work

    def _over_machines(self, tensor: torch.Tensor, owner: int | None, on_machine: int | None) -> None:
        """Add up the sums of all machines, and divide by the number of ranks."""
        if self.machines > 1:
            if self._owner_here(owner) == self.local_rank:
                if on_machine is None:
                    dist.all_reduce(tensor, group=self._of_column)
                else:
                    dist.reduce(tensor, group_dst=on_machine, group=self._of_column)
            if self.local_size > 1 and owner is None:
                dist.broadcast(tensor, group_src=0, group=self._of_machine)
        if owner in (None, self.local_rank) and on_machine in (None, self.machine):
            tensor.mul_(1 / self.size)

    def gathered(self, number: torch.Tensor, *, of_machines: bool = False) -> torch.Tensor:
        """The scalars of all ranks of this machine, [local_size], or of all machines, [size], in the same
        order on all ranks. Raises RanksError if a rank has ended."""
        numbers = number.view(1)
        if self.local_size > 1:
            numbers = self._all_gathered(numbers, self.local_size, self._of_machine)
        if of_machines and self.machines > 1:
            numbers = self._all_gathered(numbers, self.machines, self._of_column)
        return numbers

    def _all_gathered(self, mine: torch.Tensor, size: int, group: ProcessGroup | None) -> torch.Tensor:
        found = mine.new_empty(size * mine.numel())
        with self._collective(AVERAGING):
            dist.all_gather([*found.split(mine.numel())], mine, group=group)
        return found

    def all_gather(self, whole: torch.Tensor) -> None:
        """Gather ``whole``, flat uint8 on the device, on all ranks of this machine. It is divided into equal
        parts, one for each rank; before the call, each rank has its own part. Raises RanksError if a rank has
        ended."""
        mine = whole.chunk(self.local_size)[self.local_rank]
        with self._collective(UNSHARDING):
            all_gather_flat(whole, mine, group=self._of_machine)

    def gather(self, pieces: Sequence[torch.Tensor], buffer: torch.Tensor) -> None:
        """Fill each of ``pieces``, flat uint8 in host memory, from the machine of its number: from the rank
        there that is in this rank's column. They pass through ``buffer``, flat uint8 on the device. Returns
        when all are filled. Raises RanksError if a rank has ended."""
        longest = max(piece.numel() for piece in pieces)
        room = buffer.numel() // (self.machines + 1) // GATHER_ALIGN * GATHER_ALIGN
        for at in range(0, longest, room):
            length = min(room, longest - at)
            sent, got = buffer[:length], buffer[room : room + self.machines * length]
            own = pieces[self.machine][at : at + length]
            sent[: own.numel()].copy_(own, non_blocking=True)
            with self._collective(GATHERING):
                all_gather_flat(got, sent, group=self._of_column)
            for machine, (piece, found) in enumerate(zip(pieces, got.split(length), strict=True)):
                into = piece[at : at + length]
                if machine != self.machine:
                    into.copy_(found[: into.numel()], non_blocking=True)
        if buffer.device.type == "cuda":
            # other streams and processes read the pieces after this
            torch.cuda.current_stream(buffer.device).synchronize()

    def of_machines(
        self, mine: torch.Tensor, sizes: Sequence[int], *, to: int | None = None
    ) -> list[torch.Tensor]:
        """The data of each machine, flat uint8 on the host, with ``sizes`` bytes; ``mine`` is this machine's.
        The ranks of a column call it, while the COLLECTIVE lane is idle. With ``to`` only that machine gets
        the data of the others."""
        found = []
        for machine, nbytes in enumerate(sizes):
            is_receiver = to is None or to == self.machine
            if machine == self.machine:
                found.append(mine)
            else:
                found.append(torch.empty(nbytes if is_receiver else 0, dtype=torch.uint8))
            passes = to is None or (machine != to and self.machine in (machine, to))
            if passes and nbytes:
                self._pass_on(found[-1], machine, to=to)
        return found

    def _pass_on(self, tensor: torch.Tensor, machine: int, *, to: int | None = None) -> None:
        """Replace ``tensor``, flat uint8 on the host, by that of ``machine``."""
        for piece in tensor.split(REPLICATED):
            # NCCL sends from the device; a tensor of the CPU is its own copy
            sent = piece.to(self._device)
            with self._collective(GATHERING):
                if to is None:
                    dist.broadcast(sent, group_src=machine, group=self._of_column)
                elif self.machine == machine:
                    dist.send(sent, group_dst=to, group=self._of_column)
                else:
                    dist.recv(sent, group_src=machine, group=self._of_column)
            if machine != self.machine:
                piece.copy_(sent)

    def over_network(self, nbytes: int) -> int:
        """``nbytes`` sent to other machines, as plans count them: see `VirtualRanks`."""
        return nbytes

    @contextmanager
    def _collective(self, what: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            failed = RanksError(f"{self._why_failed()}. {what} ({_in_a_line(error)})")
            self._fail(failed)
            raise failed from error

    def _why_failed(self) -> str:
        """The reason why a collective has failed: a rank has ended. Its connections may be closed a little
        later."""
        group, until = self._exchanging.get(Channel.COLLECTIVE), time.monotonic() + CLOSING_SECONDS
        while group is not None and time.monotonic() < until:
            if known := self._error_of_others():
                return known
            for rank in range(self.size):
                try:
                    if rank != self.rank:
                        group.send([torch.zeros(MESSAGE, dtype=torch.uint8)], rank, 0)
                except RuntimeError:
                    return f"rank {rank} has ended, or has unwrapped its model"
            time.sleep(LOOK_SECONDS)
        return "a collective has failed"

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Replace ``tensor`` by that of rank 0, while the COLLECTIVE lane is idle."""
        if self.machines > 1 and self.is_first_of_machine:
            dist.broadcast(tensor, group_src=0, group=self._of_column)
        if self.local_size > 1:
            dist.broadcast(tensor, group_src=0, group=self._of_machine)

    def replicate(self, shared: Iterable[torch.Tensor]) -> None:
        """Replace tensors in memory that a machine's ranks share by those of the first machine. An
        exchange."""
        if self.machines > 1 and self.is_first_of_machine:
            for tensor in shared:
                self._pass_on(tensor.view(torch.uint8), 0)
        self.exchange("taking over memory of the first machine")


def alone_among() -> int:
    """The number of ranks of torch.distributed in this process; 1 if it is not initialized."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _apart(words: dict[int, str]) -> RanksError:
    """The error for ranks with different descriptions of an exchange."""
    by_words: dict[str, list[str]] = {}
    for rank, what in sorted(words.items()):
        by_words.setdefault(what, []).append(str(rank))
    found = [f"rank {', '.join(ranks)} to: {what}" for what, ranks in by_words.items()]
    is_in_layers = any(what.startswith((LAYER_AVERAGED, LAYER_GATHERED)) for what in by_words)
    hint = f". {ONE_SEED}" if is_in_layers else ""
    return RanksError(f"the ranks do not do the same. Last came {'; '.join(found)}{hint}")


def _user_of(other: socket.socket) -> int:
    """The user id of the process at the other end of a local socket."""
    # struct ucred: the process, the user, the group
    found = other.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", found)[1])


def _memory(nbytes: int) -> str:
    return f"taking {nbytes} bytes of host memory"


def _in_a_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:2048]


def _messages(value: object) -> list[torch.Tensor]:
    """A message of MESSAGE bytes and, if that is too short, one with the rest."""
    data = pickle.dumps(value)
    padded = (len(data).to_bytes(8, "little") + data).ljust(MESSAGE, b"\0")
    whole = torch.frombuffer(bytearray(padded), dtype=torch.uint8)
    return [part for part in whole.split([MESSAGE, len(whole) - MESSAGE]) if part.numel()]


def _rest_of(head: torch.Tensor) -> int:
    """Bytes of the second message."""
    return max(0, 8 + int.from_bytes(head[:8].numpy().tobytes(), "little") - MESSAGE)


def _value_of(head: torch.Tensor, rest: torch.Tensor) -> Any:
    return pickle.loads(head[8:].numpy().tobytes() + rest.numpy().tobytes())
