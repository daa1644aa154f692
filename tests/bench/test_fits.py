"""`bench.fits`: a small config within its limits, one beyond them, and what counts as failed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import fits

TINY = """
[model]
factory = "models.gpt2:GPT"
args = {vocab_size = 256, block_size = 16, n_layer = 3, n_head = 2, n_embd = 16}
init = "init_weights"
[stream]
layers = "transformer.h"
device = "cpu"
device_memory = "MEMORY"
[train]
max_steps = 20
max_length = 16
per_device_train_batch_size = 4
learning_rate = 1e-2
eval_batches = 2
[data]
paths = ["text.txt"]
val_fraction = 0.3
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question. " * 200)
    (tmp_path / "more.txt").write_text("to be or not to be, that is the question. " * 100)
    path = tmp_path / "tiny.toml"
    path.write_text(TINY.replace('"text.txt"', '"text.txt", "more.txt"').replace("MEMORY", "1MiB"))
    return path


def test_a_config_that_fits_and_larger_batches(config: Path, tmp_path: Path) -> None:
    out = tmp_path / "fits.json"
    arguments = [str(config), "--steps", "6", "--host-memory", "64GiB", "--batch-sizes", "8", "16"]
    arguments += ["--set", "train.warmup_steps=2"]
    assert fits.main([*arguments, "--json", str(out)]) == 0
    report = json.loads(out.read_text())
    found = report["within_limits"]
    assert len(found["losses"]) == len(found["gradient_norms"]) == len(found["step_seconds"]) == 6
    assert found["validation_loss"][1] < found["validation_loss"][0]
    assert report["failures"] == []
    assert report["limits"] == {"device_bytes": 1 << 20, "host_bytes": 64 << 30}
    # the layers' saved inputs come on top of what is owned: 3 of [4, 16, 16] in fp32
    owned = sum(found["device_bytes"].values())
    assert found["device_bytes_peak"] == owned + 3 * 4 * 16 * 16 * 4
    assert [row["tokens_per_step"] for row in report["with_batch"]] == [8 * 16, 16 * 16]
    text = "\n".join(fits.report_table(report))
    assert text.startswith(f"{config} (train.warmup_steps=2), ")
    assert f"validation loss {found['validation_loss'][0]:.3f} to" in text
    assert text.count("\n| ") == 2 + 3
    for row in report["with_batch"]:
        # one of three layers is still there when backward begins, one more when the next forward does
        assert row["bytes_per_step"]["d2h"] > 0
        assert 0 <= row["exposed_transfer_of_step"] < 1
        assert row["h2d_of_raw"] > 0


def test_more_memory_than_there_is_to_be_is_a_failure_that_is_written_down(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "fits.json"
    assert fits.main([str(config), "--steps", "3", "--host-memory", "1MiB", "--json", str(out)]) == 1
    (failure,) = json.loads(out.read_text())["failures"]
    assert failure.endswith("bytes of host memory were taken, not 1048576")
    assert f"FAILED: {failure}" in capsys.readouterr().out


def report(**changes: Any) -> dict[str, Any]:
    found = {
        "validation_loss": [5.0, 4.0],
        "host_bytes_peak": 100,
        "device_bytes_reserved_peak": 10,
        "device_bytes_peak": 9,
        "device_allocations_after_second_step": 0,
    }
    return {"within_limits": found | changes, "limits": {"host_bytes": 100, "device_bytes": 10}}


@pytest.mark.parametrize(
    ("changes", "failure"),
    [
        ({}, None),
        ({"validation_loss": [5.0, 5.0]}, "the validation loss did not fall: 5.000, then 5.000"),
        ({"host_bytes_peak": 101}, "101 bytes of host memory were taken, not 100"),
        ({"device_bytes_reserved_peak": 11}, "11 bytes of the device were taken, not 10"),
        ({"device_bytes_reserved_peak": None, "device_bytes_peak": 12}, "12 bytes of the device were taken"),
        ({"device_allocations_after_second_step": 2}, "2 allocations after the second step"),
    ],
)
def test_failures(changes: dict[str, Any], failure: str | None) -> None:
    found = fits.failures(report(**changes))
    assert len(found) == (0 if failure is None else 1)
    assert failure is None or found[0].startswith(failure)
