"""Ranks compute what one process does that runs their parts one after another."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.ranks.common import run_ranks
from tests.ranks.programs import Arrays, Case, equal, train, train_alone

BF16 = {"dtype": torch.bfloat16}

CASES: dict[str, Case] = {
    "plain": (1, {}, {}),
    "without clipping": (1, {}, {"clip": None}),
    "keep": (1, {"activations": "keep", "num_slots": 3}, {}),
    "offloaded inputs": (1, {"activations": "recompute+offload", "num_slots": 1}, {}),
    "micro-batches": (1, {"micro_batch_size": 2}, {}),
    "frozen parts": (1, {}, {"frozen": True}),
    "scaler": (1, {}, {"scaled": True}),
    "bf16": (1, BF16, {}),
    "bf16 moments": (1, BF16, {"state_dtype": torch.bfloat16}),
    "8-bit moments": (1, BF16, {"state_dtype": "int8"}),
}
#: One process cannot add the parts up: it has them as one batch.
IN_BACKWARD: dict[str, Case] = {
    "in backward": (1, {"update": "backward"}, {"clip": None}),
    "in backward, bf16": (1, {"update": "backward", **BF16}, {"clip": None, "state_dtype": "int8"}),
}
#: Several backwards are added up in another order than one process's.
SEVERAL: dict[str, Case] = {"several backwards": (3, {}, {}), "several in bf16": (3, BF16, {})}


def close(one: Arrays, other: Arrays, tolerance: float) -> None:
    assert one.keys() == other.keys()
    for name in one:
        assert np.abs(one[name] - other[name]).max() <= tolerance * np.abs(other[name]).max(), name


# all cases of two ranks in one test: their ranks run once, and tests of several processes would each run them
def test_two_ranks_equal_one_process_to_the_bit() -> None:
    found = run_ranks(2, train, 2, {**CASES, **SEVERAL, **IN_BACKWARD})
    for name, (backwards, options, more) in CASES.items():
        # one process adds two gradients up in their own dtype, rounding once as the mean of two is rounded
        alone = {**options, "grad_dtype": None} if options.get("dtype") else options
        norms = found[0][name][0]
        _, gradients, state = train_alone(2, (backwards, alone, more), given_norms=norms)
        for of_rank in found:
            found_norms, found_gradients, found_state = of_rank[name]
            assert found_norms == norms, name
            equal(found_gradients, gradients)
            equal(found_state, state)
    for name in ("plain", *SEVERAL):
        ranks_agree_and_have_the_gradient_of_one_process(found, name)
    for name, (_, options, more) in IN_BACKWARD.items():
        in_step = {key: value for key, value in options.items() if key != "update"}
        alone = {**in_step, "grad_dtype": None} if in_step else in_step
        _, _, state = train_alone(2, (1, alone, more))
        for of_rank in found:
            equal(of_rank[name][2], state)


@pytest.mark.parametrize("size", [3, 4])
def test_more_ranks_have_the_gradient_and_the_norm_of_one_process(size: int) -> None:
    found = run_ranks(size, train, size, {"plain": CASES["plain"]})
    ranks_agree_and_have_the_gradient_of_one_process(found, "plain")


def ranks_agree_and_have_the_gradient_of_one_process(found: list[dict[str, Any]], name: str) -> None:
    case = {**CASES, **SEVERAL}[name]
    norms, gradients, _ = train_alone(len(found), case, steps=1)
    first, *others = [of_rank[name] for of_rank in found]
    # the mean over ranks is rounded to bf16, of which one process has fp32 sums
    rounding = 2**-8 if case[1] else 0.0
    assert first[0][0] == pytest.approx(norms[0], rel=1e-6 + rounding)
    close(first[1], gradients, 1e-6 + rounding)
    # and every rank has the same, to the bit, after every step
    for found_norms, found_gradients, found_state in others:
        assert found_norms == first[0]
        equal(found_gradients, first[1])
        equal(found_state, first[2])
