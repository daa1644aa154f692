"""What all ranks see is written once, whatever function writes it: the loop is that of one process."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import streamer
from tests.ranks.common import run_ranks
from tests.ranks.programs import Arrays, arrays, backward, everyone, model, wrap_model


def some(made: nn.Module) -> list[nn.Parameter]:
    """Parameters of layers, large and small, and of the root."""
    return [*made.parameters()][::4]


def clips(made: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    torch.nn.utils.clip_grad_norm_(made.parameters(), 0.03)


def clips_values(made: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    torch.nn.utils.clip_grad_value_(made.parameters(), 1e-3)


def scales(made: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    for number, param in enumerate(some(made)):
        if param.grad is not None:
            param.grad *= 0.5 + number
            param.grad.add_(param.detach(), alpha=0.01)


def unscales(made: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """GradScaler's usual loop; in the second step a gradient is infinite."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    if step == 1:
        made.layers[2].up.bias.grad[7] = torch.inf  # type: ignore[union-attr, index]
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(made.parameters(), 0.03)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == (2.0 if step == 1 else 4.0)
    optimizer.zero_grad()


def writes_weights(made: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    with torch.no_grad():
        torch._foreach_mul_([param for param in made.parameters()], 0.99)
        for param in some(made):
            param.clamp_(-0.05, 0.05)
        weight = made.layers[1].up.weight  # type: ignore[union-attr, index]
        torch.add(weight, 0.25, out=weight)
        weight[3] = 0.125
    assert weight[3, 0] == 0.125


def writes_moments(made: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    for param in some(made):
        for name, value in optimizer.state.get(param, {}).items():
            if name != "step":
                value.mul_(0.5)


def follows(made: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """An average of weights, which each rank keeps for itself, becomes the weights."""
    averages = made.__dict__.setdefault("averages", [param.detach().clone() for param in made.parameters()])
    for average, param in zip(averages, made.parameters(), strict=True):
        average.lerp_(param.detach(), 0.5)
    if step == 1:
        with torch.no_grad():
            torch._foreach_copy_([*made.parameters()], averages)


def takes_long(made: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Who does not write has the new values too when the function returns."""
    gradient = made.layers[0].norm.bias.grad  # type: ignore[union-attr, index, operator]
    before = gradient.clone()

    def double(element: float) -> float:
        time.sleep(0.002)
        return 2 * element

    gradient.apply_(double)
    assert torch.equal(gradient, 2 * before)


WRITES: dict[str, Callable[..., None]] = {
    each.__name__: each
    for each in (clips, clips_values, scales, unscales, writes_weights, writes_moments, follows, takes_long)
}
#: What differs in last bits: norms are of squares that are grouped otherwise.
CLOSE = {"clips", "unscales"}
#: What writes in one training, one after another: what is once, of gradients, weights and moments.
TOGETHER = [
    ["clips", "writes_moments"],
    ["follows"],
    ["clips_values", "scales", "writes_weights"],
    ["takes_long", "unscales"],
]


Ends = tuple[list[float], Arrays]


def train(parts: list[int], names: list[str], *, layers: int = 3, **options: Any) -> Ends:
    made = model(layers=layers)
    streamer.wrap(made, layers="layers", device="cpu", host_threads=1, num_slots=3, **options)
    optimizer = streamer.AdamW(made.parameters(), lr=1e-2)
    divisor = 1 if "process_group" in options else len(parts)
    losses = []
    for step in range(2):
        for index in parts:
            backward(made, step, index, divisor, None)
        for name in names:
            WRITES[name](made, optimizer, step)
        optimizer.step()
        optimizer.zero_grad()
        torch.manual_seed(step)
        with torch.no_grad():  # what is in slots is what is in host memory
            losses.append(float(made(torch.arange(6)[None]).square().sum()))
            # while all layers are in their slots
            for name in [name for name in names if name in ("writes_weights", "follows")]:
                WRITES[name](made, optimizer, 1)
                losses.append(float(made(torch.arange(6)[None]).square().sum()))
    return losses, arrays(streamer.unwrap(made).state_dict())


#: By the machines of ranks. Moments that machines divide can only be read, in copies.
WRITTEN_ON: dict[str | None, list[list[str]]] = {None: TOGETHER, "ab": TOGETHER[2:]}


def train_all(rank: int, machines: str | None) -> list[Ends]:
    return [train([rank], names, process_group=everyone(machines)) for names in WRITTEN_ON[machines]]


def train_alone(rank: int) -> dict[str, Ends]:
    return {str(names): train([0, 1], names) for names in TOGETHER}


# in one test: what one process writes is the same for all
def test_what_ranks_write_is_written_once() -> None:
    """Two machines that divide the state write it once on each."""
    (alone,) = run_ranks(1, train_alone)
    for machines, written in WRITTEN_ON.items():
        found = run_ranks(2, train_all, machines)
        for names, first, second in zip(written, *found, strict=True):
            losses, weights = alone[str(names)]
            tolerance, where = 1e-6 if CLOSE & {*names} else 0.0, f"{names} on {machines}"
            assert first[0] == second[0] == pytest.approx(losses, rel=tolerance, abs=0), where
            for key, value in weights.items():
                assert (first[1][key] == second[1][key]).all(), (where, key)
                np.testing.assert_allclose(
                    first[1][key], value, rtol=tolerance, atol=tolerance, err_msg=where
                )


def keeps_gradients(rank: int) -> str:
    """The error of a backward while the memory of dropped gradients is kept, which ranks share."""
    made = wrap_model()
    backward(made, 0, rank, 1, None)
    kept = [param.grad.detach() for param in made.parameters() if param.grad is not None]
    before = [each.clone() for each in kept]
    made.zero_grad()
    try:
        backward(made, 0, rank, 1, None)
    except RuntimeError as error:
        return str(error)
    return "kept" if all(map(torch.equal, kept, before)) else "overwritten"


def test_gradients_that_are_kept_are_refused() -> None:
    assert all("keep copies (.clone())" in told for told in run_ranks(2, keeps_gradients))
