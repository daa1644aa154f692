"""What a run prints may lose its reader: `tee` ends at Ctrl-C before the run does, a connection breaks. The
run goes on without it, and saves what it has to save.
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


class _Outliving:
    """A stream whose file becomes the null device when its reader is gone."""

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
            if error.errno not in NO_READER:
                raise
            # what is still in the stream's buffer goes there too
            with open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), self._stream.fileno())
            return otherwise


@contextlib.contextmanager
def outliving_readers() -> Iterator[None]:
    """Inside the block it is no error to print where nobody reads any more."""
    stdout, stderr = (cast(TextIO, _Outliving(stream)) for stream in (sys.stdout, sys.stderr))
    with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
        yield
