"""A plan of several ranks beside what ranks do: the same ops, the same bytes, and seconds
that are those of the machine's rates.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

import streamer
from streamer.backends.base import Lane
from streamer.backends.virtual import VirtualBackend
from streamer.engine.handle import wrapped
from streamer.planner.machine import BY_HOST, BY_PCIE, NVLINK, Machine
from streamer.planner.step import StepPlan, plan_step, predict_step
from streamer.store.ledger import WEIGHT_SLOTS
from tests.ranks.common import run_ranks
from tests.ranks.programs import a_step, everyone, model

RANKS = 2
CPU = Machine("cpu", 1e12, 1e10, 1e10, 1e10, 1 << 40, 1 << 40, kind="cpu")
CUDA = replace(CPU, kind="cuda", collective_bytes_per_second=4e10)
OPTIONS: dict[str, dict[str, Any]] = {
    "offloaded": {"activations": "recompute+offload", "dtype": torch.bfloat16},
    "backward": {"update": "backward", "dtype": torch.bfloat16},
    "gathered": {"activations": "keep", "update": "backward", "gather_weights": True},
}
#: What ranks of one machine do, and what two machines do.
PLANNED = [("offloaded", None), ("gathered", None), ("backward", "ab")]

Done = tuple[Counter[str], dict[str, int], dict[str, int]]


def ready(rank: int, options: dict[str, Any], **beside: Any) -> tuple[torch.nn.Module, Any]:
    plain = model().to("meta") if "backend" in beside else model()
    made = streamer.wrap(plain, layers="layers", num_slots=2, **options, **beside)
    optimizer = streamer.AdamW(made.parameters())

    def step() -> None:
        a_step(made, optimizer, 0, rank)

    return made, step


def done(made: torch.nn.Module) -> Done:
    executor = wrapped(made).executor
    # where the caller waits for what it reads is no part of a plan
    names = Counter(str(record.op) for record in executor.issuer.trace.records() if str(record.op) != "SYNC")
    stats = streamer.stats(made)
    return names, dict(stats.host_bytes), dict(stats.device_bytes)


def train(rank: int) -> list[Done]:
    """What is done in each of the cases of `PLANNED`."""
    found = []
    for name, machines in PLANNED:
        made, step = ready(rank, OPTIONS[name], device="cpu", process_group=everyone(machines))
        for _ in range(2):
            step()
        streamer.synchronize(made)
        found.append(done(made))
        streamer.unwrap(made)
    return found


# in one test: their ranks run once
def test_a_plan_is_what_ranks_and_machines_do() -> None:
    for (name, machines), *found in zip(PLANNED, *run_ranks(RANKS, train), strict=True):
        machine = replace(CPU, machines=2) if machines else replace(CPU, ranks=RANKS)
        made, step = ready(0, OPTIONS[name], backend=VirtualBackend(machine))
        predict_step(wrapped(made).executor, step, warmup=1)
        planned = done(made)
        assert (planned[0]["1GATHER"] > 0) == bool(machines)
        for of_rank in found:
            assert of_rank == planned, (name, machines)


def test_a_plan_has_the_seconds_of_the_network() -> None:
    """Of the gradient each machine sends half twice, and then its half of the new weights."""
    machine = replace(CUDA, machines=2, network_bytes_per_second=1e8)
    (found, _, executor), (alone, *_) = plan(machine), plan(CUDA)
    nbytes = sum(unit.layout.grad_nbytes for unit in (*executor.units, executor.root))
    sent = (nbytes + nbytes / 2) / 1e8
    assert found.prediction.busy_seconds[Lane.COLLECTIVE] == pytest.approx(sent, rel=0.1)
    state = ("remainders", "exp_avg", "exp_avg_sq")
    for name, held in found.host_bytes.items():
        assert held == pytest.approx(alone.host_bytes[name] / (2 if name in state else 1), rel=0.1), name
    assert alone.prediction.busy_seconds[Lane.HOST] == pytest.approx(
        2 * found.prediction.busy_seconds[Lane.HOST], rel=0.1
    )


def plan(machine: Machine, **more: Any) -> tuple[StepPlan, VirtualBackend, Any]:
    backend = VirtualBackend(machine)
    made, step = ready(0, {**OPTIONS["offloaded"], **more}, backend=backend)
    executor = wrapped(made).executor
    return plan_step(executor, partial(step)), backend, executor


@pytest.mark.parametrize("interconnect", [BY_HOST, NVLINK])
def test_weights_that_are_gathered_take_the_seconds_of_the_link(interconnect: str) -> None:
    """A part of each layer crosses the bus, and the others' the link between the devices."""
    machine = replace(CUDA, ranks=4, interconnect=interconnect)
    (copied, *_), (gathered, _, executor) = plan(machine), plan(machine, gather_weights=True)
    one, other = copied.prediction, gathered.prediction
    to_device = one.moved_bytes[Lane.H2D] - other.moved_bytes[Lane.H2D]
    between = other.moved_bytes[Lane.COLLECTIVE] - one.moved_bytes[Lane.COLLECTIVE]
    layers = sum(unit.layout.nbytes for unit in executor.units)
    # of three layers and two slots one is copied again in backward, and all are after their update
    assert to_device == between
    assert to_device == pytest.approx((layers + layers / 3) * 3 / 4, rel=0.01)
    link = 1e10 / 4 / 2 if interconnect == BY_HOST else 4e10
    seconds = other.busy_seconds[Lane.COLLECTIVE] - one.busy_seconds[Lane.COLLECTIVE]
    assert 0.99 <= seconds / (between / link) <= (2.01 if interconnect == BY_HOST else 1.01)
    # two slots more, for forwards without gradients
    slots = 2 * max(unit.layout.nbytes for unit in executor.units)
    assert gathered.device_bytes == copied.device_bytes | {WEIGHT_SLOTS: 2 * slots}
    assert gathered.host_bytes == copied.host_bytes


@pytest.mark.parametrize(("ranks", "interconnect"), [(2, BY_HOST), (4, BY_PCIE), (4, NVLINK)])
def test_seconds_are_those_of_the_rates(ranks: int, interconnect: str) -> None:
    """Each lane's, from the bytes of its ops: the update is shared, and so is the host's memory."""
    machine = replace(CUDA, ranks=ranks, interconnect=interconnect)
    (alone, _, executor), (of_ranks, *_) = plan(CUDA), plan(machine)
    one, several = alone.prediction, of_ranks.prediction
    memory = 1e10 / ranks
    gradients = sum(unit.layout.grad_nbytes for unit in executor.units)
    of_root = sum(slice.numel * slice.dtype.itemsize for slice in executor.root.layout.slices)
    # a ring passes on each of the ranks' pieces ranks - 1 times, those of the root, which all need, twice
    sent = (gradients + 2 * of_root) / ranks * (ranks - 1)
    link = memory / 2 if interconnect == BY_HOST else 4e10
    beside = 2 if interconnect != NVLINK else 1  # at most, where copies take the same link
    assert 0.999 <= several.busy_seconds[Lane.COLLECTIVE] / (sent / link) <= 1.001 * beside
    assert one.busy_seconds[Lane.COLLECTIVE] == 0.0
    # its share, which is cut at blocks, while the others are at theirs
    assert several.busy_seconds[Lane.HOST] == pytest.approx(one.busy_seconds[Lane.HOST], rel=0.1)
    assert several.moved_bytes[Lane.H2D] == one.moved_bytes[Lane.H2D], "whole layers"
    assert (
        0.999 <= several.busy_seconds[Lane.H2D] / (several.moved_bytes[Lane.H2D] / memory) <= 1.001 * beside
    )
    to_host = one.moved_bytes[Lane.D2H] - several.moved_bytes[Lane.D2H]
    assert to_host == pytest.approx((gradients + of_root) * (ranks - 1) / ranks, rel=0.1), "its share"
