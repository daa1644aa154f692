"""A lane as a thread: order, errors, and what it leaves behind. conftest.py checks that no thread is left."""

from __future__ import annotations

import threading
import traceback
import weakref
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import partial

import pytest
import torch

from streamer.backends import thread
from streamer.backends.base import Event, Lane, Latch, Span
from streamer.backends.thread import HostEvent, ThreadBackend, Worker
from tests.conftest import SHORT_COPY
from tests.reference import assert_parity, tiny_gpt, train_plain, train_streamed

#: Seconds after which something that should happen at once is said not to happen.
PATIENCE = 10.0


class Oops(Exception):
    """An error of the work."""


@pytest.fixture
def worker() -> Iterator[Worker]:
    """Closed twice, as may be; `tests.conftest.no_thread_is_left` sees that its thread has ended."""
    worker = Worker(Lane.H2D)
    yield worker
    for _ in range(2):
        Worker.close_all([worker])


@pytest.fixture
def backend() -> Iterator[ThreadBackend]:
    """Closed twice, as `worker`."""
    backend = ThreadBackend()
    yield backend
    for _ in range(2):
        backend.close()


def raise_oops() -> None:
    raise Oops("in the work")


def test_a_lane_runs_in_order(worker: Worker) -> None:
    ran: list[int] = []
    gate = threading.Event()
    events = [worker.submit(lambda: gate.wait(PATIENCE), ())]
    events += [worker.submit(lambda i=i: ran.append(i), ()) for i in range(100)]  # type: ignore[misc]
    assert ran == [], "the gate is shut"
    gate.set()
    events[-1].wait()
    assert ran == list(range(100))
    spans = [event.span() for event in events]
    done = [span for span in spans if span is not None]
    assert len(done) == len(events)
    assert all(span.ready <= span.start <= span.end for span in done)
    assert all(a.end <= b.ready for a, b in zip(done, done[1:], strict=False))


def test_work_starts_after_what_it_waits_for(backend: ThreadBackend) -> None:
    ran: list[str] = []
    gate = HostEvent(Lane.COMPUTE)
    update = backend.submit(Lane.HOST, lambda: ran.append("update"), [gate], 0)
    copy = backend.submit(Lane.H2D, lambda: ran.append("copy"), [update], 0)
    offload = backend.submit(Lane.D2H, lambda: ran.append("offload"), (), 0)
    offload.wait()
    assert ran == ["offload"], "another lane is not held up"
    assert copy.span() is None and update.span() is None
    gate.finish(Span(0, 0, 0))
    backend.submit(Lane.COMPUTE, lambda: ran.append("compute"), [copy], 0)
    assert ran == ["offload", "update", "copy", "compute"]
    first, second = update.span(), copy.span()
    assert first is not None and second is not None
    assert first.end <= second.start


def test_an_error_travels_through_waits_with_its_own_traceback(backend: ThreadBackend) -> None:
    ran: list[str] = []
    first = backend.submit(Lane.HOST, raise_oops, (), 0)
    second = backend.submit(Lane.H2D, lambda: ran.append("copy"), [first], 0)
    third = backend.submit(Lane.D2H, lambda: ran.append("offload"), [second], 0)
    compute = partial(backend.submit, Lane.COMPUTE, lambda: ran.append("compute"), [third], 0)
    for wait in (compute, *(event.wait for event in (third, second, first))):
        seen = []
        for _ in range(3):
            with pytest.raises(Oops, match="in the work") as info:
                wait()
            seen.append([frame.name for frame in traceback.extract_tb(info.value.__traceback__)])
        assert "raise_oops" in seen[0]
        assert seen == [seen[0]] * 3, "nobody's waits are added up"
    assert ran == [], "nothing runs on what failed"
    for event in (first, second, third):
        assert isinstance(event, HostEvent)
        assert event.failed()
        assert event.span() is None


def test_no_error_ends_the_lane(worker: Worker) -> None:
    def work() -> None:
        raise KeyboardInterrupt

    failed = worker.submit(work, ())
    ran: list[int] = []
    worker.submit(lambda: ran.append(1), ()).wait()
    assert ran == [1]
    with pytest.raises(KeyboardInterrupt):
        failed.wait()


def submit_with_a_tensor(worker: Worker, released: threading.Event, *, fail: bool) -> Event:
    tensor = torch.zeros(8)
    weakref.finalize(tensor, released.set)

    def work() -> None:
        tensor.add_(1)

    if fail:
        gate = HostEvent(Lane.COMPUTE)
        gate.finish(None, Oops("before it"))
        return worker.submit(work, [gate])
    return worker.submit(work, ())


@pytest.mark.parametrize("fail", [False, True])
def test_nothing_of_the_work_is_held_when_its_end_is_told(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, fail: bool
) -> None:
    """Nor later, by an idle thread."""
    released, found, finish = threading.Event(), [], HostEvent.finish

    def looking(self: HostEvent, *result: object) -> None:
        found.append(released.is_set())
        finish(self, *result)

    monkeypatch.setattr(HostEvent, "finish", looking)
    event = submit_with_a_tensor(worker, released, fail=fail)
    with pytest.raises(Oops) if fail else nullcontext():
        event.wait()
    assert event.failed() is fail
    assert found[-1]


def test_an_error_is_there_when_its_end_is_told(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that is told of the end before the error would go on with what was never copied."""
    found: list[bool] = []
    opened = Latch.open

    def looking(self: Latch) -> None:
        found.append(failed.failed())
        opened(self)

    gate = HostEvent(Lane.COMPUTE)
    failed = worker.submit(raise_oops, [gate])
    monkeypatch.setattr(Latch, "open", looking)
    gate.finish(Span(0, 0, 0))
    with pytest.raises(Oops):
        failed.wait()
    assert found == [False, True], "at the gate's end, and at the work's own"


@pytest.fixture
def short_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of up to 8 bytes are short; in other tests none is."""
    monkeypatch.setattr(thread, "SHORT_COPY", 8)


def thread_of(backend: ThreadBackend, lane: Lane, waits: Sequence[Event] = (), nbytes: int = 8) -> str:
    ran: list[str] = []
    work = lambda: ran.append(threading.current_thread().name)  # noqa: E731
    backend.submit(lane, work, waits, nbytes).wait()
    return ran.pop()


@pytest.mark.parametrize("lane", [Lane.H2D, Lane.D2H])
def test_a_short_copy_with_nothing_to_wait_for_runs_in_the_callers_thread(
    short_copies: None, backend: ThreadBackend, lane: Lane
) -> None:
    here = threading.current_thread().name
    assert thread_of(backend, lane) == here
    assert thread_of(backend, lane, nbytes=9) == f"streamer-{lane.value}"
    assert thread_of(backend, Lane.HOST) == "streamer-host"
    done = backend.submit(lane, lambda: None, (), 0)
    assert done.span() is not None, "before anybody waits"
    assert thread_of(backend, lane, [done]) == here


def test_short_copies_stay_in_the_order_of_their_lane(short_copies: None, backend: ThreadBackend) -> None:
    ran: list[int] = []
    gate = HostEvent(Lane.COMPUTE)
    waits: list[list[Event]] = [[gate], [], []]
    events = [
        backend.submit(Lane.H2D, partial(ran.append, number), each, 8) for number, each in enumerate(waits)
    ]
    before = [*ran]
    gate.finish(Span(0, 0, 0))
    events[-1].wait()
    assert (before, ran) == ([], [0, 1, 2]), "the first one has to wait, and so the others have"


def test_ctrl_c_loses_no_short_copy(short_copies: None, backend: ThreadBackend) -> None:
    ran: list[str] = []

    def interrupted() -> None:
        if not ran:
            ran.append("interrupted")
            raise KeyboardInterrupt
        ran.append(threading.current_thread().name)

    with pytest.raises(KeyboardInterrupt):
        backend.submit(Lane.H2D, interrupted, (), 8)
    backend.submit(Lane.H2D, lambda: ran.append("next"), (), 8).wait()
    assert ran == ["interrupted", "streamer-h2d", "next"]


def test_training_with_short_copies_is_plain_pytorchs(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: set[str] = set()
    copy = ThreadBackend.copy

    def copying(self: ThreadBackend, into: torch.Tensor, source: torch.Tensor) -> None:
        threads.add(threading.current_thread().name)
        copy(self, into, source)

    monkeypatch.setattr(thread, "SHORT_COPY", SHORT_COPY)
    monkeypatch.setattr(ThreadBackend, "copy", copying)
    actual = train_streamed(tiny_gpt(4), backend=ThreadBackend(poison=True), num_slots=2, steps=3)
    assert_parity(actual, train_plain(tiny_gpt(4), steps=3))
    assert threading.current_thread().name in threads
