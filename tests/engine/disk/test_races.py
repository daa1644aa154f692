"""Optimizer state on disk, and slow lanes: the results are the same. What each wait is for is in
`tests/engine/schedule`."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import streamer
import streamer.engine.paging.executor
from streamer.backends.base import Lane
from streamer.backends.thread import Delay, ThreadBackend
from streamer.engine.handle import wrapped
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
    model = streamer.wrap(Model(), backend=ThreadBackend(delays=delays, poison=True), **options)
    optimizer = adamw(model, state_dtype)
    assert folder is None or wrapped(model).executor.disk_bytes()
    losses = [a_step(model, optimizer, step) for step in range(STEPS)]
    found = {"losses": losses, **end_of(model, optimizer)}
    streamer.unwrap(model)
    return found


undisturbed = cache(trained)


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
    delays = {lane: lambda: 0.005 for lane in lanes}
    assert_equal(trained(update, state_dtype, tmp_path, delays), undisturbed(update, state_dtype))


@pytest.mark.parametrize("seed", range(3))
def test_random_delays_change_nothing(tmp_path: Path, seed: int) -> None:
    update = ("step", "backward")[seed % 2]
    state_dtype = ("float32", "bfloat16", "int8")[seed % 3]
    actual = trained(update, state_dtype, tmp_path, random_delays(seed))
    assert_equal(actual, undisturbed(update, state_dtype))
