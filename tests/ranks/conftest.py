"""What tests of several ranks share as fixtures."""

from __future__ import annotations

import pytest

from streamer.store import on_disk


@pytest.fixture(autouse=True)
def chunks_are_of_their_size_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """What ranks run sets smaller chunks, and some tests run it in their own process too."""
    monkeypatch.setattr(on_disk, "CHUNK_ELEMENTS", on_disk.CHUNK_ELEMENTS)
