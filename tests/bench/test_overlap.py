"""bench/overlap.py: a step cut out of a trace and added up, exactly by hand where the clock is virtual."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import streamer
from bench import overlap
from bench.by_layer import (
    FOR_BACKWARD,
    FOR_FORWARD,
    GRADIENT,
    PURPOSES,
    UNUSED,
    CompleteTrace,
    Placed,
    place,
    rows,
    totals,
)
from streamer.backends.base import Backend, Lane
from streamer.backends.thread import ThreadBackend
from streamer.backends.virtual import VirtualBackend
from streamer.engine.handle import wrapped
from streamer.planner.machine import Machine

#: Powers of two, so that every second is exact.
ROUND = Machine(
    "round",
    flops_per_second=16.0,
    h2d_bytes_per_second=2.0,
    d2h_bytes_per_second=4.0,
    host_bytes_per_second=8.0,
    device_bytes=1 << 40,
    host_bytes=1 << 40,
)
TOKENS, MATRIX, STEPS = 64, 32 * 32, 4
#: Seconds on ROUND of one 32 x 32 matrix in fp32: each way over the bus, its update, its product with TOKENS.
IN, OUT, UPDATE, PRODUCT = 4 * MATRIX / 2, 4 * MATRIX / 4, 28 * MATRIX / 8, 2 * TOKENS * MATRIX / 16

DEMO = "configs/gpt2-demo.toml"
TINY = [
    "model.args.n_embd=64",
    "model.args.n_head=2",
    "model.args.n_layer=3",
    "model.args.block_size=8",
    "train.max_length=8",
    "train.per_device_train_batch_size=2",
]


class Stack(nn.Module):
    """Layers of one 32 x 32 matrix each, whose product is needed again in backward."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 32, bias=False), nn.Sigmoid()) for _ in range(layers)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def trained(model: nn.Module, inputs: torch.Tensor, steps: int, **options: object) -> CompleteTrace:
    streamer.wrap(model, **options)
    optimizer = streamer.AdamW(model.parameters())
    trace = wrapped(model).executor.issuer.trace = CompleteTrace()
    for _ in range(steps):
        model(inputs).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    streamer.synchronize(model)
    wrapped(model).close()
    return trace


def stack() -> list[Placed]:
    """STEPS + 2 steps of a Stack on ROUND: one to warm up, and one after those of MEASURED."""
    with torch.device("meta"):
        model, inputs = Stack(), torch.empty(TOKENS, 32)
    options = {"layers": "layers", "num_slots": 2, "backend": VirtualBackend(ROUND)}
    return place(trained(model, inputs, STEPS + 2, **options).in_order_of_issue())


MEASURED = range(1, STEPS + 1)


def raw_on_round(lane: Lane, nbytes: int) -> float:
    """As if a raw copy were four times as fast as one on ROUND into the device, and twice as fast out."""
    return nbytes / 8.0


def five(backend: Backend, steps: int, **options: object) -> CompleteTrace:
    """Of a model that has weights in no layer."""
    with torch.device(backend.device):
        model = nn.Sequential(nn.Linear(16, 32), Stack(5), nn.Linear(32, 8))
        inputs = torch.zeros(2, 16)
    return trained(model, inputs, steps, layers="1.layers", backend=backend, **options)


NOTHING = dict.fromkeys((lane.value for lane in Lane), 0.0)


def test_figures_by_hand() -> None:
    found = rows(stack(), MEASURED, raw_on_round)
    arriving = {"copies": STEPS, "copies_per_step": 1.0, "bytes": 4 * MATRIX, "seconds": IN} | {
        "bytes_per_second": 2.0,
        "of_raw": 0.25,
    }
    leaving = {**arriving, "seconds": OUT, "bytes_per_second": 4.0, "of_raw": 0.5}
    none = {"copies": 0, "copies_per_step": 0.0}

    def layer(unit: int, *, again: bool, products: int, exposed: dict[str, float]) -> dict[str, Any]:
        busy = {"compute": (1 + products) * PRODUCT, "h2d": (1 + again) * IN, "d2h": OUT, "host": UPDATE}
        return {
            "unit": unit,
            FOR_FORWARD: arriving,
            FOR_BACKWARD: arriving if again else none,
            GRADIENT: leaving,
            UNUSED: none,
            "forward_seconds": PRODUCT,
            "backward_seconds": products * PRODUCT,
            "busy_seconds": NOTHING | busy,
            "exposed_seconds": NOTHING | exposed,
        }

    assert found["layers"] == [
        # forward asks for it at once: it waits for its update, then for the copy. The gradient of
        # the first layer's input is not needed. Layer 2 took its slot, so it is copied again for backward
        layer(0, again=True, products=2, exposed={"host": UPDATE, "h2d": IN}),
        layer(1, again=False, products=3, exposed={}),
        layer(2, again=False, products=3, exposed={}),
    ]
    idle = {purpose: none for purpose in PURPOSES} | {"busy_seconds": NOTHING, "backward_seconds": None}
    assert found["root"] == {**idle, "forward_seconds": 0.0, "exposed_seconds": NOTHING}
    # the last gradient has to land
    assert found["caller"] == {**idle, "forward_seconds": None, "exposed_seconds": NOTHING | {"d2h": OUT}}


def test_totals_by_hand() -> None:
    seconds = 11 * PRODUCT + UPDATE + IN + OUT
    assert totals(stack(), MEASURED, tokens=TOKENS, parameters=3 * MATRIX) == {
        "step_seconds": dict.fromkeys(("lower_quartile", "median", "upper_quartile"), seconds),
        "mean_step_seconds": seconds,
        "bytes_per_step": {"h2d": 4 * 4 * MATRIX, "d2h": 3 * 4 * MATRIX},
        "busy_seconds": NOTHING
        | {"compute": 11 * PRODUCT, "h2d": 4 * IN, "d2h": 3 * OUT, "host": 3 * UPDATE},
        "exposed_seconds": NOTHING | {"h2d": IN, "d2h": OUT, "host": UPDATE},
        "overlap": {"h2d": 1 - 1 / 4, "d2h": 1 - 1 / 3, "host": 1 - 1 / 3},
        "other_seconds": 0.0,
        "exposed_transfer_of_step": (IN + OUT) / seconds,
        "transfer_overlap": 1 - (IN + OUT) / (4 * IN + 3 * OUT),
        "tokens_per_second": TOKENS / seconds,
        "flops_per_second": 6 * 3 * MATRIX * TOKENS / seconds,
    }


@pytest.mark.parametrize(
    ("update", "num_slots", "virtual"),
    # each two of them meet
    [
        (update, num_slots, (update == "step") == (num_slots in (1, 3)))
        for update, num_slots in (("step", 1), ("backward", 2), ("backward", 3), ("step", 5))
    ],
)
def test_rows_add_up_to_the_totals_and_to_the_trace(update: str, num_slots: int, virtual: bool) -> None:
    backend = VirtualBackend(ROUND) if virtual else ThreadBackend()
    steps = 4  # their mean is exact
    trace = five(backend, steps, num_slots=num_slots, update=update)
    placed = place(trace.in_order_of_issue())
    # all of it: also the first steps, and what was fetched for a forward that never came
    every = range(steps)
    assert {one.step for one in placed} == set(every)
    assert [one.record for one in sorted(placed, key=lambda one: one.record.span.start)] == trace.records()
    found = rows(placed, every, lambda lane, nbytes: 1.0)
    of_all = [*found["layers"], found["root"], found["caller"]]
    assert [row["unit"] for row in found["layers"]] == list(range(5))
    for purpose, lane in ((FOR_FORWARD, Lane.H2D), (GRADIENT, Lane.D2H)):
        kinds = (FOR_FORWARD, FOR_BACKWARD, UNUSED) if lane is Lane.H2D else (GRADIENT,)
        copied = [row[kind] for row in of_all for kind in kinds if row[kind]["copies"]]
        issued = [record.op for record in trace.records() if record.op.lane is lane]
        assert sum(copy["copies"] for copy in copied) == len(issued), purpose
        assert sum(copy["copies"] * copy["bytes"] for copy in copied) == sum(op.nbytes for op in issued)
    for key, of_lane in (("busy_seconds", trace.busy_seconds), ("exposed_seconds", trace.exposed_seconds)):
        for lane in Lane:
            added = math.fsum(row[key][lane.value] for row in of_all) * steps
            assert added == (of_lane[lane] if virtual else pytest.approx(of_lane[lane]))


def run_main(folder: Path, *arguments: str) -> dict[str, Any]:
    report, picture, trace = (folder / name for name in ("overlap.json", "overlap.png", "trace.json"))
    overrides = [word for override in TINY for word in ("--set", override)]
    outputs = ["--json", str(report), "--png", str(picture), "--trace", str(trace)]
    overlap.main([DEMO, *overrides, "--steps", "3", "--warmup", "1", *outputs, *arguments])
    assert any(event["name"] == "rootF" for event in json.loads(trace.read_text())["traceEvents"])
    return json.loads(report.read_text())


@pytest.mark.parametrize("backend", ["thread", "virtual", pytest.param("cuda", marks=pytest.mark.cuda_api)])
def test_a_run(backend: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = run_main(tmp_path, "--backend", backend)
    assert found["backend"] == backend
    assert found["config"]["model"]["args"]["n_layer"] == 3
    assert [row["unit"] for row in found["layers"]] == [0, 1, 2]
    # 12 n^2 + 13 n parameters of 4 bytes, each way
    nbytes = 4 * (12 * 64**2 + 13 * 64)
    for row in found["layers"]:
        assert row[FOR_FORWARD]["copies"] == row[GRADIENT]["copies"] == 3
        assert row[FOR_FORWARD]["bytes"] == row[GRADIENT]["bytes"] == nbytes
        assert row[FOR_FORWARD]["of_raw"] > 0
    assert [row[FOR_BACKWARD]["copies"] for row in found["layers"]] == [3, 0, 0]
    assert [found["root"][purpose]["copies"] for purpose in PURPOSES] == [3, 0, 3, 0]
    assert found["totals"]["step_seconds"]["median"] > 0
    assert nbytes in [raw["bytes"] for raw in found["raw_copies"]]
    if backend == "virtual":
        assert [row[FOR_FORWARD]["of_raw"] for row in found["layers"]] == pytest.approx([1, 1, 1])
    assert (tmp_path / "overlap.png").read_bytes().startswith(b"\x89PNG")
    assert "of a raw copy's rate" in capsys.readouterr().out
