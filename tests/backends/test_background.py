"""What the background reads is what was there when it began."""

from __future__ import annotations

import random
import threading
import time

import pytest

from streamer.backends.base import Handover, in_background


@pytest.mark.parametrize("seed", range(2))
def test_what_is_read_is_what_was_there(seed: int) -> None:
    draw = random.Random(seed)
    values = {key: 0 for key in range(12)}
    handover = Handover(values)
    found: dict[int, int] = {}

    def read(key: int) -> None:
        time.sleep(draw.random() * 0.004)
        found[key] = values[key]

    reading = in_background(lambda: handover.read_all(read), "streamer-test")
    order = list(values)
    for _ in range(3):
        for key in order:
            handover.before_change(key)
            values[key] += 1
        draw.shuffle(order)
    reading.result()
    assert found == dict.fromkeys(range(12), 0)


def test_after_an_error_nobody_waits() -> None:
    handover = Handover([0, 1])
    begun, go_on = threading.Event(), threading.Event()

    def read(key: int) -> None:
        begun.set()
        go_on.wait(10)
        raise OSError("full")

    reading = in_background(lambda: handover.read_all(read), "streamer-test")
    begun.wait(10)
    changed = in_background(lambda: handover.before_change(0), "streamer-test")
    assert not changed.done()
    go_on.set()
    changed.result(10)
    handover.before_change(1)
    assert not reading.is_awaited
    with pytest.raises(OSError, match="full"):
        reading.result(10)
    assert reading.is_awaited
