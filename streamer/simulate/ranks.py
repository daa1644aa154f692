"""The first of several ranks of which the others are not there: each is taken to do what this one does."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from streamer.backends.machines import Placement
from streamer.backends.ranks import Channel, Ranks
from streamer.simulate.backend import VirtualBackend

T = TypeVar("T")


class VirtualRanks(Ranks):
    """As many ranks as the machine of ``backend`` has, for a plan. Nothing is shared, sent or waited for."""

    def __init__(self, backend: VirtualBackend) -> None:
        self.rank, self.size = 0, backend.machine.ranks
        self._place(Placement((tuple(range(self.size)),), 0))
        self.has_agreed = False
        self._backend = backend

    def agree(self, told: object, failed: BaseException | None = None) -> None:
        self.has_agreed = True

    def as_first(self, value: T) -> T:
        return value

    def shared(self, nbytes: int, *, in_forks: bool, touched: bool = True) -> torch.Tensor:
        return self._backend.host_buffer(nbytes)

    def led(self, words: str, work: Callable[[], T]) -> T:
        return work()

    def issue(self) -> None:
        return

    def meet(
        self, words: str, brought: object = None, *, channel: Channel = Channel.CALLER, patient: bool = False
    ) -> list[object]:
        return [brought] * self.size

    def average(self, tensor: torch.Tensor, owner: int | None = None) -> None:
        return

    def gathered(self, number: torch.Tensor) -> torch.Tensor:
        return number.expand(self.size)

    def broadcast(self, tensor: torch.Tensor) -> None:
        return

    def leave(self) -> None:
        return
