"""What a run prints may lose its reader (`tee` ends at Ctrl-C before the run does, a connection breaks), or
its file the room. The run goes on without it, and saves what it has to save.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, TextIO, TypeVar, cast

T = TypeVar("T")

#: What writing says where nobody reads any more: a closed pipe, a terminal that is gone.
NO_READER = (errno.EPIPE, errno.EIO)
#: What it says of a disk that is full, or of one's part of it.
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


class _Outliving:
    """A stream whose file becomes the null device when its reader is gone. What a full disk has no room for
    is left out."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        return self._outlive(lambda: self._stream.write(text), len(text))

    def flush(self) -> None:
        self._outlive(self._stream.flush, None)

    def _outlive(self, work: Callable[[], T], otherwise: T) -> T:
        try:
            return work()
        except OSError as error:
            if error.errno in NO_ROOM:
                return otherwise
            if error.errno not in NO_READER:
                raise
            self._lead_nowhere()
            return otherwise

    def end(self) -> None:
        """Leave out what there is no room for in the end either."""
        try:
            self._stream.flush()
        except OSError:
            self._lead_nowhere()

    def _lead_nowhere(self) -> None:
        # what is still in the stream's buffer goes there too
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), self._stream.fileno())


@contextlib.contextmanager
def outliving_readers() -> Iterator[None]:
    """Inside the block it is no error to print where nobody reads any more, or where there is no room."""
    streams = _Outliving(sys.stdout), _Outliving(sys.stderr)
    stdout, stderr = (cast(TextIO, stream) for stream in streams)
    try:
        with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
            yield
    finally:
        for stream in streams:
            stream.end()
