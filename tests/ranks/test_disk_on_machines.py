"""Machines with a disk each: what they compute, keep and tell is what they do in host memory, to the bit."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import streamer
from streamer.engine.handle import wrapped
from streamer.store import on_disk
from tests.on_disk import least_of
from tests.ranks import test_disk
from tests.ranks import test_disk_use as use
from tests.ranks.common import run_ranks
from tests.ranks.programs import Arrays, arrays, equal, model, noting_disk, run
from tests.ranks.test_disk import BF16, CASES, CHUNK, STATE, in_group

#: How many layers there are, beside `STATE`: so many are more than the rings of one rank take.
MORE = 4
#: Ranks, their machines as `everyone` has them, which divide the state or are replicas, and what is trained.
MACHINES: dict[str, tuple[int, int | str, str]] = {
    "two of two that divide": (4, "aabb", "in backward, keep"),
    "two replicas": (2, 2, "scaler"),
}


def on_machines(rank: int, machines: int | str, work: Callable[..., Any], folder: str, *given: Any) -> Any:
    """What ``work(rank, folder of its machine, *given)`` returns on ranks of two machines."""
    test_disk.MACHINES = machines
    there = Path(folder) / f"machine {2 * rank // dist.get_world_size()}"
    there.mkdir(exist_ok=True)
    return work(rank, str(there), *given)


def train(rank: int, folder: str, name: str) -> tuple[Any, Any, dict[str, int]]:
    """What training leads to without a disk, and with one; what was on disk in the end."""
    on_disk.CHUNK_ELEMENTS = CHUNK
    _, _, case = MACHINES[name]
    _, options, given = CASES[case]
    ends = []
    for where in (None, folder):
        among = in_group(where, options, layers=STATE)
        with noting_disk() as there:
            ends.append(run([[rank]], among, divisor=1, layers=STATE, **given))
    return ends[0], ends[1], there[-1]


@pytest.mark.parametrize("name", MACHINES)
def test_what_is_on_the_disks_of_machines_changes_nothing(name: str, tmp_path: Path) -> None:
    size, machines, _ = MACHINES[name]
    answers = run_ranks(size, on_machines, machines, train, str(tmp_path), name)
    assert [path for path in tmp_path.rglob("*") if not path.is_dir()] == []
    for in_memory, (norms, gradients, state), there in answers:
        assert "exp_avg" in there
        assert norms == in_memory[0]
        equal(gradients, in_memory[1])
        equal(state, in_memory[2])


def begin(rank: int, folder: str) -> list[Arrays]:
    """In fp32 and in bf16, the weights of a model that has other values on each rank."""
    found = []
    for options in ({}, BF16):
        made = model(layers=MORE)
        with torch.no_grad():
            for value in (*made.parameters(), made.scale):
                value.add_(rank)
        given = in_group(folder, options, layers=MORE)
        made = streamer.wrap(made, layers="layers", device="cpu", **given)
        assert streamer.stats(made).disk_bytes["weights"]
        found.append(arrays(streamer.unwrap(made).state_dict()))
    return found


def test_disks_begin_with_the_values_of_the_first_rank(tmp_path: Path) -> None:
    for of_rank in run_ranks(2, on_machines, "ab", begin, str(tmp_path)):
        for found in of_rank:
            equal(found, arrays(model(layers=MORE).state_dict()))


def test_what_is_written_is_written_to_the_disk_of_each_machine(tmp_path: Path) -> None:
    args = str(tmp_path), ["scales", "writes_weights"], {}, MORE
    for in_memory, there in run_ranks(2, on_machines, "ab", test_disk.write, *args):
        assert in_memory[0] == there[0]
        equal(in_memory[1], there[1])


def save_and_load(rank: int, folder: str, saved: str) -> tuple[Arrays, Arrays]:
    """What is saved, and what is there again."""
    _, whole = use.go(rank, folder, [1], None, saved, True)
    resumed, _ = use.go(rank, folder, [], saved, None, True)
    return whole, resumed


def test_a_checkpoint_does_not_know_the_disks_of_machines(tmp_path: Path) -> None:
    saved = str(tmp_path / "saved")
    by_rank = run_ranks(2, on_machines, "ab", save_and_load, str(tmp_path), saved)
    for whole, resumed in by_rank:
        equal(whole, by_rank[0][0])
        equal(resumed, whole)
    alone, _ = use.go(0, None, [], saved, None, True)
    equal(alone, by_rank[0][0])


CPU = replace(use.CPU, ranks=1, machines=2)


def test_a_plan_of_machines_is_what_they_have_and_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_disk, "CHUNK_ELEMENTS", CHUNK)
    options = {"layers": MORE, "update": "backward"}
    answers = run_ranks(2, on_machines, "ab", use.train, str(tmp_path), options)
    budget, at_first, on_host, there, _, ops, nbytes = answers[0]
    made, _, planned_ops, planned_nbytes = use.planned_on(CPU, options, budget, str(tmp_path))
    planned, executor = wrapped(made).planned, wrapped(made).executor
    assert at_first == (dict(planned.host), dict(planned.disk))
    assert there == executor.host.disk_bytes()
    assert on_host == executor.host.bytes()
    assert ops == planned_ops
    disk = ("READ_STATE", "WRITE_STATE", "READ_WEIGHTS", "WRITE_WEIGHTS")
    assert [nbytes[kind] for kind in disk] == [planned_nbytes[kind] for kind in disk]
    # each machine has its part of the state, and all weights that are on disk, of which it has written all
    for _, _, _, on_disk_there, allocated, _, nbytes_there in answers:
        assert allocated == sum(on_disk_there.values())
        assert nbytes_there["WRITE_STATE"] + nbytes_there["WRITE_WEIGHTS"] == 2 * allocated
    of_both = [Counter(each[3]) for each in answers]
    whole = on_disk_of_one(options, str(tmp_path))
    for name, nbytes_of_one in whole.items():
        found = sum(each[name] for each in of_both)
        assert found == pytest.approx((2 if name == "weights" else 1) * nbytes_of_one, rel=0.05)


def on_disk_of_one(options: dict[str, Any], folder: str) -> dict[str, int]:
    """The bytes on the disk of one machine that has all of the state there."""
    machine = replace(CPU, machines=1)
    with pytest.raises(MemoryError) as refused:
        use.planned_on(machine, options, 1, folder)
    made, *_ = use.planned_on(machine, options, least_of(refused.value), folder)
    return dict(wrapped(made).executor.host.disk_bytes())


def write_fails(rank: int, folder: str) -> None:
    use.faulty(rank, folder, use.of_rank_1(rank, "write", use.fail), update="backward")


def ends(rank: int, folder: str) -> str:
    try:
        write_fails(rank, folder)
    except (OSError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_all_are_told_which_machines_disk_fails(tmp_path: Path) -> None:
    other, own = run_ranks(2, on_machines, "ab", ends, str(tmp_path))
    failed = r"RanksError: rank 1 has failed: DiskError: disk=.*writing .* failed .*error"
    assert re.match(rf"{failed}.* \(machine 1, '.+'\)$", other), other
    assert re.match(rf"(DiskError: disk=.*writing .* failed .*error|{failed})", own), own
    assert "\n" not in other + own
    assert [path for path in tmp_path.rglob("*") if not path.is_dir()] == []
