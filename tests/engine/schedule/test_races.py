"""Whatever the lanes' timing, the result is the same to the bit; and it is the waits that make it so."""

from __future__ import annotations

import warnings
from functools import cache, partial
from typing import Any

import pytest

import streamer.engine.executor
from streamer.backends.base import SPECIAL, Lane
from streamer.backends.thread import Delay, ThreadBackend
from streamer.engine.schedule.hazards import Hazards
from tests.reference import History, assert_same, in_turn, random_delays, tiny_gpt, train_streamed


def trained(activations: str, update: str = "step", **options: Any) -> History:
    # with update="backward" gradients go through a ring of four buffers: some are used twice in a backward
    model = tiny_gpt(4 if update == "step" else 7, width=16, dropout=0.1)
    clip = update == "step"
    return train_streamed(model, steps=3, activations=activations, update=update, clip=clip, **options)


undisturbed = cache(trained)


def disturbed(
    activations: str, update: str = "step", *, delays: dict[Lane, Delay], num_slots: int | None
) -> History:
    """Without ``num_slots`` all layers have one from the second step on."""
    backend = ThreadBackend(delays=delays, poison=True)
    budget = None if num_slots else "1GiB"
    return trained(activations, update, num_slots=num_slots, device_memory=budget, backend=backend)


def always(seconds: float) -> Delay:
    return lambda: seconds


#: Those that a run in memory on one rank uses.
LANES = tuple(lane for lane in Lane if lane not in SPECIAL)


def test_no_other_lane_is_used() -> None:
    used: set[Lane] = set()
    delays = {lane: partial(lambda lane: used.add(lane) or 0.0, lane) for lane in Lane}
    trained("recompute+offload", backend=ThreadBackend(delays=delays))
    assert used == {*LANES}


RUNS = [("recompute+offload", "step", 1), ("keep", "step", 2), ("recompute", "backward", 2)]


@pytest.mark.parametrize(
    ("lanes", "run"), [*in_turn([(lane,) for lane in LANES], RUNS), *((LANES, run) for run in RUNS)], ids=str
)
def test_a_slow_lane_changes_nothing(lanes: tuple[Lane, ...], run: tuple[str, str, int]) -> None:
    activations, update, num_slots = run
    delays = {lane: always(0.003) for lane in lanes}
    actual = disturbed(activations, update, delays=delays, num_slots=num_slots)
    assert_same(actual, undisturbed(activations, update))


@pytest.mark.parametrize(
    ("update", "seed"),
    # each policy, and each number of slots twice
    [*(("step", seed) for seed in (0, 4, 8, 3, 7, 11)), ("backward", 0), ("backward", 1)],
)
def test_random_delays_change_nothing(update: str, seed: int) -> None:
    activations = ("recompute", "keep", "recompute+offload")[seed % 3]
    num_slots = (None, 1, 2, 3)[(seed // 3 if update == "step" else seed) % 4]
    actual = disturbed(activations, update, delays=random_delays(seed), num_slots=num_slots)
    assert_same(actual, undisturbed(activations, update))


@pytest.mark.parametrize(
    ("dropped", "slow"),
    [("read_after_write", Lane.H2D), ("read_after_write", Lane.HOST), ("write_after_read", Lane.D2H)],
)
def test_without_either_kind_of_wait_the_result_is_wrong(
    monkeypatch: pytest.MonkeyPatch, dropped: str, slow: Lane
) -> None:
    expected = undisturbed("recompute")
    monkeypatch.setattr(streamer.engine.executor, "Hazards", partial(Hazards, **{dropped: False}))
    # a slot that is read too early is full of NaN, and its step is skipped
    warnings.filterwarnings("ignore", message="(a|the) gradient .*is NaN or infinite")
    try:
        actual = disturbed("recompute", delays={slow: always(0.02)}, num_slots=1)
    except (RuntimeError, ValueError) as error:
        # autograd, the layer's own checks or the norms' may notice what was written while it was in use
        noticed = (
            "modified by an inplace operation",
            "writes its own weights",
            "gradients were written after",
            "were written while its update was reading them",
            "did not do the same when it ran again",
            "changes what it is given",
        )
        assert any(words in str(error) for words in noticed), str(error)
        return
    with pytest.raises(AssertionError):
        assert_same(actual, expected)
