"""Ctrl-C, SIGTERM and a lost terminal: at once while nothing has begun, politely in a run, whose step is
finished first.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED = "\nstreamer: interrupted; nothing is written"


class Stop:
    """The signal that has asked for the end of the run, or None."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        #: what the first signal is answered with
        self.answer: Callable[[], str] | None = None


@contextmanager
def _handled(handler: Callable[[int, FrameType | None], None], *numbers: signal.Signals) -> Iterator[None]:
    """Inside the block ``handler`` gets these signals, if it runs in the main thread: Python allows no other
    thread to set a handler."""
    before = {}
    with contextlib.suppress(ValueError):
        for number in numbers:
            before[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


@contextmanager
def stopping() -> Iterator[Stop]:
    """Inside the block the first SIGINT, SIGTERM or SIGHUP (the terminal is gone) only sets the `Stop` that
    this gives. A second signal ends the process at once, by the system's default. Other threads than the main
    one get a `Stop` that stays unset."""
    stop = Stop()
    numbers = [signal.SIGINT, signal.SIGTERM]
    # nohup ignores it
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
        numbers.append(signal.SIGHUP)

    def note(number: int, frame: FrameType | None) -> None:
        stop.signal = signal.Signals(number)
        for each in numbers:
            signal.signal(each, signal.SIG_DFL)
        if stop.answer is not None:
            with contextlib.suppress(OSError):  # nobody reads any more
                os.write(2, f"\n{stop.answer()}\n".encode())

    with _handled(note, *numbers):
        yield stop


@contextmanager
def exiting_on_interrupt() -> Iterator[None]:
    """Inside the block, which only imports and reads, Ctrl-C ends the process at once, with exit code 130.

    A KeyboardInterrupt would do so less surely: amid the import of an extension module it is swallowed, or
    comes out as an error of another kind. SIGINT is left alone where it is ignored or has another handler.
    """

    def leave(number: int, frame: FrameType | None) -> None:
        os.write(2, f"{INTERRUPTED}\n".encode())
        os._exit(130)

    free = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with _handled(leave, *([signal.SIGINT] if free else [])):
        yield
