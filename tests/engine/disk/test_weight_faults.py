"""A disk that fails: one error that names the place, no wrong value, and a checkpoint revives the model."""

from __future__ import annotations

import errno
import random
from functools import partial
from pathlib import Path

import pytest

import streamer
from streamer.backends.disk import Disks, Scratch
from streamer.store import on_disk
from tests.engine.disk.test_weights import Net, executor_of, least_memory, net, train, unwrapped
from tests.on_disk import Faults

__all__ = ["unwrapped"]

BOTH = ("reading", "writing")


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Faults:
    monkeypatch.setattr(on_disk, "CHUNK_ELEMENTS", 1 << 14)
    return Faults()


@pytest.fixture
def disks(faults: Faults, tmp_path: Path) -> Disks:
    return Disks([tmp_path], partial(Scratch, direct_io="off", system=faults.system()))


@pytest.fixture
def model(disks: Disks) -> Net:
    made = net(host_memory=least_memory(disks), disk=disks)
    assert "weights" in executor_of(made).disk_bytes()
    return made


def step_error(model: Net, optimizer: streamer.AdamW) -> OSError:
    with pytest.raises(OSError, match="of its scratch file failed") as error:
        train(model, optimizer, range(2, 5))
        streamer.synchronize(model)
    return error.value


@pytest.mark.parametrize("seed", range(1))
def test_a_transfer_that_fails_is_one_error_and_a_checkpoint_revives_the_model(
    model: Net, faults: Faults, seed: int, tmp_path: Path
) -> None:
    optimizer = streamer.AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, range(2))
    streamer.save(model, optimizer, tmp_path / "saved", step=2)
    before = faults.calls
    undisturbed = train(model, optimizer, range(2, 5))
    streamer.synchronize(model)
    calls = faults.calls - before
    rng = random.Random(seed)
    for code in (errno.EIO, errno.ENOSPC):
        streamer.load(model, optimizer, tmp_path / "saved")
        faults.arm(rng.randrange(calls), BOTH, code)
        error = step_error(model, optimizer)
        assert isinstance(error, streamer.DiskError)
        assert error.errno == code
        assert " bytes at offset " in str(error)
        optimizer.zero_grad()
        streamer.load(model, optimizer, tmp_path / "saved")
        assert train(model, optimizer, range(2, 5)) == undisturbed
