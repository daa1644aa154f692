"""Ctrl-C and SIGTERM: at once while nothing has begun, politely in a run, whose step is finished first."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED = "\nstreamer: interrupted; nothing is written"


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


@contextmanager
def exiting_on_interrupt() -> Iterator[None]:
    """Inside the block, which only imports and reads, Ctrl-C ends the process at once, with exit code 130.

    A KeyboardInterrupt would do so less surely: amid the import of an extension module it is swallowed, or
    comes out as an error of another kind. SIGINT is left alone where it is ignored or somebody else listens.
    """

    def leave(number: int, frame: FrameType | None) -> None:
        os.write(2, f"{INTERRUPTED}\n".encode())
        os._exit(130)

    before = signal.getsignal(signal.SIGINT)
    listens = False
    if before is signal.default_int_handler:
        # only the main thread may listen
        with contextlib.suppress(ValueError):
            signal.signal(signal.SIGINT, leave)
            listens = True
    try:
        yield
    finally:
        if listens:
            signal.signal(signal.SIGINT, before)
