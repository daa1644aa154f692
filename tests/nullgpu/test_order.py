"""Kernels read the weights that the host holds, however late copies are; and the bytes that this takes."""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import streamer
import streamer.engine.executor
from streamer.engine.handle import wrapped
from streamer.engine.layer import graph as collector
from streamer.engine.schedule.hazards import Hazards
from tests.nullgpu import device
from tests.nullgpu.chain import HALVING, WIDTH, Chain
from tests.on_disk import disks
from tests.reference import unwrapping

pytestmark = pytest.mark.cuda_api

#: Steps that follow one another at once, and those that wait until nothing is in flight.
FREE, STEPS = 4, 7
POLICIES = pytest.mark.parametrize("activations", ["recompute", "recompute+offload", "keep"])


@pytest.fixture(autouse=True)
def late_copies() -> Iterator[None]:
    """On nullgpu each copy begins up to 3 ms late; a GPU has delays of its own."""
    if device.IS_LOADED:
        device.change(jitter_us=3000)
    yield
    if device.IS_LOADED:
        device.change(**device.SETTINGS)


@pytest.fixture(autouse=True)
def gradients_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small gradients are copied together by a kernel, which does nothing on nullgpu."""
    monkeypatch.setattr(collector, "SMALL_BYTES", -1)


def wrapped_chain(length: int = 4, **options: Any) -> AbstractContextManager[Chain]:
    return unwrapping(streamer.wrap(Chain(length), layers="links", **({"device": "cuda"} | options)))


def given_by_the_scaler(optimizer: torch.optim.Optimizer, place: str) -> None:
    """Let the optimizer have from its scaler what kernels would have computed."""
    step = optimizer.step

    def step_with_values() -> None:
        optimizer.found_inf, optimizer.grad_scale = torch.zeros(()).to(place), torch.ones(()).to(place)
        step()

    optimizer.step = step_with_values


def train(
    model: Chain,
    *,
    place: str = "cuda:0",
    is_chunked: bool = False,
    scaler: torch.amp.GradScaler | None = None,
) -> list[tuple[int, int]]:
    """Steps that halve each weight, with a write of the user's in the middle; the device's bytes at rest and
    at the peak of each of the steps after `FREE`."""
    record, optimizer, taken = model.record, streamer.AdamW(model.parameters(), **HALVING), []
    if scaler is not None and device.IS_LOADED:
        given_by_the_scaler(optimizer, place)
    x = torch.zeros(4, 8, WIDTH, device=place, requires_grad=True)
    for step in range(STEPS):
        torch.cuda.reset_peak_memory_stats(place)
        record.gradients = {link.number: float(link.number % 8 + step) for link in model.all_links()}
        loss = model(x, is_chunked=is_chunked)
        (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
        model.halve()
        if step == 2:
            with torch.no_grad():
                model.links[1].weight.fill_(16.0)
            record.expected[model.links[1].number] = 16.0
        x.grad = loss = None
        if step < FREE - 1:
            continue
        streamer.synchronize(model)
        torch.cuda.synchronize()
        taken.append((torch.cuda.memory_allocated(place), torch.cuda.max_memory_allocated(place)))
    return taken


@POLICIES
@pytest.mark.parametrize(
    "options",
    [
        *({"num_slots": slots} for slots in (1, 2, 3)),
        {"dtype": torch.bfloat16},
        {"micro_batch_size": 1},
        {"update": "backward"},
        {"update": "backward", "num_slots": 1, "micro_batch_size": 2},
        {"device": "cuda:1"},
        {"compile": "aot_eager"},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_layers_read_what_the_host_held(activations: str, options: dict[str, Any]) -> None:
    check(activations=activations, **options)


@pytest.mark.parametrize("what", ["state", "weights too"])
@pytest.mark.parametrize(
    "options",
    [
        {"activations": "recompute"},
        {"activations": "keep", "num_slots": 1},
        {"activations": "recompute", "num_slots": 3, "dtype": torch.bfloat16},
        {"activations": "recompute", "update": "backward"},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_layers_read_what_is_on_disk(what: str, options: dict[str, Any], tmp_path: Path) -> None:
    options = options | {"length": 10, "disk": disks(tmp_path)}
    with pytest.raises(MemoryError) as refused, wrapped_chain(**options, host_memory=1):
        pass
    found = re.search(r"host_memory needs ([0-9]+) bytes", str(refused.value))
    assert found is not None
    budget = int(found[1])
    if what == "state":
        with wrapped_chain(**options) as model:
            budget += wrapped(model).executor.host.bytes()["weights"]
    check(**options, host_memory=budget, on_disk=what)


@POLICIES
def test_with_a_scaler(activations: str) -> None:
    check(activations=activations, train=partial(train, scaler=torch.amp.GradScaler("cuda")))


@POLICIES
def test_with_a_loss_in_chunks(activations: str) -> None:
    check(activations=activations, train=partial(train, is_chunked=True))


def check(*, train: Any = train, on_disk: str | None = None, **options: Any) -> None:
    place = options.get("device", "cuda:0")
    if torch.device(place).index >= torch.cuda.device_count():
        pytest.skip(f"needs {place}")
    others = [f"cuda:{index}" for index in range(torch.cuda.device_count()) if f"cuda:{index}" != place]
    registered = device.report()["registered_bytes"] if device.IS_LOADED else 0
    gc.collect()  # what earlier tests have left
    before = [torch.cuda.memory_allocated(other) for other in others]
    with wrapped_chain(**options) as model:
        taken = train(model, place=place)
        assert model.record.wrong() == []
        if on_disk is not None:
            assert ("weights" in streamer.stats(model).disk_bytes) == (on_disk == "weights too")
            assert streamer.stats(model).disk_bytes["exp_avg"] > 0
        looks = (2 if options["activations"] == "keep" else 3) * 4 // options.get("micro_batch_size", 4)
        # the first cut of a kind of layer is checked by two slices, together and apart
        checks = 3 if "micro_batch_size" in options else 0
        assert len(model.record.read) == STEPS * (2 + looks * len(model.links)) + checks
        assert [link.weight.detach().cpu().unique().tolist() for link in model.all_links()] == [
            [model.record.expected[link.number]] for link in model.all_links()
        ]
    # the first of them began while the one before it was in flight
    assert taken[2:] == [taken[1]] * (STEPS - FREE - 1)
    assert [torch.cuda.memory_allocated(other) for other in others] == before
    if device.IS_LOADED:
        assert device.report()["registered_bytes"] == registered


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@POLICIES
def test_gradients_are_in_host_memory_when_backward_ends(activations: str, dtype: torch.dtype) -> None:
    with wrapped_chain(activations=activations, dtype=dtype) as model:
        x = torch.zeros(4, 8, WIDTH, device="cuda", requires_grad=True)
        for step in range(3):
            given = {link.number: float(link.number % 8 + step) for link in model.all_links()}
            model.record.gradients = given
            model(x).backward()
            for link in model.all_links():
                assert link.weight.grad.device.type == ("cuda" if link is model.first else "cpu")
                assert link.weight.grad.cpu().unique().tolist() == [given[link.number]]
            model.zero_grad()


def test_a_state_dict_taken_while_updates_run_has_what_they_write() -> None:
    with wrapped_chain() as model:
        optimizer = streamer.AdamW(model.parameters(), **HALVING)
        x = torch.zeros(4, 8, WIDTH, device="cuda", requires_grad=True)
        model.record.gradients = dict.fromkeys(model.record.expected, 1.0)
        model(x).backward()
        optimizer.step()
        model.halve()
        state = model.state_dict()
        assert {value.device.type for value in state.values()} == {"cpu"}
        names = {
            link.number: f"{name}.weight" for name, link in model.named_modules() if link in model.all_links()
        }
        found = {number: state[name].unique().tolist() for number, name in names.items()}
        assert found == {number: [value] for number, value in model.record.expected.items()}


def test_layers_on_a_late_stream_keep_their_weights_when_the_caller_goes_on_on_another() -> None:
    late, early = torch.cuda.Stream(), torch.cuda.Stream()
    x = torch.zeros(4, 8, WIDTH, device="cuda", requires_grad=True)
    torch.cuda.synchronize()
    # every layer has its slot, so both streams read the same ones before they are written
    with wrapped_chain(num_slots=3) as model:
        optimizer = streamer.AdamW(model.parameters(), **HALVING)
        for step in range(3):
            model.record.gradients = {link.number: float(step) for link in model.all_links()}
            with torch.cuda.stream(late), torch.no_grad():
                torch.cuda._sleep(600_000_000)
                model(x)
            with torch.cuda.stream(early):
                model(x).backward()
                optimizer.step()
                optimizer.zero_grad()
            model.halve()
        assert model.record.wrong() == []


def test_a_second_stream_waits_for_the_roots_weights_too(nullgpu: ModuleType) -> None:
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    x = torch.zeros(4, 8, WIDTH, device="cuda", requires_grad=True)
    with wrapped_chain() as model:
        optimizer = streamer.AdamW(model.parameters(), **HALVING)
        model.record.gradients = {link.number: 0.0 for link in model.all_links()}
        model(x).backward()
        torch.cuda.synchronize()
        nullgpu.change(copy_gbps=0.001)
        optimizer.step()
        model.halve()
        for stream in (first, second):
            with torch.cuda.stream(stream), torch.no_grad():
                model(x)
        assert model.record.wrong() == []


@pytest.mark.parametrize("missing", ["read_after_write", "write_after_read"])
def test_without_the_waits_layers_read_something_else(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streamer.engine.executor, "Hazards", partial(Hazards, **{missing: False}))
    with wrapped_chain(num_slots=1) as model:
        try:
            train(model)
        except ValueError as error:
            # a copy that nobody waits for may come so late that the slot is not what the host has
            assert "writes its own weights in its forward" in str(error)
            return
        assert model.record.wrong()
