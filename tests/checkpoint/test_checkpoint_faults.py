"""`load` from checkpoints that are damaged or of something else, `save` where it cannot write: an error that
says so, and nothing changed; checkpoints taken at odd moments or loaded otherwise than they were saved."""

from __future__ import annotations

import copy
import errno
import os
import random
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import streamer
from streamer.checkpoint.manifest import Manifest
from streamer.store.layout import num_blocks

WIDTH = 12


class Net(nn.Module):
    """Tied ends, a frozen parameter, one that never has a gradient, a buffer that is not persistent."""

    def __init__(
        self,
        width: int = WIDTH,
        depth: int = 3,
        buffer: int = 2,
        *,
        extra: bool = False,
        is_frozen: bool = False,
    ) -> None:
        super().__init__()
        self.first = nn.Linear(width, width, bias=False)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(depth))
        self.others = nn.ModuleList(nn.Sequential(nn.Linear(width, width)) for _ in range(depth))
        self.last = nn.Linear(width, width)
        self.last.weight = self.first.weight
        self.unused = nn.Parameter(torch.ones(3))
        self.blocks[0][0].bias.requires_grad_(False)
        self.blocks[1].register_parameter("unused", nn.Parameter(torch.ones(5)))
        self.register_buffer("count", torch.zeros(buffer), persistent=False)
        self.blocks[-1].requires_grad_(not is_frozen)
        if extra:
            self.extra = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in (*self.blocks, *self.others):
            x = x + block(x)
        return self.last(x)


class Run:
    def __init__(
        self,
        *,
        sizes: dict[str, Any] | None = None,
        make: Callable[[list[nn.Parameter]], Any] | None = None,
        seed: int = 0,
        state_dtype: Any = torch.float32,
        **options: Any,
    ) -> None:
        torch.manual_seed(seed)
        self.model = streamer.wrap(
            Net(**(sizes or {})), **({"layers": "blocks", "device": "cpu", "host_threads": 1} | options)
        )
        params = list(self.model.parameters())
        self.optimizer = make(params) if make else streamer.AdamW(params, lr=1e-2, state_dtype=state_dtype)

    def backward(self, index: int) -> None:
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(index))
        x = x.to(self.model.first.weight.dtype)
        (self.model(x) - x.roll(1, 1)).float().square().mean().backward()
        with torch.no_grad():
            self.model.count += 1

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def train(self, *indices: int) -> None:
        for index in indices:
            self.backward(index)
            self.step()

    def save(self, path: Path, **extra: Any) -> None:
        streamer.save(self.model, self.optimizer, path, step=7, extra=extra)

    def load(self, path: Path) -> Any:
        return streamer.load(self.model, self.optimizer, path)

    def masters(self) -> dict[str, torch.Tensor]:
        """Copies of the exact weights."""
        streamer.synchronize(self.model)
        executor = self.model._streamer.executor
        return {
            slice.param.name: executor.backend.on_host(lambda u=unit, s=slice: executor.shard(u).exact(s))
            for unit in (*executor.units, executor.root)
            for slice in unit.layout.slices
        }

    def moments(self) -> dict[str, torch.Tensor]:
        streamer.synchronize(self.model)
        named = {param: name for name, param in self.model.named_parameters()}
        state = {named.get(param, ""): values for param, values in self.optimizer.state.items()}
        return {f"{name}.{key}": t.clone() for name, s in state.items() for key, t in s.items()}

    def all(self) -> dict[str, Any]:
        """Bits of all that a load changes."""
        tensors = {f"moments.{name}": t for name, t in self.moments().items()} | self.masters()
        tensors |= {name: buffer for name, buffer in self.model.named_buffers()}
        tensors |= {name: p.data for name, p in self.model.named_parameters(prefix="data")}
        for name, param in self.model.named_parameters(prefix="grad"):
            if param.grad is not None:
                tensors[name] = param.grad
        executor = self.model._streamer.executor
        options = [{k: v for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups]
        return {name: (t.dtype, t.tolist()) for name, t in tensors.items()} | {
            "options": copy.deepcopy(options),
            "scale": executor.gradients.factor,
            "skipped": executor.skipped_steps,
            "random": (random.getstate(), repr(np.random.get_state()), torch.get_rng_state().tolist()),
        }

    def end(self) -> None:
        streamer.unwrap(self.model)


@pytest.fixture
def runs() -> Iterator[Callable[..., Run]]:
    """Makes runs that are ended."""
    made: list[Run] = []

    def make(**options: Any) -> Run:
        made.append(Run(**options))
        return made[-1]

    yield make
    for run in made:
        run.end()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Run, Path]]:
    """A run that has gone on from where a checkpoint was taken of it, in mid-accumulation."""
    run, path = Run(), tmp_path_factory.mktemp("good") / "good"
    run.train(0, 1)
    run.backward(2)
    run.save(path, tensor=torch.arange(3), array=np.ones(2), text="a")
    run.step()
    run.train(3)
    run.backward(4)
    yield run, path
    run.end()


def refused(run: Run, path: Path, match: str | None = None) -> str:
    """The error of loading, which changes nothing."""
    before = run.all()
    with pytest.raises(streamer.CheckpointError, match=match) as caught:
        run.load(path)
    assert "\n" not in str(caught.value)
    assert run.all() == before
    return str(caught.value)


def copied(path: Path, to: Path) -> Path:
    shutil.rmtree(to, ignore_errors=True)
    shutil.copytree(path, to)
    return to


def test_damage_anywhere_is_named_and_changes_nothing(pair: tuple[Run, Path], tmp_path: Path) -> None:
    run, good = pair
    rng, before = random.Random(0), run.all()
    bad = copied(good, tmp_path / "bad")
    files = sorted(good.iterdir())
    assert {file.name.split("-")[0].split(".")[0] for file in files} == {
        *("manifest", "weights", "optimizer", "gradients", "buffers", "values")
    }
    for file in files:
        data = file.read_bytes()
        damaged = [b"", data[:-1], data[: rng.randrange(len(data))], None]
        for _ in range(3):
            flipped = bytearray(data)
            flipped[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            damaged.append(bytes(flipped))
        for contents in damaged:
            (bad / file.name).unlink()
            if contents is not None:
                (bad / file.name).write_bytes(contents)
            with pytest.raises(streamer.CheckpointError, match=file.name) as caught:
                run.load(bad)
            assert "\n" not in str(caught.value)
            (bad / file.name).write_bytes(data)
    assert run.all() == before
    one, two = bad / "weights-00000.safetensors", bad / "weights-00002.safetensors"
    one.rename(bad / "x")
    two.rename(one)
    (bad / "x").rename(two)
    refused(run, bad, "weights-0000[02].safetensors: tensor 'blocks")


OTHERS: list[tuple[dict[str, Any], str]] = [
    (
        {"sizes": {"width": 8}},
        r"another model.*first.weight \(\(12, 12\) there, \(8, 8\) here\).* and \d+ more",
    ),
    ({"sizes": {"depth": 2}}, r"blocks.2.0.bias \(\(12,\) there, missing here\)"),
    ({"sizes": {"extra": True}}, r"differ: extra \(missing there, \(2,\) here\)$"),
    ({"sizes": {"buffer": 3}}, r"differ: count \(\(2,\) there, \(3,\) here\)$"),
    (
        {"make": lambda p: streamer.AdamW([{"params": p[1:]}, {"params": p[:1]}])},
        r"groups of \[\d+\] .*groups of \[\d+, 1\].*\(group 0 there, group 1 here\)$",
    ),
    ({"make": lambda p: streamer.AdamW(p[1:])}, r"differ: unused \(group 0 there, missing here\)$"),
    ({"make": lambda p: torch.optim.SGD(p, 0.1)}, "state of streamer.AdamW, and this is SGD"),
    ({"make": lambda p: torch.optim.AdamW(p)}, "state of streamer.AdamW, and this is AdamW"),
]


@pytest.mark.parametrize(("options", "match"), OTHERS)
def test_another_model_or_optimizer(
    runs: Any, pair: tuple[Run, Path], options: dict[str, Any], match: str
) -> None:
    refused(runs(**options), pair[1], match)


def test_a_checkpoint_of_another_optimizer(runs: Any, tmp_path: Path) -> None:
    plain = runs(make=lambda p: torch.optim.AdamW(p))
    plain.train(0)
    plain.save(tmp_path / "plain")
    refused(runs(), tmp_path / "plain", "state of AdamW, and this is streamer.AdamW")
    other = runs(make=lambda p: torch.optim.AdamW([{"params": p[1:]}, {"params": p[:1]}]))
    refused(
        other,
        tmp_path / "plain",
        r"groups of \[\d+\] parameters, and this optimizer has groups of \[\d+, 1\]",
    )
    streamer.save(plain.model, None, tmp_path / "none", step=0)
    refused(plain, tmp_path / "none", "state of None")


def test_an_optimizer_of_another_model_or_of_the_past(
    runs: Any, pair: tuple[Run, Path], tmp_path: Path
) -> None:
    one, two = runs(), runs()
    for act in (
        lambda: streamer.load(one.model, two.optimizer, pair[1]),
        lambda: streamer.save(one.model, two.optimizer, tmp_path / "mixed", step=0),
    ):
        with pytest.raises(ValueError, match="of another model"):
            act()
    streamer.AdamW(one.model.parameters())
    with pytest.raises(RuntimeError, match="created later"):
        one.load(pair[1])
    assert list(tmp_path.iterdir()) == []


def test_gradients_of_layers_have_no_place_where_updates_run_in_backward(
    runs: Any, pair: tuple[Run, Path], tmp_path: Path
) -> None:
    landing = runs(update="backward")
    landing.train(0)
    refused(landing, pair[1], "gradients-00000.safetensors: update='backward'")
    streamer.synchronize(landing.model)
    landing.save(tmp_path / "a")
    landing.backward(1)  # and turns back
    landing.optimizer.param_groups[0]["lr"] = 0.5
    landing.load(tmp_path / "a")
    whole = runs()
    whole.train(0)
    for run in (landing, whole):
        run.train(5, 6)
    assert landing.masters().keys() == whole.masters().keys()
    assert all(torch.equal(t, whole.masters()[name]) for name, t in landing.masters().items())


BF16 = {"dtype": torch.bfloat16}


@pytest.mark.parametrize("options", [{}, BF16, BF16 | {"grad_dtype": None}], ids=str)
def test_between_backwards_and_between_clipping_and_step(
    runs: Any, tmp_path: Path, options: dict[str, Any]
) -> None:
    def go(run: Run, indices: range) -> None:
        for index in indices:
            if index == 2:
                streamer.clip_grad_norm_(run.model, 0.05)
            elif index == 3:
                run.step()
            else:
                run.backward(10 + index)

    for moment in range(4):
        first = runs(**options)
        first.train(0)
        go(first, range(moment))
        first.save(tmp_path / f"{moment}")
        second = runs(seed=9, **options)
        second.train(0)
        second.backward(3)
        streamer.clip_grad_norm_(second.model, 0.01)
        second.load(tmp_path / f"{moment}")
        shutil.rmtree(tmp_path / f"{moment}")  # nothing is read from there any more
        for run in (first, second):
            go(run, range(moment, 4))
            run.train(20)
        assert second.all() == first.all(), moment


@pytest.mark.parametrize("options", [{}, BF16 | {"state_dtype": "int8"}], ids=str)
@pytest.mark.parametrize("by_state_dict", [False, True])
def test_a_checkpoint_of_before_the_first_step_has_zero_moments(
    runs: Any, tmp_path: Path, options: dict[str, Any], by_state_dict: bool
) -> None:
    """Also where others have been loaded in the meantime, which no step has used."""
    first, second, fresh = runs(**options), runs(seed=4, **options), runs(**options)
    first.save(tmp_path / "begin")
    begin = copy.deepcopy(first.optimizer.state_dict())
    first.train(0, 1)
    first.save(tmp_path / "later")
    second.load(tmp_path / "later")
    if by_state_dict:
        streamer.load(second.model, None, tmp_path / "begin")
        second.optimizer.load_state_dict(begin)
    else:
        second.load(tmp_path / "begin")
    for run in (second, fresh):
        run.train(2, 3)
    for actual, expected in ((second.masters(), fresh.masters()), (second.moments(), fresh.moments())):
        assert actual.keys() == expected.keys()
        assert all(torch.equal(tensor, expected[name]) for name, tensor in actual.items())


def test_weights_alone_and_a_scaler(runs: Any, tmp_path: Path) -> None:
    first, second = runs(), runs(seed=4)
    first.train(0)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    schedule = torch.optim.lr_scheduler.MultiStepLR(torch.optim.SGD([nn.Parameter(torch.ones(1))]), [2, 2])
    first.save(tmp_path / "a", scaler=scaler.state_dict(), schedule=schedule.state_dict())
    before = second.moments()
    loaded = streamer.load(second.model, None, tmp_path / "a")
    assert (loaded.step, loaded.extra["scaler"]) == (7, scaler.state_dict())
    assert loaded.extra["schedule"] == schedule.state_dict()
    assert list(second.moments()) == list(before)
    assert all(torch.equal(t, second.masters()[name]) for name, t in first.masters().items())


@pytest.mark.parametrize(
    ("saved", "options"),
    [
        # how layers are streamed changes nothing of how a checkpoint is read
        ({}, {"num_slots": 1, "activations": "keep"}),
        ({}, {"num_slots": 6, "update": "backward"}),
        *(
            (saved, {"dtype": dtype})
            for saved in ({}, BF16)
            for dtype in (torch.float32, torch.bfloat16, torch.float16)
            if saved.get("dtype", torch.float32) is not dtype
        ),
    ],
    ids=str,
)
def test_masters_in_any_streamed_dtype(
    runs: Any, tmp_path: Path, saved: dict[str, Any], options: dict[str, Any]
) -> None:
    first, second = runs(**saved), runs(seed=5, **options)
    first.train(0, 1)
    first.save(tmp_path / "a")
    second.load(tmp_path / "a")
    there = first.masters()
    for name, master in second.masters().items():
        expected = there[name]
        if name == "blocks.0.0.bias":  # frozen: has no master
            expected = expected.to(master.dtype)
        assert torch.equal(master, expected.to(master.dtype)), name
    assert all(torch.equal(t, second.moments()[name]) for name, t in first.moments().items())
    second.train(2)


def test_parameters_that_are_frozen_here_take_only_their_weight(runs: Any, pair: tuple[Run, Path]) -> None:
    whole, frozen = runs(), runs(sizes={"is_frozen": True}, seed=5)
    for run in (whole, frozen):
        run.load(pair[1])
    assert all(torch.equal(t, frozen.masters()[name]) for name, t in whole.masters().items())
    there, here = whole.moments(), frozen.moments()
    assert all(torch.equal(tensor, there[name]) for name, tensor in here.items())
    assert {name.rpartition(".")[0] for name in there.keys() - here.keys()} == {
        *("blocks.2.0.weight", "blocks.2.0.bias")
    }


def values_of(run: Run, name: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Both moments as fp32; half a step of the first, and what the second's first code stands for."""
    held = {key.removeprefix(f"{name}."): t for key, t in run.moments().items() if key.startswith(f"{name}.")}
    m, v = held["exp_avg"], held["exp_avg_sq"]
    if "exp_avg_scale" not in held:
        return m.float(), v.float(), torch.zeros_like(m).float(), torch.zeros_like(m).float()

    def spread(t: torch.Tensor) -> torch.Tensor:
        assert len(t) == num_blocks(m.numel())
        return t.repeat_interleave(256)[: m.numel()].view(m.shape)

    scale, sq = spread(held["exp_avg_scale"]), spread(held["exp_avg_sq_scale"]).view(torch.int32)
    wide = (sq + (v.int() << 20)).view(torch.float32)
    first = (sq + (1 << 20)).view(torch.float32)
    return m.float() * scale, torch.where(v == 0, 0.0, wide), scale / 2, first


STATES = [torch.float32, torch.bfloat16, "int8"]


@pytest.mark.parametrize(("saved", "here"), [*zip(STATES, STATES[1:] + STATES[:1], strict=True)], ids=str)
def test_moments_in_another_dtype(runs: Any, tmp_path: Path, saved: Any, here: Any) -> None:
    big = {"sizes": {"width": WIDTH}, **BF16}
    first, second = runs(state_dtype=saved, **big), runs(state_dtype=here, seed=5, **big)
    first.train(0, 1, 2)
    first.save(tmp_path / "a")
    before = second.all()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="converted"):
            second.load(tmp_path / "a")
    assert second.all() == before
    with pytest.warns(UserWarning, match="moments were held in .* and are converted") as caught:
        second.load(tmp_path / "a")
    assert caught[0].filename == __file__
    names = {name.rpartition(".")[0] for name in first.moments()}
    assert names == {name.rpartition(".")[0] for name in second.moments()}
    for name in names:
        m, v, _, _ = values_of(first, name)
        new_m, new_v, half, first_code = values_of(second, name)
        relative = 2.0**-8 if here == torch.bfloat16 else 0.0
        assert ((new_m - m).abs() <= relative * m.abs() + half * (1 + 1e-5)).all(), name
        sq_relative = 1 / 16 if here == "int8" else relative
        held = v >= first_code
        assert ((new_v - v).abs() <= sq_relative * v)[held].all(), name
        assert torch.equal(new_v == 0, v == 0), name
    second.train(3)
    assert all(t.isfinite().all() for t in second.masters().values())


# where it cannot be written


def full_after(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    """Writing fails, in the middle of a file, after so many bytes."""
    import streamer.checkpoint.tensors as tensors

    write, left = tensors._write_all, [nbytes]

    def write_all(file: Any, data: memoryview) -> None:
        write(file, data[: left[0]])
        left[0] -= data.nbytes
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tensors, "_write_all", write_all)


@pytest.mark.parametrize("nbytes", [5, 3000])
def test_a_full_disk(runs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    run, whole = runs(), runs()
    run.train(0)
    run.save(tmp_path / "older")
    with monkeypatch.context() as full:
        full_after(full, nbytes)
        with pytest.raises(
            OSError, match=r"a checkpoint of \d+ bytes could not be written: No space"
        ) as caught:
            run.save(tmp_path / "newer")
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(tmp_path / "newer"))
    assert [path.name for path in tmp_path.iterdir()] == ["older"]
    Manifest.read(tmp_path / "older").check(tmp_path / "older")
    run.train(1)
    whole.train(0, 1)
    assert run.all() == whole.all()
    run.save(tmp_path / "newer")
    runs(seed=3).load(tmp_path / "newer")


def fsync_calling(monkeypatch: pytest.MonkeyPatch, note: Callable[[os.stat_result], None]) -> None:
    """Let every flush tell what is flushed, and its size then."""

    def fsync(descriptor: int) -> None:
        note(os.fstat(descriptor))

    monkeypatch.setattr(os, "fsync", fsync)


@pytest.mark.parametrize("block", [True, False])
def test_all_is_on_the_disk_before_the_checkpoint_has_its_name(
    runs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: bool
) -> None:
    run, path = runs(), tmp_path / "a"
    run.train(0)
    run.backward(1)
    flushed: dict[int, int] = {}
    fsync_calling(monkeypatch, lambda what: flushed.update({what.st_ino: what.st_size}))
    before: dict[int, int] = {}
    rename = Path.rename

    def renamed(self: Path, target: Path) -> Path:
        before.update(flushed)
        flushed.clear()
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", renamed)
    streamer.save(run.model, run.optimizer, path, step=1, block=block).result()
    written = {file.stat().st_ino: file.stat().st_size for file in path.iterdir()}
    assert len(written) > 10
    assert {inode: before.get(inode) for inode in written} == written
    assert path.stat().st_ino in before, "the files' names"
    assert tmp_path.stat().st_ino in flushed, "the folder's own name"


@pytest.mark.parametrize("block", [True, False])
def test_a_checkpoint_with_a_failed_flush_is_deleted(
    runs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: bool
) -> None:
    run = runs()
    run.train(0)
    flushes, fails = 0, 0

    def note(_: os.stat_result) -> None:
        nonlocal flushes
        flushes += 1
        if flushes == fails:
            raise OSError(errno.EIO, "not on the disk")

    fsync_calling(monkeypatch, note)
    while fails <= flushes:
        flushes, fails = 0, fails + 1
        try:
            streamer.save(run.model, run.optimizer, tmp_path / "a", step=1, block=block).result()
        except OSError as error:
            assert "not on the disk" in str(error)
            assert list(tmp_path.iterdir()) == []
        else:
            assert flushes == fails - 1, "each of them has failed once"
    assert fails > 10
    Manifest.read(tmp_path / "a").check(tmp_path / "a")


def test_values_that_cannot_be_saved_leave_nothing(runs: Any, tmp_path: Path) -> None:
    run = runs()
    with pytest.raises(ValueError, match=r"^extra\['a'\] is a set"):
        run.save(tmp_path / "b", a=set())
    with pytest.raises(ValueError, match=r"^extra\['a'\]: .*sparse"):
        run.save(tmp_path / "b", a=torch.ones(2).to_sparse())
    with pytest.raises(ValueError, match="step=1.5"):
        streamer.save(run.model, None, tmp_path / "b", step=1.5)
    assert list(tmp_path.iterdir()) == []
