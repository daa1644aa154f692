"""Ctrl-C and SIGTERM asked for politely: the step that runs is finished first."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Stop:
    """Whether somebody has asked for the end, and by which signal."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    def __bool__(self) -> bool:
        return self.signal is not None


@contextmanager
def stopping() -> Iterator[Stop]:
    """Inside the block the first SIGINT or SIGTERM only sets what this gives; a second one ends the process
    at once, as if nobody had listened. Listens in the main thread only, where Python hears signals."""
    stop = Stop()
    listened = (signal.SIGINT, signal.SIGTERM)

    def hear(number: int, frame: FrameType | None) -> None:
        stop.signal = signal.Signals(number)
        for name in listened:
            signal.signal(name, signal.SIG_DFL)

    before = {}
    # only the main thread may listen
    with contextlib.suppress(ValueError):
        for name in listened:
            before[name] = signal.signal(name, hear)
    try:
        yield stop
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)
