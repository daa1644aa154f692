"""Copy before write: what the background reads is what was there when it began."""

from __future__ import annotations

import random
import threading
import time

import pytest

from streamer.backends.background import Handover, in_background


@pytest.mark.parametrize("most_copies", [0, 1, 3])
@pytest.mark.parametrize("seed", range(2))
def test_what_is_read_is_what_was_there_and_copies_are_few(seed: int, most_copies: int) -> None:
    draw = random.Random(seed)
    values = {key: 0 for key in range(12)}
    copies, most = 0, 0
    handover: Handover[int, int] = Handover(values, most_copies=most_copies)
    found: dict[int, int] = {}

    def read(key: int, copy: int | None) -> None:
        nonlocal copies
        time.sleep(draw.random() * 0.004)
        found[key] = values[key] if copy is None else copy
        copies -= copy is not None

    def copy(key: int) -> int:
        nonlocal copies, most
        copies += 1
        most = max(most, copies)
        return values[key]

    reading = in_background(lambda: handover.read_all(read), "streamer-test")
    order = list(values)
    for _ in range(3):
        for key in order:
            handover.before_change(key, lambda key=key: copy(key))
            values[key] += 1
        draw.shuffle(order)
    reading.result()
    assert found == dict.fromkeys(range(12), 0)
    assert most <= most_copies


def test_after_an_error_nobody_waits() -> None:
    handover: Handover[int, int] = Handover([0, 1], most_copies=0)
    begun, go_on = threading.Event(), threading.Event()

    def read(key: int, copy: int | None) -> None:
        begun.set()
        go_on.wait(10)
        raise OSError("full")

    reading = in_background(lambda: handover.read_all(read), "streamer-test")
    begun.wait(10)
    changed = in_background(lambda: handover.before_change(0, lambda: 0), "streamer-test")
    assert not changed.done()
    go_on.set()
    changed.result(10)
    handover.before_change(1, lambda: 0)
    assert not reading.is_awaited
    with pytest.raises(OSError, match="full"):
        reading.result(10)
    assert reading.is_awaited
