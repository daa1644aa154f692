"""bench/disk.py: both ways move all bytes, and each round has a ratio."""

from __future__ import annotations

import json
from pathlib import Path

from bench import disk
from tests.on_disk import folder

__all__ = ["folder"]


def test_a_run(folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "disk.json"
    disk.main(["--folder", str(folder), "--mib", "64", "--rounds", "2", "--json", str(output)])
    report = json.loads(output.read_text())
    for row in report["directions"].values():
        assert all(row[way]["lower_quartile"] > 0 for way in ("scratch", "raw", "of_raw"))
    assert [*folder.iterdir()] == []
    assert "| write |" in "\n".join(disk.report_table(report))
