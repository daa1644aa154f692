"""Waits: interleavings that the waits of real training steps allow."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import streamer
from streamer.backends.base import SPECIAL, Event, Lane, Span
from streamer.backends.disk import Disks, Scratch
from streamer.backends.thread import ThreadBackend
from streamer.backends.virtual import VirtualEvent
from streamer.engine.handle import wrapped
from streamer.engine.schedule.hazards import Hazards, Issuer
from streamer.engine.schedule.op import Op, OpKind, Place


def numbers_of_waits(program: Sequence[Op], hazards: Hazards) -> list[tuple[int, ...]]:
    """For every op of ``program``, the numbers of those that it waits for."""
    numbers: dict[Event, int] = {}
    waits: list[tuple[int, ...]] = []
    for number, op in enumerate(program):
        waits.append(tuple(numbers[event] for event in hazards.waits(op)))
        event = VirtualEvent(op.lane, Span(0, 0, 0))
        hazards.record(op, event)
        numbers[event] = number
    return waits


@dataclass(frozen=True)
class Submitted:
    """An op of a run and the numbers of those that it was made to wait for."""

    op: Op
    waits: tuple[int, ...]


Program = list[Submitted]


class Recorder(ThreadBackend):
    """Notes what is really submitted, with the waits it is really given."""

    def __init__(self) -> None:
        super().__init__(poison=True)
        self.ops: list[Op] = []
        self.program: Program = []
        self._numbers: dict[Event, int] = {}

    def queue(self, lane: Lane, work: Callable[[], object], waits: Sequence[Event], nbytes: int) -> Event:
        if len(self.ops) == len(self.program):
            # wrap and unwrap move weights in and out by `on_host`, before and after all ops
            assert not waits
            return super().queue(lane, work, waits, nbytes)
        number = self._note(lane, waits, nbytes)
        event = super().queue(lane, work, waits, nbytes)
        self._numbers[event] = number
        return event

    @contextmanager
    def computing(self, waits: Sequence[Event]) -> Iterator[Event]:
        number = self._note(Lane.COMPUTE, waits, 0)
        with super().computing(waits) as event:
            self._numbers[event] = number
            yield event

    def _note(self, lane: Lane, waits: Sequence[Event], nbytes: int) -> int:
        op, number = self.ops[-1], len(self.program)
        assert (op.lane, op.nbytes) == (lane, nbytes)
        assert len(self.ops) == number + 1, "a backend is given work by the issuer alone"
        self.program.append(Submitted(op, tuple(self._numbers[event] for event in waits)))
        return number


#: Bytes for all layers of `net` beside what batches of 2 take, and for fewer beside batches of 8.
BUDGET = 3000


def net(width: int = 4) -> nn.Module:
    blocks = (nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(5))
    return nn.Sequential(nn.Linear(4, width), nn.Sequential(*blocks), nn.Linear(width, 1))


#: Layers so wide that their state takes more than the ring for it, and bytes of host memory with which state,
#: or weights too, are on disk.
WIDE, HOST_MEMORY = 64, {"state": 300_000, "weights": 275_000}


def record(
    monkeypatch: pytest.MonkeyPatch, *, num_slots: int | None, folder: Path, on_disk: str | None = None
) -> Program:
    """What three training steps submit: two backwards each (one, and no saved inputs on the host, where that
    is as small as it can be), a gradient written by hand, clipping, and an inference between steps.

    Without ``num_slots`` there is a budget, with room for all layers after the first step, and for fewer
    after the second, whose batches are larger. ``on_disk`` says what is in ``folder``, *state* or *weights*
    too.
    """
    backend = Recorder()
    begin = Issuer._begin

    def noting(self: Issuer, op: Op) -> Sequence[Event]:
        backend.ops.append(op)
        return begin(self, op)

    with monkeypatch.context() as patch:
        patch.setattr(Issuer, "_begin", noting)
        torch.manual_seed(0)
        options = {"num_slots": num_slots, "activations": "recompute+offload"}
        budget = None if num_slots else BUDGET
        if on_disk is not None:
            disks = Disks([folder], partial(Scratch, direct_io=False))
            options |= {"activations": "recompute", "host_memory": HOST_MEMORY[on_disk], "disk": disks}
        plain = net() if on_disk is None else net(WIDE)
        model = streamer.wrap(plain, layers="1", device_memory=budget, backend=backend, **options)
        counts = []
        optimizer = streamer.AdamW(model.parameters(), lr=1e-3)
        held = wrapped(model).executor.host.disk_bytes()
        assert (bool(held), "weights" in held) == (on_disk is not None, on_disk == "weights")
        for step in range(3):
            for _ in range(2 if on_disk is None else 1):
                model(torch.randn(8 if step else 2, 4)).sum().backward()
            model[1][0][0].weight.grad.mul_(2.0)  # so that the norm is taken anew
            streamer.clip_grad_norm_(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            counts.append(len(wrapped(model).executor.pager.training.slots.buffers))
            with torch.no_grad():
                model(torch.randn(2, 4))
        streamer.unwrap(model)
    assert num_slots or counts[0] == 5 > counts[1] > 2
    return backend.program


def with_hazards(program: Program, hazards: Hazards) -> Program:
    """The same ops with the waits that ``hazards`` gives them."""
    program_ops = [submitted.op for submitted in program]
    return list(map(Submitted, program_ops, numbers_of_waits(program_ops, hazards)))


def interleaving(program: Program, rng: random.Random) -> list[int]:
    """One order in which the lanes may run ``program``: theirs kept, and every wait."""
    queues = {lane: [n for n, s in enumerate(program) if s.op.lane is lane][::-1] for lane in Lane}
    # some lanes fast, some slow, another mixture every time
    speeds = {lane: rng.choice((0.01, 0.3, 1.0)) for lane in Lane}
    done: set[int] = set()
    order: list[int] = []
    while any(queues.values()):
        free = [lane for lane, queue in queues.items() if queue and done.issuperset(program[queue[-1]].waits)]
        assert free, "the waits of all lanes lock one another"
        number = queues[rng.choices(free, [speeds[lane] for lane in free])[0]].pop()
        done.add(number)
        order.append(number)
    return order


def violations(program: Program, order: Sequence[int]) -> list[str]:
    """What goes wrong when ``program`` runs in ``order``: a read of another value than in program order, or
    a write before a read that should have come first.

    Two ops that could overlap could also run in either order, so whole ops one at a time show all races.
    """
    expected: dict[tuple[int, Place], int | None] = {}
    earlier_reads: dict[tuple[int, Place], list[int]] = {}
    writer: dict[Place, int] = {}
    readers: dict[Place, list[int]] = {}
    for number, submitted in enumerate(program):
        for place in submitted.op.reads:
            expected[number, place] = writer.get(place)
            readers.setdefault(place, []).append(number)
        for place in submitted.op.writes:
            earlier_reads[number, place] = [n for n in readers.pop(place, []) if n != number]
            writer[place] = number
    found: list[str] = []
    seen: dict[Place, int] = {}
    done: set[int] = set()
    for number in order:
        op = program[number].op
        for place in op.reads:
            if seen.get(place) != expected[number, place]:
                found.append(f"{number}:{op} reads another {place}")
        for place in op.writes:
            if not done.issuperset(earlier_reads[number, place]):
                found.append(f"{number}:{op} overtakes a read of {place}")
            seen[place] = number
        done.add(number)
    return found


def all_violations(program: Program, *, count: int = 200) -> list[str]:
    rng = random.Random(0)
    return list(
        itertools.chain.from_iterable(violations(program, interleaving(program, rng)) for _ in range(count))
    )


CASES = {
    **{f"{slots} slots": (slots, None) for slots in (1, 2, 5)},
    "a budget": (None, None),
    "2 slots, state on disk": (2, "state"),
    **{f"{slots} slots, weights on disk": (slots, "weights") for slots in (1, 5)},
}


@pytest.fixture(scope="module", params=CASES)
def program(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Program:
    slots, on_disk = CASES[request.param]
    folder = tmp_path_factory.mktemp("scratch")
    with pytest.MonkeyPatch.context() as monkeypatch:
        return record(monkeypatch, num_slots=slots, folder=folder, on_disk=on_disk)


def test_the_steps_contain_every_kind_of_op(program: Program) -> None:
    kinds = {submitted.op.kind for submitted in program}
    of_state = {OpKind.READ_STATE, OpKind.WRITE_STATE} & kinds
    of_weights = {OpKind.READ_WEIGHTS, OpKind.WRITE_WEIGHTS} & kinds
    assert len(of_state) in (0, 2)
    assert len(of_weights) in (0, 2)
    if not of_state:
        # with a slot for every layer none is given up but for its update
        # and there are no other ranks
        assert kinds == {kind for kind in OpKind if kind.lane not in SPECIAL}


def test_the_submitted_waits_are_those_of_hazards(program: Program) -> None:
    assert program == with_hazards(program, Hazards())


def test_no_interleaving_goes_wrong(program: Program) -> None:
    assert all_violations(program) == []


@pytest.mark.parametrize(
    ("dropped", "wrong"), [("read_after_write", "reads another"), ("write_after_read", "overtakes")]
)
def test_without_either_kind_of_wait_it_goes_wrong(program: Program, dropped: str, wrong: str) -> None:
    found = all_violations(with_hazards(program, Hazards(**{dropped: False})), count=20)
    assert any(wrong in violation for violation in found)


def test_few_waits_per_op(program: Program) -> None:
    """They do not grow with the steps, the layers or the slots."""
    counts = [len(s.waits) for s in program if s.op.kind is not OpKind.SYNC]
    uses_disk = any(s.op.kind is OpKind.READ_STATE for s in program)
    assert max(counts) <= (5 if uses_disk else 3)
    assert sum(counts) / len(counts) < 2
