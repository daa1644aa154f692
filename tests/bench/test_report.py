"""`bench.report`: the READMEs are what the JSON says."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from bench import report


def test_the_readmes_are_what_the_json_says(capsys: pytest.CaptureFixture[str]) -> None:
    assert report.main(["--check"]) == 0, capsys.readouterr().out


def test_a_readme_that_is_out_of_date_is_named_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results = tmp_path / "results"
    results.mkdir()
    adam = json.loads((report.RESULTS / "adam.json").read_text())
    (results / "adam.json").write_text(json.dumps(adam))
    shutil.copy(report.RESULTS / "architectures.json", results)
    readme = tmp_path / "README.md"
    marks = "<!-- figures: {} -->\nold\n<!-- end of figures -->\n"
    between = marks.format("architectures") + marks.format("tokens")
    readme.write_text("before\n" + marks.format("adam") + between + marks.format("gpu") + "after\n")
    monkeypatch.setattr(report, "RESULTS", results)
    monkeypatch.setattr(report, "README", readme)
    assert report.main(["--check"]) == 1
    assert capsys.readouterr().out.count("is not what the JSON says") == 2
    assert report.main([]) == 0
    assert report.main(["--check"]) == 0
    text = readme.read_text()
    assert "old" not in text
    assert text.startswith("before\n<!-- figures: adam -->\n| model, moments |")
    assert "| bf16, 8 bits | " in text
    assert text.endswith("\n<!-- end of figures -->\nafter\n")
    assert "Not yet measured on a GPU" in text
    # a figure that changes is seen
    adam["contenders"]["fp32"]["ns_per_parameter"]["median"] += 1
    (results / "adam.json").write_text(json.dumps(adam))
    assert report.main(["--check"]) == 1


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("<!-- figures: a -->\n<!-- end of figures -->", r"marks for \['a'\], and there are figures for"),
        ("<!-- figures: a -->\n<!-- figures: b -->\n", "no '<!-- end of figures -->' after the mark of a"),
    ],
)
def test_marks_that_are_missing_are_named(text: str, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        report.fill(text, {"a": "1", "b": "2"})
