"""The first of several ranks of which the others are not there: each is taken to do what this one does."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch

from streamer.backends.base import Backend
from streamer.backends.machines import Placement
from streamer.backends.ranks import Ranks
from streamer.simulate.backend import VirtualBackend

T = TypeVar("T")


class VirtualRanks(Ranks):
    """As many ranks as the machine of ``backend`` has, and on as many machines that divide the state, for a
    plan. Nothing is shared, sent or waited for."""

    def __init__(self, backend: VirtualBackend) -> None:
        super().__init__()
        here, machines = backend.machine.ranks, backend.machine.machines
        self.size = here * machines
        rows = tuple(tuple(range(start, start + here)) for start in range(0, self.size, here))
        self._place(Placement(rows, 0), are_replicas=False)
        self._backend = backend

    def exchange(self, what: str, value: object = None, **how: object) -> list[Any]:
        return [value] * self.size

    def _on(self, leader: int, what: str, work: Callable[[], T]) -> T:
        return work()

    def tell(self, error: BaseException) -> None:
        return

    def host_buffer(self, backend: Backend, nbytes: int, *, pinned: bool) -> torch.Tensor:
        return backend.host_buffer(nbytes, pinned=pinned)

    def host_reserve(self, backend: Backend, nbytes: int) -> torch.Tensor:
        return backend.host_reserve(nbytes)

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
