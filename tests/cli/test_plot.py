"""The command `streamer plot`: what its pictures show of the files of runs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib", reason="pictures need matplotlib (pip install '.[plot]')")

from matplotlib.colors import to_hex

from streamer.cli import plot as plotting
from streamer.cli.main import main
from streamer.cli.plan import timeline
from streamer.cli.plot import plot
from tests.cli.common import refused

PNG = b"\x89PNG\r\n\x1a\n"
SUMMARY = {
    "busy_seconds": {"compute": 4.0, "h2d": 2.0, "d2h": 1.0, "host": 3.0, "disk_read": 0.0},
    "exposed_seconds": {"h2d": 0.5, "d2h": 0.0, "host": 0.25, "disk_read": 0.0},
}


def a_run(folder: Path, *, steps: int = 30, ended: bool = True, trained: str = "root") -> Path:
    """A run's folder with a line for each step, one of validation for each tenth, and part of one more;
    ``trained`` is what its trace has updates of."""
    folder.mkdir()
    lines = []
    for step in range(steps + 1):
        if step % 10 == 0:
            lines.append({"step": step, "lr": 1e-3, "val_loss": 6 - step / 10})
        if step:
            lines.append({"step": step, "lr": 1e-3, "loss": 6 - step / 11, "tokens_per_second": 100.0 + step})
    text = "".join(f"{json.dumps(line)}\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text + '{"step": 3')
    if ended:
        (folder / "summary.json").write_text(json.dumps(SUMMARY))
        (folder / "trace.json").write_text(json.dumps({"traceEvents": list(events(trained))}))
    return folder


def events(trained: str) -> Iterator[dict[str, Any]]:
    """Four steps of one millisecond: forward, a wait, backward; then nothing for a fifth of it."""
    for tid, name in enumerate(("COMPUTE", "HOST")):
        yield {"ph": "M", "name": "thread_name", "tid": tid, "args": {"name": name}}

    def box(tid: int, name: str, ts: float, dur: float, **args: Any) -> dict[str, Any]:
        return {"ph": "X", "tid": tid, "name": name, "ts": ts, "dur": dur, "args": args}

    for step in range(4):
        begin = 1000.0 * step
        yield box(0, "rootF", begin, 300)
        yield box(0, "0UNSHARD", begin + 300, 100, exposed="h2d")
        yield box(0, "rootB", begin + 400, 400)
        yield box(1, f"{trained}STEP", begin + 800, 150)
        yield box(1, "10STEP", begin + 800, 150)


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The figures by the picture's name, which are closed once they are written."""
    figures: dict[str, Any] = {}
    for module in (plotting, timeline):
        monkeypatch.setattr(module.plt, "close", lambda figure: None)
    save = plotting.plt.Figure.savefig

    def note(figure: Any, picture: Path, **options: Any) -> None:
        figures[Path(picture).name.removeprefix(".")] = figure
        save(figure, picture, **options)

    monkeypatch.setattr(plotting.plt.Figure, "savefig", note)
    return figures


def test_a_run_is_drawn_from_its_files(
    tmp_path: Path, drawn: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    run = a_run(tmp_path / "one")
    assert main(["plot", str(run)]) == 0
    pictures = [run / "plots" / name for name in ("training.png", "lanes.png", "timeline.png")]
    assert capsys.readouterr().out.splitlines() == list(map(str, pictures))
    assert all(picture.read_bytes().startswith(PNG) for picture in pictures)
    loss, rate, speed = drawn["training.png"].axes
    trained, validated = (dict(zip(*line.get_data(), strict=True)) for line in loss.lines)
    assert trained == {step: 6 - step / 11 for step in range(1, 31)}
    assert validated == {0: 6.0, 10: 5.0, 20: 4.0, 30: 3.0}
    assert set(rate.lines[0].get_ydata()) == {1e-3}
    raw, smooth = (list(line.get_ydata()) for line in speed.lines)
    assert raw == [100.0 + step for step in range(1, 31)]
    # the median of the 21 around it, of 11 to 30 at the ends
    assert (smooth[0], smooth[14], smooth[-1]) == (106.0, 115.0, 125.0)
    [lanes] = drawn["lanes.png"].axes
    assert [label.get_text() for label in lanes.get_yticklabels()] == ["host", "d2h", "h2d", "compute"]
    busy, waited = ([bar.get_width() for bar in bars] for bars in lanes.containers)
    assert busy == [3.0, 1.0, 2.0, 4.0] and waited == [0.25, 0.0, 0.5, 0.0]


@pytest.mark.parametrize("trained", ["root", "9"])
def test_the_timeline_labels_every_gap_of_compute(
    trained: str, tmp_path: Path, drawn: dict[str, Any]
) -> None:
    run = a_run(tmp_path / "one", trained=trained)
    plot([run])
    [axes] = drawn["timeline.png"].axes
    row = max(bar.get_y() + bar.get_height() / 2 for bar in axes.patches)
    boxes = sorted(
        (round(bar.get_x(), 3), round(bar.get_width(), 3), bar.get_hatch(), to_hex(bar.get_facecolor()))
        for bar in axes.patches
        if bar.get_y() + bar.get_height() / 2 == row
    )
    forward, backward = timeline.COLOURS["F"][0], timeline.COLOURS["B"][0]
    of_step = [
        (0.0, 0.3, None, forward),
        (0.3, 0.1, None, timeline.WAITING),
        (0.4, 0.4, None, backward),
        (0.8, 0.2, "////", "#ffffff"),
    ]
    # the last step ends with its update
    of_last = [*of_step[:3], (0.8, 0.15, "////", "#ffffff")]
    assert boxes == [*of_step, *((round(x + 1, 3), *rest) for x, *rest in of_last)]
    assert timeline.OUTSIDE in [text.get_text() for text in drawn["timeline.png"].legends[0].get_texts()]


def test_a_folder_without_a_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "is not the folder of a run: it has no metrics.jsonl" in refused(capsys, "plot", str(tmp_path))
    run = a_run(tmp_path / "empty", steps=0)
    (run / "metrics.jsonl").write_text("")
    assert "after its first step" in refused(capsys, "plot", str(run))
    shutil.rmtree(run)
