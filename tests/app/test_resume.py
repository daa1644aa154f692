"""A run of `streamer train` that is stopped or killed, whenever that is, ends where another one does."""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from streamer.app.cli import main
from streamer.app.config import load_config
from streamer.app.run import run_folder
from streamer.app.run.loop import Loop, TokenLoss
from streamer.app.run.run_folder import locked
from streamer.app.run.schedule import schedule
from streamer.checkpoint import save
from streamer.checkpoint.manifest import Manifest, checkpoints
from streamer.checkpoint.values import decode
from streamer.engine.schedule.trace import Trace
from tests.app.common import HOME, least_of, logged, sets

STEPS = 12

CONFIG = """
[run]
name = "run"
steps = 12
eval_every = 5
eval_batches = 1
sample_tokens = 0
save_every = 3
[model]
factory = "models.gpt2:GPT"
args = {vocab_size = 256, block_size = 16, n_layer = 3, n_head = 2, n_embd = 16, dropout = 0.1}
[data]
paths = ["a.txt", "b.txt"]
context = 16
batch_size = 2
val_fraction = 0.3
[stream]
layers = "transformer.h"
device = "cpu"
dtype = "bfloat16"
[optimizer]
lr = 1e-2
warmup_steps = 4
"""


def written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The config of a run in ``folder``, to which the process goes."""
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(HOME))
    for name in ("a.txt", "b.txt"):
        (folder / name).write_text(f"{name}: to be or not to be, that is the question. " * 100)
    path = folder / "run.toml"
    path.write_text(CONFIG)
    return path


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return written(tmp_path, monkeypatch)


def train(config: Path, *arguments: str) -> int:
    return main(["train", str(config), *arguments])


def tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """All of a checkpoint but the values that are no weights or moments."""
    return {
        f"{path.name}: {name}": tensor
        for path in sorted(checkpoint.glob("*-*.safetensors"))
        for name, tensor in load_file(path).items()
    }


def computed(run: Path) -> list[dict[str, Any]]:
    """What a run has logged, without what was timed."""
    timed = ("tokens_per_second", "device_bytes", "device_bytes_peak")
    return [{key: value for key, value in line.items() if key not in timed} for line in logged(run)]


def assert_same_end(actual: Path, expected: Path) -> None:
    mine, theirs = (tensors(checkpoints(run / "checkpoints")[-1]) for run in (actual, expected))
    assert list(mine) == list(theirs)
    assert [name for name in theirs if not torch.equal(mine[name], theirs[name])] == []
    assert computed(actual) == computed(expected)


def saved_steps() -> list[int]:
    return [int(path.name.removeprefix("step-")) for path in checkpoints(Path("runs/run/checkpoints"))]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run that nothing has happened to."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with pytest.MonkeyPatch.context() as monkeypatch:
        assert train(written(folder, monkeypatch)) == 0
    return folder / "runs" / "run"


@pytest.fixture
def finished(config: Path, tmp_path: Path, undisturbed: Path) -> None:
    """`undisturbed` in ``runs/run``, as if it had been trained there."""
    shutil.copytree(undisturbed, tmp_path / "runs" / "run")


def stop_at(monkeypatch: pytest.MonkeyPatch, step: int, do: Callable[[], object]) -> None:
    """Do something in the middle of a step."""
    backward = torch.Tensor.backward
    steps: list[int] = []

    def then(self: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        backward(self, *args, **kwargs)
        steps.append(1)
        if len(steps) == step:
            do()

    monkeypatch.setattr(torch.Tensor, "backward", then)


class Trouble(Exception):
    """What the tests raise."""


def trouble(*_: Any, **__: Any) -> None:
    raise Trouble("on purpose")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=str)
def test_a_signal_lets_the_step_end_and_says_where_to_go_on(
    config: Path,
    tmp_path: Path,
    undisturbed: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    number: signal.Signals,
) -> None:
    with monkeypatch.context() as patch:
        stop_at(patch, 5, lambda: os.kill(os.getpid(), number))
        assert train(config) == 0
    (saved,) = [path for path in checkpoints(Path("runs/run/checkpoints")) if path.name == "step-0000005"]
    printed = capfd.readouterr()
    assert f"stopped by {number.name} after step 5; go on with --resume {saved}" in printed.out
    assert "finishing step 5, some 0 s, then saving, some 0 s; Ctrl-C again to stop without" in printed.err
    assert signal.getsignal(number) in (signal.default_int_handler, signal.SIG_DFL)
    assert train(config, "--resume", str(saved)) == 0
    assert_same_end(tmp_path / "runs" / "run", undisturbed)


@pytest.mark.parametrize("given", [[], ["runs/run"], ["runs/run/checkpoints/step-0000006"]], ids=str)
def test_resume_finds_the_latest_checkpoint(
    config: Path, tmp_path: Path, undisturbed: Path, monkeypatch: pytest.MonkeyPatch, given: list[str]
) -> None:
    with monkeypatch.context() as patch:
        stop_at(patch, 8, trouble)
        with pytest.raises(Trouble):
            train(config)
    assert saved_steps() == [3, 6]
    assert logged(Path("runs/run"))[-1]["step"] == 7
    assert train(config, "--resume", *given) == 0
    assert saved_steps() == [9, 12]
    assert_same_end(tmp_path / "runs" / "run", undisturbed)


@pytest.mark.usefixtures("finished")
def test_what_a_run_computes_changes_where_that_is_named_and_how_it_is_streamed_as_one_likes(
    config: Path, tmp_path: Path, undisturbed: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    last = Path("runs/run/checkpoints/step-0000012")
    for change, match in (
        ("model.args.n_layer=2", "the run was made with model.args.n_layer = 3, not 2, and can only go on w"),
        ("model.args={}", "the run was made with model.args.vocab_size = 256, not none, and can only go on "),
        (
            "optimizer.state_dtype='int8'",
            'made with optimizer.state_dtype = "float32", not "int8", and can only',
        ),
        ("run.seed=1", "made with run.seed = 0, not 1, and can only go on with that"),
    ):
        assert train(config, "--resume", *sets(change)) == 2
        assert match in capfd.readouterr().err
    config.write_text(CONFIG.replace("steps = 12", "steps = 24"))
    assert train(config, "--resume") == 2
    assert (
        "the run was made with run.steps = 12, and the config has 24: resume it with runs/run/config.toml, "
        "or name the change on the command line: --set run.steps=..." in capfd.readouterr().err
    )
    config.write_text(CONFIG)
    assert train(config, "--resume") == 0
    assert "runs/run has finished at step 12: nothing is left to do" in capfd.readouterr().out
    assert_same_end(tmp_path / "runs" / "run", undisturbed)
    last.rename(tmp_path / "aside")
    assert train(config, "--resume", *sets("stream.num_slots=3", "stream.activations='keep'")) == 0
    assert_same_end(tmp_path / "runs" / "run", undisturbed)


@pytest.mark.usefixtures("finished")
def test_a_finished_run_goes_on_for_more_steps_with_another_rate_and_other_data(
    config: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    changes = sets("run.steps=18", "optimizer.lr=5e-3", "optimizer.weight_decay=0.5")
    assert train(config, "--resume", *changes, "--data", "a.txt") == 0
    printed = capfd.readouterr().out
    assert "run.steps is 18 from here on; it was 12\n" in printed
    assert 'data.paths is ["a.txt"] from here on; it was ["a.txt", "b.txt"]\n' in printed
    run = tmp_path / "runs" / "run"
    assert [line["step"] for line in logged(run, "loss")] == list(range(1, 19))
    now = load_config(run / "config.toml")
    assert (now.run.steps, now.optimizer.lr, now.data.paths) == (18, 5e-3, ("a.txt",))
    factor = schedule(now.optimizer, 18)
    rates = [line["lr"] for line in logged(run, "loss") if line["step"] > 12]
    assert rates == [5e-3 * factor(step) for step in range(13, 19)]
    # what has been made with the changes goes on without naming them again
    (run / "checkpoints" / "step-0000018").rename(tmp_path / "aside")
    assert train(run / "config.toml", "--resume", "runs/run") == 0
    optimizer = Manifest.read(run / "checkpoints" / "step-0000018").values["optimizer"]
    options = decode(optimizer["groups"][0]["options"], lambda name: torch.empty(0))
    assert (options["weight_decay"], options["initial_lr"]) == (0.5, 5e-3)


@pytest.mark.usefixtures("finished")
def test_a_run_that_another_process_trains_is_left_alone(
    config: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with locked(Path("runs/run")):
        assert train(config, "--resume", "--set", "run.steps=20") == 2
        error = capfd.readouterr().err
        assert f"another process ({os.getpid()}) trains in runs/run: wait for it" in error
        assert train(config, *sets("run.steps=5")) == 0
    assert sorted(path.name for path in Path("runs").iterdir()) == ["run", "run-2"]
    assert train(config, "--resume", "runs/run") == 0


#: Validation losses by step: the lowest is that of step 4.
LOSSES = {0: 1.0, 2: 5.0, 4: 3.0, 6: 4.0, 8: 3.5, 10: 6.0, 12: 2.0}


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Validation finds `LOSSES`."""

    def validate(self: Loop) -> float:
        self.val_loss = LOSSES[self.step]
        return self.val_loss

    monkeypatch.setattr(Loop, "validate", validate)


BEST = sets("run.eval_every=2", "run.keep=1", "run.keep_best=true", "run.patience=3")


@pytest.mark.usefixtures("scripted")
@pytest.mark.parametrize("save_every", [3, 0])
def test_the_best_checkpoint_is_kept_and_a_run_that_no_longer_improves_ends(
    config: Path, capfd: pytest.CaptureFixture[str], save_every: int
) -> None:
    assert train(config, *BEST, *sets(f"run.save_every={save_every}")) == 0
    printed = capfd.readouterr().out
    assert "ends after step 10: the last 3 validations (run.patience) have not been below 3.000, " in printed
    assert "The lowest validation loss, 3.000, is that of runs/run/checkpoints/step-0000004: " in printed
    assert printed.count(", the lowest so far") == 2
    assert saved_steps() == [4, 10]
    for to, run in (("best", ["runs/run", "--best"]), ("same", ["runs/run/checkpoints/step-0000004"])):
        assert main(["export", *run, "--to", to]) == 0
    best, same = (Path(to, "model.safetensors").read_bytes() for to in ("best", "same"))
    assert best == same
    assert train(config, "--resume", *BEST) == 0
    printed = capfd.readouterr().out
    assert (
        "runs/run has finished at step 10: nothing is left to do; for more steps name them, --set" in printed
    )
    # with more patience it goes on, and finds a better one
    assert train(config, "--resume", *BEST, *sets("run.patience=0")) == 0
    assert saved_steps() == [12]
    assert json.loads(Path("runs/run/checkpoints/best.json").read_text())["step"] == 12


@pytest.mark.usefixtures("scripted")
def test_a_run_that_goes_on_remembers_its_best_checkpoint_and_its_patience(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        stop_at(patch, 7, lambda: os.kill(os.getpid(), signal.SIGINT))
        assert train(config, *BEST) == 0
    assert saved_steps() == [4, 7]
    assert train(config, "--resume", *BEST) == 0
    assert saved_steps() == [4, 10]


@pytest.mark.usefixtures("finished")
def test_without_a_best_checkpoint_there_is_none_to_export(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "runs/run", "--best", "--to", "best"]) == 2
    assert "runs/run keeps no best checkpoint: train with --set run.keep_best=true" in capfd.readouterr().err


@pytest.mark.filterwarnings("ignore:no direct I/O")  # temporary files may be in memory
def test_a_run_goes_on_from_disk_in_memory_and_back(
    config: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """It ends as one that was in memory all the time."""
    deeper = sets("model.args.n_layer=12")
    assert train(config, *deeper, *sets("run.name='memory'")) == 0
    # the least that is enough, as the error says: all that can be is then on disk
    assert train(config, *deeper, *sets("memory.host='1B'", "memory.disk='.'")) == 2
    on_disk = sets(f"memory.host='{least_of(capfd.readouterr().err)}B'", "memory.disk='.'")
    for step, where, resume in ((5, on_disk, []), (4, [], ["--resume"]), (2, on_disk, ["--resume"])):
        with monkeypatch.context() as patch:
            stop_at(patch, step, lambda: os.kill(os.getpid(), signal.SIGTERM))
            assert train(config, *deeper, *where, *resume) == 0
        told, here = capfd.readouterr().out, bool(where)
        assert (" on disk\n" in told) == here and "; go on with --resume " in told
    assert train(config, *deeper, *on_disk, "--resume") == 0
    summary = json.loads(Path("runs/run/summary.json").read_text())
    assert summary["busy_seconds"]["disk_read"] > 0 and summary["disk_bytes_per_parameter"] > 0
    # state takes 10 bytes for each bf16 parameter, and weights 2, both with padding
    assert summary["disk_bytes_per_parameter"] > 13
    assert_same_end(tmp_path / "runs" / "run", tmp_path / "runs" / "memory")


def test_without_a_checkpoint_there_is_nothing_to_resume(
    config: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert train(config, "--resume") == 2
    assert "runs/run holds no complete checkpoint: train with run.save_every" in capfd.readouterr().err
    assert train(config, "--resume", "nowhere") == 2
    assert "--resume nowhere: no such folder: give that of a run, or" in capfd.readouterr().err


@pytest.mark.usefixtures("finished")
def test_a_damaged_checkpoint_is_refused_and_the_one_before_taken_when_asked(
    config: Path, tmp_path: Path, undisturbed: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    weights = Path("runs/run/checkpoints/step-0000012/weights-00001.safetensors")
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    # as if the process had been killed after that checkpoint
    Path("runs/run/summary.json").unlink()
    assert train(config, "--resume") == 2
    error = capfd.readouterr().err
    assert "cannot resume: " in error
    assert "weights-00001.safetensors: tensor 'transformer.h.1" in error
    assert error.rstrip().endswith("--fall-back goes on from the one before")
    assert train(config, "--resume", "--fall-back") == 0
    assert "not usable: " in capfd.readouterr().out
    assert_same_end(tmp_path / "runs" / "run", undisturbed)


def no_room(*_: Any, **__: Any) -> None:
    raise OSError(28, "No space left on device", "somewhere")


def test_a_checkpoint_that_cannot_be_written_stops_the_run_or_not_as_asked(
    config: Path,
    tmp_path: Path,
    undisturbed: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("streamer.checkpoint.save.write_tensors", no_room)
        assert train(config, *sets("run.save_wait=0")) == 1
        error = capfd.readouterr().err
        assert "bytes could not be written: No space left on device" in error
        assert error.rstrip().endswith(": 'runs/run/checkpoints/step-0000003'")
        warned = sets("run.save_failure='warn'", "run.name='warned'", "run.save_wait=0")
        assert train(config, *warned) == 1
        printed = capfd.readouterr()
        assert printed.out.count("could not be written: No space left on device") == 3
        assert printed.out.count("; going on without") == 3
        # but not without the last one
        assert printed.err.rstrip().endswith(": 'runs/warned/checkpoints/step-0000012'")
    assert not (tmp_path / "runs" / "warned" / "checkpoints").exists()
    assert computed(tmp_path / "runs" / "warned") == computed(undisturbed)


@contextlib.contextmanager
def of_files(nbytes: int) -> Iterator[None]:
    """Inside the block no file grows beyond so many bytes; a write has those before."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("options", [[], ["sample.prompts=['to be']", "sample.every=6"]], ids=str)
def test_lines_that_cannot_be_written_wait_for_room_and_do_not_end_the_run(
    config: Path,
    undisturbed: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
) -> None:
    """From step 5 to step 8 the disk has room for half a line."""
    run = Path("runs/run")
    with contextlib.ExitStack() as full, monkeypatch.context() as patch:
        nbytes = 0

        def fill() -> None:
            nonlocal nbytes
            nbytes = (run / "metrics.jsonl").stat().st_size
            full.enter_context(of_files(nbytes + 20))

        def make_room() -> None:
            full.close()
            assert (run / "metrics.jsonl").stat().st_size == nbytes, "no half line is left"

        stop_at(patch, 5, fill)
        stop_at(patch, 8, make_room)
        assert train(config, *sets("run.save_every=0", *options)) == 0
    told = f"{run}/metrics.jsonl: File too large; the run goes on, and keeps its lines in memory until "
    assert capsys.readouterr().out.count(told) == 1
    assert computed(run) == computed(undisturbed)
    if options:
        samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
        assert [line["step"] for line in samples] == [6, 12]


def test_a_run_goes_on_where_its_output_has_no_room(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open("/dev/full", "w", buffering=1) as log, monkeypatch.context() as patch:
        for name in ("stdout", "stderr"):
            patch.setattr(sys, name, log)
        assert train(config) == 0
    assert Path("runs/run/summary.json").exists()


def test_a_trace_that_cannot_be_written_does_not_end_the_run(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def half(self: Trace, path: Path) -> None:
        path.write_text("{")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Trace, "save", half)
    assert train(config) == 0
    run = Path("runs/run")
    assert f"{run}/trace.json: No space left on device; the run ends without it" in capsys.readouterr().out
    assert saved_steps() and (run / "summary.json").exists() and not list(run.glob("*trace*"))


class Terminal(io.StringIO):
    """What somebody types."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("typed", [None, "\n", "elsewhere\n"], ids=["waited for", "again", "elsewhere"])
def test_the_last_weights_are_kept_until_they_are_written(
    config: Path,
    tmp_path: Path,
    undisturbed: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    typed: str | None,
) -> None:
    write, tries = save.write_tensors, [*range(2 if typed is None else 1)]

    def sometimes(*args: Any, **options: Any) -> Any:
        return no_room() if tries and tries.pop() is not None else write(*args, **options)

    monkeypatch.setattr(save, "write_tensors", sometimes)
    monkeypatch.setattr(run_folder, "RETRY_SECONDS", 0.0)
    monkeypatch.setattr(sys, "stdin", io.StringIO() if typed is None else Terminal(typed))
    assert train(config, *sets("run.save_every=0")) == 0
    printed = capfd.readouterr()
    assert printed.err.count("the trained weights are still in memory") == (2 if typed is None else 1)
    assert printed.err.count("give another folder: ") == (typed is not None)
    place = Path("runs/run/checkpoints/step-0000012")
    if typed == "elsewhere\n":
        assert not place.exists()
        place = Path("elsewhere/step-0000012")
        assert f"the checkpoint of step 12 is {place}" in printed.out
    expected = tensors(checkpoints(undisturbed / "checkpoints")[-1])
    assert all(torch.equal(value, expected[name]) for name, value in tensors(place).items())


@pytest.mark.parametrize("save_every", [0, 5])
def test_weights_that_have_no_place_are_written_to_the_folder_for_temporary_files(
    config: Path,
    tmp_path: Path,
    undisturbed: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    save_every: int,
) -> None:
    """Which is then a run that can go on, and that can be exported."""
    write = save.write_tensors

    def elsewhere(path: Path, *args: Any, **options: Any) -> Any:
        return write(path, *args, **options) if "temporary" in str(path) else no_room()

    last, rescued = f"step-{save_every or STEPS:07d}", tmp_path / "temporary" / "streamer-run"
    with monkeypatch.context() as patch:
        rescued.parent.mkdir()
        patch.setattr(tempfile, "tempdir", str(rescued.parent))
        patch.setattr(save, "write_tensors", elsewhere)
        assert train(config, *sets(f"run.save_every={save_every}", "run.save_wait=0")) == 1
    error = capfd.readouterr().err.rstrip()
    assert f"THE TRAINED WEIGHTS ARE IN {rescued}, move them away from there: 'runs/run/" in error
    if not save_every:
        mine, theirs = (tensors(run / "checkpoints" / last) for run in (rescued, undisturbed))
        assert all(torch.equal(value, theirs[name]) for name, value in mine.items())
    else:
        assert train(rescued / "config.toml", "--resume", str(rescued)) == 0
    assert main(["export", str(rescued), "--to", "weights"]) == 0


@pytest.mark.usefixtures("finished")
def test_checkpoints_that_were_made_with_other_settings_are_not_taken_for_those_of_a_run_that_goes_on(
    config: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """They were kept in place of those that were to be written."""
    earlier = "runs/run/checkpoints/step-0000009"
    assert train(config, "--resume", earlier, *sets("optimizer.lr=1e-3")) == 2
    error = capfd.readouterr().err
    assert f"runs/run/checkpoints/step-0000012 is later than {earlier} and was made without these" in error


# A loss that is no number


def nan_at(monkeypatch: pytest.MonkeyPatch, *calls: int) -> list[list[int]]:
    """Let these steps' losses be NaN, counted from 1; the tokens of each step as it is made."""
    plain = TokenLoss.__call__
    drawn: list[list[int]] = []

    def sometimes(self: TokenLoss, tokens: torch.Tensor, *others: Any, **options: Any) -> torch.Tensor:
        loss = plain(self, tokens, *others, **options)
        if torch.is_grad_enabled():
            drawn.append(tokens.flatten().tolist())
            if len(drawn) in calls:
                return loss * float("nan")
        return loss

    monkeypatch.setattr(TokenLoss, "__call__", sometimes)
    return drawn


def test_a_loss_that_is_nan_is_skipped_and_named(
    config: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    nan_at(monkeypatch, 5)
    with pytest.warns(UserWarning, match=r"the gradient of transformer\.h\.2 and 2 more is NaN or infinite"):
        assert train(config) == 0
    assert "step 5: skipped, a gradient was not finite" in capfd.readouterr().out
    assert logged(Path("runs/run"))[-1]["step"] == STEPS
    text = Path("runs/run/metrics.jsonl").read_text()
    lines = [json.loads(line, parse_constant=pytest.fail) for line in text.splitlines()]
    assert [line["step"] for line in lines if line.get("loss", 0) is None] == [5]


@pytest.mark.parametrize(
    ("nonfinite", "step", "last"),
    [("stop", 8, "; the last checkpoint is runs/run/checkpoints/step-0000006"), ("back", 2, "")],
    ids=["as asked", "for want of a checkpoint"],
)
def test_a_loss_that_is_nan_stops_the_run(
    config: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    nonfinite: str,
    step: int,
    last: str,
) -> None:
    nan_at(monkeypatch, step)
    assert train(config, *sets(f"run.nonfinite='{nonfinite}'")) == 1
    error = capfd.readouterr().err.rstrip()
    assert f"step {step}: the gradient of transformer.h.2 and 2 more is NaN or infinite" in error
    assert error.endswith(last) and ("last checkpoint" in error) is bool(last)


def test_a_run_goes_back_after_a_loss_that_is_nan_and_draws_other_batches(
    config: Path, undisturbed: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    drawn = nan_at(monkeypatch, 8, 11)
    assert train(config, "--set", "run.nonfinite='back'") == 0
    printed = capfd.readouterr().out
    assert printed.count("; back to step 6, and on with other batches") == 2
    mine, theirs = computed(Path("runs/run")), computed(undisturbed)
    steps = [line["step"] for line in theirs]
    assert [line["step"] for line in mine] == steps
    same = [one == other for one, other in zip(mine, theirs, strict=True)]
    assert same == [step <= 6 for step in steps]
    # step 7 of each try: none sees again what an earlier one has seen
    assert len({tuple(drawn[call - 1]) for call in (7, 9, 12)}) == 3


# Real processes

KILLS = 7

#: Runs the first line of arguments itself, which loads what takes seconds to load, then forks a process for
#: each further one, and kills it when it is time.
ZYGOTE = """
import json, os, random, signal, sys, threading, time
sys.path.insert(0, {home!r})
import torch, streamer, tqdm
from streamer.app.cli import main
torch.set_num_threads(1)
# tqdm's lock is one for all processes: who is killed with it leaves it locked
tqdm.tqdm.set_lock(threading.RLock())
tqdm.tqdm.monitor_interval = 0  # a thread that may hold that lock just when a child is forked
told = os.dup(1)
os.dup2(2, 1)
code = main(json.loads(sys.stdin.readline())[1])
os.dup2(told, 1)
print(code, flush=True)
for line in sys.stdin:
    seconds, arguments = json.loads(line)
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.dup2(write, 1)
        sys.stdout.reconfigure(line_buffering=True)
        os._exit(main(arguments))
    os.close(write)
    with os.fdopen(read) as output:
        if seconds is not None:
            # so long after the last line that it prints before the first step
            for printed in output:
                if "tokens, to" in printed:
                    break
            time.sleep(seconds)
            os.kill(child, signal.SIGKILL)
        output.read()
    _, status = os.waitpid(child, 0)
    print(os.waitstatus_to_exitcode(status), flush=True)
"""


@pytest.fixture
def zygote() -> Iterator[Callable[[float | None, list[str]], int]]:
    program = ZYGOTE.format(home=str(HOME))
    child = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdin is not None
    assert child.stdout is not None

    def run(seconds: float | None, arguments: list[str]) -> int:
        child.stdin.write(json.dumps([seconds, arguments]) + "\n")
        child.stdin.flush()
        return int(child.stdout.readline())

    yield run
    with child:
        child.stdin.close()
        assert child.wait(timeout=60) == 0


def test_a_run_that_is_killed_again_and_again_ends_where_an_undisturbed_one_does(
    config: Path, tmp_path: Path, zygote: Callable[[float | None, list[str]], int]
) -> None:
    longer = ["train", str(config), "--set", "run.steps=40", "--save-every", "3"]
    assert zygote(None, [*longer, "--set", "run.out='undisturbed'"]) == 0
    kills, lives, resumed, seconds = 0, 0, 0, 0.6
    # at random, and everywhere
    moments = [(number + random.Random(number).random()) / KILLS for number in range(KILLS)]
    random.Random(0).shuffle(moments)
    while kills < KILLS or resumed <= KILLS / 2:
        lives += 1
        name = ["--set", f"run.name='life{lives}'"]
        directory = tmp_path / "runs" / f"life{lives}"
        code = -9
        while code == -9:
            resume = ["--resume"] if checkpoints(directory / "checkpoints") else []
            if not resume and directory.exists():
                # killed before the first checkpoint: a new run has a new directory
                directory.rename(tmp_path / f"early{kills}")
            resumed += len(resume)
            is_enough = kills >= KILLS and resumed > KILLS / 2
            moment = None if is_enough else seconds * moments[kills % KILLS]
            code = zygote(moment, [*longer, *name, *resume])
            kills += code == -9
            if code == -9 and not checkpoints(directory / "checkpoints"):
                seconds *= 1.5  # others keep the machine busy, and no run comes as far as a checkpoint
            if code == 0 and moment is not None:
                seconds /= 1.5  # and now they do not: the run was over before it was killed
        assert code == 0
        assert_same_end(directory, tmp_path / "undisturbed" / "run")


#: A step that never ends, in a process that says when it has begun and when it has heard the first signal.
ENDLESS = """
import signal, sys, time
sys.path.insert(0, {home!r})
import torch
from streamer.app.cli import main
def endless(self, *args, **kwargs):
    print("in a step", flush=True)
    while signal.getsignal(signal.SIGINT) is not signal.SIG_DFL:
        time.sleep(0.01)
    print("still in a step", flush=True)
    while True:
        time.sleep(0.01)
torch.Tensor.backward = endless
main(["train", "run.toml"])
"""


@pytest.mark.parametrize("ends", [False, True], ids=["goes on", "Ctrl-C"])
def test_a_run_outlives_its_readers(config: Path, monkeypatch: pytest.MonkeyPatch, ends: bool) -> None:
    """`tee` ends at Ctrl-C before the run has saved."""
    reads, writes = os.pipe()
    with os.fdopen(writes, "w", buffering=1) as log, monkeypatch.context() as patch:
        for name in ("stdout", "stderr"):
            patch.setattr(sys, name, log)

        def leave() -> None:
            os.close(reads)
            if ends:
                os.kill(os.getpid(), signal.SIGINT)

        stop_at(patch, 7, leave)
        assert train(config, *sets("run.save_every=0", "run.eval_every=1")) == 0
    run = Path("runs/run")
    [saved] = checkpoints(run / "checkpoints")
    assert logged(run, "loss")[-1]["step"] == Manifest.read(saved).step
    assert (run / "summary.json").exists() == (not ends)
    assert (Manifest.read(saved).step == STEPS) == (not ends)


def test_a_second_ctrl_c_ends_the_process_at_once(config: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", ENDLESS.format(home=str(HOME))], stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert any("in a step" in line for line in child.stdout)
        child.send_signal(signal.SIGINT)
        assert child.stdout.readline() == "still in a step\n", "the first one waits for the step"
        child.send_signal(signal.SIGINT)
        assert child.wait(timeout=30) == -signal.SIGINT


@pytest.mark.parametrize(
    "place",
    [
        "streamer.app.data.splits.TokenData.batch",
        "streamer.backends.thread.ThreadBackend.copy",
        "models.gpt2.MLP.forward",
    ],
)
def test_an_error_in_a_part_of_the_run_ends_it_with_that_error(
    config: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    stop_at(monkeypatch, 2, lambda: monkeypatch.setattr(place, trouble))
    with pytest.raises(Trouble, match="on purpose"):
        train(config)  # that no thread is left is looked after for every test
    monkeypatch.undo()
    assert logged(config.parent / "runs" / "run")[-1]["step"] <= 2


def test_no_other_runs_checkpoints_are_resumed_or_dropped(
    config: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert train(config, "--keep", "4") == 0
    assert train(config, *sets("run.name=run-2b", "run.steps=14")) == 0
    assert saved_steps() == [3, 6, 9, 12]
    assert train(config, "--resume", "--set", "run.steps=15") == 2
    assert "the run was made with run.keep = 4, and the config has 2" in capfd.readouterr().err
    assert train(config, "--resume", *sets("run.steps=15", "run.keep=4")) == 0
    assert saved_steps() == [6, 9, 12, 15]


@pytest.mark.usefixtures("finished")
def test_data_that_has_changed_is_told(config: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert train(config, "--resume", "--set", "run.steps=13") == 0
    assert "the data has changed" not in capfd.readouterr().out
    with Path("a.txt").open("a") as file:
        file.write("more")
    assert train(config, "--resume", "--set", "run.steps=14") == 0
    assert "the data has changed: " in capfd.readouterr().out
