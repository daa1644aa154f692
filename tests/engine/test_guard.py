"""Whatever reads or writes a wrapped model's parameters, gradients or optimizer state needs no line more than
with a plain model. [Note: what the user sees]"""

from __future__ import annotations

import copy
import io
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import get_total_norm, parameters_to_vector

import streamer
from streamer.backends.base import Lane
from streamer.backends.thread import ThreadBackend
from streamer.engine.executor import Executor
from streamer.engine.schedule.op import Op, OpKind
from tests.reference import assert_trains_alike, gradients, language_loss, one_step, streamed, tiny_gpt

LAYERS = 3
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


gpt = partial(tiny_gpt, LAYERS, width=16)


def late_updates() -> ThreadBackend:
    """Each update begins so late that whoever does not wait for it reads old weights."""
    return ThreadBackend(delays={Lane.HOST: lambda: 0.005}, poison=True)


@contextmanager
def training(
    dtype: torch.dtype | None = None, **options: Any
) -> Iterator[tuple[nn.Module, streamer.AdamW, list[Any]]]:
    """A wrapped model whose updates are late, its optimizer, and a list of its parameters from before."""
    model = gpt()
    params = list(model.parameters())
    streamer.wrap(model, backend=late_updates(), dtype=dtype, **options)
    try:
        yield model, streamer.AdamW(model.parameters(), lr=0.1), params
    finally:
        streamer.unwrap(model)


def values(tensors: Any) -> list[Any]:
    return [tensor.tolist() for tensor in tensors]


def saved(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    file = io.BytesIO()
    torch.save([tensor.detach() for tensor in tensors], file)
    file.seek(0)
    loaded: list[torch.Tensor] = torch.load(file)
    return loaded


def lerped(params: list[torch.Tensor]) -> list[torch.Tensor]:
    averages = [torch.zeros_like(param) for param in params]
    torch._foreach_lerp_(averages, params, 0.5)
    return averages


def swapped_in(params: list[torch.Tensor]) -> list[torch.Tensor]:
    return [torch.zeros_like(param).copy_(param) for param in params]


READERS: dict[str, Callable[[list[Any]], Any]] = {
    "cat": lambda params: torch.cat([param.detach().flatten() for param in params]).tolist(),
    "vector": lambda params: parameters_to_vector(params).tolist(),
    "data": lambda params: values(param.data for param in params),
    "numpy": lambda params: [param.detach().numpy().tolist() for param in params],
    "asarray": lambda params: [np.asarray(param.detach()).tolist() for param in params],
    "tolist": values,
    "item": lambda params: [param.flatten()[0].item() for param in params],
    "clone": lambda params: values(param.clone() for param in params),
    "deepcopy": lambda params: values(copy.deepcopy(param) for param in params),
    "cast": lambda params: values(param.to(torch.float64) for param in params),
    "foreach norm": lambda params: values(torch._foreach_norm(params)),
    "foreach lerp": lambda params: values(lerped(params)),
    "copied": lambda params: values(swapped_in(params)),
    "total norm": lambda params: get_total_norm(params).item(),
    "saved": lambda params: values(saved(params)),
    "compiled": lambda params: values(torch.compile(lambda ps: [p * 2 for p in ps], backend="eager")(params)),
    "text": lambda params: [repr(param) for param in params],
    "dlpack": lambda params: [np.from_dlpack(param.detach()).tolist() for param in params],
}


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
@pytest.mark.parametrize("name", READERS)
@torch.no_grad()
def test_what_is_read_after_a_step_is_the_finished_update(name: str) -> None:
    read = READERS[name]
    with training() as (model, optimizer, params):
        for step in range(2):
            with torch.enable_grad():
                one_step(model, optimizer, step)
            found = read(params)
            streamer.synchronize(model)
            assert found == read(params)


@pytest.mark.parametrize("update", ["step", "backward"])
@torch.no_grad()
def test_what_shares_memory_with_a_parameter_is_never_old(update: str) -> None:
    with training(update=update) as (model, optimizer, params):
        shown = [param.data for param in params[: len(params) // 2]]
        shown += [torch.from_numpy(param.detach().numpy()) for param in params[len(params) // 2 :]]
        for step in range(2):
            with torch.enable_grad():
                language_loss(model, step).backward()
            optimizer.step()
            found = values(shown)
            streamer.synchronize(model)
            assert found == values(params)
            optimizer.zero_grad()


def test_a_read_waits_for_its_layer_alone() -> None:
    may_end, updates = threading.Event(), []

    def hold_the_last() -> float:
        updates.append(None)
        if len(updates) > LAYERS + before:
            may_end.wait()
        return 0.0

    before = 1 << 30
    model = gpt()
    streamer.wrap(model, backend=ThreadBackend(delays={Lane.HOST: hold_the_last}))
    optimizer = streamer.AdamW(model.parameters())
    language_loss(model, 0).backward()
    streamer.synchronize(model)
    before = len(updates)  # of the step the root's update comes first, then those of the layers
    optimizer.step()
    weight = model.transformer.h[LAYERS - 2].mlp.c_fc.weight
    found = weight.tolist()  # would never return if it waited for the last layer's
    may_end.set()
    streamer.synchronize(model)
    assert found == weight.tolist()
    streamer.unwrap(model)


def test_a_loop_that_looks_at_nothing_waits_for_nothing(
    issued: list[Op], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    with streamed(gpt(), num_slots=LAYERS) as model:
        optimizer = streamer.AdamW(model.parameters())
        monkeypatch.setattr(Executor, "await_update", lambda self, unit: asked.append(unit.index))
        for step in range(3):
            language_loss(model, step).backward()
            streamer.clip_grad_norm_(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            # what tells of parameters and gradients does not touch them
            assert all(p.requires_grad and p.numel() and p.grad is None for p in model.parameters())
        assert set(asked) <= {-1}, "the root's parameters are used by the model's own forward"
        streamer.synchronize(model)
        copied = [op.unit for op in issued if op.kind is OpKind.UNSHARD and op.unit >= 0]
        assert len(copied) == LAYERS * (1 + 3), "at first and after each update"


WRITERS: dict[str, Callable[[nn.Parameter], object]] = {
    "data": lambda param: param.data.mul_(0.5).clamp_(-0.1, 0.1),
    "data of a part": lambda param: param.data[0].zero_(),
    "numpy": lambda param: np.multiply(param.detach().numpy(), 0.5, out=param.detach().numpy()),
    "dlpack": lambda param: torch.from_dlpack(param.detach()).data.mul_(0.5),
    "in place": lambda param: param.mul_(0.5),
    "storage": lambda param: param.untyped_storage().copy_(param.detach().mul(0.5).untyped_storage()),
}
MOMENTS = ("before forward", "before backward", "before step", "after step", "after all")
#: What a graph needs, PyTorch refuses to write in place before backward.
WRITES = [("data", when, slots) for when, slots in zip(MOMENTS, (2, 2, LAYERS, LAYERS, LAYERS), strict=True)]
WRITES += [(how, "after step", LAYERS) for how in WRITERS if how != "data"]
WRITES += [("in place", "before step", 2), ("storage", "before backward", LAYERS)]


@pytest.mark.parametrize(("how", "when", "num_slots"), WRITES)
def test_what_is_written_is_what_runs(how: str, when: str, num_slots: int) -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, clip: object) -> list[float]:
        def write(now: str) -> None:
            if now == when:
                with torch.no_grad():
                    for param in model.parameters():
                        WRITERS[how](param)

        losses = []
        for step in range(3):
            write("before forward")
            loss = language_loss(model, step)
            write("before backward")
            loss.backward()
            write("before step")
            optimizer.step()
            write("after step")
            optimizer.zero_grad()
            losses.append(loss.item())
            with torch.no_grad():  # lets the layers come to rest in their slots
                language_loss(model, step)
            write("after all")
        return losses

    options = {"num_slots": num_slots, "activations": "keep", "backend": late_updates()}
    # eps is so large that rounding errors are not blown up
    assert_trains_alike(gpt(), loop, options=options, lr=1e-2, eps=1.0)


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
@torch.no_grad()
def test_weights_that_are_exchanged_for_others_and_put_back_lose_nothing(dtype: torch.dtype) -> None:
    """As averaged weights are for an evaluation."""

    def run(*, exchange: bool) -> list[Any]:
        with training(dtype) as (model, optimizer, params):
            for step in range(3):
                with torch.enable_grad():
                    one_step(model, optimizer, step)
                if exchange:
                    kept = [param.data.clone() for param in params]
                    for param in params:
                        param.data.copy_(torch.ones_like(param))
                    assert language_loss(model, 0).item() == pytest.approx(np.log(64), rel=1e-2)
                    for param, value in zip(params, kept, strict=True):
                        param.data.copy_(value)
            exact = [param.tolist() for param in copy.deepcopy(model).parameters()]
        return exact

    assert run(exchange=True) == run(exchange=False)


def test_gradients_are_clipped_when_they_are_read_and_may_be_written_then() -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, clip: Callable[[float], object]) -> Any:
        language_loss(model, 0).backward()
        clip(1e-2)
        found = list(gradients(model).values())
        with torch.no_grad():
            for param in model.parameters():
                param.grad.add_(0.01)
                param.grad.data.mul_(2.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        language_loss(model, 1).backward()
        optimizer.step()
        return found

    options = {"backend": late_updates()}
    assert_trains_alike(gpt(), loop, options=options, lr=1e-2, eps=1.0)


def test_gradients_are_there_in_a_backward_and_after_one_that_fails() -> None:
    """In a hook, which ends the last of several backwards with an error."""
    backwards = 2
    late = ThreadBackend(delays={Lane.D2H: lambda: 0.01, Lane.HOST: lambda: 0.01})

    def use(model: nn.Module) -> list[Any]:
        language_loss(model, 0).backward()
        model.zero_grad()
        seen: list[Any] = []

        def look(_: torch.Tensor) -> None:
            seen.append(model.transformer.h[1].mlp.c_fc.weight.grad.clone())
            if len(seen) == backwards:
                raise ValueError("no gradient")

        model.transformer.h[0].register_forward_hook(lambda module, args, out: hook_on(out, look))
        for step in range(1, backwards):
            language_loss(model, step).backward()
        with pytest.raises(ValueError, match="no gradient"):
            language_loss(model, backwards).backward()
        return [*seen, *gradients(model).values()]

    expected = use(gpt())
    with streamed(gpt(), backend=late) as model:
        torch.testing.assert_close(use(model), expected)


def hook_on(tensor: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> None:
    tensor.register_hook(hook)


@torch.no_grad()
def test_optimizer_state_that_is_read_is_that_of_the_finished_update() -> None:
    with training() as (model, optimizer, params):
        kept = None
        for step in range(2):
            with torch.enable_grad():
                one_step(model, optimizer, step)
            shown = [tensor for param in params for tensor in optimizer.state[param].values()]
            found = values(shown if kept is None else kept)
            streamer.synchronize(model)
            assert found == values(shown)
            kept = shown
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        file.seek(0)
        loaded = torch.load(file, weights_only=True)
        assert loaded["state"][0]["exp_avg"].tolist() == optimizer.state[params[0]]["exp_avg"].tolist()


class Mine(torch.Tensor):
    """A subclass of the user's."""


@torch.no_grad()
def test_parameters_are_plain_ones_to_everybody_else() -> None:
    with training() as (model, optimizer, params):
        one_step_types = {type(param).__name__ for param in params}
        assert one_step_types == {"Parameter"} and all(isinstance(p, nn.Parameter) for p in params)
        weight = model.lm_head.weight
        mine = torch.ones(2, weight.shape[1]).as_subclass(Mine)
        assert type(torch.nn.functional.linear(mine, weight)) is Mine
        assert type(weight.data) is type(weight.detach()) is type(weight + 1) is torch.Tensor
        assert type(copy.deepcopy(weight)) is type(nn.Parameter(weight.data)) is nn.Parameter
        assert {type(param) for param in copy.deepcopy(model).parameters()} == {nn.Parameter}
    assert {type(param) for param in params} == {nn.Parameter}


class Parts(nn.Module):
    """Layers of which a forward may call one alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: torch.Tensor, only: int | None = None) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            if only in (None, number):
                x = layer(x)
        return x


@pytest.mark.parametrize("update", ["step", "backward"])
def test_what_was_written_unseen_runs_though_other_layers_train_in_between(update: str) -> None:
    outputs = []
    for is_streamed in (False, True):
        model, x = Parts(), torch.ones(1, 4)
        if is_streamed:
            # as many slots as layers: all that is not copied anew stays
            streamer.wrap(model, layers="layers", device="cpu", num_slots=2, update=update)
        optimizer = (streamer if is_streamed else torch.optim).AdamW(model.parameters(), lr=0.0)
        for only in (None, 1):
            model(x, only).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if only is None:
                model.layers[0].weight.data.mul_(2.0)
        outputs.append(model(x).tolist())
        if is_streamed:
            streamer.unwrap(model)
    assert outputs[0] == outputs[1]
