"""Whatever the lanes' timing, the result is the same to the bit; and it is the waits that make it so."""

from __future__ import annotations

import random
import warnings
from collections.abc import Mapping
from functools import cache, partial

import pytest
import torch

import streamer.engine.paging.executor
from models.gpt2 import GPT
from streamer.backends.base import Lane
from streamer.backends.thread import Delay, ThreadBackend
from streamer.engine.schedule.hazards import Hazards
from tests.reference import VOCAB, History, assert_same, train_streamed

STEPS = 3


@cache
def gpt() -> GPT:
    torch.manual_seed(0)
    return GPT(vocab_size=VOCAB, block_size=16, n_layer=4, n_head=2, n_embd=16, dropout=0.1)


@cache
def undisturbed(activations: str) -> History:
    return train_streamed(gpt(), steps=STEPS, activations=activations)


def disturbed(activations: str, delays: Mapping[Lane, Delay], num_slots: int | None = 2) -> History:
    """Without ``num_slots`` all layers have one from the second step on."""
    backend = ThreadBackend(delays=delays, poison=True)
    budget = None if num_slots else "1GiB"
    options = {"activations": activations, "num_slots": num_slots, "device_memory": budget}
    return train_streamed(gpt(), steps=STEPS, backend=backend, **options)


def always(seconds: float) -> Delay:
    return lambda: seconds


@pytest.mark.parametrize("lanes", [(lane,) for lane in Lane] + [tuple(Lane)], ids=str)
@pytest.mark.parametrize(("activations", "num_slots"), [("recompute+offload", 1), ("keep", 2)])
def test_a_slow_lane_changes_nothing(lanes: tuple[Lane, ...], activations: str, num_slots: int) -> None:
    actual = disturbed(activations, {lane: always(0.003) for lane in lanes}, num_slots)
    assert_same(actual, undisturbed(activations))


@pytest.mark.parametrize("seed", range(12))  # each policy with each number of slots
def test_random_delays_change_nothing(seed: int) -> None:
    draw = random.Random(seed)
    scale = {lane: draw.choice([0.0, 0.001, 0.004]) for lane in Lane}
    delays = {lane: partial(lambda lane: draw.random() * scale[lane], lane) for lane in Lane}
    activations = ("recompute", "keep", "recompute+offload")[seed % 3]
    num_slots = (None, 1, 2, 3)[seed // 3 % 4]
    assert_same(disturbed(activations, delays, num_slots), undisturbed(activations))


@pytest.mark.parametrize(
    ("dropped", "slow"),
    [("read_after_write", Lane.H2D), ("read_after_write", Lane.HOST), ("write_after_read", Lane.D2H)],
)
def test_without_either_kind_of_wait_the_result_is_wrong(
    monkeypatch: pytest.MonkeyPatch, dropped: str, slow: Lane
) -> None:
    expected = undisturbed("recompute")
    monkeypatch.setattr(streamer.engine.paging.executor, "Hazards", partial(Hazards, **{dropped: False}))
    # a slot that is read too early is full of NaN, and its step is skipped
    warnings.filterwarnings("ignore", message="(a|the) gradient .*is NaN or infinite")
    try:
        actual = disturbed("recompute", {slow: always(0.02)}, num_slots=1)
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
