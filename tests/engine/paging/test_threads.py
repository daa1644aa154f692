"""One model in several threads: inference is plain PyTorch's, also beside training; one thread trains."""

from __future__ import annotations

import copy
import faulthandler
import queue
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import streamer
from streamer.backends.base import Event
from streamer.backends.thread import ThreadBackend
from streamer.engine.schedule import op as ops
from streamer.engine.schedule.hazards import Hazards, Issuer
from tests.models import Layers, numbers
from tests.reference import VOCAB, one_step, random_delays, streamed, tiny_gpt

WIDTH, DEPTH = 24, 4


@pytest.fixture(autouse=True)
def threads_change_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def together(*works: Callable[[], object], seconds: float = 100) -> None:
    """Run each in a thread of its own, raise what one of them has raised, and fail if they wait for ever."""
    errors: list[BaseException] = []

    def run(work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised again below
            errors.append(error)

    threads = [threading.Thread(target=run, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds)
    if any(thread.is_alive() for thread in threads):
        faulthandler.dump_traceback(all_threads=True)
        pytest.fail("threads wait for one another")
    if errors:
        raise errors[0]


def disturbed(seed: int) -> ThreadBackend:
    return ThreadBackend(delays=random_delays(seed, seconds=0.002), poison=True)


class Layer(nn.Module):
    """Two matrices, so that a mixture of two updates is seen."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def stack() -> Layers:
    return Layers(Layer, count=DEPTH)


def forward(model: nn.Module, seed: int = 0) -> torch.Tensor:
    return model(numbers(4, WIDTH, seed=seed)).square().mean()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        one_step(model, optimizer, step, forward)


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("seed", range(2))
def test_inference_in_several_threads_is_that_of_plain_pytorch(seed: int) -> None:
    plain = tiny_gpt(DEPTH, width=16).eval()
    options = {"num_slots": seed + 1, "micro_batch_size": (None, 1, 1, None)[seed]}

    def generate(model: nn.Module, thread: int) -> torch.Tensor:
        tokens = torch.randint(0, VOCAB, (2, 4), generator=torch.Generator().manual_seed(thread))
        with torch.no_grad():
            for _ in range(5):
                tokens = torch.cat([tokens, model(tokens)[:, -1:].argmax(-1)], dim=1)
        return tokens

    with streamed(copy.deepcopy(plain), backend=disturbed(seed), **options) as model:
        found: dict[int, torch.Tensor] = {}
        logits: dict[int, torch.Tensor] = {}

        def work(thread: int) -> None:
            found[thread] = generate(model, thread)
            with torch.no_grad():
                logits[thread] = model(found[thread])

        together(*(partial(work, thread) for thread in range(2 + seed % 3)))
    with torch.no_grad():
        for thread, tokens in found.items():
            assert torch.equal(tokens, generate(plain, thread))
            assert torch.equal(logits[thread], plain(tokens))


@pytest.mark.parametrize("seed", range(3))
def test_a_layer_beside_training_has_the_weights_of_some_step(seed: int) -> None:
    steps = range(4)
    options = {
        "layers": "layers",
        "num_slots": seed + 1,
        "activations": ("recompute", "keep", "recompute+offload", "keep")[seed],
        "micro_batch_size": (None, 2, 2, None)[seed],
    }
    versions: list[nn.Module] = [stack()]
    with streamed(stack(), **options) as model:
        optimizer = streamer.AdamW(model.parameters(), lr=0.1)
        for step in steps:
            train(model, optimizer, range(step, step + 1))
            versions.append(stack())
            versions[-1].load_state_dict(weights_of(model))
    assert not equal(weights_of(versions[0]), weights_of(versions[1]))

    seen: list[tuple[int, torch.Tensor, torch.Tensor]] = []
    over = threading.Event()
    with streamed(stack(), backend=disturbed(seed), **options) as model:
        optimizer = streamer.AdamW(model.parameters(), lr=0.1)
        sampled = threading.Barrier(3, timeout=100)

        def trains() -> None:
            try:
                for step in steps:
                    sampled.wait()
                    train(model, optimizer, range(step, step + 1))
            finally:
                over.set()
                sampled.abort()

        def samples(thread: int) -> None:
            x = numbers(4, WIDTH, seed=100 + thread)
            turn = 0
            while not over.is_set():
                with torch.no_grad():
                    for index, layer in enumerate(model.layers):
                        seen.append((index, x, layer(x)))
                        x = seen[-1][2]
                x = numbers(4, WIDTH, seed=1000 * thread + (turn := turn + 1))
                if turn <= len(steps):
                    try:
                        sampled.wait()
                    except threading.BrokenBarrierError:
                        return
                streamer.synchronize(model)
                streamer.stats(model)

        together(trains, partial(samples, 1), partial(samples, 2))
        assert equal(weights_of(model), weights_of(versions[-1]))
    assert len(seen) > 2 * DEPTH
    with torch.no_grad():
        for index, x, y in seen:
            # a product of fewer rows may be another to the bit
            slices = x.split(options["micro_batch_size"] or len(x))
            layers = (version.layers[index] for version in versions)
            assert any(torch.equal(y, torch.cat([layer(part) for part in slices])) for layer in layers)


def test_a_thread_that_dies_in_a_layer_leaves_the_others_alone() -> None:
    plain = stack()

    def breaks(module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        if args[0].isnan().any():
            raise ArithmeticError("this thread dies here")

    with streamed(copy.deepcopy(plain), layers="layers", backend=disturbed(1), num_slots=2) as model:
        # inside of the layer's run
        model.layers[2].down.register_forward_pre_hook(breaks)

        def dies() -> None:
            for grad in (False, True) * 5:
                with torch.set_grad_enabled(grad), pytest.raises(ArithmeticError, match="dies here"):
                    model(torch.full((4, WIDTH), float("nan")))

        def lives(thread: int) -> None:
            with torch.no_grad():
                for turn in range(15):
                    x = numbers(4, WIDTH, seed=100 * thread + turn)
                    assert torch.equal(model(x), plain(x))

        together(dies, partial(lives, 1), partial(lives, 2))
        # what it has begun keeps nobody from training
        train(model, streamer.AdamW(model.parameters()), range(2))


AT_ONCE = "train one model at once"


InOther = Callable[[Callable[[], object]], Any]


@pytest.fixture
def in_other() -> Iterator[InOther]:
    """What does one thing after another in one other thread, and returns its result or raises its error."""
    with ThreadPoolExecutor(1) as pool:
        yield lambda work: pool.submit(work).result(timeout=100)


@pytest.mark.parametrize(
    ("does", "of_torch"), [("forward", False), ("backward", False), ("step", False), ("step", True)]
)
def test_training_in_another_thread_between_backward_and_step_is_refused(
    does: str, of_torch: bool, in_other: InOther
) -> None:
    with streamed(stack(), layers="layers") as model:
        kind = torch.optim.SGD if of_torch else streamer.AdamW
        optimizer = kind(model.parameters(), lr=0.1)
        theirs = in_other(lambda: forward(model, 1))
        forward(model).backward()
        acts = {"forward": lambda: forward(model), "backward": theirs.backward, "step": optimizer.step}
        with pytest.raises(RuntimeError, match=AT_ONCE):
            in_other(acts[does])
        optimizer.step()
        in_other(lambda: train(model, optimizer, range(1)))


def test_a_forward_while_another_threads_backward_runs_is_refused(in_other: InOther) -> None:
    with streamed(stack(), layers="layers") as model:
        x = numbers(4, WIDTH, seed=0).requires_grad_()
        loss = model.layers[1](hooked := model.layers[0](x)).sum()
        found: list[BaseException] = []

        def meanwhile(_: torch.Tensor) -> None:
            try:
                in_other(lambda: forward(model))
            except RuntimeError as error:
                found.append(error)

        hooked.register_hook(meanwhile)
        loss.backward()
        assert AT_ONCE in str(found.pop())
        model.zero_grad()
        in_other(lambda: forward(model).backward())


@pytest.mark.parametrize(("activations", "in_one"), [("recompute", True), ("keep", True), ("keep", False)])
def test_a_backward_after_the_weights_were_updated_is_refused(
    activations: str, in_one: bool, in_other: InOther
) -> None:
    with streamed(stack(), layers="layers", activations=activations) as model:
        optimizer = streamer.AdamW(model.parameters(), lr=0.1)
        loss = forward(model)
        (lambda work: work() if in_one else in_other(work))(lambda: train(model, optimizer, range(1)))
        with pytest.raises(RuntimeError, match="'layers.3' were updated since the forward"):
            loss.backward()


@pytest.mark.parametrize("activations", ["keep", "recompute+offload"])
def test_another_thread_may_take_the_training_over(activations: str, in_other: InOther) -> None:
    def loops(in_other: Callable[[Callable[[], object]], object]) -> dict[str, torch.Tensor]:
        with streamed(stack(), layers="layers", activations=activations) as model:
            optimizer = streamer.AdamW(model.parameters(), lr=0.1)
            # a forward to warm up, whose graph stays; and one whose backward comes after another's pass
            warm, early = forward(model), forward(model, 1)
            in_other(lambda: forward(model, 2))
            in_other(optimizer.zero_grad)
            early.backward()
            optimizer.zero_grad()
            in_other(lambda: train(model, optimizer, range(3)))
            train(model, optimizer, range(3, 5))
            # a forward here, its backward there
            loss = forward(model, 7)
            in_other(loss.backward)
            optimizer.step()
            optimizer.zero_grad()
            in_other(lambda: train(model, optimizer, range(5, 7)))
            assert warm.requires_grad
            return weights_of(model)

    assert equal(loops(in_other), loops(lambda work: work()))


def test_what_a_sync_waits_for_includes_what_came_while_it_waited() -> None:
    backend = ThreadBackend()
    issuer = Issuer(backend, Hazards())
    happened: queue.SimpleQueue[str] = queue.SimpleQueue()
    computing, gates = backend.computing, [threading.Event(), threading.Event()]

    def noting(waits: Sequence[Event]) -> AbstractContextManager[Event]:
        happened.put("waits")
        return computing(waits)

    backend.computing = noting  # type: ignore[method-assign]
    try:
        issuer.issue(ops.unshard(0, 0, 0), partial(gates[0].wait, 100))

        def writes() -> None:
            issuer.wait([ops.shard(0)], to_write=True)
            happened.put("writes")

        def reads() -> None:
            assert happened.get(timeout=100) == "waits"
            # another copy reads the shard that is about to be written
            issuer.issue(ops.unshard(0, 1, 0), partial(gates[1].wait, 100))
            gates[0].set()
            assert happened.get(timeout=100) == "waits"
            gates[1].set()
            assert happened.get(timeout=100) == "writes"

        together(writes, reads)
    finally:
        for gate in gates:
            gate.set()
        backend.close()
