"""The verdict on memory: which tier is short, by how many bytes, and what would help.

Whoever is about to take memory, or plans to, asks here, so that every refusal reads alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from streamer.errors import exact_amount

#: Said of the host where it stands in for the device: what it needs has the device's bytes in it.
SHARED = " (whose memory is the device's too)"


@dataclass(frozen=True)
class Tier:
    """Bytes that are needed of one tier of memory, and bytes that it has; ``remedy`` says what would help."""

    name: str
    needed: int
    available: int
    remedy: str = ""

    @property
    def lacking(self) -> int:
        """Bytes that there are too few of."""
        return max(0, self.needed - self.available)

    def __str__(self) -> str:
        short = f" ({exact_amount(self.lacking)} too few)" if self.lacking else ""
        return f"{self.name} needs {exact_amount(self.needed)} and has {exact_amount(self.available)}{short}"


def host(needed: int, available: int, remedy: str = "") -> Tier:
    """The host's memory."""
    return Tier("the host", needed, available, remedy)


def verdict(what: str, tiers: Iterable[Tier]) -> str | None:
    """One line that names the tiers with too little memory for ``what``; None if every tier has room."""
    short = [tier for tier in tiers if tier.lacking]
    if not short:
        return None
    remedies = "; ".join(dict.fromkeys(tier.remedy for tier in short if tier.remedy))
    message = f"not enough memory for {what}: {', '.join(map(str, short))}"
    return f"{message}: {remedies}" if remedies else message


def require(what: str, *tiers: Tier, details: Callable[[], str] | None = None) -> None:
    """Raise MemoryError unless every tier has room for ``what``: the `verdict`, and ``details`` below it."""
    message = verdict(what, tiers)
    if message is not None:
        raise MemoryError(message if details is None else f"{message}\n{details()}")


def lacks(tiers: Iterable[Tier]) -> str:
    """The tiers that are short, each with how many bytes it lacks."""
    return " and ".join(f"{tier.name} lacks {exact_amount(tier.lacking)}" for tier in tiers if tier.lacking)
