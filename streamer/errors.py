"""What is raised for checkpoints that cannot be used or written."""

from __future__ import annotations

from collections.abc import Sequence


class CheckpointError(ValueError):
    """A checkpoint that is damaged, incomplete, newer than this library, or of another model; one line that
    names the file and the tensor."""


def shortened(names: Sequence[str], most: int = 10) -> str:
    """``names`` in a line, the first of them if there are many."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
