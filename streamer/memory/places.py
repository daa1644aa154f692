"""Host buffers for what comes and goes in sizes that nobody knows beforehand."""

from __future__ import annotations

from collections.abc import Callable

import torch


class HostPlaces:
    """Numbered buffers, each lent to one user at a time and kept for the next. A buffer that has become too
    small is given back before a larger one takes its number.

    ``allocate`` makes a buffer of some bytes; ``give_back`` is called with the number and the buffer when one
    is of no more use, and returns when nobody reads or writes it.
    """

    def __init__(
        self,
        allocate: Callable[[int], torch.Tensor],
        give_back: Callable[[int, torch.Tensor], None],
    ) -> None:
        self.buffers: list[torch.Tensor] = []
        self._free: set[int] = set()
        self._allocate = allocate
        self._give_back = give_back

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.nbytes for buffer in self.buffers)

    def take(self, nbytes: int) -> int:
        """The number of a buffer of ``nbytes`` or more."""
        by_size = sorted(self._free, key=lambda number: self.buffers[number].nbytes)
        number = next((number for number in by_size if self.buffers[number].nbytes >= nbytes), None)
        if number is None:
            number = by_size[-1] if by_size else len(self.buffers)
            self._replace(number, nbytes)
        self._free.discard(number)
        return number

    def release(self, number: int) -> None:
        """The buffer is free for others."""
        self._free.add(number)

    def _replace(self, number: int, nbytes: int) -> None:
        empty = torch.empty(0, dtype=torch.uint8)
        if number < len(self.buffers):
            self._give_back(number, self.buffers[number])
            self.buffers[number] = empty
        buffer = self._allocate(nbytes)
        if number == len(self.buffers):
            self.buffers.append(empty)
        self.buffers[number] = buffer
