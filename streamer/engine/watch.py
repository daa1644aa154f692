"""A word before the system ends the process for want of host memory."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

from streamer.backends.base import Backend

#: Free host memory below which a process is soon ended by the system.
LOW_HOST_BYTES = 1 << 28


class HostWatch:
    """Warns once."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._has_warned = False

    def check(self, held: Mapping[str, int]) -> None:
        """Warn if little is left; ``held`` are the bytes that the wrapped model holds, by purpose."""
        available = self._backend.host_available()
        if available < LOW_HOST_BYTES and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"only {available} bytes of host memory are free, and the system may end this process: "
                f"the wrapped model holds {sum(held.values())}, so somebody else takes more than was "
                "planned; end that, or save and wrap with less (a smaller state_dtype, update='backward')",
                stacklevel=10,  # the line that called optimizer.step()
            )
