"""bench/versus.py: ratios, what is left out and why, the verdict on losses, and all of it once, in small."""

from __future__ import annotations

import contextlib
import gc
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from bench import versus
from bench.versus import Losses, Result, measure, times_faster, verdict
from bench.versus_contenders import PLAIN_FP32, Contender, Plain, Task, contenders

SIZES = {"n_layer": 3, "n_head": 2, "n_embd": 16, "vocab_size": 32, "block_size": 16}
SMALL = ["--device", "cpu", "--n-layer", "3", "--n-head", "2", "--n-embd", "16", "--vocab-size", "32"]
SMALL += ["--context", "16", "--batch-size", "8", "--lr", "1e-2", "--rounds", "3", "--steps", "2"]
FELL = Losses(4.0, 2.0)


@pytest.fixture
def collected() -> Iterator[None]:
    """A streamed model's threads end with it."""
    yield
    gc.collect()


@pytest.fixture
def task(collected: None) -> Iterator[Task]:
    with contextlib.ExitStack() as exits:
        yield Task(torch.device("cpu"), torch.float32, SIZES, batch_size=8, lr=1e-2, exits=exits)
    assert not dist.is_initialized()


@pytest.fixture(autouse=True)
def _neither_torchao_nor_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("torchao", "torchao.optim", "deepspeed"):
        monkeypatch.setitem(sys.modules, name, None)
    for name in ("DS_ACCELERATOR", "RANK", "LOCAL_RANK", "WORLD_SIZE", "GLOO_SOCKET_IFNAME"):
        # so that what is set meanwhile is taken back
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


def outputs(contender: Contender, path: str, batch: torch.Tensor) -> list[torch.Tensor]:
    """What the module at ``path`` of each layer returns in one step, in order."""
    seen: list[torch.Tensor] = []
    for layer in contender.model.transformer.h:
        layer.get_submodule(path).register_forward_hook(lambda _, __, output: seen.append(output.detach()))
    contender.step(batch)
    contender.close()
    return seen


def result(losses: Losses = FELL, seconds: tuple[float, ...] = (1.0, 1.0), **traits: object) -> Result:
    return Result(losses, list(seconds), None, {"resident": 0, "pinned_by_pytorch": 0}, **traits)


class Lazy(Plain):
    """Does not update."""

    def __init__(self, task: Task) -> None:
        super().__init__(task, exact=True)
        self.optimizer.step = lambda: None


class Half(Plain):
    """Leaves two layers of three as they are."""

    def __init__(self, task: Task) -> None:
        super().__init__(task, exact=True)
        for layer in self.model.transformer.h[:2]:
            layer.requires_grad_(False)


class Unclipped(Plain):
    def clip(self) -> None:
        """Does nothing."""


class Failing(Contender):
    """Takes so many steps and then fails; remembers who was asked for what."""

    def __init__(self, good_steps: int, log: list[str], error: Exception | None = None) -> None:
        self.left, self.log = good_steps, log
        self.error = error or torch.OutOfMemoryError("out of memory\nmuch more of it")
        self.model = torch.nn.Linear(1, 1)

    def evaluate(self, tokens: torch.Tensor) -> float:
        return 1.0

    def step(self, tokens: torch.Tensor) -> None:
        self.left -= 1
        if self.left < 0:
            raise self.error
        self.log.append("step")

    def settle(self) -> None:
        self.log.append("settle")

    def close(self) -> None:
        self.log.append("close")
        raise RuntimeError("closing fails as well")


class Steady(Failing):
    """Never fails."""

    def __init__(self) -> None:
        super().__init__(1000, [])

    def close(self) -> None:
        self.log.append("close")


def test_ratios_are_taken_within_a_round() -> None:
    # a machine that is slower from round to round, and a contender that takes twice as long in all of them
    than, slower = result(seconds=(1, 10, 100)), result(seconds=(2, 20, 200))
    assert times_faster(than, slower) == {"lower_quartile": 0.5, "median": 0.5, "upper_quartile": 0.5}
    # the median of 4, 1 and 2, not 20 / 10
    assert times_faster(result(seconds=(4, 20, 30)), result(seconds=(1, 20, 15)))["median"] == 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("own", "clips", "reason"),
    [
        (FELL, True, None),
        (Losses(4.0, 4.0), True, "ends at 4.0000, the plain one at 2.0000"),
        (Losses(4.0, 2.06), True, "ends at 2.0600"),
        (Losses(4.01, 2.0), True, "begins at 4.0100"),
        # who cannot clip may be further off but must train
        (Losses(4.0, 2.3), False, None),
        (Losses(4.0, 3.0), False, "ends at 3.0000"),
    ],
)
def test_losses_are_taken_where_precision_explains_them(
    own: Losses, clips: bool, reason: str | None, dtype: str
) -> None:
    found = verdict(own, FELL, dtype=dtype, clips=clips)
    assert found is None if reason is None else reason in str(found)


def test_who_fails_is_named_and_closed_and_the_others_go_on(task: Task, capsys) -> None:
    logs: dict[str, list[str]] = {"at once": [], "later": []}

    def unbuildable() -> Contender:
        raise MemoryError("no room")

    builders = {
        "unbuildable": unbuildable,
        "at once": lambda: Failing(1, logs["at once"]),
        "later": lambda: Failing(5, logs["later"]),
        "steady": Steady,
    }
    results, left_out = measure(builders, task, rounds=2, steps=2)
    out_of_memory = "OutOfMemoryError: out of memory"
    no_room = "MemoryError: no room"
    assert left_out == {"unbuildable": no_room, "at once": out_of_memory, "later": out_of_memory}
    assert logs["at once"] == ["step", "close"]
    assert logs["later"] == ["step"] * 3 + ["settle"] + ["step"] * 2 + ["close"]
    assert list(results) == ["steady"]
    assert len(results["steady"].seconds) == 2
    printed = capsys.readouterr().out
    assert "unbuildable is left out: MemoryError: no room" in printed
    assert "Failing did not close: RuntimeError: closing fails as well" in printed


def test_a_broken_contender_is_caught(task: Task) -> None:
    broken = {
        "lazy": lambda: Lazy(task),
        "half": lambda: Half(task),
        "unclipped": lambda: Unclipped(task, exact=True),
    }
    options = versus.parse(["--device", "cpu", "--rounds", "4", "--steps", "2"])
    found = versus.run_group({PLAIN_FP32: lambda: Plain(task, exact=True), **broken}, task, options)
    assert found[PLAIN_FP32]["refused"] is None
    assert all("its loss ends at" in found[name]["refused"] for name in broken)


def test_bf16_is_computed_in_by_all_and_masters_are_as_they_say(task: Task) -> None:
    in_bf16 = Task(task.device, torch.bfloat16, SIZES, batch_size=8, lr=1e-2, exits=task.exits)
    for name, build in contenders(in_bf16, num_slots=2).items():
        if name.startswith(("torchao", "deepspeed")):
            continue
        contender = build()
        computed = outputs(contender, "mlp.c_fc", in_bf16.batch(0))
        assert {output.dtype for output in computed} == {torch.bfloat16}, name
        if not name.startswith("streamer"):  # which keeps what bf16 has lost beside it
            masters = {param.dtype for param in contender.model.parameters()}
            assert masters == {torch.float32 if contender.exact else torch.bfloat16}, name


@pytest.mark.usefixtures("collected")
def test_all_of_it_once(tmp_path: Path, capsys) -> None:
    path = tmp_path / "versus.json"
    assert versus.main([*SMALL, "--json", str(path)]) == 0
    assert not dist.is_initialized()
    report = json.loads(path.read_text())
    assert report["settings"]["steps"] == 2
    assert report["settings"]["dtype"] == "float32"
    (rows,) = report["groups"]
    assert rows["torchao-fp32"] == {
        "skipped": "torchao is not installed (import of torchao.optim halted; None in sys.modules)"
    }
    assert rows["deepspeed"]["skipped"].startswith("deepspeed is not installed")
    plain = rows[PLAIN_FP32]["loss"]
    assert plain["after"] < plain["before"] - 0.3
    for name in (PLAIN_FP32, "streamer-2", "streamer-3", "fsdp2"):
        assert rows[name]["refused"] is None
        assert rows[name]["rounds"] == 3
        assert rows[name]["loss"]["after"] == pytest.approx(plain["after"], abs=1e-3)
        assert rows[name]["tokens_per_second"]["median"] > 0
        assert rows[name]["times_tokens_per_second_of"][PLAIN_FP32]["median"] > 0
        assert (rows[name]["device_bytes"] is None) == (name in (PLAIN_FP32, "fsdp2"))
    # one slot more, and all of the weights, gradients and two moments in fp32
    held = [rows[name]["device_bytes"]["at_rest"] for name in ("streamer-2", "streamer-3")]
    assert held[0] < held[1]
    assert rows["streamer-2"]["host_bytes"]["counted"] >= 16 * report["parameters"]
    printed = capsys.readouterr().out
    assert "| deepspeed | left out: deepspeed is not installed" in printed
    lines = versus.report_table(report)
    assert len([line for line in lines if line.startswith("| ")]) == 2 + len(rows)


@pytest.mark.usefixtures("collected")
def test_a_refusal_is_written_and_the_exit_code(tmp_path: Path, monkeypatch, capsys) -> None:
    def with_lazy(task: Task, *, num_slots: int):
        return {PLAIN_FP32: lambda: Plain(task, exact=True), "lazy": lambda: Lazy(task)}

    monkeypatch.setattr(versus, "contenders", with_lazy)
    path = tmp_path / "versus.json"
    assert versus.main([*SMALL, "--groups", "lazy", "lazy", "--json", str(path)]) == 1
    for rows in json.loads(path.read_text())["groups"]:
        assert rows[PLAIN_FP32]["refused"] is None
        assert "its loss ends at" in rows["lazy"]["refused"]
    assert "(refused: its loss ends at" in capsys.readouterr().out
    # before a device that computes nothing losses are nobody's fault
    monkeypatch.setattr(versus, "go_on_without_values", lambda: None)
    assert versus.main([*SMALL, "--groups", "lazy", "--no-values", "--json", str(path)]) == 0
