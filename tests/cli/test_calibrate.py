"""`streamer calibrate`: what it measures in small, what it writes, and its errors."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
import torch

from streamer.backends.base import DISKS
from streamer.cli.calibrate import command as calibration
from streamer.cli.calibrate.machine_file import load_machine
from streamer.cli.calibrate.measure import EXTENTS, Sizes
from streamer.cli.main import main
from streamer.planner.machine import NVME_READ, NVME_WRITE
from tests.cli.common import refused

TINY = Sizes(
    torch.float32,
    tokens=8,
    hidden=8,
    context=4,
    head=4,
    copy_bytes=4096,
    disk_bytes=8192,
    parameters=1000,
    seconds=0.001,
)


@pytest.mark.filterwarnings("ignore:no direct I/O")  # temporary files may be in memory
@pytest.mark.parametrize("folders", [[], ["a"], ["a", "b"]], ids=" ".join)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda_api)])
def test_calibrate_writes_a_machine(
    device: str,
    folders: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(calibration, "sizes_of", lambda kind: TINY)
    monkeypatch.setattr(calibration, "ROUNDS", 3)
    path = tmp_path / "machine.toml"
    disk = []
    for name in folders:
        (tmp_path / name).mkdir()
        disk += ["--disk", str(tmp_path / name)]
    assert main(["calibrate", "--device", device, "--output", str(path), *disk]) == 0
    shown = capsys.readouterr().out
    found = load_machine(path)
    assert found.kind == device
    assert min(found.device_bytes, found.host_bytes) > 1 << 28
    rates = (found.flops_per_second, found.attention_flops_per_second, found.device_bytes_per_second)
    assert all(rate is not None and rate > 0 for rate in rates)
    assert found.seconds_per_op > 0
    assert found.seconds_per_visit > 0
    assert min(vars(found.beside).values()) > 0 and max(vars(found.beside).values()) <= 1
    measured = tomllib.loads(path.read_text())["measured"]
    assert measured["torch"] == torch.__version__
    assert measured["date"].startswith("20")
    for name, (low, median, high) in measured["quartiles"].items():
        value = getattr(found.beside if hasattr(found.beside, name) else found, name)
        assert low <= median == value <= high
        assert name in shown
    assert f"written: {path}" in shown
    of_disk = {f"{lane.value}_bytes_per_second" for lane in DISKS}
    of_disk |= {name for name in vars(found.beside) if "disk" in name}
    assert of_disk & measured["quartiles"].keys() == (of_disk if folders else set())
    assert ("the disk was not measured" in shown) is not bool(folders)
    if not folders:
        assert [found.bytes_per_second(lane) for lane in DISKS] == [NVME_READ, NVME_WRITE]
    # nothing is left in the folders
    assert all([*(tmp_path / name).iterdir()] == [] for name in folders)


@pytest.mark.filterwarnings("ignore:no direct I/O")  # temporary files may be in memory
def test_a_disk_without_room_is_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(calibration, "sizes_of", lambda kind: TINY)
    monkeypatch.setattr("streamer.backends.direct_io.ScratchFile.free", lambda file: 2 * EXTENTS * 8192 - 1)
    monkeypatch.setattr(calibration, "measure", lambda *_, **__: pytest.fail("it has begun to measure"))
    output = str(tmp_path / "machine.toml")
    error = refused(capsys, "calibrate", "--device", "cpu", "--disk", str(tmp_path), "--output", output)
    assert error.startswith(f"streamer: --disk: disk={tmp_path} has no room: ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "tpu"], "--device: device='tpu' is not supported: use 'cuda' or 'cpu'"),
        (["--device", "mps"], "--device: device='mps' is not supported: use 'cuda' or 'cpu'"),
        (["--output", "nowhere/machine.toml"], "--output nowhere/machine.toml: it must be a file in"),
        (["--output", ".."], "--output ..: it must be a file in a folder that exists"),
        (["--disk", "nowhere"], "--disk: disk=nowhere: no such folder for this process"),
    ],
)
def test_bad_input_is_refused_in_one_line(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert refused(capsys, "calibrate", *arguments).startswith(f"streamer: {message}")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_a_gpu_that_is_not_there_is_not_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    error = refused(capsys, "calibrate", "--device", "cuda", "--output", str(tmp_path / "machine.toml"))
    assert "PyTorch finds no CUDA device here" in error
