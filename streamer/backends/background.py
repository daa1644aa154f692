"""Work in a background thread, which reads data that other threads are about to change."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import Future
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
C = TypeVar("C")


class Handover(Generic[K, C]):
    """Copy on write: ``keys`` name the data to read. Before it changes the data of a key, a thread calls
    `before_change`. That copies the data if it was not read yet, or waits until it is read if there are
    ``most_copies`` copies already."""

    def __init__(self, keys: Iterable[K], *, most_copies: int) -> None:
        self._left = list(keys)
        self._copies: dict[K, C] = {}
        self._reading: K | None = None
        self._most_copies = most_copies
        self._changed = threading.Condition()

    def before_change(self, key: K, copy: Callable[[], C]) -> None:
        """Return when the data of ``key`` may be changed. Not to be called by the reading thread."""
        with self._changed:
            while key in self._left and key not in self._copies:
                if key != self._reading and len(self._copies) < self._most_copies:
                    self._copies[key] = copy()
                else:
                    self._changed.wait()

    def read_all(self, read: Callable[[K, C | None], None]) -> None:
        """Call ``read`` with every key and its copy, if there is one. An error ends all waiting."""
        try:
            while self._left:
                with self._changed:
                    # copies first: they take memory, and a thread may wait until there are fewer
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
    """Work in a thread of its own. ``is_awaited`` is whether `result`, which raises its error, was called."""

    def __init__(self) -> None:
        super().__init__()
        self.is_awaited = False

    def result(self, timeout: float | None = None) -> None:
        """Wait until the work is done; raise its error."""
        self.is_awaited = True
        super().result(timeout)


def in_background(work: Callable[[], None], name: str) -> Background:
    """Run ``work`` in a thread of its own; the process does not end before that thread."""
    done = Background()
    # no caller can cancel it now: a cancelled future takes no result
    done.set_running_or_notify_cancel()

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised by `result`
            done.set_exception(error)
        else:
            done.set_result(None)

    threading.Thread(target=run, name=name).start()
    return done
