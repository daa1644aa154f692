"""Large blocks of host memory: all there, zeroed, and in a forked process only where that was asked for."""

from __future__ import annotations

import faulthandler
import mmap
import os
import signal
import sys
import warnings
from pathlib import Path

import pytest
import torch

from streamer.backends.host_memory import TOUCH_BYTES, file_mappings, mapped


@pytest.mark.parametrize("nbytes", [0, 1, 4096, 100_001, TOUCH_BYTES + 5])
def test_a_block_is_of_the_size_asked_for_and_zero(nbytes: int) -> None:
    block = mapped(nbytes, in_forks=True)
    assert (block.dtype, tuple(block.shape)) == (torch.uint8, (nbytes,))
    assert not block.any()
    assert block.data_ptr() % 4096 == 0 or not nbytes
    block.fill_(7)
    assert int(block[-1:].sum()) == (7 if nbytes else 0)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux can keep memory from a fork")
@pytest.mark.parametrize(("in_forks", "code"), [(True, 3), (False, -signal.SIGSEGV)])
def test_a_forked_process_has_it_where_it_may(in_forks: bool, code: int) -> None:
    block = mapped(10_000, in_forks=in_forks).fill_(3)
    with warnings.catch_warnings():
        # Python warns of forks beside threads; this child touches no lock
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if not child:
        faulthandler.disable()
        os._exit(int(block[9_999]))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == code


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="only Linux tells what is mapped")
@pytest.mark.parametrize("listed", [True, False])
def test_memory_that_is_a_files_is_known(
    listed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in a sandbox without the list of these alone."""

    def without(path: str) -> list[str]:
        raise PermissionError(path)

    if not listed:
        monkeypatch.setattr(os, "listdir", without)
    (tmp_path / "file").write_bytes(bytes(3 * mmap.PAGESIZE))
    file, size = str(tmp_path / "file"), 3 * mmap.PAGESIZE
    of_file, *others = [torch.from_file(file, size=size, dtype=torch.uint8, shared=True) for _ in range(6)]
    shared = torch.zeros(mmap.PAGESIZE).share_memory_()
    own = torch.zeros(mmap.PAGESIZE)
    found = file_mappings()
    assert found == sorted(found)

    def is_of_a_file(tensor: torch.Tensor) -> bool:
        last = tensor.data_ptr() + tensor.nbytes - 1
        return any(start <= tensor.data_ptr() and last < stop for start, stop in found)

    assert [is_of_a_file(each) for each in (of_file, *others, shared)] == 7 * [True]
    assert not is_of_a_file(own)
