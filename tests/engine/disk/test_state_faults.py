"""Optimizer state on a disk that fails: one error, no wrong value, and a checkpoint goes on to the bit."""

from __future__ import annotations

import copy
import errno
import os
import random
import re
import threading
import warnings
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import streamer
from streamer.backends.direct_io import System
from streamer.engine.handle import wrapped
from streamer.errors import DiskError
from tests.on_disk import Faults, Model, a_step, adamw, disks, end_of, least_budget, loss_of, small_chunks
from tests.reference import assert_equal

__all__ = ["small_chunks"]

STEPS = 4
#: The step before which a checkpoint is written.
SAVED = 2
#: Room for the ring and for the state of a layer or two, but no more.
BUDGET = {"step": 2_000_000, "backward": 1_700_000}
OPTIONS: dict[str, Any] = {"layers": "layers", "device": "cpu", "dtype": torch.bfloat16}


@cache
def least(update: str) -> int:
    """So little that weights are on disk too."""
    return least_budget(Model(), update=update, **OPTIONS)


def wrap(
    folder: Path | None, update: str = "step", system: System | None = None, *, weights: bool = False
) -> nn.Module:
    options = dict(OPTIONS)
    if folder is not None:
        budget = least(update) if weights else BUDGET[update]
        options |= {"host_memory": budget, "disk": disks(folder, 2, system=system or System())}
    model = streamer.wrap(Model(), update=update, **options)
    assert ("weights" in wrapped(model).executor.host.disk_bytes()) == weights
    return model


@cache
def undisturbed(update: str = "step", steps: int = STEPS) -> tuple[list[float], dict[str, Any]]:
    model = wrap(None, update)
    optimizer = adamw(model)
    losses = [a_step(model, optimizer, number) for number in range(steps)]
    end = end_of(model, optimizer)
    streamer.unwrap(model)
    return losses, end


def go_on(model: nn.Module, optimizer: streamer.AdamW, checkpoint: Path, update: str) -> None:
    """The run goes on from the checkpoint to the end of an undisturbed one."""
    losses, end = undisturbed(update)
    streamer.load(model, optimizer, checkpoint)
    assert [a_step(model, optimizer, number) for number in range(SAVED, STEPS)] == losses[SAVED:]
    assert_equal(end_of(model, optimizer), end)


def broken_run(model: nn.Module, optimizer: streamer.AdamW, checkpoint: Path, arm: Callable[[], None]) -> str:
    """Train, with a checkpoint before step `SAVED`, after which ``arm`` is called; the error's text."""
    losses, _ = undisturbed(wrapped(model).executor.gradients.are_kept and "step" or "backward")
    with pytest.raises(DiskError) as caught:
        for number in range(STEPS):
            if number == SAVED:
                streamer.save(model, optimizer, checkpoint, step=number)
                arm()
            assert a_step(model, optimizer, number) == losses[number], "a wrong value and no error"
        streamer.synchronize(model)
    return str(caught.value)


def test_short_transfers_and_interruptions_change_nothing(tmp_path: Path) -> None:
    draw, lock, counts = random.Random(0), threading.Lock(), {"short": 0, "interrupted": 0}

    def some(call: Callable[..., int], fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        with lock:
            kind, share = draw.choice(["short", "interrupted", "whole", "whole"]), draw.random()
            if kind in counts:
                counts[kind] += 1
        if kind == "interrupted":
            raise InterruptedError(errno.EINTR, "interrupted")
        (memory,) = buffers
        return call(
            fd, [memory[: 1 + int(share * (len(memory) - 1))]] if kind == "short" else buffers, offset
        )

    system = System(preadv=partial(some, os.preadv), pwritev=partial(some, os.pwritev))
    model = wrap(tmp_path, system=system)
    optimizer = adamw(model)
    losses, end = undisturbed()
    assert [a_step(model, optimizer, number) for number in range(STEPS)] == losses
    assert_equal(end_of(model, optimizer), end)
    assert min(counts.values()) > 20
    streamer.unwrap(model)


#: What fails: which transfer after the checkpoint, in which direction, and how; when updates are made, and
#: whether weights are on disk too.
FAULTS = [
    (0, "reading", errno.EIO, "step", False),
    (0, "reading", errno.EIO, "backward", True),
    (0, "writing", errno.ENOSPC, "step", True),
    (1, "writing", errno.EIO, "backward", False),
    (18, "reading", errno.ENOSPC, "step", True),
]


@pytest.mark.parametrize(("number", "verb", "error", "update", "weights"), FAULTS)
def test_a_transfer_that_fails_is_one_error_and_the_checkpoint_goes_on(
    tmp_path: Path, number: int, verb: str, error: int, update: str, weights: bool
) -> None:
    faults = Faults()
    model = wrap(tmp_path, update, faults.system(), weights=weights)
    optimizer = adamw(model)
    checkpoint = tmp_path / "checkpoint"
    told = broken_run(model, optimizer, checkpoint, lambda: faults.arm(number, [verb], error))
    assert faults.raised == 1
    assert re.search(
        rf"^disk={tmp_path}/disk[01]: {verb} [0-9]+ bytes at offset [0-9]+ of its scratch file failed "
        rf"\({os.strerror(error)}\): ",
        told,
    )
    # until the checkpoint is loaded nothing goes on, and nothing is written that is wrong
    for use in (
        partial(streamer.synchronize, model),
        partial(streamer.save, model, optimizer, tmp_path / "other", step=0),
        partial(copy.deepcopy, model),
        optimizer.state_dict,
    ):
        with pytest.raises(DiskError, match=re.escape(told)):
            use()
    assert not (tmp_path / "other").exists()
    go_on(model, optimizer, checkpoint, update)
    streamer.unwrap(model)


@pytest.mark.parametrize(("number", "update"), [(7, "step"), (14, "backward")])
def test_a_disk_that_is_gone(tmp_path: Path, number: int, update: str) -> None:
    faults = Faults()
    model = wrap(tmp_path, update, faults.system())
    optimizer = adamw(model)
    checkpoint = tmp_path / "checkpoint"
    both = ["reading", "writing"]
    arm = partial(faults.arm, number, both, errno.ENODEV, for_good=True)
    told = broken_run(model, optimizer, checkpoint, arm)
    assert "the drive is gone: give a folder on another one" in told
    with pytest.raises(DiskError, match="the drive is gone"):
        streamer.load(model, optimizer, checkpoint)
    streamed = {name: torch.isfinite(param).all() for name, param in model.named_parameters()}
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        streamer.unwrap(model)
    assert all(streamed.values())
    assert all(torch.isfinite(param).all() for param in model.parameters())
    assert not any(thread.name.startswith("streamer-") for thread in threading.enumerate())
    # another disk, the same checkpoint
    (tmp_path / "other").mkdir()
    faults.disarm()
    model = wrap(tmp_path / "other", update)
    optimizer = adamw(model)
    go_on(model, optimizer, checkpoint, update)
    streamer.unwrap(model)


def test_unwrap_gives_the_weights_out_and_says_what_they_are(tmp_path: Path) -> None:
    """After a failed update they are those of before it or of after it, each in its layer."""
    faults = Faults()
    model = wrap(tmp_path, system=faults.system())
    optimizer = adamw(model)
    for number in range(2):
        a_step(model, optimizer, number)
    streamer.synchronize(model)
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    faults.arm(0, ["writing"], errno.EIO)
    loss_of(model, 2).backward()
    optimizer.step()
    with pytest.warns(UserWarning, match="Input/output error"):
        streamer.unwrap(model)
    losses, _ = undisturbed(steps=3)
    after = dict(model.named_parameters())
    assert all(param.dtype is torch.float32 for param in after.values())
    assert any(not torch.equal(before[name], param.bfloat16()) for name, param in after.items())
    for name, param in after.items():
        torch.testing.assert_close(param, before[name].float(), rtol=0.05, atol=0.05)
    assert losses


def moments_after_an_error(folder: Path, number: int | None) -> dict[str, torch.Tensor | None]:
    """Two optimizers make two steps; in the second one a write fails, and a checkpoint of the first optimizer
    alone is loaded. The moments of the other one, None for those that cannot be read."""
    faults = Faults()
    model = wrap(folder, system=faults.system())
    mine = [p for name, p in model.named_parameters() if name.endswith("up.weight")]
    others = {name: p for name, p in model.named_parameters() if not name.endswith("up.weight")}
    first, second = streamer.AdamW(mine, lr=1e-2), streamer.AdamW(others.values(), lr=1e-2)

    def both(number: int) -> None:
        loss_of(model, number).backward()
        for optimizer in (first, second):
            optimizer.step()
        for optimizer in (first, second):
            optimizer.zero_grad()

    both(0)
    streamer.save(model, first, folder / "first", step=1)
    if number is not None:
        faults.arm(number, ["writing"], errno.EIO)
        with pytest.raises(DiskError):
            both(1)
            streamer.synchronize(model)
        streamer.load(model, first, folder / "first")
    found: dict[str, torch.Tensor | None] = {}
    for name, param in others.items():
        try:
            found[name] = second.state[param]["exp_avg"].clone()
        except DiskError as error:
            assert "is lost" in str(error)
            found[name] = None
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        streamer.unwrap(model)
    return found


def test_what_was_lost_is_never_read_as_something_else(tmp_path: Path) -> None:
    """Moments that no checkpoint has brought back are not zeros."""
    (tmp_path / "whole").mkdir()
    before = moments_after_an_error(tmp_path / "whole", None)
    refused = nans = 0
    for number in (0, 5, 25, 30):
        folder = tmp_path / str(number)
        folder.mkdir()
        for name, now in moments_after_an_error(folder, number).items():
            if now is None:
                refused += 1
            elif not torch.isfinite(now).all():
                nans += 1
            else:
                # of before the second step, or of after it
                assert now.any() == before[name].any(), name
    assert refused and nans


def test_moments_for_which_the_disk_has_no_room_leave_the_old_ones_alone(tmp_path: Path) -> None:
    full = False

    def allocate(fd: int, offset: int, nbytes: int) -> None:
        if full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.posix_fallocate(fd, offset, nbytes)

    model = wrap(tmp_path, system=System(allocate=allocate))
    optimizer = adamw(model)
    losses, end = undisturbed()
    assert [a_step(model, optimizer, number) for number in range(3)] == losses[:3]
    streamer.synchronize(model)
    held = wrapped(model).executor.host.bytes(), wrapped(model).executor.host.disk_bytes()
    full = True
    with pytest.raises(DiskError, match=rf"disk={tmp_path}/disk0 has no room: [0-9]+ bytes are needed"):
        adamw(model, torch.bfloat16)
    assert (wrapped(model).executor.host.bytes(), wrapped(model).executor.host.disk_bytes()) == held
    assert [a_step(model, optimizer, number) for number in range(3, STEPS)] == losses[3:]
    assert_equal(end_of(model, optimizer), end)
    streamer.unwrap(model)
