"""Layers that run again in backward: what is kept of a run, and for how long."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from streamer.engine.layer.recompute import Owners
from streamer.planner.measure import Tracker
from tests.engine.layer.test_recomputation import (
    OFFLOADED_OR_NOT,
    Forward,
    Layer,
    Net,
    backward,
    checkpoints,
    custom_function,
    inputs,
    several,
    square,
    tanh,
)
from tests.reference import streamed


@OFFLOADED_OR_NOT
def test_what_a_hook_has_recorded_stays_readable(activations: str) -> None:
    recorded: list[torch.Tensor] = []

    def record(module: nn.Module, args: tuple[torch.Tensor], output: torch.Tensor) -> None:
        recorded.append(args[0])

    plain = Net(tanh)
    plain.blocks[1].up.register_forward_hook(record)
    model = copy.deepcopy(plain)
    plain(inputs())
    with streamed(model, layers="blocks", activations=activations) as model:
        loss = square(model, inputs())
        assert torch.equal(recorded[1], recorded[0])
        loss.backward()
        assert torch.equal(recorded[1], recorded[0])


def keeps_a_leaf(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    hidden = tanh(layer, x).detach().requires_grad_()
    return x + hidden * 0.5


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.x = x
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return 2 * gradient * ctx.x


def keeps_in_a_context(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    return layer.down(Square.apply(tanh(layer, x)))


def keeps_in_hooks(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    with saved_tensors_hooks(torch.clone, lambda copied: copied):
        hidden = tanh(layer, x)
    return layer.down(hidden)


def keeps_in_hooks_of_a_part(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    hidden, factor = layer.up(x) * 0.5, x[:, :4].sin()
    with saved_tensors_hooks(torch.clone, lambda copied: copied):
        hidden[:, :4].mul_(factor)
    return layer.down(hidden)


@pytest.mark.parametrize(
    "run",
    [
        several,
        checkpoints,
        custom_function,
        keeps_a_leaf,
        keeps_in_a_context,
        keeps_in_hooks,
        keeps_in_hooks_of_a_part,
    ],
)
def test_forward_keeps_inputs_and_nothing_else(run: Forward) -> None:
    x, count = inputs(size=64), 3
    with streamed(Net(run, layers=count), layers="blocks") as model:
        for _ in range(2):  # what is allocated once
            backward(model, x)
        gc.collect()
        with Tracker() as counted:
            after: list[int] = []
            for _ in range(3):
                before, hidden = counted.now, model(x)
                # the first of them is what the embedding returns; leaves show one number each
                numbers = counted.now - before - (count + 1) * hidden.nbytes
                assert 0 <= numbers <= count * x.element_size()
                hidden.sum().backward()
                del hidden
                after.append(counted.now)
        assert after[2] == after[1]


@OFFLOADED_OR_NOT
def test_a_retained_graph_keeps_no_more_than_it_did_before_backward(activations: str) -> None:
    x = inputs(size=64)
    with (
        streamed(Net(several, layers=6), layers="blocks", activations=activations) as model,
        Tracker() as counted,
    ):
        backward(model, x)  # what is allocated once
        loss = square(model, x)
        before = counted.now
        for _ in range(2):
            loss.backward(retain_graph=True)
            assert counted.now <= before


def test_a_retained_graph_holds_no_slot() -> None:
    slots: list[weakref.ref[torch.UntypedStorage]] = []

    def run(layer: Layer, x: torch.Tensor) -> torch.Tensor:
        slots.append(weakref.ref(layer.up.weight.untyped_storage()))
        return several(layer, x)

    with streamed(Net(run), layers="blocks") as model:
        loss = square(model, inputs())
        loss.backward(retain_graph=True)
    assert loss.grad_fn is not None
    assert [slot() for slot in slots] == [None] * 6


def test_what_hooks_hold_goes_with_backward_though_the_loss_is_there() -> None:
    held: list[weakref.ref[torch.Tensor]] = []

    def run(layer: Layer, x: torch.Tensor) -> torch.Tensor:
        hidden = tanh(layer, x)
        copied = hidden.detach().clone()
        held.append(weakref.ref(copied))
        hidden.register_hook(lambda gradient: copied * gradient)
        return layer.down(hidden)

    with streamed(Net(run), layers="blocks") as model:
        loss = square(model, inputs())
        loss.backward()
        assert [ref() for ref in held] == [None] * 6
        assert loss.grad_fn is not None


@pytest.mark.parametrize("activations", ["recompute", "recompute+offload", "keep"])
def test_a_forward_that_no_backward_follows_leaves_nothing(activations: str) -> None:
    held: list[weakref.ref[torch.UntypedStorage]] = []

    def run(layer: Layer, x: torch.Tensor) -> torch.Tensor:
        heads = layer.up(x)[None, None]
        held.append(weakref.ref(heads.untyped_storage()))
        # its graph saves its output
        return layer.down(F.scaled_dot_product_attention(heads, heads, heads)[0, 0])

    with streamed(Net(run), layers="blocks", activations=activations) as model:
        square(model, inputs())
        gc.collect()
        assert [storage() for storage in held] == [None] * 3


def test_what_a_second_run_has_brought_in_vain_goes_before_a_third() -> None:
    # TorchScript compiles what has run before, which then saves others
    gate = torch.jit.CompilationUnit("def gate(x):\n    return torch.sigmoid(x) * torch.tanh(x)\n").gate

    def run(layer: Layer, x: torch.Tensor) -> torch.Tensor:
        for _ in range(8):
            x = torch.tanh(x)
        return layer.up(gate(x))

    x = inputs(size=64)
    with streamed(Net(run, layers=1), layers="blocks") as model:
        peaks: list[int] = []
        for _ in range(2):
            loss = square(model, x)
            with Tracker() as counted:
                loss.backward()
            peaks.append(counted.peak)
    assert peaks[0] <= peaks[1]


@pytest.mark.parametrize("activations", ["recompute", "keep"])
def test_garbage_that_another_thread_collects_meanwhile(activations: str) -> None:
    """While it does, the layer gives up a view of its weights: they are none that it keeps, nor garbage."""
    ran: list[str] = []

    def run(layer: Layer, x: torch.Tensor) -> torch.Tensor:
        view = [layer.up.weight.detach()]
        has_begun, goes_on = threading.Event(), threading.Event()

        def pause(phase: str, _: Any) -> None:
            if phase == "start" and threading.current_thread() is collector:
                has_begun.set()
                assert goes_on.wait(10)

        collector = threading.Thread(target=gc.collect)
        gc.callbacks.append(pause)
        try:
            collector.start()
            assert has_begun.wait(10)
            view.clear()
            goes_on.set()
            collector.join()
        finally:
            gc.callbacks.remove(pause)
        ran.append(str(collector))
        return several(layer, x)

    x = inputs()
    expected = Net(several)
    with streamed(Net(run), layers="blocks", activations=activations) as model:
        loss = square(model, x)
        loss.backward()
        assert torch.equal(loss, square(expected, x))
    assert len(ran) >= 3


def test_garbage_makes_no_room_for_new_owners() -> None:
    slot = torch.zeros(64, dtype=torch.uint8)
    cycle: list[Any] = [slot[:8]]
    cycle.append(cycle)
    owners = Owners(slot)
    with owners:
        assert owners.more() == 0
        del cycle
        gc.collect()
        assert owners.more() == 0
        view = slot[8:]
    assert owners.more() == 1
    del view
    assert owners.more() == 0
