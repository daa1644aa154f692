"""`streamer plan` of a run with a part of its state on disk: where bytes are, what moves, and what waits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import streamer
from streamer.backends.base import DISKS
from streamer.backends.disk import Disks, Scratch
from streamer.cli.build import build_optimizer, import_factory, wrap_options
from streamer.cli.config import Config, load_config, with_keys
from streamer.cli.main import main
from streamer.cli.plan import command
from streamer.cli.plan.planning import plan_run
from streamer.cli.plan.variants import WAITING, least_batch_that_hides_disk, waiting_for_disk, with_batch
from streamer.cli.run import loss_function, step_on
from streamer.model.options import parse_bytes
from streamer.planner.machine import MACHINES
from streamer.store import on_disk
from tests.cli.common import sets
from tests.cli.test_plan_command import SMALL, Light, plan_of, planned, written

pytestmark = pytest.mark.usefixtures("each_plan_is_made_once")

#: Beside the weights, the gradients and the ring, room for the state of some layers.
BUDGET = "8MB"
LIMITED = f'stream.host_memory="{BUDGET}"', 'stream.disk="/nvme"'
ON_DISK = sets(*LIMITED)
#: Less than the weights and the gradients take.
LEAST = "5MB"
IN_BACKWARD = "stream.update='backward'", "train.max_grad_norm=0"


@pytest.fixture
def config(tmp_path: Path) -> str:
    text = SMALL.replace("models.gpt2:GPT", f"{Light.__module__}:Light")
    return written(tmp_path / "small.toml", text.replace("n_layer = 5", "n_layer = 12"))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Plans on an RTX 4090 with some figures changed."""

    def change(**figures: float) -> None:
        changed = replace(MACHINES["rtx-4090"], **figures)  # type: ignore[arg-type]
        monkeypatch.setattr("streamer.cli.calibrate.machine_file.machine", lambda *_: changed)

    return change


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    main(["plan", *arguments])
    return capsys.readouterr().out


def bytes_of(text: str) -> int:
    found = parse_bytes("host_memory", text)
    assert found is not None
    return found


def test_bytes_by_tier_and_what_a_step_moves(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = planned(capsys, config, *ON_DISK)
    assert code == 0 and found["fits_host"]
    assert found["host_memory"] == bytes_of(BUDGET)
    of_process = found["host_bytes"]["Python and its libraries"]
    assert sum(found["host_bytes"].values()) - of_process <= bytes_of(BUDGET)
    moved = sum(found["disk_bytes"].values())
    assert 0 < moved == found["disk_read_bytes"] == found["disk_written_bytes"]
    assert found["steps_per_1000_tb_written"] == 10**15 // moved
    drive = MACHINES["rtx-4090"]
    rates = drive.disk_read_bytes_per_second, drive.disk_write_bytes_per_second
    for lane, rate in zip(DISKS, rates, strict=True):
        assert found["busy_seconds"][lane.value] == pytest.approx(moved / rate)
    # what is on disk is not in memory, but for padding
    in_memory = plan_of(config).host_bytes
    state = {name: in_memory[name] for name in ("exp_avg", "exp_avg_sq")}
    there = {name: found["host_bytes"].get(name, 0) + found["disk_bytes"][name] for name in state}
    assert all(state[name] <= there[name] < state[name] + 13 * 4096 * 2 for name in state)


def moved_by(config: Config, steps: int, folder: Path) -> tuple[int, int]:
    """Bytes that ``steps`` real steps read from disk and write there, as the scratch files count them."""
    opened: list[Scratch] = []

    def scratch(folders: Any, **options: Any) -> Scratch:
        opened.append(Scratch(folders, direct_io=False, **options))
        return opened[-1]

    torch.manual_seed(0)
    assert config.model.factory is not None
    model = import_factory(config.model.factory)(**config.model.args)
    streamer.wrap(model, **wrap_options(config, model) | {"device": "cpu", "disk": Disks([folder], scratch)})
    optimizer = build_optimizer(config, model)
    tokens = torch.zeros(config.train.per_device_train_batch_size, config.train.max_length, dtype=torch.long)
    batches = [(tokens, tokens, {})] * config.train.gradient_accumulation_steps
    for _ in range(steps):
        step_on(config, model, optimizer, loss_function(model), batches)
    streamer.synchronize(model)
    moved = sum(each.bytes_read for each in opened), sum(each.bytes_written for each in opened)
    streamer.unwrap(model)
    return moved


@pytest.mark.parametrize(
    ("options", "chunk"),
    [
        ([], 1 << 23),
        ([], 1 << 14),
        (['stream.host_memory="{least}"'], 1 << 14),
        (['stream.host_memory="{least}"', 'stream.dtype="bfloat16"', "stream.num_slots=3"], 1 << 14),
        (['stream.host_memory="2.5MB"', 'stream.dtype="bfloat16"', *IN_BACKWARD], 1 << 14),
        (['stream.host_memory="4MB"', 'stream.dtype="bfloat16"', 'optimizer.state_dtype="int8"'], 1 << 14),
        (["train.gradient_accumulation_steps=2"], 1 << 14),
    ],
    ids=["state in one chunk", "state", "weights", "bf16", "backward", "int8", "passes"],
)
def test_a_real_step_moves_the_planned_bytes(
    options: list[str], chunk: int, config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_disk, "CHUNK_ELEMENTS", chunk)
    settings = [LIMITED[0], *(option.format(least=LEAST) for option in options), LIMITED[1]]
    loaded = load_config(config, settings)
    plan = plan_run(loaded, MACHINES["rtx-4090"])
    assert plan.fits and plan.disk_moved[0] and plan.disk_moved[1]
    # nothing is read in the first step, and what is read early for a step is read in the one before
    few, many = (moved_by(loaded, steps, tmp_path) for steps in (2, 3))
    assert tuple(b - a for a, b in zip(few, many, strict=True)) == plan.disk_moved


def test_a_disk_that_is_not_needed(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, config, *sets('stream.disk="/nvme"'))
    assert "\nthe disk is not needed: all fits into host memory\n" in out


def test_a_slow_disk_that_no_batch_hides(
    config: str, capsys: pytest.CaptureFixture[str], machine: Callable[..., None]
) -> None:
    machine(disk_read_bytes_per_second=2e7, disk_write_bytes_per_second=1e7)
    settings = *LIMITED, "stream.num_slots=2"
    _, found = planned(capsys, config, *sets(*settings))
    slow = load_config(config, settings)
    in_memory = plan_run(with_keys(slow, stream={"host_memory": None, "disk": None}), MACHINES["rtx-4090"])
    share = 1 - in_memory.step.prediction.seconds / found["seconds"]
    assert found["binding_lane"] == "disk_write" and share > 0.5
    assert found["waiting_for_disk"] == pytest.approx(share)
    assert found["least_batch_that_hides_disk"] is None
    out = printed(capsys, config, *sets(*settings))
    assert (
        f"\nwith all in host memory a step would take {share:.1%} less; no batch up to 16 times this" in out
    )


def test_the_least_batch_that_hides_the_disk(config: str) -> None:
    figures = dict.fromkeys(("flops_per_second", "fp32_flops_per_second"), 5e10)
    drive = dict.fromkeys(("disk_read_bytes_per_second", "disk_write_bytes_per_second"), 1e8)
    plan_of = partial(plan_run, machine=replace(MACHINES["rtx-4090"], **figures, **drive))
    loaded = load_config(config, [*LIMITED, "stream.num_slots=2"])
    hidden = least_batch_that_hides_disk(plan_of(loaded), plan_of)
    assert hidden is not None
    size = hidden.config.train.per_device_train_batch_size
    assert size > loaded.train.per_device_train_batch_size
    assert waiting_for_disk(plan_of(with_batch(loaded, size)), plan_of) <= WAITING
    assert waiting_for_disk(plan_of(with_batch(loaded, size * 8 // 10)), plan_of) > WAITING
    assert least_batch_that_hides_disk(hidden, plan_of) is hidden


def test_a_batch_that_hides_the_disk_is_told(
    config: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = [config, *ON_DISK, *sets("stream.num_slots=2")]
    larger = f"{command.__name__}.least_batch_that_hides_disk"
    with monkeypatch.context() as patch:
        patch.setattr(larger, lambda plan, plan_of: plan_of(with_batch(plan.config, 24)))
        assert "; a batch of 24 (768 tokens) hides the disk\n" in printed(capsys, *waiting)
    monkeypatch.setattr(larger, lambda plan, plan_of: plan)
    out = printed(capsys, *waiting)
    assert "\ncompute hides the disk: with all in host memory a step would take as long\n" in out


def test_a_budget_without_a_disk_that_would_help(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    limited = [config, *sets(f'stream.host_memory="{BUDGET}"')]
    code, found = planned(capsys, *limited)
    assert code == 2 and found["fits_device"] and not found["fits_host"]
    assert found["with_disk"]["changes"] == found["mend"]["changes"] == {"stream.disk": "DIR"}
    with_disk = plan_of(config, *LIMITED)
    assert with_disk.fits and found["with_disk"]["disk_bytes"] == with_disk.step.disk_bytes
    out = printed(capsys, *limited)
    assert f"of {bytes_of(BUDGET) / (1 << 20):.2f} MiB (stream.host_memory): DOES NOT FIT" in out
    assert "it does not fit on the host; it would with --set stream.disk=DIR: " in out.splitlines()[-1]
    # in bf16 shorter moments come first
    bf16 = [*limited, *sets('stream.dtype="bfloat16"', 'stream.host_memory="6MB"')]
    _, found = planned(capsys, *bf16)
    assert "stream.disk" not in found["mend"]["changes"] and found["with_disk"] is not None
    amount = f"{sum(found['with_disk']['disk_bytes'].values()) / (1 << 20):.2f} MiB"
    assert f", or with --set stream.disk=DIR: {amount} would be on disk" in printed(capsys, *bf16)
