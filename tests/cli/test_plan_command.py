"""`streamer plan`: what it prints, for people and for programs, and what it says of bad input."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bench import plans
from bench.common import RESULTS
from streamer.cli.calibrate.machine_file import dump_machine
from streamer.cli.config import load_config, quoted
from streamer.cli.main import main
from streamer.cli.plan.command import figures
from streamer.cli.plan.planning import RunPlan, plan_run
from streamer.planner.machine import MACHINES, Machine
from streamer.planner.step import OUTSIDE, WORKING_SET
from tests.cli.common import sets

pytestmark = pytest.mark.usefixtures("each_plan_is_made_once")

SMALL = """
[model]
factory = "models.gpt2:GPT"

[model.args]
vocab_size = 256
block_size = 32
n_layer = 5
n_head = 2
n_embd = 64

[stream]
layers = "transformer.h"

[train]
output_dir = "small"
max_steps = 1
max_length = 32
per_device_train_batch_size = 8
learning_rate = 1e-3
"""


class Decides(nn.Module):
    """Asks for a value in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, 16)
        self.transformer = nn.ModuleDict({"h": nn.ModuleList(nn.Linear(16, 16) for _ in range(3))})
        self.head = nn.Linear(16, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.transformer["h"]:
            x = layer(x) if x.sum().item() > 0 else x
        logits: torch.Tensor = self.head(x)
        return logits


class Light(nn.Module):
    """Takes what GPT takes, and runs far fewer operations."""

    def __init__(self, vocab_size: int, block_size: int, n_layer: int, n_head: int, n_embd: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, n_embd)
        self.transformer = nn.ModuleDict({"h": nn.ModuleList(Residual(n_embd) for _ in range(n_layer))})
        self.head = nn.Linear(n_embd, vocab_size)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.transformer["h"]:
            x = layer(x)
        logits: torch.Tensor = self.head(x)
        return logits


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 6 * width), nn.Linear(6 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def written(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


@pytest.fixture
def gpt(tmp_path: Path) -> str:
    return written(tmp_path / "gpt.toml", SMALL)


@pytest.fixture
def config(tmp_path: Path) -> str:
    return written(tmp_path / "small.toml", SMALL.replace("models.gpt2:GPT", f"{__name__}:Light"))


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    code = main(["plan", *arguments, "--json"])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return code, found


def plan_of(config: str, *settings: str, on: Machine = MACHINES["rtx-4090"]) -> RunPlan:
    """The plan of a config alone; `planned` plans other batches, and what would be faster, too."""
    return plan_run(load_config(config, settings), on)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["plan", *arguments]) == 2
    out, error = capsys.readouterr()
    assert out == "" and error.count("\n") == 1
    return error


def test_the_plan_as_people_read_it(gpt: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "step.png"
    assert main(["plan", gpt, "--machine", "rtx-3090", "--timeline", str(picture)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("models.gpt2:GPT on RTX 3090: ")
    for words in (
        "weight slots",
        "gradient slots",
        "root weights",
        "saved layer inputs",
        "working set of one layer",
        "logits and loss",
        "gaps in the allocator",
        "exp_avg_sq",
        "of these page-locked",
        "of 24.00 GiB: fits",
        "TFLOP/s of the model's own (MFU ",
        "steps take ",
        "in small: 3 checkpoints of ",
        "largest batch that fits",
    ):
        assert words in out
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_table_of_machines_and_batch_sizes(gpt: str, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = [gpt, "--machines", "rtx-4090,h100-pcie", "--batch-sizes", "4,8"]
    code, rows = planned(capsys, *chosen)
    assert code == 0
    assert [(row["machine"], row["batch_size"]) for row in rows] == [
        ("rtx-4090", 4), ("rtx-4090", 8), ("h100-pcie", 4), ("h100-pcie", 8),
    ]  # fmt: skip
    for name, row in (("rtx-4090", rows[1]), ("h100-pcie", rows[3])):
        assert row == {"machine": name, **figures(plan_of(gpt, on=MACHINES[name]))}
    assert main(["plan", *chosen]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split()[:2] == ["machine", "batch"] and [line.split()[:2] for line in lines] == [
        ["rtx-4090", "4"], ["rtx-4090", "8"], ["h100-pcie", "4"], ["h100-pcie", "8"],
    ]  # fmt: skip
    assert "'many' is no batch size" in refused(capsys, gpt, "--batch-sizes", "many")
    assert "there is no machine 'abacus'" in refused(capsys, gpt, "--machines", "abacus")
    assert "leave out --machines" in refused(capsys, gpt, "--machines", "all", "--timeline", "x.png")


def test_what_would_be_faster_is_planned(gpt: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = planned(capsys, gpt)
    assert code == 0 and found["faster"], "twice the batch, at least"
    speeds = [one["tokens_per_second"] for one in found["faster"]]
    assert speeds == sorted(speeds, reverse=True) and speeds[-1] > 1.05 * found["tokens_per_second"]
    assert all(one["fits"] for one in found["faster"])
    best = found["faster"][0]
    changed = [shlex.split(quoted(key, value))[0] for key, value in best["changes"].items()]
    assert plan_of(gpt, *changed).tokens_per_second == best["tokens_per_second"]
    assert main(["plan", gpt]) == 0
    told = capsys.readouterr().out
    assert (
        told.count("\nfaster: --set ") == len(speeds)
        and " are not used: take a larger train.per_device_train_batch_size" in told
    )
    assert found["hours"] == pytest.approx(found["seconds"] / 3600)
    assert 0 < found["mfu"] < 1
    assert found["files"]["checkpoint"] == 12 * found["parameters"]


def test_figures_for_programs(gpt: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = planned(capsys, gpt)
    assert code == 0 and found["fits"] and found["mend"] is None
    assert found["tokens_per_step"] == 8 * 32
    assert found["tokens_per_second"] == pytest.approx(8 * 32 / found["seconds"])
    assert found["model_flops"] == 6 * found["parameters"] * 8 * 32
    # what runs again in backward, attention, and no product for the first layer's tokens
    assert found["model_flops"] < found["executed_flops"] < 1.6 * found["model_flops"]
    assert [row["batch_size"] for row in found["batches"]] == [2, 4, 8, 16, 32]
    needed = [row["device_needed"] for row in found["batches"]]
    assert needed == sorted(needed)
    assert found["largest_batch"]["or_more"] and found["largest_batch"]["batch_size"] == 16 * 4 * 8
    host = found["host_bytes"]
    assert found["host_pinned"] == host["weights"] + host["gradients"] < found["host_needed"]
    assert (
        sum(found["device_bytes"].values()) + sum(found["device_reserve_bytes"].values())
        == found["device_needed"]
    )


def test_several_gpus(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    one = figures(plan_of(config))
    code, four = planned(capsys, config, "--machine", "rtx-4090", "--ranks", "4")
    assert code == 0 and four["machine"]["ranks"] == 4
    assert four["machine"]["host_bytes"] > MACHINES["rtx-4090"].host_bytes, "that of a server"
    averaging = four["device_bytes"].pop("averaging over ranks", 0)
    assert four["device_bytes"] == one["device_bytes"], "each has a batch of its own"
    assert averaging == 0, "fp32 gradients are averaged in their slot"
    assert four["executed_flops"] == one["executed_flops"]
    process = "Python and its libraries"
    assert four["host_bytes"].pop(process) == 4 * one["host_bytes"].pop(process)
    assert four["host_bytes"] == one["host_bytes"]
    assert four["busy_seconds"]["collective"] > 0
    assert "collective" not in one["busy_seconds"]
    assert four["tokens_per_second"] == pytest.approx(4 * 256 / four["seconds"])
    assert four["mfu"] == pytest.approx(four["model_flops"] / (four["seconds"] * 4 * 165.2e12))
    assert [row["batch_size"] for row in four["batches"]] == [2, 4, 8, 16, 32]
    assert main(["plan", config, "--ranks", "4"]) == 0
    printed = capsys.readouterr().out
    assert "on 4 x RTX 4090: " in printed
    assert "what follows is of one GPU" in printed
    assert main(["plan", config, "--ranks", "2", "--machines", "rtx-4090,h100-sxm"]) == 0
    with pytest.raises(SystemExit):
        main(["plan", config, "--ranks", "0"])


def test_the_largest_batch_is_one(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    _, found = planned(capsys, config, "--device-memory", "60MiB", *sets("stream.num_slots=2"))
    best = found["largest_batch"]["batch_size"]
    for size, fits in ((best, True), (best + max(2, best // 8), False)):
        limit = "stream.device_memory='60MiB'", "stream.num_slots=2"
        assert plan_of(config, *limit, f"train.per_device_train_batch_size={size}").fits is fits


def test_what_would_make_it_fit_does(gpt: str, capsys: pytest.CaptureFixture[str]) -> None:
    big = "train.per_device_train_batch_size=64", "stream.num_slots=2"
    code, found = planned(capsys, gpt, *sets(*big), "--device-memory", "44MiB")
    assert code == 2 and not found["fits_device"] and found["fits_host"]
    assert found["device_memory"] == 44 << 20
    changes = found["mend"]["changes"]
    assert list(changes)[0] == "stream.micro_batch_size"
    changed = (f"{key}={json.dumps(value)}" for key, value in changes.items())
    assert plan_of(gpt, *big, "stream.device_memory='44MiB'", *changed).fits


def test_a_host_that_is_too_small(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    bf16 = 'stream.dtype="bfloat16"'
    roomy = plan_of(config, bf16)
    least = roomy.step.host_total - roomy.host_bytes["exp_avg"]
    code, found = planned(capsys, config, *sets(bf16), "--host-memory", f"{least}B")
    assert code == 2 and found["fits_device"] and not found["fits_host"]
    assert found["mend"]["changes"] == {"optimizer.state_dtype": "bfloat16"}
    assert figures(plan_of(config, bf16, f'stream.host_memory="{least}B"')) == {
        key: found[key] for key in figures(roomy)
    }, "--host-memory is stream.host_memory"
    code, found = planned(capsys, config, *sets(bf16), "--host-memory", "200kB")
    assert code == 2 and found["mend"] is None
    main(["plan", config, *sets(bf16), "--host-memory", "200kB"])
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("it does not fit on the host; even with --set ")
    assert "optimizer.state_dtype" in last and ", the host lacks " in last


def test_which_machine_is_assumed_and_that_times_are_bounds(
    config: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["plan", config]) == 0
    out = capsys.readouterr().out
    assert (
        "\nmachine: the default, since no GPU is here: see --machine; GPU 24.00 GiB, host 128.00 GiB\n" in out
    )
    assert ": at most " in out and "streamer calibrate measures yours" in out
    file = written(tmp_path / "here.toml", dump_machine(replace(MACHINES["h200"], calibrated=True)))
    assert main(["plan", config, "--machine", file]) == 0
    out = capsys.readouterr().out
    assert ":Light on H200: " in out and f"\nmachine: --machine {file}; " in out
    assert "at most " not in out.partition("\nlane ")[2].partition("\n\n")[0]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA L4")
    monkeypatch.setattr("streamer.cli.calibrate.machine_file.memory_bytes", lambda _: (22 << 30, 100 << 30))
    assert main(["plan", config]) == 0
    why = (
        "the GPU and the memory found here, with its rates by its data sheet; GPU 22.00 GiB, host 100.00 GiB"
    )
    assert f"\nmachine: {why}\n" in capsys.readouterr().out


def test_on_the_cpu_a_budget_is_that_of_buffers_and_saved_inputs(
    config: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    host = replace(MACHINES["laptop-8gb"], kind="cpu", device_bytes=1 << 34, host_bytes=1 << 34)
    monkeypatch.setattr("streamer.cli.calibrate.machine_file.machine", lambda *_: host)
    code, found = planned(
        capsys, config, "--device-memory", "4MiB", "--set", "train.per_device_train_batch_size=64"
    )
    assert code == 0
    counted = {
        owner: nbytes
        for owner, nbytes in found["device_bytes"].items()
        if owner not in (WORKING_SET, OUTSIDE)
    }
    assert sum(counted.values()) <= 4 << 20 < sum(found["device_bytes"].values())


def test_slots_that_do_not_fit(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = planned(capsys, config, "--device-memory", "300kB")
    assert code == 2 and not found["fits_device"] and found["mend"] is None
    main(["plan", config, "--device-memory", "300kB"])
    lines = capsys.readouterr().out.splitlines()
    (tensors,) = [line for line in lines if line.startswith("  all tensors")]
    device, _ = [line for line in lines if line.startswith("  needed")]
    assert tensors.endswith("of 292.97 KiB (stream.device_memory): DOES NOT FIT")
    assert device.endswith("of 24.00 GiB: fits")


def test_a_machine_of_one_memory_is_told_that_streaming_gains_nothing(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = "CPU and GPU share one memory on this machine: streaming from host memory gains nothing there"
    assert main(["plan", config, "--machine", "dgx-spark"]) == 0
    first, second, third, *others = capsys.readouterr().out.splitlines()
    assert ":Light on DGX Spark: " in first and third == line
    assert second == "machine: --machine dgx-spark; GPU 119.00 GiB, host 119.00 GiB"
    assert " are not used: " not in "\n".join(others), "the host has what the GPU has not"
    needed = [line for line in others if line.startswith("  needed")]
    assert "of 119.00 GiB (with the device, whose memory it is): fits" in needed[1]
    assert any(line.startswith("  of these page-locked") for line in others)
    code, found = planned(capsys, config, "--machine", "dgx-spark")
    assert code == 0 and found["machine"]["coherent"] is True
    assert found["host_needed"] == sum(found["host_bytes"].values()) + found["device_needed"]
    assert main(["plan", config, "--machine", "gh200"]) == 0
    assert line not in capsys.readouterr().out


def test_bad_input(config: str, gpt: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    error = refused(capsys, config, "--machine", "rtx4090")
    assert "there is no machine 'rtx4090': did you mean rtx-4090? known are " in error
    assert all(name in error for name in MACHINES)
    assert "stream.host_memory must be a string of a number and its unit" in refused(
        capsys, config, "--host-memory", "16"
    )
    assert "device_memory" in refused(capsys, config, "--device-memory", "16 Gib")
    assert "layers" in refused(capsys, config, "--set", "model.args.n_layer=0")
    assert "PNG" in refused(capsys, config, "--timeline", str(tmp_path / "step.svg"))
    assert "no folder" in refused(capsys, config, "--timeline", str(tmp_path / "none" / "step.png"))
    assert "longer than block_size=32" in refused(capsys, gpt, "--set", "train.max_length=64")


def test_a_model_that_wants_values_is_told_which_operation(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    error = refused(capsys, config, *sets(f'model.factory="{__name__}:Decides"', "model.args={}"))
    assert "cannot run without values" in error and "item" in error and "train.max_steps=1" in error


LARGE = """
import json, re, sys
from dataclasses import replace
from streamer.cli.config import load_config, quoted
from streamer.cli.plan.planning import plan_run
from streamer.planner.machine import MACHINES

config = load_config(sys.argv[1], sys.argv[2:])
plan = plan_run(config, replace(MACHINES["h100-sxm"], host_bytes=6 << 40))
# ru_maxrss begins with that of the process which has started this one
peak = re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())
print(json.dumps([plan.parameters, plan.fits, 1024 * int(peak[1])]))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak from Linux's /proc")
def test_half_a_trillion_parameters_are_planned_within_a_gib(gpt: str) -> None:
    sizes = ["n_layer=152", "n_head=128", "n_embd=16384", "block_size=2048", "vocab_size=50257"]
    overrides = [f"model.args.{size}" for size in sizes] + [
        "train.max_length=2048",
        'stream.dtype="bfloat16"',
        "stream.micro_batch_size=1",
        'stream.activations="recompute+offload"',
        'optimizer.state_dtype="int8"',
    ]
    run = subprocess.run(
        [sys.executable, "-c", LARGE, gpt, *overrides], capture_output=True, text=True, check=True
    )
    parameters, fits, peak = json.loads(run.stdout)
    assert parameters == 152 * (12 * 16384**2 + 13 * 16384) + (50257 + 2048 + 2) * 16384
    assert fits
    assert peak < 1 << 30


@pytest.fixture(scope="module")
def planned_before() -> None:
    """The first plan of a process counts a number more, which PyTorch makes to find out a shape."""
    plans.plan_run(load_config(plans.CONFIG), MACHINES["rtx-4090"])


@pytest.mark.usefixtures("planned_before")
@pytest.mark.parametrize("name", ["rtx-4090", "laptop-8gb"])
def test_the_golden_table(name: str) -> None:
    golden = json.loads((RESULTS / "plans.json").read_text())["machines"]
    assert list(golden) == list(MACHINES)
    found = plans.figures(plans.plan_run(load_config(plans.CONFIG), MACHINES[name]))
    for key, value in found.items():
        assert golden[name][key] == (pytest.approx(value, rel=1e-9) if isinstance(value, float) else value)


def test_a_reader_that_has_read_enough_is_no_error(
    config: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def plan(*_: object, **__: object) -> bool:
        print("a plan")
        return True

    monkeypatch.setattr("streamer.cli.plan.command.plan", plan)
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as pipe:
        monkeypatch.setattr("sys.stdout", pipe)
        assert main(["plan", config]) == 141
    assert capfd.readouterr().err == ""
