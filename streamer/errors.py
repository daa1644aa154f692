"""Errors of checkpoints, disks and ranks; warnings; bytes as text."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from types import FrameType

#: Packages whose frames do not belong to the user's code.
_OURS = frozenset(("streamer", "streamer_native", "torch", "contextlib"))


class CheckpointError(ValueError):
    """A checkpoint that is damaged, incomplete, newer than this library, or of another model; one line that
    names the file and the tensor."""


class DiskError(OSError):
    """A folder or a drive that cannot hold its files, or a failed transfer; one line that names the folder
    and the remedy. ``errno`` is the system's, if it has one."""

    def __init__(self, message: str, errno: int | None = None) -> None:
        super().__init__(message)
        self.errno = errno


class RanksError(RuntimeError):
    """Ranks that train one model do different things, or one of them has ended or failed; one line with the
    next operation of each."""


def notes(error: Exception) -> list[str]:
    """The notes of ``error``, from `BaseException.add_note`."""
    return list(getattr(error, "__notes__", ()))


def shortened(names: Sequence[str], most: int = 10) -> str:
    """``names`` in a line, the first of them if there are many."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def amount(nbytes: float) -> str:
    """Bytes in the largest binary unit with a figure of 1 or more."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.2f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.2f} TiB"


def exact_amount(nbytes: int) -> str:
    """The exact number of bytes, and a readable unit for large numbers."""
    text = f"{nbytes} byte{'s' * (nbytes != 1)}"
    return text if nbytes < 1 << 20 else f"{text} ({amount(nbytes)})"


def warn(message: str) -> None:
    """Warn of ``message`` at the line of the user's code that called the library, past any frames of
    PyTorch."""
    level, frame = 1, sys._getframe()
    while _is_ours(frame) and frame.f_back is not None:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)


def _is_ours(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] in _OURS
