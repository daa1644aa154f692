"""Ranks compute what one process does that runs their parts one after another."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from tests.ranks.common import run_ranks
from tests.ranks.programs import CASES, IN_BACKWARD, SEVERAL, Arrays, Case, equal, train, train_alone

ALL: dict[str, Case] = {**CASES, **IN_BACKWARD, **SEVERAL}
#: Cases whose ranks also copy a part of each layer, and gather the others'.
GATHERED = ("offloaded, 8-bit moments", "in backward, 8-bit moments")


# all cases of two ranks in one test: their ranks run once, and tests of several processes would each run them
def test_two_ranks_equal_one_process_to_the_bit() -> None:
    found = run_ranks(2, train, 2, ALL | gathered(GATHERED))
    for name in ALL:
        equal_one_process(found, name)
    for name in GATHERED:
        gathering_changes_nothing(found, name)


def test_three_ranks_have_the_gradient_and_the_norm_of_one_process() -> None:
    name = "several, frozen"
    found = run_ranks(3, train, 3, {name: ALL[name]} | gathered([name]))
    agree_and_have_the_gradient_of_one_process([of_rank[name] for of_rank in found], name)
    gathering_changes_nothing(found, name)


def gathering_changes_nothing(found: list[Mapping[str, Any]], name: str) -> None:
    with naming(f"{name}, gathered"):
        for of_rank in found:
            assert of_rank[f"{name}, gathered"][0] == of_rank[name][0]
            for one, other in zip(of_rank[f"{name}, gathered"][1:], of_rank[name][1:], strict=True):
                equal(one, other)


def gathered(names: Iterable[str]) -> dict[str, Case]:
    """The cases of these names with weights that ranks gather."""
    found = {}
    for name in names:
        backwards, options, more = ALL[name]
        found[f"{name}, gathered"] = (backwards, {**options, "gather_weights": True}, more)
    return found


def equal_one_process(found: list[Mapping[str, Any]], name: str) -> None:
    """What ranks have found in a case is what one process finds, to the bit if it adds up in their order."""
    of_ranks = [of_rank[name] for of_rank in found]
    with naming(name):
        if name in SEVERAL:
            agree_and_have_the_gradient_of_one_process(of_ranks, name)
        else:
            are_equal_to_the_bit(of_ranks, name)


@contextmanager
def naming(name: str) -> Iterator[None]:
    try:
        yield
    except AssertionError as error:
        raise AssertionError(f"in the case '{name}'") from error


def are_equal_to_the_bit(found: list[Any], name: str) -> None:
    backwards, options, more = ALL[name]
    alone = {key: value for key, value in options.items() if key != "update"}
    # one process adds two gradients up in their own dtype, rounding once as the mean of two is rounded
    if "dtype" in alone:
        alone["grad_dtype"] = None
    norms = found[0][0]
    own_norms, gradients, state = train_alone(len(found), (backwards, alone, more), given_norms=norms)
    # where it clips, its own norm is of squares that are grouped otherwise
    if norms:
        assert norms[0] == pytest.approx(own_norms[0], rel=1e-6)
    for found_norms, found_gradients, found_state in found:
        assert found_norms == norms
        if name not in IN_BACKWARD:
            equal(found_gradients, gradients)
        equal(found_state, state)


def agree_and_have_the_gradient_of_one_process(found: list[Any], name: str) -> None:
    """Every rank has the same, to the bit, after every step; of one process the gradient and the norm."""
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
    for found_norms, found_gradients, found_state in others:
        assert found_norms == first[0]
        equal(found_gradients, first[1])
        equal(found_state, first[2])


def close(one: Arrays, other: Arrays, tolerance: float) -> None:
    assert one.keys() == other.keys()
    for name in one:
        assert np.abs(one[name] - other[name]).max() <= tolerance * np.abs(other[name]).max(), name
