"""Options that are chosen: what an exhaustive search would choose, what then runs, and what is refused."""

from __future__ import annotations

import io
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import streamer
from models.gpt2 import GPT
from streamer.app.config import Config, ConfigError, load_config
from streamer.app.plan.planning import PROCESS_BYTES, plan_run, settle, with_options
from streamer.app.train import train as train_config
from streamer.engine.layer.micro_batches import AmbiguousBatchError
from streamer.engine.paging.handle import wrapped
from streamer.model.auto import Batch, boxes, plan_of, skeleton
from streamer.plan.choice import Choice, Choices, Room, needs, sizes_below, with_slots
from streamer.plan.measure import Tracker
from streamer.plan.search import AS_FAST, SCALARS, Chosen, choose
from streamer.plan.step_plan import CONTEXT, GAPS, Prediction, StepPlan
from streamer.simulate.machine import Machine
from tests.reference import VOCAB, assert_parity, batch, train, train_plain

Table = dict[Choice, StepPlan]
PREDICTION = Prediction(1.0, 1, {}, {})
AUTO = {"activations": "auto", "num_slots": "auto", "micro_batch_size": "auto"}


def all_of(layers: int, samples: int) -> list[Choices]:
    return boxes(layers=layers, batch=samples, **AUTO)


def exhaustive(table: Table, room: Room) -> StepPlan | None:
    """The plan in ``table`` that is to be chosen."""
    fit = [plan for plan in table.values() if not needs(plan).excess(room)]
    if not fit:
        return None
    fastest = min(plan.prediction.seconds for plan in fit)
    as_fast = [plan for plan in fit if plan.prediction.seconds <= fastest * (1 + AS_FAST)]
    return min(as_fast, key=lambda plan: needs(plan).all)


def assert_chosen_as_by(table: Table, among: Sequence[Choices], room: Room) -> int:
    """How many plans it took."""
    expected = exhaustive(table, room)
    if expected is None:
        with pytest.raises(MemoryError, match="nothing that 'auto' may choose fits; the nearest is"):
            choose(table.__getitem__, among, room)
        return 0
    chosen = choose(table.__getitem__, among, room)
    assert chosen.plan is table[chosen.choice]
    seconds = expected.prediction.seconds
    assert chosen.plan.prediction.seconds == pytest.approx(seconds, rel=AS_FAST)
    assert 0 <= needs(chosen.plan).all - needs(expected).all <= SCALARS
    return len(chosen.considered)


def rooms(table: Table, draw: random.Random, count: int) -> Iterator[Room]:
    """Budgets at which something just fits, or just does not."""
    device = sorted({needs(plan).device for plan in table.values()})
    host = sorted({needs(plan).host for plan in table.values()})
    yield Room(device[-1], host[-1])
    yield Room(device[0] - 1, host[-1])
    for _ in range(count):
        shared = draw.random() < 0.3
        least = draw.choice(device) if shared else 0
        yield Room(
            draw.choice(device) - draw.randint(0, 1),
            draw.choice([*host, host[-1]]) + least,
            budget=draw.choice([None, None, draw.choice(device)]),
            shared=shared,
        )


def test_what_a_step_needs_and_what_is_lacking() -> None:
    device = {"weight slots": 100, "gradient slots": 40, "saved layer inputs": 30}
    plan = StepPlan(device, {GAPS: 5, CONTEXT: 7}, {"weights": 900, "gradients": 100}, PREDICTION, 2)
    needed = needs(plan)
    assert needed == (175, 182, 1000)
    assert needed.all == 1182
    # one slot less has one for gradients less, one more has not one more
    assert [with_slots(plan, 2, slots) for slots in (1, 2, 3)] == [
        (175 - 70, 182 - 70, 1000),
        needed,
        (175 + 50, 182 + 50, 1000),
    ]
    for room, lacking in (
        (Room(182, 1000, budget=175), {}),
        (Room(181, 998), {"the device": 1, "the host": 2}),
        (Room(1 << 30, 1 << 30, budget=172), {"device_memory": 3}),
        (Room(182, 1182, shared=True), {}),
        (Room(182, 1178, shared=True), {"the host": 4}),
    ):
        assert needed.excess(room) == lacking, room


# --- the search ----------------------------------------------------------------------------------------


def counts(choice: Choice, layers: int, samples: int) -> tuple[int, int, int, int]:
    """How many layers are kept and offloaded, samples in a slice, slots."""
    names = choice.activations if isinstance(choice.activations, tuple) else [choice.activations] * layers
    assert choice.num_slots is not None
    kept, away = names.count("keep"), names.count("recompute+offload")
    return kept, away, choice.micro_batch_size or samples, choice.num_slots


def slots_and_saved(
    kept: int, away: int, layers: int, slots: int, *, slot: int, saved: int, graph: int
) -> dict[str, int]:
    """Bytes by owner, but for what a layer computes."""
    return {
        "weight slots": slots * slot,
        "gradient slots": min(slots, 2) * slot,
        "saved": kept * graph + (layers - kept - away) * saved + min(away, 2) * saved,
    }


def made_up(layers: int, samples: int, draw: random.Random) -> Table:
    """Plans of a machine whose copies, updates and compute are as uneven as it comes."""
    slot, saved, work = (1000 * draw.randint(*most) for most in ((50, 200), (1, 60), (10, 400)))
    graph = saved + 1000 * draw.randint(0, 300)
    compute, bus, offload = draw.choice([0.1, 1, 10]), draw.choice([0.2, 1, 5]), draw.choice([0, 0.1, 1])
    per_slice = draw.choice([0, 0.01, 0.5])

    def plan(choice: Choice) -> StepPlan:
        kept, away, size, slots = counts(choice, layers, samples)
        device = slots_and_saved(kept, away, layers, slots, slot=slot, saved=saved, graph=graph) | {
            "work": work * size // samples + (slot if choice.micro_batch_size else 0),
        }
        busy = compute * (4 * layers - kept) + per_slice * (samples / size - 1)
        seconds = max(busy, bus * (2 * layers - slots)) + (slots == 1) * busy / 5 + away * offload
        prediction = Prediction(seconds, 1, {}, {})
        return StepPlan(device, {}, {"weights": 4 * layers * slot, "saved": away * saved}, prediction, slots)

    return {choice: plan(choice) for box in all_of(layers, samples) for choice in box}


@pytest.mark.parametrize("seed", range(40))
def test_it_is_what_an_exhaustive_search_finds(seed: int) -> None:
    draw = random.Random(seed)
    layers, samples = draw.randint(2, 6), draw.choice([1, 3, 8])
    table, among = made_up(layers, samples, draw), all_of(layers, samples)
    for room in rooms(table, draw, 8):
        assert_chosen_as_by(table, among, room)


def test_it_plans_few_of_many() -> None:
    draw = random.Random(0)
    table, among = made_up(40, 64, draw), all_of(40, 64)
    assert len(table) == (41 + 40) * 40 * 7
    for room in rooms(table, draw, 6):
        assert assert_chosen_as_by(table, among, room) < 110


def test_it_plans_fewer_where_compute_binds() -> None:
    layers, samples, slot, saved, graph = 48, 32, 57_000, 105_000, 1_757_000

    def plan(choice: Choice) -> StepPlan:
        kept, away, size, slots = counts(choice, layers, samples)
        device = slots_and_saved(kept, away, layers, slots, slot=slot, saved=saved, graph=graph) | {
            "work": 3_000_000 * size // samples,
        }
        seconds = (4 * layers - kept) * (1 + samples / size / 100) + 10 * (slots == 1)
        prediction = Prediction(seconds, 1, {}, {})
        return StepPlan(device, {}, {"weights": 20_000_000, "saved": away * saved}, prediction, slots)

    among = all_of(layers, samples)
    table = {choice: plan(choice) for box in among for choice in box}
    for graphs in (1, 4, 11.5, 30, 47):
        room = Room(int(5_000_000 + graphs * graph), 1 << 40)
        assert assert_chosen_as_by(table, among, room) <= 25


def test_what_cannot_be_cut_is_left_out_and_told() -> None:
    table, among = made_up(3, 8, random.Random(1)), all_of(3, 8)

    def plan(choice: Choice) -> StepPlan:
        if choice.micro_batch_size is not None:
            raise AmbiguousBatchError("it cannot be told: wrap with batch_dims={'mask': 0}")
        return table[choice]

    chosen = choose(plan, among, Room(1 << 40, 1 << 40))
    assert chosen.choice.micro_batch_size is None
    assert chosen.reason.endswith(
        "Micro-batches are left out: it cannot be told: wrap with batch_dims={'mask': 0}"
    )


def test_what_cannot_be_cut_is_told_where_nothing_else_may_be_chosen() -> None:
    def plan(choice: Choice) -> StepPlan:
        raise AmbiguousBatchError("it cannot be told")

    with pytest.raises(AmbiguousBatchError, match="it cannot be told"):
        choose(plan, [Choices(["recompute", "keep"], [2], [4])], Room(1 << 40, 1 << 40))


def test_slices_are_not_too_many() -> None:
    assert sizes_below(8) == [1, 2, 4]
    assert sizes_below(256) == [1, 2, 4, 8, 16, 32, 64, 128]
    assert sizes_below(257) == [2, 4, 8, 16, 32, 64, 128, 256]
    assert sizes_below(1_000_000)[0] == 4096


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_bar_counts_the_plans_on_a_terminal(is_terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = Terminal() if is_terminal else io.StringIO()
    monkeypatch.setattr("sys.stderr", stderr)
    table = made_up(2, 1, random.Random(0))
    choose(table.__getitem__, all_of(2, 1), Room(1 << 40, 1 << 40))
    assert ("'auto': 0 plans" in stderr.getvalue()) is is_terminal
    assert is_terminal or not stderr.getvalue()


# --- plans of a model ----------------------------------------------------------------------------------


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
#: A copy of a layer takes as long as its forward on 1024 samples, or on 16.
MACHINES = [
    Machine("slow bus", 2048 * MATRIX / 4, MATRIX, MATRIX, 7 * MATRIX, 1 << 40, 1 << 40),
    Machine(
        "fast bus", 2 * 16 * MATRIX / 4, MATRIX, MATRIX, MATRIX, 1 << 40, 1 << 40, "cpu", seconds_per_op=0.1
    ),
]
OPTIONS = {
    "layers": "layers",
    "dtype": None,
    "batch_dims": None,
    "update": "step",
    "grad_dtype": torch.float32,
}


@pytest.mark.parametrize("machine", MACHINES, ids=["slow bus", "fast bus"])
def test_it_is_what_an_exhaustive_search_of_plans_finds(machine: Machine) -> None:
    example = Batch.like(torch.empty(128, 32))
    among = [
        replace(box, micro_batch_sizes=sizes)
        for box in boxes(layers=3, batch=1, **AUTO)
        for sizes in ([[None], [32]] if machine is MACHINES[0] else [[None]])
    ]
    plan = plan_of(streamer.wrap, skeleton(Stack()), machine, example, OPTIONS)
    table = {choice: plan(choice) for box in among for choice in box}
    for room in rooms(table, random.Random(0), 60):
        assert_chosen_as_by(table, among, room)


def test_a_skeleton_has_shapes_and_ties_but_no_values() -> None:
    model = GPT(vocab_size=VOCAB, block_size=16, n_layer=2, n_head=2, n_embd=32)
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


def gpt(layers: int = 3) -> GPT:
    torch.manual_seed(0)
    return GPT(vocab_size=VOCAB, block_size=16, n_layer=layers, n_head=2, n_embd=32)


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
    model = gpt(2)
    expected = train_plain(model, steps=3)
    drawn = torch.get_rng_state()
    with caplog.at_level("INFO", logger="streamer"):
        chosen = wrapped_auto(model, num_slots="auto", micro_batch_size="auto", device_memory="350kB")
    assert torch.equal(torch.get_rng_state(), drawn)
    assert [record.message for record in caplog.records] == [f"chosen: {chosen.reason}"]
    assert "for which device_memory lacks" in chosen.reason
    assert needs(chosen.plan).device <= 350_000
    executor = wrapped(model).executor
    assert len(executor.weights.slots.buffers) == chosen.choice.num_slots == chosen.plan.num_slots
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
    model = gpt()
    policies = ["keep", "recompute", "recompute"]
    chosen = wrapped_auto(model, activations=policies, num_slots="auto")
    streamer.unwrap(model)
    assert chosen.choice == (tuple(policies), chosen.choice.num_slots, None)
    assert {choice.activations for choice in chosen.considered} == {tuple(policies)}


@pytest.mark.parametrize("device_memory", ["460kB", "10MB"])
def test_the_device_takes_what_was_planned(device_memory: str) -> None:
    assert_device_takes_what_was_planned(gpt(), batch(0)[:, :-1], num_slots=2, device_memory=device_memory)


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


IN_PARTS = "Whole layers do not fit: the largest are streamed in parts"


def test_layers_are_streamed_in_parts_where_whole_ones_do_not_fit() -> None:
    torch.manual_seed(0)
    model = GPT(vocab_size=VOCAB, block_size=16, n_layer=1, n_head=2, n_embd=128)
    options = {"num_slots": "auto", "device_memory": "1MB"}
    tokens = batch(0)[:1, :4]
    chosen = assert_device_takes_what_was_planned(model, tokens, micro_batch_size="auto", **options)
    assert chosen.reason.endswith(IN_PARTS)
    assert needs(chosen.plan).device <= 1_000_000
    with pytest.raises(ValueError, match="would be streamed in parts, which cannot be given micro-batches"):
        wrapped_auto(model, example=batch(0)[:2, :4], micro_batch_size=1, **options)
    with pytest.raises(MemoryError, match="Layers that are streamed in parts do not fit either$"):
        wrapped_auto(model, example=tokens, **options | {"device_memory": "300kB"})


def test_where_nothing_fits_both_sides_are_told() -> None:
    model = gpt(2)
    with pytest.raises(
        MemoryError, match=r"the nearest is .*: the device needs \d+ bytes .*device_memory lacks"
    ):
        wrapped_auto(model, device_memory="90kB")
    assert streamer.wrap(model, layers="transformer.h", device="cpu") is model
    assert streamer.chosen(model) is None
    streamer.unwrap(model)


class Curious(Stack):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if x.sum().item() >= 0 else x


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (gpt(2), {"example": None}, r"'auto' needs a batch to plan with: give wrap\(example=...\)"),
        (gpt(2), {"example": (3,)}, "example: there is no tensor in it whose first dimension could be"),
        (
            gpt(2),
            {"example": {"ids": torch.zeros(4, 8)}},
            r"example: it is not what GPT.forward takes \(missing a",
        ),
        (
            gpt(2),
            {"example": (torch.zeros(4, 8),) * 4},
            r"example: it is not what GPT.forward takes \(too many",
        ),
        (gpt(2), {"example": torch.zeros(0, 8).long()}, "example: its batch is empty: give one as large"),
        (
            gpt(2),
            {"example": torch.zeros(4, 8)},
            r"example: the model cannot run on a batch like it \(Expected .* Long, Int; but got",
        ),
        (
            gpt(2),
            {"example": torch.zeros(4, 17).long()},
            r"example: the model cannot run on a batch like it \(.+\)",
        ),
        (gpt(2), {"machine": "rtx-4091"}, "there is no machine 'rtx-4091': known are rtx-3090, rtx-4090"),
        (gpt(2), {"machine": 3}, "machine=3: give the name of one, or a streamer.simulate.machine.Machine"),
        (gpt(2), {"activations": "automatic"}, "activations='automatic' is unknown: use one of"),
        (gpt(2), {"num_slots": "automatic"}, "num_slots='automatic': it must be an integer of 1 or more"),
        (gpt(2), {"layers": "transformer.x"}, "layers='transformer.x': there is no such module"),
        (
            Curious(),
            {"layers": "layers", "example": torch.zeros(4, 32)},
            r"without values, which this one needs \(.*item.*\): give activations, num_slots and",
        ),
    ],
)
def test_what_cannot_be_chosen_is_one_clear_line(
    model: nn.Module, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        wrapped_auto(model, **options)
    assert "\n" not in str(raised.value)


def test_what_has_no_values_is_refused_before_it_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamer.model.auto.plan_step", lambda *args: pytest.fail("it was planned"))
    with torch.device("meta"):
        model = gpt(2)
    with pytest.raises(ValueError, match=r"is on the meta device and has no values: give wrap\(init="):
        wrapped_auto(model)


def test_a_machine_may_be_given_by_name() -> None:
    model = gpt(2)
    slow = wrapped_auto(model, machine="laptop-8gb").plan.prediction.seconds
    streamer.unwrap(model)
    assert wrapped_auto(model, machine="h100-sxm").plan.prediction.seconds < slow
    streamer.unwrap(model)


# --- streamer train ------------------------------------------------------------------------------------


@pytest.fixture
def config(tmp_path: Path) -> Config:
    path = tmp_path / "run.toml"
    path.write_text(
        """
        run = { name = "auto", steps = 1, eval_batches = 1, sample_tokens = 0 }
        data = { context = 16, batch_size = 4 }
        optimizer = { lr = 1e-3, state_dtype = "int8" }
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
    machine = replace(MACHINES[1], host_bytes=PROCESS_BYTES + (1 << 30), device_bytes=600_000)
    settled, chosen = settle(config, machine)
    assert chosen is not None
    assert settled.stream == replace(
        config.stream,
        activations=chosen.choice.activations,
    )
    planned = plan_run(settled, machine)
    assert planned.fits and planned.step == chosen.plan
    assert settle(settled, machine) == (settled, None)
    with pytest.raises(ConfigError, match=r"\[stream\]: nothing that 'auto' may choose fits"):
        settle(config, replace(machine, device_bytes=1000))


def test_a_config_is_settled_with_layers_in_parts(config: Config) -> None:
    config = with_options(
        config,
        model={"args": config.model.args | {"n_embd": 128}},
        data={"context": 4, "batch_size": 1},
        stream={"activations": "recompute", "num_slots": "auto", "device_memory": "1050kB"},
    )
    machine = replace(MACHINES[1], host_bytes=PROCESS_BYTES + (1 << 30), device_bytes=1 << 30)
    settled, chosen = settle(config, machine)
    assert chosen is not None and chosen.reason.endswith(IN_PARTS)
    planned = plan_run(settled, machine)
    assert planned.fits and planned.step == chosen.plan


def test_train_says_what_was_chosen_and_runs_it(
    config: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("all that is chosen is told. " * 40)
    config = with_options(
        config,
        run={"out": str(tmp_path)},
        data={"paths": (str(text),), "val_fraction": 0.3},
        optimizer={"state_dtype": "float32"},
        stream={"activations": "recompute", "num_slots": "auto", "dtype": None},
    )
    assert train_config(config) is not None
    told = capsys.readouterr().out
    ran = load_config(tmp_path / "auto" / "config.toml")
    assert f"chosen: 'recompute' in all layers, {ran.stream.num_slots} slot" in told
