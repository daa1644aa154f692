"""Ranks of several machines, which here are the rows of a mesh: each row has a host state of its own."""

from __future__ import annotations

import copy
import math
import re
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import streamer
from streamer.backends import ranks
from streamer.engine.handle import wrapped
from streamer.errors import RanksError
from streamer.model import move_in
from tests.ranks.common import run_ranks
from tests.ranks.programs import Arrays, Case, arrays, backward, equal, everyone, model, train, train_alone
from tests.ranks.test_equal import CASES, IN_BACKWARD, SEVERAL, close

ALL: dict[str, Case] = {**CASES, **SEVERAL, **IN_BACKWARD}
#: Machines, the ranks of each, and what they are tried with. What a layer does on its rank's device is as in
#: a group, and so is a step without clipping, as in backward. One machine does what a group of its ranks
#: does; both ways meet in 2x2, where what each does alone has been tried.
MESHES = {
    "2x1": (
        2,
        1,
        ["frozen parts", "scaler", "several in bf16", "in backward"],
    ),
    "2x2": (2, 2, ["8-bit moments", "in backward, bf16"]),
}
#: A mesh, where as many ranks of a group are whose machines divide the state, and what is trained by both.
DIVIDED = {
    "2x1": ("ab", ["scaler", "frozen parts", "in backward"]),
    "2x2": ("aabb", ["8-bit moments", "in backward, bf16"]),
}


# all cases in one test: their ranks run once, and tests of several processes would each run them again
@pytest.mark.parametrize("mesh", MESHES)
def test_ranks_of_a_mesh_equal_one_process(mesh: str) -> None:
    machines, here, names = MESHES[mesh]
    found = run_ranks(machines * here, train, machines * here, {name: ALL[name] for name in names}, machines)
    for name in names:
        of_ranks = [of_rank[name] for of_rank in found]
        with naming(name):
            have_its_gradient_and_norm(of_ranks, name)
            if mesh != "2x2" and name not in SEVERAL:
                equal_to_the_bit(of_ranks, name)
    if mesh in DIVIDED:
        train_as_replicas_do(found, *DIVIDED[mesh])


@contextmanager
def naming(name: str) -> Iterator[None]:
    try:
        yield
    except AssertionError as error:
        raise AssertionError(f"in the case '{name}'") from error


def equal_to_the_bit(found: list[Any], name: str) -> None:
    backwards, options, more = ALL[name]
    # one process adds two gradients up in their own dtype, rounding once as the mean of two is rounded
    alone = {key: value for key, value in options.items() if key != "update"}
    if "dtype" in alone:
        alone["grad_dtype"] = None
    norms = found[0][0]
    _, gradients, state = train_alone(2, (backwards, alone, more), given_norms=norms)
    for found_norms, found_gradients, found_state in found:
        assert found_norms == norms
        if name not in IN_BACKWARD:
            equal(found_gradients, gradients)
        equal(found_state, state)


def have_its_gradient_and_norm(found: list[Any], name: str) -> None:
    backwards, options, more = ALL[name]
    alone = {key: value for key, value in options.items() if key != "update"}
    norms, gradients, _ = train_alone(len(found), (backwards, alone, more), steps=1)
    first, *others = found
    # the mean over ranks is rounded to bf16, of which one process has fp32 sums
    rounding = 2**-8 if "dtype" in options else 0.0
    if norms:
        assert first[0][0] == pytest.approx(norms[0], rel=1e-6 + rounding)
    if name not in IN_BACKWARD:
        close(first[1], gradients, 1e-6 + rounding)
    # and every rank of every machine has the same, to the bit, after every step
    for found_norms, found_gradients, found_state in others:
        assert found_norms == first[0]
        equal(found_gradients, first[1])
        equal(found_state, first[2])


def of_first(rank: int, machines: int | str, kind: str) -> Arrays:
    """The weights and the buffer of a model that has other values on each rank."""
    made = model()
    with torch.no_grad():
        for value in (*made.parameters(), made.scale):
            value.add_(rank)
    options = {"dtype": torch.bfloat16} if kind == "bf16" else {}
    made = streamer.wrap(made, layers="layers", device="cpu", process_group=everyone(machines), **options)
    return arrays(streamer.unwrap(made).state_dict())


@pytest.mark.parametrize("kind", ["fp32", "bf16"])
@pytest.mark.parametrize(("size", "machines"), [(2, 2), (4, 2), (3, 3), (3, "abc")])
def test_all_machines_begin_with_the_values_of_the_first_rank(
    size: int, machines: int | str, kind: str
) -> None:
    for found_state in run_ranks(size, of_first, machines, kind):
        equal(found_state, arrays(model().state_dict()))


def skipping(rank: int, update: str, machines: int | str | None) -> tuple[Arrays, int]:
    """In the second step one element of the last rank's gradient of one layer is not a number."""
    made = streamer.wrap(
        model(), layers="layers", device="cpu", update=update, process_group=everyone(machines)
    )
    optimizer = streamer.AdamW(made.parameters(), lr=1e-2)
    down = made.layers[1].down
    factor = torch.ones_like(down.weight)
    factor[0, 0] = math.nan if rank == dist.get_world_size() - 1 else 1.0

    def with_other_gradient(x: torch.Tensor) -> torch.Tensor:
        weight = down.weight.view_as(down.weight)
        weight.register_hook(lambda gradient: gradient * factor)
        return nn.functional.linear(x, weight, down.bias)

    for step in range(3):
        if step == 1:
            down.forward = with_other_gradient
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            backward(made, step, rank, 1, None)
            optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            del down.forward
    streamer.synchronize(made)
    steps = {f"{name} step": optimizer.state[param]["step"] for name, param in made.named_parameters()}
    skipped = streamer.stats(made).skipped_steps
    return arrays({**steps, **streamer.unwrap(made).state_dict()}), skipped


@pytest.mark.parametrize(
    ("update", "size", "machines"),
    [("step", 2, None), ("backward", 2, None), ("step", 4, 2), ("backward", 4, 2), ("backward", 4, "aabb")],
)
def test_ranks_and_machines_skip_a_step_together(update: str, size: int, machines: int | str | None) -> None:
    (first, skipped), *others = run_ranks(size, skipping, update, machines)
    assert skipped == 1
    # where layers are updated in backward, the others are not held back
    expected = {0: 2, 1: 2, 2: 2} if update == "step" else {1: 2, 2: 3}
    assert {layer: first[f"layers.{layer}.down.weight step"] for layer in expected} == expected
    assert all(np.isfinite(value).all() for value in first.values())
    for state, skipped_there in others:
        assert skipped_there == 1
        equal(state, first)


def by_group() -> Any:
    return everyone()


def by_flat_mesh() -> Any:
    return init_device_mesh("cpu", (4,))


def by_mesh() -> Any:
    return everyone(2)


def by_deep_mesh() -> Any:
    made = init_device_mesh("cpu", (1, 2, 2))
    # a rank that is refused ends, and another one may still be connecting to it
    dist.barrier()
    return made


def placed(rank: int, machines: Sequence[str], make: Callable[[], Any]) -> Any:
    """On machines of these names: the number of this rank's, which of its ranks it is and how many they are;
    or why ``process_group=make()`` is refused."""
    ranks.machine_name = lambda: machines[rank]
    try:
        found = ranks.Ranks(make(), torch.device("cpu"))
    except ValueError as error:
        return str(error)
    return found.machine, found.local_rank, found.local_size


@pytest.mark.parametrize("make", [by_group, by_flat_mesh])
def test_a_group_of_several_machines_is_their_mesh(make: Callable[[], Any]) -> None:
    assert run_ranks(4, placed, "aabb", make) == [(0, 0, 2), (0, 1, 2), (1, 0, 2), (1, 1, 2)]
    assert run_ranks(4, placed, "abab", make) == [(0, 0, 2), (1, 0, 2), (0, 1, 2), (1, 1, 2)]
    assert run_ranks(4, placed, "abcd", make) == [(0, 0, 1), (1, 0, 1), (2, 0, 1), (3, 0, 1)]


def test_rows_of_a_mesh_are_machines_wherever_they_are() -> None:
    assert run_ranks(4, placed, "aaaa", by_mesh) == [(0, 0, 2), (0, 1, 2), (1, 0, 2), (1, 1, 2)]


@pytest.mark.parametrize(
    ("machines", "make", "error"),
    [
        ("aaab", by_group, "are on 2 machines, 1 on one and 3 on another: start as many on each"),
        ("abab", by_mesh, "ranks 0, 1 are a row of the mesh and on 2 machines, which share no memory"),
        ("aaaa", by_deep_mesh, "is a mesh of 3 dimensions, where streamer has two"),
    ],
)
def test_ranks_that_share_no_memory_are_refused(machines: str, make: Callable[[], Any], error: str) -> None:
    answers = run_ranks(4, placed, machines, make)
    assert len({*answers}) == 1
    assert error in answers[0]
    assert 'process_group=init_device_mesh("cuda", (machines, ranks_per_machine))' in answers[0]
    assert "\n" not in answers[0]


FP16: Case = (1, {"dtype": torch.float16}, {"scaled": True})


def divide(rank: int, machines: str, names: Sequence[str]) -> tuple[dict[str, Any], list[Any], Any]:
    """Train by a group, whose machines divide the state, and look at what they show of it."""
    size = len(machines)
    trained = train(rank, size, {name: ALL[name] for name in names}, machines)
    forms: tuple[int | str, ...] = (machines, 2) if size == 2 else ()
    fp16 = [train(rank, size, {"fp16": FP16}, form)["fp16"] for form in forms]
    return trained, fp16, look(rank, machines)


def look(rank: int, machines: str) -> dict[str, Any]:
    """What is shown of a state that is divided, and what becomes of writing it."""
    made = streamer.wrap(
        model(), layers="layers", device="cpu", dtype=torch.bfloat16, process_group=everyone(machines)
    )
    optimizer = streamer.AdamW(made.parameters(), lr=1e-2)

    def step(number: int) -> None:
        backward(made, number, rank, 1, None)
        optimizer.step()
        optimizer.zero_grad()

    step(0)
    executor = wrapped(made).executor
    streamer.synchronize(made)
    issued = [str(record.op) for record in executor.issuer.trace.records()]
    found: dict[str, Any] = {"ops": [op for op in issued if op in ("1STEP", "1GATHER", "1AGREE")]}
    weight = made.layers[1].up.weight
    copied = copy.deepcopy(made.layers[1]).up.weight
    with pytest.raises(RuntimeError, match="a copy of a moment that is divided among machines: assign"):
        optimizer.state[weight]["exp_avg"].zero_()
    optimizer.state[weight]["exp_avg"] = torch.full_like(weight, 3.0)
    found["assigned"] = arrays({"": optimizer.state[weight]["exp_avg"]})[""]
    saved = optimizer.state_dict()["state"]
    found["in state_dict"] = arrays({f"{n}": state["exp_avg"] for n, state in saved.items()})
    with torch.no_grad():
        weight.mul_(2.0)
        made.embedding.weight.mul_(2.0)
    streamer.synchronize(made)
    found["masters"] = arrays(streamer.unwrap(made).state_dict())
    found["copied"] = arrays({"": copied})[""]
    return found


def train_as_replicas_do(replicas: list[dict[str, Any]], machines: str, names: Sequence[str]) -> None:
    looks = []
    for (trained, fp16, looked), of_mesh in zip(
        run_ranks(len(machines), divide, machines, names), replicas, strict=True
    ):
        for name in names:
            with naming(name):
                assert trained[name][0] == of_mesh[name][0]
                equal(trained[name][1], of_mesh[name][1])
                equal(trained[name][2], of_mesh[name][2])
        for divided, replicated in zip(fp16[:1], fp16[1:], strict=True):
            equal(divided[1], replicated[1])
            equal(divided[2], replicated[2])
        looks.append(looked)
    for looked in looks:
        assert looked["ops"] == ["1STEP", "1GATHER", "1AGREE"]
        assert (looked["assigned"] == 3.0).all()
        equal(looked["in state_dict"], looks[0]["in state_dict"])
        equal(looked["masters"], looks[0]["masters"])
        assert np.array_equal(looked["copied"], looks[0]["copied"])
        # the weight was doubled as it is streamed, in bf16, and its remainder stayed: [Note: masters]
        doubled = looked["masters"]["layers.1.up.weight"]
        assert np.allclose(doubled, 2 * looked["copied"], rtol=2**-8, atol=0.0)


def waits(rank: int) -> list[int]:
    made = streamer.wrap(model(), layers="layers", device="cpu", process_group=everyone(2))
    if not rank:
        time.sleep(6)
    found = wrapped(made).executor.ranks.exchange("the end of a long write", rank, patient=True)
    streamer.unwrap(made)
    return found


def test_a_machine_that_writes_for_longer_than_the_timeout_is_waited_for() -> None:
    assert run_ranks(2, waits, timeout=4.0) == [[0, 1], [0, 1]]


def reads_alone(rank: int) -> str:
    made = streamer.wrap(
        model(), layers="layers", device="cpu", dtype=torch.bfloat16, process_group=everyone("ab")
    )
    optimizer = streamer.AdamW(made.parameters(), lr=1e-2)
    try:
        for step in range(2):
            backward(made, step, rank, 1, None)
            optimizer.step()
            optimizer.zero_grad()
            if not rank:
                optimizer.state[made.layers[1].up.weight]["exp_avg"].sum()
    except RanksError as error:
        return str(error)
    return ""


def test_a_rank_that_reads_a_divided_moment_alone_is_told() -> None:
    reader, other = run_ranks(2, reads_alone, timeout=3.0)
    late = "rank 1 did not come within 3 s to: reading exp_avg of 'layers.1' from all machines"
    assert late in (reader, other)
    assert re.match("rank [01] did not come within 3 s", reader), reader
    assert re.match("rank [01] did not come within 3 s", other), other


def wrap_fails_late(rank: int) -> tuple[str, list[str], Arrays]:
    """The error, the warnings, and the weights that the model has then."""
    made = model()
    take = move_in.MoveIn._take

    def take_two(self: Any, unit: Any, shard: Any) -> None:
        if len(self._moved) == 2:
            raise OSError("no more")
        take(self, unit, shard)

    move_in.MoveIn._take = take_two  # type: ignore[method-assign]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            streamer.wrap(
                made,
                layers="layers",
                device="cpu",
                dtype=torch.bfloat16,
                process_group=everyone("ab"),
            )
        except (OSError, RanksError) as error:
            return str(error), [str(each.message) for each in told], arrays(made.state_dict())
    return "", [], {}


def test_a_wrap_that_fails_where_the_state_is_divided_gives_back_rounded_weights_and_says_so() -> None:
    before = arrays(model().state_dict())
    for error, told, weights in run_ranks(2, wrap_fails_late):
        assert "no more" in error
        assert any("no more exact than as streamed" in line for line in told), told
        assert weights.keys() == before.keys()
        for name, values in weights.items():
            assert values.dtype == before[name].dtype
            np.testing.assert_allclose(values, before[name], rtol=2**-8, atol=0.0, err_msg=name)
