"""Ranks of several machines, which here are the rows of a mesh: each row has a host state of its own."""

from __future__ import annotations

import copy
import math
import time
import warnings
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
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
from tests.ranks.programs import (
    Arrays,
    Case,
    a_step,
    arrays,
    backward,
    equal,
    everyone,
    model,
    train,
    wrap_model,
)
from tests.ranks.test_equal import (
    ALL,
    agree_and_have_the_gradient_of_one_process,
    equal_one_process,
    gathered,
    naming,
)

#: Machines, the ranks of each, and what they are tried with. What a layer does on its rank's device is as in
#: a group. One machine does what a group of its ranks does; both ways come together in 2x2, where what each
#: does alone has been tried.
MESHES = {
    "2x1": (2, 1, ["scaler", "several in bf16", "in backward, frozen"]),
    "2x2": (2, 2, ["in backward, 8-bit moments"]),
}
#: As many ranks of a group whose machines divide the state.
DIVIDED = {"2x1": "ab", "2x2": "aabb"}


# all cases in one test: their ranks run once, and tests of several processes would each run them again
@pytest.mark.parametrize("mesh", MESHES)
def test_ranks_of_a_mesh_equal_one_process(mesh: str) -> None:
    machines, here, names = MESHES[mesh]
    cases = {name: ALL[name] for name in names}
    found = run_ranks(machines * here, train, machines * here, cases, machines)
    for name in names:
        of_ranks = [of_rank[name] for of_rank in found]
        if mesh == "2x1":
            equal_one_process(found, name)
        else:
            with naming(name):
                agree_and_have_the_gradient_of_one_process(of_ranks, name)
    if here > 1:  # these ranks gather weights too
        cases = gathered(names)
    train_as_replicas_do(found, DIVIDED[mesh], cases)


def of_first(rank: int, forms: Mapping[int | str, torch.dtype | None]) -> list[Arrays]:
    """By machines and dtype, the weights and the buffer of a model that has other values on each rank."""
    found = []
    for machines, dtype in forms.items():
        other = model()
        with torch.no_grad():
            for value in (*other.parameters(), other.scale):
                value.add_(rank)
        streamed = wrap_model(other, machines=machines, dtype=dtype)
        found.append(arrays(streamer.unwrap(streamed).state_dict()))
    return found


@pytest.mark.parametrize(
    ("size", "forms"), [(4, {2: None, "aabb": torch.bfloat16}), (3, {3: torch.bfloat16, "abc": None})]
)
def test_all_machines_begin_with_the_values_of_the_first_rank(
    size: int, forms: dict[int | str, torch.dtype | None]
) -> None:
    expected = arrays(model().state_dict())
    for of_rank in run_ranks(size, of_first, forms):
        assert len(of_rank) == len(forms)
        for found in of_rank:
            equal(found, expected)


#: Where layers are updated, and the machines that the ranks are on.
SKIPPING: list[tuple[str, int | str | None]] = [
    ("step", None),
    ("backward", None),
    ("backward", 2),
    ("step", "ab"),
    ("backward", "ab"),
]


def skipping(rank: int) -> list[tuple[Arrays, int]]:
    return [skip(rank, update, machines) for update, machines in SKIPPING]


def skip(rank: int, update: str, machines: int | str | None) -> tuple[Arrays, int]:
    """In the second step one element of the last rank's gradient of one layer is not a number."""
    made = wrap_model(machines=machines, update=update)
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
            a_step(made, optimizer, step, rank)
        if step == 1:
            del down.forward
    streamer.synchronize(made)
    steps = {f"{name} step": optimizer.state[param]["step"] for name, param in made.named_parameters()}
    skipped = streamer.stats(made).skipped_steps
    return arrays({**steps, **streamer.unwrap(made).state_dict()}), skipped


# in one test: their ranks run once
def test_ranks_and_machines_skip_a_step_together() -> None:
    for (update, machines), *by_rank in zip(SKIPPING, *run_ranks(2, skipping), strict=True):
        with naming(f"{update} on {machines}"):
            (first, skipped), *others = by_rank
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


BY_LETTER = {
    "aabb": [(0, 0, 2), (0, 1, 2), (1, 0, 2), (1, 1, 2)],
    "abab": [(0, 0, 2), (1, 0, 2), (0, 1, 2), (1, 1, 2)],
    "abcd": [(0, 0, 1), (1, 0, 1), (2, 0, 1), (3, 0, 1)],
}
#: Names of machines, what is taken for ``process_group``, and the number of each rank's machine, which of its
#: ranks it is and how many they are; or why it is refused.
PLACES: list[tuple[str, Callable[[], Any], list[tuple[int, int, int]] | str]] = [
    *[(letters, make, where) for make in (by_group, by_flat_mesh) for letters, where in BY_LETTER.items()],
    # rows of a mesh are machines wherever they are
    ("aaaa", by_mesh, BY_LETTER["aabb"]),
    ("aaab", by_group, "are on 2 machines, 1 on one and 3 on another: start as many on each"),
    ("abab", by_mesh, "ranks 0, 1 are a row of the mesh and on 2 machines, which share no memory"),
    ("aaaa", by_deep_mesh, "is a mesh of 3 dimensions, where streamer has two"),
]


def placed(rank: int) -> list[Any]:
    """By case of `PLACES`, where a rank is, or the error."""
    answers: list[Any] = []
    for machines, make, _ in PLACES:
        ranks.machine_name = partial(machines.__getitem__, rank)
        try:
            found = ranks.Ranks(make(), torch.device("cpu"))
        except ValueError as error:
            answers.append(str(error))
        else:
            answers.append((found.machine, found.local_rank, found.local_size))
    return answers


# in one test: their ranks run once
def test_a_group_of_several_machines_is_their_mesh_or_refused() -> None:
    for (machines, make, expected), *answers in zip(PLACES, *run_ranks(4, placed), strict=True):
        with naming(f"{make.__name__} on {machines}"):
            if isinstance(expected, str):
                assert len({*answers}) == 1
                assert expected in answers[0]
                assert 'process_group=init_device_mesh("cuda", (machines, ranks_per_machine))' in answers[0]
                assert "\n" not in answers[0]
            else:
                assert answers == expected


def divide(rank: int, machines: str, cases: Mapping[str, Case]) -> tuple[dict[str, Any], Any]:
    """Train by a group, whose machines divide the state, and look at what they show of it."""
    # its state reads the same however many ranks a machine has
    looked = look(rank, machines) if len(machines) == 2 else None
    return train(rank, len(machines), cases, machines), looked


def look(rank: int, machines: str) -> dict[str, Any]:
    """What is shown of a state that is divided, and what becomes of writing it."""
    made = wrap_model(machines=machines, dtype=torch.bfloat16)
    optimizer = streamer.AdamW(made.parameters(), lr=1e-2)

    def step(number: int) -> None:
        a_step(made, optimizer, number, rank)

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


def train_as_replicas_do(replicas: list[dict[str, Any]], machines: str, cases: Mapping[str, Case]) -> None:
    looks = []
    for (trained, looked), of_mesh in zip(
        run_ranks(len(machines), divide, machines, cases), replicas, strict=True
    ):
        for name in cases:
            with naming(f"{name} on {machines}"):
                norms, gradients, state = of_mesh[name.removesuffix(", gathered")]
                assert trained[name][0] == norms
                equal(trained[name][1], gradients)
                equal(trained[name][2], state)
        if looked is not None:
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
    made = wrap_model(machines=2)
    if not rank:
        time.sleep(4)
    found = wrapped(made).executor.ranks.exchange("the end of a long write", rank, patient=True)
    streamer.unwrap(made)
    return found


def test_a_machine_that_writes_for_longer_than_the_timeout_is_waited_for() -> None:
    assert run_ranks(2, waits, timeout=3.0) == [[0, 1], [0, 1]]


def reads_alone(rank: int) -> str:
    made = wrap_model(machines="ab", dtype=torch.bfloat16)
    optimizer = streamer.AdamW(made.parameters(), lr=1e-2)
    a_step(made, optimizer, 0, rank)
    store = dist.distributed_c10d._get_default_store()
    try:
        if rank:
            store.wait(["read"], timedelta(seconds=60))
            backward(made, 1, rank, 1, None)
        else:
            optimizer.state[made.layers[1].up.weight]["exp_avg"].sum()
    except RanksError as error:
        return str(error)
    finally:
        store.set("read", "")
    return ""


def test_a_rank_that_reads_a_divided_moment_alone_is_told() -> None:
    reader, other = run_ranks(2, reads_alone, timeout=3.0)
    late = "rank 1 did not come within 3 s to: reading exp_avg of 'layers.1' from all machines"
    assert reader.startswith(late), reader
    assert late in other, other


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
            wrap_model(made, machines="ab", dtype=torch.bfloat16)
        except (OSError, RanksError) as error:
            return str(error), [str(each.message) for each in told], arrays(made.state_dict())
    return "", [], {}


def test_a_wrap_that_fails_where_the_state_is_divided_gives_back_rounded_weights_and_says_so() -> None:
    before = arrays(model().state_dict())
    for error, told, weights in run_ranks(2, wrap_fails_late):
        assert "no more" in error
        assert any("only as exact as streamed" in line for line in told), told
        assert weights.keys() == before.keys()
        for name, values in weights.items():
            assert values.dtype == before[name].dtype
            np.testing.assert_allclose(values, before[name], rtol=2**-8, atol=0.0, err_msg=name)
