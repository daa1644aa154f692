"""What PyTorch's caching allocator of a GPU makes of its memory."""

from __future__ import annotations

#: The part of the bytes that come and go on the device which is left free for gaps between them: an eighth.
GAPS = 8
#: What it rounds large blocks up to.
BLOCK_BYTES = 2 << 20


def gaps(nbytes: int) -> int:
    """Bytes to leave free for the gaps between ``nbytes`` that come and go."""
    return nbytes // GAPS


def buffers_within(nbytes: int, beside: int, each: int) -> int:
    """How many buffers of ``each`` bytes can be had in ``nbytes``, where others take ``beside`` at most."""
    return (nbytes - gaps(beside)) // (-(-each // BLOCK_BYTES) * BLOCK_BYTES)
