"""The first of several ranks of which the others are not there: each is taken to do what this one does."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import torch

from streamer.backends.machines import Placement
from streamer.backends.ranks import Channel, Ranks, Turn
from streamer.simulate.backend import VirtualBackend

T = TypeVar("T")


class VirtualRanks(Ranks):
    """As many ranks as the machine of ``backend`` has, and on as many machines that divide the state, for a
    plan. Nothing is shared, sent or waited for."""

    def __init__(self, backend: VirtualBackend) -> None:
        here, machines = backend.machine.ranks, backend.machine.machines
        self.rank, self.size = 0, here * machines
        rows = tuple(tuple(range(start, start + here)) for start in range(0, self.size, here))
        self._place(Placement(rows, 0), are_replicas=False)
        self.has_agreed = False
        self._backend = backend

    def agree(self, told: object, failed: BaseException | None = None) -> None:
        self.has_agreed = True

    def as_first(self, value: T) -> T:
        return value

    def shared(self, nbytes: int, *, in_forks: bool, touched: bool = True) -> torch.Tensor:
        return self._backend.host_buffer(nbytes)

    def _led(self, words: str, work: Callable[[], T], leader: int) -> T:
        return work()

    def issue(self, channel: Channel) -> Turn:
        return Turn(channel, 0)

    def meet(
        self, words: str, brought: object = None, *, turn: object = None, patient: bool = False
    ) -> list[object]:
        return [brought] * self.size

    def all_gather(self, whole: torch.Tensor) -> None:
        return

    def average(self, tensor: torch.Tensor, owner: int | None = None, on_machine: int | None = None) -> None:
        return

    def gathered(self, number: torch.Tensor, *, of_machines: bool = False) -> torch.Tensor:
        return number.expand(self.size if of_machines else self.local_size)

    def gather(self, pieces: Sequence[torch.Tensor], buffer: torch.Tensor) -> None:
        return

    def replicate(self, shared: Iterable[torch.Tensor]) -> None:
        return

    def over_network(self, nbytes: int) -> int:
        """The bytes between GPUs of one machine that take as long as ``nbytes`` to other machines: one lane
        sends both, and its rate is that between GPUs."""
        return self._backend.machine.as_between_gpus(nbytes)

    def broadcast(self, tensor: torch.Tensor) -> None:
        return

    def leave(self) -> None:
        return
