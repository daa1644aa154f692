"""What is raised for checkpoints that cannot be used or written."""

from __future__ import annotations


class CheckpointError(ValueError):
    """A checkpoint that is damaged, incomplete, newer than this library, or of another model; one line that
    names the file and the tensor."""
