"""Which layers stay on the device: no more is copied than must be, and a budget is used and kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import nn

import streamer
from streamer.backends.base import Lane
from streamer.backends.thread import ThreadBackend
from streamer.backends.virtual import VirtualBackend
from streamer.engine.handle import wrapped
from streamer.engine.schedule.op import Op, OpKind
from streamer.engine.schedule.order import LayerUse, Phase
from streamer.planner.machine import H200
from tests.engine.paging.least_bytes import Cycle, inference, least_bytes, training
from tests.reference import (
    LossOf,
    assert_same,
    language_loss,
    one_step,
    streamed,
    tiny_gpt,
    train_streamed,
    wide_loss,
)

MOST = 7

# --- bytes against the least --------------------------------------------------------------------------


class Parts(nn.Module):
    """Layers of so many blocks of 128 bytes in fp32, some of them trained; they are only visited."""

    def __init__(self, whole: Sequence[int], trained: Sequence[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Identity() for _ in whole)
        for layer, blocks, of_them in zip(self.layers, whole, trained, strict=True):
            layer.trained = nn.Parameter(torch.empty(32 * of_them, device="meta"))
            layer.frozen = nn.Parameter(torch.empty(32 * (blocks - of_them), device="meta"), False)


def moved(cycle: Cycle, phases: Sequence[Phase], slots: int, *, count: int = 12) -> Fraction:
    """Blocks copied in ``cycle``, whose visits have these phases."""
    backend = VirtualBackend(H200)
    model = streamer.wrap(
        Parts(cycle.whole, cycle.trained), layers="layers", num_slots=slots, backend=backend
    )
    executor, copied = wrapped(model).executor, 0
    submit = backend.submit

    def counting(lane: Lane, work: Callable[[], object], waits: Sequence[object], nbytes: int) -> object:
        nonlocal copied
        copied += nbytes * (lane is Lane.H2D)
        return submit(lane, work, waits, nbytes)

    backend.submit = counting
    for number in range(2 * count):
        copied *= number != count
        for visit, (unit, phase) in enumerate(zip(cycle.visits, phases, strict=True)):
            with executor.pager.resident(executor.units[unit], LayerUse(unit, phase)):
                pass
            for updated in cycle.updates.get(visit, ()):
                if cycle.trained[updated]:
                    its = executor.units[updated]
                    executor.pager.update_issued(its, its.params)
            executor.pager.training.prefetch()
    return Fraction(copied, 128 * count)


F, B, Z, I = Phase.FORWARD, Phase.BACKWARD, Phase.FROZEN, Phase.INFERENCE  # noqa: E741


@pytest.mark.parametrize("layers", [1, 2, 3, MOST])
@pytest.mark.parametrize(
    "options", [{}, {"update": "backward"}, {"backwards": 2}], ids=["step", "backward", "accumulated"]
)
def test_a_step_moves_the_least(layers: int, options: dict[str, Any]) -> None:
    """And with a slot for every layer only what was updated."""
    cycle, every = training(layers, **options), range(1, layers + 1)
    phases = (layers * [F] + layers * [B]) * options.get("backwards", 1)
    least = [least_bytes(cycle, slots) for slots in every]
    assert [moved(cycle, phases, slots, count=2) for slots in every] == least
    # that copies can hide under compute costs nothing here
    assert [least_bytes(cycle, slots, overlapped=True) for slots in every[1:]] == least[1:]
    assert least[-1] == layers
    if not options:
        assert least == [2 * layers - slots for slots in every]


@pytest.mark.parametrize("layers", [1, 2, 3, MOST])
def test_inference_moves_the_least_that_hides_under_compute(layers: int) -> None:
    cycle, every = inference(layers), range(1, layers + 1)
    least = [least_bytes(cycle, slots, overlapped=slots > 1) for slots in every]
    # what is copied repeats after layers - 2 passes
    count = max(1, layers - 2)
    assert [moved(cycle, layers * [I], slots, count=count) for slots in every] == least


ADAPTED = Cycle([*range(5), *reversed(range(5))], {9: range(5)}, [8] * 5, [1] * 5)


@pytest.mark.parametrize(
    ("cycle", "phases"),
    [
        (ADAPTED, [F] * 5 + [B] * 5),
        # each right after its backward
        (Cycle(ADAPTED.visits, {n: (9 - n,) for n in range(5, 10)}, [8] * 5, [1] * 5), [F] * 5 + [B] * 5),
        # an encoder, and a decoder of which two layers share their weights
        (Cycle([0, 1, 2, 3, 2, 4, 4, 2, 3, 2, 1, 0], {11: range(5)}, [4] * 5, [4] * 5), [F] * 6 + [B] * 6),
        # a policy, and a reference without gradients between its forward and backward
        (Cycle([0, 1, 2, 0, 1, 2, 2, 1, 0], {8: range(3)}, [4] * 3, [1] * 3), [F] * 3 + [I] * 3 + [B] * 3),
        # every other layer has experts
        (Cycle(ADAPTED.visits, {9: range(5)}, [1, 8, 1, 8, 1], [1, 8, 1, 8, 1]), [F] * 5 + [B] * 5),
        # the first layers are frozen
        (
            Cycle([0, 1, 2, 3, 4, 4, 3, 2], {7: (2, 3, 4)}, [4] * 5, [0, 0, 4, 4, 4]),
            [Z] * 2 + [F] * 3 + [B] * 3,
        ),
        # all layers are, and a loss on what comes before them is trained
        (Cycle(range(5), {}, [4] * 5, [0] * 5), [Z] * 5),
    ],
    ids=[
        "adapters",
        "adapters, updated in backward",
        "shared",
        "reference",
        "experts",
        "frozen",
        "all frozen",
    ],
)
def test_other_cycles_move_the_least_that_hides_under_compute(cycle: Cycle, phases: list[Phase]) -> None:
    slots = range(1, len(cycle.whole) + 1)
    least = [least_bytes(cycle, k, overlapped=k > 1) for k in slots]
    assert [moved(cycle, phases, k) for k in slots] == least


# --- a budget -----------------------------------------------------------------------------------------


gpt = partial(tiny_gpt, 6)


LAYER = sum(param.nbytes for param in tiny_gpt(1).transformer.h[0].parameters())


@contextmanager
def within(nbytes: int, model: nn.Module, **options: Any) -> Iterator[nn.Module]:
    with streamed(model, device_memory=nbytes, **options) as wrapped_model:
        yield wrapped_model
        assert streamer.stats(wrapped_model).device_bytes_peak <= nbytes


def num_slots(model: nn.Module) -> int:
    held = streamer.stats(model).device_bytes["weight slots"]
    assert held % LAYER == 0
    assert held == LAYER * len(wrapped(model).executor.pager.training.slots.buffers)
    return held // LAYER


def slots_after(model: nn.Module, optimizer: streamer.AdamW, *losses: LossOf) -> list[int]:
    """The slots that there are after a step with each of ``losses``."""
    counts = []
    for number, loss_of in enumerate(losses):
        one_step(model, optimizer, number, loss_of)
        counts.append(num_slots(model))
    return counts


@cache
def bytes_outside_slots(loss_of: LossOf = language_loss, **options: Any) -> int:
    """What one step takes at most, less two slots."""
    with streamed(gpt(), **options) as model:
        one_step(model, streamer.AdamW(model.parameters()), 0, loss_of)
        return streamer.stats(model).device_bytes_peak - 2 * LAYER


@pytest.mark.parametrize(
    ("room", "expected", "update", "activations"),
    [
        (2, 2, "step", "keep"),
        (4, 4, "step", "recompute"),
        (4, 4, "backward", "recompute"),
        (20, 6, "step", "keep"),
    ],
)
def test_a_budget_is_filled_after_the_first_step(
    room: int, expected: int, update: str, activations: str
) -> None:
    options: dict[str, Any] = {"update": update, "activations": activations}
    beside = bytes_outside_slots(**options)
    for missing in (0, 1) if 2 < room < 20 else (0,):
        with within(beside + room * LAYER - missing, gpt(), **options) as model:
            optimizer = streamer.AdamW(model.parameters())
            counts = []
            for number in range(3):
                language_loss(model, number).backward()
                counts.append(num_slots(model))
                optimizer.step()
                optimizer.zero_grad()
                counts.append(num_slots(model))
            assert counts == [2, *5 * [expected - missing]]


@pytest.mark.parametrize("update", ["step", "backward"])
def test_slots_that_come_and_go_change_no_value(update: str) -> None:
    def loss_of(model: nn.Module, number: int) -> torch.Tensor:
        return (wide_loss if number % 2 else language_loss)(model, number)

    options: dict[str, Any] = {"update": update, "clip": update == "step", "loss_of": loss_of, "steps": 4}
    slow = {lane: lambda: 0.002 for lane in (Lane.H2D, Lane.HOST)}
    backend = ThreadBackend(poison=True, delays=slow)
    budget = bytes_outside_slots(wide_loss, update=update) + 2 * LAYER
    actual = train_streamed(gpt(), device_memory=budget, backend=backend, **options)
    assert_same(actual, train_streamed(gpt(), **options))


def test_slots_are_given_back_to_longer_batches() -> None:
    """As many as must be, at the end of the step that has shown it, and they do not come again."""
    small, large = bytes_outside_slots(), bytes_outside_slots(wide_loss)
    # the larger step itself is over the budget on a device that would let it
    budget = large + 3 * LAYER
    with streamed(gpt(), device_memory=budget) as model:
        counts = slots_after(model, streamer.AdamW(model.parameters()), *2 * (language_loss, wide_loss))
        assert counts == [min(6, (budget - small) // LAYER), 3, 3, 3]
        assert streamer.stats(model).device_bytes_peak == budget


@pytest.mark.parametrize(
    ("layers", "options", "expected"),
    [(6, {}, 2), (6, {"device_memory": "1GiB", "num_slots": 3}, 3), (1, {"device_memory": "1GiB"}, 1)],
    ids=["no budget", "slots that the user chose", "one layer"],
)
def test_slots_that_stay(layers: int, options: dict[str, Any], expected: int) -> None:
    with streamed(tiny_gpt(layers), layers="transformer.h", **options) as model:
        optimizer = streamer.AdamW(model.parameters())
        assert slots_after(model, optimizer, language_loss, language_loss) == [expected] * 2


def test_what_is_not_trained_is_held_after_its_first_pass(issued: list[Op]) -> None:
    model = gpt().requires_grad_(False)
    with within(1 << 30, model) as streamed_model, torch.no_grad():
        for number in range(3):
            issued.clear()
            loss = language_loss(streamed_model, number)
            assert loss == language_loss(model, number)
            assert num_slots(streamed_model) == (6 if number else 2)
    assert [op for op in issued if op.kind is OpKind.UNSHARD] == []


class Refusing(ThreadBackend):
    """Refuses what the test says, and tells that it did."""

    refused = 0

    def device_refused(self) -> int:
        return self.refused


def test_a_pass_that_runs_out_of_memory_takes_the_added_slots_back() -> None:
    backend = Refusing(poison=True)
    with within(1 << 30, gpt(), backend=backend) as model:
        optimizer = streamer.AdamW(model.parameters())
        assert slots_after(model, optimizer, language_loss) == [6]
        language_loss(model, 1)
        # outside of all layers: only the allocator knows
        backend.refused += 1
        language_loss(model, 1)
        assert num_slots(model) == 2
        assert slots_after(model, optimizer, language_loss, language_loss) == [2, 2]


def test_a_device_that_has_less_than_the_budget_is_not_asked_again() -> None:
    class Small(Refusing):
        def device_buffer(self, nbytes: int) -> torch.Tensor:
            if nbytes == LAYER and len(taken) == 6:  # four of them for wrap
                self.refused += 1
                raise torch.OutOfMemoryError("no more")
            taken.append(nbytes) if nbytes == LAYER else None
            return super().device_buffer(nbytes)

    taken: list[int] = []
    backend = Small(poison=True)
    with within(1 << 30, gpt(), backend=backend) as model:
        optimizer = streamer.AdamW(model.parameters())
        assert slots_after(model, optimizer, *3 * [language_loss]) == [4, 4, 4]
        assert backend.refused == 1
