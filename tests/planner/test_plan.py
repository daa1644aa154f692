"""The plan of a step beside the step itself: bytes to the byte, like layers as if each had run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import streamer
from models.gpt2 import GPT
from streamer.backends.base import PIECE_BYTES, Backend
from streamer.backends.thread import ThreadBackend
from streamer.backends.virtual import VirtualBackend
from streamer.engine.executor import Executor
from streamer.engine.handle import wrapped
from streamer.planner.layers import measure_kinds
from streamer.planner.machine import GIB, Machine
from streamer.planner.measure import Tracker
from streamer.planner.step import (
    GAPS,
    OUTSIDE,
    ROUNDING,
    SAVED,
    WORKING_SET,
    WORKSPACES,
    StepPlan,
    StepTracker,
    plan_step,
    predict_step,
)
from tests.reference import hugging_face

CPU = Machine("cpu", 1e12, 1e10, 1e10, 1e10, 1 << 40, 1 << 40, kind="cpu")
CUDA = replace(CPU, name="cuda", kind="cuda")
VOCAB, TIME, BATCH = 96, 24, 6


def gpt(*, layers: int = 4, dropout: float = 0.0) -> nn.Module:
    return GPT(vocab_size=VOCAB, block_size=TIME, n_layer=layers, n_head=2, n_embd=32, dropout=dropout)


def llama() -> nn.Module:
    """Grouped keys and values, rotary positions, a gated MLP."""
    model: nn.Module = hugging_face(vocab_size=VOCAB, intermediate_size=48, num_hidden_layers=4)
    return model


class Mixed(nn.Module):
    """Layers of two kinds, one of them with frozen weights, and one that returns two tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 16)
        self.layers = nn.ModuleList(
            [Two(), nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16)), Two(), Two()]
        )
        self.layers[2].requires_grad_(False)
        self.head = nn.Linear(16, VOCAB)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
            x = sum(x) if isinstance(x, tuple) else x
        logits: torch.Tensor = self.head(x)
        return logits


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x, F.gelu(self.linear(self.norm(x)))


class Shares(nn.Module):
    """Layers that return what they were given, parts of it, and what their graphs keep."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 16)
        self.layers = nn.ModuleList(Part(kind) for kind in (0, 1, 2, 0, 1, 2))
        self.head = nn.Linear(16, VOCAB)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x, parts = self.embed(tokens), 0.0
        for layer in self.layers:
            x, part = layer(x)
            parts = parts + part.float().mean()
        logits: torch.Tensor = self.head(x) + parts
        return logits


class Part(nn.Module):
    def __init__(self, kind: int) -> None:
        super().__init__()
        self.kind = kind
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.linear(x).tanh()
        return y, (x, x[..., 4:], y[..., :4])[self.kind]


def steps_of(model: nn.Module, backend: Backend, *, packed: bool = False) -> Callable[[], None]:
    """Steps on tokens; with ``packed`` on longer rows of two texts each."""
    optimizer = streamer.AdamW(model.parameters())
    batch = (2, 256) if packed else (BATCH, TIME)
    tokens = torch.zeros(batch, dtype=torch.long, device=backend.device)
    options: dict[str, Any] = {}
    if packed:
        options = {"position_ids": torch.arange(128, device=backend.device).repeat(2, 2), "use_cache": False}

    def step() -> None:
        result: Any = model(tokens, **options)
        logits = getattr(result, "logits", result)
        F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def begin(
    build: Callable[[], nn.Module], backend: Backend, layers: str, *, packed: bool = False, **options: Any
) -> tuple[Executor, Callable[[], None]]:
    with torch.device("meta") if backend.device.type == "meta" else nullcontext():
        model = build()
    streamer.wrap(model, layers=layers, backend=backend, **options)
    return wrapped(model).executor, steps_of(model, backend, packed=packed)


def begin_plain(
    layers: Iterable[Callable[[], nn.Module]],
    batch: tuple[int, int],
    *,
    backend: VirtualBackend | None = None,
    **options: Any,
) -> tuple[Executor, Callable[[], torch.Tensor]]:
    """A streamed stack of ``layers`` without values, and its forward on a ``batch``."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Sequential(*(build() for build in layers)), nn.Flatten())
    streamer.wrap(model, layers="0", backend=backend or VirtualBackend(CPU), **options)
    inputs = torch.zeros(batch, device="meta", requires_grad=True)
    return wrapped(model).executor, lambda: model(inputs)


def plan_plain(layers: Iterable[Callable[[], nn.Module]], batch: tuple[int, int], **options: Any) -> StepPlan:
    """The plan of a forward and a backward of `begin_plain`."""
    executor, forward = begin_plain(layers, batch, **options)
    return plan_step(executor, lambda: forward().sum().backward())


def measured_peak(build: Callable[[], nn.Module], layers: str, **options: Any) -> int:
    """What a real step holds beside the buffers, on the CPU."""
    executor, step = begin(build, ThreadBackend(), layers, **options)
    step()
    with Tracker() as tracker:
        step()
        executor.synchronize()
    executor.backend.close()
    return tracker.peak


MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "gpt": (gpt, "transformer.h"),
    "gpt with dropout": (lambda: gpt(dropout=0.1), "transformer.h"),
    "llama": (llama, "model.layers"),
    "mixed": (Mixed, "layers"),
    "shares": (Shares, "layers"),
}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"activations": "keep", "num_slots": 3},
    {"activations": "recompute+offload"},
    {"micro_batch_size": 2},
    {"activations": "keep", "micro_batch_size": 1},
    {"activations": "recompute+offload", "micro_batch_size": 4, "dtype": torch.bfloat16},
    {"activations": "keep", "dtype": torch.bfloat16, "num_slots": 1},
    {"update": "backward"},
]


def named(options: dict[str, Any]) -> str:
    return ",".join(f"{name}={value}".removeprefix("activations=") for name, value in options.items())


def covering(names: Iterable[str]) -> list[Any]:
    """Each model with a third of the options."""
    return [
        pytest.param(name, options, id=f"{name}-{named(options)}")
        for i, name in enumerate(names)
        for j, options in enumerate(OPTIONS)
        if (i + j) % 3 == 0
    ]


@pytest.mark.parametrize(("name", "options"), covering(MODELS))
def test_the_plan_holds_what_a_step_holds(name: str, options: dict[str, Any]) -> None:
    build, layers = MODELS[name]
    executor, step = begin(build, VirtualBackend(CPU), layers, **options)
    plan = plan_step(executor, step)
    beside = sum(plan.device_bytes.get(owner, 0) for owner in (SAVED, WORKING_SET, OUTSIDE))
    assert beside == pytest.approx(measured_peak(build, layers, **options), rel=0.05)


@pytest.mark.parametrize("options", [{}, {"micro_batch_size": 1}, {"activations": "keep"}], ids=named)
def test_the_plan_of_packed_rows_holds_their_mask(options: dict[str, Any]) -> None:
    def held(*, packed: bool) -> int:
        executor, step = begin(llama, VirtualBackend(CPU), "model.layers", packed=True, **options)
        plan = plan_step(executor, step, packed=packed)
        return sum(plan.device_bytes.get(owner, 0) for owner in (SAVED, WORKING_SET, OUTSIDE))

    measured = measured_peak(llama, "model.layers", packed=True, **options)
    assert held(packed=True) == pytest.approx(measured, rel=0.05)
    assert held(packed=False) < 0.95 * measured


@pytest.mark.parametrize(
    ("name", "options"),
    # the real layers of "gpt" take the longest: it meets two options
    [*covering(["shares", "mixed"]), *covering(["gpt"])[:2]],
)
def test_one_layer_of_each_kind_counts_for_all(name: str, options: dict[str, Any]) -> None:
    build, layers = MODELS[name]

    def figures(*, once: bool) -> tuple[Any, ...]:
        executor, step = begin(build, VirtualBackend(CUDA), layers, **options)
        tracker = StepTracker(executor)
        if once:
            measure_kinds(executor, tracker)
        with tracker:
            prediction = predict_step(executor, step)
        seconds = [
            prediction.seconds,
            *prediction.busy_seconds.values(),
            *prediction.exposed_seconds.values(),
        ]
        return seconds, (prediction.flops, tracker.peak, executor.saved.peak, executor.host.bytes())

    counted, run = figures(once=True), figures(once=False)
    assert counted[1] == run[1]
    # they are added up in another order
    assert counted[0] == pytest.approx(run[0], rel=1e-9)


@pytest.mark.parametrize("batch", [4, 12, 13])
@pytest.mark.parametrize("activations", ["recompute", "keep"])
def test_slices_that_are_counted_take_as_much_as_those_that_run(activations: str, batch: int) -> None:
    """With no backward after it, whose peak would hide that of the forward."""

    def figures(*, once: bool) -> tuple[int, int]:
        options: dict[str, Any] = {"activations": activations, "micro_batch_size": 2}
        executor, forward = begin_plain([partial(Tanh, 16)] * 2, (batch, 16), **options)
        tracker = StepTracker(executor)
        if once:
            measure_kinds(executor, tracker)
        with tracker:
            forward()
        return tracker.peak, executor.saved.peak

    assert figures(once=True) == figures(once=False)


def test_layers_that_differ_in_a_number_are_told_apart() -> None:
    class Wide(nn.Module):
        def __init__(self, times: int) -> None:
            super().__init__()
            self.times = times
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(self.times):
                x = torch.tanh(self.linear(x))
            return x

    def flops(*times: int) -> int:
        return plan_plain([partial(Wide, count) for count in times], (4, 8)).prediction.flops

    assert flops(1, 3, 2) == flops(2, 2, 2) == 2 * flops(1, 1, 1)


def test_owners_of_a_step_by_hand() -> None:
    """Three layers of one matrix; tanh saves its result, so that backward computes the product again."""
    width, rows = 32, 64
    with torch.device("meta"):
        model = nn.Sequential(nn.Sequential(*(Tanh(width) for _ in range(3))), nn.Flatten())
    streamer.wrap(model, layers="0", backend=VirtualBackend(CUDA), num_slots=2)
    inputs = torch.zeros(rows, width, device="meta", requires_grad=True)

    def step() -> None:
        model(inputs).square().sum().backward()
        model.zero_grad()

    plan = plan_step(wrapped(model).executor, step)
    matrix, hidden = 4 * width * width, 4 * rows * width
    assert plan.device_bytes["weight slots"] == plan.device_bytes["gradient slots"] == 2 * matrix
    # what the user gave was there before; of the layers' results two are saved as inputs of the next
    assert plan.device_bytes[SAVED] == 3 * hidden
    rounding = plan.device_bytes[ROUNDING]
    comes_and_goes = plan.device_total - 4 * matrix - plan.device_bytes[WORKSPACES] - rounding
    assert rounding == (comes_and_goes + plan.device_bytes[WORKSPACES]) // 32
    assert plan.reserve[GAPS] == comes_and_goes // 8 + PIECE_BYTES
    assert plan.host_bytes == {"weights": 3 * matrix, "gradients": 3 * matrix}


class Tanh(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))


def step_seconds(machine: Machine) -> float:
    """Seconds of a step of three layers on ``machine``."""
    executor, forward = begin_plain([partial(Tanh, 8)] * 3, (4, 8), backend=VirtualBackend(machine))
    return predict_step(executor, lambda: forward().sum().backward()).seconds


@pytest.mark.parametrize("machine", [CPU, CUDA], ids=["cpu", "cuda"])
def test_a_step_of_small_layers_takes_the_librarys_time(machine: Machine) -> None:
    slow = step_seconds(replace(machine, seconds_per_visit=10.0))
    # three layers forward, and backward
    assert slow - step_seconds(replace(machine, seconds_per_visit=0.0)) == pytest.approx(60.0, rel=1e-6)


def test_a_budget_is_filled_with_slots() -> None:
    def plan_with(**options: Any) -> StepPlan:
        with torch.device("meta"):
            model = gpt(layers=8)
        for block in model.transformer.h:
            block.mlp.requires_grad_(False)
        streamer.wrap(model, layers="transformer.h", backend=VirtualBackend(CUDA), **options)
        return plan_step(wrapped(model).executor, steps_of(model, VirtualBackend(CUDA)))

    plan, expected = plan_with(device_memory=GIB), plan_with(num_slots=8)
    assert plan.num_slots == 8
    assert sum(plan.device_bytes.values()) <= GIB
    # the step that is told is one that has had them from its beginning, frozen weights in them too
    assert plan.prediction.busy_seconds == pytest.approx(expected.prediction.busy_seconds)
    assert plan.prediction.seconds == pytest.approx(expected.prediction.seconds)
