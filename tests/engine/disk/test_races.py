"""Optimizer state on disk, and lanes that dawdle: the results are the same, and the waits make it so."""

from __future__ import annotations

import re
import warnings
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch

import streamer
import streamer.engine.executor
from streamer.backends.base import Lane
from streamer.backends.thread import Delay, ThreadBackend
from streamer.engine.handle import wrapped
from streamer.engine.schedule.hazards import Hazards
from tests.on_disk import Model, a_step, adamw, disks, end_of, least_budget, small_chunks
from tests.reference import assert_equal, random_delays

__all__ = ["small_chunks"]

STEPS = 3
DISK = (Lane.DISK_READ, Lane.DISK_WRITE)


@cache
def least(update: str) -> int:
    return least_budget(Model(), layers="layers", device="cpu", dtype=torch.bfloat16, update=update)


def trained(
    update: str, state_dtype: str, folder: Path | None = None, delays: dict[Lane, Delay] | None = None
) -> dict[str, Any]:
    """Losses, weights and moments; with a ``folder`` most of the state is on disk, in poisoned buffers."""
    options: dict[str, Any] = {} if folder is None else {"host_memory": least(update), "disk": disks(folder)}
    options |= {"layers": "layers", "dtype": torch.bfloat16, "update": update}
    model = Model()
    streamer.wrap(model, backend=ThreadBackend(delays=delays, poison=True), **options)
    try:
        optimizer = adamw(model, state_dtype)
        assert folder is None or wrapped(model).executor.host.disk_bytes()
        losses = [a_step(model, optimizer, step) for step in range(STEPS)]
        return {"losses": losses, **end_of(model, optimizer)}
    finally:
        with warnings.catch_warnings(record=True):  # of what was lost
            warnings.simplefilter("always")
            wrapped(model).executor.issuer.forget_failures()
            streamer.unwrap(model)


undisturbed = cache(trained)


def always(seconds: float) -> Delay:
    return lambda: seconds


@pytest.mark.parametrize(
    ("lanes", "update", "state_dtype"),
    [
        ((Lane.DISK_READ,), "step", "float32"),
        ((Lane.DISK_WRITE,), "backward", "bfloat16"),
        ((Lane.HOST,), "backward", "bfloat16"),
        (DISK, "step", "float32"),
    ],
    ids=str,
)
def test_a_slow_lane_changes_nothing(
    tmp_path: Path, lanes: tuple[Lane, ...], update: str, state_dtype: str
) -> None:
    delays = {lane: always(0.005) for lane in lanes}
    assert_equal(trained(update, state_dtype, tmp_path, delays), undisturbed(update, state_dtype))


@pytest.mark.parametrize("seed", range(3))
def test_random_delays_change_nothing(tmp_path: Path, seed: int) -> None:
    update = ("step", "backward")[seed % 2]
    state_dtype = ("float32", "bfloat16", "int8")[seed % 3]
    actual = trained(update, state_dtype, tmp_path, random_delays(seed))
    assert_equal(actual, undisturbed(update, state_dtype))


@pytest.mark.parametrize(
    ("dropped", "slow", "update"),
    [
        # an update of a buffer that has not been filled; the disk's write of one that was not updated
        ("read_after_write", Lane.DISK_READ, "step"),
        ("read_after_write", Lane.HOST, "backward"),
        # the disk's read into a buffer that is being updated, or written
        ("write_after_read", Lane.DISK_WRITE, "step"),
        ("write_after_read", Lane.DISK_WRITE, "backward"),
    ],
    ids=str,
)
def test_without_either_kind_of_wait_the_result_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dropped: str, slow: Lane, update: str
) -> None:
    expected = undisturbed(update, "float32")
    monkeypatch.setattr(streamer.engine.executor, "Hazards", partial(Hazards, **{dropped: False}))
    # what is read too early is full of NaN
    warnings.filterwarnings("ignore", message="(a|the) gradient .*is NaN or infinite")
    try:
        actual = trained(update, "float32", tmp_path, {slow: always(0.02)})
    except (OSError, RuntimeError, ValueError) as error:
        noticed = (
            "on disk cannot be right: it (is being (read|written)|was never written)|on disk.* is lost"
            "|modified by an inplace operation|writes its own weights|gradients were written after"
            "|were written while its update was reading them|did not do the same when it ran again"
            "|changes what it is given"
        )
        assert re.search(noticed, str(error)), str(error)
        return
    with pytest.raises(AssertionError):
        assert_equal(actual, expected)
