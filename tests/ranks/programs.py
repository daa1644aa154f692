"""What ranks run in tests, and what one process runs that they are to equal."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
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
from streamer.backends.base import WORKER_LANES, Lane
from streamer.backends.thread import Delay
from streamer.optim import clip as clip_module

WIDTH, WORDS, BATCH, TIME = 64, 48, 4, 6

Arrays = dict[str, np.ndarray]


class Layer(nn.Module):
    """Its largest weights are cut between ranks; ``spare`` is not used by every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 8 * WIDTH)
        self.down = nn.Linear(8 * WIDTH, WIDTH)
        self.spare = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, spare: bool) -> torch.Tensor:
        hidden = nn.functional.dropout(nn.functional.gelu(self.up(self.norm(x))), 0.1)
        x = x + self.down(hidden)
        return x + self.spare(x) if spare else x


class Model(nn.Module):
    """Embedding and head are tied."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: torch.Tensor, spare: bool = False) -> torch.Tensor:
        x = self.embedding(x)
        for layer in self.layers:
            x = layer(x, spare)
        return self.norm(x) @ self.embedding.weight.T * self.scale


def model(*, frozen: bool = False, layers: int = 3) -> Model:
    torch.manual_seed(0)
    made = Model(layers)
    if frozen:
        made.layers[0].requires_grad_(False)
        made.layers[1].up.requires_grad_(False)
    return made


def part(step: int, index: int) -> torch.Tensor:
    """The tokens of one part of a step's batch, [BATCH, TIME]."""
    return torch.randint(0, WORDS, (BATCH, TIME), generator=torch.Generator().manual_seed(100 * step + index))


def backward(
    wrapped: nn.Module, step: int, index: int, divisor: int, scaler: torch.amp.GradScaler | None
) -> None:
    """The backward of one part, its loss over ``divisor``. In step 1 nobody uses `spare`."""
    tokens = part(step, index)
    torch.manual_seed(100 * step + index)
    logits = wrapped(tokens, spare=index % 2 == 0 and step != 1)
    target = tokens.flatten().to(logits.device)
    loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), target) / divisor
    (loss if scaler is None else scaler.scale(loss)).backward()


def run(
    parts: list[list[int]],
    options: Mapping[str, Any],
    *,
    divisor: int,
    steps: int = 2,
    clip: float | None = 0.5,
    scaled: bool = False,
    frozen: bool = False,
    layers: int = 3,
    state_dtype: Any = torch.float32,
    given_norms: Sequence[float] = (),
) -> tuple[list[float], Arrays, Arrays]:
    """Train with backwards of ``parts``: the norms, the gradients of the first step, the weights.

    Clipping takes ``given_norms`` for the norms, if there are any: how squares are grouped before they are
    added up decides on the last bit.
    """
    made = model(frozen=frozen, layers=layers)
    wrapped = streamer.wrap(made, layers="layers", **{"device": "cpu", **options})
    optimizer = streamer.AdamW(wrapped.parameters(), lr=1e-2, state_dtype=state_dtype)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0) if scaled else None
    norms: list[float] = []
    gradients: Arrays = {}
    for step in range(steps):
        for of_backward in parts:
            for index in of_backward:
                backward(wrapped, step, index, divisor, scaler)
        if not step:
            gradients = arrays({n: p.grad for n, p in wrapped.named_parameters() if p.grad is not None})
        if clip is not None:
            scale = 1.0 if scaler is None else scaler.get_scale()
            with pytest.MonkeyPatch.context() as patched:
                patched.setattr(clip_module, "_norm", partial(_norm, norms, given_norms[step : step + 1]))
                streamer.clip_grad_norm_(wrapped, clip, grad_scale=scale)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
    moments = arrays(
        {
            f"{name}.{key}": value
            for name, param in wrapped.named_parameters()
            for key, value in optimizer.state.get(param, {}).items()
        }
    )
    shown = arrays({f"{name} shown": value for name, value in wrapped.state_dict().items()})
    # the exact masters
    weights = arrays(streamer.unwrap(wrapped).state_dict())
    return norms, gradients, shown | weights | moments


def _norm(norms: list[float], given: Sequence[float], executor: Any, norm_type: float) -> float:
    norms.append(_norm_of(executor, norm_type))
    return given[0] if given else norms[-1]


_norm_of = clip_module._norm


def arrays(tensors: Mapping[str, torch.Tensor]) -> Arrays:
    """Copies, bf16 as its values in fp32."""
    return {name: tensor.detach().float().cpu().clone().numpy() for name, tensor in tensors.items()}


def equal(one: Arrays, other: Arrays) -> None:
    assert one.keys() == other.keys()
    assert not [name for name in one if not np.array_equal(one[name], other[name])]


def differing(found: Any, expected: Any) -> list[str]:
    """The gradients, weights and moments in which two answers of `run` differ."""
    return [
        name
        for one, other in zip(found[1:], expected[1:], strict=True)
        for name in one
        if not np.array_equal(one[name], other[name])
    ]


#: How often a case goes backward before a step, its options of `wrap`, and those of `run`.
Case = tuple[int, dict[str, Any], dict[str, Any]]


BF16 = {"dtype": torch.bfloat16}
BACKWARD = {"update": "backward"}

#: What one process computes to the bit. Of clipping, none and updates in backward, of the two policies, two
#: dtypes, frozen parts or none and micro-batches or none, each pair is in one of these cases.
CASES: dict[str, Case] = {
    "scaler": (1, {}, {"scaled": True}),
    "keep, frozen in bf16": (
        1,
        {**BF16, "activations": "keep", "num_slots": 3, "micro_batch_size": 2},
        {"frozen": True, "state_dtype": torch.bfloat16},
    ),
    "keep, micro-batches": (
        1,
        {"activations": "keep", "num_slots": 3, "micro_batch_size": 2},
        {"clip": None},
    ),
    "offloaded, 8-bit moments": (
        1,
        {**BF16, "activations": "recompute+offload", "num_slots": 1},
        {"clip": None, "frozen": True, "state_dtype": "int8"},
    ),
}
#: One process cannot add the parts up: it has them as one batch.
IN_BACKWARD: dict[str, Case] = {
    "in backward, frozen": (1, {**BACKWARD, "micro_batch_size": 2}, {"clip": None, "frozen": True}),
    "in backward, 8-bit moments": (
        1,
        {**BACKWARD, **BF16, "activations": "keep"},
        {"clip": None, "state_dtype": "int8"},
    ),
}
#: Several backwards are added up in another order than one process's.
SEVERAL: dict[str, Case] = {
    "several, frozen": (2, {"activations": "keep", "num_slots": 3}, {"scaled": True, "frozen": True}),
    "several in bf16": (2, BF16, {}),
}

#: One slot, so that every visit fetches its layer.
CASE_OF_RACES: Case = (1, {"num_slots": 1}, {"clip": None})


def everyone(machines: int | str | None = None) -> Any:
    """All ranks: as a mesh whose so many rows are taken for machines, or as a group, which is told that each
    rank is on the machine of its letter, if there are any."""
    if isinstance(machines, str):
        ranks.machine_name = lambda: machines[dist.get_rank()]
    if not isinstance(machines, int):
        return dist.group.WORLD
    return init_device_mesh("cpu", (machines, dist.get_world_size() // machines))


def wrap_model(made: nn.Module | None = None, machines: int | str | None = None, **options: Any) -> Any:
    """A model, or ``made``, wrapped by all ranks: see `everyone`."""
    options = {"layers": "layers", "process_group": everyone(machines)} | options
    if "backend" not in options:
        options = {"device": "cpu"} | options
    return streamer.wrap(model() if made is None else made, **options)


def a_step(made: nn.Module, optimizer: torch.optim.Optimizer, step: int, rank: int) -> None:
    """One backward of a rank's part, and the update."""
    backward(made, step, rank, 1, None)
    optimizer.step()
    optimizer.zero_grad()


def train(
    rank: int, size: int, cases: Mapping[str, Case], machines: int | str | None = None
) -> dict[str, Any]:
    """By case, what a rank's part of each batch leads to."""
    group = everyone(machines)
    return {
        name: run(
            [[size * number + rank] for number in range(backwards)],
            {**options, "process_group": group},
            divisor=backwards,
            **more,
        )
        for name, (backwards, options, more) in cases.items()
    }


@contextmanager
def noting_disk() -> Iterator[list[dict[str, int]]]:
    """What is on disk whenever a model is unwrapped."""
    there: list[dict[str, int]] = []
    unwrap = streamer.unwrap

    def noting(wrapped: nn.Module) -> nn.Module:
        there.append(dict(streamer.stats(wrapped).disk_bytes))
        return unwrap(wrapped)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(streamer, "unwrap", noting)
        yield there


#: Seconds that work of a lane may be late.
LATE = 2e-3


def random_delays(rank: int, seed: int) -> dict[Lane, Delay]:
    """Each lane late by other times on each rank."""
    draw = random.Random(seed * 10 + rank)
    return {
        lane: partial(draw.uniform, 0, late)
        for lane in WORKER_LANES
        if (late := draw.choice([0.0, LATE, 2 * LATE]))
    }


def train_alone(size: int, case: Case, **given: Any) -> Any:
    """The parts of all ranks, one after another."""
    backwards, options, more = case
    parts = [[*range(size * number, size * (number + 1))] for number in range(backwards)]
    return run(parts, options, divisor=size * backwards, **{**more, **given})
