"""Things that one thread reads in the background before others change them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import Future
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
C = TypeVar("C")


class Handover(Generic[K, C]):
    """Copy before write: ``keys`` name what is to be read; whoever is about to change one of them first calls
    `before_change`, and what has not been read by then is copied, or waited for if ``most_copies`` are
    waiting to be read already."""

    def __init__(self, keys: Iterable[K], *, most_copies: int) -> None:
        self._left = list(keys)
        self._copies: dict[K, C] = {}
        self._reading: K | None = None
        self._most_copies = most_copies
        self._changed = threading.Condition()

    def before_change(self, key: K, copy: Callable[[], C]) -> None:
        """Return when ``key`` may be changed. Any thread but the reading one may call it."""
        with self._changed:
            while key in self._left and key not in self._copies:
                if key != self._reading and len(self._copies) < self._most_copies:
                    self._copies[key] = copy()
                else:
                    self._changed.wait()

    def read_all(self, read: Callable[[K, C | None], None]) -> None:
        """Read every key, from its copy if there is one. After an error nobody waits any more."""
        try:
            while self._left:
                with self._changed:
                    # a copy is memory, and somebody may wait for it to be given back
                    key = next(iter(self._copies), self._left[0])
                    self._reading = key
                    copy = self._copies.get(key)
                read(key, copy)
                with self._changed:
                    del copy
                    self._left.remove(key)
                    self._copies.pop(key, None)
                    self._reading = None
                    self._changed.notify_all()
        finally:
            with self._changed:
                self._left.clear()
                self._copies.clear()
                self._changed.notify_all()


class Background(Future[None]):
    """Work in a thread of its own. ``asked`` says whether somebody has asked for its result, and so knows of
    what went wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = False

    def result(self, timeout: float | None = None) -> None:
        """Wait until it is done; raise what it raised."""
        self.asked = True
        super().result(timeout)


def in_background(work: Callable[[], None], name: str) -> Background:
    """Run ``work`` in a thread of its own, which the process waits for before it ends."""
    done = Background()

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised by whoever asks for the result
            done.set_exception(error)
        else:
            done.set_result(None)

    threading.Thread(target=run, name=name).start()
    return done
