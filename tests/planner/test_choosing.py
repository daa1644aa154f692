"""Options that are chosen: what an exhaustive search would choose, what then runs, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import streamer
from streamer.backends.base import Lane
from streamer.backends.disk import Disks, Scratch
from streamer.cli.config import Config, ConfigError, load_config, with_keys
from streamer.cli.loop import train_own
from streamer.cli.plan.planning import PROCESS_BYTES, plan_run, settle
from streamer.engine.handle import wrapped
from streamer.engine.layer.micro_batches import AmbiguousBatchError
from streamer.planner.choose import Choice, Chosen, choose
from streamer.planner.machine import Machine
from streamer.planner.measure import Tracker
from streamer.planner.model import skeleton
from streamer.planner.step import CONTEXT, GAPS, WORKING_SET, Prediction, StepPlan
from streamer.store.ledger import SHARED, Room
from tests.reference import assert_parity, batch, tiny_gpt, train, train_plain

PREDICTION = Prediction(1.0, 1, {}, {Lane.H2D: 0.0})


def test_what_a_step_needs_and_what_is_lacking() -> None:
    device = {"weight slots": 100, "gradient slots": 40, "saved layer inputs": 30, WORKING_SET: 9}
    plan = StepPlan(device, {GAPS: 5, CONTEXT: 7}, {"weights": 900, "gradients": 100}, PREDICTION, 2)
    # on a GPU all that is allocated counts, elsewhere what the layers compute does not
    assert (plan.device_needed, plan.allocated) == (191, 184)
    assert replace(plan, reserve={}).allocated == 170
    for room, lacking in (
        (Room(191, 1000, budget=184), {}),
        (Room(190, 998), {"the device": 1, "the host": 2}),
        (Room(1 << 30, 1 << 30, budget=181), {"device_memory": 3}),
        (Room(191, 1191, shared=True), {}),
        (Room(191, 1187, shared=True), {f"the host{SHARED}": 4}),
    ):
        assert {tier.name: tier.lacking for tier in plan.tiers(room) if tier.lacking} == lacking, room
    # one slot less has one for gradients less, one more has not one more
    needed = [plan.tiers(room, slots)[0].needed for slots in (1, 2, 3)]
    assert needed == [191 - 70, 191, 191 + 50]


# --- the candidates ------------------------------------------------------------------------------------


def planned(choice: Choice, *, layers: int = 4, samples: int = 8) -> StepPlan:
    """Bytes and seconds of a step by simple rules: a layer takes 100 bytes, its graph 60 and its input 10;
    what is computed takes 40, or less in slices, each of which costs a hundredth of a second."""
    size, slots = choice.micro_batch_size or samples, choice.num_slots or 2
    saved = {"keep": 60 * layers, "recompute": 10 * layers, "recompute+offload": 20}[str(choice.activations)]
    device = {
        "weight slots": slots * 100,
        "gradient slots": min(slots, 2) * 100,
        "saved": saved,
        "work": 40 * size // samples,
    }
    host = {"weights": 400, "saved": 5 * layers * (choice.activations == "recompute+offload")}
    seconds = {"keep": 3.0, "recompute": 4.0, "recompute+offload": 4.5}[str(choice.activations)]
    seconds += 0.01 * (samples / size - 1) + 0.1 * (layers - slots)
    return StepPlan(device, {}, host, replace(PREDICTION, seconds=seconds), slots)


ON_TWO = "auto", 2, "auto"


@pytest.mark.parametrize(
    ("device", "host", "expected"),
    [
        (680, 420, Choice("keep", 2, None)),
        (679, 420, Choice("recompute", 2, None)),
        (480, 420, Choice("recompute", 2, None)),
        # inputs in host memory: half of the batch at a time takes 20 bytes less
        (479, 420, Choice("recompute+offload", 2, 4)),
        (439, 420, Choice("recompute+offload", 2, 2)),
        (425, 420, Choice("recompute+offload", 2, 1)),
    ],
)
def test_the_fastest_candidate_that_fits_is_taken(device: int, host: int, expected: Choice) -> None:
    chosen = choose(planned, ON_TWO, Room(device, host), layers=4, batch=8)
    assert chosen.choice == expected
    assert len(chosen.considered) == 3
    assert {choice.activations for choice in chosen.considered} == {"keep", "recompute", "recompute+offload"}
    (line,) = (line for line in chosen.lines() if "(chosen)" in line)
    assert str(expected) in line
    assert all(": the device lacks " in line for line in list(chosen.lines())[1:] if "keep" in line) or (
        expected.activations == "keep"
    )


@pytest.mark.parametrize(("device", "host"), [(424, 420), (479, 419)])
def test_where_no_candidate_fits_the_nearest_is_named(device: int, host: int) -> None:
    match = (
        r"any options that 'auto' may choose; the nearest are 'recompute(\+offload)?' in all layers, 2 slots"
    )
    with pytest.raises(MemoryError, match=match):
        choose(planned, ON_TWO, Room(device, host), layers=4, batch=8)


@pytest.mark.parametrize(("device", "slots"), [(680, 2), (779, 2), (780, 3), (900, 4)])
def test_a_candidate_has_as_many_slots_as_fit(device: int, slots: int) -> None:
    chosen = choose(planned, ("keep", "auto", None), Room(device, 400), layers=4, batch=8)
    assert chosen.choice == Choice("keep", slots, None)
    assert [*chosen.considered] == [chosen.choice], "that with two slots is not listed"


# --- plans of a model ----------------------------------------------------------------------------------


def test_what_cannot_be_cut_is_left_out() -> None:
    def plan(choice: Choice) -> StepPlan:
        if choice.micro_batch_size is not None:
            raise AmbiguousBatchError("wrap with batch_dims={'mask': 0}")
        return planned(choice)

    chosen = choose(plan, ON_TWO, Room(480, 400), layers=4, batch=8)
    assert chosen.choice == Choice("recompute", 2, None)
    assert chosen.reason.endswith(". Micro-batches are left out: wrap with batch_dims={'mask': 0}")
    with pytest.raises(AmbiguousBatchError, match="wrap with batch_dims"):
        choose(plan, ("auto", 2, 4), Room(480, 400), layers=4, batch=8)


class Stack(nn.Module):
    """Layers of one matrix each. What comes after it saves its own output."""

    def __init__(self, layers: int = 3, width: int = 32) -> None:
        super().__init__()
        parts = [nn.Sequential(nn.Linear(width, width, bias=False), nn.Sigmoid()) for _ in range(layers)]
        self.layers = nn.ModuleList(parts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


MATRIX = 4.0 * 32 * 32
CPU = Machine("cpu", 2 * 16 * MATRIX / 4, MATRIX, MATRIX, MATRIX, 1 << 40, 1 << 40, "cpu", seconds_per_op=0.1)


def test_a_skeleton_has_shapes_and_ties_but_no_values() -> None:
    model = tiny_gpt(2)
    model.register_buffer("counts", torch.zeros(3, dtype=torch.long))
    model.mask = torch.ones(2, 2)
    model.lm_head.weight.requires_grad_(False)
    without = skeleton(model)
    assert without.lm_head.weight is without.transformer.wte.weight
    assert not without.lm_head.weight.requires_grad
    assert without.mask.is_meta
    for (name, own), (other_name, other) in zip(
        model.state_dict().items(), without.state_dict().items(), strict=True
    ):
        assert (name, own.shape, own.dtype) == (other_name, other.shape, other.dtype)
        assert other.is_meta and not own.is_meta


# --- wrap ----------------------------------------------------------------------------------------------


def wrapped_auto(model: nn.Module, **options: Any) -> Chosen:
    defaults = {
        "layers": "transformer.h",
        "device": "cpu",
        "activations": "auto",
        "example": batch(0)[:, :-1],
    }
    streamer.wrap(model, **defaults | options)
    chosen = streamer.chosen(model)
    assert chosen is not None
    return chosen


def test_what_is_chosen_runs_and_is_told(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_gpt(2)
    expected = train_plain(model, steps=3)
    drawn = torch.get_rng_state()
    with caplog.at_level("INFO", logger="streamer"):
        chosen = wrapped_auto(model, num_slots="auto", micro_batch_size="auto", device_memory="350kB")
    assert torch.equal(torch.get_rng_state(), drawn)
    assert [record.message for record in caplog.records] == [f"chosen: {chosen.reason}"]
    assert "for which device_memory lacks" in chosen.reason
    assert chosen.plan.allocated <= 350_000
    executor = wrapped(model).executor
    assert len(executor.pager.training.slots.buffers) == chosen.choice.num_slots == chosen.plan.num_slots
    optimizer = streamer.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)

    def clip() -> torch.Tensor:
        return streamer.clip_grad_norm_(model, 1.0)

    found = train(model, optimizer, clip, steps=3)
    streamer.unwrap(model)
    if chosen.choice.micro_batch_size is None:
        assert_parity(found, expected)
    else:
        # gradients of slices are added up in another order
        torch.testing.assert_close(found.losses, expected.losses, rtol=1e-5, atol=0)


def test_what_is_given_is_kept() -> None:
    model = tiny_gpt()
    policies = ["keep", "recompute", "recompute"]
    chosen = wrapped_auto(model, activations=policies, num_slots="auto")
    streamer.unwrap(model)
    assert chosen.choice == Choice(tuple(policies), chosen.choice.num_slots, None)
    assert {choice.activations for choice in chosen.considered} == {tuple(policies)}


@pytest.mark.parametrize("device_memory", ["460kB", "10MB"])
def test_the_device_takes_what_was_planned(device_memory: str) -> None:
    assert_device_takes_what_was_planned(
        tiny_gpt(), batch(0)[:, :-1], num_slots=2, device_memory=device_memory
    )


def assert_device_takes_what_was_planned(model: nn.Module, tokens: torch.Tensor, **options: Any) -> Chosen:
    chosen = wrapped_auto(model, example=tokens, **options)
    optimizer = streamer.AdamW(model.parameters())

    def step() -> None:
        model(tokens).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    with Tracker() as tracker:
        step()
    buffers = sum(streamer.stats(model).device_bytes.values())
    streamer.unwrap(model)
    assert buffers + tracker.peak == pytest.approx(chosen.plan.device_total, rel=0.05)
    return chosen


#: Of a GPT that is streamed in parts.
PARTS = ("transformer.h.*.attn.*", "transformer.h.*.mlp.*")


def test_where_nothing_fits_what_is_short_is_named() -> None:
    model = tiny_gpt(2)
    match = (
        r"the nearest are [^:]*: device_memory needs \d+ bytes and has 230000 bytes \(\d+ bytes too few\): "
    )
    with pytest.raises(MemoryError, match=match):
        wrapped_auto(model, device_memory="230kB")
    assert streamer.wrap(model, layers="transformer.h", device="cpu") is model
    assert streamer.chosen(model) is None
    streamer.unwrap(model)


def test_an_example_refuses_a_step_that_does_not_fit_before_anything_is_changed() -> None:
    given = {"activations": "keep", "num_slots": 2, "micro_batch_size": None}
    model = tiny_gpt(2)
    before = [param.data_ptr() for param in model.parameters()]
    with pytest.raises(MemoryError, match="a step with 'keep' in all layers, 2 slots .*device_memory needs"):
        wrapped_auto(model, device_memory="230kB", **given)
    assert [param.data_ptr() for param in model.parameters()] == before
    chosen = wrapped_auto(model, **given)
    assert chosen.choice == Choice("keep", 2, None) and "no other" not in chosen.reason
    streamer.unwrap(model)


def test_what_host_memory_has_no_room_for_is_planned_on_disk(tmp_path: Path) -> None:
    model = tiny_gpt(8)
    disk = Disks([tmp_path], partial(Scratch, direct_io=False))
    with pytest.raises(MemoryError, match=r"host_memory needs \d+ bytes .* and has 1600000 bytes"):
        wrapped_auto(model, num_slots=2, host_memory="1.6MB")
    chosen = wrapped_auto(model, num_slots=2, host_memory="1.6MB", disk=disk)
    assert chosen.plan.host_total <= 1_600_000
    streamer.AdamW(model.parameters())
    assert chosen.plan.disk_bytes == streamer.stats(model).disk_bytes != {}
    streamer.unwrap(model)


class Curious(Stack):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if x.sum().item() >= 0 else x


class Lookup(Stack):
    """Takes integers, by an operation that checks this on the meta device in every release of PyTorch. An
    embedding does not in PyTorch 2.10."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.zeros(8, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.rows[x])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"example": None}, r"'auto' needs a batch to plan with: set wrap\(example=...\)"),
        ({"example": (3,)}, "example: no tensor in it has a first dimension that could be"),
        ({"example": {"ids": torch.zeros(4, 8)}}, r"example: GPT.forward does not take it \(missing a"),
        ({"example": (torch.zeros(4, 8),) * 4}, r"example: GPT.forward does not take it \(too many"),
        ({"example": torch.zeros(0, 8).long()}, "example: its batch is empty: use one as large"),
        (
            {"model": Lookup(), "layers": "layers", "example": torch.zeros(4, 8)},
            r"the model cannot run on such a batch \(tensors used as indices must be long, int",
        ),
        ({"example": torch.zeros(4, 17).long()}, r"example: the model cannot run on such a batch \(.+\)"),
        ({"machine": "rtx-4091"}, r"there is no machine 'rtx-4091': did you mean rtx-4090, .*\? known are"),
        ({"machine": 3}, "machine=3: use a machine.s name, or a streamer.planner.machine.Machine"),
        ({"activations": "automatic"}, "activations='automatic' is unknown: use one of"),
        ({"num_slots": "automatic"}, "num_slots='automatic': it must be an integer of 1 or more"),
        ({"layers": "transformer.x"}, "layers='transformer.x': there is no such module"),
        (
            {"model": Curious(), "layers": "layers", "example": torch.zeros(4, 32)},
            r"without values, which this model needs \(.*item.*\): set activations, num_slots .* example$",
        ),
    ],
)
def test_what_cannot_be_chosen_is_one_clear_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        wrapped_auto(**{"model": tiny_gpt(2)} | options)
    assert "\n" not in str(raised.value)


def test_a_machine_may_be_given_by_name() -> None:
    model = tiny_gpt(2)
    slow = wrapped_auto(model, machine="laptop-8gb").plan.prediction.busy_seconds[Lane.COMPUTE]
    streamer.unwrap(model)
    fast = wrapped_auto(model, machine="h100-sxm").plan.prediction.busy_seconds[Lane.COMPUTE]
    assert fast < slow
    streamer.unwrap(model)


# --- streamer train ------------------------------------------------------------------------------------


@pytest.fixture
def config(tmp_path: Path) -> Config:
    path = tmp_path / "run.toml"
    path.write_text(
        """
        optimizer = { state_dtype = "int8" }
        sample = { tokens = 0 }
        [train]
        max_steps = 1
        max_length = 16
        per_device_train_batch_size = 4
        eval_batches = 1
        [model]
        factory = "models.gpt2:GPT"
        args = { vocab_size = 256, block_size = 16, n_layer = 2, n_head = 2, n_embd = 32 }
        [stream]
        layers = "transformer.h"
        dtype = "bfloat16"
        device = "cpu"
        activations = "auto"
        num_slots = 2
        """
    )
    return load_config(path)


def test_a_config_is_settled_for_a_machine(config: Config) -> None:
    machine = replace(CPU, host_bytes=PROCESS_BYTES + (1 << 30), device_bytes=600_000)
    settled, chosen = settle(config, machine)
    assert chosen is not None
    assert settled.stream == replace(config.stream, activations=chosen.choice.activations)
    planned = plan_run(settled, machine)
    assert planned.fits and planned.step == chosen.plan
    assert settle(settled, machine) == (settled, None)
    with pytest.raises(ConfigError, match=r"\[stream\]: not enough memory for any options that 'auto'"):
        settle(config, replace(machine, device_bytes=1000))


def test_a_config_is_settled_with_parts_of_layers(config: Config) -> None:
    config = with_keys(
        config,
        model={"args": config.model.args | {"n_embd": 128}},
        train={"max_length": 4, "per_device_train_batch_size": 1},
        stream={"activations": "recompute", "num_slots": "auto", "device_memory": "900kB"},
    )
    machine = replace(CPU, host_bytes=PROCESS_BYTES + (1 << 30), device_bytes=1 << 30)
    with pytest.raises(ConfigError, match=r"or stream parts of layers \(stream.layers takes globs\)"):
        settle(config, machine)
    settled, chosen = settle(with_keys(config, stream={"layers": PARTS}), machine)
    assert chosen is not None
    planned = plan_run(settled, machine)
    assert planned.fits and planned.step == chosen.plan


def test_train_says_what_was_chosen_and_runs_it(
    config: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("all that is chosen is told. " * 40)
    config = with_keys(
        config,
        train={"output_dir": str(tmp_path / "auto")},
        data={"paths": (str(text),), "val_fraction": 0.3},
        optimizer={"state_dtype": "float32"},
        stream={"activations": "recompute", "num_slots": "auto", "dtype": None},
    )
    train_own(config)
    told = capsys.readouterr().out
    ran = load_config(tmp_path / "auto" / "config.toml")
    assert f"chosen: 'recompute' in all layers, {ran.stream.num_slots} slot" in told
