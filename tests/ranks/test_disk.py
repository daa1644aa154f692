"""Ranks whose state and weights are on disk compute what they compute in host memory, to the bit."""

from __future__ import annotations

import copy
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import streamer
from streamer.backends.base import Lane
from streamer.backends.disk import Disks, Scratch
from streamer.backends.thread import ThreadBackend
from streamer.engine.paging import across_ranks
from streamer.engine.schedule import op as ops
from streamer.errors import RanksError
from streamer.store import on_disk
from tests.on_disk import least_of
from tests.ranks import test_writes
from tests.ranks.common import run_ranks
from tests.ranks.programs import (
    BACKWARD,
    BF16,
    Case,
    a_step,
    arrays,
    differing,
    equal,
    everyone,
    model,
    noting_disk,
    run,
)
from tests.ranks.test_writes import Ends

#: Elements of a chunk: no fewer draw the random bits of the whole. A layer of `programs.Model` has five.
CHUNK = 1 << 14
#: Each tries several options at once.
CASES: dict[str, Case] = {
    "keep, frozen parts": (1, {"activations": "keep", "num_slots": 3}, {"frozen": True}),
    "scaler": (1, {"dtype": torch.float16}, {"scaled": True}),
    "several in bf16": (2, BF16, {}),
    "in backward": (1, {**BACKWARD, **BF16}, {"clip": None, "state_dtype": torch.bfloat16}),
    "in backward, keep": (1, {**BACKWARD, **BF16, "activations": "keep"}, {"clip": None}),
    "in backward, 8-bit moments": (1, {**BACKWARD, **BF16}, {"clip": None, "state_dtype": "int8"}),
}

#: How many layers there are. Of few the weights take no more memory than the rings of two ranks, and of a few
#: more there is still room for moments of 8 bits.
ALL, STATE, MOST = 7, 3, 9
#: Cases by that number. In some weights are on disk too: each has a way of its own to or from them. Of one
#: slot, lanes are late below.
CASES_OF = {
    ALL: ("keep, frozen parts", "several in bf16", "in backward, 8-bit moments"),
    STATE: ("scaler", "in backward"),
}
#: Cases whose ranks, with weights on disk, gather them too.
GATHERED = ("keep, frozen parts",)
#: What sums of several gradients take besides. Moments have the room first, and go to disk then.
SUMS = {"several in bf16": 4_300_000}


def disks(folder: str, **options: Any) -> Disks:
    """Two folders, through the page cache: they may be in memory."""
    folders = [Path(folder) / str(number) for number in range(2)]
    for each in folders:
        each.mkdir(exist_ok=True)
    return Disks(folders, partial(Scratch, **{"direct_io": False, "in_flight": 2, **options}))


#: The machines on which ranks are, as `everyone` has them. Set in a rank's process, before all else.
MACHINES: int | str | None = None


def world() -> Any:
    """All ranks on their `MACHINES`, None where there are no ranks."""
    return everyone(MACHINES) if dist.is_initialized() else None


def least_budget(folder: str, made: torch.nn.Module, **options: Any) -> int:
    """The least ``host_memory`` of ranks, as they are told of too small a one. A meeting."""
    given = {"layers": "layers", "device": "cpu", "process_group": world(), **options}
    with pytest.raises((MemoryError, RanksError)) as refused:
        streamer.wrap(made, host_memory=1, disk=disks(folder), **given)
    return least_of(refused.value)


def in_group(
    folder: str | None, options: dict[str, Any], *, frozen: bool = False, layers: int = ALL, more: int = 0
) -> dict[str, Any]:
    """Options of `wrap` for ranks, and for what is on disk in ``folder``: all that may, but for ``more``. The
    second rank has room for other things there, and takes what the first one has chosen."""
    given = {"process_group": world(), **options}
    if folder is not None:
        least = least_budget(folder, model(frozen=frozen, layers=layers), **given)
        own = 300_000 if dist.is_initialized() and dist.get_rank() else 0
        given |= {"host_memory": least + more + own, "disk": disks(folder)}
    return given


def train(rank: int, folder: str, layers: int) -> dict[str, Any]:
    """By case, what training leads to without a disk, with one and, in some, with one and weights that are
    gathered; what was on disk in the end."""
    on_disk.CHUNK_ELEMENTS = CHUNK
    found = {}
    for name in CASES_OF[layers]:
        backwards, options, given = CASES[name]
        # a chunk that is as large as a layer is cut at the shares alone
        on_disk.CHUNK_ELEMENTS = CHUNK << (3 * ("8-bit" in name))
        ends = []
        of_gathered = [(folder, {"gather_weights": True})] if name in GATHERED else []
        for where, more in [(None, {}), (folder, {}), *of_gathered]:
            many = MOST if given.get("state_dtype") == "int8" else layers
            shape = {"layers": many, "frozen": given.get("frozen", False)}
            among = in_group(where, options | more, **shape, more=SUMS.get(name, 0))
            parts = [[2 * number + rank] for number in range(backwards)]
            with noting_disk() as there:
                ends.append(run(parts, among, divisor=backwards, **given | shape))
            if where:
                assert "exp_avg" in there[-1], name
                if name not in SUMS:
                    assert ("weights" in there[-1]) == (layers == ALL), name
        found[name] = ends
    return found


# all cases in one test: their ranks run once, and tests of several processes would each run them again
@pytest.mark.parametrize("layers", [ALL, STATE], ids=["all on disk", "state on disk"])
def test_what_is_on_disk_changes_nothing(layers: int, tmp_path: Path) -> None:
    answers = run_ranks(2, train, str(tmp_path), layers)
    assert [path for path in tmp_path.rglob("*") if not path.is_dir()] == []
    for name, of_rank in product(CASES_OF[layers], answers):
        in_memory, *on_disks = of_rank[name]
        assert len(on_disks) == 1 + (name in GATHERED)
        for norms, gradients, state in on_disks:
            assert norms == in_memory[0], name
            equal(gradients, in_memory[1])
            equal(state, in_memory[2])


def train_late(rank: int, folder: str, delays: dict[Lane, float], agrees: bool) -> Any:
    """Train with rings and slots that are poisoned, and lanes that are late. Without ``agrees`` nobody waits
    until others have written what is on disk."""
    on_disk.CHUNK_ELEMENTS = CHUNK
    options: dict[str, Any] = {**BF16, "num_slots": 1}
    given = in_group(folder, options)
    given["backend"] = ThreadBackend(
        delays={lane: lambda late=late: late for lane, late in delays.items()}, poison=True
    )
    if not agrees:
        agree = ops.agree

        def agree_in_memory(units: tuple[int, ...], masters: tuple[ops.Place, ...]) -> ops.Op:
            return agree(units, tuple(place for place in masters if place.kind == "shard"))

        across_ranks.ops.agree = agree_in_memory  # type: ignore[attr-defined]
    try:
        return run([[rank]], given, divisor=1, clip=None, layers=ALL)
    except RuntimeError:
        return None


def test_ranks_whose_lanes_are_late_compute_the_same(tmp_path: Path) -> None:
    lanes = (Lane.DISK_WRITE, Lane.COLLECTIVE)
    one, other = run_ranks(2, train_late_on_one, str(tmp_path), lanes, True)
    expected, _ = reference()
    assert not differing(one, expected)
    assert not differing(other, expected)


def test_without_waiting_for_what_others_write_they_do_not(tmp_path: Path) -> None:
    answers = run_ranks(2, train_late_on_one, str(tmp_path), (Lane.DISK_WRITE,), False, timeout=10.0)
    assert any(found is None or differing(found, reference()[0]) for found in answers)


def train_late_on_one(rank: int, folder: str, lanes: tuple[Lane, ...], agrees: bool) -> Any:
    return train_late(rank, folder, dict.fromkeys(lanes, 0.01) if rank else {}, agrees)


def train_in_memory(rank: int) -> Any:
    options = {**BF16, "num_slots": 1, "device": "cpu", "process_group": dist.group.WORLD}
    return run([[rank]], options, divisor=1, clip=None, layers=ALL)


@cache
def reference() -> list[Any]:
    return run_ranks(2, train_in_memory)


def write(
    rank: int, folder: str, writes: list[str], options: dict[str, Any], layers: int = ALL
) -> tuple[Ends, Ends]:
    """What writing leads to in host memory and on disk."""
    on_disk.CHUNK_ELEMENTS = CHUNK
    given = in_group(folder, options, layers=layers)
    return (
        test_writes.train([rank], writes, layers=layers, **options, process_group=world()),
        test_writes.train([rank], writes, layers=layers, **given),
    )


def test_what_ranks_write_is_what_runs(tmp_path: Path) -> None:
    # moments on disk can only be read, in copies
    writes = ["unscales", "follows"]
    for in_memory, there in run_ranks(2, write, str(tmp_path), writes, BF16):
        assert in_memory[0] == there[0]
        equal(in_memory[1], there[1])


def look(rank: int, folder: str) -> list[Any]:
    """What the first rank alone sees of weights and moments, while the other goes on; what both see then."""
    on_disk.CHUNK_ELEMENTS = CHUNK
    answers = []
    for where in (None, folder):
        given = in_group(where, BF16)
        made = streamer.wrap(model(layers=ALL), **{"layers": "layers", "device": "cpu", **given})
        optimizer = streamer.AdamW(made.parameters(), lr=1e-2)
        held = made.layers[0].up.weight.detach() if rank == 0 else None
        for step in range(2):
            a_step(made, optimizer, step, rank)
            if rank == 0:
                answers.append(arrays(dict(made.named_parameters())))
                answers.append(arrays(copy.deepcopy(made).state_dict()))
                answers.append(arrays({"m": optimizer.state[made.layers[1].up.weight]["exp_avg_sq"]}))
        param = made.layers[2].down.weight
        if where is not None:
            assert streamer.stats(made).disk_bytes["weights"]
        optimizer.state[param]["exp_avg"] = torch.full_like(optimizer.state[param]["exp_avg"], 0.25)
        answers.append(arrays({"m": optimizer.state[param]["exp_avg"]}))
        if held is not None:  # it shows what runs, as one in host memory does
            made.layers[0].up.weight.sum()
            answers.append(arrays({"held": held}))
        streamer.unwrap(made)
    return answers


def test_one_rank_alone_may_look(tmp_path: Path) -> None:
    for answers in run_ranks(2, look, str(tmp_path)):
        half = len(answers) // 2
        for one, other in zip(answers[:half], answers[half:], strict=True):
            equal(one, other)
