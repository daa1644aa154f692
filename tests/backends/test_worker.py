"""A lane as a thread: order, errors, and what it leaves behind. conftest.py checks that no thread is left."""

from __future__ import annotations

import threading
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch

from streamer.backends import thread
from streamer.backends.base import Event, Lane, Latch, Span
from streamer.backends.thread import HostEvent, ThreadBackend, Worker
from tests.conftest import SHORT_COPY
from tests.reference import POLICIES, assert_parity, tiny_gpt, train_plain, train_streamed

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


def test_each_lane_is_one_thread_and_compute_the_callers(backend: ThreadBackend) -> None:
    names: dict[Lane, str] = {}

    def note(lane: Lane) -> Callable[[], None]:
        return lambda: names.update({lane: threading.current_thread().name})

    for lane in Lane:
        event = backend.submit(lane, note(lane), (), 0)
        event.wait()
        assert event.lane is lane
        assert event.failed() is False
    assert names == {
        Lane.COMPUTE: threading.current_thread().name,
        Lane.H2D: "streamer-h2d",
        Lane.D2H: "streamer-d2h",
        Lane.HOST: "streamer-host",
        Lane.DISK_READ: "streamer-disk_read",
        Lane.DISK_WRITE: "streamer-disk_write",
        Lane.COLLECTIVE: "streamer-collective",
        Lane.BARRIER: "streamer-barrier",
    }


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


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, MemoryError])
def test_no_error_ends_the_lane(worker: Worker, error: type[BaseException]) -> None:
    def work() -> None:
        raise error

    failed = worker.submit(work, ())
    ran: list[int] = []
    worker.submit(lambda: ran.append(1), ()).wait()
    assert ran == [1]
    with pytest.raises(error):
        failed.wait()


def test_close_runs_what_is_queued() -> None:
    worker = Worker(Lane.HOST)
    ran: list[int] = []
    for i in range(50):
        worker.submit(lambda i=i: ran.append(i), ())  # type: ignore[misc]
    Worker.close_all([worker])
    assert ran == list(range(50))


def test_close_after_an_error_and_from_its_own_thread(worker: Worker) -> None:
    worker.submit(raise_oops, ())
    # as when a task drops the last reference to a model
    worker.submit(lambda: Worker.close_all([worker]), ()).wait()


def test_work_for_a_closed_lane_is_refused() -> None:
    """Work that is queued there would never run, and a thread that waits for it would hang for ever."""
    worker = Worker(Lane.HOST)
    Worker.close_all([worker])
    with pytest.raises(RuntimeError, match="closed"):
        worker.submit(lambda: None, ())


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


@pytest.mark.parametrize(
    "options", [{"delays": {Lane.H2D: lambda: 0.0}}, {"bytes_per_second": {Lane.H2D: 1e9}}]
)
def test_a_short_copy_on_a_slow_lane_does_not(short_copies: None, options: Any) -> None:
    backend = ThreadBackend(**options)
    try:
        assert thread_of(backend, Lane.H2D) == "streamer-h2d"
        assert thread_of(backend, Lane.D2H) == threading.current_thread().name
    finally:
        backend.close()


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


@pytest.mark.parametrize("by_its_wait", [False, True])
def test_what_a_short_copy_raises_is_raised_by_who_waits(
    short_copies: None, backend: ThreadBackend, by_its_wait: bool
) -> None:
    failed = backend.submit(Lane.D2H, raise_oops, (), 8)
    if by_its_wait:
        failed = backend.submit(Lane.H2D, lambda: None, [failed], 8)
    for _ in range(2):
        with pytest.raises(Oops):
            failed.wait()
    assert failed.failed() and failed.span() is None


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


@POLICIES
def test_training_with_short_copies_is_plain_pytorchs(
    monkeypatch: pytest.MonkeyPatch, activations: str
) -> None:
    threads: set[str] = set()
    copy = ThreadBackend.copy

    def copying(self: ThreadBackend, into: torch.Tensor, source: torch.Tensor) -> None:
        threads.add(threading.current_thread().name)
        copy(self, into, source)

    monkeypatch.setattr(thread, "SHORT_COPY", SHORT_COPY)
    monkeypatch.setattr(ThreadBackend, "copy", copying)
    options: dict[str, Any] = {"layers": "transformer.h", "activations": activations}
    actual = train_streamed(tiny_gpt(4), backend=ThreadBackend(poison=True), num_slots=2, **options)
    assert_parity(actual, train_plain(tiny_gpt(4)))
    assert threading.current_thread().name in threads


def test_delay_comes_before_the_work_and_counts_as_waiting() -> None:
    delays: list[float] = []

    def delay() -> float:
        delays.append(0.002)
        return 0.002

    backend = ThreadBackend(delays={Lane.H2D: delay, Lane.COMPUTE: delay})
    spans = [backend.submit(lane, lambda: None, (), 0) for lane in Lane]
    for event in spans:
        event.wait()
    backend.close()
    assert len(delays) == 2, "one piece of work on each of the two lanes that are delayed"
    for event in spans:
        span = event.span()
        assert span is not None
        assert event.lane not in (Lane.H2D, Lane.COMPUTE) or span.start - span.ready >= 0.002


def test_buffers_are_zeroed_and_copied(backend: ThreadBackend) -> None:
    source, into = backend.host_buffer(5), backend.device_buffer(5)
    assert [(b.dtype, b.tolist(), b.device.type) for b in (source, into)] == [
        (torch.uint8, [0] * 5, "cpu")
    ] * 2
    source.copy_(torch.arange(5))
    backend.copy(into, source)
    assert into.tolist() == [0, 1, 2, 3, 4]
    assert into.data_ptr() != source.data_ptr()
