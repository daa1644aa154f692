"""Ranks that do different things, end or hang: the others are told so, in a line, and none waits for ever."""

from __future__ import annotations

import os
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import streamer
from streamer.backends.ranks import Mean
from streamer.engine.handle import wrapped as handle_of
from streamer.errors import RanksError
from tests.ranks.common import run_ranks
from tests.ranks.programs import WIDTH, a_step, backward, everyone, model, part, wrap_model

#: Seconds of the group's timeout, for a rank that neither ends nor comes.
TIMEOUT = 3.0


#: Of a rank that runs a program here: the machines that the ranks are taken to be on, None for a group.
MACHINES: list[int | None] = [None]


def wrapped(**options: Any) -> nn.Module:
    given = {"layers": "layers", "device": "cpu", "process_group": everyone(MACHINES[0]), **options}
    return streamer.wrap(model(), **given)


def errors_of(rank: int, names: list[str], machines: int | None) -> list[str]:
    """The error that each program ends with, none where it ends well."""
    MACHINES[0] = machines
    return [ends_with(rank, name) for name in names]


def ends_with(rank: int, name: str) -> str:
    try:
        PROGRAMS[name](rank)
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def without_group(rank: int) -> None:
    with pytest.warns(UserWarning, match="2 ranks, and each of them trains this model alone"):
        streamer.unwrap(wrapped(process_group=None))


def writes_at_once(rank: int) -> None:
    """What all write with the same values is there once, and masters follow."""
    made = wrapped(dtype=torch.bfloat16)
    values = torch.full((8 * WIDTH, WIDTH), 0.5)
    with torch.no_grad():
        made.layers[0].up.weight.copy_(values)
        made.norm.weight[:2] = 3.0
    streamer.synchronize(made)
    assert made.layers[0].up.weight.eq(0.5).all()
    plain = streamer.unwrap(made)
    assert plain.layers[0].up.weight.eq(0.5).all() and plain.norm.weight.tolist()[:3] == [3.0, 3.0, 1.0]


def zeroes_and_scales(rank: int) -> None:
    """Gradients that all set to zero, and those to which clipping is still to be applied."""
    made = wrapped()
    backward(made, 0, rank, 1, None)
    before = made.layers[0].up.weight.grad.clone()
    norm = streamer.clip_grad_norm_(made, 1e-3)
    # the norm comes back rounded to fp32
    expected = before * (1e-3 / (norm.double() + 1e-6)).item()
    torch.testing.assert_close(made.layers[0].up.weight.grad, expected, rtol=1e-6, atol=0)
    made.zero_grad(set_to_none=False)
    assert not made.layers[0].up.weight.grad.any()
    streamer.unwrap(made)


def other_model(rank: int) -> None:
    made = model()
    if rank:
        made.norm = nn.LayerNorm(WIDTH, bias=False)
    wrap_model(made, machines=MACHINES[0])


def other_options(rank: int) -> None:
    wrapped(num_slots=1 + rank)


def wrap_fails(rank: int) -> None:
    wrapped(num_slots=0 if rank else 2)


def more_batches(rank: int) -> None:
    made = wrapped()
    optimizer = streamer.AdamW(made.parameters())
    for step in range(2 + rank):
        a_step(made, optimizer, step, rank)
    streamer.unwrap(made)


def save_alone(rank: int) -> None:
    made = wrapped()
    backward(made, 0, rank, 1, None)
    if rank:
        streamer.save(made, None, "/nowhere", step=0)
    backward(made, 1, rank, 1, None)


def other_rate(rank: int) -> None:
    made = wrapped()
    optimizer = streamer.AdamW(made.parameters(), lr=1e-3 * (1 + rank))
    backward(made, 0, rank, 1, None)
    optimizer.step()
    streamer.synchronize(made)


def skips_a_layer(rank: int) -> None:
    made = wrapped()
    if rank:
        made.layers[1].requires_grad_(False)
    backward(made, 0, rank, 1, None)


def auto(rank: int, **beside: object) -> None:
    """Ranks take what the first one chooses, whatever they would choose themselves."""
    options = {"activations": "auto", "num_slots": "auto", "micro_batch_size": "auto"}
    machine = ("h100-sxm", "laptop-8gb")[rank]
    given = {"example": part(0, rank), "machine": machine} | beside
    group = everyone(MACHINES[0])
    made = streamer.wrap(model(), layers="layers", device="cpu", process_group=group, **options, **given)  # type: ignore[arg-type]
    chosen = streamer.chosen(made)
    assert chosen is not None
    choices: list[object] = [None, None]
    dist.all_gather_object(choices, (chosen.choice, chosen.reason))
    assert choices[0] == choices[1]
    assert "collective" in repr(chosen.plan.prediction.busy_seconds)
    backward(made, 0, rank, 1, None)
    streamer.unwrap(made)


def auto_fails(rank: int) -> None:
    auto(rank, **({"example": None} if rank else {}))


def fails_beside_a_collective(rank: int) -> None:
    """The process of a rank that has told of an error ends while the other averages with it."""
    ranks = handle_of(wrapped()).executor.ranks
    if rank:
        ranks.tell(ValueError("the disk is broken"))
        os._exit(3)
    ranks.average([Mean(torch.ones(3))])


def raises(rank: int) -> None:
    made = wrapped()
    if rank:
        os._exit(3)
    backward(made, 0, rank, 1, None)


def sleeps(rank: int) -> None:
    made = wrapped()
    if rank:
        time.sleep(1.2 * TIMEOUT)
        os._exit(3)
    backward(made, 0, rank, 1, None)


def outside(rank: int) -> None:
    made = wrapped()
    made.layers[0].up.weight.square().sum().backward()


def cannot_go_on(rank: int, *, is_first: bool) -> None:
    """The first rank has told that it cannot go on before its error ends what it does with the others."""
    ranks = handle_of(wrapped()).executor.ranks

    def work() -> None:
        if rank == 0:
            error = ValueError("the disk is broken")
            ranks.tell(error)
            raise error

    if is_first:
        ranks.on_first("writing", work)
    else:
        with ranks.together("writing"):
            work()


def fails_together(rank: int) -> None:
    cannot_go_on(rank, is_first=False)


def fails_leading(rank: int) -> None:
    cannot_go_on(rank, is_first=True)


PROGRAMS = {each.__name__: each for each in (without_group, writes_at_once, zeroes_and_scales, other_model)}
PROGRAMS |= {
    each.__name__: each for each in (other_options, wrap_fails, more_batches, save_alone, other_rate)
}
PROGRAMS |= {each.__name__: each for each in (skips_a_layer, auto, auto_fails, fails_together, fails_leading)}
PROGRAMS |= {each.__name__: each for each in (fails_beside_a_collective, raises, sleeps, outside)}

APART = "RanksError: the ranks do not do the same"
BROKEN = ("ValueError: the disk is broken", "RanksError: rank 0 has failed: ValueError: the disk is broken")

#: What rank 0 is told, and rank 1.
TOLD = {
    "other_model": (("ValueError: the ranks' options or models differ: .*'root: norm.bias",) * 2),
    "other_options": ("ValueError: the ranks' options or models differ: rank 0 has 'num_slots=1'",) * 2,
    "wrap_fails": ("RanksError: rank 1 has failed: ValueError: num_slots=0", "ValueError: num_slots=0"),
    "more_batches": ("", "RanksError: rank 0 has ended, or has unwrapped its model"),
    "save_alone": ("RanksError: rank [01] did not come within 3 s to: ",) * 2,
    "other_rate": (APART + ".*rank 1 to: optimizer.step.*lr 0.002",) * 2,
    "skips_a_layer": (APART + ".*(averaging the gradient of 'layers.1'|a backward of 2 layers)",) * 2,
    "without_group": ("", ""),
    "writes_at_once": ("", ""),
    "zeroes_and_scales": ("", ""),
    "auto": ("", ""),
    "auto_fails": ("RanksError: rank 1 has failed: ValueError: .*example=", "ValueError: .*example="),
    "fails_together": BROKEN,
    "fails_leading": BROKEN,
    "fails_beside_a_collective": ("RanksError: rank 1 has failed: ValueError: the disk is broken", None),
    "raises": ("RanksError: rank 1 has ended", None),
    "sleeps": ("RanksError: rank 1 did not come within 3 s", None),
    "outside": ("RuntimeError: 'layers.0.up.weight' is used outside of its layer",) * 2,
}


#: Programs that both ranks survive, one after another in the same processes, and the machines of the ranks.
SURVIVED: list[tuple[list[str], int | None]] = [
    (["without_group", "writes_at_once", "zeroes_and_scales", "auto", "auto_fails", "outside"], None),
    (["other_model", "other_options", "wrap_fails", "other_rate", "skips_a_layer"], None),
    (["writes_at_once", "auto", "other_model"], 2),
]
#: Programs that end a rank, or leave it where the other one does not come.
ENDED: list[tuple[str, int | None]] = [
    ("fails_together", None),
    ("fails_leading", None),
    ("more_batches", None),
    ("save_alone", None),
    ("fails_beside_a_collective", None),
    ("sleeps", None),
    ("raises", None),
    ("raises", 2),
]


@pytest.mark.parametrize(
    ("names", "machines"), [*SURVIVED, *(([name], machines) for name, machines in ENDED)]
)
def test_ranks_are_told_what_is_wrong(names: list[str], machines: int | None) -> None:
    began = time.monotonic()
    answers = run_ranks(2, errors_of, names, machines, timeout=TIMEOUT, may_end=True)
    for number, name in enumerate(names):
        for answer, expected in zip(answers, TOLD[name], strict=True):
            if expected is None:
                assert answer is None, name
            elif not expected:
                assert not answer[number], name
            else:
                assert re.match(expected, answer[number]), (name, answer[number])
                assert "\n" not in answer[number], name
    # the first test of all starts the server too
    assert time.monotonic() - began < 60


def shared_memory(maps: str) -> set[str]:
    """The numbers of the files of ranks' shared memory, of the maps of a process."""
    return {line.split()[4] for line in maps.splitlines() if "/memfd:streamer" in line}


def killed(rank: int, moment: str, folder: str, machines: int | None) -> tuple[str, set[str]]:
    """The last rank ends without a word at a ``moment`` of the second step. The error, and the shared
    memory."""
    MACHINES[0] = machines
    made = wrapped()
    memory = shared_memory(Path("/proc/self/maps").read_text())
    optimizer = streamer.AdamW(made.parameters(), lr=1e-2)

    def end(at: str) -> None:
        if rank == dist.get_world_size() - 1 and at == moment:
            os.kill(os.getpid(), signal.SIGKILL)

    try:
        for step in range(3):
            if step == 1:
                made.layers[1].register_forward_pre_hook(lambda *_: end("forward"))
                made.layers[1].register_full_backward_hook(lambda *_: end("backward"))
            backward(made, step, rank, 1, None)
            optimizer.step()
            if step == 1:
                end("step")
            optimizer.zero_grad()
            streamer.synchronize(made)
            if step == 0:
                streamer.save(made, optimizer, Path(folder) / "saved", step=step)
            elif step == 1:
                end("save")
                streamer.save(made, optimizer, Path(folder) / "lost", step=step)
    except RanksError as error:
        return str(error), memory
    return "", memory


@pytest.mark.parametrize(
    ("size", "machines", "moments"), [(3, None, ("forward", "backward", "step")), (4, 2, ("save",))]
)
def test_a_rank_that_is_killed_is_named_and_leaves_nothing(
    size: int, machines: int | None, moments: tuple[str, ...], tmp_path: Path
) -> None:
    began = time.monotonic()

    def kill(moment: str) -> list[Any]:
        (tmp_path / moment).mkdir()
        given = moment, str(tmp_path / moment), machines
        return run_ranks(size, killed, *given, timeout=TIMEOUT, may_end=True)

    # those who live wait for most of the time
    with ThreadPoolExecutor() as pool:
        by_moment = dict(zip(moments, pool.map(kill, moments), strict=True))
    assert time.monotonic() - began < 30
    memory = set[str]()
    for moment, (*answers, nothing) in by_moment.items():
        assert nothing is None, moment
        for error, of_rank in answers:
            assert re.match(f"rank {size - 1} has ended", error), (moment, error)
            assert of_rank
            memory |= of_rank
        # the last complete checkpoint is there, and nothing else
        assert [path.name for path in (tmp_path / moment).iterdir()] == ["saved"], moment
        fresh = streamer.wrap(model(), layers="layers", device="cpu")
        optimizer = streamer.AdamW(fresh.parameters(), lr=1e-2)
        assert streamer.load(fresh, optimizer, tmp_path / moment / "saved").step == 0
        streamer.unwrap(fresh)
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            assert not shared_memory((process / "maps").read_text()) & memory
