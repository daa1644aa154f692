"""Errors and Ctrl-C: nothing hangs, the user sees the error itself, and the next step is right."""

from __future__ import annotations

import contextlib
import copy
import operator
import os
import signal
import subprocess
import sys
import traceback
from functools import cache, partial
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from torch import nn

import streamer
from models.gpt2 import GPT
from streamer.backends.thread import ThreadBackend
from streamer.engine import unit
from streamer.engine.layer.arguments import apart
from streamer.engine.layer.layer import StreamedLayer, _go_through
from tests.models import Layer, Stack
from tests.reference import (
    History,
    assert_parity,
    gradients,
    language_loss,
    streamed,
    tiny_gpt,
    train,
    train_plain,
)


class Trouble(Exception):
    """What the tests raise."""


@cache
def gpt() -> GPT:
    return tiny_gpt(4, 16, dropout=0.1)


@cache
def undisturbed() -> History:
    return train_plain(gpt(), steps=3)


def fail_in_forward(model: nn.Module, error: BaseException) -> None:
    def hook(*_: Any) -> None:
        raise error

    with model.transformer.h[2].mlp.c_fc.register_forward_hook(hook):
        language_loss(model, 7)


def fail_in_backward(model: nn.Module, error: BaseException) -> None:
    def hook(gradient: torch.Tensor) -> None:
        raise error

    with model.transformer.h[1].mlp.register_forward_hook(lambda module, args, out: add_hook(out, hook)):
        language_loss(model, 7).backward()


def add_hook(tensor: torch.Tensor, hook: Any) -> None:
    tensor.register_hook(hook)


def fail_in_loss(model: nn.Module, error: BaseException) -> None:
    language_loss(model, 7)
    raise error


@pytest.mark.parametrize(
    ("fail", "error", "num_slots", "activations"),
    [
        (fail_in_forward, Trouble("in user code"), 1, "recompute"),
        (fail_in_forward, KeyboardInterrupt(), 2, "keep"),
        (fail_in_backward, KeyboardInterrupt(), 1, "recompute"),
        (fail_in_backward, Trouble("in user code"), 2, "keep"),
        (fail_in_loss, KeyboardInterrupt(), 2, "keep"),
    ],
)
def test_after_an_error_in_user_code_the_next_step_is_right(
    fail: Any, error: BaseException, num_slots: int, activations: str
) -> None:
    with streamed(gpt(), layers="transformer.h", num_slots=num_slots, activations=activations) as model:
        optimizer = streamer.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
        with pytest.raises(type(error)) as raised:
            fail(model, error)
        assert raised.value is error
        assert fail.__name__ in [frame.name for frame in traceback.extract_tb(raised.value.__traceback__)]
        optimizer.zero_grad()
        clip = lambda: streamer.clip_grad_norm_(model, 1.0)  # noqa: E731
        assert_parity(train(model, optimizer, clip, steps=3), undisturbed())


def test_an_error_in_a_copy_reaches_the_user_with_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken_copy(self: ThreadBackend, into: torch.Tensor, source: torch.Tensor) -> None:
        raise Trouble("in the H2D lane")

    with streamed(gpt(), layers="transformer.h") as model:
        with monkeypatch.context() as patch:
            patch.setattr(ThreadBackend, "copy", broken_copy)
            with pytest.raises(Trouble, match="in the H2D lane") as raised:
                language_loss(model, 0)
        assert "broken_copy" in [frame.name for frame in traceback.extract_tb(raised.value.__traceback__)]


def test_an_error_in_an_update_reaches_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken_update(*_: Any, **__: Any) -> None:
        raise Trouble("in the HOST lane")

    model = streamer.wrap(tiny_gpt(), device="cpu")
    optimizer = streamer.AdamW(model.parameters())
    language_loss(model, 0).backward()
    monkeypatch.setattr("streamer.optim.adamw.update_shard", broken_update)
    optimizer.step()
    with pytest.raises(Trouble) as raised:
        language_loss(model, 1)
    assert "broken_update" in [frame.name for frame in traceback.extract_tb(raised.value.__traceback__)]
    # the master may be half updated: every use of it says so, and only unwrapping by force is left
    with pytest.raises(Trouble):
        streamer.synchronize(model)
    with pytest.raises(Trouble):
        model.state_dict()
    model._streamer.close()


class Interrupt:
    """Ctrl-C before operation ``number`` of those that Python executes when function ``after`` has returned
    to its caller, as long as that does nothing but leave blocks of a unit. Set it with `sys.settrace`."""

    BLOCKS = (contextlib.__file__, unit.__file__)

    def __init__(self, after: CodeType, number: int) -> None:
        self.has_come = False
        self._after = after
        self._left = number
        self._caller: FrameType | None = None

    def __call__(self, frame: FrameType, event: str, _: Any) -> Interrupt:
        frame.f_trace_opcodes = True
        if event == "call" and self._caller is not None and frame.f_code.co_filename not in self.BLOCKS:
            self._left, self._caller = -1, None
        elif event == "return" and self._caller is None and frame.f_code is self._after:
            self._caller = frame.f_back
        elif event == "opcode" and self._caller is not None:
            self._left -= 1
            if self._left == 0:
                self.has_come = True
                raise KeyboardInterrupt
        return self


def small_gradients(model: nn.Module) -> list[torch.Tensor]:
    model(torch.ones(1, 4)).sum().backward()
    found = list(gradients(model).values())
    model.zero_grad()
    return found


@pytest.mark.parametrize(
    "after, grad", [(apart, True), (StreamedLayer._infer_on, False), (_go_through, True)]
)
def test_ctrl_c_while_a_layer_gets_its_parameters_back(after: Any, grad: bool) -> None:
    small = Stack(partial(Layer, 4), 2, width=4)
    expected, number, has_come = small_gradients(copy.deepcopy(small)), 0, True
    with streamed(small, layers="blocks") as model:
        params = list(model.parameters())
        while has_come:
            number += 3  # every third: a run for each takes long
            interrupt = Interrupt(after.__code__, number)
            with contextlib.suppress(KeyboardInterrupt), torch.set_grad_enabled(grad):
                sys.settrace(interrupt)
                try:
                    output = model(torch.ones(1, 4))
                    if grad:
                        output.sum().backward()
                finally:
                    sys.settrace(None)
            has_come = interrupt.has_come
            # before the next visit: a checkpoint may be written now
            assert all(map(operator.is_, model.parameters(), params)), f"operation {number}"
            model.zero_grad()
            assert all(map(torch.equal, small_gradients(model), expected)), f"operation {number}"
    assert number > 60


CHILD = """
import sys, torch
sys.path.insert(0, {root!r})
import streamer
model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3)))
streamer.wrap(model, layers="", device="cpu")
optimizer = streamer.AdamW(model.parameters())
step = 0
while True:
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    step += 1
    print(step, flush=True)
"""


def test_ctrl_c_ends_a_run_at_once() -> None:
    root = str(Path(__file__).parents[3])
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD.format(root=root)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONFAULTHANDLER": "1"},
    )
    assert child.stdout is not None
    try:
        while int(child.stdout.readline()) < 3:
            pass
        child.send_signal(signal.SIGINT)
        _, stderr = child.communicate(timeout=120)
    finally:
        child.kill()
    assert child.returncode == -signal.SIGINT
    assert stderr.rstrip().endswith("KeyboardInterrupt")
