"""Options that are chosen: what an exhaustive search would choose, what then runs, and what is refused."""

from __future__ import annotations

import io
import itertools
import random
import statistics
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import streamer
from models.gpt2 import GPT
from streamer.app.config import Config, ConfigError, load_config
from streamer.app.plan.planning import PROCESS_BYTES, plan_run, settle, with_options
from streamer.app.train import train as train_config
from streamer.backends.base import Lane
from streamer.backends.disk import Disks, Scratch
from streamer.backends.thread import ThreadBackend
from streamer.engine.handle import wrapped
from streamer.engine.layer.micro_batches import AmbiguousBatchError
from streamer.model.auto import Batch, plan_of, skeleton
from streamer.model.move_in import room_of
from streamer.model.options import WrapOptions
from streamer.planner.choice import Choice, Chosen, Options, choose, sizes_below
from streamer.planner.measure import Tracker
from streamer.planner.step_plan import CONTEXT, GAPS, WORKING_SET, Prediction, StepPlan, context_bytes
from streamer.simulate.machine import Machine
from streamer.store.ledger import SHARED, UNLIMITED, Room, lacks
from tests.reference import VOCAB, assert_parity, batch, train, train_plain

Table = dict[Choice, StepPlan]
PREDICTION = Prediction(1.0, 1, {}, {Lane.H2D: 0.0})
AUTO = "auto", "auto", "auto"
PLENTY = Room(1 << 40, 1 << 40)


def every(options: Options) -> set[Choice]:
    """All that the short list is made of."""
    kept = range(options.most_kept + 1)
    among = itertools.product(options.policies, kept, options.num_slots, options.sizes)
    return {options.choice(*combination) for combination in among}


def excess(table: Table, options: Options, room: Room) -> float:
    """How much longer the chosen step takes than the fastest in ``table`` that fits, as a share of it. Where
    nothing fits, nothing may be chosen."""
    fit = [plan.prediction.seconds for plan in table.values() if not lacks(plan.tiers(room))]
    if not fit:
        with pytest.raises(MemoryError, match="any options that 'auto' may choose; the nearest are '"):
            choose(table.__getitem__, options, room)
        return 0.0
    chosen = choose(table.__getitem__, options, room)
    assert chosen.plan is table[chosen.choice] and not lacks(chosen.plan.tiers(room))
    assert len(chosen.considered) < 50
    return chosen.plan.prediction.seconds / min(fit) - 1


def rooms(table: Table, draw: random.Random, count: int) -> Iterator[Room]:
    """Budgets at which something just fits, or just does not."""
    device = sorted({plan.device_needed for plan in table.values()})
    host = sorted({plan.host_total for plan in table.values()})
    yield Room(device[-1], host[-1])
    yield Room(device[0] - 1, host[-1])
    for _ in range(count):
        shared = draw.random() < 0.3
        least = draw.choice(device) if shared else 0
        yield Room(
            draw.choice(device) - draw.randint(0, 1),
            draw.choice([*host, host[-1]]) + least,
            budget=draw.choice([UNLIMITED, UNLIMITED, draw.choice(device)]),
            shared=shared,
        )


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


# --- the short list ------------------------------------------------------------------------------------


def made_up(layers: int, samples: int, draw: random.Random) -> tuple[Table, Options]:
    """Plans of a machine whose copies, updates and compute are as uneven as it comes."""
    slot, saved, work = (1000 * draw.randint(*most) for most in ((50, 200), (1, 60), (10, 400)))
    graph = saved + 1000 * draw.randint(0, 300)
    compute, bus, offload = draw.choice([0.1, 1, 10]), draw.choice([0.2, 1, 5]), draw.choice([0, 0.1, 1])
    per_slice = draw.choice([0, 0.01, 0.5])

    def plan(choice: Choice) -> StepPlan:
        names = choice.activations if isinstance(choice.activations, tuple) else [choice.activations] * layers
        kept, away = names.count("keep"), names.count("recompute+offload")
        size, slots = choice.micro_batch_size or samples, choice.num_slots
        assert slots is not None
        device = {
            "weight slots": slots * slot,
            "gradient slots": min(slots, 2) * slot,
            "saved": kept * graph + (layers - kept - away) * saved + min(away, 2) * saved,
            "work": work * size // samples + (slot if choice.micro_batch_size else 0),
        }
        busy = compute * (4 * layers - kept) + per_slice * (samples / size - 1)
        seconds = max(busy, bus * (2 * layers - slots)) + (slots == 1) * busy / 5 + away * offload
        prediction = Prediction(seconds, 1, {}, {Lane.H2D: seconds - busy})
        return StepPlan(device, {}, {"weights": 4 * layers * slot, "saved": away * saved}, prediction, slots)

    options = Options.of(AUTO, layers=layers, batch=samples)
    return {choice: plan(choice) for choice in every(options)}, options


def test_it_is_about_as_fast_as_what_an_exhaustive_search_finds() -> None:
    found = []
    for seed in range(16):
        draw = random.Random(seed)
        layers, samples = draw.randint(12, 20), draw.choice([8, 32, 64])
        table, options = made_up(layers, samples, draw)
        found += [excess(table, options, room) for room in rooms(table, draw, 8)]
    assert statistics.mean(found) < 0.01
    assert sorted(found)[int(0.95 * len(found))] < 0.06


def test_what_cuda_itself_takes_is_not_among_the_free_bytes() -> None:
    class Gpu(ThreadBackend):
        def device_available(self) -> int:
            return 1000

        def host_available(self) -> int:
            return 2000

    with closing(Gpu()) as backend:
        backend.device = torch.device("cuda")
        room = room_of(backend)
    # a plan counts it, and tensors have what is free
    plan = StepPlan({"slots": 900}, {CONTEXT: context_bytes("cuda")}, {}, PREDICTION, 2)
    assert room.tensors == 1000
    assert [tier.available - tier.needed for tier in plan.tiers(room)] == [100, 2000]


@pytest.mark.parametrize("seed", range(20))
def test_something_is_chosen_wherever_something_fits(seed: int) -> None:
    draw = random.Random(seed)
    table, options = made_up(draw.randint(1, 5), draw.choice([1, 3, 8]), draw)
    for room in rooms(table, draw, 8):
        excess(table, options, room)


def test_what_is_as_fast_is_told_by_a_simple_rule() -> None:
    device = {"recompute": 10, "recompute+offload": 9, "keep": 20}

    def plan(choice: Choice) -> StepPlan:
        seconds = 1.0001 if choice.micro_batch_size is None else 1.0
        return StepPlan(
            {"all": device[str(choice.activations)] - (choice.micro_batch_size is not None)},
            {},
            {},
            replace(PREDICTION, seconds=seconds),
            2,
        )

    options = Options(1, ("recompute", "recompute+offload"), 1, (2,), (None, 2, 1))
    # micro-batches take less memory, and are no faster in three digits
    chosen = choose(plan, options, Room(15, 0))
    assert chosen.choice == Choice("recompute+offload", 2, None)
    assert list(chosen.lines())[1].endswith("'recompute+offload' in all layers, 2 slots (chosen)")
    assert list(chosen.lines())[-1].endswith("micro-batches of 1: the device lacks 0.00 GiB")
    assert choose(plan, options, PLENTY).choice == Choice("keep", 2, None)


def test_what_cannot_be_cut_is_left_out_and_told() -> None:
    table, options = made_up(3, 8, random.Random(1))

    def plan(choice: Choice) -> StepPlan:
        if choice.micro_batch_size is not None:
            raise AmbiguousBatchError("it cannot be told: wrap with batch_dims={'mask': 0}")
        return table[choice]

    tight = Room(table[options.choice("recompute", 1, 2, None)].device_needed, 1 << 40)
    chosen = choose(plan, options, tight)
    assert chosen.choice.micro_batch_size is None
    assert chosen.reason.endswith(
        "Micro-batches are left out: it cannot be told: wrap with batch_dims={'mask': 0}"
    )
    with pytest.raises(AmbiguousBatchError, match="it cannot be told"):
        choose(plan, replace(options, sizes=(4,)), tight)


def test_the_last_layers_are_those_that_are_kept() -> None:
    options = Options.of(AUTO, layers=3, batch=1)
    kept = [options.choice("recompute", count, 2, None).activations for count in (0, 1, 3)]
    assert kept == ["recompute", ("recompute", "recompute", "keep"), "keep"]


def test_slices_are_not_too_many() -> None:
    assert sizes_below(8) == [4, 2, 1]
    assert sizes_below(256) == [128, 64, 32, 16, 8, 4, 2, 1]
    assert sizes_below(257) == [256, 128, 64, 32, 16, 8, 4, 2]
    assert sizes_below(1_000_000)[-1] == 4096


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_bar_counts_the_plans_on_a_terminal(is_terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = Terminal() if is_terminal else io.StringIO()
    monkeypatch.setattr("sys.stderr", stderr)
    table, options = made_up(2, 1, random.Random(0))
    choose(table.__getitem__, options, PLENTY)
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
OPTIONS = WrapOptions(
    layers="layers",
    dtype=None,
    num_slots="auto",
    activations="auto",
    micro_batch_size="auto",
    batch_dims=None,
    update="step",
    grad_dtype=torch.float32,
    host_threads=1,
    init=None,
    compile=False,
    device_memory="1kB",
)


@pytest.mark.parametrize("machine", MACHINES, ids=["slow bus", "fast bus"])
def test_it_is_about_as_fast_as_what_an_exhaustive_search_of_plans_finds(machine: Machine) -> None:
    options = Options.of(AUTO, layers=3, batch=1)
    if machine is MACHINES[0]:
        options = replace(options, sizes=(None, 32))
    plan = plan_of(skeleton(Stack()), machine, Batch.like(torch.empty(128, 32)), OPTIONS)
    table = {choice: plan(choice) for choice in every(options)}
    for room in rooms(table, random.Random(0), 60):
        assert excess(table, options, room) < 0.01


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
    assert chosen.plan.allocated <= 350_000
    executor = wrapped(model).executor
    assert len(executor.pager.slots.buffers) == chosen.choice.num_slots == chosen.plan.num_slots
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
    assert chosen.choice == Choice(tuple(policies), chosen.choice.num_slots, None)
    assert {choice.activations for choice in chosen.considered} == {tuple(policies)}


def test_batch_dims_go_with_micro_batches_alone(config: Config) -> None:
    model = gpt(2)
    chosen = wrapped_auto(model, micro_batch_size="auto", batch_dims={"x": 0})
    streamer.unwrap(model)
    assert chosen.choice.micro_batch_size is None
    given = with_options(config, stream={"micro_batch_size": "auto", "batch_dims": {"x": 0}})
    settled, _ = settle(given, replace(MACHINES[1], host_bytes=1 << 34))
    assert (settled.stream.micro_batch_size, settled.stream.batch_dims) == (None, None)


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


#: Of a GPT that is streamed in parts.
PARTS = ("transformer.h.*.attn.*", "transformer.h.*.mlp.*")


def test_a_step_of_parts_is_planned_where_that_of_layers_does_not_fit() -> None:
    torch.manual_seed(0)
    model = GPT(vocab_size=VOCAB, block_size=16, n_layer=1, n_head=2, n_embd=128)
    options = {"num_slots": "auto", "device_memory": "1MB"}
    tokens = batch(0)[:1, :4]
    with pytest.raises(
        MemoryError, match=r"the largest layer, 'transformer\.h\.0', takes .* stream its parts: "
    ):
        wrapped_auto(model, example=tokens, **options)
    chosen = assert_device_takes_what_was_planned(
        model, tokens, layers=PARTS, micro_batch_size="auto", **options
    )
    assert chosen.plan.allocated <= 1_000_000
    with pytest.raises(MemoryError, match=r"takes \d+ bytes; device_memory=\d+ would do$"):
        wrapped_auto(model, example=tokens, layers=PARTS, **options | {"device_memory": "300kB"})


def test_where_nothing_fits_what_is_short_is_named() -> None:
    model = gpt(2)
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
    model = gpt(2)
    before = [param.data_ptr() for param in model.parameters()]
    with pytest.raises(MemoryError, match="a step with 'keep' in all layers, 2 slots .*device_memory needs"):
        wrapped_auto(model, device_memory="230kB", **given)
    assert [param.data_ptr() for param in model.parameters()] == before
    chosen = wrapped_auto(model, **given)
    assert chosen.choice == Choice("keep", 2, None) and "no other" not in chosen.reason
    streamer.unwrap(model)


def test_what_host_memory_has_no_room_for_is_planned_on_disk(tmp_path: Path) -> None:
    model = gpt(8)
    disk = Disks([tmp_path], partial(Scratch, direct_io="off"))
    with pytest.raises(MemoryError, match=r"host_memory needs \d+ bytes .* and has 1600000 bytes"):
        wrapped_auto(model, num_slots=2, host_memory="1.6MB")
    chosen = wrapped_auto(model, num_slots=2, host_memory="1.6MB", disk=disk)
    assert chosen.plan.host_total <= 1_600_000
    streamer.AdamW(model.parameters())
    assert chosen.plan.disk_bytes == streamer.stats(model).disk_bytes != {}
    streamer.unwrap(model)


def test_what_is_on_disk_leaves_room_for_layer_inputs_that_wait(tmp_path: Path) -> None:
    """Which the example tells. Without one moments make room, if there are enough of them in memory."""
    tokens, targets = batch(0)[:, :-1], batch(0)[:, 1:]

    def step(model: nn.Module, optimizer: streamer.AdamW) -> torch.Tensor:
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    given = {
        "activations": "recompute+offload",
        "num_slots": 2,
        "host_memory": "1.5MB",
        "disk": Disks([tmp_path], partial(Scratch, direct_io="off")),
    }
    model = streamer.wrap(gpt(8), layers="transformer.h", device="cpu", **given | {"host_memory": "1.1MB"})
    with pytest.raises(
        MemoryError, match="saved inputs .*wrap with example=, a batch, to leave room for them"
    ):
        step(model, streamer.AdamW(model.parameters()))
    streamer.unwrap(model)
    losses = []
    for options, has_example in ((given, True), (given, False), ({"activations": "recompute"}, True)):
        model = gpt(8)
        if has_example:
            wrapped_auto(model, **options)
        else:
            streamer.wrap(model, layers="transformer.h", device="cpu", **options)
        optimizer = streamer.AdamW(model.parameters(), lr=1e-2)
        losses.append(torch.stack([step(model, optimizer) for _ in range(3)]))
        assert sum(streamer.stats(model).host_bytes.values()) <= 1_500_000 or options is not given
        assert bool(streamer.stats(model).disk_bytes) == (options is given)
        streamer.unwrap(model)
    assert torch.equal(losses[0], losses[2]) and torch.equal(losses[1], losses[2])


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
        ({"example": None}, r"'auto' needs a batch to plan with: give wrap\(example=...\)"),
        ({"example": (3,)}, "example: there is no tensor in it whose first dimension could be"),
        ({"example": {"ids": torch.zeros(4, 8)}}, r"example: it is not what GPT.forward takes \(missing a"),
        ({"example": (torch.zeros(4, 8),) * 4}, r"example: it is not what GPT.forward takes \(too many"),
        ({"example": torch.zeros(0, 8).long()}, "example: its batch is empty: give one as large"),
        (
            {"model": Lookup(), "layers": "layers", "example": torch.zeros(4, 8)},
            r"the model cannot run on a batch like it \(tensors used as indices must be long, int",
        ),
        ({"example": torch.zeros(4, 17).long()}, r"example: the model cannot run on a batch like it \(.+\)"),
        ({"machine": "rtx-4091"}, r"there is no machine 'rtx-4091': did you mean rtx-4090, .*\? known are"),
        ({"machine": 3}, "machine=3: give the name of one, or a streamer.simulate.machine.Machine"),
        ({"activations": "automatic"}, "activations='automatic' is unknown: use one of"),
        ({"num_slots": "automatic"}, "num_slots='automatic': it must be an integer of 1 or more"),
        ({"layers": "transformer.x"}, "layers='transformer.x': there is no such module"),
        (
            {"model": Curious(), "layers": "layers", "example": torch.zeros(4, 32)},
            r"without values, which this model needs \(.*item.*\): give activations, num_slots .* example$",
        ),
    ],
)
def test_what_cannot_be_chosen_is_one_clear_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        wrapped_auto(**{"model": gpt(2)} | options)
    assert "\n" not in str(raised.value)


def test_what_has_no_values_is_refused_before_it_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamer.model.auto.plan_step", lambda *args: pytest.fail("it was planned"))
    with torch.device("meta"):
        model = gpt(2)
    with pytest.raises(ValueError, match=r"is on the meta device and has no values: give wrap\(init="):
        wrapped_auto(model)


def test_a_machine_may_be_given_by_name() -> None:
    model = gpt(2)
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
    with pytest.raises(ConfigError, match=r"\[stream\]: not enough memory for any options that 'auto'"):
        settle(config, replace(machine, device_bytes=1000))


def test_a_config_is_settled_with_parts_of_layers(config: Config) -> None:
    config = with_options(
        config,
        model={"args": config.model.args | {"n_embd": 128}},
        data={"context": 4, "batch_size": 1},
        stream={"activations": "recompute", "num_slots": "auto", "device_memory": "900kB"},
    )
    machine = replace(MACHINES[1], host_bytes=PROCESS_BYTES + (1 << 30), device_bytes=1 << 30)
    with pytest.raises(ConfigError, match=r"or stream parts of layers \(stream.layers takes globs\)"):
        settle(config, machine)
    settled, chosen = settle(with_options(config, stream={"layers": PARTS}), machine)
    assert chosen is not None
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
