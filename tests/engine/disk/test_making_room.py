"""Moments that were in memory go to disk when something else needs their room: results stay the same."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import streamer
from streamer.backends.base import Lane
from streamer.backends.direct_io import System
from streamer.backends.thread import ThreadBackend
from streamer.engine.handle import wrapped
from streamer.errors import DiskError
from tests.checkpoint.test_checkpoint import slowed
from tests.on_disk import VOCAB, Model, adamw, disks, end_of, loss_of, small_chunks
from tests.reference import assert_equal

__all__ = ["small_chunks"]

BF16, FP32 = torch.bfloat16, torch.float32
OPTIONS: dict[str, Any] = {"layers": "layers", "dtype": BF16}


def wrap(folder: Path, budget: int, **options: Any) -> nn.Module:
    if "backend" not in options:
        options["backend"] = ThreadBackend(delays={Lane.DISK_WRITE: lambda: 0.002}, poison=True)
    options = OPTIONS | {"disk": disks(folder)} | options
    return streamer.wrap(Model(), host_memory=budget, **options)


def held(model: nn.Module) -> int:
    return sum(wrapped(model).executor.host.bytes().values())


def budget_for(state_dtype: Any, **options: Any) -> int:
    """Bytes of host memory for all that a step takes without accumulation, and for all that one with it takes
    but half of the moments."""
    model = streamer.wrap(Model(), device="cpu", **OPTIONS | options)
    before = held(model)
    optimizer = streamer.AdamW(model.parameters(), state_dtype=state_dtype)
    moments = held(model) - before
    loss_of(model, 0).backward()
    optimizer.step()
    once = held(model)
    for number in (1, 2):
        loss_of(model, number).backward()
    twice = held(model)
    streamer.unwrap(model)
    assert twice > once
    # a ring of chunks is needed then
    return max(once + 40_000, twice - moments // 2)


def accumulates(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> list[float]:
    losses = []
    for part in range(1 + number % 3):
        loss = loss_of(model, 10 * number + part)
        loss.backward()
        losses.append(loss.item())
    streamer.clip_grad_norm_(model, 0.5)
    optimizer.step()
    optimizer.zero_grad()
    return losses


def run(model: nn.Module, state_dtype: Any, budget: int | None = None) -> dict[str, Any]:
    optimizer = adamw(model, state_dtype)
    losses = []
    for number in range(5):
        losses.append(accumulates(model, optimizer, number))
        assert budget is None or held(model) <= budget
        if number == 2:
            # a view of memory, or a copy, of what is in either place
            param = next(model.parameters())
            optimizer.state[param]["exp_avg"] = optimizer.state[param]["exp_avg"].clone()
    return {"losses": losses, **end_of(model, optimizer)}


@pytest.mark.parametrize(
    ("options", "state_dtype"),
    [({}, "int8"), ({"activations": "recompute+offload", "grad_dtype": None}, BF16)],
    ids=str,
)
def test_accumulation_takes_the_room_of_moments(
    tmp_path: Path, state_dtype: Any, options: dict[str, Any]
) -> None:
    budget = budget_for(state_dtype, **options)
    plain = streamer.wrap(Model(), device="cpu", **OPTIONS | options)
    expected = run(plain, state_dtype)
    streamer.unwrap(plain)
    model = wrap(tmp_path, budget, **options)
    executor = wrapped(model).executor
    assert not executor.host.disk_bytes()
    assert_equal(run(model, state_dtype, budget), expected)
    on_disk = executor.host.disk_bytes()
    assert on_disk.keys() >= {"exp_avg", "exp_avg_sq"}
    assert executor.host.bytes()["exp_avg"] > 0, "no more goes than must"
    streamer.unwrap(model)


def test_with_all_moments_on_disk_what_is_short_is_said(tmp_path: Path) -> None:
    model = wrap(tmp_path, budget_for("int8"))
    optimizer = adamw(model, "int8")
    executor = wrapped(model).executor
    executor.host.limit = held(model) + 1000
    before = end_of(model, optimizer)
    loss_of(model, 0).backward()
    with pytest.raises(MemoryError, match="a second backward before the step .* wrap with grad_dtype=None"):
        loss_of(model, 1).backward()
    assert not executor.host.disk_bytes(), "nothing goes where that does not help"
    assert_equal(end_of(model, optimizer), before)
    streamer.unwrap(model)


def test_updates_that_are_running_are_waited_for(tmp_path: Path) -> None:
    """A larger batch than before has larger inputs to keep, while the layers behind it are updated."""

    def losses(model: nn.Module, budget: int | None) -> dict[str, Any]:
        optimizer = adamw(model)
        executor = wrapped(model).executor
        for number, size in enumerate((1, 1, 64, 64)):
            if budget is not None and size == 64:
                executor.host.limit = held(model) + 60_000
            tokens = torch.randint(VOCAB, (size, 6), generator=torch.Generator().manual_seed(number))
            model(tokens).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return end_of(model, optimizer)

    options = {"activations": "recompute+offload"}
    plain = streamer.wrap(Model(), device="cpu", **OPTIONS | options)
    expected = losses(plain, None)
    streamer.unwrap(plain)
    slow = ThreadBackend(delays={Lane.HOST: lambda: 0.03}, poison=True)
    model = wrap(tmp_path, 1 << 30, backend=slow, **options)
    assert_equal(losses(model, 1), expected)
    assert wrapped(model).executor.host.disk_bytes()
    streamer.unwrap(model)


def test_a_checkpoint_that_is_being_written_has_what_it_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slowed(monkeypatch, 0.1)
    budget = budget_for(FP32)
    model = wrap(tmp_path, budget)
    optimizer = adamw(model)
    accumulates(model, optimizer, 0)
    saving = streamer.save(model, optimizer, tmp_path / "checkpoint", step=1, block=False)
    expected = [accumulates(model, optimizer, number) for number in (1, 2)]
    saving.result()
    assert wrapped(model).executor.host.disk_bytes()
    streamer.load(model, optimizer, tmp_path / "checkpoint")
    assert [accumulates(model, optimizer, number) for number in (1, 2)] == expected
    streamer.unwrap(model)


@pytest.mark.parametrize("call", ["allocate", "pwritev"])
def test_a_disk_that_cannot_take_them_leaves_them_in_memory(tmp_path: Path, call: str) -> None:
    fails = True

    def failing(real: Callable[..., Any]) -> Callable[..., Any]:
        def faulty(*arguments: Any) -> Any:
            if fails:
                number = errno.ENOSPC if call == "allocate" else errno.EIO
                raise OSError(number, os.strerror(number))
            return real(*arguments)

        return faulty

    fails = False
    system = System(**{call: failing(getattr(System(), call))})
    budget = budget_for(FP32)
    model = wrap(tmp_path, budget, disk=disks(tmp_path, system=system))
    optimizer = adamw(model)
    accumulates(model, optimizer, 0)
    before, fails = end_of(model, optimizer), True
    loss_of(model, 7).backward()
    with pytest.raises(DiskError, match=r"disk=.* (has no room|failed)"):
        loss_of(model, 8).backward()
    fails = False
    assert not wrapped(model).executor.host.disk_bytes()
    assert not any(shard.uses_disk for shard in wrapped(model).executor.store.shards)
    assert_equal(end_of(model, optimizer), before)
    optimizer.zero_grad()
    accumulates(model, optimizer, 1)
    assert wrapped(model).executor.host.disk_bytes()
    streamer.unwrap(model)
