"""`bench.report`: the pages are what the JSON says."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from bench import report
from bench.model_sizes import MODELS
from bench.will_it_work import command_of, options_of, rows_shown
from streamer.cli.main import main
from streamer.cli.plan import command


def test_the_pages_are_what_the_json_says(capsys: pytest.CaptureFixture[str]) -> None:
    assert report.main(["--check"]) == 0, capsys.readouterr().out


def test_a_page_that_is_out_of_date_is_named_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results = tmp_path / "results"
    results.mkdir()
    adam = json.loads((report.RESULTS / "adam.json").read_text())
    (results / "adam.json").write_text(json.dumps(adam))
    for file in {*report.IN_README.values(), *report.IN_BENCHMARKS.values(), "will_it_work.json"} - {
        "adam.json"
    }:
        shutil.copy(report.RESULTS / file, results)
    readme, benchmarks = tmp_path / "README.md", tmp_path / "benchmarks.md"
    marks = "<!-- figures: {} -->\nold\n<!-- end of figures -->\n"
    between = "".join(map(marks.format, (*report.IN_README, "rows")))
    readme.write_text("before\n" + marks.format("gpu") + between + "after\n")
    benchmarks.write_text("".join(map(marks.format, report.IN_BENCHMARKS)))
    monkeypatch.setattr(report, "RESULTS", results)
    monkeypatch.setattr(report, "README", readme)
    monkeypatch.setattr(report, "BENCHMARKS", benchmarks)
    assert report.main(["--check"]) == 1
    assert capsys.readouterr().out.count("is not what the JSON says") == 3
    assert report.main([]) == 0
    assert report.main(["--check"]) == 0
    text = readme.read_text()
    assert "old" not in text + benchmarks.read_text()
    assert text.startswith("before\n<!-- figures: gpu -->\n`bash bench/gpu.sh` measures them")
    assert text.endswith("\n<!-- end of figures -->\nafter\n")
    assert benchmarks.read_text().startswith("<!-- figures: adam -->\n| model, moments |")
    assert "| bf16, 8 bits | " in benchmarks.read_text()
    # a figure that changes is seen
    adam["contenders"]["fp32"]["ns_per_parameter"]["median"] += 1
    (results / "adam.json").write_text(json.dumps(adam))
    assert report.main(["--check"]) == 1


def test_the_command_of_a_row_prints_its_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of one row, whose machine has limits of its own: a plan takes seconds."""
    reports = report.load(report.RESULTS)
    names = ("will_it_work", "model_sizes")
    rows = rows_shown(*(reports[f"{name}.json"] for name in names))
    (model, way, machine, limit), plan = next(row for row in rows if row[0][3] and row[0][1] == "full")
    (tmp_path / "config.json").write_text(json.dumps(MODELS[model]))
    of_machine = reports["model_sizes.json"]["machines"][machine]
    words = command_of(str(tmp_path), options_of(way, machine, limit, plan), plan, of_machine["device_bytes"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        # without the plans of other batches, and of what would be faster
        patch.setattr(command, "plan_json", lambda config, plan_of: command.figures(plan_of(config)))
        assert main([*words, "--json"]) == 0
    found = capsys.readouterr().out
    assert f"{plan['device_needed']}" in found and f"{plan['host_needed']}" in found
    assert f"{plan['tokens_per_second']:.6f}"[:8] in found


@pytest.mark.parametrize("marked", [{"has_values": False}, {}])
def test_a_result_of_what_stands_in_for_a_gpu_is_refused(
    marked: dict[str, bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {"hardware": {"gpu": "nullgpu"}, "script": "bench/fits.py"}
    (tmp_path / "gpu").mkdir()
    path = tmp_path / "gpu" / "fits.json"
    path.write_text(json.dumps(found | {"has_values": True}))
    assert list(report.load(tmp_path)) == ["gpu/fits.json"]
    path.write_text(json.dumps(found | marked))
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    with pytest.raises(SystemExit, match=r"gpu/fits\.json was measured on nullgpu, .* computes: delete it"):
        report.main(["--check"])
