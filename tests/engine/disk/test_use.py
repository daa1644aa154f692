"""What a user does with a model whose optimizer state and weights are on disk, and what that takes."""

from __future__ import annotations

import copy
import gc
import os
import re
import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import streamer
from streamer.backends.base import Lane
from streamer.backends.direct_io import System
from streamer.backends.disk import Disks, Scratch
from streamer.backends.thread import ThreadBackend
from streamer.engine.handle import wrapped
from streamer.errors import DiskError
from streamer.store.on_disk import RING
from streamer.store.weights_on_disk import WEIGHT_BUFFERS
from tests.on_disk import Model, a_step, adamw, copied, disks, end_of, least_budget, loss_of, small_chunks
from tests.reference import assert_equal, unwrapping

__all__ = ["small_chunks"]

BF16, FP32 = torch.bfloat16, torch.float32
STEPS = 5
LAYERS = 6
OPTIONS: dict[str, Any] = {"layers": "layers", "dtype": BF16}


@cache
def least() -> int:
    return least_budget(Model(), device="cpu", **OPTIONS)


def wrap(folder: Path | None, room: int = 0, model: nn.Module | None = None, **options: Any) -> nn.Module:
    """With a ``folder`` the state is on disk, but for what goes into ``room`` bytes of memory."""
    if folder is not None:
        options |= {"host_memory": least() + room, "disk": disks(folder, 2)}
    if "backend" not in options:
        options["device"] = "cpu"
    return streamer.wrap(model or Model(), **(OPTIONS | options))


def results(folder: Path | None, run: Callable[[nn.Module, Path | None], Any], **options: Any) -> Any:
    with unwrapping(wrap(folder, **options)) as model:
        return run(model, folder)


# checkpoints


# bytes of host memory beyond the least: 0 has all weights of layers on disk too, None has no disk
@pytest.mark.parametrize(
    ("saved_on", "loaded_on", "block", "state_dtype"),
    [(0, None, False, "int8"), (None, 0, True, BF16), (0, 400_000, False, FP32)],
)
def test_saved_on_one_placement_and_loaded_on_another(
    tmp_path: Path, saved_on: int | None, loaded_on: int | None, block: bool, state_dtype: torch.dtype | str
) -> None:
    def placed(room: int | None) -> nn.Module:
        return wrap(None if room is None else tmp_path, room or 0)

    model = placed(saved_on)
    optimizer = adamw(model, state_dtype)
    for number in range(2):
        a_step(model, optimizer, number)
    saving = streamer.save(model, optimizer, tmp_path / "checkpoint", step=2, block=block)
    losses = [a_step(model, optimizer, number) for number in range(2, STEPS)]
    saving.result()
    end = end_of(model, optimizer)
    streamer.unwrap(model)
    model = placed(loaded_on)
    optimizer = adamw(model, state_dtype)
    a_step(model, optimizer, 9)
    streamer.load(model, optimizer, tmp_path / "checkpoint")
    assert [a_step(model, optimizer, number) for number in range(2, STEPS)] == losses
    assert_equal(end_of(model, optimizer), end)
    streamer.unwrap(model)


# what a user reads and writes


def writes_weights(model: nn.Module, folder: Path | None) -> Any:
    optimizer = adamw(model)
    seen = []
    alias = model.layers[3].down.weight.data  # type: ignore[union-attr]
    for number in range(STEPS):
        seen.append(a_step(model, optimizer, number))
        held = model.layers[2].up.weight.detach()  # type: ignore[union-attr]
        if number == 3:
            sum(param.float().sum() for param in model.parameters())
            held.sub_(0.125)  # other layers have been read since
            model.layers[1].down.weight.data.add_(0.25)  # type: ignore[union-attr]
            with torch.no_grad():
                model.layers[3].side.weight[2].add_(1.0)  # type: ignore[union-attr]
        streamer.synchronize(model)
        with torch.no_grad():
            if number == 1:
                model.layers[0].up.weight.copy_(torch.linspace(-0.1, 0.1, 280 * 64).view(280, 64))  # type: ignore
                model.head.weight.mul_(0.5)
            if number == 2:
                alias[:7] = 0.125
    return {"losses": torch.tensor(seen), **end_of(model, optimizer)}


def writes_state(model: nn.Module, folder: Path | None) -> Any:
    optimizer = adamw(model)
    params = list(model.parameters())
    a_step(model, optimizer, 0)
    for number, param in enumerate(params):
        state = optimizer.state[param]
        assert set(state) == {"step", "exp_avg", "exp_avg_sq"} == set(state.keys())
        assert len(state) == 3 == len(list(state.items())) == len(list(state.values()))
        assert "exp_avg" in state
        assert state.get("none", 7) == 7
        moment = state["exp_avg"]
        assert torch.equal(state.setdefault("exp_avg", None), moment)
        if not number:
            for each in (state.copy(), copy.copy(state), state | {}, {} | state, dict(state), {**state}):
                assert type(each) is dict and {*each} == {*state} and torch.equal(each["exp_avg"], moment)
        if number % 3 == 0:
            state["exp_avg"] = torch.zeros(param.shape)
        if number % 3 == 1:
            state.update(exp_avg_sq=state["exp_avg_sq"] * 4)
        if number % 3 == 2:
            state |= {"exp_avg": state["exp_avg"] + 0.5}
        for take_out in (lambda state: state.pop("exp_avg"), lambda state: state.clear()):
            with pytest.raises(RuntimeError, match="cannot be removed from the state of '.*: assign its new"):
                take_out(state)
    saved = copy.deepcopy(optimizer.state_dict())
    seen = [a_step(model, optimizer, number) for number in range(1, 3)]
    optimizer.load_state_dict(saved)
    seen += [a_step(model, optimizer, number) for number in range(3, STEPS)]
    optimizer.state[params[3]] = {}
    seen.append(a_step(model, optimizer, STEPS))
    return {"losses": torch.tensor(seen), "saved": saved["state"], **end_of(model, optimizer)}


def other_moments(model: nn.Module, folder: Path | None) -> Any:
    found: dict[str, Any] = {}
    for state_dtype in (FP32, "int8", BF16, BF16, FP32):
        optimizer = adamw(model, state_dtype)
        found[f"{len(found)} losses"] = torch.tensor([a_step(model, optimizer, n) for n in range(2)])
        found[f"{len(found)} end"] = end_of(model, optimizer)
    return found


def clips_by_hand(model: nn.Module, folder: Path | None) -> Any:
    optimizer = adamw(model)
    for number in range(3):
        loss_of(model, number).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        streamer.clip_grad_norm_(model, 0.05)
        optimizer.step()
        optimizer.zero_grad()
    return end_of(model, optimizer)


def is_trained_by_pytorch(model: nn.Module, folder: Path | None) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for number in range(3):
        a_step(model, optimizer, number)
    return end_of(model, optimizer)


def is_unwrapped_in_mid_update(model: nn.Module, folder: Path | None) -> Any:
    """The last write of what makes masters is still running when they are wanted."""
    optimizer = adamw(model)
    for number in range(2):
        a_step(model, optimizer, number)
    plain = copy.deepcopy(streamer.unwrap(model))
    wrap(folder, model=model)
    return copied(dict(plain.named_parameters()))


results_in_memory = cache(partial(results, None))


@pytest.mark.parametrize(
    ("run", "room"),
    [
        (writes_weights, 0),
        (writes_weights, 400_000),
        (writes_state, 0),
        (writes_state, 400_000),
        (other_moments, 400_000),
        (clips_by_hand, 0),
        (is_trained_by_pytorch, 1_000_000),
        (is_unwrapped_in_mid_update, 0),
    ],
)
def test_what_a_user_does_has_the_same_result(
    tmp_path: Path, run: Callable[[nn.Module, Path | None], Any], room: int
) -> None:
    expected = results_in_memory(run)
    slow = {Lane.DISK_WRITE: lambda: 0.003}
    assert_equal(results(tmp_path, run, room=room, backend=ThreadBackend(delays=slow, poison=True)), expected)


def test_a_write_into_a_copy_is_refused(tmp_path: Path) -> None:
    model = wrap(tmp_path)
    optimizer = adamw(model)
    a_step(model, optimizer, 0)
    param = model.layers[1].up.weight  # type: ignore[union-attr]
    shown = optimizer.state[param]["exp_avg"]
    shown.zero_()
    with pytest.raises(RuntimeError, match="'layers.1.up.weight' was written in place, but it is on disk"):
        a_step(model, optimizer, 1)
    optimizer.zero_grad()
    optimizer.state[param]["exp_avg"] = shown
    a_step(model, optimizer, 1)
    streamer.unwrap(model)


# bytes


class Counting:
    """Disks that keep what they have opened."""

    def __init__(self, folder: Path) -> None:
        self.opened: list[Scratch] = []
        self.disks = Disks([folder], self._open)

    def _open(self, folders: Any, **options: Any) -> Scratch:
        scratch = Scratch(folders, direct_io=False, in_flight=1, **options)
        self.opened.append(scratch)
        return scratch

    def moved(self) -> tuple[int, int]:
        return sum(s.bytes_read for s in self.opened), sum(s.bytes_written for s in self.opened)


#: Reads of layers in a step of six that ends in `synchronize`.
READS = {"step": 9, "backward": 10}


class Matrices(nn.Module):
    """Parameters of which every chunk is a whole number of pages, whatever the state's dtype."""

    def __init__(self, layers: int = LAYERS, width: int = 1024) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, 64, bias=False) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x).tanh().repeat(1, x.shape[1] // 64)
        return x


# every two of the three meet
@pytest.mark.parametrize(
    ("state_dtype", "per_parameter", "weights", "update"),
    [
        (FP32, 20, False, "step"),
        (FP32, 20, True, "backward"),
        (BF16, 12, True, "step"),
        (BF16, 12, False, "backward"),
        ("int8", 8 + 1 / 16, False, "step"),
        ("int8", 8 + 1 / 16, True, "backward"),
    ],
    ids=str,
)
def test_a_step_moves_as_many_bytes_as_the_disk_holds(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    state_dtype: torch.dtype | str,
    per_parameter: float,
    weights: bool,
    update: str,
) -> None:
    """State is read and written once. Weights are read for forward and for backward and written once. The
    ops say so, too."""
    # scales of so many elements are a page
    monkeypatch.setattr("streamer.store.on_disk.CHUNK_ELEMENTS", 1 << 18)
    counting = Counting(tmp_path)
    model = Matrices(width=4096)
    options: dict[str, Any] = {"layers": "layers", "device": "cpu", "dtype": BF16, "update": update}
    budget = least_budget(Matrices(width=4096), **options)
    one = 2 * 64 * 4096
    params = LAYERS * one // 2
    if not weights:
        budget += (LAYERS - WEIGHT_BUFFERS) * one
    streamer.wrap(model, host_memory=budget, disk=counting.disks, **options)
    executor = wrapped(model).executor
    # what the ring for shorter moments leaves room for shall not be used
    monkeypatch.setattr(executor.host, "limit", RING * sum(executor.host.bytes().values()))
    monkeypatch.setattr(type(executor.host), "place_moments", lambda *_: frozenset(range(LAYERS + 1)))
    optimizer = streamer.AdamW(model.parameters(), lr=1e-2, state_dtype=state_dtype)
    held = executor.host.disk_bytes()
    of_weights = held.pop("weights", 0)
    assert of_weights == (2 * params if weights else 0)
    assert 2 * sum(held.values()) == per_parameter * params
    before, ran = counting.moved(), len(executor.issuer.trace.records())
    for number in range(4):
        x = torch.randn(2, 4096, generator=torch.Generator().manual_seed(number)).to(BF16)
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        streamer.synchronize(model)
        now = counting.moved()
        read, written = (after - earlier for after, earlier in zip(now, before, strict=True))
        before = now
        assert written == sum(held.values()) + of_weights
        records = executor.issuer.trace.records()
        said = Counter[Lane]()
        for record in records[ran:]:
            said[record.op.lane] += record.op.nbytes
        ran = len(records)
        assert said[Lane.DISK_WRITE] == written
        assert said[Lane.DISK_READ] == read or not number
        # what was never written is not read; remainders were, by `wrap`
        brought = read - (sum(held.values()) if number else held["remainders"])
        # Each layer is read twice but for those that are in the ring when a pass begins: what the pass before
        # has visited last. `synchronize` reads those that wait for an update.
        if number > 1:
            assert brought == (READS[update] * one if weights else 0)
    streamer.unwrap(model)


def held_by_the_process(folder: Path) -> dict[str, int]:
    gc.collect()
    links = []
    for link in Path("/proc/self/fd").iterdir():
        try:
            links.append(os.readlink(link))
        except OSError:  # the one that lists
            continue
    return {
        "threads": sum(thread.name.startswith("streamer-") for thread in threading.enumerate()),
        "files": sum(link.startswith(str(folder)) for link in links),
        "names": sum(1 for path in folder.rglob("*") if path.is_file()),
    }


def test_host_memory_stays_within_the_budget_and_nothing_is_left(tmp_path: Path) -> None:
    before = held_by_the_process(tmp_path)
    allocated: dict[int, int] = {}
    model = Model()
    room = 300_000
    backend = ThreadBackend()
    most = 0

    def watch(nbytes: int, allocate: Callable[..., torch.Tensor], **kwargs: Any) -> torch.Tensor:
        nonlocal most
        buffer = allocate(nbytes, **kwargs)
        allocated[buffer.untyped_storage().data_ptr()] = nbytes
        if nbytes:
            weakref.finalize(
                buffer.untyped_storage(), allocated.pop, buffer.untyped_storage().data_ptr(), None
            )
        most = max(most, sum(allocated.values()))
        return buffer

    backend.host_buffer = partial(watch, allocate=backend.host_buffer)  # type: ignore[method-assign]
    backend.host_reserve = partial(watch, allocate=backend.host_reserve)  # type: ignore[method-assign]
    limit = least() + room
    wrap(tmp_path, room, model, backend=backend)
    executor = wrapped(model).executor
    for state_dtype in (FP32, BF16):
        optimizer = adamw(model, state_dtype)
        for number in range(2):
            a_step(model, optimizer, number)
            assert sum(executor.host.bytes().values()) <= limit
        path = tmp_path / str(state_dtype)
        streamer.save(model, optimizer, path, step=2)
        streamer.load(model, optimizer, path)
        assert sum(executor.host.bytes().values()) <= limit
        ring = executor.host.bytes()["ring of state on disk"]
        assert most <= limit - ring
    streamer.unwrap(model)
    assert executor.host.disk_bytes() == executor.host.bytes() == {}
    del executor, optimizer
    assert held_by_the_process(tmp_path) | {"names": 0} == before | {"names": 0}
    assert [path for path in (tmp_path / "disk0").iterdir()] == []


# bad input


def wrong(tmp_path: Path, disk: object, **options: Any) -> str:
    """The one line with which that is refused; the model is as it was."""
    model = Model()
    before = copied(dict(model.state_dict()))
    held = held_by_the_process(tmp_path)
    with pytest.raises((DiskError, ValueError, MemoryError)) as refused:
        streamer.wrap(model, disk=disk, device="cpu", **({"host_memory": "1GiB"} | OPTIONS | options))  # type: ignore
    assert_equal(copied(dict(model.state_dict())), before)
    loss_of(model, 0).backward()
    assert held_by_the_process(tmp_path) == held
    return str(refused.value)


def test_folders_that_cannot_be_used(tmp_path: Path) -> None:
    assert wrong(tmp_path, tmp_path / "none") == (
        f"disk={tmp_path}/none: no such folder for this process: create it, or use an existing one"
    )
    (tmp_path / "file").write_text("")
    assert wrong(tmp_path, tmp_path / "file") == f"disk={tmp_path}/file is not a folder: give a folder"
    assert "can make no file there" in wrong(tmp_path, "/proc/self")
    for disk in ([], 7, [7], b"x", {"a": "b"}):
        told = wrong(tmp_path, disk)
        assert told == f"disk={disk!r}: use a folder, or a list of folders on different drives"


def test_a_budget_below_the_ring_says_the_least(tmp_path: Path) -> None:
    told = wrong(tmp_path, disks(tmp_path), host_memory=least() - 1)
    assert "\n" not in told
    assert f"host_memory needs {least()} bytes" in told
    assert "(1 byte too few)" in told
    streamer.unwrap(wrap(tmp_path))


def test_a_disk_without_room_for_masters_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    def allocate(fd: int, offset: int, nbytes: int) -> None:
        raise OSError(28, os.strerror(28))

    folder = disks(tmp_path, system=System(allocate=allocate))
    told = wrong(tmp_path, folder, host_memory=least())
    assert re.match(rf"disk={tmp_path}/disk0 has no room: [0-9]+ bytes are needed", told)


def test_moments_without_room_for_the_ring_are_refused(tmp_path: Path) -> None:
    model = wrap(tmp_path)
    executor = wrapped(model).executor
    executor.host.limit = sum(executor.host.bytes().values()) + 1000
    with pytest.raises(MemoryError, match="host_memory needs [0-9]+ bytes and has 1000 bytes .* too few"):
        adamw(model)
    assert not executor.updated_by
    executor.host.limit = least()
    a_step(model, adamw(model), 0)
    with warnings.catch_warnings():
        streamer.unwrap(model)


@pytest.mark.parametrize(("room", "update"), [(0, "step"), (100_000, "backward")])
def test_planned_bytes_are_held_bytes(tmp_path: Path, room: int, update: str) -> None:
    options = OPTIONS | {"device": "cpu", "update": update}
    budget = least_budget(Model(), **options) + room
    model = streamer.wrap(Model(), host_memory=budget, disk=disks(tmp_path), **options)
    executor, planned = wrapped(model).executor, wrapped(model).planned
    assert executor.host.bytes() == planned.host
    assert executor.host.disk_bytes() == planned.disk
    optimizer = adamw(model)
    loss_of(model, 0).backward()
    optimizer.step()
    assert sum(executor.host.bytes().values()) <= budget
    streamer.unwrap(model)
