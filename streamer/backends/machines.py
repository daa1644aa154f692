"""The machines of the ranks of a process group or a mesh."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeGuard, cast

import torch.distributed as dist

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

#: The argument of `streamer.wrap` for ranks on several machines.
AS_MESH = 'process_group=init_device_mesh("cuda", (machines, ranks_per_machine))'


@dataclass(frozen=True)
class Placement:
    """The ranks of each machine. Ranks have their numbers in the group or the mesh."""

    #: by machine, the numbers of its ranks, equally many on each
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


def machine_name() -> str:
    """A name that is the same for all processes that can share memory, and for no others: each container has
    its own."""
    return os.uname().nodename


def is_mesh(group: ProcessGroup | DeviceMesh) -> TypeGuard[DeviceMesh]:
    """Whether ``group`` is a mesh. PyTorch may be built without torch.distributed; then it never is."""
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
    """The process groups that together reach all ranks of ``group``: first that of this rank's row, then that
    of its column."""
    if not is_mesh(group):
        return [cast("ProcessGroup", group)]
    return [group.get_group(dim) for dim in reversed(range(group.ndim))]


def place(group: ProcessGroup | DeviceMesh, rank: int, machines: Sequence[str]) -> Placement:
    """The placement of the ranks of ``group``; ``machines`` has the name of each rank's machine. Each row of
    a mesh counts as a machine. Raises ValueError, on all ranks, if the ranks of a row are on several
    machines, or if machines have different numbers of ranks.
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
