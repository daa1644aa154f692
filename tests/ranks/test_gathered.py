"""Ranks that copy a part of each layer, and gather the others' on their devices, compute what they compute
when each copies whole layers.
"""

from __future__ import annotations

import re

import torch
import torch.distributed as dist

import streamer
from streamer.backends.thread import ThreadBackend
from streamer.engine.handle import wrapped
from streamer.engine.schedule.op import OpKind
from streamer.errors import RanksError
from streamer.store.layout import ALIGN_BYTES
from tests.ranks.common import run_ranks
from tests.ranks.programs import BF16, Arrays, a_step, arrays, backward, equal, model, part, wrap_model


def copies(rank: int) -> tuple[list[tuple[int, str, int]], list[int]]:
    """What ranks bring to their slots in a step after the first: unit, kind and bytes; each layer's bytes."""
    made = wrap_model(model(layers=4), gather_weights=True, **BF16)
    optimizer = streamer.AdamW(made.parameters())
    executor = wrapped(made).executor
    for step in range(2):
        streamer.synchronize(made)
        before = len(executor.issuer.trace.records())
        a_step(made, optimizer, step, rank)
    streamer.synchronize(made)
    kinds = (OpKind.UNSHARD, OpKind.ALL_GATHER)
    found = [
        (record.op.unit, record.op.kind.value, record.op.nbytes)
        for record in executor.issuer.trace.records()[before:]
        if record.op.kind in kinds and record.op.unit >= 0
    ]
    return found, [unit.layout.nbytes for unit in executor.units]


def test_each_rank_copies_a_part_and_sends_it_to_the_others() -> None:
    size = 2
    for found, nbytes in run_ranks(size, copies):
        copied = [(unit, moved) for unit, kind, moved in found if kind == "UNSHARD"]
        sent = [(unit, moved) for unit, kind, moved in found if kind == "ALL_GATHER"]
        # through two slots: two layers in forward, two in backward, and the updates of two
        assert len(copied) == len(sent) == 6
        for unit, moved in copied:
            # all of it is trained, so that what was updated is as long
            assert 0 <= moved - nbytes[unit] / size < size * ALIGN_BYTES
        # in a ring, all parts but one are passed on
        for unit, moved in sent:
            assert -size * ALIGN_BYTES < moved - nbytes[unit] * (size - 1) / size <= 0


def with_holder(rank: int) -> tuple[Arrays, Arrays]:
    """The first rank alone holds the memory of a weight, so that it copies the layer anew; or nobody does."""
    ends = []
    for holds in (False, True):
        made = wrap_model(num_slots=3, gather_weights=True)
        optimizer = streamer.AdamW(made.parameters(), lr=1e-2)
        held = made.layers[1].up.weight.data if holds and not rank else None
        for step in range(3):
            a_step(made, optimizer, step, rank)
        if held is not None:
            streamer.synchronize(made)
            assert torch.equal(held, made.layers[1].up.weight)
        ends.append(arrays(streamer.unwrap(made).state_dict()))
    return ends[0], ends[1]


def test_one_rank_may_hold_a_weights_memory() -> None:
    for without, with_it in run_ranks(2, with_holder):
        equal(with_it, without)


def train_writing(rank: int, *, gathers: bool) -> Arrays:
    """What is resident is written after a step, and seen by the next forward only if it is copied anew: by a
    function that tells of it, and through memory that each rank holds, which the first one writes."""
    made = model(frozen=True)
    made = wrap_model(made, num_slots=3, gather_weights=gathers)
    optimizer = streamer.AdamW(made.parameters(), lr=1e-2)
    held = made.layers[0].up.weight.data  # type: ignore[union-attr, index]
    for step in range(3):
        a_step(made, optimizer, step, rank)
        streamer.synchronize(made)
        with torch.no_grad():
            made.layers[1].up.weight.mul_(0.5)  # type: ignore[union-attr, index]
        dist.barrier()
        if rank == 0:
            held.mul_(0.5)
        dist.barrier()
    return arrays(streamer.unwrap(made).state_dict())


def writing(rank: int) -> tuple[Arrays, Arrays]:
    return train_writing(rank, gathers=False), train_writing(rank, gathers=True)


def test_what_is_written_between_steps_runs() -> None:
    """Both weights are frozen, so that no update brings them anew."""
    for copied, gathered in run_ranks(2, writing):
        equal(gathered, copied)


def looking(rank: int) -> list[tuple[Arrays, Arrays]]:
    """Nobody runs forwards without gradients between steps and inside of them; or the first rank alone does:
    of ranks that copy whole layers, and of ranks that gather them, where layers pass through one slot, and
    where some stay in theirs."""
    return [
        train_looking(rank, num_slots, gathers=gathers, looks=looks and rank == 0)
        for num_slots, gathers, looks in (
            (2, True, False),
            (2, False, True),
            (1, True, True),
            (2, True, True),
        )
    ]


def train_looking(rank: int, num_slots: int, *, gathers: bool, looks: bool) -> tuple[Arrays, Arrays]:
    """The weights at the end, and the results of the forwards without gradients."""
    made = wrap_model(num_slots=num_slots, gather_weights=gathers, backend=ThreadBackend(poison=True))
    optimizer = streamer.AdamW(made.parameters(), lr=1e-2)
    seen: list[torch.Tensor] = []

    def look(times: int) -> None:
        with torch.random.fork_rng(), torch.no_grad():
            seen.extend(made(part(0, 7)) for _ in range(times * looks))

    for step in range(4):
        look(step % 3)
        torch.manual_seed(step)
        loss = made(part(step, rank)).square().mean()
        # the last layers are in the slots, which a forward without gradients leaves with the first ones
        look(step % 2)
        loss.backward()
        look(1)
        if step == 2:  # what is written is found out by who looks first
            with torch.no_grad():
                made.layers[1].down.weight.mul_(0.5)  # type: ignore[union-attr, index]
            look(1)
        optimizer.step()
        look(1 + step % 2)
        optimizer.zero_grad()
    assert bool(seen) is looks
    results = {str(number): logits for number, logits in enumerate(seen)}
    return arrays(streamer.unwrap(made).state_dict()), arrays(results)


def test_one_rank_alone_may_look() -> None:
    for (without, _), (copied, expected), *gathered in run_ranks(2, looking, timeout=10.0):
        equal(copied, without)
        for found, results in gathered:
            equal(found, without)
            equal(results, expected)


def going_forward(rank: int) -> str:
    """One rank alone begins a step."""
    made = wrap_model(gather_weights=True)
    try:
        if rank:
            made(part(0, rank))
        for step in range(2):
            backward(made, step, rank, 1, None)
    except RanksError as error:
        return str(error)
    return ""


def test_ranks_that_do_not_call_the_same_layers_are_told() -> None:
    for told in run_ranks(2, going_forward, timeout=5.0):
        assert re.search(r"gathering 'layers\.\d' \(gather_weights=True: all ranks call the same", told), told
        assert "\n" not in told


def with_budget(rank: int) -> tuple[list[int], Arrays]:
    """The second rank has twice as long a batch, and room for fewer slots: their number after each step."""
    made = model(layers=6)
    nbytes = sum(param.nbytes for param in made.layers[0].parameters())
    made = wrap_model(made, activations="keep", device_memory=16 * nbytes, gather_weights=True)
    optimizer = streamer.AdamW(made.parameters(), lr=1e-2)
    slots = []
    for step in range(4):
        tokens = torch.randint(48, (4 + 60 * rank * (step == 2), 6))
        made(tokens).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        slots.append(len(wrapped(made).executor.pager.training.slots.buffers))
    return slots, arrays(streamer.unwrap(made).state_dict())


def test_ranks_have_as_many_slots_as_the_one_with_least_room() -> None:
    (slots, state), (slots_there, state_there) = run_ranks(2, with_budget)
    assert slots == slots_there
    assert slots[1] > slots[2] >= 2
    equal(state, state_there)
