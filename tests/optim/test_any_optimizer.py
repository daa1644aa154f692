"""Optimizers of PyTorch on a wrapped model take the steps of one ordinary instance over fp32 masters."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

import streamer
from streamer.backends.base import Lane
from streamer.backends.thread import ThreadBackend
from streamer.optim.replay.probe import way_of
from streamer.optim.replay.shadow import CoupledError, same
from streamer.optim.replay.step import Call, Way
from tests.on_disk import disks
from tests.optim.masters import (
    Make,
    assert_same_state,
    clipped,
    master,
    masters,
    take_gradients,
    train_both,
    with_and_without_decay,
)
from tests.optim.optimizers import Sum
from tests.reference import in_turn, language_loss, random_delays, streamed, tiny_gpt

pytorch_optimizer = pytest.importorskip("pytorch_optimizer", reason="pip install pytorch-optimizer")
schedulefree = pytest.importorskip("schedulefree", reason="pip install schedulefree")

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

#: What is not exact to the bit on 16-bit weights: our kernel rounds less often.
TOLERANCE = {"AdamW": 1e-6, "Adagrad": 1e-6, "RMSprop plain": 1e-6}
OPTIMIZERS: dict[str, Make] = {
    "Adafactor": partial(torch.optim.Adafactor, lr=1e-2),
    "Adagrad": partial(torch.optim.Adagrad, lr=1e-2, initial_accumulator_value=0.1),
    "Adam amsgrad": partial(torch.optim.Adam, lr=1e-3, foreach=True, amsgrad=True),
    "AdamW": partial(torch.optim.AdamW, lr=1e-3, fused=True),
    "CAME": partial(pytorch_optimizer.CAME, lr=1e-3),
    "Lion": partial(streamer.Lion, lr=1e-3),
    "Muon": partial(torch.optim.Muon, lr=1e-3),
    "RMSprop": partial(torch.optim.RMSprop, lr=1e-3, momentum=0.9),
    "RMSprop plain": partial(torch.optim.RMSprop, lr=1e-3),
    "RAdam": partial(torch.optim.RAdam, lr=torch.tensor(1e-3)),
    "SGD nesterov": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "SGD maximize": partial(torch.optim.SGD, lr=1e-3, maximize=True),
    "schedule-free": partial(schedulefree.AdamWScheduleFree, lr=1e-3),
    "SOAP": partial(pytorch_optimizer.SOAP, lr=1e-3, precondition_frequency=2),
    "Prodigy": partial(pytorch_optimizer.Prodigy, lr=1.0),  # sums over all parameters, in a loop
    "AdaGC": partial(pytorch_optimizer.AdaGC, lr=1e-3),  # looks at all parameters together
}


@contextmanager
def model_in(dtype: torch.dtype, **options: Any) -> Iterator[nn.Module]:
    with streamed(tiny_gpt(layers=2), layers="transformer.h", dtype=dtype, **options) as model:
        yield model


def params_for(name: str, model: nn.Module) -> list[nn.Parameter]:
    """All parameters, or matrices alone for an optimizer that takes no others."""
    return [param for param in model.parameters() if name != "Muon" or param.dim() == 2]


def in_training(optimizer: Optimizer) -> Optimizer:
    if hasattr(optimizer, "train"):  # schedule-free
        optimizer.train()
    return optimizer


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, BF16) for name in OPTIMIZERS), *((name, FP32) for name in [*OPTIMIZERS][::2])],
)
def test_steps_are_those_of_an_ordinary_instance(name: str, dtype: torch.dtype) -> None:
    """To the bit over 10 steps, with groups, clipping and a schedule; the state takes the planned bytes."""
    with model_in(dtype) as model:
        params = params_for(name, model)
        copies = masters(params)
        kind = OPTIMIZERS[name]
        mine = in_training(
            streamer.Optimizer(kind.func, with_and_without_decay(params), **kind.keywords)  # type: ignore[attr-defined]
        )
        plain = in_training(kind(with_and_without_decay(copies)))
        schedules = [torch.optim.lr_scheduler.ExponentialLR(each, 0.9) for each in (mine, plain)]
        for step in range(10):
            clip = partial(clipped, max_norm=0.5)
            train_both(model, params, mine, plain, copies, steps=1, first=step, clip=clip)
            for schedule in schedules:
                schedule.step()
        assert_same_state(mine, plain, tolerance=0.0 if dtype == FP32 else TOLERANCE.get(name, 0.0))
        tensors = [each for each in tree_leaves(dict(mine.state)) if isinstance(each, torch.Tensor)]
        held = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}
        assert streamer.stats(model).host_bytes.get("optimizer state", 0) == sum(held.values())


def assert_alike(
    dtype: torch.dtype, make: Make, *, steps: int = 4, use: Callable[..., None] = train_both, **options: Any
) -> None:
    """``use``, a loop, leaves what it leaves with an ordinary optimizer over copies of the masters."""
    with model_in(dtype, **options) as model:
        params = [*model.parameters()]
        copies = masters(params)
        mine, plain = make(params), make(copies)
        use(model, params, mine, plain, copies, steps=steps)
        assert_same_state(mine, plain)


@pytest.mark.parametrize(
    ("name", "dtype"), in_turn(["RMSprop", "SGD nesterov", "Prodigy", "AdaGC"] * 2, [BF16, FP16, FP32])
)
def test_an_optimizer_needs_no_other_line(name: str, dtype: torch.dtype) -> None:
    assert_alike(dtype, OPTIMIZERS[name])


@pytest.mark.parametrize(("name", "seed"), [("RMSprop", 0), ("Prodigy", 1)])
def test_delays_change_nothing(name: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Updates are hidden behind forwards that wait for them, whatever lane is late."""
    made = ThreadBackend.__init__

    def late(self: ThreadBackend, *args: Any, **given: Any) -> None:
        made(self, *args, **{**given, "delays": random_delays(seed), "poison": True})

    monkeypatch.setattr(ThreadBackend, "__init__", late)
    assert_alike(BF16, OPTIMIZERS[name], num_slots=2)


def test_gradients_of_several_backwards_are_summed_in_fp32() -> None:
    def use(model: nn.Module, params: Any, mine: Optimizer, plain: Optimizer, copies: Any, **_: Any) -> None:
        for step in range(3):
            language_loss(model, 10 + step).backward()
            train_both(model, params, mine, plain, copies, steps=1, first=step)

    assert_alike(BF16, OPTIMIZERS["RMSprop"], use=use)


def test_parameters_without_a_gradient_keep_their_state() -> None:
    def use(model: nn.Module, params: Any, mine: Optimizer, plain: Optimizer, copies: Any, **_: Any) -> None:
        train_both(model, params, mine, plain, copies, steps=1)
        for frozen in params[3:9]:
            frozen.requires_grad_(False)
        train_both(model, params, mine, plain, copies, steps=2)

    assert_alike(BF16, OPTIMIZERS["RMSprop"], use=use)


@pytest.mark.parametrize("kind", [partial(torch.optim.Adamax, lr=1e-2), partial(Sum, lr=1e-2, momentum=0.9)])
def test_parameters_of_no_wrapped_model_take_part(kind: Any) -> None:
    """As those of a probe on the side, which autograd trains on its own, also where they alone have
    gradients."""
    with model_in(BF16) as model:
        params = [*model.parameters()]
        aside, other = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
        mine = kind([*params, aside])
        copies = masters(params)
        plain = kind([*copies, other])
        for step in range(3):
            aside.grad = torch.full((3,), float(step))
            other.grad = aside.grad.clone()
            train_both(model, params, mine, plain, copies, steps=1, first=step)
        for copy in copies:
            copy.grad = None
        mine.step()
        plain.step()
        assert torch.equal(aside, other)
        assert same(mine.state[aside], plain.state[other])


def test_a_closure_runs_once_and_its_loss_comes_back() -> None:
    with model_in(BF16) as model:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        calls = []

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = language_loss(model, 0)
            loss.backward()
            calls.append(loss.item())
            return loss

        before = master(next(model.parameters()))
        assert optimizer.step(closure).item() == calls[0]
        assert len(calls) == 1
        assert not torch.equal(before, master(next(model.parameters())))


def test_groups_can_be_added() -> None:
    def use(model: nn.Module, params: Any, mine: Optimizer, plain: Optimizer, copies: Any, **_: Any) -> None:
        train_both(model, params, mine, plain, copies, steps=2)
        for optimizer, of in ((mine, params), (plain, copies)):
            optimizer.add_param_group({"params": of[4:], "lr": 1e-2})
        train_both(model, params, mine, plain, copies, steps=2)

    assert_alike(BF16, lambda params: torch.optim.RMSprop(params[:4], lr=1e-3, momentum=0.9), use=use)


@pytest.mark.parametrize("fused", [False, True])
def test_a_grad_scaler_takes_its_scale_out_and_skips_steps_that_overflow(fused: bool) -> None:
    def use(model: nn.Module, params: Any, mine: Optimizer, plain: Optimizer, copies: Any, **_: Any) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**18, growth_interval=1)
        for step in range(4):
            torch.manual_seed(step)
            scaler.scale(language_loss(model, step)).backward()
            overflows = any(not p.grad.isfinite().all() for p in params)
            take_gradients(copies, params, 1 / scaler.get_scale())
            scaler.step(mine)
            scaler.update()
            if not overflows:
                plain.step()
            model.zero_grad()

    assert_alike(FP16, partial(torch.optim.Adam, lr=1e-3, amsgrad=True, fused=fused), use=use)


def test_layers_are_updated_in_backward() -> None:
    """With ``update="backward"``, as by a step after it."""
    found = []
    for update in ("step", "backward"):
        with model_in(BF16, update=update) as model:
            params = [*model.parameters()]
            optimizer = torch.optim.RMSprop(with_and_without_decay(params), lr=1e-3, momentum=0.9)
            for step in range(3):
                torch.manual_seed(step)
                language_loss(model, step).backward()
                optimizer.step()
                optimizer.zero_grad()
            found.append([master(param) for param in params])
    assert all(map(torch.equal, *found))


def test_schedule_free_weights_are_averaged_for_evaluation() -> None:
    def use(model: nn.Module, params: Any, mine: Any, plain: Any, copies: Any, **_: Any) -> None:
        for optimizer in (mine, plain):
            optimizer.train()
        train_both(model, params, mine, plain, copies, steps=3)
        for optimizer in (mine, plain):
            optimizer.eval()
        assert_same_state(mine, plain)
        for optimizer in (mine, plain):
            optimizer.train()
        train_both(model, params, mine, plain, copies, steps=2)

    assert_alike(BF16, OPTIMIZERS["schedule-free"], use=use)


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_state_dicts_go_to_plain_optimizers_and_back(dtype: torch.dtype) -> None:
    make = OPTIMIZERS["RMSprop"]
    with model_in(dtype) as model:
        params = [*model.parameters()]
        copies = masters(params)
        mine, plain = make(params), make(copies)
        train_both(model, params, mine, plain, copies, steps=2)
        plain.load_state_dict(copy.deepcopy(mine.state_dict()))
        again = make(params)
        again.load_state_dict(copy.deepcopy(plain.state_dict()))
        train_both(model, params, again, plain, copies, steps=2, first=2)
        assert_same_state(again, plain)
        with pytest.raises(ValueError, match="different number of parameter groups"):
            again.load_state_dict(torch.optim.SGD(with_and_without_decay(copies)).state_dict())
        train_both(model, params, again, plain, copies, steps=1, first=4)
        assert_same_state(again, plain)


def test_reading_the_state_waits_for_the_update() -> None:
    """With updates that are late by half a second."""
    with model_in(BF16) as model:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        executor = model._streamer.executor
        param = next(model.transformer.h[1].parameters())
        language_loss(model, 0).backward()
        gradient = param.grad.clone().float()
        held = torch.zeros(1)

        def late() -> None:
            torch.manual_seed(0)
            for _ in range(50):
                held.add_(torch.randn(64, 64).mm(torch.randn(64, 64)).sum() * 0)

        executor.backend.submit(Lane.HOST, late, (), 0)
        optimizer.step()
        assert torch.equal(optimizer.state[param]["momentum_buffer"], gradient)


# what is refused


def lbfgs(params: Any) -> Optimizer:
    return torch.optim.LBFGS([*params], lr=0.1, max_iter=2)


def test_an_optimizer_that_holds_parameters_needs_fp32_weights() -> None:
    def closure(model: nn.Module, optimizer: Optimizer) -> torch.Tensor:
        optimizer.zero_grad()
        loss = language_loss(model, 0)
        loss.backward()
        return loss

    with model_in(BF16) as model:
        optimizer = lbfgs(model.parameters())
        before = master(next(model.parameters()))
        with pytest.raises(RuntimeError, match=r"LBFGS cannot update the fp32 masters.*dtype=torch\.float32"):
            optimizer.step(lambda: closure(model, optimizer))
        assert torch.equal(before, master(next(model.parameters())))
    plain = tiny_gpt(layers=2)
    with model_in(FP32) as model:
        for each in (model, plain):
            optimizer = lbfgs(each.parameters())
            optimizer.step(partial(closure, each, optimizer))
        for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(master(mine), other.detach(), rtol=1e-5, atol=1e-6)


class Counting(torch.optim.SGD):
    """Counts the gradients that it has seen, in a group: by parts it would count otherwise."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["seen"] = group.get("seen", 0) + sum(p.grad is not None for p in group["params"])
            group["lr"] = 0.1 / group["seen"]
        return super().step(closure)


class Random(torch.optim.SGD):
    """Adds noise."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(torch.randn(p.shape), alpha=1e-3)
        return super().step(closure)


@pytest.mark.parametrize(
    ("kind", "way"),
    [
        (torch.optim.SGD, Way.PARTS),
        (torch.optim.RMSprop, Way.PARTS),
        (pytorch_optimizer.Prodigy, Way.PAGED),
        (Counting, Way.WHOLE),
        (Sum, Way.WHOLE),
        (Random, Way.WHOLE),
    ],
)
def test_the_probe_finds_how_steps_are_exact(kind: Any, way: Way) -> None:
    params = [nn.Parameter(torch.randn(shape)) for shape in [(64, 32), (64,), (32, 64), (7,)]]
    random = torch.get_rng_state()
    optimizer = kind(params, lr=0.1)
    assert way_of(optimizer, Call()) is way
    assert torch.equal(torch.get_rng_state(), random)
    assert not optimizer.state


@pytest.mark.parametrize("kind", [Counting, Sum])
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_an_optimizer_that_looks_at_all_parameters_is_exact(kind: Any, dtype: torch.dtype) -> None:
    assert_alike(dtype, partial(kind, lr=0.1, momentum=0.9))


def two_models() -> Optimizer:
    with model_in(BF16) as one, model_in(BF16) as other:
        return torch.optim.SGD([*one.parameters(), *other.parameters()], lr=0.1)


def twice(kind: Make = torch.optim.SGD) -> Optimizer:
    with model_in(BF16) as model, pytest.warns(UserWarning, match="duplicate parameters"):
        param = next(model.parameters())
        return kind([param, param], lr=0.1)


def view() -> Optimizer:
    with model_in(FP32) as model:
        return torch.optim.SGD([nn.Parameter(next(model.transformer.h.parameters()).data.view(-1))], lr=0.1)


def made_before() -> Optimizer:
    plain = tiny_gpt(layers=2)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    model = streamer.wrap(plain, layers="transformer.h", device="cpu")
    try:
        optimizer.step()
    finally:
        streamer.unwrap(model)
    return optimizer


def updates_in_backward() -> Optimizer:
    with model_in(BF16, update="backward") as model:
        optimizer = pytorch_optimizer.Prodigy(model.parameters())
        language_loss(model, 0).backward()
        return optimizer


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (two_models, ValueError, "parameters of two wrapped models: create one for each"),
        (twice, ValueError, "in the optimizer twice"),
        (partial(twice, streamer.AdamW), ValueError, "in the optimizer twice"),
        (
            view,
            ValueError,
            "shares the memory of a wrapped model: pass the optimizer the model's own parameters",
        ),
        (made_before, RuntimeError, "created before streamer.wrap"),
        (updates_in_backward, RuntimeError, "looks at all parameters together.*update='step'"),
    ],
)
def test_bad_input_is_one_line(make: Callable[[], Optimizer], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)


class Late(torch.optim.SGD):
    """Sets an option from single parameters, but not from those as small as in the probe."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            if any(p.grad is not None and p.numel() > 1000 for p in group["params"]):
                group["lr"] = group["lr"] / 2
        return super().step(closure)


def test_an_option_set_from_single_parameters_is_an_error_in_training() -> None:
    """Where the probe has not found it. The masters stay as they are."""
    model = streamer.wrap(tiny_gpt(layers=2), layers="transformer.h", device="cpu", dtype=BF16)
    params = [*model.parameters()]
    before = masters(params)
    optimizer = Late(params, lr=0.1)
    language_loss(model, 0).backward()
    optimizer.step()
    with pytest.raises(CoupledError, match="it sets lr from single parameters"):
        streamer.synchronize(model)
    with pytest.warns(UserWarning, match="it sets lr from single parameters"):
        plain = streamer.unwrap(model)
    large = [each for each in zip(plain.parameters(), before, strict=True) if each[1].numel() > 1000]
    assert all(torch.equal(*each) for each in large)


def test_state_without_room_is_refused_before_anything_is_written() -> None:
    with model_in(BF16) as model:
        executor = model._streamer.executor
        executor.host.limit = sum(executor.host.bytes().values()) + 400_000
        with pytest.raises(MemoryError, match=r"the state of AdamW: .*state_dtype='int8'"):
            streamer.Optimizer(torch.optim.AdamW, model.parameters(), amsgrad=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        language_loss(model, 0).backward()
        optimizer.step()


# state on disk


@pytest.mark.parametrize(
    ("name", "room", "weights"),
    [
        ("RMSprop", 7_000_000, "on disk"),
        ("SOAP", 24_800_000, "in memory"),
        ("Lion", 3_000_000, "in memory"),
        ("AdamW", 6_000_000, "on disk"),
    ],
)
def test_state_without_room_in_memory_is_on_disk(name: str, room: int, weights: str, tmp_path: Path) -> None:
    """Steps, state dicts and checkpoints are those of memory, to the bit."""

    def train(disk: bool) -> tuple[list[torch.Tensor], Any, dict[str, int]]:
        limit = {"in memory": 12_000_000, "on disk": 8_900_000}[weights]
        options: dict[str, Any] = {"disk": disks(tmp_path, 1), "host_memory": limit} if disk else {}
        wide = tiny_gpt(layers=4, width=128)
        with streamed(wide, layers="transformer.h", dtype=BF16, **options) as model:
            params = [*model.parameters()]
            executor = model._streamer.executor
            if disk:  # room for three parts and some of the state
                executor.host.limit = sum(executor.host.bytes().values()) + room
            optimizer = OPTIMIZERS[name](params)
            for step in range(3):
                torch.manual_seed(step)
                if step == 2:
                    streamer.save(model, optimizer, tmp_path / f"saved {disk}", step=2, block=False).result()
                    optimizer = OPTIMIZERS[name](params)
                    gc.collect()  # the first optimizer, whose state counts while it lives
                    streamer.load(model, optimizer, tmp_path / f"saved {disk}")
                language_loss(model, step).backward()
                optimizer.step()
                optimizer.zero_grad()
            state = copy.deepcopy(optimizer.state_dict()["state"])
            return [master(param) for param in params], state, streamer.stats(model).disk_bytes

    found, wanted = train(True), train(False)
    assert found[2]["optimizer state"] > 0
    assert ("weights" in found[2]) == (weights == "on disk")
    assert all(map(torch.equal, found[0], wanted[0]))
    assert same(found[1], wanted[1])
