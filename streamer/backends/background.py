"""Work in a background thread, which reads data that other threads are about to change."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import Future
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class Handover(Generic[K]):
    """``keys`` name the data to read. Before it changes the data of a key, a thread calls `before_change`,
    which waits until the data is read."""

    def __init__(self, keys: Iterable[K]) -> None:
        self._left = list(keys)
        self._changed = threading.Condition()

    def before_change(self, key: K) -> None:
        """Return when the data of ``key`` may be changed. Not to be called by the reading thread."""
        with self._changed:
            self._changed.wait_for(lambda: key not in self._left)

    def read_all(self, read: Callable[[K], None]) -> None:
        """Call ``read`` with every key, in order. An error ends all waiting."""
        try:
            while self._left:
                read(self._left[0])
                with self._changed:
                    self._left.pop(0)
                    self._changed.notify_all()
        finally:
            self.stop()

    def stop(self) -> None:
        """Read no more, and end all waiting."""
        with self._changed:
            self._left.clear()
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
