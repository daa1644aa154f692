"""Ranks with a disk: checkpoints, plans, bases that are read from their files, and what goes wrong."""

from __future__ import annotations

import errno
import os
import re
import signal
import time
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import streamer
from streamer.backends.base import DISKS, Lane
from streamer.backends.direct_io import System
from streamer.backends.virtual import VirtualBackend
from streamer.engine.handle import wrapped
from streamer.planner.machine import Machine
from streamer.planner.step import plan_step
from streamer.store import on_disk
from streamer.store.purposes import of_all_ranks
from tests.pretrained import test_in_place as in_place
from tests.ranks import test_disk
from tests.ranks.common import run_ranks
from tests.ranks.programs import Arrays, a_step, backward, equal, model
from tests.ranks.test_checkpoint import held
from tests.ranks.test_disk import ALL, BF16, CHUNK, STATE, disks, in_group, world


def ready(
    folder: str | None, *, layers: int = ALL, budget: int | None = None, **options: Any
) -> tuple[torch.nn.Module, streamer.AdamW]:
    """A model of which all that may be is on disk in ``folder``, with its optimizer."""
    on_disk.CHUNK_ELEMENTS = CHUNK
    options = {**BF16, **options}
    if budget is None:
        options = in_group(folder, options, layers=layers)
    else:
        options |= {"process_group": world(), "host_memory": budget, "disk": disks(folder or "")}
    made = streamer.wrap(model(layers=layers), **{"layers": "layers", "device": "cpu", **options})
    return made, streamer.AdamW(made.parameters(), lr=1e-2)


def go(
    rank: int, folder: str | None, steps: list[int], start: str | None, end: str | None, block: bool
) -> tuple[Arrays, Arrays]:
    """Go on from a checkpoint if there is one, make ``steps`` if there are any, save in the middle: the
    weights and moments before and after them."""
    made, optimizer = ready(folder)
    assert ("weights" in streamer.stats(made).disk_bytes) == (folder is not None)
    torch.manual_seed(rank)
    before: Arrays = {}
    if start is not None:
        streamer.load(made, optimizer, start)
        before = held(made, optimizer)
    for step in steps:
        backward(made, step, rank, 1, None)
        streamer.clip_grad_norm_(made, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step == 1 and end is not None:
            streamer.save(made, optimizer, end, step=step, block=block)
    after = held(made, optimizer) if steps else {}
    streamer.unwrap(made)
    return before, after


def save_and_go_on(rank: int, folder: str, saved: str) -> list[tuple[Arrays, Arrays]]:
    """To the end, and from the checkpoint on."""
    return [go(rank, folder, [1, 2], None, saved, False), go(rank, folder, [2], saved, None, False)]


def test_checkpoints_know_neither_ranks_nor_disks(tmp_path: Path) -> None:
    saved, folder = str(tmp_path / "saved"), str(tmp_path)
    by_rank = run_ranks(2, save_and_go_on, folder, saved)
    (_, whole), (resumed, _) = by_rank[0]
    for _, end in (end for ends in by_rank for end in ends):
        equal(end, whole)
    # a run without ranks, and without a disk, goes on from it
    before, _ = go(0, None, [], saved, None, True)
    equal(before, resumed)


CPU = Machine("cpu", 1e12, 1e10, 1e10, 1e10, 1 << 40, 1 << 40, kind="cpu", ranks=2)
OPTIONS: dict[str, dict[str, Any]] = {
    "fp32, backward": {"dtype": torch.float32, "num_slots": 3, "update": "backward"},
    "state": {"layers": STATE},
}


def steps_of(made: torch.nn.Module, optimizer: streamer.AdamW, rank: int) -> Callable[[], None]:
    def step() -> None:
        a_step(made, optimizer, 0, rank)

    return step


def ops_of(made: torch.nn.Module) -> tuple[Counter[str], Counter[str]]:
    """By op, how many and their bytes."""
    records = [record.op for record in wrapped(made).executor.issuer.trace.records()]
    nbytes = Counter[str]()
    for op in records:
        nbytes[op.kind.value] += op.nbytes
    return Counter(str(op) for op in records if str(op) != "SYNC"), nbytes


def train(rank: int, folder: str, options: dict[str, Any]) -> Any:
    """The budget; bytes on disk and in host memory, in the end and planned; by op, how many and their bytes;
    what a step has read and written."""
    on_disk.CHUNK_ELEMENTS = CHUNK
    layers = options.get("layers", ALL)
    given = in_group(folder, {**BF16, **{k: v for k, v in options.items() if k != "layers"}}, layers=layers)
    made, optimizer = ready(folder, budget=given["host_memory"], **options)
    executor = wrapped(made).executor
    planned: Any = wrapped(made).planned
    at_first = dict(planned.host), dict(planned.disk)
    step = steps_of(made, optimizer, rank)
    for _ in range(2):
        step()
    streamer.synchronize(made)
    ops, nbytes = ops_of(made)
    scratches = {*executor.store.scratch.values()}
    allocated = sum(scratch.allocated_bytes for scratch in scratches)  # type: ignore[attr-defined]
    on_host, there = executor.host.bytes(), executor.host.disk_bytes()
    streamer.unwrap(made)
    return given["host_memory"], at_first, on_host, there, allocated, ops, nbytes


def planned_on(
    machine: Machine, options: dict[str, Any], budget: int, folder: str
) -> tuple[torch.nn.Module, Callable[[], None], Counter[str], Counter[str]]:
    """A model that is planned for, after two steps; a step of it; by op, how many and their bytes."""
    layers = options.get("layers", ALL)
    made = streamer.wrap(
        model(layers=layers).to("meta"),
        **{**BF16, **options, "layers": "layers"},
        backend=VirtualBackend(machine),
        host_memory=budget,
        disk=folder,
    )
    step = steps_of(made, streamer.AdamW(made.parameters(), lr=1e-2), 0)
    for _ in range(2):
        step()
    ops, nbytes = ops_of(made)
    return made, step, ops, nbytes


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_plan_of_ranks_is_what_they_have_and_do(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_disk, "CHUNK_ELEMENTS", CHUNK)
    answers = run_ranks(2, train, str(tmp_path), options)
    budget = answers[0][0]
    made, step, ops, nbytes = planned_on(CPU, options, budget, str(tmp_path))
    executor, planned = wrapped(made).executor, wrapped(made).planned
    shared = 0
    for rank, (_, at_first, on_host, there, allocated, ops_there, nbytes_there) in enumerate(answers):
        assert at_first == (dict(planned.host), dict(planned.disk))
        assert on_host == executor.host.bytes()
        assert there == executor.host.disk_bytes()
        assert allocated == sum(there.values()), "once for all"
        # what `wrap` has planned, before there were moments
        assert {name: there[name] for name in planned.disk} == planned.disk
        assert {name: on_host[name] for name in planned.host} == planned.host
        shared += nbytes_there["WRITE_STATE"] + nbytes_there["WRITE_WEIGHTS"]
        if rank == 0:
            assert (ops_there, nbytes_there) == (ops, nbytes)
    # the budget is for the memory of both
    assert sum(of_all_ranks(executor.host.bytes(), 2).values()) <= budget
    # of the two steps of both ranks: everything is written twice, by its owner
    assert shared == 2 * sum(executor.host.disk_bytes().values())
    plan = plan_step(executor, step)
    assert plan.host_bytes == of_all_ranks(executor.host.bytes(), 2)
    assert plan.disk_bytes == executor.host.disk_bytes()
    for lane in DISKS:
        assert plan.prediction.moved_bytes[lane] > 0
    assert plan.prediction.busy_seconds[Lane.DISK_WRITE] == pytest.approx(
        plan.prediction.moved_bytes[Lane.DISK_WRITE] * 2 / CPU.disk_write_bytes_per_second
    ), "the drives are shared"


class Deep(in_place.Base):
    """With layers enough for the rings of two ranks to take less memory."""

    LAYERS = 14

    def __init__(self) -> None:
        super().__init__(self.LAYERS)


def deep(path: Path, disk: bool, **options: Any) -> torch.nn.Module:
    """With adapters on a base that is read from its file if ``disk``."""
    in_place.Base = Deep  # type: ignore[misc]
    stay = 0 if disk else None
    made = in_place.make(path, disk or None, stay=stay, process_group=world(), **options)
    assert in_place.read_in_place(made) == [*range(Deep.LAYERS if disk else 0)]
    return made


def adapters(rank: int, path: str, disk: bool, options: dict[str, Any]) -> Any:
    in_place.Base = Deep  # type: ignore[misc]
    if rank == 0 and not disk:
        in_place.stored(Path(path), shift=1)
    dist.barrier()
    results = in_place.results(deep(Path(path), disk, **options), steps=2)
    flat = {"losses": results["losses"]} | {name: bits.numpy() for name, bits in results["weights"].items()}
    for name, state in results["state"].items():
        flat |= {f"{name} {key}": bits.numpy() for key, bits in state.items()}
    return flat


def in_memory_and_from_files(rank: int, path: str, options: dict[str, Any]) -> list[Any]:
    """What adapters learn on a base in memory, and on one that is read from its file, by ranks of one machine
    and of two."""
    found = [adapters(rank, path, disk, options) for disk in (False, True)]
    test_disk.MACHINES = "ab"
    return [*found, adapters(rank, path, True, options)]


def test_a_base_is_read_from_its_files_by_all(tmp_path: Path) -> None:
    path, options = str(tmp_path / "base.safetensors"), {"update": "backward", "num_slots": 1}
    for in_memory, *from_files in run_ranks(2, in_memory_and_from_files, path, options):
        for found in from_files:
            equal(found, in_memory)


def ends(rank: int, name: str, folder: str) -> tuple[str, float]:
    """The error that a program ends with, and the seconds from the fault to it."""
    try:
        PROGRAMS[name](rank, folder)
    except (OSError, RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}", time.monotonic()
    return "", time.monotonic()


def faulty(rank: int, folder: str, fault: Callable[[str], None], **options: Any) -> None:
    """Train with a disk that calls ``fault`` at every read and write, once the first step is over."""
    is_over = False

    def call(what: str, do: Callable[..., int]) -> Callable[..., int]:
        def transfer(*given: Any) -> int:
            if is_over:
                fault(what)
            return do(*given)

        return transfer

    on_disk.CHUNK_ELEMENTS = CHUNK
    system = System(preadv=call("read", os.preadv), pwritev=call("write", os.pwritev))
    given = in_group(folder, {**BF16, **options})
    given["disk"] = disks(folder, system=system)
    made = streamer.wrap(model(layers=ALL), **{"layers": "layers", "device": "cpu", **given})
    optimizer = streamer.AdamW(made.parameters(), lr=1e-2)
    for step in range(4):
        a_step(made, optimizer, step, rank)
        if step == 0:
            streamer.synchronize(made)
            dist.barrier()
            is_over = True


def of_rank_1(rank: int, wanted: str, do: Callable[[], None]) -> Callable[[str], None]:
    def fault(what: str) -> None:
        if rank and what == wanted:
            do()

    return fault


def fail() -> None:
    raise OSError(errno.EIO, "Input/output error")


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def write_fails(rank: int, folder: str) -> None:
    faulty(rank, folder, of_rank_1(rank, "write", fail))


def read_fails(rank: int, folder: str) -> None:
    faulty(rank, folder, of_rank_1(rank, "read", fail))


def killed_in_a_write(rank: int, folder: str) -> None:
    faulty(rank, folder, of_rank_1(rank, "write", kill))


def has_no_room(rank: int, folder: str) -> None:
    def allocate(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    given = in_group(folder, BF16)
    given["disk"] = disks(folder, system=System(allocate=allocate))
    streamer.wrap(model(layers=ALL), **{"layers": "layers", "device": "cpu", **given})


def has_no_folder(rank: int, folder: str) -> None:
    given = in_group(folder, BF16) | {"disk": f"{folder}/nowhere" if rank else disks(folder)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        streamer.wrap(model(layers=ALL), **{"layers": "layers", "device": "cpu", **given})


def has_no_disk(rank: int, folder: str) -> None:
    given = in_group(folder, BF16) | ({"disk": None} if rank else {})
    streamer.wrap(model(layers=ALL), **{"layers": "layers", "device": "cpu", **given})


def writes_a_file(rank: int, folder: str) -> None:
    path = Path(folder) / "base.safetensors"
    in_place.Base = Deep  # type: ignore[misc]
    if rank == 0:
        in_place.stored(path)
    dist.barrier()
    made = deep(path, disk=True)
    with torch.no_grad():
        made.layers[4].up.base.weight.mul_(2.0)  # type: ignore[union-attr, index]


PROGRAMS: dict[str, Callable[[int, str], None]] = {
    each.__name__: each
    for each in (
        *(write_fails, read_fails, killed_in_a_write),
        *(has_no_room, has_no_folder, has_no_disk, writes_a_file),
    )
}

FAILED = "RanksError: rank 1 has failed: DiskError: disk=.*{}ing .* failed .*Input/output error"
NAMED = "(DiskError: disk|RanksError: rank 1 has failed: DiskError: disk)=.*{}ing .* failed .*error"
TOLD: dict[str, tuple[str, str | None]] = {
    "write_fails": (FAILED.format("writ"), NAMED.format("writ")),
    "read_fails": (FAILED.format("read"), NAMED.format("read")),
    "killed_in_a_write": ("RanksError: rank 1 has ended", None),
    "has_no_room": (
        "DiskError: .*has no room",
        "RanksError: allocating scratch files has failed on rank 0: DiskError: .*has no room",
    ),
    "has_no_folder": ("RanksError: rank 1 has failed: DiskError", "DiskError: .*no such folder"),
    "has_no_disk": ("ValueError: the ranks' options or models differ: rank 0 has 'disk=set'",) * 2,
    "writes_a_file": (
        "RuntimeError: 'layers.4.up.base.weight' is frozen and read from its file",
        "RanksError: writing what the ranks share has failed on rank 0",
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_ranks_are_told_what_is_wrong_with_the_disk(name: str, tmp_path: Path) -> None:
    began = time.monotonic()
    answers = run_ranks(2, ends, name, str(tmp_path), may_end=True)
    for answer, expected in zip(answers, TOLD[name], strict=True):
        if expected is None:
            assert answer is None
        else:
            assert re.match(expected, answer[0]), answer[0]
            assert "\n" not in answer[0]
    assert time.monotonic() - began < 25
    # nothing has a name, and nobody has what had none
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == (
        ["base.safetensors"] if name == "writes_a_file" else []
    )
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            for file in (process / "fd").iterdir():
                assert not os.readlink(file).startswith(f"{tmp_path}/"), os.readlink(file)
