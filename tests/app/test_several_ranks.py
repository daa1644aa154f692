"""`streamer train` under torchrun: two processes do what one does that takes each batch in two passes."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file

from streamer.app.cli import main
from streamer.app.config import load_config
from streamer.app.machine_file import machine
from streamer.app.plan.planning import plan_run
from streamer.app.run import loop, run_folder
from streamer.app.run.ranks import share_of_machine
from streamer.backends import ranks
from streamer.checkpoint import save
from tests.app.common import HOME, chat, least_of, logged, sets
from tests.ranks.common import listening, run_ranks

CONFIG = """
[run]
name = "tiny"
steps = 6
eval_every = 3
eval_batches = 3
sample_tokens = 8
save_every = 3
out = "{out}"
[model]
factory = "models.gpt2:GPT"
args = {{ vocab_size = 256, block_size = 16, n_layer = 2, n_head = 2, n_embd = 16 }}
[data]
context = 16
batch_size = 4
paths = ["{text}"]
val_fraction = 0.1
[stream]
layers = "transformer.h"
device = "cpu"
[optimizer]
lr = 1e-2
grad_clip = 0.0
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    text = tmp_path / "text"
    text.write_text("".join(f"{number} times {number} is {number**2}\n" for number in range(60)))
    path = tmp_path / "tiny.toml"
    path.write_text(CONFIG.format(out=tmp_path / "runs", text=text))
    return path


Told = tuple[int, str, str]


def commands(
    rank: int,
    size: int,
    places: Sequence[Mapping[str, str]],
    given: Sequence[Sequence[str]],
    spoil: Callable[..., Any] | None,
) -> list[Told]:
    """What each command, run as torchrun would, ends with: its exit code, stdout and stderr."""
    os.chdir(HOME)
    told = []
    for place, arguments in zip(places, given, strict=True):
        os.environ.update(
            {
                **place,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(size),
                "LOCAL_WORLD_SIZE": str(size),
            }
        )
        if spoil is not None:
            spoil(rank)
        out, error = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
            code = main([*arguments])
        told.append((code, out.getvalue(), error.getvalue()))
    return told


def under_torchrun(
    *given: Sequence[str],
    size: int = 2,
    spoil: Callable[..., Any] | None = None,
    imports: Sequence[str] = (),
) -> list[list[Told]]:
    """What `commands` tells, for each command and rank."""
    stores = [listening() for _ in given]
    places = [place for _, place in stores]
    by_rank = run_ranks(size, commands, size, places, given, spoil, kind=None, imports=imports)
    return [*map(list, zip(*by_rank, strict=True))]


def train(config: Path, name: str, *settings: str, more: Sequence[str] = ()) -> list[str]:
    return ["train", str(config), *sets(f'run.name="{name}"', *settings), *more]


def weights(run: Path) -> dict[str, torch.Tensor]:
    """All tensors of the last checkpoint, but the states of random numbers."""
    folder = run_folder.checkpoints(run / "checkpoints")[-1]
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    return {name: tensor for name, tensor in tensors.items() if "layers." in name or "transformer." in name}


def assert_same(one: Path, other: Path, *, tolerance: float = 0.0) -> None:
    ours, theirs = weights(one), weights(other)
    assert ours.keys() == theirs.keys()
    assert len(ours) > 10
    for name, tensor in ours.items():
        assert torch.allclose(tensor, theirs[name], rtol=tolerance, atol=tolerance), name
    for key, least in (("val_loss", 0.0), ("loss", 1e-6)):
        values = [[line[key] for line in logged(run, key)] for run in (one, other)]
        assert len(values[0]) > 1
        assert values[0] == pytest.approx(values[1], rel=max(tolerance, least), abs=0.0), key


class Batches(NamedTuple):
    """Settings of a run's batches, the passes of one process that equal those of two ranks, and by how much
    weights may differ: sums of more than two gradients are made in another order."""

    settings: tuple[str, ...] = ()
    passes: int = 2
    tolerance: float = 0.0


#: Ranks have unequal parts of an odd number of sequences, and of an epoch's last batch, which has one only.
BATCHES = {
    "crops": Batches(),
    "odd": Batches(("data.batch_size=5", "stream.gather_weights=true")),
    "epochs": Batches(("run.epochs=1", "run.steps=0")),
    "accumulated": Batches(("data.batch_size=8", "data.accumulate=2"), 4, 1e-5),
}


def test_two_ranks_train_as_one_process_does(config: Path, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    told = under_torchrun(*(train(config, f"two-{name}", *each.settings) for name, each in BATCHES.items()))
    for (name, each), ((code, out, error), other) in zip(BATCHES.items(), told, strict=True):
        assert code == 0, error
        assert other == (0, "", "")
        assert "in parts for 2 processes" in out
        assert "A sample, after the first" in out
        assert main(train(config, f"one-{name}", *each.settings, f"data.accumulate={each.passes}")) == 0
        assert_same(runs / f"two-{name}", runs / f"one-{name}", tolerance=each.tolerance)
        summary = json.loads((runs / f"two-{name}" / "summary.json").read_text())
        assert summary["busy_seconds"]["collective"] > 0
    assert {path.name for path in runs.iterdir()} == {
        f"{count}-{name}" for name in BATCHES for count in ("one", "two")
    }


def on_machines_of_their_own(rank: int) -> None:
    """As torchrun --nnodes starts them, with one process on each machine."""
    os.environ.update({"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": str(rank)})
    ranks.machine_name = lambda: f"machine {rank}"
    interrupt(rank)


def test_two_machines_train_as_one_process_does(config: Path, tmp_path: Path) -> None:
    """They have unequal parts; the second one gets a signal amid step 4."""
    runs, each = tmp_path / "runs", BATCHES["odd"]
    begun = train(config, "two", *each.settings, 'stream.activations="auto"')
    told = under_torchrun(begun, [*begun, "--resume", str(runs / "two")], spoil=on_machines_of_their_own)
    for (code, out, error), other in told:
        assert code == 0, error
        assert other == (0, "", "")
        assert "in parts for 2 processes" in out
    assert "stopped by SIGINT after step 4" in told[0][0][1]
    assert main(train(config, "one", *each.settings, f"data.accumulate={each.passes}")) == 0
    assert_same(runs / "two", runs / "one", tolerance=each.tolerance)
    # written once
    assert {path.name for path in runs.iterdir()} == {"one", "two"}


@pytest.mark.parametrize(("batch", "here", "share"), [(8, 8, 8), (8, 4, 4), (9, 4, 5), (8, 1, 1)])
def test_a_machine_plans_with_its_part_of_a_batch(config: Path, batch: int, here: int, share: int) -> None:
    given = load_config(config, [f"data.batch_size={batch}"])
    assert share_of_machine(given, here, 8).data.batch_size == share
    assert share_of_machine(given, 1, 1).data.batch_size == batch


def interrupt(rank: int) -> None:
    """Ctrl-C in one of the ranks, amid step 4."""
    step = loop.Loop.train_step

    def train_step(self: loop.Loop) -> dict[str, float]:
        if self.step == 3 and rank == 1:
            os.kill(os.getpid(), signal.SIGINT)
        return step(self)

    loop.Loop.train_step = train_step  # type: ignore[method-assign]


def test_a_signal_that_one_rank_gets_stops_all_and_any_number_goes_on(config: Path, tmp_path: Path) -> None:
    (((code, out, _), (follower, silent, _)),) = under_torchrun(train(config, "two"), spoil=interrupt)
    assert (code, follower, silent) == (0, 0, "")
    assert "stopped by SIGINT after step 4" in out
    run = tmp_path / "runs" / "two"
    assert [path.name for path in run_folder.checkpoints(run / "checkpoints")] == [
        "step-0000003",
        "step-0000004",
    ]
    (run.parent / "copy").symlink_to(run)
    more = ["--resume", str(run)]
    ((code, out, error), _), ((again, finished, _), _) = under_torchrun(
        train(config, "two", more=more), train(config, "two", more=more)
    )
    assert code == 0, error
    assert "steps 5 to 6" in out
    assert (again, "has finished at step 6" in finished) == (0, True)
    assert main(train(config, "one", "data.accumulate=2")) == 0
    assert_same(run, tmp_path / "runs" / "one")


def test_what_host_memory_has_no_room_for_is_on_disk(config: Path, tmp_path: Path) -> None:
    """As planned, with the numbers of ranks that have room for all, and a run goes on without a disk."""
    deep = (
        "model.args.n_layer=8",
        "model.args.n_embd=64",
        'stream.dtype="bfloat16"',
    )
    folder = tmp_path / "scratch"
    folder.mkdir()
    too_little = load_config(config, [*deep, 'memory.host="1B"', f'memory.disk="{folder}"'])
    # without the batches and remedies that the command tries too
    least = least_of(plan_run(too_little, machine("rtx-4090", 2)).beyond_disk or "")
    # the plan counts what Python and its libraries take of each process, wrap does not
    on_disk = *deep, f'memory.host="{least}B"', f'memory.disk="{folder}"'
    plan = plan_run(load_config(config, on_disk), machine("rtx-4090", 2))
    assert plan.fits_host
    assert plan.step.disk_bytes["weights"]
    read, written = plan.disk_moved
    assert read > written > 0
    run = tmp_path / "runs" / "on-disk"
    more = ["--resume", str(run)]
    told = [
        *under_torchrun(train(config, "on-disk", *on_disk), spoil=interrupt),
        *under_torchrun(train(config, "in-memory", *deep), train(config, "on-disk", *deep, more=more)),
    ]
    for (code, _, error), other in told:
        assert code == 0, error
        assert other[:2] == (0, "")
    assert " on disk" in told[0][0][1]
    assert "stopped by SIGINT after step 4" in told[0][0][1]
    assert_same(run, tmp_path / "runs" / "in-memory")
    assert not [*folder.iterdir()]


def fill_disk(rank: int) -> None:
    """The first checkpoint finds no room."""
    content, calls = save._content, [0]

    def spoilt(*args: Any, **options: Any) -> Any:
        calls[0] += 1
        if calls[0] == 1:
            raise OSError(errno.ENOSPC, "No space left on device", "runs")
        return content(*args, **options)

    save._content = spoilt


def test_a_checkpoint_that_cannot_be_written_is_done_without_or_ends_all_ranks(
    config: Path, tmp_path: Path
) -> None:
    given = train(config, "go-on", 'run.save_failure="warn"'), train(config, "stop", "run.save_wait=0")
    told = under_torchrun(*given, spoil=fill_disk)
    (code, out, _), (follower, silent, quiet) = told[0]
    assert (code, follower, silent, quiet) == (0, 0, "", "")
    assert "step 3: " in out
    assert "No space left on device: 'runs'; going on without" in out
    assert [path.name for path in (tmp_path / "runs" / "go-on" / "checkpoints").iterdir()] == ["step-0000006"]
    (code, _, error), (follower, silent, quiet) = told[1]
    assert (code, follower, silent, quiet) == (1, 1, "", "")
    assert "No space left" in error


def lose_memory(rank: int) -> None:
    def train_step(self: loop.Loop) -> dict[str, float]:
        if self.step == 1 and rank == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return step(self)

    step = loop.Loop.train_step
    loop.Loop.train_step = train_step  # type: ignore[method-assign]


def test_what_is_wrong_is_told_once(config: Path, tmp_path: Path) -> None:
    wrong = {
        "data.batch_size=1": "data.batch_size = 1 has no part for each of 2 processes: set it to",
        'stream.layers="h"': "[stream]",
        "run.step=1": "run.step",
        'data.paths=["nowhere"]': "nowhere",
        'stream.device="cuda:0"': 'stream.device = "cuda:0": under torchrun each process has its own, "cuda"',
    }
    told = under_torchrun(*(train(config, "wrong", setting) for setting in wrong))
    for line, ((code, _, error), (follower, silent, quiet)) in zip(wrong.values(), told, strict=True):
        assert code == 2
        assert follower in (1, 2)
        assert line in error
        assert (silent, quiet) == ("", ""), line
    assert not (tmp_path / "runs").exists()


def test_what_only_one_rank_knows_names_it(config: Path) -> None:
    (((code, _, error), (follower, _, quiet)),) = under_torchrun(train(config, "lost"), spoil=lose_memory)
    assert (code, follower) == (1, 1)
    assert quiet.endswith("streamer: rank 1: step 2: CUDA out of memory; lower stream.micro_batch_size\n")
    assert "rank 1 has ended, or has unwrapped its model" in error


def test_torchrun_itself(config: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "streamer"]
    done = subprocess.run(
        [*command, *train(config, "two", "run.steps=1")],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=HOME,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Written to") == 1
    assert (tmp_path / "runs" / "two" / "summary.json").exists()


#: What takes seconds to import. A library of peft's prints a line then.
IMPORTS = ("transformers.models.llama.modeling_llama", "peft")


def test_adapters_learn_conversations_of_any_length(tmp_path: Path) -> None:
    """The mean is over the answers' tokens of all ranks, who have unequally many."""
    from tests import tiny_llama  # with transformers, which every rank of this file would import

    tiny_llama.write(tmp_path / "llama")
    lines = [json.dumps({"messages": chat(number)}) for number in range(1, 10**6, 23456)]
    (tmp_path / "train.jsonl").write_text("\n".join(lines))
    given = ("run.steps=4", "run.epochs=0", "data.batch_size=5", "data.context=64", "data.val_fraction=0.2")
    beside = (
        'stream.device="cpu"',
        "optimizer.grad_clip=0.0",
        "lora.rank=4",
        "optimizer.lr=0.01",
        f'run.out="{tmp_path}"',
    )

    def command(name: str, *more: str) -> list[str]:
        files = ["--model", str(tmp_path / "llama"), "--data", str(tmp_path / "train.jsonl")]
        return ["train", "hf-finetune", *files, *sets(f'run.name="{name}"', *given, *beside, *more)]

    [[(code, out, error), other]] = under_torchrun(command("two"), imports=IMPORTS)
    assert code == 0, error
    assert other == (0, "", "")
    assert "The adapters" in out
    assert main(command("one", "data.accumulate=2")) == 0
    assert_same(tmp_path / "two", tmp_path / "one")
