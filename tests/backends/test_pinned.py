"""Pinned memory: exact sizes, one registration per block, and a system that refuses."""

from __future__ import annotations

import os
import platform
import resource
import warnings
from pathlib import Path

import psutil
import pytest
import torch

from streamer.backends.cuda import PinnedBlocks

MIB = 1 << 20
REFUSED = 2


class Cudart:
    """CUDA's runtime as `PinnedBlocks` uses it; takes ``room`` bytes and refuses what is beyond."""

    def __init__(self, room: float = float("inf")) -> None:
        self.room = room
        self.calls: list[tuple[str, int]] = []
        self.registered: dict[int, int] = {}

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.calls.append(("register", nbytes))
        if nbytes > self.room - sum(self.registered.values()):
            return REFUSED
        assert address not in self.registered
        self.registered[address] = nbytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        self.calls.append(("unregister", self.registered.pop(address)))
        return 0

    def cudaGetErrorString(self, error: int) -> str:
        return f"the text of error {error}"


@pytest.fixture
def cudart(monkeypatch: pytest.MonkeyPatch) -> Cudart:
    fake = Cudart()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)
    return fake


def blocks() -> PinnedBlocks:
    return PinnedBlocks(torch.device("cpu"))


def test_a_block_takes_no_more_memory_than_its_size(cudart: Cudart) -> None:
    # a power of two and a bit, which PyTorch's pinned allocator would double
    nbytes = 256 * MIB + 64
    before = psutil.Process().memory_info().rss
    pinned = blocks()
    block = pinned.allocate(nbytes)
    assert psutil.Process().memory_info().rss - before == pytest.approx(nbytes, rel=0.02)
    pinned.close()
    del block
    assert psutil.Process().memory_info().rss - before == pytest.approx(0, abs=0.02 * nbytes)


def test_every_block_is_registered_once_and_lives_on_when_it_is_unregistered(cudart: Cudart) -> None:
    pinned = blocks()
    kept = [pinned.allocate(nbytes) for nbytes in (5000, 6000, 7000, 0)]
    pinned.close()
    pinned.close()
    assert sorted(cudart.calls) == sorted(
        (what, nbytes) for what in ("register", "unregister") for nbytes in (5000, 6000, 7000)
    )
    assert cudart.registered == {}
    view = kept.pop(0)[1000:].view(torch.float32)
    assert not view.fill_(2.5).ne(2.5).any()


def test_a_refusal_is_said_once_with_its_remedy(cudart: Cudart, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (65536, 65536))
    cudart.room = 6000
    pinned = blocks()
    pinned.allocate(5000)
    with pytest.warns(UserWarning) as caught:
        refused = pinned.allocate(9000)
    assert [str(warning.message) for warning in caught] == [
        "could not page-lock 9000 bytes of host memory (CUDA error 2: the text of error 2; the locked-memory "
        "limit is 65536 bytes): copies will be slower. Raise it with 'ulimit -l unlimited', or "
        "'--ulimit memlock=-1' for a container."
    ]
    assert refused.shape == (9000,)
    assert not refused.any()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not pinned.allocate(8000).any()
    pinned.close()
    assert cudart.calls == [("register", 5000), ("register", 9000), ("unregister", 5000)]


def test_a_forked_process_does_not_get_a_block(cudart: Cudart) -> None:
    pinned = blocks()
    block = pinned.allocate(64 * MIB)
    place = f"{block.data_ptr():x}-"
    assert place in Path("/proc/self/maps").read_text()
    with warnings.catch_warnings():
        # Python warns of forks beside threads; this child touches no lock
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if not child:
        os._exit(place in Path("/proc/self/maps").read_text())
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    pinned.close()


def test_wsl_is_told_that_a_higher_limit_helps_nothing(
    cudart: Cudart, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "release", lambda: "5.15.167.4-microsoft-standard-WSL2")
    cudart.room = 0
    with pytest.warns(UserWarning, match=r"slower\. WSL has no more of it; Linux itself has\.$"):
        blocks().allocate(5000)
