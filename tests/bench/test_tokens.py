"""`bench.tokens_per_transfer`: all of its parts in small, and steps that are timed anew for any machine."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import streamer
from bench import tokens_bus, tokens_per_transfer
from bench.replay import UNIT, Recording, replay
from bench.report_tables import TABLES
from bench.tokens_plain import PLANS
from bench.tokens_report import best_that_fits, curves, tokens_figure
from bench.tokens_variants import BASELINE, Streamed, Variant, plain_bytes, variants
from bench.versus_contenders import Plain
from bench.versus_task import Task
from models.gpt2 import GPT
from streamer.backends.virtual import VirtualBackend
from streamer.engine.handle import wrapped
from streamer.planner.machine import RTX_4090, RTX_4090_PCIE_3
from streamer.planner.step import predict_step

SIZES = {"n_layer": 4, "n_head": 2, "n_embd": 16, "vocab_size": 32, "block_size": 128}
SMALL = ["--n-layer", "4", "--n-head", "2", "--n-embd", "16", "--vocab-size", "32", "--context", "16"]
SMALL += ["--lr", "1e-2"]
NAMES = list(variants(slots=3, parts=2))


def run(folder: Path, *arguments: str) -> dict[str, object]:
    path = folder / "found.json"
    tokens_per_transfer.main([*arguments, "--json", str(path)])
    assert path.with_suffix(".png").stat().st_size > 1000
    return json.loads(path.read_text())


def task(exits: object = None, **sizes: int) -> Task:
    return Task(torch.device("cpu"), torch.float32, SIZES | sizes, batch_size=6, lr=1e-2, exits=exits)


def test_plain_beside_streamed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PLANS, 256, (2, 2, 1, 0.5))
    report = run(tmp_path, "plain", *SMALL, "--tokens", "256")
    text = "\n".join(TABLES["bench/tokens_per_transfer.py"](report))
    assert [group["tokens_per_step"] for group in report["groups"]] == [256]
    for group in report["groups"]:
        assert group["contenders"]["streamed"]["refused"] is None, group["contenders"]["streamed"]
        assert f"| {group['tokens_per_step']:,} | " in text
    figure = tokens_figure({"tokens_plain.json": report})
    assert "at these shares of plain PyTorch's tokens per second" in figure


def test_what_was_measured_before_an_interrupt_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[Task] = []

    def once(builders: object, task: Task, **options: object) -> tuple[dict[str, Any], dict[str, str]]:
        measured.append(task)
        if len(measured) == 2:
            raise KeyboardInterrupt
        return {}, {"whole batch": "too slow"}

    monkeypatch.setattr(tokens_bus, "measure", once)
    path = tmp_path / "found.json"
    few = ["--batch-sizes", "4", "8", "--gb-per-second", "1"]
    with pytest.raises(KeyboardInterrupt):
        tokens_per_transfer.main(["bus", *SMALL, *few, "--json", str(path)])
    (group,) = json.loads(path.read_text())["groups"]
    assert group["tokens_per_step"] == 4 * 16


def test_what_plain_holds_is_what_its_tensors_take() -> None:
    contender = Plain(task(), exact=True)
    inputs: dict[int, int] = {}
    for layer in contender.model.transformer.h:
        layer.register_forward_pre_hook(
            lambda _, args: inputs.setdefault(id(args[0].untyped_storage()), args[0].nbytes) and None
        )
    contender.step(contender_batch := task().batch(0))
    params = list(contender.model.parameters())
    held = 2 * sum(param.nbytes for param in params)  # with a gradient each
    held += sum(
        value.nbytes
        for state in contender.optimizer.state.values()
        for name, value in state.items()
        if name != "step"
    )
    found = plain_bytes(
        parameters=task().num_parameters, tokens=contender_batch[:, 1:].numel(), n_layer=4, n_embd=16
    )
    assert found == {"at_rest": held, "saved_inputs": 4 * contender_batch[:, 1:].numel() * 16 * 4}


def test_all_ways_on_a_slow_bus_once(tmp_path: Path) -> None:
    few = ["--batch-sizes", "8", "--rounds", "2", "--steps", "1", "--n-layer", "2"]
    report = run(tmp_path, "bus", *SMALL, *few, "--gb-per-second", "0.1", "--parts", "2", "--slots", "3")
    (group,) = report["groups"]
    assert list(group["contenders"]) == ["plain-fp32", "as fast as memory", *NAMES]
    for name, row in group["contenders"].items():
        assert row.get("refused") is None and "skipped" not in row, (name, row)
    text = "\n".join(TABLES["bench/tokens_per_transfer.py"](report))
    assert "| 0.1 GB/s each way | 128 |" in text
    assert sorted(curves(report)["0.1 GB/s each way"]) == sorted(group["contenders"])


@pytest.mark.parametrize("name", NAMES)
def test_every_way_has_the_gradients_of_the_whole_batch(name: str) -> None:
    tokens = task().batch(0)

    def gradients(contender: Streamed | Plain) -> dict[str, torch.Tensor]:
        parts = contender.variant.split(tokens) if isinstance(contender, Streamed) else (tokens,)
        for part in parts:
            (contender.loss(part) * (len(part) / len(tokens))).backward()
        return {name: param.grad.clone() for name, param in contender.model.named_parameters()}

    expected = gradients(Plain(task(), exact=True))
    contender = Streamed(task(), variants(slots=3, parts=2)[name])
    for key, gradient in gradients(contender).items():
        torch.testing.assert_close(gradient, expected[key], rtol=1e-4, atol=1e-6)
    streamer.unwrap(contender.model)


def test_a_step_timed_anew_is_the_step_that_the_machine_would_predict() -> None:
    def step_of(machine: object) -> tuple[object, object]:
        with torch.device("meta"):
            model = GPT(**SIZES)
        backend = VirtualBackend(machine)
        streamer.wrap(model, layers="transformer.h", backend=backend)
        optimizer = streamer.AdamW(model.parameters())
        tokens = torch.zeros(8, 16, dtype=torch.long, device="meta")

        def step() -> None:
            torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()

        return wrapped(model).executor, step

    executor, step = step_of(UNIT)
    recording = executor.issuer.trace = Recording()
    with executor.backend.counting_caller():
        step()
        first = len(recording.work)
        step()
    for machine in (RTX_4090, RTX_4090_PCIE_3):
        # products are all that takes compute's time in what is timed anew
        nothing_else = {"device_bytes_per_second": None, "seconds_per_op": 0.0, "seconds_per_visit": 0.0}
        products = replace(machine, fp32_flops_per_second=None, **nothing_else)
        expected = predict_step(*step_of(products), warmup=1)
        times = replay(recording.work, first, machine)
        assert times.seconds == pytest.approx(expected.seconds, rel=1e-6)
        assert times.busy_seconds == pytest.approx(expected.busy_seconds, rel=1e-6)


def test_machines_once(tmp_path: Path) -> None:
    sizes = {"n_layer": 4, "n_embd": 64, "vocab_size": 256, "block_size": 128}
    small = {f"model.args.{name}": size for name, size in sizes.items()} | {"train.max_length": 128}
    sets = [word for name, value in small.items() for word in ("--set", f"{name}={value}")]
    names = [BASELINE, "3 slots", "accumulation", "micro-batches", "offload", "all that saves"]
    few = ["--batch-sizes", "4", "--micro", "2", "--slots", "3", "--only", *names]
    report = run(tmp_path, "machines", *sets, *few)
    assert [row["variant"] for row in report["rows"]] == names
    rows = {row["variant"]: row for row in report["rows"]}
    for row in report["rows"]:
        for on in row["on"].values():
            assert 0 < on["of_ceiling"] <= 1
            assert on["tokens_per_second"] == pytest.approx(on["of_ceiling"] * on["ceiling"])
    # weights cross the bus twice for each part of the batch, or twice for all
    h2d = {name: rows[name]["on"]["RTX 4090"]["busy_seconds"]["h2d"] for name in names}
    assert h2d["accumulation"] > 1.5 * h2d[BASELINE] == 1.5 * h2d["micro-batches"]
    assert h2d["3 slots"] < h2d[BASELINE] <= h2d["offload"]
    device, host = (
        {name: sum(rows[name][where].values()) for name in names} for where in ("device_bytes", "host_bytes")
    )
    assert device["all that saves"] < device["micro-batches"] < device[BASELINE]
    assert host["offload"] > host[BASELINE] == host["micro-batches"]
    text = "\n".join(TABLES["bench/tokens_per_transfer.py"](report))
    assert "Most that fits on the RTX 4090: " in text
    assert best_that_fits(report, "RTX 4090") is not None
    assert "of the ceiling that its FLOPs set" in tokens_figure({"tokens_machines.json": report})


@pytest.mark.parametrize("part", ["bus", "machines"])
def test_a_variant_that_there_is_not_is_named(part: str) -> None:
    with pytest.raises(SystemExit, match=r"there is no nonsense here: choose among whole batch, "):
        tokens_per_transfer.main([part, "--only", "nonsense"])


def test_options_of_a_variant() -> None:
    assert Variant().options(batch_size=8, n_layer=4) == {"num_slots": 2}
    options = Variant(micro_batches=3, activations="recompute+offload", kept=0.25).options
    assert options(batch_size=8, n_layer=4) == {
        "num_slots": 2,
        "micro_batch_size": 3,
        "activations": ["recompute+offload"] * 3 + ["keep"],
    }


@pytest.mark.cuda_api
def test_all_ways_on_a_gpu_once(tmp_path: Path) -> None:
    few = ["--batch-sizes", "8", "--rounds", "2", "--steps", "1", "--device", "cuda", "--dtype", "float32"]
    report = run(tmp_path, "bus", *SMALL, *few, "--parts", "2", "--slots", "3")
    (group,) = report["groups"]
    assert group["gb_per_second"] is None
    assert [name for name, row in group["contenders"].items() if "skipped" in row] == []
